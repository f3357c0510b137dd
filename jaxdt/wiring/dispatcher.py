"""A router's side of a step: which of its tasks wait, which are on their way, and along which peers they travel."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from jaxdt.protocol import events as ev
from jaxdt.run.work import WorkKind
from jaxdt.wiring.recovery import Task, task_kind

Route = tuple[int, ...]  # one peer per stage, NO_PEER where nothing has to be done


class RoutePolicy(ABC):
    """A microbatch or held-out microbatch is named by `kind` (FORWARD or EVALUATE) and number. All peers of a view know
    which router owns which microbatch; only that router chooses the route. `in_flight_limit`: how many tasks this
    peer's router has on their way at a time."""

    in_flight_limit: int

    @abstractmethod
    def adopt(self, view: ev.View, members: Sequence[int]) -> None:
        """The members of a view that compute in the step under way; no others are chosen any more."""

    @abstractmethod
    def begin_step(self, view: ev.View) -> None:
        """The step after that of the view: members that joined with the view compute too."""

    @abstractmethod
    def owning_router(self, kind: str, microbatch: int) -> int:
        """The peer that begins it."""

    def priority(self, kind: str, microbatch: int) -> tuple[int, ...]:
        """Lower ones begin first, equal ones as they come."""
        return ()

    def pipeline_of(self, kind: str, microbatch: int) -> int:
        """The pipeline whose codecs it travels with."""
        return 0

    @abstractmethod
    def routes(self, kind: str, microbatches: Sequence[int], lo: int, hi: int) -> list[Route]:
        """Routes through the stages lo..hi for the first of these microbatches, which begin together. None while one of
        the stages is empty."""

    def measured(self, stage: int, peer: int, kind: str, seconds: float) -> None:
        """A peer has done a Work (FORWARD or BACKWARD) in so many seconds."""
        return

    def reroute(self, stage: int, peer: int) -> int | None:
        """Another peer for a forward that is stuck at `peer`; None if there is no other peer now. `peer` is chosen
        again only once it has done a Work, or if there is no other."""
        return None


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
