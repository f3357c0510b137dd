"""A wiring whose queue is measured: the coordinator moves peers between stages by these loads (wiring/rebalance.py)."""

from jaxdt.protocol import events as ev
from jaxdt.wiring.base import Wiring


class LoadReporter:
    """Hands all events to the wiring, and tells the coordinator how long its queue was on average, and for what share
    of the time it computed. Both are taken over whole steps, since queues wander through the stages within a step, and
    over at least `period_s` seconds."""

    def __init__(self, wiring: Wiring, period_s: float):
        self.READS = wiring.READS | {ev.Updated, ev.ViewChanged, ev.Evicted}
        self._wiring = wiring
        self._period_s = period_s
        self._began_s: float | None = None
        self._now_s = 0.0
        self._queue_s = 0.0  # integral of the queue's length over time
        self._busy_s = 0.0
        self._n_waiting = 0
        self._is_busy = False

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        self._integrate_until(now_s)
        actions = self._wiring.handle(now_s, event)
        self._n_waiting, self._is_busy = self._wiring.queue
        kind = type(event)
        if kind is ev.Updated and self._began_s is not None and now_s - self._began_s >= self._period_s:
            seconds = now_s - self._began_s
            actions = [*actions, ev.Send(ev.COORDINATOR, ev.Load(self._queue_s / seconds, self._busy_s / seconds))]
            self._begin(now_s)
        elif kind is ev.ViewChanged and self._began_s is None:
            self._begin(now_s)
        elif kind is ev.Evicted:
            self._began_s = None
        return actions

    def _integrate_until(self, now_s: float) -> None:
        """The queue has not changed since the last event."""
        seconds = now_s - self._now_s
        self._queue_s += seconds * (self._n_waiting + self._is_busy)
        self._busy_s += seconds * self._is_busy
        self._now_s = now_s

    def _begin(self, now_s: float) -> None:
        self._began_s = now_s
        self._queue_s = 0.0
        self._busy_s = 0.0
