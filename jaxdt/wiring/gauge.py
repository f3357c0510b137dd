"""A wiring whose queue is measured: what the coordinator rebalances stages by (jaxdt.wiring.rebalance)."""

from jaxdt.core.events import COORDINATOR, Action, Event, Load, Outside, Send, ViewChanged, WakeAt, Woke
from jaxdt.wiring.swarm import SwarmWiring

TAG = "load"


class Gauge:
    """Hands all events to the wiring, and tells the coordinator every `every_s` seconds how long its queue was since
    the last time, on average, and for what share of the time it computed."""

    READS = SwarmWiring.READS | {Woke}

    def __init__(self, wiring: SwarmWiring, every_s: float):
        self._wiring, self._every_s = wiring, every_s
        self._began_s: float | None = None
        self._now_s = self._queue_s = self._busy_s = self._due_s = 0.0
        self._waiting, self._runs = 0, False

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        self._until(now_s)
        if type(event) is Woke:
            return self._tell(now_s) if event.tag == TAG else []
        told = self._wiring.handle(now_s, event)
        self._waiting, self._runs = self._wiring.queue
        if type(event) is ViewChanged and self._began_s is None:
            return [*told, self._begin(now_s)]
        if type(event) is Outside:
            self._began_s = None
        return told

    def _until(self, now_s: float) -> None:
        """Nothing has changed since the last event."""
        seconds = now_s - self._now_s
        self._queue_s += seconds * (self._waiting + self._runs)
        self._busy_s += seconds * self._runs
        self._now_s = now_s

    def _begin(self, now_s: float) -> WakeAt:
        self._began_s, self._queue_s, self._busy_s = now_s, 0.0, 0.0
        self._due_s = now_s + self._every_s
        return WakeAt(self._due_s, TAG)

    def _tell(self, now_s: float) -> list[Action]:
        """Nothing when we are outside, nor at a time that was meant for before we were."""
        if self._began_s is None or now_s < self._due_s:
            return []
        seconds = now_s - self._began_s
        load = Load(self._queue_s / seconds, self._busy_s / seconds)
        return [Send(COORDINATOR, load), self._begin(now_s)]
