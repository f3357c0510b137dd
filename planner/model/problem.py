"""The instance that solvers see: symmetric matrices of seconds for Eq. 2 and Eq. 3, from a network and two sizes.

alpha (latency) and beta (bandwidth) are means of both directions, as in the DT-FM paper, Sec. 3. A link with zero
bandwidth in either direction is missing; solvers see it as MISSING_S seconds, far above anything real, and so avoid it.
"""

from dataclasses import dataclass

import numpy as np

from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Network

MISSING_S = 1e6
MICROSECONDS = 1_000_000  # per second: integer solvers count whole microseconds
ASYMMETRY_WARNED = 2.0


@dataclass(frozen=True, eq=False)
class Problem:
    """S stages x P pipelines on N = S * P devices. dp_s[d, e] is what device d adds to DATAP by its exchange with e,
    and pp_s[d, e] the cost of that pair in a hop. Both are float64 [N, N] seconds, with the factor 2 of the equations
    included and a zero diagonal."""

    n_stages: int
    n_pipelines: int
    dp_s: np.ndarray
    pp_s: np.ndarray
    c_dp_bytes: float
    c_pp_bytes: float

    @property
    def n_devices(self) -> int:
        return len(self.dp_s)


def mean_links(network: Network) -> tuple[np.ndarray, np.ndarray]:
    """(alpha [s], beta [bytes/s]), both [N, N]: means of both directions; beta is 0 where either direction is."""
    latency_s = np.array(network.latency_s)
    bandwidth = np.array(network.bandwidth_gbps) * 1e9 / 8
    missing = (bandwidth == 0) | (bandwidth.T == 0)
    return (latency_s + latency_s.T) / 2, np.where(missing, 0.0, (bandwidth + bandwidth.T) / 2)


def exchange_s(alpha_s: np.ndarray, beta: np.ndarray, n_bytes: float) -> np.ndarray:
    """2 (alpha + n_bytes / beta) for every pair; MISSING_S where there is no link, 0 on the diagonal."""
    with np.errstate(divide="ignore"):
        seconds = 2 * (alpha_s + np.where(beta > 0, n_bytes / beta, np.inf))
    seconds = np.where(np.isfinite(seconds), seconds, MISSING_S)
    np.fill_diagonal(seconds, 0.0)
    return seconds


def problem_of(network: Network, n_stages: int, n_pipelines: int, c_dp_bytes: float, c_pp_bytes: float) -> Problem:
    """The instance of a network whose devices are all used; BadInput for sizes that cannot be planned."""
    for name, value in (("stages", n_stages), ("pipelines", n_pipelines)):
        if value < 1:
            raise BadInput(f"--{name}: got {value}, expected an integer >= 1")
    for name, value in (("c_dp_bytes", c_dp_bytes), ("c_pp_bytes", c_pp_bytes)):
        if not 0 <= value < np.inf:
            raise BadInput(f"--{name}: got {value}, expected a finite number >= 0")
    if n_stages * n_pipelines != network.n_devices:
        raise BadInput(
            f"--stages x --pipelines: got {n_stages} x {n_pipelines} = {n_stages * n_pipelines}, "
            f"expected the {network.n_devices} devices of {network.name or 'the network'}"
        )
    alpha_s, beta = mean_links(network)
    dp_s = exchange_s(alpha_s, beta, c_dp_bytes / n_pipelines)
    return Problem(n_stages, n_pipelines, dp_s, exchange_s(alpha_s, beta, c_pp_bytes), c_dp_bytes, c_pp_bytes)


def placement_terms(problem: Problem, placement: np.ndarray) -> tuple[float, float]:
    """(DATAP, PIPELINEP) of a placement [S, P] with its own stage order and matchings."""
    exchanges = problem.dp_s[placement[:, :, None], placement[:, None, :]].sum(axis=2)
    hops = problem.pp_s[placement[:-1], placement[1:]]
    return float(exchanges.max()), float(hops.max(axis=1).sum())


def placement_s(problem: Problem, placement: np.ndarray) -> float:
    """COMM-COST of a placement [S, P] with its own stage order and matchings."""
    return sum(placement_terms(problem, placement))


def asymmetric_links(network: Network) -> list[str]:
    """One line of text for every pair whose two directions differ by more than ASYMMETRY_WARNED times."""
    lines = []
    for field, unit in (("latency_s", "s"), ("bandwidth_gbps", "Gb/s")):
        values = np.array(getattr(network, field))
        low, high = np.minimum(values, values.T), np.maximum(values, values.T)
        for i, j in zip(*np.nonzero(np.triu(high > ASYMMETRY_WARNED * low, 1)), strict=True):
            pair = f"{network.devices[i].name} and {network.devices[j].name}"
            lines.append(f"{field} between {pair}: {values[i, j]:g} and {values[j, i]:g} {unit}")
    return lines
