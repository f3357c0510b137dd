"""Cases from a seed: a small run, its links and its faults, played without arithmetic under the invariants.

An equal seed gives an equal case and an equal run, whatever was played before. `play` raises InvariantBroken.
In some cases peers change stages: by their queues, or by the dice, which move whom a queue never would.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from jaxdt.build import RunStart, build_coordinator, build_newcomer, build_peer, build_peers
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import DurableState, load_durable_state
from jaxdt.membership.peer import Machine, Peer
from jaxdt.membership.rebalance_api import ByNumber, Move, Stages
from jaxdt.protocol.events import COORDINATOR, Action, Event
from jaxdt.sim.cluster import Observer, Simulation
from jaxdt.sim.faults import (
    CLOG,
    CONTROL,
    CRASH,
    ENDS,
    JOIN,
    LEAVE,
    RESTART,
    Fault,
    broken_link,
    draw,
    spares_every_stage,
)
from jaxdt.sim.fuzz.invariants import InvariantBroken, Invariants
from jaxdt.sim.fuzz.symbolic_tensors import NO_STATE, SymbolicTensors
from jaxdt.sim.sim_peer import Outcome, SimPeer
from jaxdt.spec import config as configs
from jaxdt.spec.config import NetConfig, RunConfig, WiringConfig
from jaxdt.spec.network import Link
from jaxdt.spec.plan import Plan
from jaxdt.spec.sizes import sync_groups
from jaxdt.wiring.base import wiring_entry

N_STEPS, N_STEPS_OF_MOVES = 3, 6
DETECTION_S = 30.0  # until a fault is noticed, judged and made good, at most

# What a machine raises is a finding too.
RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)

Mutate = Callable[[int, Machine, SymbolicTensors | None], Machine]


@dataclass(frozen=True)
class Case:
    """`seconds[peer]` of every kind of Work; `links` by ordered pair; `spoilt`: the step whose first gradient is not
    finite; `restless_s`: how often the dice make peers change stages (0: never)."""

    seed: int
    config: RunConfig
    plan: Plan
    seconds: Mapping[int, Mapping[str, float]]
    links: Mapping[tuple[int, int], Link]
    persist_s: float
    faults: tuple[Fault, ...]
    spoilt: int | None
    restless_s: float = 0.0

    @property
    def moves(self) -> bool:
        """Whether peers may change stages."""
        return bool(self.restless_s or self.config.wiring.rebalance_s)

    @property
    def limit_s(self) -> float:
        """When the run is over at the latest: from the last fault's end on, the time of three whole runs one Work after
        the other on the slowest peer, and DETECTION_S for each fault."""
        slowest_s = max(seconds["F"] + seconds["B"] for seconds in self.seconds.values())
        serial_s = self.plan.n_stages * self.plan.n_microbatches * self.config.train.steps * slowest_s
        ends_s = [fault.until_s for fault in self.faults]
        healed_s = max((end_s for end_s in ends_s if end_s < math.inf), default=0.0)
        return healed_s + 3 * serial_s + DETECTION_S * (1 + len(self.faults))

    def __str__(self) -> str:
        wiring, train = self.config.wiring, self.config.train
        return (
            f"seed {self.seed}: {self.plan.n_stages} stages x {self.plan.n_pipelines}, "
            f"{self.plan.n_microbatches} microbatches, delay {self.config.sync.delay}, {wiring.kind}, "
            f"{wiring.routers} routers, window {wiring.window}, "
            f"{'tied' if self.config.model.tied_head else 'untied'} head, evaluation every {train.eval_every_steps}, "
            f"persist {self.persist_s} s, {train.on_nonfinite}{'' if self.spoilt is None else f' at {self.spoilt}'}, "
            f"rebalancing every {wiring.rebalance_s:.3g} s, the dice every {self.restless_s:.3g} s"
        )


def draw_case(seed: int, wiring: str = "") -> Case:
    """Everything of a case; without a `wiring`, one in three is wired `fixed`."""
    rng = random.Random(f"case {seed}")
    config = _with_delay(_config(rng, wiring or ("swarm", "swarm", "fixed")[seed % 3]), seed)
    plan = configs.default_plan(config)
    work_s = rng.choice((0.05, 0.3))
    seconds = {peer: _seconds(work_s * rng.uniform(0.5, 3.0)) for peer in plan.peers}
    ends = [COORDINATOR, *plan.peers]
    far_s, gbps = rng.choice(((0.001, 0.01), (0.01, 0.2), (0.1, 0.5))), rng.choice((1e-4, 1e-3))
    may_take = plan.placement if rng.random() < 0.9 else [plan.peers]  # else a stage may lose all
    persist_s = rng.choice((0.0, 0.05, 0.5))
    run_s = N_STEPS * (
        10 * work_s * (plan.n_microbatches / plan.n_pipelines + plan.n_stages) + 8 * far_s[1] + persist_s
    )
    pause_s, n_faults = rng.choice((1.0, 6.0, 15.0)), rng.choice((0, 1, 2, 2, 3, 4))
    case = Case(
        seed=seed,
        config=config,
        plan=plan,
        seconds=seconds,
        links={(a, b): Link(rng.choice(far_s), gbps) for a in ends for b in ends if a != b},
        persist_s=persist_s,
        faults=_with_arrivals(
            seed, rng, plan, run_s, draw(seed, may_take, n_faults, rng.choice((0.5, 1.0)) * run_s, pause_s)
        ),
        spoilt=None if config.train.on_nonfinite == "stop" else rng.randrange(N_STEPS),
    )
    case = _with_lost_word(random.Random(f"lost word {seed}"), case, run_s)
    return _with_moves(random.Random(f"moves {seed}"), case, run_s / N_STEPS)


def _with_lost_word(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a fifth of the cases with a delay the coordinator does not reach a peer, and dies before it does: what it has
    said meanwhile, of up to two steps, is lost."""
    dies = any(fault.kind in ENDS and fault.peer == COORDINATOR for fault in case.faults)
    if rng.random() >= 0.2 or not case.config.sync.delay or dies:
        return case
    at_s, unheard_s = rng.uniform(0.0, run_s), rng.uniform(0.1, 0.5) * run_s
    dead_s = at_s + unheard_s
    deaf = (rng.choice(sorted(case.plan.peers)),)
    lost = [
        Fault(at_s, CLOG, COORDINATOR, unheard_s + 0.1, others=deaf, factor=0.0, lane=CONTROL),
        Fault(dead_s, CRASH, COORDINATOR),
        Fault(dead_s + rng.uniform(0.2, 3.0), RESTART, COORDINATOR),
    ]
    return replace(case, faults=tuple(sorted([*case.faults, *lost], key=lambda fault: fault.at_s)))


def _with_moves(rng: random.Random, case: Case, step_s: float) -> Case:
    """In a third of the cases peers change stages, about once a step or less often."""
    kind = rng.choice(("queue", "dice", "", "", "", ""))
    if not kind or not wiring_entry(case.config.wiring.kind).may_change_stages:
        return case
    n_steps = N_STEPS_OF_MOVES + case.config.sync.delay
    every_s, train = rng.choice((0.1, 0.3, 1.0)) * step_s, replace(case.config.train, steps=n_steps)
    moves = dict(rebalance_s=every_s, rebalance_moves=rng.choice((1, 3))) if kind == "queue" else {}
    config = replace(case.config, train=train, wiring=replace(case.config.wiring, **moves))
    return replace(case, config=config, restless_s=every_s if kind == "dice" else 0.0)


class Restless(ByNumber):
    """Moves whoever may move, anywhere, every now and then."""

    def __init__(self, seed: int, every_s: float):
        self._rng, self._every_s, self._due_s = random.Random(f"restless {seed}"), every_s, 0.0

    def moves(self, now_s: float, stages: Stages, at_work: Collection[int]) -> list[Move]:
        if now_s < self._due_s:
            return []
        self._due_s = now_s + self._rng.uniform(0.5, 1.5) * self._every_s
        where = {peer: stage for stage, peers in enumerate(stages) for peer in peers if peer in at_work}
        drawn = self._rng.sample(sorted(where), min(len(where), self._rng.choice((1, 1, 2))))
        return [Move(p, where[p], self._rng.choice([s for s in range(len(stages)) if s != where[p]])) for p in drawn]


def _with_arrivals(seed: int, rng: random.Random, plan: Plan, run_s: float, faults: list[Fault]) -> tuple[Fault, ...]:
    """Some who crashed are started again, others come or leave, the coordinator may die and be started again, and in a
    quarter of the cases two peers lose one another."""
    found = list(faults)
    for fault in faults:
        if fault.kind in ENDS and rng.random() < 0.5:
            found.append(Fault(fault.at_s + rng.uniform(0.0, run_s), RESTART, fault.peer))
    found += [Fault(rng.uniform(0.0, run_s), JOIN, n) for n in range(rng.choice((0, 0, 1, 2)))]
    if rng.random() < 0.2:
        found.append(Fault(rng.uniform(0.5, 1.0) * run_s, LEAVE, rng.choice(sorted(plan.peers))))
    if rng.random() < 0.15:
        at_s = rng.uniform(0.0, run_s)
        found += [Fault(at_s, CRASH, COORDINATOR), Fault(at_s + rng.uniform(0.2, 20.0), RESTART, COORDINATOR)]
    link = broken_link(seed, plan.placement, run_s)
    if seed % 4 == 3 and spares_every_stage([*found, link], plan.placement):
        found.append(link)
    return tuple(sorted(found, key=lambda fault: fault.at_s))


def _config(rng: random.Random, kind: str) -> RunConfig:
    stages, pipelines = rng.choice(((2, 1), (2, 2), (2, 2), (2, 3), (2, 3), (2, 4), (3, 2), (3, 2), (3, 3)))
    n_peers = stages * pipelines
    nonfinite = rng.choice(("stop",) * 8 + ("skip", "rollback"))
    evals = dict(eval_every_steps=rng.choice((0, 2)), eval_microbatches=2)
    model = dict(preset="debug", n_layers=3, d_model=8, n_heads=2, d_ff=8, seq_len=4, vocab_size=16)
    parsed = configs.parse(
        dict(
            model=model | {"tied_head": rng.random() < 0.5},
            plan=dict(stages=stages, pipelines=pipelines, microbatches=max(pipelines, rng.choice((1, 3, 5, 5)))),
            train=dict(steps=N_STEPS, on_nonfinite=nonfinite, checkpoint_every_steps=rng.choice((0, 1))) | evals,
            sync=dict(slice_bytes=rng.choice((1 << 10, 1 << 20))),
        )
    )
    wiring = WiringConfig(
        kind, rng.choice((1, 2, n_peers)), rng.choice((0, 1, 3)), "stop", rng.choice((0, 500, 1 << 30))
    )
    return replace(parsed, wiring=wiring, net=NetConfig(heartbeat_s=0.5, deadline_floor_s=4.0))


def _with_delay(config: RunConfig, seed: int) -> RunConfig:
    """Every other case delays its updates, half of those after a step without."""
    sync = replace(config.sync, delay=seed % 2, delay_after_steps=seed // 2 % 2)
    return replace(config, sync=sync, train=replace(config.train, steps=N_STEPS + sync.delay))


def _seconds(forward_s: float) -> dict[str, float]:
    return {"F": forward_s, "B": 2 * forward_s, "E": forward_s, "G": 0.1 * forward_s, "U": 0.1 * forward_s}


def finding(case: Case, mutate: Mutate | None = None, observer: Observer | None = None) -> str:
    """'' or one line with what was broken."""
    try:
        play(case, mutate, observer)
    except InvariantBroken as broken:
        return str(broken)
    except RAISED as error:
        return f"{type(error).__name__}: {error}"
    return ""


def play(case: Case, mutate: Mutate | None = None, observer: Observer | None = None) -> tuple[Outcome, int]:
    """Run the case under the invariants; what came of it, and the number of events that were looked at.
    `mutate(who, machine, contents)` may give another machine instead; `observer` hears what the invariants hear."""
    peers, coordinator = build_peers(case.config, case.plan, RunStart("fuzz")), _coordinator(case)
    taken = frozenset(peer for fault in case.faults for peer in fault.takes) if case.moves else None
    invariants = Invariants(peers, spares_every_stage(case.faults, case.plan.placement), taken)
    seats = _seats(case, peers, invariants)
    if mutate:
        coordinator = mutate(COORDINATOR, coordinator, None)
        changed = {peer: mutate(peer, seat.machine, seat.tensors) for peer, seat in seats.items()}
        seats = {peer: replace(seat, machine=changed[peer]) for peer, seat in seats.items()}
    cores = {seat.host: 1.0 for seat in seats.values()}

    def watch(now_s: float, who: int, what: Event | Fault, actions: list[Action]) -> None:
        if observer:
            observer(now_s, who, what, actions)
        invariants(now_s, who, what, actions)

    far = Link(0.05, 1e-3)  # to and from newcomers
    link = lambda src, dst: case.links.get((src, dst), far)  # noqa: E731
    seat_of, coordinator_of = _again(case, invariants, mutate)
    how = dict(faults=case.faults, observer=watch, seat_of=seat_of, coordinator_of=coordinator_of)
    simulation = Simulation(coordinator, seats, link, cores, case.persist_s, **how)
    outcome = simulation.run(until_s=case.limit_s)
    invariants.ended(outcome.stopped, [fields["step"] for fields in outcome.fields("step")], case.config.train.steps)
    return outcome, invariants.n_checked


def _again(case: Case, invariants: Invariants, mutate: Mutate | None) -> tuple[Callable, Callable]:
    """How the processes of newcomers, of peers that crashed and of a coordinator that crashed are made."""
    config, plan = case.config, case.plan
    changed = mutate or (lambda who, machine, contents: machine)

    def seat_of(peer: int, stage: int | None) -> SimPeer:
        seconds = case.seconds.get(peer, case.seconds[plan.placement[stage or 0][0]])
        if stage is None:
            stage, version, machine = plan.seat(peer)[0], 0, build_peer(config, plan, peer, RunStart("fuzz"))
        else:
            version = NO_STATE
            machine = build_newcomer(config, plan, peer, stage, RunStart("fuzz"))
        contents = _contents(case, peer, stage, invariants, version)
        invariants.comes(peer, machine, contents)
        return SimPeer(changed(peer, machine, contents), contents, f"host{peer}", seconds)

    def coordinator_of(disk: Mapping) -> Machine:
        memory = load_durable_state(disk, invariants.checkpoint)
        return changed(COORDINATOR, _coordinator(case, memory), None)

    return seat_of, coordinator_of


def _coordinator(case: Case, memory: DurableState | None = None) -> Coordinator:
    balance = Restless(case.seed, case.restless_s) if case.restless_s else None
    return build_coordinator(case.config, case.plan, RunStart("fuzz"), memory, balance)


def _contents(case: Case, peer: int, stage: int, invariants: Invariants, version: int) -> SymbolicTensors:
    plan = case.plan

    def spoilt(generation: int, step: int) -> bool:
        if (generation, step) != (0, case.spoilt):
            return False
        invariants.may_end()
        return True

    own = tuple(group for group in sync_groups(case.config, plan) if stage in group.stages)
    sizes = (stage, plan.n_stages, plan.n_microbatches)
    return SymbolicTensors(peer, *sizes, own, invariants.broken, invariants.applied, spoilt, version, case.config.delay)


def _seats(case: Case, peers: Mapping[int, Peer], invariants: Invariants) -> dict[int, SimPeer]:
    """Every peer on a host of its own, with SymbolicTensors for tensors."""
    seats = {}
    for peer, machine in peers.items():
        contents = _contents(case, peer, case.plan.seat(peer)[0], invariants, 0)
        invariants.contents[peer] = contents
        seats[peer] = SimPeer(machine, contents, f"host{peer}", case.seconds[peer])
    return seats
