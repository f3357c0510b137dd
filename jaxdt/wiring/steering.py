"""A router's side of a step: which of its microbatches wait, which are on their way, and what is to be done again when
members were lost."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxdt.core.events import BACKWARD, EVALUATE, FORWARD, REGENERATE, View
from jaxdt.wiring.router import Router


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


@dataclass
class OnItsWay:
    """A task, its route, and when its last Work was done."""

    task: Task
    route: tuple[int, ...]
    since_s: float


class Steering:
    """`window` tasks at a time; `seed` breaks the router's ties."""

    def __init__(self, n_stages: int, seed: str, window: int):
        self._router, self._window = Router(n_stages, seed), window
        self._waiting: list[Task] = []
        self._open: dict[tuple[str, int], OnItsWay] = {}

    def adopt(self, view: View, members: Collection[int]) -> None:
        """Those members of a view that compute now. Others are not chosen any more; what was under way is void."""
        self.begin([])
        for stage, queue in enumerate(self._router.stages):
            here, open_to = set(view.stage_peers(stage)) & set(members), set(queue.open)
            for peer in sorted(here - open_to):
                queue.add(peer)
            for peer in open_to - here:
                queue.ban(peer)

    def begin(self, tasks: list[Task]) -> None:
        """All that this router has to steer now."""
        self._waiting, self._open = list(reversed(tasks)), {}

    def next(self, now_s: float) -> list[tuple[Task, tuple[int, ...]]]:
        """Tasks that begin now, with their routes: as many as the window allows."""
        begun = []
        while self._waiting and len(self._open) < self._window:
            task = self._waiting[-1]
            route = self._router.route(task.lo, task.hi)
            if route is None:
                break
            self._waiting.pop()
            self._open[task.kind, task.microbatch] = OnItsWay(task, route, now_s)
            begun.append((task, route))
        return begun

    def progress(self, now_s: float, kind: str, stage: int, microbatch: int) -> None:
        """A Work of one of the tasks is done: it measures the peer, and the last one makes room for another."""
        name = (EVALUATE if kind == EVALUATE else FORWARD, microbatch)
        one = self._open.get(name)
        if one is None or not one.task.lo <= stage <= one.task.hi:
            return
        back = kind in (BACKWARD, REGENERATE)
        if kind != EVALUATE:
            measured = BACKWARD if back else FORWARD
            self._router.stages[stage].measured(one.route[stage], measured, one.since_s, now_s)
        one.since_s = now_s
        if (back and stage == one.task.lo) or (kind == EVALUATE and stage == one.task.hi):
            del self._open[name]
