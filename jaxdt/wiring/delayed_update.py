"""Several steps under way at a time, for delayed parameter updates: each has a wiring of its own, on one device.

While a step is averaged the next one computes. With a delay of one step there are two wirings: one does the even steps,
the other the odd ones, and neither knows of the other. If both have Work that could run, the older step's runs.
"""

from collections.abc import Sequence
from typing import Any

from jaxdt.protocol import events as ev
from jaxdt.run.delay import Delay
from jaxdt.wiring.base import COMPUTING, Wiring, view_of_step


class DelayedUpdate:
    """`wirings`: one for each step under way, of one peer. A step begins when the version is there that it computes
    with, unless the peer takes no part in it; it may yet have to, when other peers are lost."""

    def __init__(self, peer: int, stage: int, wirings: Sequence[Wiring], delay: Delay):
        self.READS = frozenset({ev.ViewChanged, ev.Evicted, ev.Updated, ev.Committed, ev.Ran, ev.WorkOverdue}).union(
            *(w.READS for w in wirings)
        )
        self._peer = peer
        self._stage = stage
        self._wirings = tuple(wirings)
        self._delay = delay
        self._view: ev.View | None = None
        self._version: int | None = None
        self._n_committed = 0
        self._begun: set[int] = set()
        self._waiting: dict[int, ev.Run] = {}  # step -> the Work that its wiring wants done
        self._is_running = False

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.ViewChanged(view):
                actions = self._adopt(now_s, view)
            case ev.Evicted():
                self._stop()
                self._view = None
                actions = [action for wiring in self._wirings for action in wiring.handle(now_s, event)]
            case ev.WorkOverdue():
                actions = [action for wiring in self._wirings for action in wiring.handle(now_s, event)]
            case ev.Updated(_, version):
                self._version = version
                self._n_committed = max(self._n_committed, version)
                self._cancel_committed()  # first: a wiring whose Work still waits would not begin another
                actions = self._begin_open_steps(now_s)
            case ev.Received(_, ev.Committed(record)):
                self._n_committed = record.step + 1  # its update may begin at once: nothing of the step computes then
                self._cancel_committed()
                return []
            case ev.Received(_, body):
                actions = self._wiring_of(_step_of(body)).handle(now_s, event)
            case ev.Ran(work) if work.kind in COMPUTING:
                self._is_running = False
                actions = self._wiring_of(work.place[0]).handle(now_s, event)
            case _:
                return []
        return self._one_at_a_time(actions)

    @property
    def queue(self) -> tuple[int, bool]:
        n_known = sum(n_waiting + is_busy for n_waiting, is_busy in (wiring.queue for wiring in self._wirings))
        return n_known - self._is_running, self._is_running

    def cancel_run(self) -> None:
        self._is_running = False

    def _wiring_of(self, step: int) -> Wiring:
        return self._wirings[step % len(self._wirings)]

    def _adopt(self, now_s: float, view: ev.View) -> ev.Actions:
        if view.rolled_back:
            self._stop()
        self._n_committed = view.n_committed
        self._cancel_committed()
        actions: ev.Actions = []
        for step in range(view.n_committed, view.n_committed + len(self._wirings)):
            actions += self._wiring_of(step).handle(now_s, ev.ViewChanged(view_of_step(view, step)))
        self._view = view
        return actions + self._begin_open_steps(now_s)

    def _begin_open_steps(self, now_s: float) -> ev.Actions:
        if self._view is None or self._version is None:
            return []
        steps = self._delay.open(self._version)
        self._begun &= set(steps)
        actions: ev.Actions = []
        for step in steps:
            if step not in self._begun and self._peer in self._view.working(self._stage, step):
                self._begun.add(step)
                actions += self._wiring_of(step).handle(now_s, ev.Updated(self._stage, step))
        return actions

    def _stop(self) -> None:
        """No waiting Work is done any more, and steps start again."""
        self._version = None
        self._begun.clear()
        for step in self._waiting:
            self._wiring_of(step).cancel_run()
        self._waiting.clear()

    def _cancel_committed(self) -> None:
        """Work of a step that is committed is not needed."""
        for step in [step for step in self._waiting if step < self._n_committed]:
            del self._waiting[step]
            self._wiring_of(step).cancel_run()

    def _one_at_a_time(self, actions: ev.Actions) -> ev.Actions:
        """Let only one Work run at a time, that of the oldest step first, among all that the wirings ask for."""
        others: ev.Actions = []
        for action in actions:
            if isinstance(action, ev.Run):
                self._waiting[action.work.place[0]] = action
            else:
                others.append(action)
        self._cancel_committed()
        if self._is_running or not self._waiting:
            return others
        self._is_running = True
        return [*others, self._waiting.pop(min(self._waiting))]


def _step_of(body: Any) -> int:
    """The step that a wiring's message is about: its own, or that of the tensor which it names."""
    return body.step if hasattr(body, "step") else body.key.step
