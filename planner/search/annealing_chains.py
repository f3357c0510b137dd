"""Annealing islands: independent chains of growing length, from random, softened and elite starts.

An island's budget is seconds or moves. A chain is cut into slices of some ten milliseconds, between which the island
looks at its budget; temperatures follow the part of the chain's budget that is spent.
"""

from dataclasses import dataclass

import numpy as np

from planner.cost.compiled import generator
from planner.model.problem import MISSING_S, Problem
from planner.search.anneal import anneal
from planner.search.incumbent import Board
from planner.search.smooth import smooth

SLICE_MOVES, SHORTEST_SLICE = 1_300_000, 5000
N_ELITES = 4
FIRST_CHAIN, CHAIN_GROWTH, LONGEST_CHAIN = 0.02, 1.4, 0.2


@dataclass(frozen=True)
class Recipe:
    """One chain: temperatures as parts of the best cost, `soft_frac` of the budget on the softened cost, which starts
    at `softness`."""

    hot: float
    cold: float
    run_share: float
    reorder_share: float
    soft_frac: float
    softness: float
    from_elite: bool


def draw_recipe(rng: np.random.Generator, n_pipelines: int) -> Recipe:
    """Ranges that did well on 24 to 256 devices; no single setting is best on all networks."""
    kind = rng.choice(["random", "soft", "elite"], p=[0.3, 0.35, 0.35])
    hottest = {"random": 0.03, "soft": 0.012, "elite": 0.01}[kind]
    return Recipe(
        hot=hottest * float(rng.uniform(0.3, 1.0)),
        cold=float(np.exp(rng.uniform(np.log(2e-4), np.log(1e-3)))),
        run_share=float(rng.choice([0.2, 0.5])),
        reorder_share=0.3 if n_pipelines <= 2 else 0.01,
        soft_frac=0.4 if kind == "soft" else 0.0,
        softness=float(rng.choice([0.3, 1.0])),
        from_elite=bool(kind == "elite"),
    )


def cost_scale(problem: Problem, best_s: float) -> float:
    """What temperatures are parts of: the best cost, or a typical one while the best plan still uses a missing link."""
    if 0 < best_s < MISSING_S:
        return best_s
    dp_s, pp_s = (m[(m > 0) & (m < MISSING_S)] for m in (problem.dp_s, problem.pp_s))
    typical_s = [float(np.median(m)) if m.size else 0.0 for m in (dp_s, pp_s)]
    return max(1e-9, problem.n_pipelines * typical_s[0] + problem.n_stages * typical_s[1])


class Island:
    """One thread's search. `moves` is its whole budget of evaluations, or None when the board's clock counts."""

    def __init__(self, problem: Problem, kind_of: np.ndarray, board: Board, seed: int, index: int, moves: int | None):
        self.problem, self.kind_of, self.board, self.index = problem, kind_of, board, index
        self.moves = moves
        self.rng = np.random.default_rng([seed, index])
        self.bits = generator(int(self.rng.integers(2**62)))
        self.elites: list[tuple[float, np.ndarray]] = []
        self.spent_moves = 0
        self.slice_moves = max(SHORTEST_SLICE, SLICE_MOVES // problem.n_devices)

    def run(self, starts: list[tuple[float, np.ndarray]]):
        """Search until the budget is spent; `starts` are (cost, groups) known beforehand."""
        self.elites = sorted(starts, key=lambda start: start[0])[:N_ELITES]
        chain = FIRST_CHAIN
        while not self._finished():
            self._chain(draw_recipe(self.rng, self.problem.n_pipelines), chain)
            chain = min(chain * CHAIN_GROWTH, LONGEST_CHAIN)

    def _finished(self) -> bool:
        return self.board.done or self._clock() >= 1.0

    def _clock(self) -> float:
        """Part of the whole budget that is spent."""
        if self.moves is not None:
            return self.spent_moves / self.moves
        return self.board.elapsed_s / self.board.limits.time_s

    def _chain(self, recipe: Recipe, share: float):
        problem = self.problem
        start = self._clock()
        length = min(share, max(1e-6, 1.0 - start))
        scale_s = cost_scale(problem, self.elites[0][0] if self.elites else np.inf)
        place = self._start(recipe)
        best, best_s = place.copy(), np.inf
        done = 0.0
        step = self.slice_moves * 1e-6
        while done < 1.0 and not self._finished():
            ahead = min(1.0, done + max(step, 1e-4))
            if done < recipe.soft_frac:
                self._soften(place, recipe, done / recipe.soft_frac, min(1.0, ahead / recipe.soft_frac), scale_s)
            else:
                part = [(x - recipe.soft_frac) / (1 - recipe.soft_frac) for x in (done, ahead)]
                slice_best = place.copy()
                cost_s = self._anneal(place, slice_best, recipe, part, scale_s)
                if cost_s < best_s:
                    best, best_s = slice_best, cost_s
                    self.board.offer(best, best_s, self.index)
            before, done = done, (self._clock() - start) / length
            step = done - before
        self._keep(best, best_s)

    def _start(self, recipe: Recipe) -> np.ndarray:
        if recipe.from_elite and self.elites:
            return self.elites[int(self.rng.integers(len(self.elites)))][1].copy()
        shape = (self.problem.n_stages, self.problem.n_pipelines)
        return self.rng.permutation(self.problem.n_devices).reshape(shape)

    def _soften(self, place: np.ndarray, recipe: Recipe, part: float, ahead: float, scale_s: float):
        hot, cold = 0.4 * recipe.hot, 0.04 * recipe.hot
        temperature = [scale_s * hot * (cold / hot) ** x for x in (part, ahead)]
        softness = [recipe.softness * (1 - x) for x in (part, ahead)]
        n = 4 * self.slice_moves
        smooth(
            self.problem.dp_s,
            self.problem.pp_s,
            place,
            self.kind_of,
            self.bits,
            *temperature,
            *softness,
            n,
            recipe.run_share,
        )
        self._count(n)

    def _anneal(self, place: np.ndarray, best: np.ndarray, recipe: Recipe, part: list[float], scale_s: float) -> float:
        hot, cold = recipe.hot, min(recipe.cold, recipe.hot / 2)
        temperature = [scale_s * hot * (cold / hot) ** x for x in part]
        shares = recipe.reorder_share, recipe.run_share
        cost_s, _ = anneal(
            self.problem.dp_s,
            self.problem.pp_s,
            place,
            best,
            self.kind_of,
            self.bits,
            *temperature,
            self.slice_moves,
            *shares,
        )
        self._count(self.slice_moves)
        return cost_s

    def _count(self, moves: int):
        self.spent_moves += moves
        self.board.count(moves)

    def _keep(self, groups: np.ndarray, cost_s: float):
        """Elites have different costs: equal ones are mostly the same plan with devices of one type exchanged."""
        if np.isfinite(cost_s):
            self.board.remember(groups, cost_s)
        if all(abs(cost_s - kept_s) > 1e-9 for kept_s, _ in self.elites):
            self.elites = sorted([*self.elites, (cost_s, groups)], key=lambda elite: elite[0])[:N_ELITES]
