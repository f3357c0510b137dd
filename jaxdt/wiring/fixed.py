"""Fixed wiring: the plan's pipelines, each peer following its printed order strictly.

A step's order is the schedule's (GPipe or 1F1B), preceded in some steps by the held-out microbatches. The next Work
runs as soon as its input is here; nothing is ever done out of turn. A boundary tensor goes to the neighbour in the
same pipeline.
"""

from jaxdt.core.events import (
    BACKWARD,
    EVALUATE,
    FORWARD,
    Accumulated,
    Action,
    Boundary,
    Drained,
    Evaluated,
    Event,
    Key,
    Ran,
    Received,
    Run,
    Send,
    Updated,
    ViewChanged,
    Work,
)
from jaxdt.core.plan import Plan
from jaxdt.core.schedule import stage_order


class FixedWiring:
    """One peer's side. `boundary_bytes`: payload of an activation that it sends, and of a gradient; `evals`: measure
    the held-out loss every so many steps, on so many microbatches."""

    READS = frozenset({ViewChanged, Updated, Boundary, Ran})

    def __init__(self, plan: Plan, peer: int, n_steps: int, boundary_bytes: tuple[int, int], evals: tuple[int, int]):
        self._plan, self._peer, self._n_steps = plan, peer, n_steps
        self._stage, self._pipeline = plan.seat(peer)
        self._first, self._last = self._stage == 0, self._stage == plan.n_stages - 1
        self._activation_bytes, self._gradient_bytes = boundary_bytes
        self._eval_every_steps, self._n_evals = evals
        self._order = stage_order(plan, self._stage, self._pipeline)
        self._work: list[Work] = []
        self._arrived: set[Key] = set()
        self._step = -1
        self.running = False

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:
            case ViewChanged():
                self._arrived.clear()
                self._work.clear()
            case Updated(_, version):
                return self._begin(version)
            case Received(_, Boundary(key)):
                self._arrived.add(key)
                return self._next()
            case Ran(work, _, _, values) if work.kind in (FORWARD, BACKWARD, EVALUATE):
                self.running = False
                self._work.pop(0)
                return self._finished(work, values) + self._next()
        return []

    def _begin(self, step: int) -> list[Action]:
        if step >= self._n_steps:
            return []
        self._step = step
        self._work = [*self._evaluations(step), *self._order]
        return self._next()

    def _evaluations(self, step: int) -> list[Work]:
        """Held-out microbatches are dealt over the pipelines; measured every n steps and in the last one."""
        every = self._eval_every_steps
        if not every or (step % every and step != self._n_steps - 1):
            return []
        return [Work(self._stage, EVALUATE, m) for m in range(self._pipeline, self._n_evals, self._plan.n_pipelines)]

    def _next(self) -> list[Action]:
        if self.running or not self._work:
            return []
        work = self._work[0]
        key = self._need(work)
        if key is not None:
            if key not in self._arrived:
                return []
            self._arrived.remove(key)
        self.running = True
        return [Run(Work(work.stage, work.kind, work.microbatch, self._peer, self._step))]

    def _need(self, work: Work) -> Key | None:
        """The tensor that must have come over a link before this Work may run."""
        stage, m = work.stage, work.microbatch
        if work.kind == BACKWARD:
            return None if self._last else Key("grad", self._step, stage + 1, m)
        return None if self._first else Key("act" if work.kind == FORWARD else "eval", self._step, stage, m)

    def _finished(self, work: Work, values: dict[str, float]) -> list[Action | Event]:
        step, stage, m = self._step, work.stage, work.microbatch
        n_samples, loss_sum = int(values.get("n_samples", 0)), values.get("loss_sum")
        if work.kind == BACKWARD:
            told: list[Action | Event] = [Accumulated(step, stage, m, n_samples, loss_sum)]
            if not self._first:
                told.append(self._send(Key("grad", step, stage, m), stage - 1))
            if not self._work:
                told.append(Drained(step))
            return told
        if self._last:
            return [Evaluated(step, n_samples, loss_sum)] if work.kind == EVALUATE else []
        kind = "act" if work.kind == FORWARD else "eval"
        return [self._send(Key(kind, step, stage + 1, m), stage + 1)]

    def _send(self, key: Key, stage: int) -> Send:
        n_bytes = self._activation_bytes if stage > self._stage else self._gradient_bytes
        return Send(self._plan.placement[stage][self._pipeline], Boundary(key), n_bytes)
