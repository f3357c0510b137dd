"""HetPipe's servers in a simulation of waits alone: a matcher for each stage, and the one line that all pushes and
pulls share (Park et al. 2020, Sec. 5; SDPipe's comparison with it has one central server).

A replica that has done a local step pushes what it has changed, and continues. After every `wave` pushes it waits until
its clock is at most `staleness` ahead of the slowest replica's of its stage, and then pulls. Clocks count the pushes
that have arrived, as the servers of a run count those that they have added.
"""

import heapq
from dataclasses import dataclass, field

from jaxdt.sync.matching.base import AveragingGroup, Matched


@dataclass(frozen=True)
class ServerTiming:
    """`transfer_s`: for which a push, or a pull, of one stage's parameters occupies the line; `wave` and `staleness` as
    in jaxdt.run.config.ServerConfig."""

    transfer_s: float
    wave: int
    staleness: int


@dataclass
class ServerLine:
    """The line of the host on which all servers are: one transfer after another, in the order of asking."""

    free_s: float = 0.0

    def transfer(self, now_s: float, seconds: float) -> float:
        """Add a transfer, and return the time when it is over."""
        self.free_s = max(self.free_s, now_s) + seconds
        return self.free_s


@dataclass(frozen=True, order=True)
class Transfer:
    """A push that has arrived at `at_s`, or a pull that was answered then, after `step` local steps of `peer`."""

    at_s: float
    peer: int
    step: int
    is_push: bool


@dataclass
class ServerGate:
    """The matcher of a stage whose replicas push and pull: it answers with groups of one. `log`: pushes and pulls, in
    the order in which the server has added and answered them."""

    timing: ServerTiming
    line: ServerLine
    n_added: dict[int, int]  # replica -> local steps whose pushes have arrived
    log: list[Transfer] = field(default_factory=list[Transfer])
    _under_way: list[Transfer] = field(default_factory=list[Transfer])  # a heap; at_s is when they end
    _waiting: dict[int, int] = field(default_factory=dict[int, int])  # replica -> local steps, until its pull begins
    _gone: set[int] = field(default_factory=set[int])  # replicas that hold no other back; their pushes arrive
    _timer_s: float | None = None  # of the timer that is under way

    def ready(self, now_s: float, peer: int, step: int) -> Matched:
        self._begin(now_s, peer, step, is_push=True)
        if step % self.timing.wave:
            return Matched((AveragingGroup((peer,), "step"),), self._next_timer())
        self._waiting[peer] = step
        return Matched(timer=self._next_timer())

    def timer(self, now_s: float, tag: int) -> Matched:
        groups: list[AveragingGroup] = []
        self._timer_s = None
        while self._under_way and self._under_way[0].at_s <= now_s:
            done = heapq.heappop(self._under_way)
            if not done.is_push:
                groups.append(AveragingGroup((done.peer,), "step"))
            else:
                self.n_added[done.peer] = done.step
                self.log.append(done)
                self._answer(now_s)
        return Matched(tuple(groups), self._next_timer())

    def on_left(self, now_s: float, *peers: int) -> Matched:
        for peer in peers:
            self._gone.add(peer)
            self._waiting.pop(peer, None)
        self._answer(now_s)
        return Matched(timer=self._next_timer())

    def on_joined(self, now_s: float, peer: int, donor: int) -> Matched:
        self.n_added[peer] = self.n_added[donor]
        return Matched()

    def on_restarted(self, step_s: float) -> None:
        pass

    def on_failed(self, number: int, survivors: tuple[int, ...]) -> None:
        pass

    def _begin(self, now_s: float, peer: int, step: int, is_push: bool) -> None:
        end_s = self.line.transfer(now_s, self.timing.transfer_s)
        heapq.heappush(self._under_way, Transfer(end_s, peer, step, is_push))

    def _next_timer(self) -> tuple[float, int] | None:
        """The timer for the end of the next transfer; None if a timer for an earlier transfer is under way."""
        if not self._under_way or self._timer_s is not None:
            return None
        self._timer_s = self._under_way[0].at_s
        return self._timer_s, 0

    def _answer(self, now_s: float) -> None:
        """Begin the pulls of all waiting peers whose pushes have arrived and that are not too far ahead."""
        here = [n for peer, n in self.n_added.items() if peer not in self._gone]
        slowest = min(here, default=0) // self.timing.wave
        for peer, step in sorted(self._waiting.items()):
            if self.n_added[peer] == step and step // self.timing.wave - slowest <= self.timing.staleness:
                del self._waiting[peer]
                self.log.append(Transfer(now_s, peer, step, is_push=False))
                self._begin(now_s, peer, step, is_push=False)
