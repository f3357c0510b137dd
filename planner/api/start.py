"""The plan that runs when a network changes, as the start of a search: its sizes, its seats, what moves from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxdt.run.config import RunConfig
from jaxdt.run.memory import FLOAT_BYTES
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan, even_shares
from planner.api.job import Job, Start
from planner.model import comm_workload
from planner.model.comm_workload import CommBytes, CommWorkload
from planner.model.constraints import Constraints
from planner.model.moves import Move, StateBytes, longest_s
from planner.model.problem import Problem
from planner.report.result import Mended, Result
from planner.search.seats import Before, Seats, constrained_seats, seats_near

STATES_PER_PARAMETER = 3  # parameters and two moments, where no optimizer is known


def workload_near(start: Start, job: Job) -> CommWorkload:
    """The sizes of Eq. 1-4 with the layers of the plan that runs, and the microbatches shared among the new
    pipelines."""
    plan = start.plan
    assert job.n_stages is not None and job.n_pipelines is not None
    if isinstance(job.work, RunConfig):
        return comm_workload.recut(comm_workload.from_run(job.n_stages, job.n_pipelines, job.work), plan.stages)
    shares = even_shares(plan.n_microbatches, job.n_pipelines)
    c_pp_bytes = job.work.c_pp_bytes * max(shares) / max(plan.shares)
    return CommWorkload(plan.n_layers, plan.stages, CommBytes(job.work.c_dp_bytes, c_pp_bytes), shares)


def seats_of(
    network: Network, problem: Problem, constraints: Constraints, start: Start | None, job: Job
) -> Seats | None:
    """What a search has to know of seats; None where nothing is charged for any."""
    if start is not None:
        state_bytes = state_bytes_of(job, start.plan)
        return seats_near(network, problem, constraints, start.plan, state_bytes, start.horizon_steps)
    return (
        None if constraints.empty else constrained_seats(network, constraints, (problem.n_stages, problem.n_pipelines))
    )


def state_bytes_of(job: Job, plan: Plan) -> StateBytes:
    """The function from layers [lo, hi) to the bytes of their state: parameters and moments in fp32."""
    if isinstance(job.work, RunConfig):
        facts, moments = job.work.model.facts, job.work.optim.moments
        return lambda lo, hi: float(FLOAT_BYTES * facts.state_numbers(lo, hi, moments))
    largest = max(hi - lo for lo, hi in plan.stages)
    a_layer_bytes = STATES_PER_PARAMETER * plan.found["c_dp_bytes"] / largest
    return lambda lo, hi: a_layer_bytes * (hi - lo)


def with_moves(result: Result, before: Before, near: np.ndarray, near_s: float) -> Result:
    """The result with its moves from a plan that runs, beside those of `near`, that plan with its gaps filled, which
    scores near_s."""
    moves = before.holders.moves(result.plan.stages, result.plan.placement)
    near_moves = before.holders.moves(before.plan.stages, near.tolist())
    facts = {
        "score_s": result.score_s + before.charged_s(moves),
        "moved_bytes": moved_bytes(moves),
        "move_s": longest_s(moves),
        "horizon_steps": before.horizon_steps,
        "from": before.plan.fingerprint,
    }
    plan = replace(result.plan, found=result.plan.found | {"replan": facts})
    mended = Mended(near_s + before.charged_s(near_moves), moved_bytes(near_moves), longest_s(near_moves))
    return replace(result, plan=plan, moves=moves, mended=mended)


def moved_bytes(moves: tuple[Move, ...]) -> float:
    """Bytes of all moves."""
    return sum(move.n_bytes for move in moves)
