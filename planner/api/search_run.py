"""One search of the API, whatever it minimises: its incumbent, ended by a Stop and watched by a callback, and the
result that is made of its plan."""

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxdt.build import planned_memory
from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from planner.api.job import COMM_COST, Job, Start
from planner.api.start import with_moves
from planner.cost.reference import cost_of
from planner.model.constraints import Constraints
from planner.model.stop import Stop
from planner.report.plan_file import sizes_of
from planner.report.result import OnProgress, Progress, Result, ScoredStep, Statistics
from planner.search.incumbent import Budget, Incumbent
from planner.search.seats import Seats
from planner.step_time.workload import on_accelerators

PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, eq=False)
class Search:
    """What is searched, until when, by which solver, from which seed (planner.api.solve)."""

    network: Network
    job: Job
    stop: Stop
    seed: int
    solver: str
    on_progress: OnProgress | None
    constraints: Constraints
    start: Start | None

    @contextlib.contextmanager
    def running(self, missing_s: float = math.inf) -> Iterator[Incumbent]:
        """A new incumbent, which the stop ends. While the context lasts, on_progress is called every
        PROGRESS_INTERVAL_S from a thread of its own; an error that it raises ends the search and is raised here."""
        incumbent = Incumbent(Budget(self.stop.time_s, self.stop.evaluations), missing_s=missing_s)
        on_progress, objective = self.on_progress, self.job.objective
        with self.stop.on_interrupt(incumbent.stop):
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

    def facts(self, incumbent: Incumbent) -> dict[str, Any]:
        """The facts about the search that a plan records."""
        constraints = {} if self.constraints.empty else {"constraints": serialize.write(self.constraints)}
        return {
            "objective": self.job.objective,
            "solver": self.solver,
            "seed": self.seed,
            **constraints,
            "evaluations": incumbent.evaluations,
            "time_s": round(incumbent.elapsed_s, 3),
        }

    def refuse_missing_links(self, cost_s: float, shape: tuple[int, int], none_exists: bool = False) -> None:
        """Raise BadInput where the plan found uses a link that does not exist, so that its cost is infinite;
        none_exists if it is proved that every plan of this shape (stages, pipelines) does."""
        if not math.isfinite(cost_s):
            found = "there is no plan (proved)" if none_exists else "found no plan"
            raise BadInput(
                f"{self.network.name or 'network'}: bandwidth_gbps: {found} of {shape[0]} stages x {shape[1]} "
                "pipelines that avoids the links of zero bandwidth"
            )

    def result(
        self,
        incumbent: Incumbent,
        plan: Plan,
        finalists: tuple[ScoredStep, ...] = (),
        seats: Seats | None = None,
        near_s: float = math.inf,
    ) -> Result:
        """The result of a plan (planner.report.plan_file.solved). By step time it is the first of the finalists. Where
        a plan runs, that one with its gaps filled scores near_s."""
        best = finalists[0] if finalists else None
        cost = best.cost if best else cost_of(self.network, plan.placement, *sizes_of(plan))
        result = Result(
            plan=replace(plan, found=plan.found | self._memory_of(plan)),
            network=self.network,
            objective=self.job.objective,
            score_s=best.step_s if best else cost.total_s,
            cost=cost,
            step_s=best and best.step_s,
            bound_s=plan.found["bound_s"],
            gap=plan.found["gap"],
            proved=plan.found["proved"],
            statistics=Statistics(
                incumbent.evaluations, incumbent.elapsed_s, self.solver, self.seed, self.stop.interrupted
            ),
            history=tuple(incumbent.history),
            by_solver={name: tuple(history) for name, history in incumbent.by_solver.items()},
            finalists=finalists,
            price=best and best.price,
        )
        return with_moves(result, seats.before, seats.near, near_s) if seats and seats.before else result

    def _memory_of(self, plan: Plan) -> dict[str, Any]:
        """The fact of the memory of each stage, where the job knows the run."""
        run = self.job.work
        if not isinstance(run, RunConfig):
            return {}
        if self.job.unequal:
            run = replace(run, wiring=replace(run.wiring, kind="swarm"))
        memory = planned_memory(run, plan, on_accelerator=on_accelerators(self.network, self.job.profile, run))
        return {"stage_memory_bytes": [asdict(stage) for stage in memory]}


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
