"""A router's side of a step: which of its tasks wait, and which are on their way."""

from dataclasses import dataclass
from itertools import groupby, islice

from jaxdt.protocol import events as ev
from jaxdt.run.work import WorkKind
from jaxdt.wiring.route_policy import Route, RoutePolicy
from jaxdt.wiring.tasks import Task, task_kind


@dataclass
class _UnderWay:
    """A task, its route, and when its last Work was done."""

    task: Task
    route: Route
    since_s: float


class Dispatcher:
    """Begins tasks as `routes` says, as many at a time as its in-flight limit allows."""

    def __init__(self, routes: RoutePolicy):
        self._routes = routes
        self._waiting: list[Task] = []
        self._under_way: dict[tuple[str, int], _UnderWay] = {}

    def begin(self, tasks: list[Task]) -> None:
        """All tasks that this router has to get done now."""
        in_order = sorted(tasks, key=lambda task: self._routes.priority(task.kind, task.microbatch))
        self._waiting = list(reversed(in_order))
        self._under_way = {}

    def next(self, now_s: float) -> list[tuple[Task, Route]]:
        """Tasks that begin now, with their routes."""
        begun: list[tuple[Task, Route]] = []
        while tasks := self._next_alike():
            first = tasks[0]
            routes = self._routes.routes(first.kind, [task.microbatch for task in tasks], first.lo, first.hi)
            if not routes:
                break
            for task, route in zip(tasks, routes, strict=False):
                self._waiting.pop()
                self._under_way[task.kind, task.microbatch] = _UnderWay(task, route, now_s)
                begun.append((task, route))
        return begun

    def _next_alike(self) -> list[Task]:
        """The next tasks of one kind and through the same stages, as many as may begin."""
        room = max(0, self._routes.in_flight_limit - len(self._under_way))
        alike = groupby(islice(reversed(self._waiting), room), key=lambda task: (task.kind, task.lo, task.hi))
        first = next(alike, None)
        return list(first[1]) if first else []

    def reroute(self, now_s: float, microbatch: int, stage: int, peer: int) -> tuple[Task, int] | None:
        """A forward is stuck at this peer: its task, and another peer of the stage. None if there is no other, or if
        somebody else has got it already."""
        under_way = self._under_way.get((WorkKind.FORWARD, microbatch))
        if under_way is None or under_way.route[stage] != peer or stage >= under_way.task.hi:
            return None
        other = self._routes.reroute(stage, peer)
        if other is None:
            return None
        route = under_way.route
        under_way.route = (*route[:stage], other, *route[stage + 1 :])
        under_way.since_s = now_s
        return under_way.task, other

    def progress(self, now_s: float, peer: int, done: ev.Progress) -> None:
        """A Work of one of the tasks is done. It measures the peer, and the last Work of a task makes room for another.

        A Work's time starts with its input, or with the end of the peer's last Work if that was later. So a queue at
        the peer, of this router's Work or of others', is not counted once for each Work in it."""
        kind, stage = done.kind, done.stage
        name = (task_kind(kind), done.microbatch)
        under_way = self._under_way.get(name)
        if under_way is None or not under_way.task.lo <= stage <= under_way.task.hi:
            return
        is_backward = kind in (WorkKind.BACKWARD, WorkKind.REGENERATE)
        if kind != WorkKind.EVALUATE:
            is_rerouted = peer != under_way.route[stage]  # then its input came longer ago
            seconds = done.gap_s if is_rerouted else max(0.0, min(now_s - under_way.since_s, done.gap_s))
            self._routes.measured(stage, peer, WorkKind.BACKWARD if is_backward else WorkKind.FORWARD, seconds)
        under_way.since_s = now_s
        is_last = (
            stage == under_way.task.lo if is_backward else kind == WorkKind.EVALUATE and stage == under_way.task.hi
        )
        if is_last:
            del self._under_way[name]
