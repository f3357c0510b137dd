"""The solver `auto`, a portfolio: annealing chains on all cores, the genetic algorithm before one of them, and a proof
beside them.

Under an evaluation limit the work is cut into a fixed number of parts and CP-SAT counts its own work, so that the plan
depends on neither clock nor cores.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.cost.compiled import is_compiled
from planner.model.problem import Problem
from planner.search.anneal import compile_anneal_softened
from planner.search.annealing_chains import ChainSequence, Start, anneal_while_compiling, chain_sequences, in_threads
from planner.search.background import Background, in_background
from planner.search.base import SolverEntry
from planner.search.compositions import prove_by_compositions, search_from
from planner.search.device_types import Types
from planner.search.evolve import EVOLVE, compile_evolve, evolve
from planner.search.exact import MAX_DEVICES, prove_by_enumeration
from planner.search.incumbent import Incumbent, Share
from planner.search.types_sat import (
    EFFORTS,
    QUICK_EFFORTS,
    affordable,
    bound_by_clusters,
    exact_types,
    max_work,
    prove_with_efforts,
)

# parts of the time limit
QUICK_FRAC, ENUMERATE_FRAC, WARM_UP_FRAC, BOUND_FRAC, PROOF_FRAC = 0.3, 0.6, 0.05, 0.2, 0.75
EVOLVE_FRAC, EVOLVE_ALONE_FRAC = 0.35, 0.15  # beside chains on other cores, and on the only core
HOPELESS_GAP = 0.15
SMALL = 12  # devices that enumeration proves in less time than annealing takes to compile
BOUND_WORK = 4.0
EVOLVED = replace(EVOLVE, population=8)  # it is full, and bred from, within the first second


def run_portfolio(problem: Problem, incumbent: Incumbent, seed: int):
    """Anneal everywhere; beside that, one core proves. The layouts come first (`starts_from_layouts`): on regular
    networks one of them is optimal, and the proof is there before the annealing is even compiled. Few devices are left
    to enumeration."""
    timed = incumbent.budget.evaluations is None
    if timed and problem.n_devices <= SMALL:
        prove_by_enumeration(problem, incumbent)
        return
    types = exact_types(problem)
    if timed:
        enumerates = is_compiled(search_from)  # else the first plans would wait for that
        _prove_quickly(problem, types, incumbent, seed, enumerates)
        if incumbent.done:
            return
    chains = chain_sequences(problem, incumbent, seed)
    if not timed:
        _search(chains, incumbent.starts, seed)
        _prove(problem, types, incumbent, seed, lambda: np.inf, lambda: np.inf)
        return
    # What the chains begin with is compiled before the proof begins, which would compete for the cores. It may take
    # longer than the time limit where cores are busy, and a compilation cannot be stopped.
    Background(compile_anneal_softened, incumbent).result()
    if incumbent.done:
        return
    with in_background(lambda: _prove_beside(problem, types, incumbent, seed, not enumerates), incumbent):
        anneal_while_compiling(chains[0])
        _search(chains, incumbent.starts, seed)


def _search(chains: list[ChainSequence], starts: list[Start], seed: int):
    """Run all chains, each in a thread of its own, the first one in this thread. The last one, which may be the only
    one, begins with the genetic algorithm."""
    runs: list[Callable[[], None]] = [functools.partial(chain.run, starts) for chain in chains[:-1]]
    frac = EVOLVE_FRAC if len(chains) > 1 else EVOLVE_ALONE_FRAC
    runs.append(functools.partial(_evolve_then_anneal, chains[-1], starts, seed, frac))
    with in_threads(runs[1:]):
        runs[0]()


def _evolve_then_anneal(chain: ChainSequence, starts: list[Start], seed: int, frac: float):
    """The part `frac` of the chain's budget goes to the genetic algorithm: a population finds good regions of an
    irregular network sooner, and long chains go further from there. While its kernels compile, which nobody waits for
    when the time is up, the chain anneals."""
    incumbent = chain.incumbent
    if chain.max_moves is None:
        compiling = Background(compile_evolve, incumbent)
        chain.run(starts, wanted=lambda: compiling.is_running)
        starts = incumbent.starts
    if incumbent.done:
        return
    share = Share(
        incumbent,
        until_s=incumbent.elapsed_s + frac * incumbent.left_s,
        evaluations=None if chain.max_moves is None else int(frac * chain.max_moves),
        source=chain.index,
    )
    members = evolve(chain.problem, share, seed, EVOLVED, [groups for _, groups in starts])
    chain.n_moves += share.n_counted
    chain.run([*starts, *members])


def _prove_quickly(problem: Problem, types: Types | None, incumbent: Incumbent, seed: int, enumerates: bool):
    """Before any annealing: the first effort of CP-SAT, and the enumeration for networks of few types."""
    if types is not None and problem.n_devices > MAX_DEVICES:
        quick_left_s, enumerate_left_s = (
            functools.partial(_left_s, incumbent, frac) for frac in (QUICK_FRAC, ENUMERATE_FRAC)
        )
        prove_with_efforts(problem, types, incumbent, seed, QUICK_EFFORTS[:1], quick_left_s)
        if enumerates:
            prove_by_compositions(problem, types, incumbent, enumerate_left_s)


def _left_s(incumbent: Incumbent, frac: float) -> float:
    """Seconds that are left until this part of the time limit."""
    return frac * incumbent.time_limit_s - incumbent.elapsed_s


def _prove_beside(problem: Problem, types: Types | None, incumbent: Incumbent, seed: int, enumerates: bool):
    """Another quick effort, and the enumeration if its kernels are still to be compiled; then, against annealed plans,
    bounds and a proof within their parts of the time."""
    time_s = incumbent.time_limit_s
    if types is not None and problem.n_devices > MAX_DEVICES:
        quick_left_s = functools.partial(_left_s, incumbent, QUICK_FRAC)
        prove_with_efforts(problem, types, incumbent, seed, QUICK_EFFORTS[1:], quick_left_s)
        if enumerates:
            prove_by_compositions(problem, types, incumbent, functools.partial(_left_s, incumbent, PROOF_FRAC))
    while incumbent.elapsed_s < WARM_UP_FRAC * time_s and not incumbent.done:
        time.sleep(0.02)
    bound_left_s = functools.partial(_left_s, incumbent, incumbent.elapsed_s / time_s + BOUND_FRAC)
    proof_left_s = functools.partial(_left_s, incumbent, PROOF_FRAC)
    _prove(problem, types, incumbent, seed, bound_left_s, proof_left_s)


def _prove(
    problem: Problem,
    types: Types | None,
    incumbent: Incumbent,
    seed: int,
    bound_left_s: Callable[[], float],
    proof_left_s: Callable[[], float],
):
    """Bounds, then a proof unless it is far off; the callables say how many seconds are left for each of the two. Where
    annealing has found no plan without missing links, CP-SAT looks for one, or proves that there is none."""
    if incumbent.done:
        return
    if problem.n_devices <= MAX_DEVICES:
        prove_by_enumeration(problem, incumbent)
        return
    if incumbent.budget.evaluations is not None and types is not None:
        prove_by_compositions(problem, types, incumbent, bound_left_s)
    bound_by_clusters(problem, incumbent, bound_left_s, min(BOUND_WORK, max_work(incumbent)), seed)
    has_plan = incumbent.best_s < problem.missing_s
    if types is not None and (not has_plan or incumbent.best_s <= incumbent.bound_s * (1 + HOPELESS_GAP)):
        prove_with_efforts(problem, types, incumbent, seed, affordable(incumbent, EFFORTS), proof_left_s)


ENTRY = SolverEntry(run_portfolio, starts_from_layouts=True, honours_constraints=True)
