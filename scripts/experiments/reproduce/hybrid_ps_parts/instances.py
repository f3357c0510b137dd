"""Two instances for the planner of pools: the mixed cluster of the hybrid parameter-server paper's Figure 5, and a toy
small enough to work by hand."""

import math
import random
from dataclasses import dataclass

from jaxdt.run.network import Device, Network
from planner.model.pool import by_name
from planner.model.pool_problem import PoolProblem

Pair = tuple[float, float]  # latency in ms one way, bandwidth in Gb/s


@dataclass(frozen=True)
class LayerWork:
    """Seconds and bytes in proportion to layers (planner.model.pool_problem.StageWork); a backward computes its forward
    again. forward_s: of a unit and layer, by device; layer_bytes: of a server's state; a worker holds half of it, being
    without the moments of Adam."""

    forward_s: tuple[float, ...]
    layer_bytes: float

    def unit_s(self, device: int, lo: int, hi: int) -> tuple[float, float]:
        forward_s = self.forward_s[device] * (hi - lo)
        return forward_s, 3 * forward_s

    def server_bytes(self, lo: int, hi: int, n_in_flight: int) -> float:
        del n_in_flight
        return self.layer_bytes * (hi - lo)

    def worker_bytes(self, lo: int, hi: int) -> float:
        return self.layer_bytes * (hi - lo) / 2


# ---------------------------------------------------------------------------------------------------------- Figure 5

N_LAYERS, WIDTH, FF_WIDTH, VOCABULARY, TOKENS = 60, 6656, 17920, 32000, 2048  # Llama-33B; tokens are not stated
LAYER_PARAMS = 4 * WIDTH * WIDTH + 3 * WIDTH * FF_WIDTH
PARAMS = N_LAYERS * LAYER_PARAMS + 2 * VOCABULARY * WIDTH
BATCH, N_MINIBATCHES = 512, 32
N_STATES = 4  # of a parameter: itself, its gradient and two moments, in fp32 or better
EFFICIENCY = 0.35
# FLOP/s of the vendor's sheets (Ada and Ampere GA102 white papers), and bytes of a number
RATES = {
    "bf16": ({"cloud": 165.2e12, "campus": 165.2e12, "standalone": 59.5e12}, 2),
    "fp32": ({"cloud": 82.6e12, "campus": 82.6e12, "standalone": 29.8e12}, 4),
    "fp64": ({"cloud": 1.29e12, "campus": 1.29e12, "standalone": 0.465e12}, 8),
}
SITES = {"cloud": 3, "campus": 3, "standalone": 6}
N_RELIABLE_STANDALONE = 2
DISCONNECT_PROB = 0.5
INSIDE: dict[str, Pair] = {"cloud": (0.1, 16.0), "campus": (0.1, 16.0), "standalone": (10.0, 0.3)}
BETWEEN: Pair = (125.0, 0.175)
CASE_3 = ((100.0, 150.0), (0.05, 0.3))  # ranges of the paper's Case 3, ms and Gb/s


@dataclass(frozen=True)
class Cluster:
    """The cluster of Figure 5. precision: the number format of the computation and of boundaries; host_gb: memory of
    each machine, 0 for no limit; draw: the seed by which links between sites are drawn from the ranges of Case 3, None
    for the middles of the ranges; near_standalone: whether standalone machines are nearer to each other than to the
    other sites."""

    precision: str = "fp64"
    host_gb: int = 0
    draw: int | None = None
    near_standalone: bool = True

    @property
    def network(self) -> Network:
        devices = tuple(
            Device(f"{site}-{i}", site, disconnect_prob=_prob(site, i)) for site, n in SITES.items() for i in range(n)
        )
        dice = random.Random(self.draw)
        n = len(devices)
        latency_ms, gbps = [[0.0] * n for _ in devices], [[0.0] * n for _ in devices]
        for a in range(n):
            for b in range(a + 1, n):
                pair = self._link(devices[a].region, devices[b].region, dice)
                latency_ms[a][b], gbps[a][b] = latency_ms[b][a], gbps[b][a] = pair
        latency_s = tuple(tuple(ms / 1e3 for ms in row) for row in latency_ms)
        return Network(devices, latency_s, tuple(map(tuple, gbps)), "figure5")

    def _link(self, a: str, b: str, dice: random.Random) -> Pair:
        if a == b and (a != "standalone" or self.near_standalone):
            return INSIDE[a]
        if self.draw is None:
            return BETWEEN
        latency_ms, gbps = CASE_3
        return dice.uniform(*latency_ms), dice.uniform(*gbps)

    @property
    def problem(self) -> PoolProblem:
        rates, number_bytes = RATES[self.precision]
        network, index = by_name(self.network)
        flops = 2.0 * LAYER_PARAMS * TOKENS
        forward_s = tuple(flops / (rates[device.region] * EFFICIENCY) for device in network.devices)
        room_bytes = self.host_gb * 1e9 or math.inf
        return PoolProblem(
            network=network,
            index=index,
            room_bytes=(room_bytes,) * network.n_devices,
            work=LayerWork(forward_s, N_STATES * max(4, number_bytes) * PARAMS / N_LAYERS),
            cuts=tuple(range(N_LAYERS + 1)),
            unit_bytes=float(TOKENS * WIDTH * number_bytes),
            n_units=BATCH,
            n_minibatches=N_MINIBATCHES,
        )


def _prob(site: str, number: int) -> float | None:
    return DISCONNECT_PROB if site == "standalone" and number >= N_RELIABLE_STANDALONE else None


# --------------------------------------------------------------------------------------------------------------- toy

TOY_POWER = {"a1": 1.0, "a2": 1.0, "b1": 2.0, "c1": 1.0, "c2": 0.5, "w1": 1.0, "w2": 1.0}
TOY_PROBS = {"w1": 0.5, "w2": 1.0}
TOY_HOMES = {"w1": "a", "w2": "c"}  # the site next to a worker
TOY_GBPS = {"ab": 1.0, "bc": 0.5, "ac": 0.25}  # between sites; inside one 10, to a worker beside one 1
UNIT_BYTES = 1.25e8  # 1 s at 1 Gb/s


def toy() -> PoolProblem:
    """Three sites in a row and two workers, 8 layers of which a machine holds at most 3, 16 units in 2 mini-batches.
    Power 1 computes a layer's forward of a unit in 1 s; links have no latency."""
    names = list(TOY_POWER)
    devices = tuple(Device(name, disconnect_prob=TOY_PROBS.get(name)) for name in names)
    gbps = tuple(tuple(_toy_gbps(a, b) for b in names) for a in names)
    network, index = by_name(Network(devices, ((0.0,) * len(names),) * len(names), gbps, "toy"))
    return PoolProblem(
        network=network,
        index=index,
        room_bytes=(35e9,) * len(names),
        work=LayerWork(tuple(1 / TOY_POWER[device.name] for device in network.devices), 10e9),
        cuts=tuple(range(9)),
        unit_bytes=UNIT_BYTES,
        n_units=16,
        n_minibatches=2,
    )


def _toy_gbps(a: str, b: str) -> float:
    if {a, b} <= set(TOY_HOMES):
        return 0.0
    sites = sorted({TOY_HOMES.get(a, a[0]), TOY_HOMES.get(b, b[0])})
    if len(sites) == 2:
        return TOY_GBPS["".join(sites)]
    return 1.0 if {a, b} & set(TOY_HOMES) else 10.0
