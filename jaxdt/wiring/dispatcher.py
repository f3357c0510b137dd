"""A router's side of a step: which of its microbatches wait, which are on their way, and what is to be done again when
members were lost."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby, islice

from jaxdt.protocol.events import Progress
from jaxdt.spec.work import BACKWARD, EVALUATE, FORWARD, REGENERATE
from jaxdt.wiring.route_policy import RoutePolicy


@dataclass(frozen=True)
class Task:
    """A microbatch (kind FORWARD) or held-out microbatch (EVALUATE) through the stages lo..hi. Stages in `regenerate`
    counted it already and only make lost tensors again."""

    kind: str
    microbatch: int
    lo: int
    hi: int
    regenerate: tuple[int, ...] = ()


def redo(microbatch: int, missing: Collection[int], keepers: Mapping[int, int], n_stages: int) -> Task:
    """What gets a microbatch counted at the stages where it is missing. keepers[s] is the live member that counted it
    at stage s and keeps its output and input gradient. The range grows over neighbours that nobody holds any more,
    and between two gaps: what was counted there is made again, and not counted twice."""
    lo, hi = min(missing), max(missing)
    while lo > 0 and lo - 1 not in keepers:
        lo -= 1
    while hi < n_stages - 1 and hi + 1 not in keepers:
        hi += 1
    return Task(FORWARD, microbatch, lo, hi, tuple(s for s in range(lo, hi + 1) if s not in missing))


def whole_step(n_stages: int, n_microbatches: int, n_evals: int) -> list[Task]:
    """All of a step, held-out microbatches first."""
    evals = [Task(EVALUATE, m, 0, n_stages - 1) for m in range(n_evals)]
    return evals + [Task(FORWARD, m, 0, n_stages - 1) for m in range(n_microbatches)]


@dataclass
class OnItsWay:
    """A task, its route, and when its last Work was done."""

    task: Task
    route: tuple[int, ...]
    since_s: float


class Dispatcher:
    """Tasks that begin as `routes` says, as many at a time as its window allows."""

    def __init__(self, routes: RoutePolicy):
        self._routes = routes
        self._waiting: list[Task] = []
        self._open: dict[tuple[str, int], OnItsWay] = {}

    def begin(self, tasks: list[Task]) -> None:
        """All that this router has to steer now."""
        in_turn = sorted(tasks, key=lambda task: self._routes.turn(task.kind, task.microbatch))
        self._waiting, self._open = list(reversed(in_turn)), {}

    def next(self, now_s: float) -> list[tuple[Task, tuple[int, ...]]]:
        """Tasks that begin now, with their routes: as many as the window allows."""
        begun = []
        while tasks := self._next_alike():
            first = tasks[0]
            routes = self._routes.routes(first.kind, [task.microbatch for task in tasks], first.lo, first.hi)
            if not routes:
                break
            for task, route in zip(tasks, routes, strict=False):
                self._waiting.pop()
                self._open[task.kind, task.microbatch] = OnItsWay(task, route, now_s)
                begun.append((task, route))
        return begun

    def _next_alike(self) -> list[Task]:
        """The next tasks of one kind and through the same stages, as many as the window allows."""
        room = max(0, self._routes.window - len(self._open))
        alike = groupby(islice(reversed(self._waiting), room), key=lambda task: (task.kind, task.lo, task.hi))
        return next((list(tasks) for _, tasks in alike), [])

    def progress(self, now_s: float, done: Progress) -> None:
        """A Work of one of the tasks is done: it measures the peer, and the last one makes room for another. Its clock
        starts with its input, or with the peer's last completion if that was later: so a queue at the peer, of this
        router's Work or of others', is not counted once for each Work in it."""
        kind, stage = done.kind, done.stage
        name = (EVALUATE if kind == EVALUATE else FORWARD, done.microbatch)
        one = self._open.get(name)
        if one is None or not one.task.lo <= stage <= one.task.hi:
            return
        back = kind in (BACKWARD, REGENERATE)
        if kind != EVALUATE:
            measured = BACKWARD if back else FORWARD
            self._routes.measured(stage, one.route[stage], measured, max(0.0, min(now_s - one.since_s, done.gap_s)))
        one.since_s = now_s
        if (back and stage == one.task.lo) or (kind == EVALUATE and stage == one.task.hi):
            del self._open[name]
