"""Where devices may sit, and what a search charges a placement: violated constraints, and moves from a plan that runs.

S stages, P pipelines, N devices.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from planner.cost.placement import match_pipelines
from planner.model.constraints import Constraints, Rules, rules_of
from planner.model.layer_cuts import Ranges
from planner.model.moves import Holders, Move, StateBytes, longest_s
from planner.model.problem import Problem
from planner.search.charges import Charges, SeatRules, seat_rules
from planner.search.seating import seating


@dataclass(frozen=True, eq=False)
class Before:
    """The plan that runs on a network before it changes, who holds its state, and the steps over which the seconds of
    moving have to pay off."""

    plan: Plan
    holders: Holders
    horizon_steps: float

    def charged_s(self, moves: tuple[Move, ...]) -> float:
        """Seconds of moving that a step is charged."""
        return longest_s(moves) / self.horizon_steps


@dataclass(frozen=True, eq=False)
class Seats:
    """near [S, P]: a placement that honours the constraints, from which a search may start. Where a plan runs, it is
    that plan with its gaps filled, and moves are charged."""

    network: Network
    rules: Rules
    near: np.ndarray
    before: Before | None = None
    _fetch_s: dict[Ranges, np.ndarray] = field(default_factory=dict)

    @property
    def are_all_used(self) -> bool:
        """Whether no device is left out."""
        return self.near.size == self.network.n_devices

    @cached_property
    def _seat_rules(self) -> SeatRules:
        return seat_rules(self.rules, self.network.n_devices, self.near.shape)

    def charges(self, stages: Ranges, violation_s: float) -> Charges:
        """What annealing charges, where stages have these layers."""
        if stages not in self._fetch_s:
            nothing = np.zeros((self.network.n_devices, len(self.near)))
            self._fetch_s[stages] = self.before.holders.fetch_s(stages) if self.before else nothing
        per_step = 1.0 / self.before.horizon_steps if self.before else 0.0
        return Charges(self._seat_rules, self._fetch_s[stages], per_step, violation_s)

    def charged_s(self, stages: Ranges, placement: np.ndarray) -> float:
        """Seconds that a step of an allowed placement is charged."""
        if self.before is None:
            return 0.0
        return self.before.charged_s(self.before.holders.moves(stages, placement.tolist()))

    def allows(self, placement: np.ndarray) -> bool:
        """Whether a placement [S, P] honours the constraints."""
        return not self.rules.violated(placement.tolist())

    def matched(self, problem: Problem, placement: np.ndarray) -> np.ndarray:
        """The placement with the best pairs of each hop, where constraints leave them open."""
        return placement if self.rules.about_pipelines else match_pipelines(problem, placement)


def constrained_seats(network: Network, constraints: Constraints, shape: tuple[int, int]) -> Seats:
    """The seats of a shape (S, P) under constraints. BadInput names those that contradict each other."""
    rules = rules_of(constraints, network, *shape)
    return Seats(network, rules, seating(network, constraints, *shape))


def seats_near(
    network: Network,
    problem: Problem,
    constraints: Constraints,
    plan: Plan,
    state_bytes: StateBytes,
    horizon_steps: float,
) -> Seats:
    """The seats on a network that has changed since `plan` runs, whose devices it may lack. BadInput for constraints
    that contradict each other."""
    shape = problem.n_stages, problem.n_pipelines
    index = {device.name: d for d, device in enumerate(network.devices)}
    names = [[plan.devices[d] for d in row] for row in plan.placement]
    holders = Holders(
        network, plan.stages, [[index[name] for name in row if name in index] for row in names], state_bytes
    )
    near = np.full(shape, -1, np.int64)
    for s, row in enumerate(names):
        _seat(near[s], [index.get(name, -1) for name in row])
    near = _filled(problem, near) if constraints.empty else seating(network, constraints, *shape, near)
    rules = rules_of(constraints, network, *shape)
    return Seats(network, rules, near, Before(plan, holders, horizon_steps))


def _seat(row: np.ndarray, devices: list[int]):
    """Write who stays into the row [P] of a stage: in its own pipeline where that is left, else in a gap."""
    n = len(row)
    row[: len(devices[:n])] = devices[:n]
    for d in devices[n:]:
        gaps = np.flatnonzero(row < 0)
        if d >= 0 and len(gaps):
            row[gaps[0]] = d


def _filled(problem: Problem, near: np.ndarray) -> np.ndarray:
    """The placement with a device for every gap: the one that adds least to its stage and to its hops."""
    placement = near.copy()
    free = [int(d) for d in np.setdiff1d(np.arange(problem.n_devices), placement[placement >= 0])]
    for s, p in zip(*np.nonzero(near < 0), strict=True):
        mates = placement[s][placement[s] >= 0]
        around = [placement[t, p] for t in (s - 1, s + 1) if 0 <= t < len(placement) and placement[t, p] >= 0]
        costs = [problem.dp_s[d, mates].sum() + problem.pp_s[d, around].sum() for d in free]
        placement[s, p] = free.pop(int(np.argmin(costs)))
    return placement
