"""Plans whose stages may have unequal numbers of replicas, by step time under `swarm` wiring.

Any replica of a stage takes any microbatch, and faster ones take more. A set of devices for each stage is therefore a
plan, without pipelines. Devices move between stages by annealing on an estimate, in which every device takes part in
proportion to its speed; each trial cuts the layers anew. Stages of one site each, with links of their own, are starts
too. The simulator ranks the best sets, and then has the last word on every move.

The estimate is right for stages of equal devices, and too low for mixed ones: routers give each device its part of the
microbatches, but choose without a look at the queues, so that devices of unequal speeds run dry in turns (docs/log.md).

S stages, N devices; a row is the devices of a stage. stage_of [N] is the stage of each device, SPARE for none.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan, even_shares
from jaxdt.run.work import WorkKind
from jaxdt.sim.predict import predict_step_s
from jaxdt.wiring.base import PeerLoad
from jaxdt.wiring.swarm import load_of
from planner.model.layer_cuts import Ranges
from planner.search.incumbent import Incumbent
from planner.step_time.simulate import conditions_of, machine_plan, without_pauses
from planner.step_time.workload import MISSING_S, StepWorkload, refuse_memory

SPARE = -1
N_STEPS = 4  # simulated: routers measure service times in the first
N_SIMULATED = 6
FEW_MOVES, MOVES = 10, 80  # trials of one annealing for each device: of every shape once, then of the best shapes
N_SHAPES = 3  # numbers of stages that are searched further
N_ROUNDS = 4  # of the best shapes, without a time limit
HOT, COLD = 0.05, 0.001  # temperatures, as parts of the step
SPARE_PROB = 0.05  # of a move that takes a device out of the plan
ANNEAL_FRAC = 0.4  # of the time limit, after which no annealing begins
MAX_SITES = 5  # up to so many, sites are tried as stages in every order
N_CLIMBED = 10  # simulations of the climb, without a time limit
SLICE_BYTES = 1 << 24  # of an exchange in the simulator: each slice costs events
Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StageSets:
    """The devices of each stage, its layers, and the estimated or simulated seconds of a step."""

    rows: Rows
    stages: Ranges
    step_s: float


class SetSearch:
    """Annealing of sets for one number of stages. With `sizes` every stage keeps so many replicas."""

    def __init__(self, tables: "LayerTables", n_stages: int, sizes: tuple[int, ...] | None, rng: np.random.Generator):
        self.tables = tables
        self.workload = tables.workload
        self.n_stages = n_stages
        self.sizes = sizes
        self.rng = rng
        self.best: StageSets | None = None

    def run(self, incumbent: Incumbent, moves_per_device: int, start: StageSets | None = None) -> StageSets | None:
        """Anneal from a random start, or from known sets at a tenth of the temperature; the best sets met, None if none
        fits into memory."""
        self.best = start
        hot = HOT / 10 if start else HOT
        stage_of = self._labels(start) if start else self._start()
        here = self._evaluate(stage_of)
        n_moves = moves_per_device * len(stage_of)
        for move in range(n_moves):
            if incumbent.spent:
                break
            trial = self._moved(stage_of)
            there = self._evaluate(trial)
            incumbent.count(1)
            now_s = math.inf if here is None else here.step_s
            then_s = math.inf if there is None else there.step_s
            temperature_s = hot * (COLD / hot) ** (move / n_moves) * (now_s if now_s < math.inf else 1.0)
            if here is None or then_s <= now_s - temperature_s * math.log(1.0 - self.rng.random()):
                stage_of, here = trial, there
        if self.best is not None:
            incumbent.offer(self._labels(self.best), self.best.step_s, by="annealing")
        return self.best

    def _labels(self, sets: StageSets) -> np.ndarray:
        stage_of = np.full(self.workload.network.n_devices, SPARE)
        for stage, row in enumerate(sets.rows):
            stage_of[list(row)] = stage
        return stage_of

    def _start(self) -> np.ndarray:
        """Devices at random, of the sizes asked for or about equally many."""
        n = self.workload.network.n_devices
        sizes = self.sizes or even_shares(n, self.n_stages)
        labels = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        return self.rng.permutation(np.array(labels + [SPARE] * (n - len(labels))))

    def _moved(self, stage_of: np.ndarray) -> np.ndarray:
        """A copy with two devices of different stages swapped, or with one device in another stage."""
        trial = stage_of.copy()
        d, e = self.rng.integers(len(trial), size=2)
        if self.sizes is not None or self.rng.random() < 0.5:
            trial[d], trial[e] = trial[e], trial[d]
        elif self.rng.random() < SPARE_PROB:
            trial[d] = SPARE
        else:
            trial[d] = self.rng.integers(self.n_stages)
        return trial

    def _evaluate(self, stage_of: np.ndarray) -> StageSets | None:
        rows = tuple(tuple(int(d) for d in np.flatnonzero(stage_of == stage)) for stage in range(self.n_stages))
        stages = self.tables.cut(rows) if all(rows) else None
        if stages is None:
            return None
        found = StageSets(rows, stages, estimate_s(self.workload, rows, stages))
        if self.best is None or found.step_s < self.best.step_s:
            self.best = found
        return found


class LayerTables:
    """Seconds and bytes of all ranges between two cuts of a model, as matrices [C, C] over pairs of cuts."""

    def __init__(self, workload: StepWorkload):
        self.workload = workload
        self.cuts = workload.cuts
        self._pairs = list(itertools.combinations(range(len(self.cuts)), 2))
        self.speeds = np.stack([self._matrix(self._speed_of(kind), 0.0) for kind in workload.kinds])
        self._bytes: dict[PeerLoad, np.ndarray] = {}

    def _speed_of(self, kind: str) -> Callable[[int, int], float]:
        """Microbatches a second of a kind, as a function of its layers."""
        return lambda lo, hi: 1.0 / _work_s(self.workload, kind, lo, hi)

    def _matrix(self, value: Callable[[int, int], float], default: float) -> np.ndarray:
        matrix = np.full((len(self.cuts),) * 2, default)
        for i, j in self._pairs:
            matrix[i, j] = value(self.cuts[i], self.cuts[j])
        return matrix

    def bytes_of(self, load: PeerLoad) -> np.ndarray:
        """Memory of each range of layers with this load; infinite for no layers."""
        if load not in self._bytes:
            self._bytes[load] = self._matrix(lambda lo, hi: self.workload.stage_bytes(lo, hi, load), np.inf)
        return self._bytes[load]

    def cut(self, rows: Rows) -> Ranges | None:
        """The layer ranges whose slowest stage, all its replicas together, is fastest; None if no ranges fit. Dynamic
        programming over (stages done, cut reached)."""
        workload = self.workload
        n_peers = sum(map(len, rows))
        slowest_s = np.full(len(self.cuts), np.inf)
        slowest_s[0] = 0.0
        came_from = []
        for row in rows:
            load = load_of(workload.run, n_peers, len(row), workload.n_microbatches)
            speed = self.speeds[workload.kind_of[list(row)]].sum(axis=0)
            fits = self.bytes_of(load) <= min(min(workload.memory_bytes[d], workload.host_bytes[d]) for d in row)
            stage_s = np.divide(1.0, speed, out=np.full_like(speed, np.inf), where=fits & (speed > 0))
            ways_s = np.maximum(slowest_s[:, None], stage_s)
            came_from.append(ways_s.argmin(axis=0))
            slowest_s = ways_s.min(axis=0)
        if slowest_s[-1] == np.inf:
            return None
        ends = [len(self.cuts) - 1]
        for sources in reversed(came_from):
            ends.append(int(sources[ends[-1]]))
        return tuple((self.cuts[i], self.cuts[j]) for i, j in itertools.pairwise(ends[::-1]))


def _work_s(workload: StepWorkload, kind: str, lo: int, hi: int) -> float:
    """Forward and backward of one microbatch."""
    seconds = workload.seconds(kind, lo, hi)
    return seconds[WorkKind.FORWARD] + seconds[WorkKind.BACKWARD]


def estimate_s(workload: StepWorkload, rows: Rows, stages: Ranges) -> float:
    """Seconds of a step: the slowest stage or the busiest link, the first microbatch's way there and back, and the
    slowest exchange of gradients with its update. A replica's part of the microbatches is its part of the stage's
    speed."""
    indices = [np.array(row) for row in rows]
    works_s = [
        np.array([_work_s(workload, workload.kinds[k], lo, hi) for k in workload.kind_of[row]])
        for row, (lo, hi) in zip(indices, stages, strict=True)
    ]
    parts = [(1.0 / work_s) / (1.0 / work_s).sum() for work_s in works_s]
    n = workload.n_microbatches
    busy_s = max(n / (1.0 / work_s).sum() for work_s in works_s)
    way_s = sum(float(part @ work_s) for part, work_s in zip(parts, works_s, strict=True))
    for s in range(len(rows) - 1):
        there = np.ix_(indices[s], indices[s + 1])
        back = np.ix_(indices[s + 1], indices[s])
        flow = np.outer(parts[s], parts[s + 1])
        for links, part in ((there, flow), (back, flow.T)):
            boundary_s = workload.s_per_byte[links] * workload.boundary_bytes
            busy_s = max(busy_s, n * float((part * boundary_s).max()))
            way_s += float((part * (boundary_s + workload.latency_s[links])).sum())
    return busy_s + way_s + _exchange_s(workload, indices, stages)


def _exchange_s(workload: StepWorkload, indices: list[np.ndarray], stages: Ranges) -> float:
    """The slowest exchange of gradients: each link carries a shard and a sum of the stage's gradient."""
    sizes, tied_bytes = workload.gradient_bytes(stages)
    worst_s = 0.0
    for row, (lo, hi), n_bytes in zip(indices, stages, sizes, strict=True):
        seconds = [workload.seconds(workload.kinds[k], lo, hi) for k in set(workload.kind_of[row])]
        links = np.ix_(row, row)
        exchange_s = 2 * float((workload.s_per_byte[links] * n_bytes / len(row) + workload.latency_s[links]).max())
        worst_s = max(worst_s, exchange_s + max(times[WorkKind.GATHER] + times[WorkKind.UPDATE] for times in seconds))
    outer = np.ix_(indices[0], indices[-1])
    n_holders = len(indices[0]) + len(indices[-1])
    return max(worst_s, 2 * float((workload.s_per_byte[outer] * tied_bytes / n_holders).max()))


def plan_of_sets(workload: StepWorkload, sets: StageSets) -> Plan:
    """The plan of sets; with equally many replicas, the shares of its pipelines are even."""
    sizes = {len(row) for row in sets.rows}
    shares = even_shares(workload.n_microbatches, sizes.pop()) if len(sizes) == 1 else (workload.n_microbatches,)
    return machine_plan(workload, sets.stages, sets.rows, shares)


def simulated_s(workload: StepWorkload, sets: StageSets) -> float:
    """Seconds of a step under the simulator, with `swarm` wiring; infinite for sets that use a missing link."""
    if sets.step_s >= MISSING_S:
        return math.inf
    plan = plan_of_sets(workload, sets)
    config = without_pauses(workload.run, SLICE_BYTES)
    config = replace(config, wiring=replace(config.wiring, kind="swarm"))
    return predict_step_s(config, plan, conditions_of(workload, plan), N_STEPS)


def search_sets(
    workload: StepWorkload, n_stages: int | None, incumbent: Incumbent, seed: int, equal: bool = False
) -> list[StageSets]:
    """The best sets for a number of stages (None: any), simulated, best first; with `equal`, all stages have equally
    many replicas. BadInput if nothing fits into memory."""
    rng = np.random.default_rng(seed)
    n = workload.network.n_devices
    most = min(n, len(workload.cuts) - 1)
    if n_stages is not None and n_stages > most:
        raise BadInput(f"--stages: got {n_stages}, expected at most {most}: devices, or layers that may be cut")
    tables = LayerTables(workload)
    known = _anneal_shapes(tables, list(_shapes(n, most, n_stages, equal)), incumbent, rng)
    if not equal and n_stages in (None, len(sites(workload))):
        known += _sets_of_sites(tables)
    found = {sets.rows: sets for sets in sorted(known, key=lambda sets: -sets.step_s)}
    if not found:
        refuse_memory(workload, n_stages or most)
    ranked = sorted(found.values(), key=lambda sets: sets.step_s)[:N_SIMULATED]
    simulated = [replace(sets, step_s=simulated_s(workload, sets)) for sets in ranked]
    return climb(tables, simulated, incumbent, equal)


def _anneal_shapes(
    tables: "LayerTables",
    shapes: list[tuple[int, tuple[int, ...] | None]],
    incumbent: Incumbent,
    rng: np.random.Generator,
) -> list[StageSets]:
    """The best sets of every round of annealing: all shapes once, then the best few in turns, from a random start and
    from the best sets."""
    pools: list[tuple[SetSearch, list[StageSets]]] = []
    for shape in shapes:
        search = SetSearch(tables, *shape, rng)
        sets = search.run(incumbent, FEW_MOVES)
        if sets is not None:
            pools.append((search, [sets]))
    pools = sorted(pools, key=lambda pool: pool[1][0].step_s)[:N_SHAPES]
    end_s = ANNEAL_FRAC * incumbent.time_limit_s
    n_rounds = 0
    while pools and not incumbent.spent and incumbent.elapsed_s < end_s and (n_rounds < N_ROUNDS or end_s < math.inf):
        for search, known in pools:
            start = min(known, key=lambda sets: sets.step_s) if n_rounds % 2 else None
            sets = search.run(incumbent, MOVES, start)
            known += [sets] if sets is not None else []
        n_rounds += 1
    return [sets for _, known in pools for sets in known]


def sites(workload: StepWorkload) -> list[tuple[int, ...]]:
    """The devices of each region and kind."""
    members: dict[tuple[str, str], list[int]] = {}
    for d, device in enumerate(workload.network.devices):
        members.setdefault((device.region, device.kind), []).append(d)
    return [tuple(devices) for devices in members.values()]


def _sets_of_sites(tables: "LayerTables") -> list[StageSets]:
    """Every order of the sites as stages."""
    groups = sites(tables.workload)
    if not 1 < len(groups) <= MAX_SITES:
        return []
    orders = (_cut_sets(tables, rows) for rows in itertools.permutations(groups))
    return [sets for sets in orders if sets is not None]


def _cut_sets(tables: "LayerTables", rows: Rows) -> StageSets | None:
    """Sets with the best cut and its estimate; None if none fits into memory."""
    stages = tables.cut(rows) if all(rows) else None
    return None if stages is None else StageSets(rows, stages, estimate_s(tables.workload, rows, stages))


def climb(
    tables: "LayerTables", simulated: list[StageSets], incumbent: Incumbent, equal: bool = False
) -> list[StageSets]:
    """From simulated sets, simulate the moves of the best ones, the most promising estimate first, until the budget is
    spent; the first move that is better is taken. Returns all that were simulated, best first."""
    simulated = sorted(simulated, key=lambda sets: sets.step_s)
    seen = {(sets.rows, sets.stages) for sets in simulated}
    n_left = N_CLIMBED if incumbent.budget.time_s is None else math.inf
    improved = True
    while improved:
        best_s = simulated[0].step_s
        improved = False
        for sets in sorted(moves(tables, simulated[0], equal), key=lambda sets: sets.step_s):
            if n_left == 0 or incumbent.interrupted:
                return simulated
            if (sets.rows, sets.stages) in seen:
                continue
            seen.add((sets.rows, sets.stages))
            n_left -= 1
            simulated.append(replace(sets, step_s=simulated_s(tables.workload, sets)))
            incumbent.count(1)
            if simulated[-1].step_s < best_s:
                improved = True
                break
        simulated.sort(key=lambda sets: sets.step_s)
    return simulated


def moves(tables: "LayerTables", sets: StageSets, equal: bool) -> Iterator[StageSets]:
    """Sets with one device in another stage, or, where all stages have equally many, with two swapped; and the same
    sets with one cut moved by a layer. Devices of one site count as one."""
    workload = tables.workload
    yield from _moved_cuts(workload, sets)
    for one, other in itertools.permutations(range(len(sets.rows)), 2):
        for d in _one_a_site(workload, sets.rows[one]):
            for e in _one_a_site(workload, sets.rows[other]) if equal else [None]:
                rows = list(sets.rows)
                rows[one] = tuple(sorted({*rows[one]} - {d} | ({e} if e is not None else set())))
                rows[other] = tuple(sorted({*rows[other]} - {e} | {d}))
                found = _cut_sets(tables, tuple(rows))
                if found is not None and (not equal or one < other):
                    yield found


def _one_a_site(workload: StepWorkload, row: tuple[int, ...]) -> list[int]:
    devices = workload.network.devices
    return list({(devices[d].region, devices[d].kind): d for d in row}.values())


def _moved_cuts(workload: StepWorkload, sets: StageSets) -> Iterator[StageSets]:
    ends = [lo for lo, _ in sets.stages] + [sets.stages[-1][1]]
    n_peers = sum(map(len, sets.rows))
    for i, step in itertools.product(range(1, len(ends) - 1), (-1, 1)):
        at = workload.cuts.index(ends[i]) + step
        moved = [*ends[:i], workload.cuts[at], *ends[i + 1 :]]
        if not moved[i - 1] < moved[i] < moved[i + 1]:
            continue
        stages = tuple(itertools.pairwise(moved))
        loads = [load_of(workload.run, n_peers, len(row), workload.n_microbatches) for row in sets.rows]
        if all(
            workload.may_hold(np.array(row), lo, hi, load)
            for (lo, hi), load, row in zip(stages, loads, sets.rows, strict=True)
        ):
            yield StageSets(sets.rows, stages, estimate_s(workload, sets.rows, stages))


def _shapes(
    n_devices: int, most_stages: int, n_stages: int | None, equal: bool
) -> Iterator[tuple[int, tuple[int, ...] | None]]:
    """The shapes to look at, as (stages, replicas of each stage); None for the replicas means any numbers."""
    for stages in [n_stages] if n_stages else range(1, most_stages + 1):
        if not equal:
            yield stages, None
        n_replicas = n_devices // stages
        for replicas in itertools.chain((n_replicas,), (n_replicas - 1,) if n_replicas > 2 else ()):
            yield stages, (replicas,) * stages
