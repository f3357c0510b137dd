"""An emulated link from one peer to another: when a transmission starts, and when it arrives.

The model is the simulator's: a transmission occupies the link for bytes / bandwidth, and arrives one latency after
that, in order. Time comes in as an argument; nothing in this file waits.
"""

import random
import threading
from dataclasses import dataclass

from jaxdt.run.errors import BadInput
from jaxdt.run.network import UNLIMITED_GBPS, Link


@dataclass(frozen=True)
class LinkShape:
    """One directed link. Jitter is uniform in 0..jitter_s; with `drop_prob` a message breaks the connection."""

    latency_s: float = 0.0
    bandwidth_gbps: float = UNLIMITED_GBPS
    jitter_s: float = 0.0
    drop_prob: float = 0.0
    seed: int = 0

    def __post_init__(self):
        for name in ("latency_s", "jitter_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadInput(f"shape: {name}: got {getattr(self, name)}, expected a finite number >= 0")
        if not self.bandwidth_gbps > 0:
            raise BadInput(f"shape: bandwidth_gbps: got {self.bandwidth_gbps}, expected a number > 0")
        if not 0 <= self.drop_prob < 1:
            raise BadInput(f"shape: drop_prob: got {self.drop_prob}, expected 0 <= p < 1")


class Shaper:
    """The state of one emulated link, shared by both channels from src to dst. Instants are seconds of one clock."""

    def __init__(self, shape: LinkShape, src: int, dst: int):
        self._shape = shape
        self._link = Link(shape.latency_s, shape.bandwidth_gbps)
        self._random = random.Random(f"{shape.seed} {src} {dst}")
        self._lock = threading.Lock()
        self._free_s = float("-inf")
        self._last_arrival_s = float("-inf")

    @property
    def free_s(self) -> float:
        """The instant from which the link takes another transmission."""
        return self._free_s

    def transmit(self, ready_s: float, n_bytes: int) -> float:
        """Occupy the link from max(ready_s, free_s) on; returns the instant of arrival, never before an earlier one.

        `ready_s` is when the bytes could have started, not when the sending thread was scheduled: a late thread must
        not make the link look slower.
        """
        with self._lock:
            self._free_s = max(ready_s, self._free_s) + self._link.occupied_s(n_bytes)
            arrival_s = self._free_s + self._shape.latency_s + self._random.uniform(0, self._shape.jitter_s)
            self._last_arrival_s = max(self._last_arrival_s, arrival_s)
            return self._last_arrival_s

    def drops(self) -> bool:
        """Whether the connection breaks at this message."""
        with self._lock:
            return self._random.random() < self._shape.drop_prob
