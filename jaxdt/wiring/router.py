"""A router's choice of peers: interleaved weighted round-robin over measured speeds (SWARM Sec. 3.2, Algorithm 1).

Each router keeps, per stage, a priority queue of peers: the one with the least priority is next, and its priority grows
by what a microbatch takes there. So in the long run a peer's share goes with its speed. Near peers look faster, because
the way to them counts, so the topology is learned too. Time and chance come in as arguments.
"""

import random

from jaxdt.protocol.events import NOBODY

GAMMA = 0.1
UNKNOWN_S = 1.0
BANNED = float("inf")
BANNED_MAX = 64


class Ema:
    """Exponential moving average, corrected for its start at zero."""

    def __init__(self, gamma: float = GAMMA):
        self._gamma, self._sum, self._weight = gamma, 0.0, 0.0

    def add(self, value: float) -> None:
        self._sum += self._gamma * (value - self._sum)
        self._weight += self._gamma * (1.0 - self._weight)

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


class Measured:
    """What one peer takes, as one router saw it: seconds per forward and per backward, apart."""

    def __init__(self):
        self._emas: dict[str, Ema] = {}

    def add(self, kind: str, seconds: float) -> None:
        self._emas.setdefault(kind, Ema()).add(seconds)

    @property
    def charge_s(self) -> float | None:
        """Seconds of one microbatch, there and back; None before the first measurement."""
        values = [ema.value for ema in self._emas.values()]
        return sum(values) if values else None


class StageQueue:
    """The peers of one stage by priority. Of equal ones that is next which was chosen the longest ago, so that equal
    peers take turns; among those never chosen `rng` decides."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._n_choices = 0
        self._last_choice: dict[int, float] = {}
        self._priority: dict[int, float] = {}
        self._measured: dict[int, Measured] = {}

    def add(self, peer: int) -> None:
        """A newcomer enters at the least priority of those that are there, so that it is not flooded."""
        live = [priority for priority in self._priority.values() if priority != BANNED]
        self._priority[peer] = min(live, default=0.0)
        self._last_choice[peer] = self._rng.random()
        self._measured.setdefault(peer, Measured())

    def ban(self, peer: int) -> None:
        """Not chosen again until it is added again; what was measured stays, of the last BANNED_MAX."""
        if self._priority.pop(peer, None) is not None:
            self._priority[peer] = BANNED
        banned = [one for one, priority in self._priority.items() if priority == BANNED]
        for one in banned[:-BANNED_MAX]:
            del self._priority[one], self._measured[one], self._last_choice[one]

    def measured(self, peer: int, kind: str, seconds: float) -> None:
        """A Work of this kind was done there."""
        if peer in self._measured:
            self._measured[peer].add(kind, seconds)

    def choose(self) -> int | None:
        """The next peer; None if all are banned or there is none."""
        if not self.open:
            return None
        peer = min(self._priority, key=lambda peer: (self._priority[peer], self._last_choice[peer]))
        self._n_choices += 1
        self._last_choice[peer] = self._n_choices
        self._priority[peer] += self._charge_s(peer)
        return peer

    def _charge_s(self, peer: int) -> float:
        """A peer that was never measured is charged the mean of its stage."""
        own = self._measured[peer].charge_s
        if own is not None:
            return own
        known = [charge for one in self._measured.values() if (charge := one.charge_s) is not None]
        return sum(known) / len(known) if known else UNKNOWN_S

    @property
    def open(self) -> list[int]:
        """The peers that may be chosen."""
        return [peer for peer, priority in self._priority.items() if priority != BANNED]

    @property
    def priorities(self) -> dict[int, float]:
        return dict(self._priority)


class Router:
    """Routes of microbatches through the stages, chosen stage by stage."""

    def __init__(self, n_stages: int, seed: str):
        rng = random.Random(seed)
        self.stages = [StageQueue(rng) for _ in range(n_stages)]

    def routes(self, lo: int, hi: int, n: int) -> list[tuple[int, ...]]:
        """Of n microbatches that begin together: one peer for each of the stages lo..hi, NOBODY for the others. None of
        them while a stage has nobody. Those that were chosen are put together in the order of their ids. So the routes
        of equally many equal peers are pipelines, the same ones whoever steers, and at no moment two peers send to one
        and none to another."""
        wanted = self.stages[lo : hi + 1]
        if not all(stage.open for stage in wanted):
            return []
        chosen = [sorted(stage.choose() for _ in range(n)) for stage in wanted]
        before, behind = (NOBODY,) * lo, (NOBODY,) * (len(self.stages) - hi - 1)
        return [before + peers + behind for peers in zip(*chosen, strict=True)]
