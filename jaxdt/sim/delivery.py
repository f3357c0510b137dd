"""Messages between simulated machines: over their link, together with the tensor that they name."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from jaxdt.protocol import events as ev
from jaxdt.protocol.message import WITH_TENSOR
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.work import WorkKind
from jaxdt.sim.active_faults import ActiveFaults
from jaxdt.sim.link_table import LinkTable
from jaxdt.sim.links import At, SimulatedLink
from jaxdt.sim.sim_peer import Outcome, Recorder, SimPeer
from jaxdt.sim.tensors import NoTensors


@dataclass(frozen=True)
class DeliveryOptions:
    """Options for the delivery of messages beyond their link. Tensors of the priorities in `free_priorities` arrive at
    once. With `handle_message(peer, callback, args)` each other message costs time at both of its ends. Without an own
    exchange the slices of one take the time of LinkOptions.exchange. `on_sent(peer, has_arrived)`: a peer has sent a
    boundary tensor, and it has arrived."""

    trace: Recorder | None = None
    free_priorities: Collection[int] = ()
    active_faults: ActiveFaults | None = None
    handle_message: Callable[..., None] | None = None
    has_own_exchange: bool = True
    on_sent: Callable[[int, bool], None] | None = None


class Delivery:
    """`handle_event(peer, event)` hands an event to a machine; a peer in `outcome.stopped` gets no tensors."""

    def __init__(
        self,
        at: At,
        links: LinkTable,
        peers: Mapping[int, SimPeer],
        outcome: Outcome,
        handle_event: Callable[[int, ev.Received], None],
        options: DeliveryOptions,
    ):
        self._at = at
        self._links = links
        self._peers = peers
        self._outcome = outcome
        self._handle_event = handle_event
        self._trace = options.trace
        self._free_priorities = options.free_priorities
        self._active_faults = options.active_faults
        self._handle_message = options.handle_message
        self._has_own_exchange = options.has_own_exchange
        self._on_sent = options.on_sent
        self._vectors: dict[RoundId, dict[int, list[tuple[int, Callable[..., None], tuple, int]]]] = defaultdict(dict)
        has_tensors = not all(isinstance(peer.tensors, NoTensors) for peer in peers.values())
        has_model = not self._has_own_exchange or self._on_sent is not None
        self._follows_tensors = bool(options.trace or options.free_priorities or has_tensors or has_model)

    def post(
        self, src: int, letters: Iterable[tuple[int, ev.Message, int]], priority: int, header: ev.Header | None
    ) -> None:
        """Send `letters`, each (dst, body, n_bytes), under one header, which the machine has filled in; see Post."""
        now_s = self._outcome.now_s
        links = self._links.links_from(src)
        event = None
        for dst, body, n_bytes in letters:
            if event is None or event.body is not body:
                event = ev.Received(header, body)  # pyright: ignore[reportArgumentType]  # no test for None per message
            arrive, args = self._handle_event, (dst, event)
            at_once = False
            if self._follows_tensors and type(body) in WITH_TENSOR:
                tensor = self._peers[src].tensors.tensor_to_send(body)
                arrive, args = self._arrive_with_tensor, (dst, ev.Received(event.header, body, tensor))
                at_once = priority in self._free_priorities
                if self._trace:
                    self._trace.send(src, now_s, dst, _tensor_key(body), n_bytes)
            if self._active_faults:
                arrive, args = self._arrive_under_faults, (src, dst, body, partial(arrive, *args))
            if at_once or (not self._has_own_exchange and type(body) is ev.Reduced):
                self._at(now_s, arrive, args)
                continue
            if not self._has_own_exchange and type(body) is ev.Shard:
                self._vectors[body.key.round].setdefault(src, []).append((dst, arrive, args, n_bytes))
                continue
            if self._on_sent and type(body) is ev.Boundary:
                self._on_sent(src, False)
                arrive, args = self._arrive_and_unblock, (src, arrive, args)
            link = links.get(dst) or self._links.link(src, dst)
            if self._handle_message:
                self._handle_message(
                    src, self._carry, (link, n_bytes, priority, self._handle_message, (dst, arrive, args))
                )
            else:
                link.carry(now_s, n_bytes, priority, arrive, args)
        if self._vectors:
            self._begin_exchanges(now_s)

    def _begin_exchanges(self, now_s: float) -> None:
        """The slices of an exchange arrive together, some time after all members have sent theirs."""
        for round in list(self._vectors):
            letters = self._vectors[round]
            members = sorted({member for src, sent in letters.items() for member in (src, *(one[0] for one in sent))})
            if len(letters) == len(members):
                sent = [one for src in members for one in letters[src]]
                n_bytes = sum(one[3] for one in sent) / (len(members) - 1)  # each sends all but its own shard
                backward_s = min(self._peers[member].seconds[WorkKind.BACKWARD] for member in members)
                end_s = now_s + self._links.exchange_s(members, n_bytes, backward_s)
                for _, arrive, args, _ in sent:
                    self._at(end_s, arrive, args)
                del self._vectors[round]

    def _arrive_and_unblock(self, src: int, arrive: Callable[..., None], args: tuple) -> None:
        assert self._on_sent is not None
        self._on_sent(src, True)
        arrive(*args)

    def _carry(
        self, link: SimulatedLink, n_bytes: int, priority: int, arrive: Callable[..., None], args: tuple
    ) -> None:
        link.carry(self._outcome.now_s, n_bytes, priority, arrive, args)

    def _arrive_with_tensor(self, dst: int, event: ev.Received) -> None:
        if dst in self._outcome.stopped:
            return
        if self._trace:
            self._trace.recv(dst, self._outcome.now_s, event.header.src, _tensor_key(event.body))
        self._handle_event(dst, event)

    def _arrive_under_faults(self, src: int, dst: int, body: ev.Message, deliver: Callable[[], None]) -> None:
        assert self._active_faults is not None
        self._active_faults.on_arrival(self._outcome.now_s, src, dst, body, deliver)


def _tensor_key(body: ev.Message) -> ev.Key | ev.SliceKey | ev.StateKey:
    """The key of the tensor that a message in WITH_TENSOR names."""
    return body.key  # pyright: ignore[reportAttributeAccessIssue]  # no second look at the kind for every message
