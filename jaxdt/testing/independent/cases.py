"""Cases from a seed: a small run of independent pipelines, its links, stalls and faults, simulated with residues.

An equal seed gives an equal case and an equal run: the texts that seed a random.Random decide what is drawn, so they
stay as they are. `play` raises InvariantBroken.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxdt.build import RunStart, build_coordinator, build_peer, build_peers
from jaxdt.membership.coordinator import TERM
from jaxdt.membership.coordinator_config import load_durable_state
from jaxdt.membership.peer import DrivenMachine
from jaxdt.protocol import events as ev
from jaxdt.run import config as configs
from jaxdt.run.config import RunConfig
from jaxdt.run.network import Link
from jaxdt.run.plan import Plan
from jaxdt.sim.cluster import Observer, Simulation
from jaxdt.sim.faults import (
    CLOG,
    CRASH,
    CRASH_SEEN_S,
    CUT,
    DEAD_LINK_S,
    DUPLICATE,
    FAIL,
    LEAVE,
    PAUSE,
    POWER_OFF,
    REORDER,
    RESTART,
    SLOW,
    STALE,
    Fault,
    draw,
)
from jaxdt.sim.sim_peer import Environment, Outcome, ProcessFactory, SimPeer
from jaxdt.sim.stragglers.stalls import STEP, WORK, PeerStalls, Stalls
from jaxdt.testing.cases import Busy, finding_of, work_seconds
from jaxdt.testing.independent.invariants import Invariants, limit_s
from jaxdt.testing.independent.residues import Residues
from jaxdt.testing.independent.tensors import ResidueTensors

BLIP_S = 1.5  # a peer that does nothing for so long is not lost, also if a link stands still just then
HELD_S = 8.0  # longest time for which a link between servers stands still
DETECTION_S = 30.0  # longest time until a fault is noticed
HARMLESS_KINDS = (PAUSE, SLOW, CLOG, CUT, DUPLICATE, REORDER)  # as they are drawn where no peer may be lost
LOSSES = (CRASH, POWER_OFF, FAIL, LEAVE, PAUSE, CUT)
SYNCS_DRAWN = ("groups", "groups", "groups", "server")  # by seed
RETURNS_FRAC = 0.3  # of the cases with groups
STEPS_MORE = 8  # for a run in which a pipeline may come back
SMALL_SLICE, LARGE_SLICE = 1 << 9, 1 << 20

# (peer, machine, its tensors) -> machine; tensors is None for the coordinator
Mutate = Callable[[int, DrivenMachine, ResidueTensors | None], DrivenMachine]


@dataclass(frozen=True)
class Case:
    """A run with its faults. `seconds[peer]`: per kind of Work; `links`: by ordered pair; `stalls` and `busy`: of all
    peers."""

    seed: int
    arithmetic: Residues
    seconds: Mapping[int, Mapping[str, float]]
    links: Mapping[tuple[int, int], Link]
    persist_s: float
    stalls: Stalls
    busy: Busy
    faults: tuple[Fault, ...]

    @property
    def config(self) -> RunConfig:
        return self.arithmetic.config

    @property
    def plan(self) -> Plan:
        return self.arithmetic.plan

    @property
    def limit_s(self) -> float:
        """The time limit of the run: the end of the last fault, DETECTION_S for each fault, and the time in which one
        pipeline does all steps three times, each Work and message after the other, and each Work with a stall."""
        config, plan = self.config, self.plan
        work_s = 3 * (max(seconds["F"] for seconds in self.seconds.values()) + self.stalls.seconds + self.busy.seconds)
        message_s = max(link.latency_s for link in self.links.values()) + 0.05
        n_messages = 4 * plan.n_stages + 8 * plan.n_pipelines
        step_s = plan.n_stages * max(plan.shares) * work_s + n_messages * message_s + max(self._window_s, 0.0)
        n_steps = plan.n_pipelines * (config.train.steps + 1)
        return limit_s(3 * n_steps * step_s + DETECTION_S * (1 + len(self.faults)), self.faults)

    @property
    def _window_s(self) -> float:
        window_s = self.config.sync.groups.window_s
        return window_s if window_s < math.inf else 0.0

    def __str__(self) -> str:
        sync, train = self.config.sync, self.config.train
        settings = sync.groups if sync.kind == "groups" else sync.server
        return (
            f"seed {self.seed}: {self.plan.shape}, shares {self.plan.shares}, {train.steps} steps, "
            f"{self.plan.schedule}, checkpoint every {train.checkpoint_every_steps}, held-out loss every "
            f"{train.eval_every_steps}, clip {self.config.optim.clip_norm}, codec {sync.codec}, "
            f"{train.on_nonfinite} at {self.arithmetic.nonfinite}, slices of {sync.slice_bytes} bytes, {self.stalls}, "
            f"{self.busy}, persist {self.persist_s} s, {settings}"
        )


def draw_case(seed: int, sync: str = "") -> Case:
    """The case of a seed, with this kind of sync or one that depends on the seed."""
    rng = random.Random(f"independent {seed}")
    sync = sync or SYNCS_DRAWN[seed % len(SYNCS_DRAWN)]
    work_s = rng.choice((0.05, 0.3))
    latencies_s = rng.choice(((0.001, 0.01), (0.001, 0.01), (0.01, 0.2), (0.1, 0.4)))
    n_stages, n_pipelines, n_microbatches = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 3)
    step_s = 3 * work_s * (n_microbatches + n_stages - 1) + 4 * latencies_s[1]
    raw = _draw_config(rng, sync, step_s, (n_stages, n_pipelines, n_microbatches))
    _draw_options(random.Random(f"options {seed}"), raw)
    returns = random.Random(f"return {seed}")
    has_returns = sync == "groups" and n_pipelines > 1 and returns.random() < RETURNS_FRAC
    raw["train"]["steps"] += STEPS_MORE if has_returns else 0
    config = configs.parse(raw)
    plan = configs.default_plan(config)
    seconds = {peer: work_seconds(work_s * rng.uniform(0.5, 2.0)) for peer in plan.peers}
    ends = [ev.COORDINATOR, *plan.peers]
    gbps = rng.choice((1e-4, 1e-3))
    links = {(src, dst): Link(rng.choice(latencies_s), gbps) for src in ends for dst in ends if src != dst}
    draws = rng.choice((STEP, WORK, WORK))
    stalls = Stalls(rng.choice((0.0, 0.1, 0.3)), rng.choice((0.5, 1.0, 4.0)) * step_s, seed, draws)
    case = Case(
        seed=seed,
        arithmetic=Residues(config, plan, _draw_nonfinite(rng, config, plan)),
        seconds=seconds,
        links=links,
        persist_s=rng.choice((0.0, 0.05, 0.5)),
        stalls=replace(stalls, seconds=min(stalls.seconds, 2.0)),
        busy=Busy.draw(seed),
        faults=(),
    )
    run_s = config.train.steps * (step_s + stalls.prob * case.stalls.seconds)
    faults = [*_draw_blips(seed, rng, plan, run_s), *_draw_loss(random.Random(f"loss {seed}"), plan, run_s)]
    if not any(fault.kind == RESTART for fault in faults):
        faults += _draw_restarts(random.Random(f"restart {seed}"), plan, run_s)
    faults += _draw_held_links(random.Random(f"servers {seed}"), plan, run_s)
    faults += _draw_returns(returns, plan, run_s) if has_returns else []
    return replace(case, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _draw_config(rng: random.Random, sync: str, step_s: float, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """The fields of a config. `sizes`: stages, pipelines, and microbatches of each pipeline (some get one more)."""
    n_stages, n_pipelines, n_microbatches = sizes
    n_more = rng.randrange(n_pipelines)
    draw_settings = {"groups": _draw_groups, "server": _draw_server}[sync]
    settings = draw_settings(rng, step_s, n_pipelines)
    has_servers = sync == "server"
    model = dict(preset="debug", n_layers=4, d_model=8, n_heads=2, d_ff=8, seq_len=4, vocab_size=16, tied_head=False)
    checkpoint_every = rng.choice((0, 0, 1, 2, 3))
    return dict(
        model=model,
        plan=dict(
            stages=n_stages,
            pipelines=n_pipelines,
            microbatches=n_pipelines * n_microbatches + n_more,
            servers=int(has_servers),
            schedule=rng.choice(("1f1b", "1f1b", "gpipe")),
        ),
        train=dict(
            steps=rng.randint(3, 8),
            checkpoint_every_steps=checkpoint_every,
            on_nonfinite=rng.choice(("stop", "skip", "skip")),
        ),
        optim=dict(clip_norm=rng.choice((0.0, 1.0, 1.0))),
        wiring=dict(kind="independent", on_stage_lost="stop"),
        sync=dict(kind=sync, slice_bytes=rng.choice((SMALL_SLICE, LARGE_SLICE)), **{sync: settings}),
        net=dict(heartbeat_s=0.5, deadline_floor_s=4.0),
    )


def _draw_options(rng: random.Random, raw: dict[str, Any]) -> None:
    """In half of the cases exchanged vectors are rounded, and groups have options that only some systems use."""
    if rng.random() < 0.5:
        return
    sync, train, groups = raw["sync"], raw["train"], raw["sync"].get("groups")
    sync["codec"] = rng.choice(("none", "bf16"))
    train["eval_every_steps"] = rng.choice((0, 1, 2, 3))
    train["eval_microbatches"] = rng.choice((1, 3))
    if groups is None:
        return
    groups["weights"] = rng.choice(("equal", "samples"))
    groups["clip"] = rng.choice(("pipeline", "stage"))
    groups["average_moments"] = rng.random() < 0.3
    draw_more = rng.choice((_keep, _draw_stash, _draw_stash, _draw_streaming, _draw_streaming))
    draw_more(rng, raw)


def _keep(rng: random.Random, raw: dict[str, Any]) -> None:
    """No more options."""


def _draw_stash(rng: random.Random, raw: dict[str, Any]) -> None:
    """Pipelines that are never flushed."""
    raw["plan"] |= dict(schedule="stash", microbatches=raw["plan"]["pipelines"])
    raw["sync"]["groups"]["clip"] = "stage"


def _draw_streaming(rng: random.Random, raw: dict[str, Any]) -> None:
    """All replicas average fragments, with lags, and keep a share of their own. Each stage has a block for each
    fragment."""
    raw["model"]["n_layers"] = 12
    drawn = raw["sync"]["groups"]
    n_fragments, distance = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    raw["sync"]["groups"] = dict(
        match="all",
        outer=rng.choice(("none", "none", "sgd", "nesterov")),
        fragments=n_fragments,
        every_steps=n_fragments * distance + rng.randrange(n_fragments),
        lag_steps=rng.choice((0, distance - 1, distance - 1)),
        mix_frac=rng.choice((0.0, 0.25, 0.5)),
        **{name: drawn[name] for name in ("weights", "clip", "average_moments")},
    )
    raw["train"]["steps"] += n_fragments * distance


def _draw_groups(rng: random.Random, step_s: float, n_pipelines: int) -> dict[str, Any]:
    match = rng.choice(("window", "window", "window", "window", "all", "all", "pairs", "none"))
    settings: dict[str, Any] = dict(match=match, every_steps=rng.choice((1, 1, 1, 2, 3)))
    if match == "window":
        window_s = rng.choice((0.02, 0.1, 0.25, 1.0, 1.0, 0.0, math.inf)) * step_s if n_pipelines else 0.0
        cap = 0 if math.isinf(window_s) else rng.choice((0, 0, 2, 3))
        n_groups = rng.choice((-1, 0, 1, 2, 3, n_pipelines, 2 * n_pipelines))
        kind = rng.choice(("sliding", "sliding", "tumbling"))
        settings |= dict(window_s=window_s, group_size_max=cap, connectivity_groups=n_groups, connectivity_window=kind)
        settings["window_frac"] = 0.0 if window_s else rng.choice((0.0, 0.1, 0.5))
    if match == "pairs":
        settings["seed"] = rng.randrange(100)
    if match == "all":
        settings["outer"] = rng.choice(("none", "sgd", "nesterov"))
    return settings


def _draw_server(rng: random.Random, step_s: float, n_pipelines: int) -> dict[str, Any]:
    del step_s, n_pipelines
    return dict(staleness=rng.choice((0, 1, 2, 4)), wave=rng.choice((1, 1, 2, 3)))


def _draw_nonfinite(rng: random.Random, config: RunConfig, plan: Plan) -> tuple[int, int, int] | None:
    """In an eighth of the cases a gradient is not finite."""
    place = rng.randrange(plan.n_stages), rng.randrange(plan.n_pipelines), rng.randrange(config.train.steps)
    return place if rng.random() < 1 / 8 else None


def _draw_blips(seed: int, rng: random.Random, plan: Plan, run_s: float) -> list[Fault]:
    """Faults that lose nobody: links that stand still, are slow or cut for a moment, a device that is slow, messages
    that come twice or late, the coordinator or a peer that does nothing for a while."""
    pause_s = rng.choice((1.0, 6.0, 15.0))
    n_faults = rng.choice((0, 0, 1, 2, 3))
    if len(plan.peers) == 1:
        n_faults = min(n_faults, 1)  # a coordinator that has paused leaves no pair of ends to draw
    faults = draw(seed, [[peer] for peer in plan.peers], n_faults, run_s, pause_s, HARMLESS_KINDS)
    if rng.random() < 0.25:
        faults.append(Fault(rng.uniform(0.0, run_s), PAUSE, rng.choice(plan.peers), rng.uniform(0.0, BLIP_S)))
    return faults


def _draw_held_links(rng: random.Random, plan: Plan, run_s: float) -> list[Fault]:
    """In a third of the cases with several servers the first one's links to another stand still now and then: news of a
    snapshot reaches the others late."""
    if len(plan.roles.servers) < 2 or rng.random() < 2 / 3:
        return []
    first, *others = [server for (server,) in plan.roles.servers]
    held = [(rng.uniform(0.0, run_s), rng.uniform(0.0, HELD_S)) for _ in range(rng.randint(1, 4))]
    return [Fault(at_s, CLOG, first, s, others=(rng.choice(others),), factor=0.0) for at_s, s in held]


def _draw_loss(rng: random.Random, plan: Plan, run_s: float) -> list[Fault]:
    """In two fifths of the cases a peer is lost or leaves, in some of them two are, or the coordinator dies and is
    started again."""
    if rng.random() >= 0.4:
        return []
    at_s = rng.uniform(0.0, run_s)
    if rng.random() < 0.2:
        return [Fault(at_s, CRASH, ev.COORDINATOR), Fault(at_s + rng.uniform(0.2, 20.0), RESTART, ev.COORDINATOR)]
    losses = [_draw_lost_peer(rng, plan, at_s)]
    if rng.random() < 0.3:
        losses.append(_draw_lost_peer(rng, plan, rng.choice((at_s, rng.uniform(0.0, run_s)))))
    return losses


def _draw_restarts(rng: random.Random, plan: Plan, run_s: float) -> list[Fault]:
    """In a quarter of the cases the coordinator dies and is started again, in some of them twice. A peer may be lost
    meanwhile, and the one that died may go on beside its successor."""
    if rng.random() >= 0.25:
        return []
    faults: list[Fault] = []
    at_s = rng.uniform(0.0, run_s)
    for _ in range(rng.choice((1, 1, 2))):
        kind, seen_s = rng.choice(((CRASH, CRASH_SEEN_S), (POWER_OFF, DEAD_LINK_S)))
        again_s = at_s + seen_s + rng.choice((rng.uniform(0.1, 3.0), rng.uniform(0.1, 20.0)))
        faults += [Fault(at_s, kind, ev.COORDINATOR), Fault(again_s, RESTART, ev.COORDINATOR)]
        if rng.random() < 0.3:
            faults.append(_draw_lost_peer(rng, plan, rng.uniform(at_s, again_s)))
        if rng.random() < 0.2:
            faults.append(Fault(again_s + rng.uniform(0.0, 1.0), STALE, ev.COORDINATOR, rng.uniform(0.0, 10.0)))
        at_s = again_s + rng.choice((0.05, rng.uniform(0.0, 0.5), rng.uniform(0.0, run_s)))
    return faults


def _draw_returns(rng: random.Random, plan: Plan, run_s: float) -> list[Fault]:
    """A peer dies and is started again. In some cases another process dies while the pipeline comes back, at any place,
    and in some of these it is started again too."""
    at_s, peer = rng.uniform(0.0, run_s / 3), rng.choice(plan.peers)
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind, seen_s = rng.choice(((CRASH, CRASH_SEEN_S), (POWER_OFF, DEAD_LINK_S)))
        again_s = at_s + seen_s + rng.choice((rng.uniform(0.1, 1.0), rng.uniform(0.1, 10.0)))
        faults.append(Fault(at_s, kind, peer))
        if peer == ev.COORDINATOR or rng.random() < 0.9:
            faults.append(Fault(again_s, RESTART, peer))
        at_s = again_s + rng.choice((rng.uniform(0.0, 1.0), rng.uniform(0.0, 6.0)))
        peer = rng.choice((peer, ev.COORDINATOR, *plan.peers))
    return faults


def _draw_lost_peer(rng: random.Random, plan: Plan, at_s: float) -> Fault:
    kind, peer = rng.choice(LOSSES), rng.choice(plan.peers)
    if kind == CUT:
        breaks_s = rng.choice((CRASH_SEEN_S, DEAD_LINK_S))
        return Fault(at_s, CUT, peer, rng.uniform(5.0, 20.0), others=(ev.COORDINATOR,), breaks_s=breaks_s)
    return Fault(at_s, kind, peer, rng.uniform(2.0, 20.0) if kind == PAUSE else 0.0)


def finding(case: Case, mutate: Mutate | None = None, observer: Observer | None = None) -> str:
    """One line that says which invariant the case breaks, or which exception it raises; '' if none."""
    return finding_of(lambda: play(case, mutate, observer))


def play(case: Case, mutate: Mutate | None = None, observer: Observer | None = None) -> tuple[Outcome, Invariants]:
    """Simulate the case under the invariants. `mutate(peer, machine, tensors)` may replace a machine; `observer` is
    called as the invariants are."""
    invariants = Invariants(case.arithmetic, case.faults)
    processes = _Processes(case, invariants, mutate or _unchanged)
    machines = build_peers(case.config, case.plan, RunStart("fuzz"))
    peers = {peer: processes.make_peer(peer, machine) for peer, machine in machines.items()}
    environment = Environment(
        link=lambda src, dst: case.links[src, dst],
        cores={peer.host: 1.0 for peer in peers.values()},
        persist_s=case.persist_s,
    )

    def observe(now_s: float, peer: int, event: ev.Event | Fault, actions: list[ev.Action]) -> None:
        if observer:
            observer(now_s, peer, event, actions)
        invariants(now_s, peer, event, actions)

    simulation = Simulation(
        processes.make_coordinator(None),
        peers,
        environment,
        case.faults,
        observer=observe,
        processes=ProcessFactory(processes.begin_anew, processes.make_coordinator),
    )
    outcome = simulation.run(until_s=case.limit_s)
    invariants.ended(outcome)
    return outcome, invariants


def _unchanged(peer: int, machine: DrivenMachine, tensors: ResidueTensors | None) -> DrivenMachine:
    return machine


class _Processes:
    """Makes the processes of a case, each peer on a host of its own."""

    def __init__(self, case: Case, invariants: Invariants, mutate: Mutate):
        self._case = case
        self._invariants = invariants
        self._mutate = mutate

    def make_peer(self, peer: int, machine: DrivenMachine) -> SimPeer:
        """A peer of the plan at the start of the run."""
        tensors = ResidueTensors(peer, self._case.arithmetic, self._invariants.watcher)
        self._invariants.tensors[peer] = tensors
        return self._process(peer, machine, tensors)

    def begin_anew(self, peer: int, stage: int | None) -> SimPeer:
        """A peer of the plan that was started again, or was evicted."""
        assert stage in (None, self._case.plan.seat(peer)[0]), f"peer {peer} comes to stage {stage}, not its own"
        tensors = ResidueTensors(peer, self._case.arithmetic, self._invariants.watcher)
        self._invariants.began_anew(peer, tensors)
        return self._process(peer, build_peer(self._case.config, self._case.plan, peer, RunStart("fuzz")), tensors)

    def _process(self, peer: int, machine: DrivenMachine, tensors: ResidueTensors) -> SimPeer:
        stalls = PeerStalls(self._case.stalls, peer)
        seconds, busy_s = self._case.seconds[peer], self._case.busy.of(self._case.seed, peer)
        mutated = self._mutate(peer, machine, tensors)
        return SimPeer(mutated, tensors, f"host{peer}", seconds, stalls=stalls, busy_s=busy_s)

    def make_coordinator(self, disk: Mapping[str, Any] | None) -> DrivenMachine:
        """The first coordinator, or with `disk` one that continues from it."""
        durable_state = None if disk is None else load_durable_state(disk)
        start = RunStart("fuzz", last_term=disk.get(TERM, 0) if disk else 0)
        machine = build_coordinator(self._case.config, self._case.plan, start, durable_state)
        return self._mutate(ev.COORDINATOR, machine, None)


def kinds_of(cases: Collection[Case]) -> set[str]:
    """The kinds of faults in these cases."""
    return {fault.kind for case in cases for fault in case.faults}
