"""SWARM's Figure 7: throughput of stochastic wiring from 8 to 128 T4."""

from dataclasses import replace
from pathlib import Path

from experiments.reproduce.page import bullets, page, table
from experiments.reproduce.swarm_fleet import Fleet
from matplotlib.figure import Figure

from jaxdt.spec.model import GPTConfig

PEERS = (8, 16, 32, 64, 128)
STAGES, LAYERS, WIDTH, SEQ_LEN = 4, 12, 4096, 2048  # of one shared block a stage, as in the published server code
T4_FLOPS = 6.5e13  # peak, fp16
BEST_SAMPLES_PER_S, BEST_NODES, BEST_LAYERS = 19.2, 400, 48  # Table 3: a sample through all layers on each node
GBPS, LATENCY_S = 0.5, 0.025
BATCH = 4096
SHORT, LONG = 32, 64  # microbatches per pipeline that are simulated; a step is linear in them from there on


def layer_s() -> float:
    """Seconds of a layer and sequence on a T4: forward, recomputation and backward, by the best case of Table 3."""
    return BEST_NODES / BEST_SAMPLES_PER_S / BEST_LAYERS


def efficiency() -> float:
    """The part of a T4's peak FLOP/s that layer_s amounts to."""
    block = GPTConfig(1, WIDTH, 1, 4 * WIDTH, SEQ_LEN, 1, activation="geglu").block_params
    return 8.0 * block * SEQ_LEN / (layer_s() * T4_FLOPS)


def fleet(n_peers: int) -> Fleet:
    return Fleet(
        n_stages=STAGES,
        n_pipelines=n_peers // STAGES,
        d_model=WIDTH,
        n_sequences=1,
        codec="int8-dynamic",
        compute_s=LAYERS * layer_s(),
        latency_s=LATENCY_S,
        gbps=GBPS,
        wiring="swarm",
        seq_len=SEQ_LEN,
        activation="geglu",
    )


def samples_per_s(machines: Fleet, batch: int | None = None) -> float:
    """Sequences per second in the steady state, or in whole steps of `batch` sequences."""
    long_s = machines.step_s(LONG)
    each_s = (long_s - machines.step_s(SHORT)) / (LONG - SHORT)
    if batch is None:
        return machines.n_pipelines / each_s
    return batch / (long_s + (batch / machines.n_pipelines - LONG) * each_s)


def run(out: Path, command: str, peers: tuple[int, ...] = PEERS) -> str:
    """The text of the page. The picture is written to `out`."""
    rows = []
    for n_peers in peers:
        best = n_peers / STAGES / (LAYERS * layer_s())
        steady = samples_per_s(fleet(n_peers))
        stepped = samples_per_s(replace(fleet(n_peers), synced=True), BATCH)
        rows.append([n_peers, best, steady, steady / best, stepped, stepped / best])
        print(f"{n_peers} peers: simulated", flush=True)
    draw(out / "swarm_scaling.png", rows)
    worst = min(row[3] for row in rows)
    return page(
        "SWARM Figure 7: throughput from 8 to 128 T4 (grade B: the shape)",
        command,
        [
            (
                "Sequences per second",
                "![throughput](swarm_scaling.png)\n\n"
                + table(HEAD, rows)
                + "\nThe paper: about linear. "
                + f"Ours in the steady state: at least {100 * worst:.1f} % of the best case.\n",
            ),
            ("Where ours differs, and why", bullets(WHY)),
            ("Assumptions", bullets(assumptions())),
            ("Not modelled", bullets(NOT_MODELLED)),
        ],
    )


def draw(path: Path, rows: list[list]) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.subplots()
    n_peers = [row[0] for row in rows]
    for label, column, style in (("best case", 1, "k--"), ("steady state", 2, "o-"), ("with averaging", 4, "s-")):
        ax.plot(n_peers, [row[column] for row in rows], style, label=label)
    ax.set(xscale="log", yscale="log", xlabel="T4 peers", ylabel="sequences per second")
    ax.set_xticks(n_peers, [str(n) for n in n_peers])
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=80)


HEAD = ["peers", "best case", "steady state", "of best", f"steps of {BATCH} with averaging and commit", "of best"]
WHY = (
    "The figure prints no numbers, so only its shape can be compared. The paper's Table 3 has 0.92 of the best case on "
    "400 T4, which includes peers that come and go.",
    "With averaging a step waits for it (delay 0), and its seconds do not shrink with more peers while the rest of the "
    "step does; the paper averages beside the next step's computation.",
)
NOT_MODELLED = (
    "Preemption, unequal nodes, several regions; embedding, head and data; delayed parameter updates.",
    "Seconds of the 8-bit codec, which the paper overlaps.",
)


def assumptions() -> tuple[str, ...]:
    return (
        f"A T4 takes {layer_s():.3f} s for a layer of one sequence of {SEQ_LEN} tokens, forward, recomputation and "
        f"backward: {BEST_NODES} nodes do {BEST_SAMPLES_PER_S} samples/s through {BEST_LAYERS} layers in Table 3's "
        f"best case (no network). That is {efficiency():.3f} of {T4_FLOPS / 1e12:g} TFLOP/s. The sequence length of "
        "that load test is not printed; 2048 is the published server code's.",
        f"{STAGES} stages of {LAYERS} layers with one shared GeGLU block each, width {WIDTH}; 8-bit boundaries in "
        "blocks of 4096; microbatches of one sequence.",
        f"{1e3 * GBPS:g} Mb/s each way on each peer's line, shared by all its traffic; {1e3 * LATENCY_S:g} ms one way "
        "between all peers.",
        f"A step is linear in its microbatches: {SHORT} and {LONG} a pipeline are simulated. One router, the default "
        "window.",
    )
