"""A wiring whose queue is measured: what the coordinator rebalances stages by (jaxdt.wiring.rebalance)."""

from jaxdt.protocol.events import COORDINATOR, Action, Event, Evicted, Load, Send, Updated, ViewChanged
from jaxdt.wiring.delayed_update import DelayedUpdate
from jaxdt.wiring.swarm import SwarmWiring


class LoadReporter:
    """Hands all events to the wiring, and tells the coordinator how long its queue was on average, and for what share
    of the time it computed: over whole steps, since queues wander through the stages within one, and over `least_s`
    seconds at least."""

    READS = SwarmWiring.READS

    def __init__(self, wiring: SwarmWiring | DelayedUpdate, least_s: float):
        self._wiring, self._least_s = wiring, least_s
        self._began_s: float | None = None
        self._now_s = self._queue_s = self._busy_s = 0.0
        self._waiting, self._runs = 0, False

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        self._until(now_s)
        told = self._wiring.handle(now_s, event)
        self._waiting, self._runs = self._wiring.queue
        kind = type(event)
        if kind is Updated and self._began_s is not None and now_s - self._began_s >= self._least_s:
            seconds = now_s - self._began_s
            told = [*told, Send(COORDINATOR, Load(self._queue_s / seconds, self._busy_s / seconds))]
            self._begin(now_s)
        elif kind is ViewChanged and self._began_s is None:
            self._begin(now_s)
        elif kind is Evicted:
            self._began_s = None
        return told

    def _until(self, now_s: float) -> None:
        """Nothing has changed since the last event."""
        seconds = now_s - self._now_s
        self._queue_s += seconds * (self._waiting + self._runs)
        self._busy_s += seconds * self._runs
        self._now_s = now_s

    def _begin(self, now_s: float) -> None:
        self._began_s, self._queue_s, self._busy_s = now_s, 0.0, 0.0
