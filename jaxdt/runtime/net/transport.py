"""Messages between peers over TCP: who is known, who is connected, and the threads.

One thread accepts; each accepted connection has its own for greeting and receiving; each lane to a peer has its own
for sending. Callbacks come from these threads and must return soon: a receiver that waits in one reads nothing.
"""

import functools
import ipaddress
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxdt.runtime.net import frame, handshake
from jaxdt.runtime.net.acceptor import Acceptor
from jaxdt.runtime.net.connection import Address, Connection
from jaxdt.runtime.net.credential import Credential
from jaxdt.runtime.net.handshake import LANES, Hello
from jaxdt.runtime.net.inbound import Expect, Inbound, OnMessage, Read
from jaxdt.runtime.net.limits import Limits
from jaxdt.runtime.net.link_state import Link, OnLink
from jaxdt.runtime.net.outbound_channel import OutboundChannel
from jaxdt.runtime.net.reverse_dial import ReverseDialer
from jaxdt.runtime.net.shaper import Shape, Shaper
from jaxdt.spec.errors import BadInput

_DROPPED_MAX = 128  # peers of which we remember what has arrived

_OUT = ("bytes_out", "messages_out", "resent_bytes", "reconnects")
_IN = ("bytes_in", "messages_in", "duplicates", "unwanted")


@dataclass(eq=False)
class _Peer:
    link: Link
    shaper: Shaper | None
    address: Address | None = None
    lanes: dict[str, OutboundChannel] = field(default_factory=dict)
    pullers: list[ReverseDialer] = field(default_factory=list)

    def end(self, flush_s: float) -> None:
        self.link.silence()
        for lane in self.lanes.values():
            lane.close(flush_s)
        for puller in self.pullers:
            puller.close()

    def cut(self) -> None:
        for lane in self.lanes.values():
            lane.cut()


class Transport:
    """Sends and receives messages for peer `me` of `run`; see DESIGN section 7 for the wire.

    listen: (host, port) to accept on, port 0 for any free one; None for a peer that nobody can dial: it opens the
        connections of both directions itself.
    credential: None is plaintext, for loopback addresses only unless allow_plaintext.
    read(head): what a head stands for, made once per message; `on_message` and `expect` get that for `head`.
    on_message(src, head, leaves): a whole message is there. Once per message, also over reconnects.
    on_link(peer, state, reason): "up", "down" or "refused"; `reason` is one line. Peer is None for a connection that
        was refused before it had said who it is.
    expect(src, head, table): the writable arrays to receive the leaves of [(dtype, shape), ...] into, or None to
        drop the message; asked once per message with leaves, before anything is allocated for it.
    BadInput from these three is taken as the sender's fault: the message is dropped, on_link told "refused".
    shape(dst): the link to emulate towards dst, or None.
    """

    def __init__(
        self,
        me: int,
        run: str,
        listen: Address | None,
        credential: Credential | None,
        *,
        on_message: OnMessage,
        on_link: OnLink,
        expect: Expect,
        read: Read = lambda head: head,
        shape: Callable[[int], Shape | None] | None = None,
        limits: Limits = Limits(),
        allow_plaintext: bool = False,
    ):
        self._me = me
        self._run = run
        self._listen = listen
        self._credential = credential
        self._plaintext_anywhere = allow_plaintext
        self._read = read
        self._on_message = on_message
        self._on_link = on_link
        self._expect = expect
        self._shape = shape or (lambda dst: None)
        self._limits = limits
        if listen is not None:
            self._check_address("listen", listen)
        self._lock = threading.RLock()  # of everything below
        self._peers: dict[int, _Peer] = {}
        self._inbounds: dict[tuple[int, str], Inbound] = {}
        self._dropped: dict[int, None] = {}  # in the order in which they were; their inbounds outlive it
        self._threads: set[threading.Thread] = set()
        self._acceptor: Acceptor | None = None
        self._closing = False

    def start(self) -> Address | None:
        """Begin to accept; returns the address that was bound, None without one. BadInput when it cannot be bound."""
        if self._listen is None:
            return None
        self._acceptor = Acceptor(
            self._listen,
            self._credential.server_context if self._credential else None,
            self._limits,
            check=lambda theirs: handshake.check(theirs, self._run, self._me),
            welcome=self._welcome,
            refused=lambda peer, reason: self._on_link(peer, "refused", reason),
            spawn=self._spawn,
        )
        self._spawn("accept", self._acceptor.run)
        return self._acceptor.address

    def connect(self, peer: int, address: Address | None) -> None:
        """Remember where the peer is; lanes dial from their own threads. None: nobody can dial it, what is sent to it
        waits until it has dialled. BadInput for what is no address, and for plaintext off loopback."""
        if address is not None:
            self._check_address(handshake.name_of(peer), address)
        with self._lock:
            if self._closing:
                return
            known = self._peer(peer)
            if address is None:
                return
            known.address = address
            for dialling in (*known.lanes.values(), *known.pullers):
                dialling.dial_to(address)
            if self._listen is None and not known.pullers:
                known.pullers = [self._start_puller(peer, known, name) for name in LANES]

    def send(self, dst: int, head: dict, leaves: Sequence = (), *, priority: int = 0) -> bool:
        """Queue a message; lower priority numbers go first. False when dst is unknown: never connected, or dropped.

        Never blocks. `leaves` (numpy or jax arrays) are read later and, after a reconnect, again: they must not be
        changed or donated any more. A head's `view` is repeated in the frame header.
        """
        leaves = tuple(leaves)
        table = frame.table_of(leaves, self._limits)
        raw_head = frame.pack_head(head, self._limits)
        with self._lock:
            known = self._peers.get(dst)
            if known is None or self._closing:
                return False
            name = "data" if table else "control"
            lane = known.lanes.get(name) or self._start_lane(dst, known, name)
        total_bytes = sum(leaf.n_bytes for leaf in table)
        return lane.send(raw_head, frame.pack_table(table), leaves, total_bytes, priority, frame.view_of(head))

    def queued_bytes(self, dst: int | None = None) -> int:
        """Payload bytes taken by send() and not acknowledged yet, for one peer or the largest of all."""
        with self._lock:
            peers = self._peers.values() if dst is None else filter(None, [self._peers.get(dst)])
            return max((sum(lane.queued_bytes for lane in peer.lanes.values()) for peer in peers), default=0)

    def stats(self) -> dict[int, dict[str, int]]:
        """Counters per peer: out since it was connected, in since the start, of those who are not forgotten."""
        counts: dict[int, Counter] = {}
        with self._lock:
            for peer, known in self._peers.items():
                total = counts.setdefault(peer, Counter(dict.fromkeys(_OUT + _IN, 0)))
                for lane in known.lanes.values():
                    total.update({name: getattr(lane, name) for name in _OUT})
            for (peer, _), inbound in self._inbounds.items():
                total = counts.setdefault(peer, Counter(dict.fromkeys(_OUT + _IN, 0)))
                total.update({name: getattr(inbound, name) for name in _IN})
        return {peer: dict(total) for peer, total in counts.items()}

    def drop(self, peer: int) -> None:
        """Stop dialling a peer and forget what is queued for it. It may come back by itself, or by connect().

        What has arrived of it stays known, or it would be taken twice if its acknowledgement was lost: until so many
        others have been dropped since that a process that goes on with an old session is hardly to be expected."""
        with self._lock:
            known = self._peers.pop(peer, None)
            if known is None:
                return
            known.end(flush_s=0.0)
            known.cut()
            for inbound in self._inbounds_of(peer):
                inbound.drop()
            self._dropped[peer] = None
            if len(self._dropped) > _DROPPED_MAX:
                self._forget(next(iter(self._dropped)))

    def close(self, flush_s: float) -> None:
        """Send what is queued for at most flush_s, then end all connections and threads."""
        deadline_s = time.monotonic() + flush_s
        with self._lock:
            self._closing = True
            peers = list(self._peers.values())
            for known in peers:
                known.end(flush_s)
            senders = {thread for thread in self._threads if "-send-" in thread.name}
        _join(senders, deadline_s)
        with self._lock:
            for known in peers:
                known.cut()
            for inbound in self._inbounds.values():
                inbound.close()
            if self._acceptor is not None:
                self._acceptor.close()
            rest = set(self._threads)
        _join(rest, time.monotonic() + self._limits.handshake_s)

    # What follows is called with the lock held, down to the blank line.

    def _inbounds_of(self, peer: int) -> list[Inbound]:
        return [self._inbounds[peer, name] for name in LANES if (peer, name) in self._inbounds]

    def _forget(self, peer: int) -> None:
        """A peer that was dropped; a thread that still serves a connection of it ends now."""
        del self._dropped[peer]
        for inbound in self._inbounds_of(peer):
            inbound.close()
        for name in LANES:
            self._inbounds.pop((peer, name), None)

    def _peer(self, peer: int) -> _Peer:
        self._dropped.pop(peer, None)
        if peer not in self._peers:
            shape = self._shape(peer)
            shaper = Shaper(shape, self._me, peer) if shape else None
            self._peers[peer] = _Peer(Link(peer, self._on_link), shaper)
        return self._peers[peer]

    def _inbound(self, peer: int, name: str) -> Inbound:
        if (peer, name) not in self._inbounds:
            self._inbounds[peer, name] = Inbound(peer, name, self._read, self._on_message, self._expect, self._limits)
        return self._inbounds[peer, name]

    def _start_lane(self, peer: int, known: _Peer, name: str) -> OutboundChannel:
        hello = functools.partial(Hello, self._run, self._me, peer, name, True)
        lane = OutboundChannel(name, hello, self._client_context, known.link, known.shaper, self._limits)
        known.lanes[name] = lane
        if known.address is not None:
            lane.dial_to(known.address)
        self._spawn(f"send-{name}-{peer}", lane.run, peer)
        return lane

    def _start_puller(self, peer: int, known: _Peer, name: str) -> ReverseDialer:
        hello = functools.partial(Hello, self._run, self._me, peer, name, False)
        inbound = self._inbound(peer, name)
        puller = ReverseDialer(known.address, hello, self._client_context, inbound, known.link, self._limits)
        self._spawn(f"pull-{name}-{peer}", puller.run, peer)
        return puller

    def _spawn(self, name: str, target: Callable[[], None], peer: int | None = None) -> None:
        run = functools.partial(self._run_thread, target, peer)
        thread = threading.Thread(target=run, name=f"jaxdt-{self._me}-{name}", daemon=True)
        with self._lock:
            self._threads.add(thread)
            thread.start()

    # What follows runs in the threads, without the lock.

    def _run_thread(self, target: Callable[[], None], peer: int | None) -> None:
        try:
            target()
        except Exception as error:
            state = "refused" if peer is None else "down"
            self._on_link(peer, state, f"bug in {threading.current_thread().name}: {error!r}")
            raise
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _welcome(self, wire: Connection, theirs: Hello) -> None:
        """Serve a connection whose greeting was heard: receive on it, or give it to the lane that sends on it."""
        with self._lock:
            if self._closing:
                wire.close()
                return
            known = self._peer(theirs.me)
            inbound = self._inbound(theirs.me, theirs.lane)
            if not theirs.sends:
                lane = known.lanes.get(theirs.lane) or self._start_lane(theirs.me, known, theirs.lane)
        if theirs.sends:
            hello = functools.partial(Hello, self._run, self._me, theirs.me, theirs.lane, False, theirs.session, 0)
            inbound.serve(wire, theirs, known.link, lambda have: handshake.say(wire, frame.WELCOME, hello(have)))
        else:
            lane.take_over(wire, theirs)

    @property
    def _client_context(self) -> ssl.SSLContext | None:
        return self._credential.client_context if self._credential else None

    def _check_address(self, name: str, address: Address) -> None:
        if not _is_host(address[0]) or not 0 <= address[1] < 1 << 16:
            raise BadInput(f"{name}: got {address[0]!r}:{address[1]}, expected a host name or address and a port")
        if self._credential is None and not self._plaintext_anywhere and not _is_loopback(address[0]):
            raise BadInput(f"{name}: got {address[0]} without a credential, expected a loopback address")


def _is_host(host: str) -> bool:
    """Whether the resolver takes it: it raises other exceptions than OSError for the rest."""
    try:
        return bool(host.encode("idna")) and "\0" not in host
    except UnicodeError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _join(threads: set[threading.Thread], deadline_s: float) -> None:
    for thread in threads - {threading.current_thread()}:
        thread.join(max(0.0, deadline_s - time.monotonic()))
