"""Solvers by name; `auto` is the portfolio: annealing islands on all cores, a proof in between.

Every solver reports to a Board and is over when the board is done. Under an evaluation limit the work is cut into a
fixed number of parts and CP-SAT counts its own work, so that the plan depends on neither clock nor cores.
"""

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxdt.spec.errors import BadInput
from planner.cost.bounds import floor_s
from planner.cost.communication import EXACT_PATH_STAGES
from planner.cost.ortools import chain, placement_of
from planner.model.problem import Problem, placement_s
from planner.search import layouts
from planner.search.annealing_chains import Island
from planner.search.cluster import Types, interchangeable, near_equal, types_of
from planner.search.evolve import evolve, kernighan_lin, random_search
from planner.search.exact import MAX_DEVICES
from planner.search.incumbent import PROOF_GAP_S, Board
from planner.search.prover import climb, cp_sat, enumerate_all, exact_types, prove_types, start_from

FIXED_ISLANDS = 4
QUICK_SHARE, WARM_UP, CLIMB_SHARE, PROOF_SHARE = 0.3, 0.05, 0.2, 0.75
HOPELESS_GAP = 0.15
WORK_PER_EVALUATION, RUNG_WORK = 1e-6, 4.0
QUICK_TRIES = [(True, 1.0), (False, 3.5)]
TRIES = [(linear, work) for work in (4.0, 16.0, 64.0, 256.0, 1024.0) for linear in (False, True)]
CLUSTERS, CLUSTER_WORK = 8, 30.0
LAST_WAIT_S = 1.0
BREED_SHARE = 0.35


@dataclass(frozen=True, eq=False)
class Solution:
    """The emitted placement [S, P]; history holds (seconds, cost) of every improvement."""

    placement: np.ndarray
    bound_s: float
    proved: bool
    evaluations: int
    time_s: float
    history: list[tuple[float, float]]


def n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def anneal_on_all_cores(problem: Problem, board: Board, seed: int):
    """Islands until the limits are spent; all start from what the board knows."""
    kind_of = interchangeable(problem)
    limit = board.limits.evaluations
    n = n_cores() if limit is None else FIXED_ISLANDS
    starts = [] if board.best is None else [(board.best_s, board.best)]
    moves = None if limit is None else max(1, limit // n)
    islands = [Island(problem, kind_of, board, seed, index, moves) for index in range(n)]
    with ThreadPoolExecutor(min(n, n_cores())) as pool:
        tasks = [pool.submit(island.run, starts) for island in islands[:-1]]
        tasks.append(pool.submit(_last_island, islands[-1], starts, seed))
        for task in tasks:
            task.result()


def _last_island(island: Island, starts: list[tuple[float, np.ndarray]], seed: int):
    """Where the clock limits the search and several cores take part, one of them breeds at first: a population finds
    good regions of an irregular network sooner, long chains go further from there."""
    board = island.board
    if board.limits.evaluations is None and island.index > 0 and island.problem.n_stages <= EXACT_PATH_STAGES:
        evolve(island.problem, board, seed, until_s=BREED_SHARE * board.limits.time_s)
        starts = [(board.best_s, board.best)]
    island.run(starts)


def _auto(problem: Problem, board: Board, seed: int):
    """Annealing everywhere; beside it one core proves. The layouts come first: on regular networks one is optimal, and
    the proof is there before the annealing is even compiled."""
    _offer_layouts(problem, board)
    if board.limits.evaluations is not None:
        anneal_on_all_cores(problem, board, seed)
        _prove(problem, exact_types(problem), board, seed, lambda: np.inf, lambda: np.inf)
        return
    types = exact_types(problem)
    _try_quickly(problem, types, board, seed, QUICK_TRIES[:1])
    if not board.done:
        with _beside(lambda: _prove_on_the_way(problem, types, board, seed), board):
            anneal_on_all_cores(problem, board, seed)


def _offer_layouts(problem: Problem, board: Board):
    for plan in (layouts.block(problem), layouts.rows(problem)):
        board.offer(plan, placement_s(problem, plan))


def _try_quickly(problem: Problem, types: Types | None, board: Board, seed: int, tries: list[tuple[bool, float]]):
    if types is not None and problem.n_devices > MAX_DEVICES:
        quick_s = QUICK_SHARE * board.limits.time_s
        _attempt(problem, types, board, seed, tries, lambda: quick_s - board.elapsed_s)


def _prove_on_the_way(problem: Problem, types: Types | None, board: Board, seed: int):
    """Another quick try; then, against annealed plans, bounds and a proof within their share of time."""
    _try_quickly(problem, types, board, seed, QUICK_TRIES[1:])
    while board.elapsed_s < WARM_UP * board.limits.time_s and not board.done:
        time.sleep(0.02)
    climbing_s, proving_s = board.elapsed_s + CLIMB_SHARE * board.limits.time_s, PROOF_SHARE * board.limits.time_s
    _prove(problem, types, board, seed, lambda: climbing_s - board.elapsed_s, lambda: proving_s - board.elapsed_s)


def _prove(problem: Problem, types: Types | None, board: Board, seed: int, climb_s, proof_s):
    """Bounds while climb_s() says that there is time, then a proof while proof_s() does, unless it is far off."""
    if board.done:
        return
    if problem.n_devices <= MAX_DEVICES:
        enumerate_all(problem, board)
        return
    climb(problem, board, climb_s, min(RUNG_WORK, _work(board)), seed)
    if types is not None and board.best_s <= board.bound_s * (1 + HOPELESS_GAP):
        _attempt(problem, types, board, seed, _affordable(board, TRIES), proof_s)


def _work(board: Board) -> float:
    """Deterministic work of one try that an evaluation limit allows."""
    limit = board.limits.evaluations
    return np.inf if limit is None else limit * WORK_PER_EVALUATION


def _affordable(board: Board, tries: list[tuple[bool, float]]) -> list[tuple[bool, float]]:
    return [(linear, work) for linear, work in tries if work <= _work(board)]


def _attempt(problem: Problem, types: Types, board: Board, seed: int, tries: list[tuple[bool, float]], time_s):
    """Proofs with growing work, each against the plan that is best by then, with and without linear relaxations:
    neither is faster on all networks."""
    for linear, work in tries:
        if board.done or time_s() <= 0:
            return
        prove_types(problem, types, board, cp_sat(time_s(), work, seed, linear))


@contextlib.contextmanager
def _beside(call, board: Board):
    """Run a call in a thread while the body runs; its errors are raised here. Enumeration cannot be interrupted, so
    nobody waits long for the thread."""
    failed = []

    def guarded():
        try:
            call()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    yield thread
    board.stop()
    thread.join(LAST_WAIT_S)
    if failed:
        raise failed[0]


def _types(problem: Problem, board: Board, seed: int):
    """CP-SAT over types; where all links differ, over clusters, and swaps of devices afterwards."""
    _offer_layouts(problem, board)
    types = exact_types(problem)
    if types is not None:
        _attempt(problem, types, board, seed, _affordable(board, [*QUICK_TRIES, *TRIES]), lambda: board.left_s)
        return
    types = types_of(problem, near_equal(problem, CLUSTERS)[-1], np.mean)
    start_from(problem, types, board, cp_sat(0.3 * board.left_s, CLUSTER_WORK, seed, linear=True))
    if not board.done:
        anneal_on_all_cores(problem, board, seed)


def _exact(problem: Problem, board: Board, seed: int):
    if problem.n_devices > MAX_DEVICES:
        raise BadInput(f"--solver: exact is for at most {MAX_DEVICES} devices, got {problem.n_devices}; use auto")
    _offer_layouts(problem, board)
    with _beside(lambda: enumerate_all(problem, board), board) as thread:
        while thread.is_alive() and not board.interrupted:
            thread.join(0.02)


SOLVERS = {
    "auto": _auto,
    "evolve": evolve,
    "types": _types,
    "exact": _exact,
    "kl": kernighan_lin,
    "random": random_search,
}


def solve(problem: Problem, board: Board, solver: str, seed: int) -> Solution:
    """Run one solver until the board is done, and emit its best plan with matchings (and, if shorter, the order) by
    OR-Tools. Always returns a plan: the block layout if the solver had no time for its first."""
    board.raise_bound(floor_s(problem))
    SOLVERS[solver](problem, board, seed)
    groups = layouts.block(problem) if board.best is None else board.best
    placement = chain(problem, groups)
    if placement_s(problem, placement) - board.bound_s > PROOF_GAP_S:
        placement = min(placement, placement_of(problem, groups), key=lambda plan: placement_s(problem, plan))
    cost_s = placement_s(problem, placement)
    bound_s = min(board.bound_s, cost_s)
    proved = cost_s - bound_s <= PROOF_GAP_S
    return Solution(placement, bound_s, proved, board.evaluations, board.elapsed_s, list(board.history))
