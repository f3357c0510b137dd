"""SWARM's Figures 1 and 3: compute grows with the cube of a layer's width, traffic with its square."""

from typing import Any

from experiments.reproduce.relay import GBPS, SEQ_LEN, Relay, boundary_s
from experiments.reproduce.results import Results
from matplotlib.figure import Figure

from jaxdt.run.families.gpt import GPTConfig

FLOPS = 10.8e12  # of a V100, at 6 FLOP per parameter and token; from the slope of the row xxlarge in Table 1
BASE_FLOPS = 3.3e12  # the same from the row base
PRINTED = {  # Table 6: parameters and FLOP of a layer at 512 tokens; Figures 1 and 3: utilisation in percent
    "base": (768, 1, 7.08e6, 2.2e10, 18.0),
    "xxlarge": (4096, 1, 2.01e8, 6.2e11, 32.1),
    "GPT-3": (12288, 1, 1.81e9, 5.5e12, 82.1),
    "Ours": (4096, 3, 2.01e8, 1.8e12, 89.5),
}
CODEC = {"Ours": "int8-dynamic"}
BASE_RTT_S = 0.009
MANY = 16
WIDTHS = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


def layer(d_model: int) -> GPTConfig:
    """A model of one layer and almost no vocabulary."""
    return GPTConfig(1, d_model, 1, 4 * d_model, SEQ_LEN, 1)


def flop(d_model: int) -> float:
    """FLOP of forward and backward of a layer on one sequence, without recomputation."""
    return 6.0 * layer(d_model).facts.layers[0].n_params * SEQ_LEN


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    counts, bars = [], []
    for name, (d_model, n_layers, params, flops, percent) in PRINTED.items():
        our_params = layer(d_model).facts.layers[0].n_params
        our_flops = n_layers * flop(d_model)
        differences = our_params / params - 1, our_flops / flops - 1
        counts.append([name, params, float(our_params), differences[0], flops, our_flops, differences[1]])
        compute_s = our_flops / FLOPS
        codec = CODEC.get(name, "none")
        bars.append([name, percent, *percents(d_model, compute_s, results, codec)])
    pictures = {"square_cube.png": draw(bars, results)}
    base = percents(768, flop(768) / BASE_FLOPS, results)
    deep = percents(4096, 12 * flop(4096) / FLOPS, results, CODEC["Ours"])
    others = [
        [f"base at {BASE_FLOPS / 1e12:g} TFLOP/s", PRINTED["base"][-1], *base],
        ["Ours, 12 layers a stage", PRINTED["Ours"][-1], *deep],
    ]
    order = sorted(bars, key=lambda row: row[2])
    same = [row[0] for row in order] == [row[0] for row in sorted(bars, key=lambda row: row[1])]
    return dict(pictures=pictures, bars=bars, counts=counts, others=others, same=same, GBPS=GBPS)


def percents(d_model: int, compute_s: float, results: Results, codec: str = "none") -> list[float]:
    """Utilisation in percent with 1 and with MANY microbatches in flight."""
    return [100 * Relay(d_model, compute_s, BASE_RTT_S, n, codec).utilisation(results) for n in (1, MANY)]


def draw(bars: list[list], results: Results) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for n, style in ((1, "-"), (MANY, "--")):
        ys = [100 * Relay(d, flop(d) / FLOPS, BASE_RTT_S, n).utilisation(results) for d in WIDTHS]
        left.plot(WIDTHS, ys, style, label=f"one layer, {n} in flight")
    left.plot([768, 4096, 12288], [bars[i][1] for i in range(3)], "ko", label="paper, one layer")
    left.set(xscale="log", xlabel="width", ylabel="utilisation, %", title="Utilisation at 500 Mb/s", ylim=(0, 105))
    left.legend(fontsize=8)
    right.plot(WIDTHS, [1e3 * flop(d) / FLOPS for d in WIDTHS], label="compute: width squared a token")
    right.plot(WIDTHS, [1e3 * boundary_s(d) for d in WIDTHS], label="one fp16 boundary: width")
    right.set(xscale="log", yscale="log", xlabel="width", ylabel="ms", title="Why: the slopes differ by one")
    right.legend(fontsize=8)
    return figure
