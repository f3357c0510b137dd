"""One search of the API: its incumbent, ended by a Stop and watched by a callback."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from jaxdt.build import planned_memory
from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from planner.api.job import COMM_COST, Job
from planner.api.result import OnProgress, Progress, Result, Statistics, Stop
from planner.model.constraints import Constraints
from planner.search.incumbent import Budget, Incumbent
from planner.step_time.workload import on_accelerators

PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, eq=False)
class Search:
    """How a job is searched: until when, by which solver, from which seed."""

    stop: Stop
    solver: str
    seed: int

    def facts(self, objective: str, constraints: Constraints) -> dict[str, Any]:
        """The facts about its search that a plan records."""
        facts: dict[str, Any] = {"objective": objective, "solver": self.solver, "seed": self.seed}
        if not constraints.empty:
            facts["constraints"] = serialize.write(constraints)
        return facts


@contextlib.contextmanager
def running(
    stop: Stop, on_progress: OnProgress | None, objective: str = COMM_COST, missing_s: float = np.inf
) -> Iterator[Incumbent]:
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
                    on_progress(progress_of(incumbent, objective))
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


def progress_of(incumbent: Incumbent, objective: str) -> Progress:
    """The progress of a search, and of the search inside it (which always minimises the cost of Eq. 1-4)."""
    has_plan = incumbent.best_s < incumbent.missing_s
    shape = incumbent.best.shape if has_plan and incumbent.best is not None else ()
    bound_s = incumbent.bound_s if incumbent.bound_s < incumbent.missing_s else 0.0
    inner = incumbent.inner
    return Progress(
        objective=objective,
        elapsed_s=incumbent.elapsed_s,
        best_s=incumbent.best_s if has_plan else None,
        shape=(shape[0], shape[1]) if len(shape) == 2 else None,
        bound_s=bound_s,
        gap=max(0.0, incumbent.best_s - bound_s) / bound_s if has_plan and bound_s > 0 else None,
        evaluations=incumbent.evaluations,
        evaluations_per_s=incumbent.evaluations / max(incumbent.elapsed_s, 1e-3),
        starts=progress_of(inner, COMM_COST) if inner else None,
    )


def statistics_of(incumbent: Incumbent, stop: Stop, solver: str, seed: int) -> Statistics:
    """The effort of a search until now."""
    return Statistics(incumbent.evaluations, incumbent.elapsed_s, solver, seed, stop.interrupted)


def with_memory(result: Result, job: Job) -> Result:
    """The result with the memory of each stage in its plan, where the job knows the run."""
    run = job.work
    if not isinstance(run, RunConfig):
        return result
    if job.unequal:
        run = replace(run, wiring=replace(run.wiring, kind="swarm"))
    memory = planned_memory(run, result.plan, on_accelerator=on_accelerators(result.network, job.profile, run))
    found = result.plan.found | {"stage_memory_bytes": [asdict(stage) for stage in memory]}
    return replace(result, plan=replace(result.plan, found=found))
