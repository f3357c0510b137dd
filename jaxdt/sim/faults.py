"""Faults of a simulation: what may befall peers and links, one printed line each. An equal list gives an equal run.

What the runtime's transport hides stays hidden: it resends what was not acknowledged and drops what came twice, so a
cut or a clog makes messages late, never lost, and each lane of a pair stays in order. Two kinds go beyond that, for
messages of which the protocol says that it does not matter: DUPLICATE and REORDER (disturbance.py names them).
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxdt.protocol.events import COORDINATOR, TEMPORARY_IDS

CRASH, POWER_OFF, PAUSE, SLOW, CLOG, CUT = "crash", "power-off", "pause", "slow", "clog", "cut"
DUPLICATE, REORDER, JOIN, RESTART, LEAVE = "duplicate", "reorder", "join", "restart", "leave"
ENDS = (CRASH, POWER_OFF)
COMES = (JOIN, RESTART)
CONTROL, DATA = "control", "data"  # lanes: data are messages that carry a tensor

CRASH_SEEN_S = 0.1  # until a connection is seen to be broken whose other end has closed it
DEAD_LINK_S = 6.0  # or has gone silent
BLIP_S = 2.0  # a silence that nobody takes for a death: half the default deadline
SEEN_BLIP_S = 1.0  # the same, if the connections break


@dataclass(frozen=True)
class Fault:
    """What begins at at_s and lasts for `seconds`:

    crash      the process of `peer` ends; what it has sent arrives, but for what a cut or clog holds
    power-off  its machine ends: what has not arrived is lost, and others see it only after DEAD_LINK_S
    pause      it hears and does nothing, and goes on afterwards with what has come
    slow       its Work takes `factor` times as long, if begun meanwhile
    clog       the links from `peer` and `beside` to `others` have `factor` of their bandwidth; at 0 they stand still,
               or just one `lane` of them does
    cut        the same peers and `others` cannot reach each other; both ends see it after `breaks_s`, if it lasts so
               long, and again when it has healed
    duplicate  messages from `peer` to `others` arrive twice, now and then
    reorder    messages from `peer` to `others` are overtaken by later ones, now and then
    join       somebody comes, under `peer` as a passing name, and asks for a seat; `others`: on that peer's machine
    restart    the process of a `peer` that has crashed, or of the coordinator, is started once more
    leave      `peer` is asked to leave

    A `peer` of TEMPORARY_IDS + n is whoever came under the passing name n; nothing happens if nobody did.
    """

    at_s: float
    kind: str
    peer: int
    seconds: float = 0.0
    beside: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    factor: float = 1.0
    lane: str = ""
    breaks_s: float = DEAD_LINK_S

    @property
    def peers(self) -> tuple[int, ...]:
        """Whom it befalls: `peer` and those beside it."""
        return (self.peer, *self.beside)

    @property
    def until_s(self) -> float:
        """When it is over; who crashed stays away."""
        return self.at_s + self.seconds

    @property
    def takes(self) -> tuple[int, ...]:
        """The peers that the run may lose by it."""
        silent = self.kind in (PAUSE, CUT) or (self.kind == CLOG and not self.factor)
        hits = self.kind in (*ENDS, LEAVE) or (
            silent and self.seconds > (SEEN_BLIP_S if self.breaks_s < BLIP_S else BLIP_S)
        )
        ends = (*self.peers, *self.others)
        either = self.kind == CUT and COORDINATOR not in ends  # the coordinator decides who has to go
        return tuple(peer for peer in (ends if either else self.peers) if hits and peer != COORDINATOR)

    def __str__(self) -> str:
        extra = {SLOW: f", {self.factor:.3g} times", CLOG: f", {self.factor:.3g} of {self.lane or 'all'}"}
        extra[CUT] = f", seen after {self.breaks_s:.3g} s"
        way = {CUT: "from", JOIN: "on the machine of"}.get(self.kind, "to")
        to = f" {way} {_names(self.others)}" if self.others else ""
        lasts = f" for {self.seconds:.3f} s" if self.seconds else ""
        who = f"newcomer {self.peer}" if self.kind == JOIN else _names(self.peers)
        return f"{self.at_s:.3f} s: {self.kind} {who}{to}{lasts}{extra.get(self.kind, '')}"


def spares_every_stage(faults: Sequence[Fault], stages: Sequence[Sequence[int]]) -> bool:
    """Whether each stage keeps a peer that no fault takes."""
    taken = {peer for fault in faults for peer in fault.takes}
    return all(set(peers) - taken for peers in stages)


# -------------------------------------------------------------------------------------------------------------- dice


def draw(
    seed: int,
    stages: Sequence[Sequence[int]],
    n: int,
    until_s: float,
    pause_s: float,
    kinds: Sequence[str] = (),
) -> list[Fault]:
    """At most n faults of `kinds` (all but joins) that begin before until_s on peers of `stages` (peers of each stage),
    and last for up to pause_s. At most all but one peer of a stage are taken, since a stage without any ends the run.

    Silences between peers, and those of the coordinator, are blips; `broken_link` draws one that is not."""
    dice = _Dice(random.Random(f"faults {seed}"), stages, pause_s)
    drawers = [DRAWERS[kind] for kind in kinds or DRAWERS]
    drawn = [dice.rng.choice(drawers)(dice, dice.rng.uniform(0.0, until_s)) for _ in range(n)]
    return sorted((fault for fault in drawn if fault), key=lambda fault: fault.at_s)


def broken_link(seed: int, stages: Sequence[Sequence[int]], until_s: float) -> Fault:
    """Two peers that keep their coordinator and lose one another, for a while or for good."""
    rng = random.Random(f"broken link {seed}")
    one, other = rng.sample(sorted(peer for peers in stages for peer in peers), 2)
    at_s, seconds = rng.uniform(0.0, until_s), rng.choice((8.0, 20.0, math.inf))
    return Fault(at_s, CUT, one, seconds, others=(other,), breaks_s=rng.choice((CRASH_SEEN_S, DEAD_LINK_S)))


class _Dice:
    """`left` holds the peers of each stage that may still be taken, and the one that may not."""

    def __init__(self, rng: random.Random, stages: Sequence[Sequence[int]], pause_s: float):
        self.rng, self.pause_s = rng, pause_s
        self.left = [list(peers) for peers in stages]
        self.everybody = [COORDINATOR, *sorted(peer for peers in stages for peer in peers)]
        self.may_blink = True  # the coordinator, once: two blips in a row would be a silence

    def taken(self) -> int | None:
        """A peer that the run can do without, if there is one."""
        stages = [peers for peers in self.left if len(peers) > 1]
        if not stages:
            return None
        peers = self.rng.choice(stages)
        return peers.pop(self.rng.randrange(len(peers)))

    def ends(self) -> list[int]:
        """Everybody in random order; the coordinator only if it may blink."""
        ends = self.everybody[not self.may_blink :]
        return self.rng.sample(ends, len(ends))

    def seconds(self, most_s: float) -> float:
        return self.rng.uniform(0.0, most_s)


def _crash(dice: _Dice, at_s: float, kind: str = CRASH) -> Fault | None:
    peer = dice.taken()
    return None if peer is None else Fault(at_s, kind, peer)


def _power_off(dice: _Dice, at_s: float) -> Fault | None:
    return _crash(dice, at_s, POWER_OFF)


def _pause(dice: _Dice, at_s: float) -> Fault | None:
    if dice.may_blink and dice.rng.random() < 0.2:
        dice.may_blink = False
        return Fault(at_s, PAUSE, COORDINATOR, dice.seconds(min(BLIP_S, dice.pause_s)))
    peer = dice.taken()
    return None if peer is None else Fault(at_s, PAUSE, peer, dice.seconds(dice.pause_s))


def _slow(dice: _Dice, at_s: float) -> Fault:
    return Fault(
        at_s, SLOW, dice.rng.choice(dice.everybody[1:]), dice.seconds(dice.pause_s), factor=dice.rng.choice((2.0, 10.0))
    )


def _clog(dice: _Dice, at_s: float) -> Fault:
    factor = dice.rng.choice((0.0, 0.1, 0.5))
    src, dst = dice.ends()[:2] if factor == 0.0 else dice.rng.sample(dice.everybody, 2)
    lane = dice.rng.choice(("", CONTROL, DATA)) if factor == 0.0 else ""
    if factor == 0.0 and COORDINATOR in (src, dst):
        dice.may_blink = False
    seconds = dice.seconds(min(BLIP_S, dice.pause_s) if factor == 0.0 else dice.pause_s)
    return Fault(at_s, CLOG, src, seconds, others=(dst,), factor=factor, lane=lane)


def _cut(dice: _Dice, at_s: float) -> Fault | None:
    """A blip between any two parties, or a peer or two cut off from all or just from the coordinator."""
    breaks_s = dice.rng.choice((CRASH_SEEN_S, DEAD_LINK_S))
    if dice.rng.random() < 0.5:
        ends = dice.ends()
        first, *beside = ends[: dice.rng.randint(1, len(ends) - 1)]
        dice.may_blink = False  # it may have been on either side
        seconds = dice.seconds(min(SEEN_BLIP_S if breaks_s < BLIP_S else BLIP_S, dice.pause_s))
        return Fault(at_s, CUT, first, seconds, tuple(beside), tuple(ends[1 + len(beside) :]), breaks_s=breaks_s)
    peers = [peer for peer in (dice.taken() for _ in range(dice.rng.randint(1, 2))) if peer is not None]
    if not peers:
        return None
    others = [end for end in dice.everybody if end not in peers]
    if dice.rng.random() < 0.3:
        others = [COORDINATOR]
    return Fault(at_s, CUT, peers[0], dice.seconds(dice.pause_s), tuple(peers[1:]), tuple(others), breaks_s=breaks_s)


def _duplicate(dice: _Dice, at_s: float, kind: str = DUPLICATE) -> Fault:
    src = dice.rng.choice(dice.everybody)
    others = tuple(end for end in dice.everybody if end != src)
    return Fault(at_s, kind, src, dice.seconds(dice.pause_s), others=others)


def _reorder(dice: _Dice, at_s: float) -> Fault:
    return _duplicate(dice, at_s, REORDER)


DRAWERS: dict[str, Callable[[_Dice, float], Fault | None]] = {
    CRASH: _crash,
    POWER_OFF: _power_off,
    PAUSE: _pause,
    SLOW: _slow,
    CLOG: _clog,
    CUT: _cut,
    DUPLICATE: _duplicate,
    REORDER: _reorder,
}


def _names(peers: tuple[int, ...]) -> str:
    return ",".join(map(_name, peers))


def _name(peer: int) -> str:
    if peer == COORDINATOR:
        return "coordinator"
    return f"newcomer {peer - TEMPORARY_IDS}" if peer >= TEMPORARY_IDS else f"p{peer}"
