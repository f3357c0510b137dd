"""Faults that are active now: slow devices, clogged or cut links, messages that come twice or out of order.

A message passes through `on_arrival` when its link delivers it. Where a pair is blocked it waits there, and arrives in
order when the pair is free again, as with a transport that reconnects and resends.

HARMLESS lists the messages that may come twice or late: those that step_protocol Sec. 5.5, 5.6 and 11 call harmless,
and those that the machines make harmless by naming their round or lease, or by carrying a running total. The transport
alone guarantees exactly-once delivery for the others: Grant, Resend and Boundary (a second one computes and counts a
microbatch again, as grants have no lease number), Inventory (a second one makes a router give out again what it has
just given out) and what a peer sends before the first view. In another generation any message is harmless, so LATE
delivers boundary tensors again once their receiver has been told of a rollback, each right behind the new generation's
tensor of the same key, which may still wait to be used.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

from jaxdt.protocol import events as ev
from jaxdt.protocol.message import tensor_key
from jaxdt.sim.faults import (
    CLOG,
    CONTROL,
    CRASH,
    CRASH_SEEN_S,
    CUT,
    DATA,
    DUPLICATE,
    FAIL,
    LATE,
    POWER_OFF,
    REORDER,
    SLOW,
    Fault,
)
from jaxdt.sim.link_table import LinkTable

HARMLESS = frozenset(
    {
        ev.Prepared,
        ev.Committed,
        ev.View,
        ev.Shard,
        ev.Reduced,
        ev.FetchResult,
        ev.Progress,
        ev.Heartbeat,
        ev.HeartbeatAck,
        ev.Suspect,
        ev.Done,
        ev.Ended,
    }
    | {ev.Enlist, ev.Enlisted, ev.WantsTasks, ev.TaskLease, ev.TaskDone, ev.TaskOutput, ev.ContributionWanted}
)
TAMPERED_PROB = 0.4
DELAY_S_MAX = 3.0

Deliver = Callable[[], None]
ChannelKey = tuple[int, int, str]  # (src, dst, channel)


class ActiveFaults:
    """`at(when_s, callback)` is the event queue's, `handle_event(peer, event)` hands an event to a machine."""

    def __init__(
        self, at: Callable[[float, Deliver], None], handle_event: Callable[[int, ev.Event], None], links: LinkTable
    ):
        self._at = at
        self._handle_event = handle_event
        self._links = links
        self._slow: dict[int, list[float]] = defaultdict(list)
        self._clogged: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._blocks: dict[ChannelKey, list[Fault]] = defaultdict(list)
        self._held_messages: dict[ChannelKey, list[Deliver]] = defaultdict(list)
        self._tampering: dict[tuple[int, int], list[tuple[str, random.Random]]] = defaultdict(list)
        self._late: set[tuple[int, int]] = set()
        self._copies: dict[int, dict[ev.Key, Deliver]] = defaultdict(dict)  # by receiver: of the present generation
        self._stale: dict[int, dict[ev.Key, Deliver]] = defaultdict(dict)  # likewise: of an earlier one
        self._hung_up: set[tuple[int, int]] = set()  # who has ended a connection, and who has not dialled again yet
        self._dead: set[int] = set()
        self._silenced: set[int] = set()
        self._begin = {
            SLOW: self._slow_down,
            CLOG: self._clog,
            CUT: self._block,
            DUPLICATE: self._tamper,
            REORDER: self._tamper,
            LATE: self._keep_copies,
            CRASH: self._end_process,
            FAIL: self._end_process,
            POWER_OFF: self._end_process,
        }

    def slow_factor(self, peer: int) -> float:
        """The factor on the seconds of Work that the peer begins now."""
        return math.prod(self._slow[peer])

    def begin(self, now_s: float, fault: Fault) -> None:
        """Begin a fault, and register its end."""
        if fault.kind not in self._begin:
            raise ValueError(f"simulation: cannot do {fault}")
        self._begin[fault.kind](now_s, fault)

    def on_connect(self, now_s: float, peer: int, other: int) -> None:
        """A peer that dials over a link that is known to be cut learns that the link is down."""
        if any(now_s >= fault.at_s + fault.breaks_s for fault in self._cuts(peer, other)):
            self._at(now_s + CRASH_SEEN_S, partial(self._connect_failed, peer, other))

    def answers(self, peer: int, other: int) -> bool:
        """Whether the host of `peer` is on, and its answers reach `other`."""
        return peer not in self._silenced and not self._blocks.get((peer, other, CONTROL))

    def _connect_failed(self, peer: int, other: int) -> None:
        """Nothing is reported if the link has healed meanwhile: no later event would say that the link is up."""
        if self._cuts(peer, other):
            self._handle_event(peer, ev.LinkChanged(other, False, CUT))

    def _seen_cuts(self, peer: int, other: int) -> list[Fault]:
        """The cuts between the two that last so long that both ends see them, and their end."""
        return [fault for fault in self._cuts(peer, other) if fault.seconds > fault.breaks_s]

    def _cuts(self, peer: int, other: int) -> list[Fault]:
        return [fault for fault in self._blocks.get((peer, other, CONTROL), ()) if fault.kind == CUT]

    def on_disconnect(self, now_s: float, peer: int, other: int) -> None:
        """The other end sees the connection break and dials again with success, unless it is gone or the link cut, or
        it ends the connection too."""
        if (other, peer) in self._hung_up:
            self._hung_up.remove((other, peer))
        elif other not in self._dead and not self._blocks.get((other, peer, CONTROL)):
            self._hung_up.add((peer, other))
            self._at(now_s + CRASH_SEEN_S, partial(self._handle_event, other, ev.LinkChanged(peer, False, "hung up")))
            self._at(now_s + 2 * CRASH_SEEN_S, partial(self._dial_again, other, peer))

    def _dial_again(self, peer: int, other: int) -> None:
        if (other, peer) in self._hung_up:
            self._hung_up.remove((other, peer))
            if not self._seen_cuts(peer, other):
                self._handle_event(peer, ev.LinkChanged(other, True, "hung up"))

    def on_arrival(self, now_s: float, src: int, dst: int, body: ev.Message, deliver: Deliver) -> None:
        """A message comes out of its link."""
        if src in self._silenced:
            return
        if self._late or self._stale:
            deliver = self._with_late_copy(now_s, src, dst, body, deliver)
        for kind, rng in self._tampering.get((src, dst), ()):
            if type(body) in HARMLESS and rng.random() < TAMPERED_PROB:
                late = partial(self._deliver_or_hold, src, dst, body, deliver)
                self._at(now_s + rng.uniform(0.0, DELAY_S_MAX), late)
                if kind == REORDER:
                    return
        self._deliver_or_hold(src, dst, body, deliver)

    def _with_late_copy(self, now_s: float, src: int, dst: int, body: ev.Message, deliver: Deliver) -> Deliver:
        """The delivery of a message while tensors are late. A rollback view that may itself be held or delayed changes
        nothing, since it is not known when the receiver gets it."""
        if type(body) is ev.View and body.rolled_back:
            if not self._tampering.get((src, dst)) and not self._blocks.get((src, dst, CONTROL)):
                self._stale[dst] |= self._copies.pop(dst, {})
        elif type(body) is ev.Boundary:
            if (src, dst) in self._late:
                self._copies[dst][body.key] = deliver
            if stale := self._stale[dst].pop(body.key, None):
                return partial(_both, deliver, stale)
        return deliver

    def _deliver_or_hold(self, src: int, dst: int, body: ev.Message, deliver: Deliver) -> None:
        key = (src, dst, CONTROL if tensor_key(body) is None else DATA)
        if not self._blocks.get(key):
            deliver()
        elif src not in self._dead:
            self._held_messages[key].append(deliver)

    def _slow_down(self, now_s: float, fault: Fault) -> None:
        self._slow[fault.peer].append(fault.factor)
        self._at(now_s + fault.seconds, partial(self._slow[fault.peer].remove, fault.factor))

    def _clog(self, now_s: float, fault: Fault) -> None:
        if fault.factor:
            self._limit_bandwidth(now_s, fault)
        else:
            self._block(now_s, fault)

    def _end_process(self, now_s: float, fault: Fault) -> None:
        """Messages that a cut or clog holds are lost: no process is left to resend them."""
        self._dead.add(fault.peer)
        if fault.kind == POWER_OFF:
            self._silenced.add(fault.peer)
        for src, dst, channel in self._held_messages:
            if src == fault.peer:
                self._held_messages[src, dst, channel].clear()

    def revive(self, peer: int) -> None:
        """A process of this peer runs again."""
        self._dead.discard(peer)
        self._silenced.discard(peer)

    def _limit_bandwidth(self, now_s: float, fault: Fault) -> None:
        for pair in _pairs(fault):
            self._clogged[pair].append(fault.factor)
            self._set_bandwidth(pair)
            self._at(now_s + fault.seconds, partial(self._unclog, pair, fault.factor))

    def _unclog(self, pair: tuple[int, int], factor: float) -> None:
        self._clogged[pair].remove(factor)
        self._set_bandwidth(pair)

    def _set_bandwidth(self, pair: tuple[int, int]) -> None:
        src, dst = pair
        self._links.link(src, dst).set_bandwidth_factor(math.prod(self._clogged[pair]))

    def _tamper(self, now_s: float, fault: Fault) -> None:
        for pair in _pairs(fault):
            tampering = (fault.kind, random.Random(f"{fault} {pair}"))
            self._tampering[pair].append(tampering)
            self._at(now_s + fault.seconds, partial(self._tampering[pair].remove, tampering))

    def _keep_copies(self, now_s: float, fault: Fault) -> None:
        self._late |= set(_pairs(fault))
        self._at(now_s + fault.seconds, self._late.clear)

    def _block(self, now_s: float, fault: Fault) -> None:
        if fault.seconds > fault.breaks_s and not fault.channel:  # one channel that stands still does not break a link
            self._at(now_s + fault.breaks_s, partial(self._report_link, fault, False))
            self._at(now_s + fault.seconds, partial(self._report_link, fault, True))
        channels = (fault.channel,) if fault.channel else (CONTROL, DATA)
        for src, dst in _pairs(fault):
            for channel in channels:
                self._blocks[src, dst, channel].append(fault)
                self._at(now_s + fault.seconds, partial(self._unblock, (src, dst, channel), fault))

    def _unblock(self, key: ChannelKey, fault: Fault) -> None:
        self._blocks[key].remove(fault)
        if not self._blocks[key]:
            held = self._held_messages[key]
            self._held_messages[key] = []
            for deliver in held:
                deliver()

    def _report_link(self, fault: Fault, up: bool) -> None:
        """Both ends of each pair see that their link breaks or is up again, unless another cut keeps it down."""
        for peer in fault.peers:
            for other in fault.others:
                for end, far_end in ((peer, other), (other, peer)):
                    is_cut = up and any(cut is not fault for cut in self._seen_cuts(end, far_end))
                    if far_end not in self._dead and not is_cut:
                        self._handle_event(end, ev.LinkChanged(far_end, up, "" if up else fault.kind))


def _both(deliver: Deliver, late: Deliver) -> None:
    deliver()
    late()


def _pairs(fault: Fault) -> Iterable[tuple[int, int]]:
    """The directed pairs that a fault of links concerns."""
    outward = [(src, dst) for src in fault.peers for dst in fault.others]
    return outward + [(dst, src) for src, dst in outward] if fault.kind == CUT else outward
