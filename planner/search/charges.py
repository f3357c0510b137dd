"""What annealing charges a placement besides its cost: violated constraints, and the seconds in which devices fetch the
state of another stage.

Every violated constraint costs `violation_s`, so that a walk gets past plans that are not allowed; the best plan that
it returns violates none. Without constraints and moves, annealing gets NOTHING, and computes none of it.

S stages, P pipelines, N devices, R regions.
"""

from typing import NamedTuple

import numpy as np

from planner.cost.compiled import compiled
from planner.model.constraints import Rules
from planner.model.problem import Problem

VIOLATION = 0.03  # of the cost, for each constraint that a plan on the way violates
MEAN_WEIGHT = 0.3  # of the mean of the devices' moves beside the longest one: a maximum alone hides progress


class SeatRules(NamedTuple):
    """Constraints for compiled code. seat_ok [N, S, P], or [N, S, 1] where none is about pipelines; stage_mate [N] and
    pipeline_mate [N] are the device with which a device shares its stage or pipeline, or itself. A stage may have most
    [R] devices of a region, and region [N] is that of each device."""

    seat_ok: np.ndarray
    stage_mate: np.ndarray
    pipeline_mate: np.ndarray
    region: np.ndarray
    most: np.ndarray

    @property
    def allows_all(self) -> bool:
        """Whether there are no constraints."""
        apart = [(mate == np.arange(len(mate))).all() for mate in (self.stage_mate, self.pipeline_mate)]
        return bool(self.seat_ok.all()) and all(apart) and len(self.most) == 1


class Charges(NamedTuple):
    """The costs of a placement besides the one that is minimised: move_s [N, S] seconds in which a device gets the
    state of a stage (a step is charged the part `per_step` of them); violation_s for a violated constraint. Nothing is
    charged where move_s is empty."""

    rules: SeatRules
    move_s: np.ndarray
    per_step: float
    violation_s: float


class SeatScratch(NamedTuple):
    """Scratch of `charge`: stage and pipeline of each device [N], devices of each region in a stage [R]."""

    stage_of: np.ndarray
    pipeline_of: np.ndarray
    count: np.ndarray


def seat_rules(rules: Rules | None, n_devices: int, shape: tuple[int, int]) -> SeatRules:
    """The arrays of constraints; of none, arrays that allow everything."""
    n_stages, n_pipelines = shape
    width = n_pipelines if rules is not None and rules.about_pipelines else 1
    seat_ok = np.ones((n_devices, n_stages, width), np.bool_)
    mates = [np.arange(n_devices), np.arange(n_devices)]
    region = np.zeros(n_devices, np.int64)
    most = [n_devices]
    if rules is not None:
        for d, s, p in rules.pin:
            ok = np.zeros((n_stages, width), np.bool_)
            ok[slice(None) if s is None else s, slice(None) if p is None else p] = True
            seat_ok[d] &= ok
        for d, s, p in rules.forbid:
            seat_ok[d, slice(None) if s is None else s, slice(None) if p is None else p] = False
        for mate, lists in zip(mates, (rules.same_stage, rules.same_pipeline), strict=True):
            for group in lists:
                _join(mate, group)
        of_members: dict[tuple[int, ...], int] = {}
        for members, limit in rules.limits:
            of_members[members] = min(limit, of_members.get(members, limit))
        for members, limit in of_members.items():
            region[list(members)] = len(most)
            most.append(limit)
    return SeatRules(seat_ok, mates[0], mates[1], region, np.array(most))


def _join(mate: np.ndarray, group: tuple[int, ...]):
    """Let all devices of a group, and of the groups that it touches, have one mate."""
    heads = np.unique(mate[list(group)])
    mate[np.isin(mate, heads)] = heads[0]


@compiled
def charge(charges, place, scratch):
    """(violated constraints, seconds of moving that a step is charged) of place [S, P]."""
    S, P = place.shape
    rules = charges.rules
    for d in range(scratch.stage_of.shape[0]):
        scratch.stage_of[d] = -1
    n_bad = 0
    longest = 0.0
    total = 0.0
    for s in range(S):
        for r in range(scratch.count.shape[0]):
            scratch.count[r] = 0
        for p in range(P):
            d = place[s, p]
            scratch.stage_of[d] = s
            scratch.pipeline_of[d] = p
            if not rules.seat_ok[d, s, p if rules.seat_ok.shape[2] > 1 else 0]:
                n_bad += 1
            scratch.count[rules.region[d]] += 1
            longest = max(longest, charges.move_s[d, s])
            total += charges.move_s[d, s]
        for r in range(scratch.count.shape[0]):
            n_bad += max(0, scratch.count[r] - rules.most[r])
    for d in range(scratch.stage_of.shape[0]):
        if scratch.stage_of[d] >= 0:
            mate = rules.stage_mate[d]
            if mate != d and scratch.stage_of[mate] >= 0 and scratch.stage_of[mate] != scratch.stage_of[d]:
                n_bad += 1
            mate = rules.pipeline_mate[d]
            if mate != d and scratch.stage_of[mate] >= 0 and scratch.pipeline_of[mate] != scratch.pipeline_of[d]:
                n_bad += 1
    return n_bad, charges.per_step * (longest + MEAN_WEIGHT * total / (S * P))


def seat_scratch(n_devices: int, charges: Charges) -> SeatScratch:
    return SeatScratch(
        np.empty(n_devices, np.int64), np.empty(n_devices, np.int64), np.empty(len(charges.rules.most), np.int64)
    )


def violation_s(problem: Problem) -> float:
    """What a search by COMM-COST charges a violated constraint."""
    typical_s = float(np.median(problem.pp_s)) * problem.n_stages + float(np.median(problem.dp_s)) * problem.n_pipelines
    return VIOLATION * max(typical_s, 1e-9)


NOTHING = Charges(seat_rules(None, 0, (0, 0)), np.zeros((0, 0)), 0.0, 0.0)
