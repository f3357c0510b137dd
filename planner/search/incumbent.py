"""The incumbent, which solvers share while they run: the best plan and bound so far, the counters, and when to stop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from planner.model.proof import is_optimal
from planner.model.stop import Interrupt

N_LOCAL_OPTIMA = 6
DISTINCT_FRAC = 1e-4  # local optima whose costs differ by less count as one


@dataclass(frozen=True)
class Budget:
    """Stop after time_s seconds (None: never) or after `evaluations` plans scored (None: any). With an evaluation
    limit, the work is cut into parts that do not depend on the clock or the number of cores."""

    time_s: float | None = 30.0
    evaluations: int | None = None


@dataclass(eq=False)
class Incumbent:
    """The best plan so far, as groups [S, P] in stage order, and the state of the search for better ones. Thread-safe.

    If costs are equal the plan from the lowest source wins, so that the result does not depend on which thread came
    first. Costs are seconds, or prices where those are minimised. `inner` is the incumbent of a search inside this one,
    while that search runs.
    Plans of cost missing_s or more use a missing link; a bound of missing_s says that all do. `history` and by_solver
    hold (seconds, cost) of every improvement, of all solvers together and of each by its name."""

    budget: Budget
    missing_s: float = np.inf
    started_s: float = field(default_factory=time.monotonic)
    best: np.ndarray | None = None
    best_s: float = np.inf
    bound_s: float = 0.0
    evaluations: int = 0
    history: list[tuple[float, float]] = field(default_factory=list)
    by_solver: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    inner: Incumbent | None = None
    _source: int = 0
    _local_optima: list[tuple[float, int, np.ndarray]] = field(default_factory=list)
    _interrupt: Interrupt = field(default_factory=Interrupt)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def time_limit_s(self) -> float:
        """Seconds from the start after which the search stops; infinite without a time limit."""
        return np.inf if self.budget.time_s is None else self.budget.time_s

    @property
    def left_s(self) -> float:
        """Seconds left; infinite without a time limit."""
        return self.time_limit_s - self.elapsed_s

    @property
    def spent_frac(self) -> float:
        """Part of the budget that is spent: of the evaluations if they are limited, else of the time."""
        limit = self.budget.evaluations
        if limit is not None:
            return min(1.0, self.evaluations / max(1, limit))
        return min(1.0, self.elapsed_s / self.time_limit_s) if self.time_limit_s > 0 else 1.0

    @property
    def proved(self) -> bool:
        """The best plan is optimal, or there is no plan without missing links."""
        return is_optimal(self.best_s, self.bound_s) or self.bound_s >= self.missing_s

    @property
    def starts(self) -> list[tuple[float, np.ndarray]]:
        """The best (cost, groups), if there is one, as a list from which a search may start."""
        return [] if self.best is None else [(self.best_s, self.best)]

    def stop(self):
        """Ask all solvers to end. Code that cannot look at `done` is called back (`on_stop`)."""
        self._interrupt.set()

    def on_stop(self, callback: Callable[[], None]) -> AbstractContextManager[None]:
        """A context inside which `stop` calls callback(), at once if it came before."""
        return self._interrupt.calling(callback)

    @contextlib.contextmanager
    def searching_inside(self, budget: Budget) -> Iterator[Incumbent]:
        """The incumbent of a search inside this one, with a part of its budget; it ends when this one does."""
        inner = Incumbent(budget)
        with self.on_stop(inner.stop):
            if self.interrupted:
                inner.stop()
            yield inner

    @property
    def interrupted(self) -> bool:
        """Time is up, or somebody asked to stop."""
        return self._interrupt.is_set or self.left_s <= 0

    @property
    def done(self) -> bool:
        """Interrupted, or the best plan is proved. Under an evaluation limit a proof does not stop other searches,
        because the moment at which it comes depends on the clock."""
        return self.interrupted or (self.budget.evaluations is None and self.proved)

    @property
    def spent(self) -> bool:
        """Done, or the evaluations are used up."""
        return self.done or (self.budget.evaluations is not None and self.evaluations >= self.budget.evaluations)

    def offer(self, groups: np.ndarray, cost_s: float, source: int = 0, by: str = ""):
        """Report a plan of the given cost, found by the solver of this name."""
        with self._lock:
            own = self.by_solver.setdefault(by, [])
            if not own or cost_s < own[-1][1]:
                own.append((self.elapsed_s, cost_s))
            if (cost_s, source) < (self.best_s, self._source if self.best is not None else source + 1):
                if cost_s < self.best_s:
                    self.history.append((self.elapsed_s, cost_s))
                self.best = np.array(groups)
                self.best_s = cost_s
                self._source = source

    def add_local_optimum(self, groups: np.ndarray, cost_s: float, source: int):
        """Report where a search ended."""
        with self._lock:
            self._local_optima.append((cost_s, source, np.array(groups)))

    def local_optima(self) -> list[tuple[float, np.ndarray]]:
        """The best few ends of searches that differ in cost, best first."""
        distinct: list[tuple[float, np.ndarray]] = []
        for cost_s, _, groups in sorted(self._local_optima, key=lambda optimum: optimum[:2]):
            if all(abs(cost_s - other_s) > DISTINCT_FRAC * other_s for other_s, _ in distinct):
                distinct.append((cost_s, groups))
        return distinct[:N_LOCAL_OPTIMA]

    def count(self, evaluations: int):
        with self._lock:
            self.evaluations += evaluations

    def raise_bound(self, bound_s: float):
        """Report that no plan costs less. A bound above the best plan's cost is kept: `solve` refuses it."""
        with self._lock:
            self.bound_s = max(self.bound_s, bound_s)


@dataclass(eq=False)
class Share:
    """The part of an incumbent's budget that one search may spend: its clock until until_s, and so many `evaluations`
    (None: any). `source` numbers the search among those that run beside each other (Incumbent.offer)."""

    incumbent: Incumbent
    until_s: float = np.inf
    evaluations: int | None = None
    source: int = 0
    n_counted: int = 0

    @property
    def left(self) -> float:
        """Evaluations left; infinite without a limit."""
        return np.inf if self.evaluations is None else self.evaluations - self.n_counted

    @property
    def spent(self) -> bool:
        return self.incumbent.done or self.incumbent.elapsed_s >= self.until_s or self.left <= 0

    def count(self, evaluations: int):
        self.n_counted += evaluations
        self.incumbent.count(evaluations)
