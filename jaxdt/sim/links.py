"""Directed links in virtual time: FIFO within a priority, one message at a time, latency after the last byte.

A link is a pipe and a delay. Options, all off by default: `Jitter` on the delay, `Ramp` of a TCP connection that was
idle, and the access pipes of the two hosts, which all their traffic shares. Pipes pass a message on from its first byte
(cut-through): on a chain of pipes its last byte is as late as the slowest of them makes it.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from jaxdt.spec.network import UNLIMITED_GBPS, Link

At = Callable[..., None]  # at(when_s, happen, args=()): see EventQueue
Entered = Callable[[float, float], None]

NEVER_S = float("-inf")
SEGMENT_BYTES, RESTART_SEGMENTS, RTO_MARGIN_S = 1448, 10, 0.2


@dataclass(frozen=True)
class Jitter:
    """Uniform in 0..jitter_s on every message, drawn from `seed` and the pair; a link stays in order. The transport's
    emulated links draw the same way."""

    jitter_s: float
    seed: int = 0

    def draws(self, src: int, dst: int) -> Callable[[], float]:
        """The draws of one link."""
        return partial(random.Random(f"{self.seed} {src} {dst}").uniform, 0.0, self.jitter_s)


@dataclass(frozen=True)
class Ramp:
    """A TCP connection that was idle: per retransmission timeout of idleness its window halves, down to ten segments
    (RFC 2861, Linux tcp_slow_start_after_idle=1), and doubles every round trip until it fills the link."""

    def delay_s(self, link: Link, idle_s: float, n_bytes: int) -> float:
        """Seconds by which a message is later than at full speed."""
        rtt_s = 2 * link.latency_s
        halvings = min(64, int(idle_s / (rtt_s + RTO_MARGIN_S)))
        if rtt_s == 0 or halvings == 0 or link.bandwidth_gbps == UNLIMITED_GBPS:
            return 0.0
        full = rtt_s / link.occupied_s(SEGMENT_BYTES)
        window, left, late_s = max(RESTART_SEGMENTS, full / 2**halvings), n_bytes / SEGMENT_BYTES, 0.0
        while window < min(full, left):
            late_s += rtt_s * (1 - window / full)
            left -= window
            window *= 2
        return late_s


class Pipe:
    """Takes one message at a time, the most urgent of those that wait, at the bandwidth of `link`."""

    __slots__ = ("link", "_at", "_free_s", "_order", "_queue")

    def __init__(self, link: Link, at: At):
        self.link, self._at = link, at
        self._free_s = 0.0
        self._order = 0
        self._queue: list[tuple[int, int, int, float, Entered]] | None = None  # most links never need one

    def offer(self, now_s: float, n_bytes: int, priority: int, tail_s: float, entered: Entered) -> None:
        """Call entered(start, end) when the message's first byte enters: the instants at which its first and its last
        byte leave. The last one does not come in before tail_s."""
        end_s = self.passed_s(now_s, n_bytes)
        if end_s is not None:
            entered(now_s, max(end_s, tail_s))
            return
        self._order += 1
        if self._queue is None:
            self._queue = []
        heapq.heappush(self._queue, (priority, self._order, n_bytes, tail_s, entered))
        if len(self._queue) == 1:
            self._at(self._free_s, self._next)

    def passed_s(self, now_s: float, n_bytes: int) -> float | None:
        """Let a message in, if it can enter at once; when its last byte leaves."""
        if now_s < self._free_s or self._queue:
            return None
        self._free_s = end_s = now_s + self.link.occupied_s(n_bytes)
        return end_s

    def _next(self) -> None:
        _, _, n_bytes, tail_s, entered = heapq.heappop(self._queue)
        start_s = self._free_s
        self._free_s = start_s + self.link.occupied_s(n_bytes)
        entered(start_s, max(self._free_s, tail_s))
        if self._queue:
            self._at(self._free_s, self._next)


class SimulatedLink(Pipe):
    """A pipe and a delay. Messages without payload travel on the control lane: they only take the latency."""

    __slots__ = ("_full", "_idle_s", "_jitter_s", "_latency_s", "_latest_s", "_plain", "_ramp", "_way_in", "_way_out")

    def __init__(
        self,
        link: Link,
        at: At,
        jitter_s: Callable[[], float] | None = None,
        ramp: Ramp | None = None,
        way_out: Pipe | None = None,
        way_in: Pipe | None = None,
    ):
        super().__init__(link, at)
        self._full, self._latency_s = link, link.latency_s
        self._jitter_s, self._ramp = jitter_s, ramp
        self._way_out, self._way_in = way_out, way_in
        self._latest_s = self._idle_s = NEVER_S
        self._plain = jitter_s is ramp is way_out is way_in is None

    def carry(self, now_s: float, n_bytes: int, priority: int, deliver: Callable[..., None], args: tuple = ()) -> None:
        """Call deliver(*args) when n_bytes, offered at now_s, have arrived."""
        if n_bytes == 0:
            self._at(now_s + self._latency_s, deliver, args)
        elif self._plain and (end_s := self.passed_s(now_s, n_bytes)) is not None:
            self._at(end_s + self._latency_s, deliver, args)  # nearly always: no need for the callbacks below
        else:
            message = (n_bytes, priority, deliver, args)
            if self._way_out is None:
                self.offer(now_s, n_bytes, priority, now_s, partial(self._crossed, message))
            else:
                self._way_out.offer(now_s, n_bytes, priority, now_s, partial(self._left, message))

    def narrow(self, factor: float) -> None:
        """The link has this share of its bandwidth from the next message on."""
        self.link = replace(self._full, bandwidth_gbps=self._full.bandwidth_gbps * factor)

    def _left(self, message: tuple, start_s: float, end_s: float) -> None:
        """The first byte is out of the host."""
        n_bytes, priority, _, _ = message
        self.offer(start_s, n_bytes, priority, end_s, partial(self._crossed, message))

    def _crossed(self, message: tuple, start_s: float, end_s: float) -> None:
        """The first byte has begun to cross at start_s, the last one will at end_s."""
        n_bytes, priority, deliver, args = message
        delay_s = self._latency_s
        if self._jitter_s is not None:
            delay_s += self._jitter_s()
        if self._ramp is not None:
            if self._idle_s > NEVER_S:
                delay_s += self._ramp.delay_s(self.link, start_s - self._idle_s, n_bytes)
            self._idle_s = end_s
        self._latest_s = latest_s = max(self._latest_s, end_s + delay_s)
        if self._way_in is None:
            self._at(latest_s, deliver, args)
            return
        head_s = min(start_s + delay_s, latest_s)
        arrived = lambda start_s, end_s: self._at(end_s, deliver, args)  # noqa: E731
        self._at(head_s, self._way_in.offer, (head_s, n_bytes, priority, latest_s, arrived))
