"""What is wrong with links and devices of a simulation now: slow, clogged, cut, out of order.

Messages pass through `arrive` when their link delivers them. Where a pair is blocked they wait there, and come in
their order when it is free again: what a transport does that reconnects and resends.

Messages that may come twice or late: those that step_protocol Sec. 5.5, 5.6 and 11 call harmless, and those that the
machines make harmless by naming their round or being a sum of what was said. Exactly once, by the transport alone, come
Grant, Resend and Boundary (a second one computes and counts a microbatch again, as grants have no lease number),
Inventory (a second one makes a router give out again what it has just given out) and what a peer says before the first
view.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

from jaxdt.protocol.events import (
    Committed,
    Done,
    Ended,
    Event,
    FetchResult,
    Heartbeat,
    HeartbeatAck,
    LinkChanged,
    Message,
    Prepared,
    Progress,
    Reduced,
    Shard,
    Suspect,
    View,
)
from jaxdt.protocol.message import tensor_key
from jaxdt.sim.faults import CLOG, CONTROL, CRASH, CRASH_SEEN_S, CUT, DATA, DUPLICATE, POWER_OFF, REORDER, SLOW, Fault
from jaxdt.sim.link_table import LinkTable

HARMLESS = frozenset(
    {Prepared, Committed, View, Shard, Reduced, FetchResult, Progress, Heartbeat, HeartbeatAck, Suspect, Done, Ended}
)
SOMETIMES = 0.4
LATE_S = 3.0

Deliver = Callable[[], None]
Way = tuple[int, int, str]


class ActiveFaults:
    """`at(when_s, happen)` is the calendar's, `tell(peer, event)` hands an event to a machine."""

    def __init__(self, at: Callable[[float, Deliver], None], tell: Callable[[int, Event], None], lines: LinkTable):
        self._at, self._tell, self._lines = at, tell, lines
        self._slow: dict[int, list[float]] = defaultdict(list)
        self._narrow: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._blocks: dict[Way, list[Fault]] = defaultdict(list)
        self._held: dict[Way, list[Deliver]] = defaultdict(list)
        self._tampering: dict[tuple[int, int], list[tuple[str, random.Random]]] = defaultdict(list)
        self._dead: set[int] = set()
        self._silenced: set[int] = set()
        self._begin = {
            SLOW: self._slow_down,
            CLOG: self._clog,
            CUT: self._block,
            DUPLICATE: self._tamper,
            REORDER: self._tamper,
            CRASH: self._end,
            POWER_OFF: self._end,
        }

    def slowness(self, peer: int) -> float:
        """How many times as long Work takes that the peer begins now."""
        return math.prod(self._slow[peer])

    def begin(self, now_s: float, fault: Fault) -> None:
        """The fault begins; its end is in the calendar then."""
        if fault.kind not in self._begin:
            raise ValueError(f"simulation: cannot do {fault}")
        self._begin[fault.kind](now_s, fault)

    def dial(self, now_s: float, peer: int, other: int) -> None:
        """Who wants to reach somebody over a link that is known to be cut learns that it is."""
        if any(now_s >= fault.at_s + fault.breaks_s for fault in self._cuts(peer, other)):
            self._at(now_s + CRASH_SEEN_S, partial(self._dialled, peer, other))

    def _dialled(self, peer: int, other: int) -> None:
        """In vain, unless the link has healed meanwhile: nobody would say again that it is up."""
        if self._cuts(peer, other):
            self._tell(peer, LinkChanged(other, False, CUT))

    def _cuts(self, peer: int, other: int) -> list[Fault]:
        return [fault for fault in self._blocks.get((peer, other, CONTROL), ()) if fault.kind == CUT]

    def hang_up(self, now_s: float, peer: int, other: int) -> None:
        """Who is put off sees the connection break, and dials again with success, unless it is gone or the link cut."""
        if other not in self._dead and not self._blocks.get((other, peer, CONTROL)):
            for after_s, up in ((CRASH_SEEN_S, False), (2 * CRASH_SEEN_S, True)):
                self._at(now_s + after_s, partial(self._tell, other, LinkChanged(peer, up, "hung up")))

    def arrive(self, now_s: float, src: int, dst: int, body: Message, deliver: Deliver) -> None:
        """A message comes out of its link."""
        if src in self._silenced:
            return
        for kind, rng in self._tampering.get((src, dst), ()):
            if type(body) in HARMLESS and rng.random() < SOMETIMES:
                late = partial(self._pass, src, dst, body, deliver)
                self._at(now_s + rng.uniform(0.0, LATE_S), late)
                if kind == REORDER:
                    return
        self._pass(src, dst, body, deliver)

    def _pass(self, src: int, dst: int, body: Message, deliver: Deliver) -> None:
        way = (src, dst, CONTROL if tensor_key(body) is None else DATA)
        if not self._blocks.get(way):
            deliver()
        elif src not in self._dead:
            self._held[way].append(deliver)

    def _slow_down(self, now_s: float, fault: Fault) -> None:
        self._slow[fault.peer].append(fault.factor)
        self._at(now_s + fault.seconds, partial(self._slow[fault.peer].remove, fault.factor))

    def _clog(self, now_s: float, fault: Fault) -> None:
        (self._squeeze if fault.factor else self._block)(now_s, fault)

    def _end(self, now_s: float, fault: Fault) -> None:
        """Nobody resends what a process held that is gone."""
        self._dead.add(fault.peer)
        if fault.kind == POWER_OFF:
            self._silenced.add(fault.peer)
        for way in self._held:
            if way[0] == fault.peer:
                self._held[way].clear()

    def revive(self, peer: int) -> None:
        """A process of this peer is there again."""
        self._dead.discard(peer)
        self._silenced.discard(peer)

    def _squeeze(self, now_s: float, fault: Fault) -> None:
        for pair in _pairs(fault):
            self._narrow[pair].append(fault.factor)
            self._resize(pair)
            self._at(now_s + fault.seconds, partial(self._widen, pair, fault.factor))

    def _widen(self, pair: tuple[int, int], factor: float) -> None:
        self._narrow[pair].remove(factor)
        self._resize(pair)

    def _resize(self, pair: tuple[int, int]) -> None:
        self._lines.line(*pair).narrow(math.prod(self._narrow[pair]))

    def _tamper(self, now_s: float, fault: Fault) -> None:
        for pair in _pairs(fault):
            one = (fault.kind, random.Random(f"{fault} {pair}"))
            self._tampering[pair].append(one)
            self._at(now_s + fault.seconds, partial(self._tampering[pair].remove, one))

    def _block(self, now_s: float, fault: Fault) -> None:
        if fault.seconds > fault.breaks_s and not fault.lane:  # a link breaks with the last of its lanes
            self._at(now_s + fault.breaks_s, partial(self._tell_ends, fault, False))
            self._at(now_s + fault.seconds, partial(self._tell_ends, fault, True))
        lanes = (fault.lane,) if fault.lane else (CONTROL, DATA)
        for pair in _pairs(fault):
            for lane in lanes:
                self._blocks[*pair, lane].append(fault)
                self._at(now_s + fault.seconds, partial(self._free, (*pair, lane), fault))

    def _free(self, way: Way, fault: Fault) -> None:
        self._blocks[way].remove(fault)
        if not self._blocks[way]:
            held, self._held[way] = self._held[way], []
            for deliver in held:
                deliver()

    def _tell_ends(self, fault: Fault, up: bool) -> None:
        for one in fault.peers:
            for other in fault.others:
                for end, far in ((one, other), (other, one)):
                    if far not in self._dead:
                        self._tell(end, LinkChanged(far, up, "" if up else fault.kind))


def _pairs(fault: Fault) -> Iterable[tuple[int, int]]:
    """The directed pairs that a fault of links befalls."""
    there = [(src, dst) for src in fault.peers for dst in fault.others]
    return there + [(dst, src) for src, dst in there] if fault.kind == CUT else there
