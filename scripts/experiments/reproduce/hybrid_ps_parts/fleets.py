"""Machines of the hybrid parameter-server paper's experiments: who is where, how fast, over which links, and who may
fail.

Stage and site of each device are given; its links are drawn by a seed, one draw for each pair and direction. Bandwidth
is that of the pair, as in the paper's Eq. 1, so the links of a machine do not share a line.
"""

import random
from dataclasses import dataclass
from typing import Protocol

from jaxdt.run.network import Link

Range = tuple[float, float]

SLOWDOWN = 1.55  # of the paper's simulated RTX 2080 against a V100
INSIDE = Link(1e-4, 16.0)  # 2 GB/s is printed, the latency is not
ALONE = "standalone"


class Machines(Protocol):
    """The interface of the machines of a batch, which have numbers. n_microbatches: tasks of a batch."""

    @property
    def n_stages(self) -> int: ...

    @property
    def n_microbatches(self) -> int: ...

    @property
    def boundary_bytes(self) -> int:
        """Bytes of a task's activation, or of its gradient."""
        ...

    def stage(self, stage: int) -> list[int]:
        """The machines of a stage, the best candidates for servers first."""
        ...

    def stage_s(self, device: int) -> float:
        """Seconds of a task in its stage: forward, recomputation and backward."""
        ...

    def link(self, src: int, dst: int) -> Link:
        """The link of an ordered pair of machines."""
        ...

    def may_fail(self, n: int) -> list[int]:
        """The n machines that are declared unreliable."""
        ...


@dataclass(frozen=True)
class Site:
    """`n` machines of one stage. Machines with the same name are beside each other, but for those ALONE."""

    name: str
    stage: int
    n: int
    slowdown: float = 1.0


@dataclass(frozen=True)
class Network:
    """Ranges from which links are drawn: one way latency in ms, Gb/s; between sites, and to machines that are ALONE."""

    between: tuple[Range, Range] = ((10.0, 100.0), (8.0, 24.0))
    alone: tuple[Range, Range] = ((100.0, 150.0), (0.05, 0.3))


@dataclass(frozen=True)
class Fleet:
    """Machines that train a model of `compute_s` seconds (forward, recomputation and backward of a microbatch, on a
    V100) over `n_microbatches` a batch. boundary_bytes: an activation or gradient of a microbatch. seed: of the links.
    """

    sites: tuple[Site, ...]
    compute_s: float
    boundary_bytes: int
    seed: int = 0
    n_microbatches: int = 128
    network: Network = Network()

    @property
    def devices(self) -> list[Site]:
        """The site of each machine. Its index is the machine's number."""
        return [site for site in self.sites for _ in range(site.n)]

    @property
    def n_stages(self) -> int:
        return 1 + max(site.stage for site in self.sites)

    def stage(self, stage: int) -> list[int]:
        """The machines of a stage, the fastest first."""
        devices = self.devices
        mine = [d for d, site in enumerate(devices) if site.stage == stage]
        return sorted(mine, key=lambda d: (devices[d].slowdown, d))

    def stage_s(self, device: int) -> float:
        """Seconds of a microbatch in its stage: forward, recomputation and backward."""
        return self.compute_s / self.n_stages * self.devices[device].slowdown

    def link(self, src: int, dst: int) -> Link:
        """The link of an ordered pair of machines."""
        a, b = self.devices[src].name, self.devices[dst].name
        if src == dst or (a == b and a != ALONE):
            return INSIDE
        latency_ms, gbps = self.network.alone if ALONE in (a, b) else self.network.between
        dice = random.Random(f"link {self.seed} {src} {dst}")
        return Link(dice.uniform(*latency_ms) / 1e3, dice.uniform(*gbps))

    def may_fail(self, n: int) -> list[int]:
        """Standalone machines, of the stages in turn, and as far as possible none in the place of its stage that
        another one has in its own. So each is in a pipeline of its own."""
        rows = [[d for d in self.stage(stage) if self.devices[d].name == ALONE] for stage in range(self.n_stages)]
        width, depth = len(rows[0]), len(rows)
        return [rows[(i % width + i // width) % depth][i % width] for i in range(n)]


@dataclass(frozen=True)
class Losses:
    """Which of n machines that may fail are lost in a batch, each with probability `prob`, at a moment that is uniform
    in the batch without losses."""

    n: int
    prob: float
    seed: int

    def of(self, machines: Machines) -> dict[int, float]:
        """Machine -> when it is lost, as a share of the batch without losses."""
        lost = {}
        for device in machines.may_fail(self.n):
            dice = random.Random(f"loss {self.seed} {device}")
            moment, chance = dice.random(), dice.random()
            if chance < self.prob:
                lost[device] = moment
        return lost
