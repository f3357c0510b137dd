"""What solvers share while they run: the best plan and bound so far, the counters, and when to stop."""

import contextlib
import threading
import time
from dataclasses import dataclass, field

import numpy as np

PROOF_GAP_S = 1e-3
N_REMEMBERED = 6


@dataclass(frozen=True)
class Limits:
    """Stop after time_s seconds (None: never) or after `evaluations` plans scored (None: any). With an evaluation
    limit, the work is cut into parts that do not depend on the clock or the number of cores."""

    time_s: float | None = 30.0
    evaluations: int | None = None


@dataclass(eq=False)
class Board:
    """Thread-safe. A plan is groups [S, P] in stage order. Of equal costs the one from the lowest source wins, so that
    the result does not depend on which thread came first. `others` are the ends of independent searches, best first.
    `part` is the board of a search inside this one, while it runs."""

    limits: Limits
    started_s: float = field(default_factory=time.monotonic)
    best: np.ndarray | None = None
    best_s: float = np.inf
    bound_s: float = 0.0
    evaluations: int = 0
    history: list[tuple[float, float]] = field(default_factory=list)
    others: list[tuple[float, np.ndarray]] = field(default_factory=list)
    part: "Board | None" = None
    _source: int = 0
    _stop: bool = False
    _calls: list = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def left_s(self) -> float:
        """Seconds left; infinite without a time limit."""
        return np.inf if self.limits.time_s is None else self.limits.time_s - self.elapsed_s

    @property
    def proved(self) -> bool:
        return self.best_s - self.bound_s <= PROOF_GAP_S

    def stop(self):
        """Ask all solvers to end; those that cannot look at `done` are called."""
        self._stop = True
        with self._lock:
            for call in self._calls:
                call()

    @contextlib.contextmanager
    def calling(self, call):
        """While inside, `stop` calls call()."""
        with self._lock:
            self._calls.append(call)
        try:
            yield
        finally:
            with self._lock:
                self._calls.remove(call)

    @property
    def interrupted(self) -> bool:
        return self._stop or self.left_s <= 0

    @property
    def done(self) -> bool:
        """Time is up, somebody asked to stop, or the best plan is proved. Under an evaluation limit a proof does not
        stop the others: when it comes depends on the clock."""
        return self.interrupted or (self.limits.evaluations is None and self.proved)

    def offer(self, groups: np.ndarray, cost_s: float, source: int = 0):
        """Report a plan of the given cost."""
        with self._lock:
            if (cost_s, source) < (self.best_s, self._source if self.best is not None else source + 1):
                if cost_s < self.best_s:
                    self.history.append((self.elapsed_s, cost_s))
                self.best, self.best_s, self._source = np.array(groups), cost_s, source

    def remember(self, groups: np.ndarray, cost_s: float):
        """Report where a search ended: a good plan unlike the others."""
        with self._lock:
            if all(abs(cost_s - kept_s) > PROOF_GAP_S for kept_s, _ in self.others):
                found = sorted([*self.others, (cost_s, np.array(groups))], key=lambda other: other[0])
                self.others = found[:N_REMEMBERED]

    def count(self, evaluations: int):
        with self._lock:
            self.evaluations += evaluations

    def raise_bound(self, bound_s: float):
        """Report that no plan costs less."""
        with self._lock:
            self.bound_s = max(self.bound_s, bound_s)
