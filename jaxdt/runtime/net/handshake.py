"""The handshake of a connection: who speaks, for which run and channel, and what has arrived already.

With a credential the handshake begins with TLS, in which each side sends its share of the keys; the greeting is the
first that travels under those keys, and the peer id in it must be the one of the sender's certificate. Without a
credential the handshake is the greeting alone.

A process with a token sends a REQUEST in place of the greeting, and the coordinator answers with a CERTIFICATE.

The dialing side sends a GREETING. The other side answers with a WELCOME, or with a REFUSED and its reason. Either side
may be the one that will send messages (`sends`): a peer that cannot be dialed opens the connections of both directions
itself. The sender names its session and the oldest message that it still holds; the receiver lists what it has received
of that session.
"""

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.runtime.identity import certificate
from jaxdt.runtime.identity.certificate import Holder, SignedCertificate
from jaxdt.runtime.identity.credential import Credential
from jaxdt.runtime.net import frame
from jaxdt.runtime.net.aead_records import SHARE_BYTES, AeadRecords
from jaxdt.runtime.net.connection import Connection
from jaxdt.runtime.net.frame import FrameError
from jaxdt.runtime.net.options import TransportLimits

CHANNELS = ("data", "control")
N_RANGES = 256  # a greeting has no room for more; the sender repeats the rest, and the receiver drops it
_LIMITS = TransportLimits(head_bytes_max=1 << 14, table_bytes_max=0, payload_bytes_max=0, n_leaves_max=2 * N_RANGES)

# The fields of a GREETING and a WELCOME: name in the frame, name in HandshakeHello, type.
_FIELDS = (
    ("run", "run", str),
    ("me", "src", int),
    ("to", "dst", int),
    ("lane", "channel", str),
    ("sends", "sends", bool),
    ("session", "session", int),
    ("oldest", "oldest", int),
    ("have", "received", list),
    ("incarnation", "incarnation", int),
)


class HandshakeRefused(Exception):
    """One line: why the two sides of a connection do not belong together."""


@dataclass(frozen=True)
class HandshakeHello:
    """The greeting of each side: peer `src` wants to talk to peer `dst` on a channel.

    `sends` is true for the side that will send messages. `session` identifies that side's sequence of messages, and
    `oldest` is the first message that it still holds. `received` lists the messages that the other side has, as
    inclusive ranges. `incarnation` tells the processes of one peer apart; that of a coordinator is its term.
    `dial_back`: this side cannot dial the other side, so that one must open the connections of both directions.
    """

    run: str
    src: int
    dst: int
    channel: str
    sends: bool
    session: int
    oldest: int = 0
    received: Sequence[Sequence[int]] = ()
    incarnation: int = 0
    dial_back: bool = False


def parse_hello(head: dict) -> HandshakeHello:
    """The checked content of a GREETING or WELCOME frame; FrameError."""
    for name, _, kind in _FIELDS:
        if type(head.get(name)) is not kind:
            raise FrameError(f"greeting: {name}: got {head.get(name)!r:.40}, expected {kind.__name__}")
    if not all(isinstance(pair, list) and len(pair) == 2 and {type(n) for n in pair} == {int} for pair in head["have"]):
        raise FrameError("greeting: have: expected pairs of integers")
    dial_back = head.get("dial_back") is True
    return HandshakeHello(**{field: head[name] for name, field, _ in _FIELDS}, dial_back=dial_back)


def check_hello(hello: HandshakeHello, run: str, peer_id: int) -> None:
    """HandshakeRefused unless the other side means this peer of this run.

    Newcomers and operators do not know the name of the run; only the coordinator accepts them.
    """
    is_outsider = peer_id == ev.COORDINATOR and hello.src >= ev.TEMPORARY_IDS and hello.run == ""
    if hello.run != run and not is_outsider:
        told = f"{name_of(hello.src)} is of run {hello.run!r:.120}, {name_of(peer_id)} of {run!r}"
        raise HandshakeRefused(f"run: {told}{_what_differs(hello.run, run)}")
    if hello.dst != peer_id:
        raise HandshakeRefused(f"peer: {name_of(hello.src)} wants {name_of(hello.dst)}, this is {name_of(peer_id)}")
    if hello.channel not in CHANNELS:
        raise HandshakeRefused(f"channel: got {hello.channel!r:.40}, expected one of {', '.join(CHANNELS)}")


def _what_differs(theirs: str, own: str) -> str:
    """The difference between two names of runs (RUN, config DIGEST, plan DIGEST, tokens DIGEST), and what to do about
    it; '' for other names."""
    other, here = theirs.split(", "), own.split(", ")
    if not len(other) == len(here) == 4:
        return ""
    if other[0] != here[0]:
        return ": files of two launches; each host needs those of the last one"
    parts = ", ".join(mine.split()[0] for others, mine in zip(other, here, strict=True) if others != mine)
    return f": they differ in {parts}; give each process the same files and the same --config flags"


def check_incarnation(hello: HandshakeHello, known: int) -> None:
    """HandshakeRefused for a process other than the one that is `known` as this peer, until that one is dropped. Of
    coordinators the later one counts."""
    if hello.src == ev.COORDINATOR and hello.incarnation < known:
        raise HandshakeRefused(f"coordinator: its term {hello.incarnation} is over, term {known} has begun")
    if hello.src != ev.COORDINATOR and hello.incarnation != known:
        raise HandshakeRefused(f"{name_of(hello.src)}: another process has taken its place")


def name_of(peer: int) -> str:
    """The name of a peer in messages to people."""
    if peer >= ev.OPERATOR_IDS:
        return "an operator"
    if peer >= ev.TEMPORARY_IDS:
        return "a process that asks to be a peer"
    return "coordinator" if peer == ev.COORDINATOR else f"peer {peer}"


def check_certificate(shown: SignedCertificate, peer: int) -> None:
    """HandshakeRefused unless the certificate that the other side has shown is that of `peer`."""
    if shown.holder != _required_holder(peer):
        raise HandshakeRefused(
            f"certificate: got that of {shown.holder}, expected that of {_required_holder(peer)} from {name_of(peer)}"
        )


def _required_holder(peer: int) -> Holder:
    """A newcomer asks under a temporary id, which has the peer id of its certificate in it."""
    if peer == ev.COORDINATOR:
        return Holder(certificate.COORDINATOR)
    if peer >= ev.OPERATOR_IDS:
        return Holder(certificate.OPERATOR)
    return Holder(certificate.PEER, peer % ev.PEER_IDS)


def secure(connection: Connection, credential: Credential, is_dialer: bool) -> SignedCertificate:
    """Exchange shares of the keys within mutual TLS 1.3, then leave TLS; returns the certificate of the other side.
    HandshakeRefused, FrameError or OSError.

    The dialing side sends its share first, and greets after it has read the other share. So each side has read all that
    the other sends in TLS before the other sends a record, whatever the library reads ahead.
    """
    context = credential.client_context if is_dialer else credential.server_context
    connection.enter_tls(context, server_side=not is_dialer)
    shown = connection.certificate_of_other_side()
    own_share = secrets.token_bytes(SHARE_BYTES)
    if is_dialer:
        _write(connection, frame.KEYS, {"share": own_share})
        peer_share = _read_key_share(connection)
    else:
        peer_share = _read_key_share(connection)
        _write(connection, frame.KEYS, {"share": own_share})
    connection.leave_tls(AeadRecords(own_share, peer_share, is_dialer))
    try:
        return credential.read_certificate(shown)
    except BadInput as error:
        raise HandshakeRefused(str(error)) from None


def request_certificate(connection: Connection, request: bytes) -> bytes:
    """Ask for the certificate of a key, from the side of a token's holder; returns the chain (PEM). HandshakeRefused,
    FrameError or OSError."""
    _write(connection, frame.REQUEST, {"request": request})
    return _bytes_of(_read_answer(connection, frame.CERTIFICATE), "chain")


def answer_request(connection: Connection, issue: Callable[[bytes], bytes]) -> None:
    """Answer a token's holder; `issue` raises BadInput to refuse. HandshakeRefused, FrameError or OSError."""
    request = _bytes_of(read_frame(connection, (frame.REQUEST,)), "request")
    try:
        chain = issue(request)
    except BadInput as error:
        raise HandshakeRefused(str(error)) from None
    _write(connection, frame.CERTIFICATE, {"chain": chain})


def greet(connection: Connection, hello: HandshakeHello) -> HandshakeHello:
    """Greet from the dialing side; returns the other side's answer. HandshakeRefused, FrameError or OSError."""
    send_hello(connection, frame.GREETING, hello)
    answer = parse_hello(_read_answer(connection, frame.WELCOME).head)
    check_hello(answer, hello.run or answer.run, hello.src)
    if answer.src != hello.dst:
        raise HandshakeRefused(f"peer: its address answers as {name_of(answer.src)}, expected {name_of(hello.dst)}")
    return answer


def send_hello(connection: Connection, kind: int, hello: HandshakeHello) -> None:
    """Write a GREETING or a WELCOME."""
    head = {name: getattr(hello, field) for name, field, _ in _FIELDS} | {"dial_back": hello.dial_back}
    _write(connection, kind, head)


def send_refusal(connection: Connection, reason: str) -> None:
    """Write a REFUSED. It is no error if the peer does not wait for it and has ended the connection."""
    with contextlib.suppress(OSError):
        _write(connection, frame.REFUSED, {"reason": reason})


def read_frame(connection: Connection, kinds: Sequence[int]) -> frame.Frame:
    """The next frame of a handshake, which must be small; FrameError or OSError."""
    frames: list[frame.Frame] = []
    for buffer, _ in frame.parse(_LIMITS, kinds, buffers_for=lambda _: (), on_frame=frames.append):
        if frames:
            break
        connection.read_exactly(buffer)
    return frames[0]


def _read_answer(connection: Connection, kind: int) -> frame.Frame:
    answer = read_frame(connection, (kind, frame.REFUSED))
    if answer.kind == frame.REFUSED:
        raise HandshakeRefused(" ".join(str(answer.head.get("reason")).split())[:300])
    return answer


def _read_key_share(connection: Connection) -> bytes:
    share = _bytes_of(_read_answer(connection, frame.KEYS), "share")
    if len(share) != SHARE_BYTES:
        raise FrameError(f"share of the keys: expected {SHARE_BYTES} bytes")
    return share


def _write(connection: Connection, kind: int, head: dict) -> None:
    connection.write(frame.pack(kind, frame.pack_head(head, _LIMITS)))


def _bytes_of(answer: frame.Frame, name: str) -> bytes:
    value = answer.head.get(name)
    if type(value) is not bytes:
        raise FrameError(f"{frame.KINDS[answer.kind]}: {name}: expected bytes")
    return value
