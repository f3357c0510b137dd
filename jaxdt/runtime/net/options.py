"""What the owner of a transport chooses: its callbacks, its settings, and the limits of its connections."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdt.runtime.identity.certificate import SignedCertificate
from jaxdt.runtime.net.shaper import LinkShape

Read = Callable[[dict], Any]
OnMessage = Callable[[int, Any, list[np.ndarray]], None]
OnLink = Callable[[int | None, str, str], None]
Issue = Callable[[SignedCertificate, bytes], bytes]
Expect = Callable[[int, Any, list[tuple[np.dtype, tuple[int, ...]]]], list | None]


@dataclass(frozen=True)
class TransportCallbacks:
    """Functions that a transport calls from its own threads. They must return soon.

    on_message(src, head, leaves): a whole message has arrived. The transport calls it once per message, also when the
        message needed several connections.
    on_link(peer, state, reason): `state` is "up", "down" or "refused"; `reason` is one line. `peer` is None for a
        connection that was refused before its peer was known.
    expect(src, head, table): returns the writable arrays to receive the leaves of [(dtype, shape), ...] into, or None
        to drop the message. The transport asks once per message with leaves, before it allocates anything for it.
    read(head): parses a head, once per message; the result is the `head` of `on_message` and `expect`.

    When `on_message`, `expect` or `read` raises BadInput, the sender is at fault: the message is dropped, and `on_link`
    reports "refused".
    """

    on_message: OnMessage
    on_link: OnLink
    expect: Expect
    read: Read = lambda head: head


@dataclass(frozen=True)
class TransportLimits:
    """Sizes that a frame may claim, and how long a connection may make others wait.

    Sizes are checked before anything of that size is allocated. `chunk_bytes` is how much a sender writes before it
    looks at its queue again: a smaller chunk lets an urgent message overtake sooner; below about 256 KB throughput
    falls. `partial_max` bounds the unfinished messages of one session; a sender has at most one for each priority in
    use.
    """

    head_bytes_max: int = 1 << 20
    table_bytes_max: int = 1 << 20
    n_leaves_max: int = 1 << 14
    n_dims_max: int = 16
    payload_bytes_max: int = 1 << 34
    chunk_bytes: int = 1 << 20
    chunk_bytes_max: int = 1 << 22
    partial_max: int = 1024

    connect_s: float = 3.0  # until a host answers at all; the system repeats a lost packet after 1 s
    handshake_s: float = 10.0  # from the first packet to the end of the greeting
    idle_s: float = 30.0  # a frame that has begun and does not advance
    dead_link_s: float = 6.0  # unanswered keepalives or unacknowledged bytes
    backoff_s_min: float = 0.05
    backoff_s_max: float = 5.0
    n_greeting_max: int = 32  # accepted connections that have not identified themselves yet


@dataclass(frozen=True)
class TransportSettings:
    """`shape(dst)` is the link to emulate towards peer dst, or None for none. `allow_plaintext` permits addresses other
    than loopback without a credential. `issue(token, request)` is for a coordinator: the certificate chain for a
    token's holder, or BadInput."""

    shape: Callable[[int], LinkShape | None] | None = None
    limits: TransportLimits = TransportLimits()
    allow_plaintext: bool = False
    issue: Issue | None = None
