"""One search of the API: its incumbent, ended by a Stop and watched by a callback."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdt.spec import serialize
from planner.api.result import OnProgress, Progress, Statistics, Stop
from planner.model.constraints import Constraints
from planner.search.incumbent import Budget, Incumbent

PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, eq=False)
class Search:
    """How a job is searched: until when, by which solver, from which seed."""

    stop: Stop
    solver: str
    seed: int

    def facts(self, objective: str, constraints: Constraints) -> dict[str, Any]:
        """What a plan says of its search."""
        facts: dict[str, Any] = {"objective": objective, "solver": self.solver, "seed": self.seed}
        if not constraints.empty:
            facts["constraints"] = serialize.write(constraints)
        return facts


@contextlib.contextmanager
def running(stop: Stop, on_progress: OnProgress | None, missing_s: float = np.inf) -> Iterator[Incumbent]:
    """A new incumbent, which the stop ends. While the context lasts, on_progress is called every PROGRESS_INTERVAL_S
    from a thread of its own; an error that it raises ends the search and is raised here."""
    incumbent = Incumbent(Budget(stop.time_s, stop.evaluations), missing_s=missing_s)
    with stop.on_interrupt(incumbent.stop):
        if on_progress is None:
            yield incumbent
            return
        ended = threading.Event()
        errors: list[BaseException] = []

        def watch():
            try:
                while not ended.wait(PROGRESS_INTERVAL_S):
                    on_progress(progress_of(incumbent))
            except Exception as error:
                errors.append(error)
                incumbent.stop()

        thread = threading.Thread(target=watch, daemon=True, name="planner-progress")
        thread.start()
        try:
            yield incumbent
        finally:
            ended.set()
            thread.join()
        if errors:
            raise errors[0]


def progress_of(incumbent: Incumbent) -> Progress:
    """How far a search is; of a search in several phases, its inner one."""
    shown = incumbent.inner or incumbent
    has_plan = shown.best_s < shown.missing_s
    bound_s = shown.bound_s if shown.bound_s < shown.missing_s else 0.0
    return Progress(
        elapsed_s=incumbent.elapsed_s,
        best_s=shown.best_s if has_plan else None,
        bound_s=bound_s,
        gap=max(0.0, shown.best_s - bound_s) / bound_s if has_plan and bound_s > 0 else None,
        evaluations=shown.evaluations,
        evaluations_per_s=shown.evaluations / max(shown.elapsed_s, 1e-3),
        unit=shown.unit,
    )


def statistics_of(incumbent: Incumbent, stop: Stop, solver: str, seed: int) -> Statistics:
    """What a search took until now."""
    return Statistics(incumbent.evaluations, incumbent.elapsed_s, solver, seed, stop.interrupted)
