"""The instance that solvers see: symmetric matrices of seconds for Eq. 2 and Eq. 3, from a network and two sizes.

Each exchange goes both ways: activations forward and gradients back (Eq. 3), shards out and sums back (Eq. 2). So a
pair costs the sum of both directions. This is the paper's 2 (alpha + n_bytes / beta) with the arithmetic mean of both
latencies and the harmonic mean of both bandwidths; the DT-FM paper, Sec. 3, has the arithmetic mean of the bandwidths,
which is the same where they are equal and hides the slow direction where they are not. A link with zero bandwidth in
either direction is missing. In the matrices it costs `missing_s`, more than any plan without missing
links: searches then avoid it, and a plan uses a missing link exactly if it costs missing_s or more.
Devices of a host have equal parts of its line.
"""

from dataclasses import dataclass

import numpy as np

from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from planner.model.hosts import fair_gbps
from planner.model.shape import check_n_devices


@dataclass(frozen=True, eq=False)
class Problem:
    """S stages x P pipelines on N = S * P devices. dp_s[d, e] is what device d adds to DATAP by its exchange with e,
    and pp_s[d, e] the cost of that pair in a hop. Both are float64 [N, N] seconds, with the factor 2 of the equations
    included and a zero diagonal; a missing link costs missing_s in both. region [N] numbers the devices' regions; a
    device without one has a number of its own."""

    n_stages: int
    n_pipelines: int
    dp_s: np.ndarray
    pp_s: np.ndarray
    c_dp_bytes: float
    c_pp_bytes: float
    missing_s: float
    region: np.ndarray

    @property
    def n_devices(self) -> int:
        return len(self.dp_s)

    @property
    def dearest_s(self) -> float:
        """No plan without missing links costs more."""
        return self.missing_s / 2


def mean_links(network: Network) -> tuple[np.ndarray, np.ndarray]:
    """(alpha [s], beta [bytes/s]), both [N, N]: the arithmetic mean of both latencies, and the harmonic mean of both
    bandwidths, which is 0 if either bandwidth is 0."""
    latency_s = np.array(network.latency_s)
    bandwidth = fair_gbps(network) * 1e9 / 8
    s_per_byte = np.divide(1.0, bandwidth, out=np.full_like(bandwidth, np.inf), where=bandwidth > 0)
    both_ways = s_per_byte + s_per_byte.T
    beta = np.divide(2.0, both_ways, out=np.full_like(bandwidth, np.inf), where=both_ways > 0)
    return (latency_s + latency_s.T) / 2, beta


def exchange_s(alpha_s: np.ndarray, beta: np.ndarray, n_bytes: float) -> np.ndarray:
    """2 (alpha + n_bytes / beta) for every pair, there and back; infinite where there is no link, 0 on the diagonal."""
    seconds = 2 * (alpha_s + np.divide(n_bytes, beta, out=np.full_like(beta, np.inf), where=beta > 0))
    np.fill_diagonal(seconds, 0.0)
    return seconds


def problem_of(
    network: Network,
    n_stages: int,
    n_pipelines: int,
    c_dp_bytes: float,
    c_pp_bytes: float,
    exchanges_per_step: float = 1.0,
    *,
    has_spares: bool = False,
) -> Problem:
    """The instance of a network whose devices are all used, or with `has_spares` one that may have more devices than a
    plan uses; BadInput for sizes that cannot be planned. Only searches that know of spare devices may have such an
    instance: the bounds of planner.cost.bounds do not hold for it."""
    if n_stages > 0 and n_pipelines > 0 and not has_spares:
        check_n_devices(network, n_stages, n_pipelines)
    for name, value in (("stages", n_stages), ("pipelines", n_pipelines)):
        if value < 1:
            raise BadInput(f"--{name}: got {value}, expected an integer >= 1")
    for name, value in (("c_dp_bytes", c_dp_bytes), ("c_pp_bytes", c_pp_bytes)):
        if not 0 <= value < np.inf:
            raise BadInput(f"--{name}: got {value}, expected a finite number >= 0")
    alpha_s, beta = mean_links(network)
    dp_s = exchange_s(alpha_s, beta, c_dp_bytes / n_pipelines)
    dp_s = exchanges_per_step * dp_s if exchanges_per_step else np.zeros_like(dp_s)
    pp_s = exchange_s(alpha_s, beta, c_pp_bytes)
    largest_dp_s, largest_pp_s = (float(m.max(initial=0.0, where=np.isfinite(m))) for m in (dp_s, pp_s))
    missing_s = 2 * (n_pipelines * largest_dp_s + n_stages * largest_pp_s) or 1.0
    dp_s, pp_s = (np.where(np.isfinite(m), m, missing_s) for m in (dp_s, pp_s))
    return Problem(n_stages, n_pipelines, dp_s, pp_s, c_dp_bytes, c_pp_bytes, missing_s, regions_of(network))


def regions_of(network: Network) -> np.ndarray:
    """region [N] of a Problem: numbers in the order in which the network's devices name their regions."""
    names = [device.region or d for d, device in enumerate(network.devices)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)


def placement_terms(problem: Problem, placement: np.ndarray) -> tuple[float, float]:
    """(DATAP, PIPELINEP) of a placement [S, P] with its own stage order and matchings."""
    exchanges = problem.dp_s[placement[:, :, None], placement[:, None, :]].sum(axis=2)
    hops = problem.pp_s[placement[:-1], placement[1:]]
    return float(exchanges.max()), float(hops.max(axis=1).sum())


def placement_s(problem: Problem, placement: np.ndarray) -> float:
    """COMM-COST of a placement [S, P] with its own stage order and matchings."""
    return sum(placement_terms(problem, placement))
