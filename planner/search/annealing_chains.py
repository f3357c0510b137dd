"""Annealing chains, one after another in each thread: of growing length from random, softened and elite starts, or,
where seats are charged (planner.search.charges), from the best placement so far, each from hot to cold.

The budget of a thread is seconds or moves. A chain is cut into slices of some ten milliseconds, after each of which the
thread looks at its budget. Temperatures follow the part of the chain's budget that is spent.
"""

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from jaxdt.run.cpus import usable_cores
from planner.cost.compiled import generator
from planner.model.problem import Problem, placement_s
from planner.search.anneal import (
    Cooling,
    MoveShares,
    Softness,
    anneal,
    anneal_softened,
    compile_anneal,
    cost_scale_s,
    devices_of,
    soft_walk_from,
    walk_from,
)
from planner.search.background import Background
from planner.search.charges import NOTHING, Charges
from planner.search.incumbent import Incumbent

SLICE_MOVES, SHORTEST_SLICE = 1_300_000, 5000  # over the number of devices, but not below the second
SOFTENED_MOVES = 4  # times the moves of a slice
N_ELITES = 4
FIRST_CHAIN, CHAIN_GROWTH, LONGEST_CHAIN = 0.02, 1.4, 0.2  # lengths of chains, as parts of the thread's budget
N_THREADS_REPRODUCIBLE = 4
SEAT_HEATS, SEAT_COLD = (0.01, 0.03, 0.15), 3e-4  # where seats are charged: of the chains in turn, and their end
SEAT_CHAIN = 0.45  # their length, as a part of the budget
SEAT_SOFTENED = 0.55  # of the first chain of every second thread, without constraints: the softened cost gets further
SETTLE_HOT, SETTLE_COLD, SETTLE_MOVES = 1e-6, 1e-8, 60_000
Start = tuple[float, np.ndarray]  # (cost, groups)


@dataclass(frozen=True)
class ChainSettings:
    """The settings of one chain: temperatures as parts of the best cost. The first `softened_frac` of its budget
    anneals the softened cost, which starts at `softness`."""

    hot: float
    cold: float
    shares: MoveShares
    softened_frac: float
    softness: float
    from_elite: bool


def draw_settings(rng: np.random.Generator, n_pipelines: int) -> ChainSettings:
    """Settings from ranges that did well on 24 to 256 devices; no single setting is best on all networks."""
    start = rng.choice(["random", "softened", "elite"], p=[0.3, 0.35, 0.35])
    hottest = {"random": 0.03, "softened": 0.012, "elite": 0.01}[start]
    hot = hottest * float(rng.uniform(0.3, 1.0))
    cold = float(np.exp(rng.uniform(np.log(2e-4), np.log(1e-3))))
    run_share = float(rng.choice([0.2, 0.5]))
    return ChainSettings(
        hot=hot,
        cold=cold,
        shares=MoveShares(reorder=0.3 if n_pipelines <= 2 else 0.01, runs=run_share),
        softened_frac=0.4 if start == "softened" else 0.0,
        softness=float(rng.choice([0.3, 1.0])),
        from_elite=bool(start == "elite"),
    )


def seat_settings(k: int, n_pipelines: int, softened: bool) -> ChainSettings:
    """Settings where seats are charged, of the chain number k."""
    hot = SEAT_HEATS[k % len(SEAT_HEATS)]
    return ChainSettings(
        hot=SEAT_HEATS[0] if softened else hot,
        cold=SEAT_COLD,
        shares=MoveShares(reorder=0.3 if n_pipelines <= 2 else 0.02, runs=0.3),
        softened_frac=SEAT_SOFTENED if softened else 0.0,
        softness=1.0,
        from_elite=True,
    )


@dataclass(eq=False)
class RunningChain:
    """A chain while it runs. It gets `budget_frac` of the thread's budget, of which start_frac was spent before it.
    done_frac is the part of its own budget that is spent, step_frac what its last slice took of that."""

    settings: ChainSettings
    scale_s: float
    place: np.ndarray
    best: np.ndarray
    start_frac: float
    budget_frac: float
    step_frac: float
    best_s: float = np.inf
    done_frac: float = 0.0

    @property
    def next_frac(self) -> float:
        """The likely end of the next slice (0..1): it takes as long as the one before."""
        return min(1.0, self.done_frac + max(self.step_frac, 1e-4))

    @property
    def softened(self) -> bool:
        return self.done_frac < self.settings.softened_frac

    def advance(self, spent_frac: float):
        """End a slice, at this part of the thread's budget."""
        done_frac = (spent_frac - self.start_frac) / self.budget_frac
        self.step_frac = done_frac - self.done_frac
        self.done_frac = done_frac

    def cooling(self, n_moves: int) -> Cooling:
        """Temperatures of the next slice on the true cost."""
        settings = self.settings
        first, last = (
            (frac - settings.softened_frac) / (1 - settings.softened_frac) for frac in (self.done_frac, self.next_frac)
        )
        return self._cooling(settings.hot, min(settings.cold, settings.hot / 2), first, last, n_moves)

    def softened_cooling(self, n_moves: int) -> tuple[Cooling, Softness]:
        """Temperatures and softness of the next slice on the softened cost."""
        settings = self.settings
        first = self.done_frac / settings.softened_frac
        last = min(1.0, self.next_frac / settings.softened_frac)
        softness = Softness(settings.softness * (1 - first), settings.softness * (1 - last))
        return self._cooling(0.4 * settings.hot, 0.04 * settings.hot, first, last, n_moves), softness

    def _cooling(self, hot: float, cold: float, first: float, last: float, n_moves: int) -> Cooling:
        """From temperature hot to cold, the part between first and last (0..1)."""
        hot_s, cold_s = (self.scale_s * hot * (cold / hot) ** x for x in (first, last))
        return Cooling(hot_s, cold_s, n_moves)


class ChainSequence:
    """The chains of one thread. `max_moves` is its whole budget, or None when the incumbent's clock counts."""

    def __init__(
        self,
        problem: Problem,
        incumbent: Incumbent,
        seed: int,
        index: int,
        max_moves: int | None,
        charges: Charges = NOTHING,
    ):
        self.problem = problem
        self.charges = charges
        self.is_charged = charges is not NOTHING
        self.devices = devices_of(problem, apart=self.is_charged)
        self.incumbent = incumbent
        self.index = index
        self.max_moves = max_moves
        self.rng = np.random.default_rng([seed, index])
        self.bits = generator(int(self.rng.integers(2**62)))
        self.elites: list[Start] = []
        self.n_moves = 0
        self.n_chains = 0
        slower = 2 if self.is_charged else 1
        self.slice_moves = max(SHORTEST_SLICE, SLICE_MOVES // problem.n_devices) // slower

    def run(self, starts: list[Start], wanted: Callable[[], bool] = lambda: True):
        """Anneal chain after chain until the budget is spent, while wanted() says so; `starts` are known beforehand."""
        self.elites = sorted(starts, key=lambda start: start[0])[:N_ELITES]
        self.n_chains = 0
        while wanted() and not self._finished:
            chain = self._new_chain(*self._next_settings())
            while chain.done_frac < 1.0 and wanted() and not self._finished:
                if chain.softened:
                    self._anneal_softened(chain)
                else:
                    cooling = chain.cooling(self.slice_moves)
                    walk = walk_from(chain.place, self.problem.n_devices, self.charges)
                    best_s, _ = anneal(self.devices, walk, self.charges, self.bits, cooling, chain.settings.shares)
                    if best_s < chain.best_s:
                        chain.best = walk.best
                        chain.best_s = best_s
                        self.incumbent.offer(walk.best, best_s, self.index, "seats" if self.is_charged else "")
                    self._count(cooling)
                chain.advance(self._spent_frac)
            self._add_elite(chain.best, chain.best_s)
            self.n_chains += 1

    def _next_settings(self) -> tuple[ChainSettings, float]:
        """The settings of the next chain, and the part of the budget that it gets."""
        n_pipelines = self.problem.n_pipelines
        if self.is_charged:
            has_rules = not self.charges.rules.allows_all
            softened = self.n_chains == 0 and self.index % 2 == 1 and not has_rules
            return seat_settings(self.index + self.n_chains, n_pipelines, softened), SEAT_CHAIN
        return draw_settings(self.rng, n_pipelines), min(FIRST_CHAIN * CHAIN_GROWTH**self.n_chains, LONGEST_CHAIN)

    def run_softened(self, wanted: Callable[[], bool]):
        """Anneal the softened cost alone, chain after chain from random placements, while wanted() says so."""
        while wanted() and not self._finished:
            settings = replace(draw_settings(self.rng, self.problem.n_pipelines), from_elite=False, softened_frac=1.0)
            chain = self._new_chain(settings, FIRST_CHAIN)
            while chain.softened and wanted() and not self._finished:
                self._anneal_softened(chain)
                chain.advance(self._spent_frac)
            self.incumbent.offer(chain.place, placement_s(self.problem, chain.place), self.index)

    def _anneal_softened(self, chain: RunningChain):
        """The next slice of a chain that is softened."""
        cooling, softness = chain.softened_cooling(SOFTENED_MOVES * self.slice_moves)
        walk = soft_walk_from(chain.place)
        anneal_softened(self.devices, walk, self.bits, cooling, softness, chain.settings.shares.runs)
        self._count(cooling)

    def _count(self, cooling: Cooling):
        self.n_moves += cooling.n_moves
        self.incumbent.count(cooling.n_moves)

    @property
    def _finished(self) -> bool:
        return self.incumbent.done or self._spent_frac >= 1.0

    @property
    def _spent_frac(self) -> float:
        """Part of the thread's budget that is spent."""
        if self.max_moves is not None:
            return self.n_moves / self.max_moves
        return self.incumbent.elapsed_s / self.incumbent.time_limit_s

    def _new_chain(self, settings: ChainSettings, budget_frac: float) -> RunningChain:
        start_frac = self._spent_frac
        best_s = self.elites[0][0] if self.elites else np.inf
        if self.is_charged:  # its start has no cost yet
            best_s = min(best_s, self.incumbent.best_s)
        scale_s = cost_scale_s(self.problem, best_s)
        place = self._start(settings)
        return RunningChain(
            settings=settings,
            scale_s=scale_s,
            place=place,
            best=place.copy(),
            start_frac=start_frac,
            budget_frac=min(budget_frac, max(1e-6, 1.0 - start_frac)),
            step_frac=self.slice_moves * 1e-6,
        )

    def _start(self, settings: ChainSettings) -> np.ndarray:
        if self.is_charged:
            found = self.incumbent.best if self.max_moves is None and self.n_chains else None  # of any thread
            return (self.elites[0][1] if found is None else found).copy()
        if settings.from_elite and self.elites:
            return self.elites[int(self.rng.integers(len(self.elites)))][1].copy()
        shape = (self.problem.n_stages, self.problem.n_pipelines)
        return self.rng.permutation(self.problem.n_devices).reshape(shape)

    def _add_elite(self, groups: np.ndarray, cost_s: float):
        """Keep the end of a chain as a start of later ones, unless an elite has its cost: plans of equal cost are
        mostly the same plan with devices of one type exchanged."""
        if np.isfinite(cost_s):
            self.incumbent.add_local_optimum(groups, cost_s, self.index)
        if all(abs(cost_s - elite_s) > 1e-9 for elite_s, _ in self.elites):
            self.elites = sorted([*self.elites, (cost_s, groups)], key=lambda elite: elite[0])[:N_ELITES]


def n_cores() -> int:
    """How many threads of a search run at once."""
    return max(1, int(usable_cores()))


def chain_sequences(
    problem: Problem, incumbent: Incumbent, seed: int, charges: Charges = NOTHING
) -> list[ChainSequence]:
    """One sequence for each core; under an evaluation limit a fixed number, which share the evaluations."""
    limit = incumbent.budget.evaluations
    n_reproducible = N_THREADS_REPRODUCIBLE if charges is NOTHING else N_THREADS_REPRODUCIBLE // 2
    n_threads = n_cores() if limit is None else n_reproducible
    max_moves = None if limit is None else max(1, limit // n_threads)
    return [ChainSequence(problem, incumbent, seed, index, max_moves, charges) for index in range(n_threads)]


def anneal_charged(problem: Problem, incumbent: Incumbent, charges: Charges, seed: int, start: np.ndarray):
    """Anneal from an allowed placement [S, P] on all cores until the incumbent is done, and offer what is found, at its
    cost with what is charged. Devices that are not in `start` are spare."""
    start = np.ascontiguousarray(start, np.int64)
    chains = chain_sequences(problem, incumbent, seed, charges)
    runs: list[Callable[[], None]] = [functools.partial(chain.run, [(np.inf, start)]) for chain in chains]
    with in_threads(runs[1:]):
        runs[0]()


def settle(problem: Problem, charges: Charges, place: np.ndarray, seed: int) -> np.ndarray:
    """An allowed placement that costs no more than `place` [S, P], with fewer and shorter moves: annealing at
    temperatures at which moves count and costs do not rise."""
    scale_s = cost_scale_s(problem, placement_s(problem, place))
    cooling = Cooling(scale_s * SETTLE_HOT, scale_s * SETTLE_COLD, SETTLE_MOVES)
    walk = walk_from(np.array(place, np.int64, order="C"), problem.n_devices, charges)
    shares = MoveShares(reorder=0.02, runs=0.1)
    best_s, _ = anneal(devices_of(problem, apart=True), walk, charges, generator(seed), cooling, shares)
    return walk.best if np.isfinite(best_s) else place


def anneal_while_compiling(chain: ChainSequence):
    """Let a thread compile `anneal` while `chain` anneals the softened cost, which compiles in a quarter of the time.
    Once both are in the cache on disk, this returns at once."""
    compiling = Background(compile_anneal, chain.incumbent)
    chain.run_softened(lambda: compiling.is_running)


@contextlib.contextmanager
def in_threads(calls: list[Callable[[], None]]):
    """Run each call in a thread of its own beside the body; both have ended when the context ends. An error of a call
    is raised here."""
    if not calls:
        yield
        return
    with ThreadPoolExecutor(len(calls)) as pool:
        tasks = [pool.submit(call) for call in calls]
        yield
        for task in tasks:
            task.result()
