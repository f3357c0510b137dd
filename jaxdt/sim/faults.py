"""Faults of peers and links in a simulation, one printed line each. An equal list of faults gives an equal run.

The runtime's transport resends what was not acknowledged and drops what came twice. So a cut or a clog makes messages
late but never loses them, and each channel of a pair stays in order. Two kinds of faults go beyond that, DUPLICATE and
REORDER, for messages that the protocol calls harmless (active_faults.py lists them).
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxdt.protocol import events as ev

CRASH = "crash"
POWER_OFF = "power-off"
FAIL = "fail"
PAUSE = "pause"
SLOW = "slow"
CLOG = "clog"
CUT = "cut"
DUPLICATE = "duplicate"
REORDER = "reorder"
LATE = "late"
JOIN = "join"
RESTART = "restart"
LEAVE = "leave"
TWICE = "twice"
STALE = "stale"
TAKEOVER = "takeover"
PERTURB = "perturb"
HOLD = "hold"
DRAIN = "drain"
EVICT = "evict"
SAVE = "save"
STOP = "stop"
# Kinds that are operators' requests.
COMMAND_OF = {HOLD: "pause", DRAIN: "drain", EVICT: "evict", SAVE: "checkpoint", STOP: "stop"}
ENDS = (CRASH, POWER_OFF, FAIL)  # kinds that end a process
STARTS = (JOIN, RESTART, TWICE)  # kinds that start one
CONTROL, DATA = "control", "data"  # channels: data are messages that carry a tensor

CRASH_SEEN_S = 0.1  # until a peer sees that the other end has closed its connection
DEAD_LINK_S = 6.0  # until a peer sees that the other end is silent
BLIP_S = 2.0  # a silence this short loses no peer: half the default deadline
OVERDUE_FACTOR = 8.0  # Work that is slower may lose its peer
NEVER_DONE = 1e6  # a factor on the time of Work
SEEN_BLIP_S = 1.0  # the same, if the connections break


@dataclass(frozen=True)
class Fault:
    """A fault that begins at at_s and lasts for `seconds`:

    crash      the process of `peer` ends; messages that it has sent arrive, except those that a cut or clog holds
    fail       the process of `peer` ends because of an error that it can name, and says so to the coordinator
    power-off  its machine ends: messages that have not arrived are lost, and others see it only after DEAD_LINK_S
    pause      `peer` does nothing; afterwards it continues with the events that have come meanwhile
    slow       Work that `peer` begins meanwhile takes `factor` times as long
    clog       the links from `peer` and `beside` to `others` have `factor` of their bandwidth; at 0 they stand still,
               or just one `channel` of them does
    cut        `peer` and `beside` cannot reach `others`, and the other way round; both ends see it after `breaks_s`, if
               the cut lasts that long, and again when it has healed
    duplicate  some messages from `peer` to `others` arrive twice
    reorder    some messages from `peer` to `others` are overtaken by later ones
    late       tensors from `peer` to `others` come again after the next rollback, as if they had been on their way
    join       a newcomer with the temporary number `peer` asks to join, on the machine of the peer in `others`
    restart    the process of a crashed `peer`, or of the coordinator, is started again
    leave      `peer` is asked to leave
    twice      another process is started as `peer`, which runs
    stale      the coordinator that crashed did not: it continues beside its successor, until a person ends it
    takeover   another coordinator begins with what this one had made durable before its last views; this one continues,
               until a person ends it
    perturb    the parameters of `peer` change by `factor` of their norm, silently
    hold       an operator pauses the run, and resumes it at the end
    drain      an operator wants `peer` to leave
    evict      an operator wants `peer` to be evicted; the last replica of a stage is refused
    save       an operator wants a checkpoint
    stop       an operator wants the run to end after its next checkpoint

    A `peer` of TEMPORARY_IDS + n is the newcomer with the temporary number n; if there is none, nothing happens.
    """

    at_s: float
    kind: str
    peer: int
    seconds: float = 0.0
    beside: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    factor: float = 1.0
    channel: str = ""
    breaks_s: float = DEAD_LINK_S

    @property
    def peers(self) -> tuple[int, ...]:
        """The peers on the near side: `peer` and those beside it."""
        return (self.peer, *self.beside)

    @property
    def until_s(self) -> float:
        """The time when the fault is over. A process that has ended stays away."""
        return self.at_s + self.seconds

    @property
    def may_lose(self) -> tuple[int, ...]:
        """The peers that the run may lose by this fault."""
        silent = self.kind in (PAUSE, CUT) or (self.kind == CLOG and not self.factor)
        harmless_s = SEEN_BLIP_S if self.breaks_s < BLIP_S else BLIP_S
        is_slow = self.kind == SLOW and self.factor >= OVERDUE_FACTOR
        if not (self.kind in (*ENDS, LEAVE, DRAIN, EVICT) or is_slow or (silent and self.seconds > harmless_s)):
            return ()
        candidates = self.peers
        if self.kind == CUT and ev.COORDINATOR not in (*self.peers, *self.others):
            candidates = (*self.peers, *self.others)  # the coordinator decides which side has to go
        return tuple(peer for peer in candidates if peer != ev.COORDINATOR)

    def __str__(self) -> str:
        details = {
            SLOW: f", {self.factor:.3g} times",
            CLOG: f", {self.factor:.3g} of {self.channel or 'all'}",
            CUT: f", seen after {self.breaks_s:.3g} s",
            PERTURB: f", by {self.factor:.3g}",
        }
        preposition = {CUT: "from", JOIN: "on the machine of"}.get(self.kind, "to")
        others = f" {preposition} {_names(self.others)}" if self.others else ""
        duration = f" for {self.seconds:.3f} s" if self.seconds else ""
        peers = f"newcomer {self.peer}" if self.kind == JOIN else _names(self.peers)
        return f"{self.at_s:.3f} s: {self.kind} {peers}{others}{duration}{details.get(self.kind, '')}"


def spares_every_stage(faults: Sequence[Fault], stages: Sequence[Sequence[int]]) -> bool:
    """Whether each stage keeps a peer that no fault may lose."""
    lost = {peer for fault in faults for peer in fault.may_lose}
    return all(set(peers) - lost for peers in stages)


# ------------------------------------------------------------------------------------------------------ random faults


def draw(
    seed: int,
    stages: Sequence[Sequence[int]],
    n: int,
    until_s: float,
    pause_s: float,
    kinds: Sequence[str] = (),
) -> list[Fault]:
    """At most n faults of `kinds` (default: all in DRAWERS) that begin before until_s on peers of `stages` (the peers
    of each stage) and last for up to pause_s. Each stage keeps a peer, since a stage without any ends the run.

    Silences between peers, and those of the coordinator, are blips; `broken_link` draws one that is longer."""
    candidates = _Candidates(random.Random(f"faults {seed}"), stages, pause_s)
    drawers = [DRAWERS[kind] for kind in kinds or DRAWERS]
    rng = candidates.rng
    drawn = [rng.choice(drawers)(candidates, rng.uniform(0.0, until_s)) for _ in range(n)]
    return sorted((fault for fault in drawn if fault), key=lambda fault: fault.at_s)


def broken_link(seed: int, stages: Sequence[Sequence[int]], until_s: float) -> Fault:
    """A cut between two peers that both still reach the coordinator, for a while or for good."""
    rng = random.Random(f"broken link {seed}")
    peer, other = rng.sample(sorted(peer for peers in stages for peer in peers), 2)
    at_s = rng.uniform(0.0, until_s)
    seconds = rng.choice((8.0, 20.0, math.inf))
    return Fault(at_s, CUT, peer, seconds, others=(other,), breaks_s=rng.choice((CRASH_SEEN_S, DEAD_LINK_S)))


def perturbations(seed: int, stages: Sequence[Sequence[int]], until_s: float) -> list[Fault]:
    """One or two peers whose parameters change, by less or by more than replicas may differ."""
    rng = random.Random(f"perturbed {seed}")
    peers = rng.sample(sorted(peer for peers in stages for peer in peers), rng.choice((1, 2)))
    return [Fault(rng.uniform(0.0, until_s), PERTURB, peer, factor=rng.choice((1e-6, 0.01))) for peer in peers]


class _Candidates:
    """The peers that faults may still be drawn for. `replicas[stage]` are those of a stage that may be lost as long as
    one of them remains."""

    def __init__(self, rng: random.Random, stages: Sequence[Sequence[int]], pause_s: float):
        self.rng = rng
        self.pause_s = pause_s
        self.replicas = [list(peers) for peers in stages]
        self.all_ends = [ev.COORDINATOR, *sorted(peer for peers in stages for peer in peers)]
        self.coordinator_may_pause = True  # once: two blips in a row would be a silence

    def draw_expendable(self) -> int | None:
        """A peer that the run can lose; None if there is none."""
        stages = [peers for peers in self.replicas if len(peers) > 1]
        if not stages:
            return None
        peers = self.rng.choice(stages)
        return peers.pop(self.rng.randrange(len(peers)))

    def lose(self, peer: int) -> bool:
        """Whether the run can lose this peer, which counts as lost then."""
        for peers in self.replicas:
            if peer in peers and len(peers) > 1:
                peers.remove(peer)
                return True
        return all(peer not in peers for peers in self.replicas)

    def draw_ends(self) -> list[int]:
        """All ends of links in random order; the coordinator only if it may pause."""
        ends = self.all_ends[not self.coordinator_may_pause :]
        return self.rng.sample(ends, len(ends))

    def draw_seconds(self, most_s: float) -> float:
        return self.rng.uniform(0.0, most_s)


def _draw_crash(candidates: _Candidates, at_s: float, kind: str = CRASH) -> Fault | None:
    peer = candidates.draw_expendable()
    return None if peer is None else Fault(at_s, kind, peer)


def _draw_power_off(candidates: _Candidates, at_s: float) -> Fault | None:
    return _draw_crash(candidates, at_s, POWER_OFF)


def _draw_pause(candidates: _Candidates, at_s: float) -> Fault | None:
    if candidates.coordinator_may_pause and candidates.rng.random() < 0.2:
        candidates.coordinator_may_pause = False
        return Fault(at_s, PAUSE, ev.COORDINATOR, candidates.draw_seconds(candidates.pause_s))
    peer = candidates.draw_expendable()
    return None if peer is None else Fault(at_s, PAUSE, peer, candidates.draw_seconds(candidates.pause_s))


def _draw_slow(candidates: _Candidates, at_s: float) -> Fault:
    peer = candidates.rng.choice(candidates.all_ends[1:])
    seconds = candidates.draw_seconds(candidates.pause_s)
    factor = candidates.rng.choice((2.0, 10.0))
    if factor >= OVERDUE_FACTOR and not candidates.lose(peer):
        factor /= 2
    return Fault(at_s, SLOW, peer, seconds, factor=factor)


def _draw_clog(candidates: _Candidates, at_s: float) -> Fault:
    factor = candidates.rng.choice((0.0, 0.1, 0.5))
    if factor:
        src, dst = candidates.rng.sample(candidates.all_ends, 2)
        return Fault(at_s, CLOG, src, candidates.draw_seconds(candidates.pause_s), others=(dst,), factor=factor)
    src, dst = candidates.draw_ends()[:2]
    channel = candidates.rng.choice(("", CONTROL, DATA))
    if ev.COORDINATOR in (src, dst):
        candidates.coordinator_may_pause = False
    seconds = candidates.draw_seconds(min(BLIP_S, candidates.pause_s))
    return Fault(at_s, CLOG, src, seconds, others=(dst,), factor=0.0, channel=channel)


def _draw_cut(candidates: _Candidates, at_s: float) -> Fault | None:
    """A blip between any two sides, or a peer or two cut off from all others or from the coordinator alone."""
    rng = candidates.rng
    breaks_s = rng.choice((CRASH_SEEN_S, DEAD_LINK_S))
    if rng.random() < 0.5:
        ends = candidates.draw_ends()
        first, *beside = ends[: rng.randint(1, len(ends) - 1)]
        candidates.coordinator_may_pause = False  # it may have been on either side
        blip_s = SEEN_BLIP_S if breaks_s < BLIP_S else BLIP_S
        seconds = candidates.draw_seconds(min(blip_s, candidates.pause_s))
        return Fault(at_s, CUT, first, seconds, tuple(beside), tuple(ends[1 + len(beside) :]), breaks_s=breaks_s)
    drawn = [candidates.draw_expendable() for _ in range(rng.randint(1, 2))]
    peers = [peer for peer in drawn if peer is not None]
    if not peers:
        return None
    others = [end for end in candidates.all_ends if end not in peers]
    if rng.random() < 0.3:
        others = [ev.COORDINATOR]
    seconds = candidates.draw_seconds(candidates.pause_s)
    return Fault(at_s, CUT, peers[0], seconds, tuple(peers[1:]), tuple(others), breaks_s=breaks_s)


def _draw_duplicate(candidates: _Candidates, at_s: float, kind: str = DUPLICATE) -> Fault:
    src = candidates.rng.choice(candidates.all_ends)
    others = tuple(end for end in candidates.all_ends if end != src)
    return Fault(at_s, kind, src, candidates.draw_seconds(candidates.pause_s), others=others)


def _draw_reorder(candidates: _Candidates, at_s: float) -> Fault:
    return _draw_duplicate(candidates, at_s, REORDER)


DRAWERS: dict[str, Callable[[_Candidates, float], Fault | None]] = {
    CRASH: _draw_crash,
    POWER_OFF: _draw_power_off,
    PAUSE: _draw_pause,
    SLOW: _draw_slow,
    CLOG: _draw_clog,
    CUT: _draw_cut,
    DUPLICATE: _draw_duplicate,
    REORDER: _draw_reorder,
}


def _names(peers: tuple[int, ...]) -> str:
    return ",".join(map(_name, peers))


def _name(peer: int) -> str:
    if peer == ev.COORDINATOR:
        return "coordinator"
    return f"newcomer {peer - ev.TEMPORARY_IDS}" if peer >= ev.TEMPORARY_IDS else f"p{peer}"
