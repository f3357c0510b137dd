"""Messages between peers over TCP: the peers that are known, their connections, and the threads.

One thread accepts connections. Each accepted connection has its own thread, for the handshake and for receiving. Each
outbound channel to a peer has its own thread for sending.
"""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from jaxdt.protocol.address import is_loopback, is_wildcard
from jaxdt.run.errors import BadInput
from jaxdt.runtime.identity.credential import Credential
from jaxdt.runtime.net import frame, handshake
from jaxdt.runtime.net.acceptor import Acceptor
from jaxdt.runtime.net.address import Address, check_address
from jaxdt.runtime.net.authentication import Authentication
from jaxdt.runtime.net.connection import Connection
from jaxdt.runtime.net.handshake import CHANNELS, HandshakeHello
from jaxdt.runtime.net.inbound_channel import InboundChannel, ReverseDialer
from jaxdt.runtime.net.options import Expect, Issue, LinkState, OnDeath, OnLink, OnMessage, Read, TransportLimits
from jaxdt.runtime.net.outbound_channel import OutboundChannel
from jaxdt.runtime.net.shaper import LinkShape, Shaper

_DROPPED_MAX = 128  # dropped peers whose received messages stay known
_COUNTERS = (
    "bytes_out",
    "messages_out",
    "resent_bytes",
    "bytes_in",
    "messages_in",
    "duplicates",
    "unwanted",
)


@dataclass(eq=False)
class _Peer:
    """The channels and dialers by which this side reaches one peer. `reverse_dialers` exist where the peer cannot dial
    this side; `wants_dial_back`: this side cannot dial the peer."""

    link_state: LinkState
    shaper: Shaper | None
    address: Address | None = None
    channels: dict[str, OutboundChannel] = field(default_factory=dict)
    reverse_dialers: list[ReverseDialer] = field(default_factory=list)
    wants_dial_back: bool = False

    def close(self, flush_s: float) -> None:
        """Send what is queued for at most flush_s, then end; report nothing more."""
        self.link_state.silence()
        for channel in self.channels.values():
            channel.close(flush_s)
        for reverse_dialer in self.reverse_dialers:
            reverse_dialer.close()

    def cut(self) -> None:
        """End the present outbound connections."""
        for channel in self.channels.values():
            channel.cut()


class Transport:
    """Sends and receives messages for one peer of a run; DESIGN section 7 describes the bytes.

    listen: (host, port) to accept on, port 0 for any free one. None for a peer that cannot be dialed: it opens the
        connections of both directions itself.
    credential: the credential of this peer. None means plaintext, which is for loopback addresses only, unless
        `allow_plaintext`.
    shape(dst): the link to emulate towards a peer, or None.
    incarnation: tells this process from others of the same peer id; that of a coordinator is its term.
    issue(token, request): for a coordinator, the certificate chain for a token's holder, or BadInput.

    The transport calls these functions from its own threads. They must return soon.

    on_message(src, head, leaves): a whole message has arrived. This is called once per message, also when the message
        needed several connections.
    on_link(peer, state, reason): `state` is "up", "down", "gone" when the peer's host refuses connections at
        its address, "refused", or "no way" when messages wait for a peer and neither side can dial the other ("no way"
        is repeated). `reason` is one line. `peer` is None for an accepted connection that was refused here: the other
        side has not shown that it is the peer whose id it gave.
    expect(src, head, table): returns the writable arrays to receive the leaves of [(dtype, shape), ...] into, or None
        to drop the message. This is called once per message with leaves, before anything is allocated for it.
    on_death(thread, error): a thread without which the transport does not work has died of a bug.
    read(head): parses a head, once per message; the result is the `head` of `on_message` and `expect`.

    When `on_message`, `expect` or `read` raises BadInput, the sender is at fault: the message is dropped, and `on_link`
    reports "refused".
    """

    def __init__(
        self,
        peer_id: int,
        run: str,
        *,
        on_message: OnMessage,
        on_link: OnLink = lambda peer, state, reason: None,
        expect: Expect = lambda src, head, table: None,
        on_death: OnDeath = lambda thread, error: None,
        read: Read = lambda head: head,
        listen: Address | None = None,
        credential: Credential | None = None,
        allow_plaintext: bool = False,
        shape: Callable[[int], LinkShape | None] = lambda dst: None,
        limits: TransportLimits = TransportLimits(),
        incarnation: int = 0,
        issue: Issue | None = None,
    ):
        self._peer_id = peer_id
        self._run = run
        self._on_link = on_link
        self._on_death = on_death
        self._receiving = {"on_message": on_message, "expect": expect, "read": read}
        self._listen = listen
        self._allows_plaintext = allow_plaintext or credential is not None
        self._authentication = Authentication(credential, issue)
        self._shape = shape
        self._limits = limits
        self._incarnation = incarnation
        if listen is not None:
            self._check_address("listen", listen)
        self._lock = threading.RLock()  # guards everything below
        self._peers: dict[int, _Peer] = {}
        self._inbound: dict[tuple[int, str], InboundChannel] = {}
        self._incarnations: dict[int, int] = {}  # of the peers that have greeted and were not dropped since
        self._sent_before: dict[int, Counter] = {}  # counters of connections to peers that were dropped
        self._dropped: dict[int, None] = {}  # dropped peers, oldest first; their inbound channels remain
        self._threads: set[threading.Thread] = set()
        self._unstarted: list[tuple[str, Callable[[], None], int]] = []  # arguments of _spawn
        self._acceptor: Acceptor | None = None
        self._closing = False

    def start(self) -> Address | None:
        """Begin to accept; returns the bound address, or None without one. BadInput when it cannot be bound."""
        if self._listen is None:
            return None
        self._acceptor = Acceptor(
            self._listen,
            self._authentication,
            self._limits,
            check=self._check_hello,
            welcome=self._welcome,
            # A process that is refused here has not shown that it is the peer whose id it gave.
            refused=lambda _, reason: self._on_link(None, "refused", reason),
            spawn=self._spawn,
        )
        self._spawn("accept", self._acceptor.run, is_vital=True)
        return self._acceptor.address

    def connect(self, peer: int, address: Address | None, incarnation: int | None = None) -> None:
        """Remember the address of a peer; the channels dial it from their own threads.

        With None the peer cannot be dialed: messages to it wait until the peer has dialed. `incarnation`: the process
        that is the peer. Another one is cut off; without it the process counts that has greeted first. BadInput for an
        invalid address, and for plaintext to an address that is not loopback.
        """
        if address is not None:
            self._check_address(handshake.name_of(peer), address)
            if is_wildcard(address[0]):
                raise BadInput(f"{handshake.name_of(peer)}: got {address[0]}, expected an address that can be dialled")
            if self._acceptor is not None:
                self._acceptor.expect_from(address[0])
        with self._lock:
            if self._closing:
                return
            known = self._known_peer(peer)
            if incarnation is not None and self._incarnations.get(peer, incarnation) != incarnation:
                for channel in self._inbound_channels_of(peer):
                    channel.cut()
            if incarnation is not None:
                self._incarnations[peer] = incarnation
            if address is not None:
                known.address = address
                for dialing in (*known.channels.values(), *known.reverse_dialers):
                    dialing.dial_to(address)
        if self._listen is None and address is not None:
            self._open_both(peer)
        elif self._listen is None:
            known.link_state.no_way("neither of the two listens (--listen=)")

    def pack(self, head: dict) -> frame.PackedHead:
        """A head that `send` takes as often as it goes out, and that is encoded only here."""
        return frame.PackedHead(frame.pack_head(head, self._limits), frame.view_of(head))

    def send(self, dst: int, head: dict | frame.PackedHead, leaves: Sequence = (), *, priority: int = 0) -> bool:
        """Queue a message; lower priority numbers go first. False when dst is unknown: never connected, or dropped.

        This never blocks. `leaves` (numpy or jax arrays) are read later, and again after a connection has broken: they
        must not be changed or donated any more. The frame header repeats the head's `view`.
        """
        leaves = tuple(leaves)
        table = frame.table_of(leaves, self._limits)
        packed = head if isinstance(head, frame.PackedHead) else self.pack(head)
        with self._lock:
            known = self._peers.get(dst)
            if known is None or self._closing:
                return False
            self._start_waiting_threads()
            name = "data" if table else "control"
            channel = known.channels.get(name) or self._start_channel(dst, known, name)
        total_bytes = sum(leaf.n_bytes for leaf in table)
        return channel.send(packed.raw, frame.pack_table(table), leaves, total_bytes, priority, packed.view)

    def queued_bytes(self, dst: int | None = None) -> int:
        """Payload bytes that are queued and not acknowledged yet, for one peer or the largest of all peers."""
        with self._lock:
            peers = self._peers.values() if dst is None else filter(None, [self._peers.get(dst)])
            return max((sum(channel.queued_bytes for channel in peer.channels.values()) for peer in peers), default=0)

    def stats(self) -> dict[int, dict[str, int]]:
        """Counters per peer since the start, unless it has been forgotten."""
        with self._lock:
            counters = {peer: Counter(sent) for peer, sent in self._sent_before.items()}
            sources = [(peer, channel) for peer, known in self._peers.items() for channel in known.channels.values()]
            sources += [(channel.peer, channel) for channel in self._inbound.values()]
            for peer in self._peers:
                counters.setdefault(peer, Counter(dict.fromkeys(_COUNTERS, 0)))
            for peer, channel in sources:
                total = counters.setdefault(peer, Counter(dict.fromkeys(_COUNTERS, 0)))
                total.update(channel.stats())
        return {peer: dict(total) for peer, total in counters.items()}

    def drop(self, peer: int) -> None:
        """Stop dialing a peer and forget what is queued for it. The peer may come back by itself, or by connect().

        The messages that have arrived from it stay known: if their acknowledgements were lost, the peer will send them
        again. They are forgotten when _DROPPED_MAX other peers have been dropped since.
        """
        with self._lock:
            self._incarnations.pop(peer, None)
            known = self._peers.pop(peer, None)
            if known is None:
                return
            known.close(flush_s=0.0)
            known.cut()
            for channel in known.channels.values():
                self._sent_before.setdefault(peer, Counter(dict.fromkeys(_COUNTERS, 0))).update(channel.stats())
            for channel in self._inbound_channels_of(peer):
                channel.drop()
            self._dropped[peer] = None
            if len(self._dropped) > _DROPPED_MAX:
                self._forget(next(iter(self._dropped)))

    def revoke(self, peers: Collection[int]) -> None:
        """Put these peers out for good: end their connections and refuse new ones."""
        with self._lock:
            self._authentication.revoke(peers)
            for peer in list(self._peers):
                if self._authentication.is_revoked(peer):
                    self.drop(peer)

    def close(self, flush_s: float) -> None:
        """Send what is queued for at most flush_s, then end all connections and threads."""
        deadline_s = time.monotonic() + flush_s
        with self._lock:
            self._closing = True
            self._unstarted.clear()
            peers = list(self._peers.values())
            for known in peers:
                known.close(flush_s)
            senders = {thread for thread in self._threads if "-send-" in thread.name}
        _join(senders, deadline_s)
        with self._lock:
            for known in peers:
                known.cut()
            for channel in self._inbound.values():
                channel.close()
            if self._acceptor is not None:
                self._acceptor.close()
            rest = set(self._threads)
        _join(rest, time.monotonic() + self._limits.handshake_s)

    # --- with the lock held ---

    def _inbound_channels_of(self, peer: int) -> list[InboundChannel]:
        return [self._inbound[peer, name] for name in CHANNELS if (peer, name) in self._inbound]

    def _forget(self, peer: int) -> None:
        """Forget what has arrived from a dropped peer. A thread that still serves a connection of it ends."""
        del self._dropped[peer]
        self._sent_before.pop(peer, None)
        for channel in self._inbound_channels_of(peer):
            channel.close()
        for name in CHANNELS:
            self._inbound.pop((peer, name), None)

    def _known_peer(self, peer: int) -> _Peer:
        self._dropped.pop(peer, None)
        if peer not in self._peers:
            shape = self._shape(peer)
            shaper = Shaper(shape, self._peer_id, peer) if shape else None
            self._peers[peer] = _Peer(LinkState(peer, self._on_link), shaper)
        return self._peers[peer]

    def _inbound_channel(self, peer: int, name: str) -> InboundChannel:
        if (peer, name) not in self._inbound:
            self._inbound[peer, name] = InboundChannel(peer, name, self._limits, **self._receiving)
        return self._inbound[peer, name]

    def _start_channel(self, peer: int, known: _Peer, name: str) -> OutboundChannel:
        channel = OutboundChannel(
            name,
            self._hello(peer, name, sends=True),
            self._authentication,
            known.link_state,
            known.shaper,
            self._limits,
            ask_back=functools.partial(self._ask_back, peer),
            dial_back=functools.partial(self._open_both, peer),
        )
        known.channels[name] = channel
        if known.address is not None:
            channel.dial_to(known.address)
        self._start_thread(f"send-{name}-{peer}", channel.run, peer)
        return channel

    def _start_reverse_dialer(self, peer: int, known: _Peer, address: Address, name: str) -> ReverseDialer:
        hello, channel = self._hello(peer, name, sends=False), self._inbound_channel(peer, name)
        reverse_dialer = ReverseDialer(address, hello, self._authentication, channel, known.link_state, self._limits)
        self._start_thread(f"receive-{name}-{peer}", reverse_dialer.run, peer)
        return reverse_dialer

    def _hello(self, peer: int, channel: str, sends: bool) -> Callable[..., HandshakeHello]:
        """Makes this side's greeting, when it has a session and its first sequence."""
        incarnation = self._incarnation
        return functools.partial(
            HandshakeHello, self._run, self._peer_id, peer, channel, sends, incarnation=incarnation
        )

    def _start_thread(self, name: str, target: Callable[[], None], peer: int) -> None:
        """Start a thread that a peer's messages need. If the system has no room for it, try again with each `send`."""
        try:
            self._spawn(name, target, peer, is_vital=True)
        except RuntimeError as error:
            self._unstarted.append((name, target, peer))
            self._on_link(peer, "refused", f"{name}: {error}, tried again")

    def _start_waiting_threads(self) -> None:
        while self._unstarted:
            try:
                self._spawn(*self._unstarted[0], is_vital=True)
            except RuntimeError:
                return
            del self._unstarted[0]

    def _spawn(self, name: str, target: Callable[[], None], peer: int | None = None, *, is_vital: bool = False) -> None:
        run = functools.partial(self._run_thread, target, peer, is_vital)
        thread = threading.Thread(target=run, name=f"jaxdt-{self._peer_id}-{name}", daemon=True)
        with self._lock:
            thread.start()
            self._threads.add(thread)  # the thread cannot end before this: it needs the lock to do so

    # --- in the threads, without the lock ---

    def _open_both(self, peer: int) -> None:
        """Open the connections of both directions to a peer that cannot dial this side."""
        with self._lock:
            known = self._peers.get(peer)
            if known is None or known.address is None or known.reverse_dialers or self._closing:
                return
            address = known.address
            known.reverse_dialers = [self._start_reverse_dialer(peer, known, address, name) for name in CHANNELS]

    def _ask_back(self, peer: int) -> None:
        """Tell a peer that this side cannot dial it: it greets again, and the answer says so."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None:
                known.wants_dial_back = True
                for channel in self._inbound_channels_of(peer):
                    channel.cut()

    def _run_thread(self, target: Callable[[], None], peer: int | None, is_vital: bool) -> None:
        try:
            target()
        except Exception as error:
            state = "refused" if peer is None else "down"
            self._on_link(peer, state, f"bug in {threading.current_thread().name}: {error!r}")
            if is_vital:
                self._on_death(threading.current_thread().name, error)
            raise
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _check_hello(self, hello: HandshakeHello) -> None:
        """HandshakeRefused for a connection that does not belong to this peer and run, or comes from a process whose
        place another one has taken."""
        handshake.check_hello(hello, self._run, self._peer_id)
        with self._lock:
            handshake.check_incarnation(hello, self._incarnations.get(hello.src, hello.incarnation))
            self._incarnations[hello.src] = hello.incarnation

    def _welcome(self, connection: Connection, hello: HandshakeHello) -> None:
        """Serve an accepted connection after its greeting: receive on it, or have an outbound channel send on it."""
        with self._lock:
            if self._closing or self._authentication.is_revoked(hello.src):
                connection.close()
                return
            known = self._known_peer(hello.src)
            inbound = self._inbound_channel(hello.src, hello.channel)
            outbound = None
            if not hello.sends:
                outbound = known.channels.get(hello.channel) or self._start_channel(hello.src, known, hello.channel)
        if outbound is not None:
            outbound.send_on(connection, hello)
            return
        answer = functools.partial(
            HandshakeHello, self._run, self._peer_id, hello.src, hello.channel, False, hello.session, 0
        )
        dial_back = known.wants_dial_back
        inbound.serve(
            connection,
            hello,
            known.link_state,
            send_welcome=lambda received: handshake.send_hello(
                connection, frame.WELCOME, answer(received, dial_back=dial_back)
            ),
        )

    def _check_address(self, name: str, address: Address) -> None:
        check_address(name, address)
        if not self._allows_plaintext and not is_loopback(address[0]):
            raise BadInput(f"{name}: got {address[0]} without a credential, expected a loopback address")


def _join(threads: set[threading.Thread], deadline_s: float) -> None:
    for thread in threads - {threading.current_thread()}:
        thread.join(max(0.0, deadline_s - time.monotonic()))
