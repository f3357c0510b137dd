"""`--objective step_time` for one shape: simple plans first, which need no search and are judged by the simulator at
once; then plans from the search by Eq. 1-4, annealing on the compiled estimate, and the simulator's ranking. Where
seats are charged (planner.search.seats), only allowed plans count, at their seconds with what is charged.

Simple plans do not wait for the compiler, and the rest of a search waits no longer than its time lasts.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.cost.compiled import generator
from planner.model.change import part_of
from planner.model.comm_workload import CommBytes
from planner.model.layer_cuts import Ranges
from planner.model.problem import problem_of
from planner.model.result import Solution
from planner.search.annealing_chains import in_threads, n_cores
from planner.search.background import Background
from planner.search.incumbent import Budget, Incumbent
from planner.search.seated import solve_seated
from planner.search.seats import Seats
from planner.search.solve import solve
from planner.step_time.estimate import Heat
from planner.step_time.memory_rows import rows_for_memory
from planner.step_time.simulate import simulated_s
from planner.step_time.tune import DEPTH_GROWTHS, Layout, compile_kernels, improve, kept, score, slice_moves, tune
from planner.step_time.workload import StepWorkload, even_split, refuse_memory

COMM_END, ANNEAL_END = 0.4, 0.75  # parts of the time limit when a phase must be over
NEAR_END = 0.95  # the same of annealing near a plan that runs, whose limit is short
N_ANNEALED, N_SIMULATED, N_JUDGED = 4, 5, 2
JUDGED_FRAC = 0.1  # of the time limit, beyond which the second simple plan is not judged before the search
N_NEAR = 2  # annealed near a plan that runs, under an evaluation limit: results must not depend on the cores
HEATS = (0.02, 0.005)
EVALUATIONS_PER_SLICE = 50_000  # of the evaluation limit, for one slice of annealing
BY_COST, BLOCK, NEAR = "Eq. 1-4", "block layout", "nearest seats"
PLACEMENTS = "a search of placements, whose code was not compiled in time (the first search of an installation)"
STARTS = "starts by Eq. 1-4"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout and the name of its source."""

    name: str
    layout: Layout


@dataclass(frozen=True, eq=False)
class Finalist:
    """A layout with its step's seconds under the simulator."""

    name: str
    layout: Layout
    step_s: float


@dataclass(frozen=True, eq=False)
class CostSearch:
    """A search by Eq. 1-4 over some devices with these sizes: its solution, and the local optima that it met.
    Placements are in indices of the whole network."""

    solution: Solution
    local_optima: list[np.ndarray]
    devices: np.ndarray
    sizes: CommBytes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.solution.placement.shape

    @property
    def placements(self) -> list[tuple[str, np.ndarray]]:
        """The placements with the names of their source, best first."""
        return [(BY_COST, self.solution.placement), *((f"{BY_COST}, other", other) for other in self.local_optima)]


@dataclass(frozen=True, eq=False)
class StepSolution:
    """Finalists, best first; the search by Eq. 1-4 that gave starts, None if there was no time for it; the best of the
    simple plans, if they were judged first; and the parts of the search for which there was no time."""

    finalists: list[Finalist]
    by_cost: CostSearch | None
    simple: Finalist | None = None
    not_tried: tuple[str, ...] = ()


def compiling(workload: StepWorkload, layout: Layout, incumbent: Incumbent) -> Background[bool]:
    """The compilation of what searches placements, in the background."""
    return Background(lambda: compile_kernels(workload, layout), incumbent)


def search_by_cost(
    workload: StepWorkload,
    devices: np.ndarray,
    n_stages: int,
    incumbent: Incumbent,
    budget: Budget,
    solver: str,
    seed: int,
    *,
    seats: Seats | None = None,
) -> CostSearch | None:
    """Solve Eq. 1-4 for some devices, or for seats on all, within a part of the incumbent's budget; None if there was
    no time for it."""
    n_pipelines = seats.near.shape[1] if seats else len(devices) // n_stages
    sizes = workload.even_comm_bytes(n_stages, n_pipelines)
    network = part_of(workload.network, devices)
    problem = problem_of(network, n_stages, n_pipelines, *sizes, has_spares=True)
    with incumbent.searching_inside(budget) as inner:

        def solved() -> Solution:
            if seats:
                return solve_seated(problem, seats, layers_of(workload, seats), inner, solver, seed)
            return solve(problem, inner, solver, seed)

        incumbent.inner = inner
        call = Background(solved, incumbent)  # it may wait for the compiler
        solution = call.result(ANNEAL_END * incumbent.time_limit_s)
    inner.stop()
    incumbent.inner = None
    if solution is None:
        return None
    incumbent.count(solution.evaluations)
    local_optima = [devices[groups] for _, groups in inner.local_optima()]
    return CostSearch(replace(solution, placement=devices[solution.placement]), local_optima, devices, sizes)


def regular_placements(workload: StepWorkload, devices: np.ndarray, n_stages: int) -> list[tuple[str, np.ndarray]]:
    """Placements that need no search: runs of devices as pipelines or stages, in the network's order and by speed, and
    where memory is short, one that gives each stage the memory that it needs."""
    n_pipelines = len(devices) // n_stages
    in_order = np.sort(devices)
    backward_s = workload.backward_s()
    by_speed = np.array(sorted(in_order, key=lambda d: (backward_s[d], d)))

    def pipelines(row: np.ndarray) -> np.ndarray:
        return row.reshape(n_pipelines, n_stages).T

    def stages(row: np.ndarray) -> np.ndarray:
        return row.reshape(n_stages, n_pipelines)

    placements = [(BLOCK, pipelines(in_order)), ("stages in order", stages(in_order))]
    if len(workload.kinds) > 1:
        placements += [("pipelines by speed", pipelines(by_speed)), ("stages by speed", stages(by_speed))]
    by_memory = rows_for_memory(workload, devices, n_stages)
    return placements if by_memory is None else [*placements, ("stages by memory", by_memory)]


def layers_of(workload: StepWorkload, seats: Seats) -> Ranges:
    """The layers of each stage by which moves are charged before a cut is chosen: those of the plan that runs."""
    return seats.before.plan.stages if seats.before else even_split(workload, len(seats.near))


def tune_all(
    workload: StepWorkload,
    placements: list[tuple[str, np.ndarray]],
    growths: tuple[float, ...] = DEPTH_GROWTHS,
    seats: Seats | None = None,
) -> list[Candidate]:
    """The better direction of every placement that is allowed and fits into memory, and where a plan runs, with its
    layers too; best first."""
    candidates = []
    for name, placement in placements:
        allowed = [one for one in (placement, placement[::-1]) if seats is None or seats.allows(one)]
        fitting = [layout for one in allowed if (layout := tune(workload, one, growths)) is not None]
        if seats and seats.before:
            fitting += [layout for one in allowed if (layout := kept(workload, seats.before, one)) is not None]
        if fitting:
            candidates.append(Candidate(name, min(fitting, key=lambda layout: score(workload, layout, seats=seats))))
    return sorted(candidates, key=lambda candidate: score(workload, candidate.layout, seats=seats))


def anneal_all(
    workload: StepWorkload,
    candidates: list[Candidate],
    incumbent: Incumbent,
    end_s: float,
    seed: int,
    seats: Seats | None = None,
) -> list[Candidate]:
    """The best candidates, annealed in turns, slice by slice, until end_s; the results, best first. Each core has some
    of them. Under an evaluation limit one core has all, and the number of slices follows from that."""
    limit = incumbent.budget.evaluations
    n_threads = n_cores() if limit is None else 1
    n_rounds = None if limit is None else max(1, limit // EVALUATIONS_PER_SLICE)
    n_annealed = max(min(N_ANNEALED, len(candidates)), n_threads)
    annealed = [candidates[k % len(candidates)] for k in range(n_annealed)]

    def run(thread: int):
        bits = generator(seed + (thread << 32))
        n_done = 0
        while not incumbent.interrupted and (n_rounds is None or n_done < n_rounds):
            for k in range(thread, n_annealed, n_threads):
                if n_rounds is None and incumbent.elapsed_s >= end_s:
                    return
                layout = annealed[k].layout
                heat = Heat(HEATS[n_done % len(HEATS)], slice_moves(layout))
                layout = improve(workload, layout, bits, heat, seats)
                incumbent.count(heat.n_moves)
                incumbent.offer(layout.placement, score(workload, layout, seats=seats), by="annealing")
                annealed[k] = Candidate(annealed[k].name, layout)
            n_done += 1

    with in_threads([partial(run, thread) for thread in range(1, n_threads)]):
        run(0)
    return sorted(annealed, key=lambda candidate: score(workload, candidate.layout, seats=seats))


def simulate_some(
    workload: StepWorkload,
    candidates: list[Candidate],
    incumbent: Incumbent,
    judged: list[Finalist] | None = None,
    end_s: float = np.inf,
    seats: Seats | None = None,
) -> list[Finalist]:
    """Simulate in this order, at least one, as long as time is likely to suffice; best first, with those that were
    judged before."""
    finalists = list(judged or [])
    known = {finalist.layout.key for finalist in finalists}
    longest_s = 0.0
    for candidate in candidates[:N_SIMULATED]:
        left_s = min(incumbent.left_s, end_s - incumbent.elapsed_s)
        left_s = left_s - longest_s if incumbent.budget.evaluations is None else np.inf
        if candidate.layout.key in known:
            continue
        if finalists and (incumbent.interrupted or left_s <= 0):
            break
        known.add(candidate.layout.key)
        start_s = incumbent.elapsed_s
        layout = candidate.layout
        step_s = simulated_s(workload, layout, lambda: incumbent.interrupted)
        longest_s = max(longest_s, incumbent.elapsed_s - start_s)
        finalists.append(Finalist(candidate.name, layout, step_s))
    return sorted(finalists, key=lambda finalist: score(workload, finalist.layout, finalist.step_s, seats))


def judge(
    workload: StepWorkload, candidates: list[Candidate], incumbent: Incumbent, seats: Seats | None = None
) -> list[Finalist]:
    """The best simple plans under the simulator, best first."""
    end_s = incumbent.elapsed_s + JUDGED_FRAC * incumbent.time_limit_s
    return simulate_some(workload, candidates[:N_JUDGED], incumbent, end_s=end_s, seats=seats)


def search_step(
    workload: StepWorkload, n_stages: int, incumbent: Incumbent, solver: str, seed: int, seats: Seats | None = None
) -> StepSolution:
    """The best plan of one shape on all devices, or on some near a plan that runs."""
    devices = np.arange(workload.network.n_devices)
    regular = [(NEAR, seats.near)] if seats else []
    if not (seats and seats.before):
        regular += regular_placements(workload, devices, n_stages)
    simple = tune_all(workload, regular, seats=seats)
    if not simple:
        refuse_memory(workload, n_stages)
    incumbent.offer(simple[0].layout.placement, score(workload, simple[0].layout, seats=seats), by="layouts")
    judged = judge(workload, simple, incumbent, seats)
    is_near = seats is not None and seats.before is not None
    end_s = (NEAR_END if is_near else ANNEAL_END) * incumbent.time_limit_s
    if compiling(workload, simple[0].layout, incumbent).result(end_s) is None:
        finalists = simulate_some(workload, simple, incumbent, judged, seats=seats)
        return StepSolution(finalists, None, judged[0], (PLACEMENTS,))
    part_s = (
        None if incumbent.budget.time_s is None else max(0.05, COMM_END * incumbent.time_limit_s - incumbent.elapsed_s)
    )
    budget = Budget(part_s, incumbent.budget.evaluations)
    by_cost = search_by_cost(workload, devices, n_stages, incumbent, budget, solver, seed, seats=seats)
    candidates = tune_all(workload, (by_cost.placements if by_cost else []) + regular, seats=seats)
    n_annealed = N_ANNEALED
    if is_near:
        n_annealed = n_cores() if incumbent.budget.evaluations is None else N_NEAR
    annealed = anneal_all(workload, candidates[:n_annealed], incumbent, end_s, seed, seats)
    finalists = simulate_some(workload, _simulation_order(candidates, annealed), incumbent, judged, seats=seats)
    return StepSolution(finalists, by_cost, judged[0], () if by_cost else (STARTS,))


def _simulation_order(candidates: list[Candidate], annealed: list[Candidate]) -> list[Candidate]:
    """Candidates to simulate, the most promising first; the plan of Eq. 1-4 and the block layout for comparison."""
    compared = [candidate for candidate in candidates if candidate.name in (BY_COST, BLOCK)]
    order = [annealed[0], *compared, *annealed[1:]]
    return list({id(candidate.layout): candidate for candidate in order}.values())
