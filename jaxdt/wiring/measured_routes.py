"""Routes through any peers of the stages: interleaved weighted round-robin over measured speeds (SWARM Sec. 3.2,
Algorithm 1).

Each router keeps, per stage, a priority queue of peers. The peer with the least priority is next, and its priority
grows by what a microbatch takes there. So in the long run a peer's share goes with its speed. Near peers look faster,
because the way to them counts, so the topology is learned too. Time and chance come in as arguments.
"""

import math
import random
from collections.abc import Sequence

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import NO_PEER
from jaxdt.wiring.dispatcher import Route, RoutePolicy

GAMMA = 0.1
UNKNOWN_S = 1.0
BANNED = math.inf
BANNED_MAX = 64


class Ema:
    """Exponential moving average, corrected for its start at zero."""

    def __init__(self, gamma: float = GAMMA):
        self._gamma = gamma
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum += self._gamma * (value - self._sum)
        self._weight += self._gamma * (1.0 - self._weight)

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


class ServiceEstimate:
    """The service times of one peer, as one router measured them: seconds per forward and per backward, apart."""

    def __init__(self):
        self._averages: dict[str, Ema] = {}

    def add(self, kind: str, seconds: float) -> None:
        self._averages.setdefault(kind, Ema()).add(seconds)

    @property
    def microbatch_s(self) -> float | None:
        """Seconds of one microbatch, forward and backward; None before the first measurement."""
        values = [value for average in self._averages.values() if (value := average.value) is not None]
        return sum(values) if values else None


class StageQueue:
    """The peers of one stage by priority. Among equals the one that was chosen the longest ago is next, so that equal
    peers take turns; among those never chosen `rng` decides."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._n_choices = 0
        self._last_choice: dict[int, float] = {}
        self._priority: dict[int, float] = {}
        self._estimates: dict[int, ServiceEstimate] = {}
        self._stuck: set[int] = set()

    def add(self, peer: int) -> None:
        """A newcomer enters at the least priority of those that are there, so that it is not flooded."""
        live = [priority for priority in self._priority.values() if priority != BANNED]
        self._priority[peer] = min(live, default=0.0)
        self._last_choice[peer] = self._rng.random()
        self._estimates.setdefault(peer, ServiceEstimate())

    def ban(self, peer: int) -> None:
        """The peer is not chosen until it is added again. Its measurements stay, those of the last BANNED_MAX."""
        self._stuck.discard(peer)
        if self._priority.pop(peer, None) is not None:
            self._priority[peer] = BANNED
        banned = [one for one, priority in self._priority.items() if priority == BANNED]
        for one in banned[:-BANNED_MAX]:
            del self._priority[one], self._estimates[one], self._last_choice[one]

    def forget_stuck(self) -> None:
        """All that were stuck may be chosen again."""
        self._stuck.clear()

    def measured(self, peer: int, kind: str, seconds: float) -> None:
        self._stuck.discard(peer)
        if peer in self._estimates:
            self._estimates[peer].add(kind, seconds)

    def choose_other(self, peer: int) -> int | None:
        """The next peer instead of `peer`, which is stuck; None if all peers are stuck. Unless all are stuck, a stuck
        peer is not chosen before it has done a Work."""
        self._stuck.add(peer)
        return None if self._stuck.issuperset(self.open) else self.choose()

    def choose(self) -> int | None:
        """The next peer; None if all are banned or there is none."""
        open_peers = self.open
        if not open_peers:
            return None
        free = [peer for peer in open_peers if peer not in self._stuck] or open_peers
        peer = min(free, key=lambda peer: (self._priority[peer], self._last_choice[peer]))
        self._n_choices += 1
        self._last_choice[peer] = self._n_choices
        self._priority[peer] += self._microbatch_s(peer)
        return peer

    def _microbatch_s(self, peer: int) -> float:
        """A peer that was never measured counts with the mean of its stage."""
        own = self._estimates[peer].microbatch_s
        if own is not None:
            return own
        known = [seconds for one in self._estimates.values() if (seconds := one.microbatch_s) is not None]
        return sum(known) / len(known) if known else UNKNOWN_S

    @property
    def open(self) -> list[int]:
        return [peer for peer, priority in self._priority.items() if priority != BANNED]


class MeasuredRoutes(RoutePolicy):
    """The `n_routers` members with the least ids are routers, with `in_flight` microbatches on their way in all; `seed`
    breaks the ties of this peer's router.

    Routers do not see what the others send. So that their remainders do not pile up at one peer, each owns whole turns
    of microbatches, in which equal peers of a stage get equally many; at most one router owns a part of a turn. Where
    there are fewer turns than routers, the others own nothing."""

    def __init__(self, n_stages: int, n_routers: int, in_flight: int, n_microbatches: int, seed: str):
        self.in_flight_limit = in_flight
        rng = random.Random(seed)
        self.stages = [StageQueue(rng) for _ in range(n_stages)]
        self._n_routers = n_routers
        self._in_flight = in_flight
        self._n_microbatches = n_microbatches
        self._turn = 1
        self._routers: Sequence[int] = ()

    def adopt(self, view: ev.View, members: Sequence[int]) -> None:
        n_replicas = [len(view.stage_peers(stage)) for stage in range(len(self.stages))]
        self._turn = math.lcm(*n_replicas)
        self._routers = members[: min(self._n_routers, math.ceil(self._n_microbatches / self._turn))]
        share = max(1, self._in_flight // len(self._routers))
        self.in_flight_limit = share - share % self._turn or share
        self._open(view, set(members))

    def begin_step(self, view: ev.View) -> None:
        self._open(view, {member.peer for member in view.members})

    def _open(self, view: ev.View, members: set[int]) -> None:
        for stage, queue in enumerate(self.stages):
            queue.forget_stuck()
            computing, open_peers = set(view.stage_peers(stage)) & members, set(queue.open)
            for peer in sorted(computing - open_peers):
                queue.add(peer)
            for peer in open_peers - computing:
                queue.ban(peer)

    def owning_router(self, kind: str, microbatch: int) -> int:
        return self._routers[microbatch // self._turn % len(self._routers)]

    def routes(self, kind: str, microbatches: Sequence[int], lo: int, hi: int) -> list[Route]:
        """Chosen stage by stage; those chosen at each stage are put together in the order of their ids. So the routes
        of equally many equal peers are pipelines, the same for every router, and at no moment two peers send to one and
        none to another."""
        wanted = self.stages[lo : hi + 1]
        if not all(stage.open for stage in wanted):
            return []
        n = min(self._turn, len(microbatches))
        chosen = [sorted(peer for _ in range(n) if (peer := stage.choose()) is not None) for stage in wanted]
        before, behind = (NO_PEER,) * lo, (NO_PEER,) * (len(self.stages) - hi - 1)
        return [before + peers + behind for peers in zip(*chosen, strict=True)]

    def measured(self, stage: int, peer: int, kind: str, seconds: float) -> None:
        self.stages[stage].measured(peer, kind, seconds)

    def reroute(self, stage: int, peer: int) -> int | None:
        return self.stages[stage].choose_other(peer)
