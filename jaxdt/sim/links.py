"""Directed links in virtual time: FIFO within a priority, one message at a time, latency after the last byte."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from jaxdt.core.network import Link


class SimulatedLink:
    """Messages without payload travel on the control lane: they only take the latency."""

    def __init__(self, link: Link, at: Callable[[float, Callable[[], None]], None]):
        self._link, self._at = link, at
        self._queue: list[tuple[int, int, int, Any]] = []
        self._order = itertools.count()
        self._busy = False

    def offer(self, now_s: float, n_bytes: int, priority: int, deliver: Callable[[], None]) -> None:
        """Call `deliver` when n_bytes, offered at now_s, have arrived."""
        if n_bytes == 0:
            self._at(now_s + self._link.latency_s, deliver)
            return
        heapq.heappush(self._queue, (priority, next(self._order), n_bytes, deliver))
        if not self._busy:
            self._transmit(now_s)

    def _transmit(self, now_s: float) -> None:
        self._busy = bool(self._queue)
        if self._busy:
            _, _, n_bytes, deliver = heapq.heappop(self._queue)
            free_s = now_s + self._link.occupied_s(n_bytes)
            self._at(free_s + self._link.latency_s, deliver)
            self._at(free_s, lambda: self._transmit(free_s))
