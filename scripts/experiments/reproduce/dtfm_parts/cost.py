"""COMM-COST of DT-FM's five cases, and the placements whose steps are simulated. Both come from the planner, whose
searches are limited by plans scored, so that they do not depend on the machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from experiments.reproduce.dtfm_parts.systems import Placement, label_of, network_of
from experiments.reproduce.results import Job

from planner.model.problem import Problem, placement_s, problem_of
from planner.model.result import Solution
from planner.search import layouts
from planner.search.incumbent import Budget, Incumbent
from planner.search.solve import solve

STAGES = PIPELINES = 8
SHAPES = ((8, 8), (4, 16))
C_DP_BYTES, C_PP_BYTES = 6.5e8, 471_249_222.755  # the published scheduler's sizes, at 8 x 8
PLANNER, EVALUATIONS = "types", 60_000_000  # which limit the work of CP-SAT
CANDIDATES = 5_000  # where the published search stops
SEEDS = (0, 1, 2)
PLANNER_SEEDS = range(10)  # the steps are of the plans of seed 0
KNOWN = {  # by the published code's cost function on its networks: the block layout, the optimum, its search's end
    "1 data centre": ("3.4398", "3.4398", "3.440"),
    "2 spot": ("49.5039", "31.6342", "43.5 to 49.5"),
    "3 two data centres": ("16.0868", "16.0868", "16.087"),
    "4 regional": ("34.8020", "34.8020", "34.802"),
    "5 worldwide": ("49.2184", "49.2184", "49.218"),
}


@dataclass(frozen=True)
class Costs:
    """Seconds by Eq. 1-4 at 8 x 8: block layout, mean random placement, the end of each run of DT-FM's search as
    published, the planner's plan, and the planner's proven bound."""

    block_s: float
    random_s: float
    published_s: tuple[float, ...]
    planner_s: float
    bound_s: float


def shape_name(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"


RANDOM = tuple(f"random {seed}" for seed in SEEDS)
NAMES = tuple(f"{name} {shape_name(shape)}" for shape in SHAPES for name in ("rows", "block", "planner"))
NAMES += ("published", *RANDOM)


def job(case: str) -> Job:
    """The placements and costs of a case; `decoded` reads its values."""
    inputs = f"placements {label_of(case)} {PLANNER} evaluations={EVALUATIONS} candidates={CANDIDATES}"
    return Job(inputs, EVALUATIONS, partial(_placements_and_costs, case))


def decoded(values: Sequence[float]) -> tuple[dict[str, Placement], Costs]:
    """Placements by name and shape: block, rows and the planner's plan in both shapes; at 8 x 8 also random ones and
    the end of the published search with its median cost."""
    n_devices = STAGES * PIPELINES
    *seconds, planner_s, bound_s = values[: 4 + len(SEEDS)]
    costs = Costs(seconds[0], seconds[1], tuple(seconds[2:]), planner_s, bound_s)
    placements = {}
    for index, name in enumerate(NAMES):
        first = 4 + len(SEEDS) + index * n_devices
        devices = list(map(int, values[first : first + n_devices]))
        n_pipelines = int(name.split()[-1]) if name.split()[0] in ("rows", "block", "planner") else PIPELINES
        placements[name] = tuple(
            tuple(devices[start : start + n_pipelines]) for start in range(0, n_devices, n_pipelines)
        )
    return placements, costs


def seeds_job(case: str) -> Job:
    """The planner's plans of a case with PLANNER_SEEDS. Its values: for each of SHAPES how many different costs they
    have, to six digits, and how many different placements."""
    inputs = f"plans {label_of(case)} {PLANNER} evaluations={EVALUATIONS} seeds={PLANNER_SEEDS}"
    return Job(inputs, EVALUATIONS, partial(_numbers_of_plans, case))


def _numbers_of_plans(case: str) -> list[float]:
    numbers = []
    for shape in SHAPES:
        plans = [_planned(_problem(case, shape), seed) for seed in PLANNER_SEEDS]
        numbers += [len({f"{plan.cost_s:.6g}" for plan in plans}), len({plan.placement.tobytes() for plan in plans})]
    return numbers


def seeds_sentence(values: Sequence[Sequence[float]]) -> str:
    """A sentence about the effect of the planner's seeds, from the values of seeds_job for all cases."""
    costs, placements = [n for v in values for n in v[::2]], [n for v in values for n in v[1::2]]
    return (
        f"The planner has seed 0. With seeds {PLANNER_SEEDS[0]} to {PLANNER_SEEDS[-1]} it finds one cost in "
        f"{costs.count(1)} and one plan in {placements.count(1)} of {len(costs)} pairs of case and shape."
    )


def _problem(case: str, shape: tuple[int, int]) -> Problem:
    n_stages, n_pipelines = shape
    return problem_of(network_of(case), *shape, C_DP_BYTES * STAGES / n_stages, C_PP_BYTES * PIPELINES / n_pipelines)


def _planned(problem: Problem, seed: int) -> Solution:
    return solve(problem, Incumbent(Budget(None, EVALUATIONS)), PLANNER, seed)


def _placements_and_costs(case: str) -> list[float]:
    network = network_of(case)
    arrays = {}
    for shape in reversed(SHAPES):
        problem = _problem(case, shape)
        solution = _planned(problem, 0)
        arrays[f"rows {shape_name(shape)}"] = layouts.rows(problem)
        arrays[f"block {shape_name(shape)}"] = layouts.block(problem)
        arrays[f"planner {shape_name(shape)}"] = solution.placement
    ends = [solve(problem, Incumbent(Budget(None, CANDIDATES)), "dtfm", seed) for seed in SEEDS]
    arrays["published"] = sorted(ends, key=lambda end: end.cost_s)[len(ends) // 2].placement
    for seed in SEEDS:
        permutation = np.random.default_rng(seed).permutation(network.n_devices)
        arrays[f"random {seed}"] = permutation.reshape(STAGES, PIPELINES)
    costs = [placement_s(problem, layouts.block(problem)), layouts.mean_random(problem, 0)[0]]
    costs += [*sorted(end.cost_s for end in ends), solution.cost_s, solution.bound_s]
    return [*costs, *(float(device) for name in NAMES for device in np.ravel(arrays[name]))]


def rows(costs: dict[str, Costs]) -> list[list]:
    """The costs by case, and those that the published cost function gives."""
    found = []
    for case, cost in costs.items():
        block, optimum, end = KNOWN.get(case, ("-", "-", "-"))
        search = " to ".join(dict.fromkeys(f"{value_s:.4f}" for value_s in (cost.published_s[0], cost.published_s[-1])))
        cells = [f"{value_s:.4f}" for value_s in (cost.planner_s, cost.bound_s)]
        found.append([case, f"{cost.block_s:.4f}", block, search, end, *cells, optimum, f"{cost.random_s:.4f}"])
    return found
