"""CP-SAT over device types: integer counts per (type, stage), flows between neighbouring stages.

The stage order is the path of Eq. 4 and the flows are its matchings, so one model holds all of Eq. 1-4. Costs are
rounded down to microseconds: the model's bound is a bound for every placement (and for devices, when types pool the
cheapest pairs); a solution is re-costed from its devices.
"""

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from planner.search.cluster import Types

PER_SECOND = 1_000_000
SLACK_S = 1e-3  # the model rounds every exchange down, the floors come from exact costs


@dataclass(frozen=True)
class TypesResult:
    """counts[k][s] devices of type k in stage s (None: none found in time); bound_s holds for every placement."""

    counts: np.ndarray | None
    bound_s: float
    proved: bool


class TypesModel:
    """Data, variables, constraints and objective of one instance; `solve` may be called with several limits."""

    def __init__(self, types: Types, n_stages: int, n_pipelines: int):
        self.types, self.n_stages, self.n_pipelines = types, n_stages, n_pipelines
        self.dp = np.floor(types.dp_s * PER_SECOND).astype(np.int64)
        self.pp = np.floor(types.pp_s * PER_SECOND).astype(np.int64)
        self.model = cp_model.CpModel()
        self._add_counts()
        self.datap = self._add_datap()
        self.pipelinep = sum(self._add_hop(s) for s in range(n_stages - 1))
        self.model.minimize(self.datap + self.pipelinep)
        self.on_plan = self.on_bound = None

    def floors(self, datap_s: float, pipelinep_s: float):
        """Add known lower bounds of both terms."""
        self.model.add(self.datap >= _whole(datap_s - SLACK_S))
        self.model.add(self.pipelinep >= _whole(pipelinep_s - SLACK_S))

    def cost_at_most(self, cost_s: float):
        """Look only for plans of at most this cost."""
        self.model.add(self.datap + self.pipelinep <= _whole(cost_s))

    def _add_counts(self):
        """n[k][s]: stages are full, types are used up; a path and its reverse cost the same, so one is enough."""
        new = self.model.new_int_var
        stages = range(self.n_stages)
        self.n = [
            [new(0, min(size, self.n_pipelines), f"n{k},{s}") for s in stages]
            for k, size in enumerate(self.types.sizes)
        ]
        for k, size in enumerate(self.types.sizes):
            self.model.add(sum(self.n[k]) == size)
        for s in stages:
            self.model.add(sum(row[s] for row in self.n) == self.n_pipelines)
        if self.n_stages > 1:
            weighted = [sum(k * row[s] for k, row in enumerate(self.n)) for s in (0, self.n_stages - 1)]
            self.model.add(weighted[0] <= weighted[1])

    def _add_datap(self):
        """DATAP of Eq. 2: at least the sum of a present type's exchanges, for every stage."""
        kinds = range(len(self.types.members))
        ceiling = int(self.dp.max()) * self.n_pipelines
        datap = self.model.new_int_var(0, ceiling, "datap")
        for s in range(self.n_stages):
            for k in kinds:
                present = self.model.new_bool_var(f"present{k},{s}")
                self.model.add(self.n[k][s] <= min(self.types.sizes[k], self.n_pipelines) * present)
                exchanges = sum(int(self.dp[k, l]) * self.n[l][s] for l in kinds) - int(self.dp[k, k])
                self.model.add(datap >= exchanges).only_enforce_if(present)
        return datap

    def _add_hop(self, s: int):
        """Cost of hop s (Eq. 3): a flow may use a pair of types only if the hop is charged at least its weight."""
        kinds = range(len(self.types.members))
        used = [self.pp[k, l] for k in kinds for l in kinds if k != l or self.types.sizes[k] > 1]
        weights = sorted({int(w) for w in used})
        above = [self.model.new_bool_var(f"above{s},{r}") for r in range(len(weights))]
        for low, high in zip(above, above[1:], strict=False):
            self.model.add_implication(high, low)
        rank = {w: r for r, w in enumerate(weights)}
        flow = {}
        for k in kinds:
            for l in kinds:
                if k != l or self.types.sizes[k] > 1:
                    most = min(self.types.sizes[k], self.types.sizes[l], self.n_pipelines)
                    flow[k, l] = self.model.new_int_var(0, most, f"flow{s},{k},{l}")
                    self.model.add(flow[k, l] <= most * above[rank[int(self.pp[k, l])]])
        for k in kinds:
            self.model.add(sum(flow[k, l] for l in kinds if (k, l) in flow) == self.n[k][s])
            self.model.add(sum(flow[l, k] for l in kinds if (l, k) in flow) == self.n[k][s + 1])
        self.model.add(above[0] == 1)
        steps = [weights[0]] + [b - a for a, b in zip(weights, weights[1:], strict=False)]
        return sum(step * b for step, b in zip(steps, above, strict=True))

    def solve(self, solver: cp_model.CpSolver) -> TypesResult:
        """Solve with the solver's limits. on_plan(counts) and on_bound(bound_s), where set, are called on the way.
        No plan under `cost_at_most` counts as proved, with an infinite bound."""
        if self.on_bound:
            solver.best_bound_callback = lambda bound: self.on_bound(bound / PER_SECOND)
        status = solver.solve(self.model, _Watch(self))
        if status == cp_model.INFEASIBLE:
            return TypesResult(None, np.inf, True)
        if status == cp_model.MODEL_INVALID:
            raise RuntimeError(f"CP-SAT refuses the types model: {self.model.validate()}")
        bound_s = max(0.0, solver.best_objective_bound / PER_SECOND)
        if status == cp_model.UNKNOWN:
            return TypesResult(None, bound_s, False)
        return TypesResult(self.counts(solver.value), bound_s, status == cp_model.OPTIMAL)

    def counts(self, value) -> np.ndarray:
        """counts [K, S] of a solution, given the function from variable to value."""
        return np.array([[value(variable) for variable in row] for row in self.n])


class _Watch(cp_model.CpSolverSolutionCallback):
    def __init__(self, model: TypesModel):
        super().__init__()
        self.of = model

    def on_solution_callback(self):
        if self.of.on_plan:
            self.of.on_plan(self.of.counts(self.value))


def _whole(seconds: float) -> int:
    return int(np.floor(seconds * PER_SECOND))
