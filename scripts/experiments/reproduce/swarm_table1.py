"""SWARM's Table 1: GPU utilisation against round-trip time, 500 Mb/s, one synchronous trainer."""

from typing import Any

from experiments.reproduce.relay import Relay, boundary_s, one_at_a_time
from experiments.reproduce.results import Results
from matplotlib.figure import Figure

RTT_MS = (0, 10, 50, 100, 200)
PRINTED = {  # percent
    "base": (18.0, 11.8, 4.88, 2.78, 1.53),
    "xxlarge": (32.1, 28.9, 20.1, 14.9, 10.1),
    "GPT-3": (82.1, 79.3, 70.3, 60.2, 48.5),
    "Ours": (89.5, 87.2, 79.5, 71.5, 59.2),
}
WIDTH = {"base": 768, "xxlarge": 4096, "GPT-3": 12288, "Ours": 4096}
CODEC = {"Ours": "int8-dynamic"}
MANY = 16
BASE_RTT_MS = 9.0  # Appendix F: 3-6 ms one way before anything is added; 4.5 twice
RTTS_S = tuple((rtt or BASE_RTT_MS) / 1e3 for rtt in RTT_MS)


def law(percent: tuple[float, ...]) -> tuple[float, float]:
    """(a, s per ms) of 1/u = a + s RTT, by least squares with errors weighted by u."""
    points = [(rtt, 100 / u, (u / 100) ** 2) for rtt, u in zip(RTT_MS, percent, strict=True)]
    w = sum(p[2] for p in points)
    x, y = (sum(p[i] * p[2] for p in points) / w for i in (0, 1))
    s = sum(p[2] * (p[0] - x) * (p[1] - y) for p in points) / sum(p[2] * (p[0] - x) ** 2 for p in points)
    return y - s * x, s


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    fits, sims = [], []
    figure = Figure(figsize=(15, 3.6), layout="constrained")
    axes = figure.subplots(1, 4)
    for ax, (name, printed) in zip(axes, PRINTED.items(), strict=True):
        a, s = law(printed)
        compute_ms = 2 / s
        worst = max(abs(100 / (a + s * rtt) / u - 1) for rtt, u in zip(RTT_MS, printed, strict=True))
        fits.append([name, a, s, 100 * worst, compute_ms, (a - 1) * compute_ms, 1e3 * boundary_s(WIDTH[name])])
        one, many = (simulated(name, compute_ms / 1e3, n, results) for n in (1, MANY))
        codec = CODEC.get(name, "none")
        exact = [100 * one_at_a_time(WIDTH[name], compute_ms / 1e3, rtt_s, codec) for rtt_s in RTTS_S]
        sims += [[name, rtt, *values] for rtt, *values in zip(RTT_MS, printed, one, many, exact, strict=True)]
        for values, label, style in (
            (printed, "paper", "ko"),
            (one, "ours, 1 in flight", "-"),
            (many, "ours, 16", "--"),
        ):
            ax.plot(RTT_MS, values, style, label=label)
        ax.set(title=name, xlabel="RTT, ms", ylabel="utilisation, %", ylim=(0, 105))
    axes[0].legend(fontsize=8)
    ratio = [row[3] / row[2] for row in sims]
    closed = max(abs(row[3] / row[5] - 1) for row in sims)
    found = dict(fits=fits, sims=sims, low=min(ratio), high=max(ratio), closed=closed)
    return dict(pictures={"swarm_table1.png": figure}, **found)


def simulated(name: str, compute_s: float, in_flight: int, results: Results) -> list[float]:
    """Utilisation in percent at each round trip time."""
    codec = CODEC.get(name, "none")
    return [100 * Relay(WIDTH[name], compute_s, rtt_s, in_flight, codec).utilisation(results) for rtt_s in RTTS_S]
