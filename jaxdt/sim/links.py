"""Directed links in virtual time: FIFO within a priority, one message at a time, latency after the last byte.

A link is a pipe and a delay. Three options are off by default: `Jitter` of the delay, `Ramp` of a TCP connection that
was idle, and the access pipes of the two hosts, which all their traffic shares. Pipes forward a message from its first
byte on (cut-through): on a chain of pipes the slowest pipe decides when the last byte arrives.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from jaxdt.run.network import UNLIMITED_GBPS, Link

At = Callable[..., None]  # at(when_s, callback, args=()): see EventQueue
Entered = Callable[[float, float], None]

NEVER_S = float("-inf")
SEGMENT_BYTES = 1448
RESTART_SEGMENTS = 10
RTO_MARGIN_S = 0.2


@dataclass(frozen=True)
class Jitter:
    """Uniform in 0..jitter_s for every message, drawn from `seed` and the pair; messages of a link stay in order. The
    transport's emulated links draw in the same way."""

    jitter_s: float
    seed: int = 0

    def draws(self, src: int, dst: int) -> Callable[[], float]:
        """The draws of one link."""
        return partial(random.Random(f"{self.seed} {src} {dst}").uniform, 0.0, self.jitter_s)


@dataclass(frozen=True)
class Ramp:
    """A TCP connection that was idle: its window halves with each retransmission timeout of idleness, down to ten
    segments (RFC 2861, Linux tcp_slow_start_after_idle=1), and doubles every round trip until it fills the link."""

    def delay_s(self, link: Link, idle_s: float, n_bytes: int) -> float:
        """Seconds by which a message is later than at full speed."""
        rtt_s = 2 * link.latency_s
        halvings = min(64, int(idle_s / (rtt_s + RTO_MARGIN_S)))
        if rtt_s == 0 or halvings == 0 or link.bandwidth_gbps == UNLIMITED_GBPS:
            return 0.0
        full = rtt_s / link.occupied_s(SEGMENT_BYTES)
        window = max(RESTART_SEGMENTS, full / 2**halvings)
        left = n_bytes / SEGMENT_BYTES
        late_s = 0.0
        while window < min(full, left):
            late_s += rtt_s * (1 - window / full)
            left -= window
            window *= 2
        return late_s


class Pipe:
    """Takes one message at a time, the most urgent of those that wait, at the bandwidth of `link`."""

    __slots__ = ("link", "_at", "_free_s", "_order", "_queue")

    def __init__(self, link: Link, at: At):
        self.link = link
        self._at = at
        self._free_s = 0.0
        self._order = 0
        self._queue: list[tuple[int, int, int, float, Entered]] | None = None  # most links never need one

    def offer(self, now_s: float, n_bytes: int, priority: int, tail_s: float, entered: Entered) -> None:
        """Call entered(start_s, end_s) when the first byte of the message enters: the instants at which the first and
        the last byte leave the pipe. The last byte does not enter before tail_s."""
        end_s = self.enter_now(now_s, n_bytes)
        if end_s is not None:
            entered(now_s, max(end_s, tail_s))
            return
        self._order += 1
        if self._queue is None:
            self._queue = []
        heapq.heappush(self._queue, (priority, self._order, n_bytes, tail_s, entered))
        if len(self._queue) == 1:
            self._at(self._free_s, self._next)

    def enter_now(self, now_s: float, n_bytes: int) -> float | None:
        """Let a message in and return the instant at which its last byte leaves; None if the pipe is not free."""
        if now_s < self._free_s or self._queue:
            return None
        self._free_s = end_s = now_s + self.link.occupied_s(n_bytes)
        return end_s

    def _next(self) -> None:
        queue = self._queue
        assert queue is not None  # `offer` has filled it
        _, _, n_bytes, tail_s, entered = heapq.heappop(queue)
        start_s = self._free_s
        self._free_s = start_s + self.link.occupied_s(n_bytes)
        entered(start_s, max(self._free_s, tail_s))
        if queue:
            self._at(self._free_s, self._next)


class SimulatedLink(Pipe):
    """A pipe and a delay. Messages without payload travel on the control channel: they only take the latency."""

    __slots__ = (
        "_access_in",
        "_access_out",
        "_full",
        "_idle_s",
        "_jitter_s",
        "_latency_s",
        "_latest_s",
        "_plain",
        "_ramp",
    )

    def __init__(
        self,
        link: Link,
        at: At,
        jitter_s: Callable[[], float] | None = None,
        ramp: Ramp | None = None,
        access_out: Pipe | None = None,
        access_in: Pipe | None = None,
    ):
        super().__init__(link, at)
        self._full = link
        self._latency_s = link.latency_s
        self._jitter_s = jitter_s
        self._ramp = ramp
        self._access_out = access_out
        self._access_in = access_in
        self._latest_s = NEVER_S
        self._idle_s = NEVER_S
        self._plain = jitter_s is ramp is access_out is access_in is None

    def carry(self, now_s: float, n_bytes: int, priority: int, deliver: Callable[..., None], args: tuple = ()) -> None:
        """Call deliver(*args) when n_bytes, offered at now_s, have arrived."""
        if n_bytes == 0:
            self._at(now_s + self._latency_s, deliver, args)
        elif self._plain and (end_s := self.enter_now(now_s, n_bytes)) is not None:
            self._at(end_s + self._latency_s, deliver, args)  # the common case, without the callbacks below
        else:
            message = (n_bytes, priority, deliver, args)
            if self._access_out is None:
                self.offer(now_s, n_bytes, priority, now_s, partial(self._entered_link, message))
            else:
                self._access_out.offer(now_s, n_bytes, priority, now_s, partial(self._left_host, message))

    def set_bandwidth_factor(self, factor: float) -> None:
        """From the next message on the link has this share of its bandwidth."""
        self.link = replace(self._full, bandwidth_gbps=self._full.bandwidth_gbps * factor)

    def _left_host(self, message: tuple, start_s: float, end_s: float) -> None:
        """The first byte has left the host."""
        n_bytes, priority, _, _ = message
        self.offer(start_s, n_bytes, priority, end_s, partial(self._entered_link, message))

    def _entered_link(self, message: tuple, start_s: float, end_s: float) -> None:
        """The first byte enters the delay at start_s, the last one at end_s."""
        n_bytes, priority, deliver, args = message
        delay_s = self._latency_s
        if self._jitter_s is not None:
            delay_s += self._jitter_s()
        if self._ramp is not None:
            if self._idle_s > NEVER_S:
                delay_s += self._ramp.delay_s(self.link, start_s - self._idle_s, n_bytes)
            self._idle_s = end_s
        self._latest_s = latest_s = max(self._latest_s, end_s + delay_s)
        if self._access_in is None:
            self._at(latest_s, deliver, args)
            return
        head_s = min(start_s + delay_s, latest_s)
        arrived = lambda start_s, end_s: self._at(end_s, deliver, args)  # noqa: E731
        self._at(head_s, self._access_in.offer, (head_s, n_bytes, priority, latest_s, arrived))
