"""Seats for devices under constraints by CP-SAT: any seating, or the one that keeps most devices where they are; and
which constraints contradict each other.

The model knows the constraints alone, and no costs or links.
"""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from planner.model.constraints import Constraints, RegionLimit, Rule, Rules, SeatRule, rules_of

WORK = 20.0  # CP-SAT's deterministic time of one call, some seconds of one core
KEEP_WORK = 0.3  # of a call that may end with a seating that is not the nearest


def seating(
    network: Network, constraints: Constraints, n_stages: int, n_pipelines: int, near: np.ndarray | None = None
) -> np.ndarray:
    """A placement [S, P] of S * P of the devices that honours the constraints; with `near` [S, P] (-1: nobody), one
    that keeps most of its devices in their stage. BadInput names the constraints that contradict each other, or says
    that CP-SAT found no seating within its work."""
    rules = rules_of(constraints, network, n_stages, n_pipelines)
    named = constraints.named()
    model = _Seats(network, rules, named)
    placement = model.solve(named, near)
    if placement is not None:
        return placement
    raise BadInput(f"constraints: {_contradiction(model, named, n_stages, n_pipelines)}")


def _contradiction(model: _Seats, named: list[Rule], n_stages: int, n_pipelines: int) -> str:
    """The names of constraints that cannot hold together, of which none can be left out."""
    if model.status == cp_model.UNKNOWN:
        return "found no seating that honours them, nor a proof that there is none"
    needed = list(named)
    for rule in named:
        fewer = [other for other in needed if other is not rule]
        if model.solve(fewer) is None and model.status == cp_model.INFEASIBLE:
            needed = fewer
    texts = "; ".join(rule.text for rule in needed)
    together = "cannot hold together" if len(needed) > 1 else "cannot hold"
    return f"{texts}: {together} with {n_stages} stages x {n_pipelines} pipelines"


class _Seats:
    """x[d, s]: device d is in stage s; where pipelines matter also z[d, s, p]: it sits there."""

    def __init__(self, network: Network, rules: Rules, named: list[Rule]):
        self.rules = rules
        self.index = {device.name: d for d, device in enumerate(network.devices)}
        self.regions = [device.region for device in network.devices]
        self.n = network.n_devices
        self.with_pipelines = rules.about_pipelines
        self.all_used = self.n == rules.n_stages * rules.n_pipelines
        self.status = cp_model.UNKNOWN

    def solve(self, named: list[Rule], near: np.ndarray | None = None) -> np.ndarray | None:
        """A placement under these constraints, or None; `status` then says why."""
        n_stages, n_pipelines = self.rules.n_stages, self.rules.n_pipelines
        model = cp_model.CpModel()
        stages, pipelines = range(n_stages), range(n_pipelines)
        x = [[model.new_bool_var("") for _ in stages] for _ in range(self.n)]
        z = []
        for d in range(self.n):
            model.add(sum(x[d]) == 1) if self.all_used else model.add(sum(x[d]) <= 1)
        if self.with_pipelines:
            z = [[[model.new_bool_var("") for _ in pipelines] for _ in stages] for _ in range(self.n)]
            for s in stages:
                for p in pipelines:
                    model.add_exactly_one(z[d][s][p] for d in range(self.n))
                for d in range(self.n):
                    model.add(sum(z[d][s]) == x[d][s])
        else:
            for s in stages:
                model.add(sum(x[d][s] for d in range(self.n)) == n_pipelines)
        for rule in named:
            self._add(model, x, z, rule)
        if near is not None:
            kept = [x[int(d)][s] for s, row in enumerate(near) for d in row if d >= 0]
            for s, row in enumerate(near):
                for d in row:
                    if d >= 0:
                        model.add_hint(x[int(d)][s], True)
            model.maximize(sum(kept))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.catch_sigint_signal = False
        solver.parameters.presolve_inclusion_work_limit = 0  # see planner.search.types_sat
        solver.parameters.max_deterministic_time = WORK if near is None else KEEP_WORK
        self.status = solver.solve(model)
        if self.status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return self.solve(named) if near is not None and self.status == cp_model.UNKNOWN else None
        return self._placement(solver, x, z, near)

    def _placement(self, solver: cp_model.CpSolver, x: list, z: list, near: np.ndarray | None) -> np.ndarray:
        shape = self.rules.n_stages, self.rules.n_pipelines
        placement = np.full(shape, -1, np.int64)
        if z:
            for d in range(self.n):
                for s in range(shape[0]):
                    for p in range(shape[1]):
                        if solver.value(z[d][s][p]):
                            placement[s, p] = d
            return placement
        for s in range(shape[0]):
            members = [d for d in range(self.n) if solver.value(x[d][s])]
            if near is not None:  # who stays, stays in its pipeline
                for p, d in enumerate(near[s]):
                    if d in members:
                        placement[s, p] = d
                        members.remove(int(d))
            for p in range(shape[1]):
                if placement[s, p] < 0:
                    placement[s, p] = members.pop()
        return placement

    def _add(self, model: cp_model.CpModel, x: list, z: list, rule: Rule):
        """One constraint."""
        stages, pipelines = range(self.rules.n_stages), range(self.rules.n_pipelines)
        value = rule.value
        if isinstance(value, SeatRule):
            d = self.index[value.device]
            chosen = [s for s in stages if value.stage in (None, s)]
            if value.pipeline is None:
                seats = [x[d][s] for s in chosen]
            else:
                seats = [z[d][s][value.pipeline] for s in chosen]
            model.add(sum(seats) == (rule.kind == "pin"))
        elif isinstance(value, RegionLimit):
            for region in dict.fromkeys(self.regions):
                if value.region in ("*", region):
                    members = [d for d in range(self.n) if self.regions[d] == region]
                    for s in stages:
                        model.add(sum(x[d][s] for d in members) <= value.most)
        else:
            self._add_same(model, x, z, rule.kind, [self.index[name] for name in value], (stages, pipelines))

    def _add_same(self, model, x: list, z: list, kind: str, devices: list[int], ranges: tuple[range, range]):
        """Devices that are used share a stage or a pipeline."""
        stages, pipelines = ranges
        for a in devices:
            for b in devices:
                if a < b and kind == "same_stage":
                    for s in stages:
                        model.add(x[a][s] + sum(x[b][t] for t in stages if t != s) <= 1)
                elif a < b:
                    for p in pipelines:
                        in_p = sum(z[a][s][p] for s in stages)
                        model.add(in_p + sum(z[b][s][q] for s in stages for q in pipelines if q != p) <= 1)
