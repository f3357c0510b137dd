"""COMM-COST of DT-FM's five cases, and the placements whose steps are simulated. Both come from the planner."""

import numpy as np
from experiments.reproduce.page import table

from jaxdt.spec.network import Network
from planner.model.problem import placement_s, problem_of
from planner.search import layouts
from planner.search.incumbent import Budget, Incumbent
from planner.search.solve import solve

C_DP_BYTES, C_PP_BYTES = 6.5e8, 471_249_222.755  # the published scheduler's sizes
TIME_S, N_RANDOM = 20.0, 100
PUBLISHED = {  # block layout and optimum, by the published cost function on the published networks
    "1 data centre": (3.4398, 3.4398),
    "2 spot": (49.5039, 31.6342),
    "3 two data centres": (16.0868, 16.0868),
    "4 regional": (34.8020, 34.8020),
    "5 worldwide": (49.2184, 49.2184),
}


def placements_and_costs(network: Network, n_stages: int, n_pipelines: int, seeds) -> tuple[dict, list[float]]:
    """Placements by name; and the COMM-COST of the block layout, of the mean random placement and of the planner's
    plan, and the planner's proven bound."""
    problem = problem_of(network, n_stages, n_pipelines, C_DP_BYTES, C_PP_BYTES)
    wide = problem_of(network, n_stages // 2, n_pipelines * 2, 2 * C_DP_BYTES, C_PP_BYTES / 2)
    solution = solve(problem, Incumbent(Budget(TIME_S)), "types", 0)
    block = layouts.block(problem)
    arrays = {
        "planner": solution.placement,
        "block": block,
        "rows": layouts.rows(problem),
        "rows 4 x 16": layouts.rows(wide),
    }
    for seed in seeds:
        permutation = np.random.default_rng(seed).permutation(network.n_devices)
        arrays[f"random {seed}"] = permutation.reshape(n_stages, n_pipelines)
    placements = {name: tuple(tuple(int(d) for d in row) for row in rows) for name, rows in arrays.items()}
    mean_s, _, _ = layouts.mean_random(problem, 0)
    costs = [placement_s(problem, block), mean_s, placement_s(problem, solution.placement), solution.bound_s]
    return placements, [float(cost) for cost in costs]


def cost_table(rows: list[list]) -> str:
    """A table of the costs and of those that the published cost function gives."""
    head = ["case", "block, published", "block, ours", "optimum, known", "planner", "proven bound", "random, mean"]
    body = []
    for case, block, random, planner, bound in rows:
        published_block, published_optimum = PUBLISHED.get(case, ("-", "-"))
        body.append([case, published_block, block, published_optimum, planner, bound, random])
    note = f"\nThe bound is what the solver proved within {TIME_S:g} s of wall clock on the machine at hand.\n"
    return table(head, [[f"{v:.4f}" if isinstance(v, float) else v for v in row] for row in body]) + note
