"""The searches of a replan: by communication cost, and by step time. Both anneal seats from the old plan, with what
moves cost in what they minimise."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxdt.run.plan import Plan
from planner.api.by_cost import memory_workload, refuse_missing_links, refuse_small_devices
from planner.api.by_step import plan_of_step, scored, workload_of
from planner.api.job import COMM_COST, STEP_TIME
from planner.api.replan_result import Mended, Replan
from planner.api.replan_start import Start, longest_s
from planner.api.result import Result, Stop
from planner.api.search_run import Search, running, statistics_of, with_memory
from planner.cost.bounds import floor_s
from planner.cost.compiled import generator
from planner.cost.placement import match_pipelines
from planner.cost.reference import cost_of
from planner.model import comm_workload
from planner.model.moves import Move
from planner.model.problem import placement_s
from planner.model.proof import checked_bound, is_optimal
from planner.model.result import Solution
from planner.report.plan_file import plan_of
from planner.search.annealing_chains import anneal_charged, in_threads, n_cores, settle
from planner.search.charges import VIOLATION, charges_of
from planner.search.incumbent import Budget, Incumbent
from planner.step_time.estimate import Heat
from planner.step_time.search import Finalist, StepSolution
from planner.step_time.simulate import simulated_s
from planner.step_time.tune import Layout, anneal_layout, estimate_s, slice_moves, tune
from planner.step_time.workload import MISSING_S, StepWorkload, refuse_memory

SEED = 0
SOLVER = "replan"
BY_COST_FRAC = 0.4  # of the time of a replan by step time, for starts by Eq. 1-4
HEATS = (0.005, 0.02, 0.002)
EVALUATIONS_PER_ROUND = 50_000  # of the evaluation limit, for one slice of annealing by step time


def anneal_by_cost(start: Start, incumbent: Incumbent) -> np.ndarray:
    """The placement of least COMM-COST plus moves that the incumbent's budget finds."""
    problem = start.problem
    move_s = start.holders.fetch_s(start.workload.stages)
    charges = charges_of(problem, start.rules, move_s, 1.0 / start.horizon_steps)
    incumbent.missing_s = problem.missing_s
    if start.placement.size == problem.n_devices:
        incumbent.raise_bound(floor_s(problem))
    anneal_charged(problem, incumbent, charges, SEED, start.placement)
    found = start.placement if incumbent.best is None else incumbent.best
    return matched(start, settle(problem, charges, found, SEED))


def matched(start: Start, placement: np.ndarray) -> np.ndarray:
    """The placement with the best pairs of each hop, where constraints leave them open."""
    return placement if start.rules.about_pipelines else match_pipelines(start.problem, placement)


# ------------------------------------------------------------------------------------------------- communication cost


def replan_by_cost(start: Start, stop: Stop) -> Replan:
    """See planner.api.replan."""
    network, workload, problem = start.network, start.workload, start.problem
    memory = memory_workload(start.job, network)
    if workload.model is None:
        refuse_small_devices(network, workload)
    with running(stop, None) as incumbent:
        found = anneal_by_cost(start, incumbent)
    in_flight = start.plan.in_flight
    near = matched(start, start.placement)
    charges = {id(one): start.charged_s(start.holders.moves(workload.stages, one.tolist())) for one in (found, near)}
    placement = min((found, near), key=lambda one: placement_s(problem, one) + charges[id(one)])
    depth = tuple(start.plan.depth(s) for s in range(len(workload.stages)))
    if memory is not None and not memory.fits(placement, workload.stages, depth, workload.shares):
        stages = memory.split(placement, depth)
        if stages is None:
            refuse_memory(memory, len(placement))
        workload = comm_workload.recut(workload, stages)
    cost_s = placement_s(problem, placement)
    cost_s = cost_s if cost_s < problem.missing_s else math.inf
    refuse_missing_links(network, cost_s, placement.shape, False)
    same_sizes = workload.c_dp_bytes == start.workload.c_dp_bytes
    bound_s = checked_bound(incumbent.bound_s, cost_s) if same_sizes else 0.0
    solution = Solution(
        placement=placement,
        cost_s=cost_s,
        bound_s=bound_s,
        proved=is_optimal(cost_s, bound_s),
        evaluations=incumbent.evaluations,
        time_s=incumbent.elapsed_s,
        history=list(incumbent.history),
        by_solver=incumbent.by_solver,
    )
    facts = Search(stop, SOLVER, SEED).facts(COMM_COST, start.constraints)
    plan = plan_of(network, workload, solution, facts)
    plan = replace(plan, schedule=start.plan.schedule, in_flight=in_flight, codec=_codec(start))
    cost = cost_of(network, plan.placement, workload.c_dp_bytes, workload.c_pp_bytes, workload.exchanges_per_step)
    result = Result(
        plan=plan,
        network=network,
        objective=COMM_COST,
        score_s=cost.total_s,
        cost=cost,
        step_s=None,
        bound_s=plan.found["bound_s"],
        gap=plan.found["gap"],
        proved=solution.proved,
        statistics=statistics_of(incumbent, stop, SOLVER, SEED),
        history=tuple(solution.history),
        by_solver={name: tuple(history) for name, history in solution.by_solver.items()},
    )
    near_s = placement_s(problem, near)
    return _finished(start, result, near_s if near_s < problem.missing_s else math.inf)


def _codec(start: Start) -> tuple[str, ...]:
    """The old plan's codecs, where they do not differ by pipeline; else none."""
    same = not any("," in entry for entry in start.plan.codec)
    return start.plan.codec if same else ("none",) * (start.plan.n_stages - 1)


def _finished(start: Start, result: Result, mended_s: float) -> Replan:
    """The replan of a result: its moves beside those of the old plan with its gaps filled, which scores mended_s."""
    plan = result.plan
    moves = start.holders.moves(plan.stages, plan.placement)
    near = start.holders.moves(start.plan.stages, start.placement.tolist())
    mended = Mended(mended_s + start.charged_s(near), _bytes(near), longest_s(near))
    score_s = result.score_s + start.charged_s(moves)
    facts = {
        "score_s": score_s,
        "moved_bytes": _bytes(moves),
        "move_s": longest_s(moves),
        "horizon_steps": start.horizon_steps,
        "from": start.plan.fingerprint,
    }
    plan = replace(plan, found=plan.found | {"replan": facts})
    result = with_memory(replace(result, plan=plan), start.job)
    return Replan(result, score_s, moves, _bytes(moves), longest_s(moves), start.horizon_steps, mended)


def _bytes(moves: tuple[Move, ...]) -> float:
    return sum(move.n_bytes for move in moves)


# ----------------------------------------------------------------------------------------------------------- step time


def replan_by_step(start: Start, stop: Stop) -> Replan:
    """See planner.api.replan."""
    workload = workload_of(start.job, start.network)
    with running(stop, None, missing_s=MISSING_S) as incumbent:
        by_cost = _starts_by_cost(start, incumbent)
        layouts = [*_kept(start, workload, start.placement), *_tuned(start, workload, (start.placement, by_cost))]
        if not layouts:
            refuse_memory(workload, len(start.placement))
        layouts.sort(key=lambda layout: _charged(start, layout))
        best = _anneal(start, workload, layouts, incumbent)
        step_s = simulated_s(workload, best)
    finalist = Finalist(SOLVER, best, step_s)
    facts = Search(stop, SOLVER, SEED).facts(STEP_TIME, start.constraints)
    plan: Plan = plan_of_step(workload, StepSolution([finalist], None), incumbent, facts)
    score = scored(workload, finalist)
    refuse_missing_links(start.network, score.cost.total_s + step_s, best.shape, False)
    result = Result(
        plan=plan,
        network=start.network,
        objective=STEP_TIME,
        score_s=step_s,
        cost=score.cost,
        step_s=step_s,
        bound_s=0.0,
        gap=None,
        proved=False,
        statistics=statistics_of(incumbent, stop, SOLVER, SEED),
        history=tuple(incumbent.history),
        by_solver={name: tuple(history) for name, history in incumbent.by_solver.items()},
        finalists=(score,),
    )
    near = [layout for layout in layouts if layout.stages == start.plan.stages]
    mended = [layout for layout in near if (layout.placement == start.placement).all()]
    return _finished(start, result, min((layout.step_s for layout in mended), default=math.inf))


def _starts_by_cost(start: Start, incumbent: Incumbent) -> np.ndarray:
    """A placement by Eq. 1-4 with its moves, within a part of the budget."""
    budget = incumbent.budget
    inner = Incumbent(Budget(None if budget.time_s is None else BY_COST_FRAC * budget.time_s, budget.evaluations))
    with incumbent.on_stop(inner.stop):
        if incumbent.interrupted:
            inner.stop()
        placement = anneal_by_cost(start, inner)
    incumbent.count(inner.evaluations)
    return placement


def _charged(start: Start, layout: Layout) -> float:
    """The estimate of a layout's step, plus what its moves are charged."""
    return layout.step_s + start.charged_s(start.holders.moves(layout.stages, layout.placement.tolist()))


def _kept(start: Start, workload: StepWorkload, placement: np.ndarray) -> list[Layout]:
    """The placement with the layers and forwards in flight of the old plan, if it fits."""
    plan = start.plan
    shares = start.workload.shares
    depth = tuple(min(max(shares), plan.depth(s)) for s in range(plan.n_stages))
    if workload.schedule == "gpipe":
        depth = (shares[0],) * plan.n_stages
    if not workload.fits(placement, plan.stages, depth, shares):
        return []
    spare = np.setdiff1d(np.arange(workload.network.n_devices), placement)
    layout = Layout(placement, spare, plan.stages, shares, depth, 0.0)
    return [replace(layout, step_s=estimate_s(workload, layout))]


def _tuned(start: Start, workload: StepWorkload, placements: tuple[np.ndarray, ...]) -> list[Layout]:
    """Placements with the layers, shares and depth that suit them, and with the old plan's layers."""
    layouts = [tune(workload, placement) for placement in placements]
    kept = [layout for placement in placements[1:] for layout in _kept(start, workload, placement)]
    return [*(layout for layout in layouts if layout is not None), *kept]


def _anneal(start: Start, workload: StepWorkload, layouts: list[Layout], incumbent: Incumbent) -> Layout:
    """The best layout, by estimate and moves, of annealing from the best starts in all threads."""
    limit = incumbent.budget.evaluations
    n_threads = n_cores() if limit is None else 1
    n_rounds = math.inf if limit is None else max(1, limit // EVALUATIONS_PER_ROUND)
    best = [layouts[min(k, len(layouts) - 1)] for k in range(n_threads)]

    fetch_s: dict[tuple, np.ndarray] = {}

    def run(thread: int) -> Callable[[], None]:
        def search():
            bits = generator(SEED * 1009 + thread)
            n_done = 0
            while not incumbent.interrupted and n_done < n_rounds:
                layout = best[thread]
                if layout.stages not in fetch_s:
                    fetch_s[layout.stages] = start.holders.fetch_s(layout.stages)
                charges = charges_of(start.problem, start.rules, fetch_s[layout.stages], 1.0 / start.horizon_steps)
                charges = charges._replace(violation_s=VIOLATION * layout.step_s)
                heat = Heat(HEATS[(n_done + thread) % len(HEATS)], 2 * slice_moves(layout))
                moved = anneal_layout(workload, layout, bits, heat, charges)
                incumbent.count(heat.n_moves)
                tuned = tune(workload, moved.placement)
                every = [one for one in (layout, moved, tuned) if one is not None]
                allowed = [one for one in every if not start.rules.violated(one.placement.tolist())]
                best[thread] = min(allowed, key=lambda one: _charged(start, one))
                incumbent.offer(best[thread].placement, best[thread].step_s, thread, "seats")
                n_done += 1

        return search

    calls = [run(thread) for thread in range(n_threads)]
    with in_threads(calls[1:]):
        calls[0]()
    return min(best, key=lambda one: _charged(start, one))
