"""`--objective step_time` for one shape under constraints: allowed placements by Eq. 1-4 and regular ones, tuned,
annealed under the constraints on the compiled estimate, and ranked by the simulator.
"""

import numpy as np

from planner.cost.compiled import generator
from planner.model.constraints import Constraints, Rules, rules_of
from planner.model.problem import problem_of
from planner.search.charges import VIOLATION, Charges, charges_of
from planner.search.constrained import solve_constrained
from planner.search.incumbent import Budget, Incumbent
from planner.step_time.estimate import Heat
from planner.step_time.search import (
    ANNEAL_END,
    COMM_END,
    EVALUATIONS_PER_SLICE,
    HEATS,
    N_ANNEALED,
    Candidate,
    CostSearch,
    StepSolution,
    regular_placements,
    simulate_some,
)
from planner.step_time.tune import Layout, anneal_layout, slice_moves, tune
from planner.step_time.workload import StepWorkload, refuse_memory


def search_step_constrained(
    workload: StepWorkload, n_stages: int, constraints: Constraints, incumbent: Incumbent, solver: str, seed: int
) -> StepSolution:
    """The best plan of one shape on all devices that honours the constraints; BadInput if they contradict each
    other."""
    network = workload.network
    devices = np.arange(network.n_devices)
    n_pipelines = network.n_devices // n_stages
    sizes = workload.even_comm_bytes(n_stages, n_pipelines)
    problem = problem_of(network, n_stages, n_pipelines, *sizes)
    budget = incumbent.budget
    inner = Incumbent(Budget(None if budget.time_s is None else COMM_END * budget.time_s, budget.evaluations))
    incumbent.inner = inner
    with incumbent.on_stop(inner.stop):
        if incumbent.interrupted:
            inner.stop()
        solution = solve_constrained(problem, network, constraints, inner, solver, seed)
    incumbent.inner = None
    incumbent.count(solution.evaluations)
    by_cost = CostSearch(solution, [], devices, sizes)
    rules = rules_of(constraints, network, n_stages, n_pipelines)
    candidates = _allowed(workload, rules, by_cost.placements + regular_placements(workload, devices, n_stages))
    if not candidates:
        refuse_memory(workload, n_stages)
    charges = charges_of(problem, rules)._replace(violation_s=VIOLATION * candidates[0].layout.step_s)
    annealed = _anneal(workload, candidates[:N_ANNEALED], charges, rules, incumbent, seed)
    return StepSolution(simulate_some(workload, annealed, incumbent), by_cost)


def _allowed(workload: StepWorkload, rules: Rules, placements: list[tuple[str, np.ndarray]]) -> list[Candidate]:
    """The placements, in both directions, that honour the constraints and fit into memory; tuned, best first."""
    candidates = []
    for name, placement in placements:
        for direction in (placement, placement[::-1]):
            layout = None if rules.violated(direction.tolist()) else tune(workload, direction)
            if layout is not None:
                candidates.append(Candidate(name, layout))
    return sorted(candidates, key=lambda candidate: candidate.layout.step_s)


def _anneal(
    workload: StepWorkload,
    candidates: list[Candidate],
    charges: Charges,
    rules: Rules,
    incumbent: Incumbent,
    seed: int,
) -> list[Candidate]:
    """The candidates, annealed in turns until the phase ends; best first."""
    bits = generator(seed)
    limit = incumbent.budget.evaluations
    n_rounds = None if limit is None else max(1, limit // EVALUATIONS_PER_SLICE)
    end_s = ANNEAL_END * incumbent.time_limit_s
    annealed = list(candidates)
    n_done = 0
    while not incumbent.interrupted and (n_done < n_rounds if n_rounds is not None else incumbent.elapsed_s < end_s):
        for k, candidate in enumerate(annealed):
            heat = Heat(HEATS[n_done % len(HEATS)], slice_moves(candidate.layout))
            moved = anneal_layout(workload, candidate.layout, bits, heat, charges)
            layout = best_of(workload, rules, candidate.layout, moved)
            incumbent.count(heat.n_moves)
            incumbent.offer(layout.placement, layout.step_s, by="seats")
            annealed[k] = Candidate(candidate.name, layout)
        n_done += 1
    return sorted(annealed, key=lambda candidate: candidate.layout.step_s)


def best_of(workload: StepWorkload, rules: Rules, layout: Layout, moved: Layout) -> Layout:
    """The faster of a layout and of its successor, as it is or tuned again, that honours the constraints."""
    tuned = tune(workload, moved.placement)
    layouts = [one for one in (layout, moved, tuned) if one is not None]
    allowed = [one for one in layouts if not rules.violated(one.placement.tolist())]
    return min(allowed, key=lambda one: one.step_s)
