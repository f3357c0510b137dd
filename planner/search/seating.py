"""Seats for devices under constraints by CP-SAT: any seating, or the one that keeps most devices where they are; and
which constraints contradict each other.

The model knows the constraints alone, and no costs or links.
"""

from __future__ import annotations

import itertools

import numpy as np
from ortools.sat.python import cp_model

from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from planner.model.constraints import Constraints, Rules, rules_of

WORK = 20.0  # CP-SAT's deterministic time of one call, some seconds of one core
KEEP_WORK = 0.3  # of a call that may end with a seating that is not the nearest


def seating(
    network: Network, constraints: Constraints, n_stages: int, n_pipelines: int, near: np.ndarray | None = None
) -> np.ndarray:
    """A placement [S, P] of S * P of the devices that honours the constraints; with `near` [S, P] (-1: nobody), one
    that keeps most of its devices in their stage. BadInput names the constraints that contradict each other, or says
    that CP-SAT found no seating within its work."""
    shape = n_stages, n_pipelines
    rules = rules_of(constraints, network, *shape)
    model = _Seats(network.n_devices, rules)
    placement = model.solve(near)
    if placement is None and near is not None and model.status == cp_model.UNKNOWN:
        placement = model.solve()
    if placement is not None:
        return placement
    if model.status == cp_model.UNKNOWN:
        raise BadInput("constraints: found no seating that honours them, nor a proof that there is none")
    named = needed = constraints.named()
    for rule in named:
        fewer = [other for other in needed if other is not rule]
        model = _Seats(network.n_devices, rules_of(Constraints.of(fewer), network, *shape))
        if model.solve() is None and model.status == cp_model.INFEASIBLE:
            needed = fewer
    texts = "; ".join(rule.text for rule in needed)
    together = "cannot hold together" if len(needed) > 1 else "cannot hold"
    raise BadInput(f"constraints: {texts}: {together} with {n_stages} stages x {n_pipelines} pipelines")


class _Seats:
    """x[d][s]: device d is in stage s; where pipelines matter also z[d][s][p]: it sits there. Data, variables and
    constraints of one problem; `status` is that of the last call."""

    def __init__(self, n_devices: int, rules: Rules):
        self.rules = rules
        self.n = n_devices
        self.stages, self.pipelines = range(rules.n_stages), range(rules.n_pipelines)
        self.status = cp_model.UNKNOWN

    def _variables(self, model: cp_model.CpModel) -> tuple[list, list]:
        """(x, z), with every seat taken, and every device in one seat or, if there are more of them, in none."""
        stages, pipelines, devices = self.stages, self.pipelines, range(self.n)
        x = [[model.new_bool_var("") for _ in stages] for _ in devices]
        z = []
        for d in devices:
            model.add(sum(x[d]) == 1) if self.n == len(stages) * len(pipelines) else model.add(sum(x[d]) <= 1)
        if self.rules.about_pipelines:
            z = [[[model.new_bool_var("") for _ in pipelines] for _ in stages] for _ in devices]
            for s in stages:
                for p in pipelines:
                    model.add_exactly_one(z[d][s][p] for d in devices)
                for d in devices:
                    model.add(sum(z[d][s]) == x[d][s])
        else:
            for s in stages:
                model.add(sum(x[d][s] for d in devices) == len(pipelines))
        return x, z

    def _constrain(self, model: cp_model.CpModel, x: list, z: list):
        """Add the rules. Of devices that share a stage or a pipeline, those that are not used count nothing."""
        rules, stages, pipelines = self.rules, self.stages, self.pipelines
        for seats, n in ((rules.pin, 1), (rules.forbid, 0)):
            for d, stage, pipeline in seats:
                chosen = [s for s in stages if stage in (None, s)]
                model.add(sum(x[d][s] if pipeline is None else z[d][s][pipeline] for s in chosen) == n)
        for group in rules.same_stage:
            for a, b in itertools.combinations(sorted(group), 2):
                for s in stages:
                    model.add(x[a][s] + sum(x[b][t] for t in stages if t != s) <= 1)
        for group in rules.same_pipeline:
            for a, b in itertools.combinations(sorted(group), 2):
                for p in pipelines:
                    in_p = sum(z[a][s][p] for s in stages)
                    model.add(in_p + sum(z[b][s][q] for s in stages for q in pipelines if q != p) <= 1)
        for members, most in rules.limits:
            for s in stages:
                model.add(sum(x[d][s] for d in members) <= most)

    def solve(self, near: np.ndarray | None = None) -> np.ndarray | None:
        """A placement, or None; `status` then says why."""
        model = cp_model.CpModel()
        x, z = self._variables(model)
        self._constrain(model, x, z)
        if near is not None:
            kept = [x[int(d)][s] for s, row in enumerate(near) for d in row if d >= 0]
            for variable in kept:
                model.add_hint(variable, True)
            model.maximize(sum(kept))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.catch_sigint_signal = False
        solver.parameters.presolve_inclusion_work_limit = 0  # see planner.search.types_sat
        solver.parameters.max_deterministic_time = WORK if near is None else KEEP_WORK
        self.status = solver.solve(model)
        found = self.status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return self._placement(solver, x, z, near) if found else None

    def _placement(self, solver: cp_model.CpSolver, x: list, z: list, near: np.ndarray | None) -> np.ndarray:
        placement = np.full((len(self.stages), len(self.pipelines)), -1, np.int64)
        if z:
            for d in range(self.n):
                for s in self.stages:
                    for p in self.pipelines:
                        if solver.value(z[d][s][p]):
                            placement[s, p] = d
            return placement
        for s in self.stages:
            members = [d for d in range(self.n) if solver.value(x[d][s])]
            if near is not None:  # who stays, stays in its pipeline
                for p, d in enumerate(near[s]):
                    if d in members:
                        placement[s, p] = d
                        members.remove(int(d))
            for p in self.pipelines:
                if placement[s, p] < 0:
                    placement[s, p] = members.pop()
        return placement
