"""The start of a replan: the old plan on the changed network, with its gaps filled."""

from dataclasses import dataclass

import numpy as np

from jaxdt.run.config import RunConfig
from jaxdt.run.memory import FLOAT_BYTES
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan, even_shares
from planner.api.job import Job
from planner.model import comm_workload
from planner.model.comm_workload import CommWorkload
from planner.model.constraints import Constraints, Rules, rules_of
from planner.model.moves import Holders, Move
from planner.model.problem import Problem, problem_with_spares
from planner.search.seating import seating

STATES_PER_PARAMETER = 3  # parameters and two moments, where no optimizer is known


@dataclass(frozen=True, eq=False)
class Start:
    """The plan that runs, on the network after the change: who holds what, the job in its new shape with its sizes, the
    constraints by index, and the nearest placement [S, P]."""

    plan: Plan
    network: Network
    job: Job
    horizon_steps: float
    constraints: Constraints
    rules: Rules
    workload: CommWorkload
    problem: Problem
    holders: Holders
    placement: np.ndarray

    def charged_s(self, moves: tuple[Move, ...]) -> float:
        """Seconds of moving that a step is charged."""
        return longest_s(moves) / self.horizon_steps


def longest_s(moves: tuple[Move, ...]) -> float:
    """Seconds until the last move is done."""
    return max((move.time_s for move in moves), default=0.0)


def start_of(plan: Plan, network: Network, job: Job, horizon_steps: float, constraints: Constraints) -> Start:
    """The start of a replan; BadInput for constraints that contradict each other."""
    assert job.n_stages is not None and job.n_pipelines is not None  # a replan has a shape
    shape = job.n_stages, job.n_pipelines
    index = {device.name: d for d, device in enumerate(network.devices)}
    names = [[plan.devices[d] for d in row] for row in plan.placement]
    held = [[index[name] for name in row if name in index] for row in names]
    holders = Holders(network, plan.stages, held, state_bytes_of(job, plan))
    workload = _workload(plan, job)
    problem = problem_with_spares(
        network, *shape, workload.c_dp_bytes, workload.c_pp_bytes, workload.exchanges_per_step
    )
    near = np.full(shape, -1, np.int64)
    for s, row in enumerate(names):
        _seat(near[s], [index.get(name, -1) for name in row])
    if constraints.empty:
        placement = _filled(problem, near)
    else:
        placement = seating(network, constraints, *shape, near)
    rules = rules_of(constraints, network, *shape)
    return Start(plan, network, job, horizon_steps, constraints, rules, workload, problem, holders, placement)


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


def _workload(plan: Plan, job: Job) -> CommWorkload:
    """The sizes of Eq. 1-4 with the layers of the old plan, and the microbatches shared among the new pipelines."""
    assert job.n_stages is not None and job.n_pipelines is not None
    if isinstance(job.work, RunConfig):
        return comm_workload.recut(comm_workload.from_run(job.n_stages, job.n_pipelines, job.work), plan.stages)
    shares = even_shares(plan.n_microbatches, job.n_pipelines)
    c_pp_bytes = job.work.c_pp_bytes * max(shares) / max(plan.shares)
    return CommWorkload(plan.n_layers, plan.stages, job.work.c_dp_bytes, c_pp_bytes, shares)


def state_bytes_of(job: Job, plan: Plan):
    """The function from layers [lo, hi) to the bytes of their state: parameters and moments in fp32."""
    if isinstance(job.work, RunConfig):
        facts, n_moments = job.work.model.facts, job.work.optim.n_moments
        return lambda lo, hi: float(FLOAT_BYTES * facts.state_numbers(lo, hi, n_moments))
    largest = max(hi - lo for lo, hi in plan.stages)
    a_layer_bytes = STATES_PER_PARAMETER * plan.found["c_dp_bytes"] / largest
    return lambda lo, hi: a_layer_bytes * (hi - lo)
