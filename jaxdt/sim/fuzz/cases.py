"""Cases from a seed: a small run, its links and its faults, simulated without arithmetic while invariants are checked.

An equal seed gives an equal case and an equal run, whatever ran before: the texts that seed a random.Random decide what
is drawn, so they stay as they are. `play` raises InvariantBroken.
In some cases peers change stages: because of their queues, or at random, which moves peers that a queue never would.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from jaxdt.build import (
    RunStart,
    build_coordinator,
    build_newcomer,
    build_peer,
    build_peers,
    build_worker,
    build_workers,
    parameter_words,
)
from jaxdt.membership.coordinator import TERM
from jaxdt.membership.coordinator_config import load_durable_state
from jaxdt.membership.liveness.work_watch import UNKNOWN_S
from jaxdt.membership.peer import DrivenMachine, Peer
from jaxdt.membership.rebalance_api import ByNumber, Move, Stages
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import StepReport
from jaxdt.run import config as configs
from jaxdt.run.config import NetConfig, RunConfig, WiringConfig
from jaxdt.run.network import Link
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import sync_groups
from jaxdt.sim.cluster import Observer, Simulation
from jaxdt.sim.faults import (
    CLOG,
    CONTROL,
    CRASH,
    CRASH_SEEN_S,
    CUT,
    DATA,
    DEAD_LINK_S,
    DRAIN,
    ENDS,
    EVICT,
    FAIL,
    HOLD,
    JOIN,
    LATE,
    LEAVE,
    NEVER_DONE,
    OVERDUE_FACTOR,
    PAUSE,
    RESTART,
    SAVE,
    SLOW,
    STALE,
    STOP,
    TAKEOVER,
    TWICE,
    Fault,
    broken_link,
    draw,
    perturbations,
    spares_every_stage,
)
from jaxdt.sim.fuzz.invariants import InvariantBroken, Invariants
from jaxdt.sim.fuzz.pool.invariants import PoolInvariants
from jaxdt.sim.fuzz.symbolic_tensors import NO_STATE, Checks, StageLayout, SymbolicTensors
from jaxdt.sim.sim_peer import Environment, Outcome, ProcessFactory, SimPeer
from jaxdt.wiring.base import wiring_entry

N_STEPS = 3
N_STEPS_WITH_MOVES = 6
GRACE_S = 20.0  # within the time that a run has after its last fault
DETECTION_S = 30.0  # longest time until a fault is noticed and its peer evicted or recovered
WIRINGS_DRAWN = ("swarm", "swarm", "fixed")  # by seed
LINK_OF_NEWCOMERS = Link(0.05, 1e-3)

# An exception of these in a machine is a finding, like a broken invariant.
EXCEPTIONS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)

# (peer, machine, its tensors) -> machine
Mutate = Callable[[int, DrivenMachine, SymbolicTensors | None], DrivenMachine]


@dataclass(frozen=True)
class Busy:
    """Compute threads that are busy: with probability `prob` each thing that one has to do (a Work, an Install, a
    Restore, a digest) waits for up to `seconds`, while messages go on to arrive."""

    prob: float = 0.0
    seconds: float = 0.0

    def of(self, seed: int, peer: int) -> Callable[[], float] | None:
        """Draws the seconds of a peer's process, before each thing that it has to do."""
        rng = random.Random(f"busy {seed} {peer}")
        return (lambda: rng.uniform(0.0, self.seconds) * (rng.random() < self.prob)) if self.prob else None

    @staticmethod
    def draw(seed: int) -> "Busy":
        """In half of the cases they are, for less than the shortest time after which Work counts as overdue."""
        rng = random.Random(f"busy {seed}")
        return Busy(rng.choice((0.1, 0.3, 0.6)), rng.choice((0.1, 0.5, 2.0))) if rng.random() < 0.5 else Busy()


@dataclass(frozen=True)
class Case:
    """A run with its faults. `seconds[peer]`: per kind of Work; `links`: by ordered pair; `nonfinite_step`: the step
    whose first gradient is not finite; `random_moves_s`: how often random peers change stages (0: never). Without a
    common disk each peer has one of its own. `extra_s`: what the run may take besides. `busy`: all compute threads."""

    seed: int
    config: RunConfig
    plan: Plan
    seconds: Mapping[int, Mapping[str, float]]
    links: Mapping[tuple[int, int], Link]
    persist_s: float
    faults: tuple[Fault, ...]
    nonfinite_step: int | None
    random_moves_s: float = 0.0
    has_common_disk: bool = True
    extra_s: float = 0.0
    busy: Busy = Busy()

    @property
    def moves(self) -> bool:
        """Whether peers may change stages."""
        return bool(self.random_moves_s or self.config.wiring.rebalance_s)

    @property
    def limit_s(self) -> float:
        """The time limit of the run: the end of the last fault, then the time of three whole runs in which the slowest
        peer does all Work one by one, DETECTION_S for each fault, and twice the grace period of a silent stage. Work of
        a kind that was never timed may take UNKNOWN_S before it counts as overdue."""
        slowest_s = max(seconds["F"] + seconds["B"] for seconds in self.seconds.values()) + 2 * self.busy.seconds
        serial_s = self.plan.n_stages * self.plan.n_microbatches * self.config.train.steps * slowest_s
        ends_s = [fault.until_s for fault in self.faults]
        healed_s = max((end_s for end_s in ends_s if end_s < math.inf), default=0.0)
        waits_s = self.config.wiring.stage_grace_s if self.config.wiring.on_stage_lost == "wait" else 0.0
        hangs = any(fault.kind == SLOW and fault.factor >= OVERDUE_FACTOR for fault in self.faults)
        unknown_s = UNKNOWN_S if hangs else 0.0
        return healed_s + 3 * serial_s + DETECTION_S * (1 + len(self.faults)) + 2 * waits_s + unknown_s + self.extra_s

    def __str__(self) -> str:
        wiring, train = self.config.wiring, self.config.train
        nonfinite = "" if self.nonfinite_step is None else f" at {self.nonfinite_step}"
        head = "tied" if self.config.model.facts.n_split_params else "untied"
        return (
            f"seed {self.seed}: {self.plan.n_stages} stages x {self.plan.n_pipelines}, "
            f"{self.plan.n_microbatches} microbatches, delay {self.config.sync.delay}, {wiring.kind}, "
            f"{wiring.routers} routers, window {wiring.window}, "
            f"{head} head, evaluation every {train.eval_every_steps}, "
            f"persist {self.persist_s} s, {train.on_nonfinite}{nonfinite}, "
            f"{wiring.on_stage_lost} at a lost stage after {wiring.stage_grace_s:.3g} s, "
            f"{len(self.plan.workers)} workers, {self.busy}, "
            f"rebalancing every {wiring.rebalance_s:.3g} s, random moves every {self.random_moves_s:.3g} s, "
            f"{'a common disk' if self.has_common_disk else f'disks of their own, {train.checkpoint_copies} copies'}"
        )


def draw_case(seed: int, wiring: str = "") -> Case:
    """The case of a seed, with this kind of wiring or one that depends on the seed."""
    rng = random.Random(f"case {seed}")
    config = _with_delay(_draw_config(rng, wiring or WIRINGS_DRAWN[seed % len(WIRINGS_DRAWN)]), seed)
    plan = configs.default_plan(config)
    work_s = rng.choice((0.05, 0.3))
    seconds = {peer: work_seconds(work_s * rng.uniform(0.5, 3.0)) for peer in plan.peers}
    ends = [ev.COORDINATOR, *plan.peers]
    latencies_s = rng.choice(((0.001, 0.01), (0.01, 0.2), (0.1, 0.5)))
    gbps = rng.choice((1e-4, 1e-3))
    may_lose = plan.placement if rng.random() < 0.9 else [plan.peers]  # else a stage may lose all its peers
    persist_s = rng.choice((0.0, 0.05, 0.5))
    n_works = plan.n_microbatches / plan.n_pipelines + plan.n_stages
    run_s = N_STEPS * (10 * work_s * n_works + 8 * latencies_s[1] + persist_s)
    pause_s = rng.choice((1.0, 6.0, 15.0))
    n_faults = rng.choice((0, 1, 2, 2, 3, 4))
    links = {(src, dst): Link(rng.choice(latencies_s), gbps) for src in ends for dst in ends if src != dst}
    drawn = draw(seed, may_lose, n_faults, rng.choice((0.5, 1.0)) * run_s, pause_s)
    faults = _with_arrivals(seed, rng, plan, run_s, drawn)
    case = Case(
        seed=seed,
        config=config,
        plan=plan,
        seconds=seconds,
        links=links,
        persist_s=persist_s,
        faults=faults,
        nonfinite_step=None if config.train.on_nonfinite == "stop" else rng.randrange(N_STEPS),
        busy=Busy.draw(seed),
    )
    case = _with_failures(random.Random(f"failures {seed}"), case, run_s)
    case = _with_lost_announcements(random.Random(f"lost word {seed}"), case, run_s)
    case = _with_second_processes(random.Random(f"second {seed}"), case, run_s)
    case = _with_perturbations(case, run_s)
    case = _with_moves(random.Random(f"moves {seed}"), case, run_s / N_STEPS)
    case = _with_own_disks(random.Random(f"disks {seed}"), case)
    case = _with_vacant_stage(random.Random(f"vacant {seed}"), case, run_s)
    case = _with_lost_stage(random.Random(f"lost stage {seed}"), case, run_s)
    case = _with_straggler(random.Random(f"straggler {seed}"), case, run_s)
    case = _with_takeover(random.Random(f"takeover {seed}"), case, run_s)
    case = _with_operator(random.Random(f"operator {seed}"), case, run_s)
    return _with_stop(random.Random(f"stop {seed}"), case, run_s)


def _with_failures(rng: random.Random, case: Case, run_s: float) -> Case:
    """In half of the cases with newcomers one of them fails, before or after it has become a member. In up to a sixth
    of all cases a peer fails, or its Work hangs, whose stage can do without it."""
    faults = list(case.faults)
    for fault in case.faults:
        if fault.kind == JOIN and rng.random() < 0.5:
            fails_s = fault.at_s + rng.choice((0.0, 1.0)) * rng.uniform(0.0, run_s)
            faults.append(Fault(fails_s, FAIL, ev.TEMPORARY_IDS + fault.peer))
    peer = rng.choice(sorted(case.plan.peers))
    fails = Fault(rng.uniform(0.0, run_s), FAIL, peer)
    hangs = Fault(rng.uniform(0.0, run_s), SLOW, peer, rng.uniform(0.0, run_s), factor=NEVER_DONE)
    fault = rng.choice((fails, hangs, *[None] * 10))
    if fault and spares_every_stage([*faults, fault], case.plan.placement):
        faults.append(fault)
    return replace(case, faults=in_order(faults))


def _with_lost_announcements(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a fifth of the cases with a delay the coordinator cannot reach a peer and then dies, so that its messages to
    that peer, of up to two steps, are lost."""
    dies = any(fault.kind in ENDS and fault.peer == ev.COORDINATOR for fault in case.faults)
    if rng.random() >= 0.2 or not case.config.sync.delay or dies:
        return case
    at_s = rng.uniform(0.0, run_s)
    unreachable_s = rng.uniform(0.1, 0.5) * run_s
    dead_s = at_s + unreachable_s
    peer = rng.choice(sorted(case.plan.peers))
    faults = [
        Fault(at_s, CLOG, ev.COORDINATOR, unreachable_s + 0.1, others=(peer,), factor=0.0, channel=CONTROL),
        Fault(dead_s, CRASH, ev.COORDINATOR),
        Fault(dead_s + rng.uniform(0.2, 3.0), RESTART, ev.COORDINATOR),
    ]
    return replace(case, faults=in_order([*case.faults, *faults]))


def _with_second_processes(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a sixth of the cases a peer is started although it runs, and in half of those whose coordinator is replaced
    the old one continues."""
    faults = list(case.faults)
    if rng.random() < 1 / 6:
        begun_s = 1.0  # the first process of the peer is known by then
        faults.append(Fault(begun_s + rng.uniform(0.0, run_s), TWICE, rng.choice(sorted(case.plan.peers))))
    for fault in case.faults:
        if fault.kind == RESTART and fault.peer == ev.COORDINATOR and rng.random() < 0.5:
            faults.append(Fault(fault.at_s + rng.uniform(0.5, 5.0), STALE, ev.COORDINATOR, rng.uniform(0.0, 12.0)))
    return replace(case, faults=in_order(faults))


def _with_perturbations(case: Case, run_s: float) -> Case:
    """In a fifth of the cases the parameters of some replicas change; these replicas compare them often."""
    if case.seed % 5 != 2:
        return case
    sync = replace(case.config.sync, check_every_steps=1 + case.seed // 5 % 2)
    faults = perturbations(case.seed, case.plan.placement, run_s)
    return replace(case, config=replace(case.config, sync=sync), faults=in_order([*case.faults, *faults]))


def _with_moves(rng: random.Random, case: Case, step_s: float) -> Case:
    """In a third of the cases in which they can, peers change stages, about once a step or less often."""
    cause = rng.choice(("queue", "random", "", "", "", ""))
    if not cause or not wiring_entry(case.config.wiring.kind).may_change_stages:
        return case
    n_steps = N_STEPS_WITH_MOVES + case.config.sync.delay
    every_s = rng.choice((0.1, 0.3, 1.0)) * step_s
    train = replace(case.config.train, steps=n_steps)
    wiring = case.config.wiring
    if cause == "queue":
        wiring = replace(wiring, rebalance_s=every_s, rebalance_moves=rng.choice((1, 3)))
    config = replace(case.config, train=train, wiring=wiring)
    return replace(case, config=config, random_moves_s=every_s if cause == "random" else 0.0)


def _with_vacant_stage(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a third of the cases the run waits for a lost stage, and one stage loses sight of its last replica while
    newcomers wait: all its other replicas end, and the last one falls silent, ends, or ends just after another replica
    has fallen silent. Some tensors are late, so that they arrive in another generation than the one they are of."""
    # A last replica whose device hangs for ever is awaited without end, so the two are not drawn together.
    never_ends = any(fault.until_s == math.inf or fault.factor == NEVER_DONE for fault in case.faults)
    if rng.random() >= 1 / 3 or never_ends:
        return case
    grace_s = rng.choice((8.0, 20.0, 20.0))
    row = rng.choice(case.plan.placement)
    *others, first, last = [None, None, *rng.sample(row, len(row))]
    at_s = rng.uniform(0.2, 1.0) * run_s
    faults = [Fault(rng.uniform(0.0, at_s), rng.choice(ENDS), peer) for peer in others if peer is not None]
    kind = rng.choice(("silence", "silence", "end", "eviction"))
    silent_s = rng.choice((rng.uniform(2.0, 12.0), rng.uniform(2.0, 12.0), grace_s + rng.uniform(5.0, 15.0)))
    if kind == "eviction" and first is not None:
        faults.append(_silence(rng, at_s, first, silent_s))
        faults.append(Fault(at_s + rng.uniform(3.0, 9.0), rng.choice(ENDS), last))
    else:
        faults += [Fault(rng.uniform(0.0, at_s), CRASH, first)] if first is not None else []
        faults.append(Fault(at_s, rng.choice(ENDS), last) if kind == "end" else _silence(rng, at_s, last, silent_s))
    faults += [Fault(rng.uniform(0.0, 1.0) * at_s, JOIN, 10 + n) for n in range(rng.choice((1, 1, 2)))]
    faults += [_slow_tensors(rng, at_s, case.plan) for _ in range(rng.choice((0, 0, 1)))]
    if rng.random() < 0.5:
        peers = tuple(sorted(case.plan.peers))
        faults.append(Fault(0.0, LATE, peers[0], at_s + grace_s, peers[1:], peers))
    wiring = replace(case.config.wiring, on_stage_lost="wait", stage_grace_s=grace_s)
    return replace(case, config=replace(case.config, wiring=wiring), faults=in_order([*case.faults, *faults]))


def _with_lost_stage(rng: random.Random, case: Case, run_s: float) -> Case:
    """In an eighth of the cases that stop when a stage is lost, all replicas of one stage end at once."""
    if case.config.wiring.on_stage_lost == "wait" or rng.random() >= 1 / 8:
        return case
    at_s = rng.uniform(0.2, 0.8) * run_s
    faults = [Fault(at_s, rng.choice(ENDS), peer) for peer in rng.choice(case.plan.placement)]
    return replace(case, faults=in_order([*case.faults, *faults]))


def _with_straggler(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a quarter of the cases a peer's Work of a moment takes very long, and ends, if its stage can do without it."""
    if rng.random() >= 1 / 4 or case.config.wiring.on_stage_lost == "wait":
        return case
    at_s, factor = rng.uniform(0.0, run_s), rng.choice((25.0, 50.0, 200.0))
    fault = Fault(at_s, SLOW, rng.choice(sorted(case.plan.peers)), rng.uniform(0.0, 1.0), factor=factor)
    if not spares_every_stage([*case.faults, fault], case.plan.placement):
        return case
    return replace(case, faults=in_order([*case.faults, fault]))


def _with_takeover(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a sixth of the cases whose coordinator does not die another one takes over, often while peers are evicted."""
    dies = any(fault.peer == ev.COORDINATOR and fault.kind in (*ENDS, RESTART) for fault in case.faults)
    if dies or rng.random() >= 1 / 6:
        return case
    begins_s = [fault.at_s for fault in case.faults if fault.may_lose] or [0.0]
    at_s = rng.choice(begins_s) + rng.choice((rng.uniform(0.0, 10.0), rng.uniform(0.0, run_s)))
    fault = Fault(max(1.0, at_s), TAKEOVER, ev.COORDINATOR, rng.uniform(0.0, 12.0))
    return replace(case, faults=in_order([*case.faults, fault]))


def _with_operator(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a sixth of the cases an operator pauses and resumes the run, wants a checkpoint, or wants a peer to go whose
    stage can do without it."""
    if rng.random() >= 1 / 6:
        return case
    kind = rng.choice((HOLD, HOLD, DRAIN, EVICT, SAVE))
    peer = rng.choice(sorted(case.plan.peers)) if kind in (DRAIN, EVICT) else ev.COORDINATOR
    seconds = rng.uniform(0.0, 20.0) if kind == HOLD else 0.0
    fault = Fault(rng.uniform(0.2, 1.0) * run_s, kind, peer, seconds)
    if fault.may_lose and not spares_every_stage([*case.faults, fault], case.plan.placement):
        return case
    return replace(case, faults=in_order([*case.faults, fault]))


def _with_stop(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a twelfth of the cases an operator stops the run."""
    if rng.random() >= 1 / 12:
        return case
    return replace(case, faults=in_order([*case.faults, Fault(rng.uniform(0.1, 1.0) * run_s, STOP, ev.COORDINATOR)]))


def _silence(rng: random.Random, at_s: float, peer: int, seconds: float) -> Fault:
    """The coordinator does not hear a peer that lives."""
    if rng.random() < 0.5:
        return Fault(at_s, PAUSE, peer, seconds)
    return Fault(at_s, CUT, peer, seconds, others=(ev.COORDINATOR,), breaks_s=rng.choice((CRASH_SEEN_S, DEAD_LINK_S)))


def _slow_tensors(rng: random.Random, at_s: float, plan: Plan) -> Fault:
    """The tensors from one peer to another stand still for a while."""
    src, dst = rng.sample(sorted(plan.peers), 2)
    return Fault(at_s * rng.uniform(0.5, 1.0), CLOG, src, rng.uniform(1.0, 15.0), (), (dst,), 0.0, DATA)


def _with_own_disks(rng: random.Random, case: Case) -> Case:
    """In half of the cases the peers have no common disk, and send the parts of checkpoints to one another."""
    if rng.random() < 0.5:
        return case
    train = replace(case.config.train, checkpoint_copies=rng.choice((1, 2, 2, 3)))
    sync = replace(case.config.sync, slice_bytes=rng.choice((1 << 10, 1 << 20)))
    return replace(case, config=replace(case.config, train=train, sync=sync), has_common_disk=False)


class RandomMoves(ByNumber):
    """Moves random peers to random other stages, about every every_s seconds."""

    def __init__(self, seed: int, every_s: float):
        self._rng = random.Random(f"restless {seed}")
        self._every_s = every_s
        self._due_s = 0.0

    def moves(self, now_s: float, stages: Stages, may_move: Collection[int]) -> list[Move]:
        if now_s < self._due_s:
            return []
        self._due_s = now_s + self._rng.uniform(0.5, 1.5) * self._every_s
        stage_of = {peer: stage for stage, peers in enumerate(stages) for peer in peers if peer in may_move}
        drawn = self._rng.sample(sorted(stage_of), min(len(stage_of), self._rng.choice((1, 1, 2))))
        return [self._move(peer, stage_of[peer], len(stages)) for peer in drawn]

    def _move(self, peer: int, src: int, n_stages: int) -> Move:
        return Move(peer, src, self._rng.choice([stage for stage in range(n_stages) if stage != src]))


def in_order(faults: Collection[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _with_arrivals(seed: int, rng: random.Random, plan: Plan, run_s: float, faults: list[Fault]) -> tuple[Fault, ...]:
    """Add arrivals and departures: some crashed peers start again, newcomers join, a peer may leave, the coordinator
    may die and start again, and in a quarter of the cases two peers lose their link."""
    found = list(faults)
    for fault in faults:
        if fault.kind in ENDS and rng.random() < 0.5:
            found.append(Fault(fault.at_s + rng.uniform(0.0, run_s), RESTART, fault.peer))
    found += [Fault(rng.uniform(0.0, run_s), JOIN, n) for n in range(rng.choice((0, 0, 1, 2)))]
    if rng.random() < 0.2:
        found.append(Fault(rng.uniform(0.5, 1.0) * run_s, LEAVE, rng.choice(sorted(plan.peers))))
    if rng.random() < 0.15:
        at_s = rng.uniform(0.0, run_s)
        found += [Fault(at_s, CRASH, ev.COORDINATOR), Fault(at_s + rng.uniform(0.2, 20.0), RESTART, ev.COORDINATOR)]
    cut = broken_link(seed, plan.placement, run_s)
    if seed % 4 == 3 and spares_every_stage([*found, cut], plan.placement):
        found.append(cut)
    return in_order(found)


def _draw_config(rng: random.Random, kind: str) -> RunConfig:
    stages, pipelines = rng.choice(((2, 1), (2, 2), (2, 2), (2, 3), (2, 3), (2, 4), (3, 2), (3, 2), (3, 3)))
    on_nonfinite = rng.choice(("stop",) * 8 + ("skip", "rollback"))
    eval_every_steps = rng.choice((0, 2))
    model = dict(preset="debug", n_layers=3, d_model=8, n_heads=2, d_ff=8, seq_len=4, vocab_size=16)
    parsed = configs.parse(
        dict(
            model=model | {"tied_head": rng.random() < 0.5},
            plan=dict(stages=stages, pipelines=pipelines, microbatches=max(pipelines, rng.choice((1, 3, 5, 5)))),
            train=dict(
                steps=N_STEPS,
                on_nonfinite=on_nonfinite,
                checkpoint_every_steps=rng.choice((0, 1)),
                eval_every_steps=eval_every_steps,
                eval_microbatches=2,
            ),
            sync=dict(slice_bytes=rng.choice((1 << 10, 1 << 20))),
        )
    )
    wiring = WiringConfig(
        kind=kind,
        routers=rng.choice((1, 2, stages * pipelines)),
        window=rng.choice((0, 1, 3)),
        on_stage_lost="stop",
        stage_grace_s=GRACE_S,
        retain_bytes=rng.choice((0, 500, 1 << 30)),
    )
    return replace(parsed, wiring=wiring, net=NetConfig(heartbeat_s=0.5, deadline_floor_s=4.0))


def _with_delay(config: RunConfig, seed: int) -> RunConfig:
    """Every other case delays its updates, and half of those begin with a step without delay."""
    sync = replace(config.sync, delay=seed % 2, delay_after_steps=seed // 2 % 2)
    return replace(config, sync=sync, train=replace(config.train, steps=N_STEPS + sync.delay))


def work_seconds(forward_s: float) -> dict[str, float]:
    """Seconds of each kind of Work, in proportion to a forward's."""
    return {"F": forward_s, "B": 2 * forward_s, "E": forward_s, "G": 0.1 * forward_s, "U": 0.1 * forward_s}


def finding(case: Case, mutate: Mutate | None = None, observer: Observer | None = None) -> str:
    """One line that says which invariant the case breaks, or which exception it raises; '' if none."""
    return finding_of(lambda: play(case, mutate, observer))


def finding_of(played: Callable[[], object]) -> str:
    """The same for a call that plays a case."""
    try:
        played()
    except InvariantBroken as broken:
        return str(broken)
    except EXCEPTIONS as error:
        return f"{type(error).__name__}: {error}"
    return ""


def play(case: Case, mutate: Mutate | None = None, observer: Observer | None = None) -> tuple[Outcome, int]:
    """Simulate the case under the invariants. Returns the outcome, and the number of events that were checked.
    `mutate(peer, machine, tensors)` may replace a machine (tensors is None for the coordinator); `observer` is called
    for each event, as the invariants are."""
    machines = build_peers(case.config, case.plan, RunStart("fuzz"))
    wiring = case.config.wiring
    invariants = Invariants(machines, case.faults, wiring.stage_grace_s, wiring.on_stage_lost == "wait")
    pool = PoolInvariants(invariants, case.config, case.plan) if case.plan.workers else None
    processes = _Processes(case, invariants, mutate or _unchanged)
    machines |= build_workers(case.config, case.plan, RunStart("fuzz"))
    peers = {peer: processes.make_first(peer, machine) for peer, machine in machines.items()}
    environment = Environment(
        link=lambda src, dst: case.links.get((src, dst), LINK_OF_NEWCOMERS),
        cores={peer.host: 1.0 for peer in peers.values()},
        persist_s=case.persist_s,
    )

    def observe(now_s: float, peer: int, event: ev.Event | Fault, actions: list[ev.Action]) -> None:
        if observer:
            observer(now_s, peer, event, actions)
        if pool:
            pool(peer, event, actions)
        if peer not in case.plan.workers:  # the step protocol knows nothing of workers
            invariants(now_s, peer, event, actions)

    simulation = Simulation(
        processes.make_coordinator(None),
        peers,
        environment,
        case.faults,
        observer=observe,
        processes=ProcessFactory(processes.make_peer, processes.make_coordinator),
    )
    invariants.watch_disks(simulation.disks, case.config.train.checkpoint_copies)
    outcome = simulation.run(until_s=case.limit_s)
    rows, train = outcome.of(StepReport), case.config.train
    invariants.ended(outcome.stopped, [row.step for row in rows], train.steps)
    if ev.COORDINATOR in outcome.stopped and not outcome.stopped[ev.COORDINATOR].code:
        invariants.check_held_out(rows, train)
    return outcome, invariants.n_checked


def _unchanged(peer: int, machine: DrivenMachine, tensors: SymbolicTensors | None) -> DrivenMachine:
    return machine


class _Processes:
    """Makes the processes of a case, each peer on a host of its own and with SymbolicTensors for tensors."""

    def __init__(self, case: Case, invariants: Invariants, mutate: Mutate):
        self._case = case
        self._invariants = invariants
        self._mutate = mutate

    def make_first(self, peer: int, machine: Peer) -> SimPeer:
        """A peer of the plan at the start of the run."""
        tensors = self._make_tensors(peer, self._case.plan.seat(peer)[0], version=0)
        self._invariants.tensors[peer] = tensors
        return self._make_sim_peer(peer, machine, tensors, self._case.seconds[peer])

    def make_peer(self, peer: int, stage: int | None) -> SimPeer:
        """A newcomer for `stage`, or a peer of the plan that starts again; see ProcessFactory."""
        config, plan = self._case.config, self._case.plan
        seconds = self._case.seconds.get(peer, self._case.seconds[plan.placement[stage or 0][0]])
        if plan.is_worker(peer):
            machine = build_worker(config, plan, peer, RunStart("fuzz"))
            self._invariants.tensors[peer] = tensors = self._make_tensors(peer, plan.seat(peer)[0], version=0)
            return self._make_sim_peer(peer, machine, tensors, seconds)
        if stage is None:
            machine = build_peer(config, plan, peer, RunStart("fuzz"))
            tensors = self._make_tensors(peer, plan.seat(peer)[0], version=0)
        else:
            machine = build_newcomer(config, plan, peer, stage, RunStart("fuzz"))
            tensors = self._make_tensors(peer, stage, version=NO_STATE)
        self._invariants.add_process(peer, machine, tensors)
        return self._make_sim_peer(peer, machine, tensors, seconds)

    def make_coordinator(self, disk: Mapping | None) -> DrivenMachine:
        """The first coordinator, or with `disk` one that continues from it."""
        case = self._case
        if disk is not None:
            self._invariants.restart_coordinator(disk)
        durable_state = None if disk is None else load_durable_state(disk)
        start = RunStart("fuzz", last_term=disk.get(TERM, 0) if disk else 0)
        balance = RandomMoves(case.seed, case.random_moves_s) if case.random_moves_s else None
        machine = build_coordinator(case.config, case.plan, start, durable_state, balance)
        return self._mutate(ev.COORDINATOR, machine, None)

    def _make_sim_peer(
        self, peer: int, machine: Peer, tensors: SymbolicTensors, seconds: Mapping[str, float]
    ) -> SimPeer:
        disk = "" if self._case.has_common_disk else f"disk{peer}"
        is_outside = self._case.plan.is_worker(peer)
        mutated = self._mutate(peer, machine, tensors)
        busy_s = self._case.busy.of(self._case.seed, peer)
        return SimPeer(mutated, tensors, f"host{peer}", seconds, disk, busy_s=busy_s, is_outside=is_outside)

    def _make_tensors(self, peer: int, stage: int, version: int) -> SymbolicTensors:
        config, plan = self._case.config, self._case.plan
        groups = tuple(group for group in sync_groups(config, plan) if stage in group.stages)
        worker_words = parameter_words(config, plan, stage) if plan.is_worker(peer) else 0
        layout = StageLayout(stage, plan.n_stages, plan.n_microbatches, groups, config.delay, worker_words)
        checks = Checks(self._invariants.broken, self._invariants.applied, self._is_nonfinite)
        return SymbolicTensors(peer, layout, checks, version)

    def _is_nonfinite(self, generation: int, step: int) -> bool:
        if (generation, step) != (0, self._case.nonfinite_step):
            return False
        self._invariants.allow_end()
        return True
