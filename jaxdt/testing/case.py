"""A case: a small run with its links and its faults, simulated without arithmetic under invariants.

An equal case gives an equal run, whatever ran before. `play` raises InvariantBroken.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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
from jaxdt.membership.coordinator_config import load_durable_state
from jaxdt.membership.peer import DrivenMachine, Peer
from jaxdt.membership.rebalance_api import ByNumber, Move, Stages
from jaxdt.membership.run_state import TERM
from jaxdt.membership.work_watch import UNKNOWN_S
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import RollbackReport, StepReport
from jaxdt.run.config import RunConfig
from jaxdt.run.network import Link
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import sync_groups
from jaxdt.sim.cluster import Observer, Simulation
from jaxdt.sim.faults import OVERDUE_FACTOR, SLOW, Fault
from jaxdt.sim.sim_peer import Environment, Outcome, ProcessFactory, SimPeer
from jaxdt.sim.stragglers.stalls import PeerStalls, Stalls
from jaxdt.sim.tensors import Tensors
from jaxdt.testing.independent.invariants import IndependentInvariants
from jaxdt.testing.independent.residues import Residues
from jaxdt.testing.invariants import InvariantBroken, Invariants
from jaxdt.testing.pool.invariants import PoolInvariants
from jaxdt.testing.symbolic_tensors import NO_STATE, Checks, StageLayout, SymbolicTensors

DETECTION_S = 30.0  # longest time until a fault is noticed and its peer evicted or recovered
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

# (peer, machine, its tensors) -> machine; the coordinator has no tensors
Mutate = Callable[[int, DrivenMachine, Any], DrivenMachine]


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
    """A run with its faults. `seconds[peer]`: per kind of Work; `links`: by ordered pair; `nonfinite`: the stage,
    pipeline and step whose gradient is not finite (where replicas are equal, that of all of them is not);
    `random_moves_s`: how often random peers change stages (0: never). Without a common disk each peer has one of its
    own. `extra_s`: what the run may take besides. `busy` and `stalls`: of all peers."""

    seed: int
    config: RunConfig
    plan: Plan
    seconds: Mapping[int, Mapping[str, float]]
    links: Mapping[tuple[int, int], Link]
    persist_s: float
    faults: tuple[Fault, ...] = ()
    nonfinite: tuple[int, int, int] | None = None
    random_moves_s: float = 0.0
    has_common_disk: bool = True
    extra_s: float = 0.0
    busy: Busy = Busy()
    stalls: Stalls = Stalls(0.0, 0.0)

    @property
    def are_replicas_equal(self) -> bool:
        """Whether the replicas of a stage hold the same after each step."""
        return self.config.sync.kind == "allreduce"

    @property
    def moves(self) -> bool:
        """Whether peers may change stages."""
        return bool(self.random_moves_s or self.config.wiring.rebalance_s)

    @property
    def limit_s(self) -> float:
        """The time limit of the run: the end of the last fault, DETECTION_S for each fault, and the time of three whole
        runs in which the slowest peer does all Work one by one.

        - Where replicas are equal: twice the grace period of a silent stage besides, and UNKNOWN_S, which Work of a
          kind that was never timed may take before it counts as overdue.
        - Where they may differ: one pipeline does all steps, each Work and message after the other, and each Work with
          a stall."""
        ends_s = [fault.until_s for fault in self.faults]
        healed_s = max((end_s for end_s in ends_s if end_s < math.inf), default=0.0)
        run_s = self._equal_run_s if self.are_replicas_equal else self._independent_run_s
        return healed_s + 3 * run_s + DETECTION_S * (1 + len(self.faults)) + self._waits_s + self.extra_s

    @property
    def _equal_run_s(self) -> float:
        slowest_s = max(seconds["F"] + seconds["B"] for seconds in self.seconds.values()) + 2 * self.busy.seconds
        return self.plan.n_stages * self.plan.n_microbatches * self.config.train.steps * slowest_s

    @property
    def _independent_run_s(self) -> float:
        plan, window_s = self.plan, self.config.sync.groups.window_s
        work_s = 3 * (max(seconds["F"] for seconds in self.seconds.values()) + self.stalls.seconds + self.busy.seconds)
        message_s = max(link.latency_s for link in self.links.values()) + 0.05
        n_messages = 4 * plan.n_stages + 8 * plan.n_pipelines
        group_s = max(window_s, 0.0) if window_s < math.inf else 0.0
        step_s = plan.n_stages * max(plan.shares) * work_s + n_messages * message_s + group_s
        return plan.n_pipelines * (self.config.train.steps + 1) * step_s

    @property
    def _waits_s(self) -> float:
        grace_s = self.config.wiring.stage_grace_s  # for a peer that is silent before the first view
        if not self.are_replicas_equal:
            return grace_s
        waits_s = grace_s if self.config.wiring.on_stage_lost == "wait" else 0.0
        hangs = any(fault.kind == SLOW and fault.factor >= OVERDUE_FACTOR for fault in self.faults)
        return grace_s + 2 * waits_s + (UNKNOWN_S if hangs else 0.0)

    def __str__(self) -> str:
        config, (sync, train, wiring) = self.config, (self.config.sync, self.config.train, self.config.wiring)
        settings = {"groups": sync.groups, "server": sync.server}.get(sync.kind, f"delay {sync.delay}")
        head = "tied" if config.model.facts.n_split_trained else "untied"
        return (
            f"seed {self.seed}: {self.plan.shape}, shares {self.plan.shares}, {len(self.plan.workers)} workers, "
            f"{train.steps} steps of {self.plan.n_microbatches} microbatches, {self.plan.schedule}, {wiring.kind}, "
            f"{wiring.routers} routers, window {wiring.window}, {head} head, "
            f"checkpoint every {train.checkpoint_every_steps}, held-out loss every {train.eval_every_steps}, "
            f"clip {config.optim.clip_norm}, codec {sync.codec}, {train.on_nonfinite} at {self.nonfinite}, "
            f"slices of {sync.slice_bytes} bytes, {settings}, {self.stalls}, {self.busy}, persist {self.persist_s} s, "
            f"{wiring.on_stage_lost} at a lost stage after {wiring.stage_grace_s:.3g} s, "
            f"rebalancing every {wiring.rebalance_s:.3g} s, random moves every {self.random_moves_s:.3g} s, "
            f"{'a common disk' if self.has_common_disk else f'disks of their own, {train.checkpoint_copies} copies'}"
        )


def work_seconds(forward_s: float) -> dict[str, float]:
    """Seconds of each kind of Work, in proportion to a forward's."""
    return {"F": forward_s, "B": 2 * forward_s, "E": forward_s, "G": 0.1 * forward_s, "U": 0.1 * forward_s}


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


def finding(case: Case, mutate: Mutate | None = None, observer: Observer | None = None) -> str:
    """One line that says which invariant the case breaks, or which exception it raises; '' if none."""
    try:
        play(case, mutate, observer)
    except InvariantBroken as broken:
        return str(broken)
    except EXCEPTIONS as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Watch(Protocol):
    """The invariants of a case, and the tensors of its peers, on whose contents they look."""

    def make_tensors(self, peer: int, stage: int) -> Tensors:
        """The tensors of a peer at the start of the run."""
        ...

    def begin_process(self, peer: int, machine: Peer, stage: int, version: int) -> Tensors:
        """A process that was not there before: that of a newcomer, or of a peer that starts again. Returns its tensors,
        with a state of this version."""
        ...

    def restart_coordinator(self, disk: Mapping[str, Any]) -> None:
        """A coordinator continues from a disk."""
        ...

    def __call__(self, now_s: float, peer: int, event: ev.Event | Fault, actions: list[ev.Action]) -> None: ...

    def ended(self, outcome: Outcome) -> None:
        """Check what holds when the simulation is over, or its time."""
        ...


def play(case: Case, mutate: Mutate | None = None, observer: Observer | None = None) -> tuple[Outcome, Any]:
    """Simulate the case under its invariants, and return the outcome and these. `mutate(peer, machine, tensors)` may
    replace a machine; `observer` is called for each event, as the invariants are."""
    start = RunStart("fuzz")
    planned = build_peers(case.config, case.plan, start)
    watch: Watch
    if case.are_replicas_equal:
        watch = EqualReplicas(case, planned)
    else:
        watch = IndependentInvariants(Residues(case.config, case.plan, case.nonfinite), case.faults)
    processes = _Processes(case, watch, mutate or (lambda peer, machine, tensors: machine))
    machines = planned | build_workers(case.config, case.plan, start)
    peers = {peer: processes.make_first(peer, machine) for peer, machine in machines.items()}
    environment = Environment(
        link=lambda src, dst: case.links.get((src, dst), LINK_OF_NEWCOMERS),
        cores={peer.host: 1.0 for peer in peers.values()},
        persist_s=case.persist_s,
    )

    def observe(now_s: float, peer: int, event: ev.Event | Fault, actions: list[ev.Action]) -> None:
        if observer:
            observer(now_s, peer, event, actions)
        watch(now_s, peer, event, actions)

    simulation = Simulation(
        processes.make_coordinator(None),
        peers,
        environment,
        case.faults,
        observer=observe,
        processes=ProcessFactory(processes.make_peer, processes.make_coordinator),
    )
    if isinstance(watch, EqualReplicas):
        watch.invariants.watch_disks(simulation.disks, case.config.train.checkpoint_copies)
    outcome = simulation.run(until_s=case.limit_s)
    watch.ended(outcome)
    return outcome, watch


class EqualReplicas:
    """The invariants of a run whose replicas stay equal, with a pool's beside them if it has workers."""

    def __init__(self, case: Case, planned: Mapping[int, Peer]):
        wiring = case.config.wiring
        self._case = case
        self.invariants = Invariants(planned, case.faults, wiring.stage_grace_s, wiring.on_stage_lost == "wait")
        self._pool = PoolInvariants(self.invariants, case.config, case.plan) if case.plan.workers else None

    def make_tensors(self, peer: int, stage: int, version: int = 0) -> SymbolicTensors:
        config, plan = self._case.config, self._case.plan
        groups = tuple(group for group in sync_groups(config, plan) if stage in group.stages)
        worker_words = parameter_words(config, plan, stage) if plan.is_worker(peer) else 0
        layout = StageLayout(stage, plan.n_stages, plan.n_microbatches, groups, config.delay, worker_words)
        found = self.invariants
        checks = Checks(
            found.cover_broken, found.applied, self._is_nonfinite, found.contributions.update, found.gives_back
        )
        tensors = self.invariants.tensors[peer] = SymbolicTensors(peer, layout, checks, version)
        return tensors

    def _is_nonfinite(self, generation: int, step: int) -> bool:
        nonfinite = self._case.nonfinite
        if generation or nonfinite is None or step != nonfinite[-1]:
            return False
        self.invariants.allow_end()
        return True

    def begin_process(self, peer: int, machine: Peer, stage: int, version: int) -> SymbolicTensors:
        tensors = self.make_tensors(peer, stage, version)
        if not self._case.plan.is_worker(peer):  # the step protocol knows nothing of workers
            self.invariants.add_process(peer, machine, tensors)
        return tensors

    def restart_coordinator(self, disk: Mapping[str, Any]) -> None:
        self.invariants.restart_coordinator(disk)

    def __call__(self, now_s: float, peer: int, event: ev.Event | Fault, actions: list[ev.Action]) -> None:
        if self._pool:
            self._pool(peer, event, actions)
        if peer not in self._case.plan.workers:
            self.invariants(now_s, peer, event, actions)

    def ended(self, outcome: Outcome) -> None:
        rows, train = _rows(outcome), self._case.config.train
        self.invariants.ended(outcome.stopped, [row.step for row in rows], train.steps)
        if ev.COORDINATOR in outcome.stopped and not outcome.stopped[ev.COORDINATOR].code:
            self.invariants.check_held_out(rows, train)


def _rows(outcome: Outcome) -> list[StepReport]:
    """The rows that the run has at its end."""
    rows: list[StepReport] = []
    for _, _, report in outcome.reports:
        if isinstance(report, RollbackReport):
            rows = [row for row in rows if row.step < report.to]
        elif isinstance(report, StepReport):
            rows.append(report)
    return rows


class _Processes:
    """Makes the processes of a case, each peer on a host of its own."""

    def __init__(self, case: Case, watch: Watch, mutate: Mutate):
        self._case = case
        self._watch = watch
        self._mutate = mutate

    def make_first(self, peer: int, machine: Peer) -> SimPeer:
        """A peer of the plan at the start of the run."""
        stage, _ = self._case.plan.seat(peer)
        return self._make_sim_peer(peer, machine, stage, self._watch.make_tensors(peer, stage))

    def make_peer(self, peer: int, stage: int | None) -> SimPeer:
        """A newcomer for `stage`, or a peer of the plan that starts again; see ProcessFactory."""
        config, plan, start = self._case.config, self._case.plan, RunStart("fuzz")
        version = 0
        if plan.is_worker(peer):
            machine = build_worker(config, plan, peer, start)
        elif stage is None or not self._case.are_replicas_equal:
            machine = build_peer(config, plan, peer, start)
        else:
            machine, version = build_newcomer(config, plan, peer, stage, start), NO_STATE
        own = stage if version == NO_STATE else plan.seat(peer)[0]
        is_own = self._case.are_replicas_equal or stage in (None, own)
        assert own is not None and is_own, f"peer {peer} comes to stage {stage}, not its own"
        return self._make_sim_peer(peer, machine, own, self._watch.begin_process(peer, machine, own, version))

    def make_coordinator(self, disk: Mapping[str, Any] | None) -> DrivenMachine:
        """The first coordinator, or with `disk` one that continues from it."""
        case = self._case
        if disk is not None:
            self._watch.restart_coordinator(disk)
        durable_state = None if disk is None else load_durable_state(disk)
        start = RunStart("fuzz", last_term=disk.get(TERM, 0) if disk else 0)
        balance = RandomMoves(case.seed, case.random_moves_s) if case.random_moves_s else None
        machine = build_coordinator(case.config, case.plan, start, durable_state, balance)
        return self._mutate(ev.COORDINATOR, machine, None)

    def _make_sim_peer(self, peer: int, machine: Peer, stage: int, tensors: Tensors) -> SimPeer:
        case = self._case
        seconds = case.seconds.get(peer, case.seconds[case.plan.placement[stage][0]])
        return SimPeer(
            self._mutate(peer, machine, tensors),
            tensors,
            f"host{peer}",
            seconds,
            "" if case.has_common_disk else f"disk{peer}",
            stalls=PeerStalls(case.stalls, peer) if case.stalls.prob else None,
            busy_s=case.busy.of(case.seed, peer),
            is_outside=case.plan.is_worker(peer),
        )
