"""SWARM's Figure 7: throughput of stochastic wiring from 8 to 128 T4, where computation dominates and where it does not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.reproduce.interval import SEEDS, Interval, interval
from experiments.reproduce.page import bullets, page, table
from experiments.reproduce.results import Results
from experiments.reproduce.swarm_fleet import Fleet
from matplotlib.figure import Figure

from jaxdt.spec.model import GPTConfig
from jaxdt.spec.network import Link

PEERS = (8, 16, 32, 64, 128)
STAGES, WIDTH, SEQ_LEN = 4, 4096, 2048
MANY_LAYERS, ONE_LAYER = 12, 1  # of a stage: one shared block, as in the published server code; and nothing shared
T4_FLOPS = 6.5e13  # peak, fp16
BEST_SAMPLES_PER_S, BEST_NODES, BEST_LAYERS = 19.2, 400, 48  # Table 3: a sample through all layers on each node
GBPS, LATENCY_S = 0.5, 0.025
BOUNDARY_BYTES = SEQ_LEN * WIDTH * (1 + 4 / 4096)  # 8-bit, one absmax per block of 4096
BATCH = 4096
SHORT, LONG = 32, 64  # microbatches per pipeline that are simulated; a step is linear in them from there on
SWARM, ONE_F_ONE_B = "swarm", "1F1B"
IN_FLIGHT = 4  # microbatches a peer on both sides: swarm's default, and four times the usual depth of 1F1B


def layer_s() -> float:
    """Seconds of a layer and sequence on a T4: forward, recomputation and backward, by the best case of Table 3."""
    return BEST_NODES / BEST_SAMPLES_PER_S / BEST_LAYERS


def efficiency() -> float:
    """The part of a T4's peak FLOP/s that layer_s amounts to."""
    block = GPTConfig(1, WIDTH, 1, 4 * WIDTH, SEQ_LEN, 1, activation="geglu").block_params
    return 8.0 * block * SEQ_LEN / (layer_s() * T4_FLOPS)


def compute_to_wire(layers: int) -> float:
    """Seconds of a microbatch's computation in a stage over those for which a peer's line carries what it sends of it:
    an activation and a gradient."""
    return layers * layer_s() / (2 * Link(0.0, GBPS).occupied_s(round(BOUNDARY_BYTES)))


def fleet(n_peers: int, layers: int, system: str, seed: int = 0) -> Fleet:
    """`layers`: of a stage. `seed`: of the router's ties."""
    machines = Fleet(
        n_stages=STAGES,
        n_pipelines=n_peers // STAGES,
        d_model=WIDTH,
        n_sequences=1,
        codec="int8-dynamic",
        compute_s=layers * layer_s(),
        latency_s=LATENCY_S,
        gbps=GBPS,
        seq_len=SEQ_LEN,
        activation="geglu",
    )
    if system == ONE_F_ONE_B:
        return replace(machines, depth=IN_FLIGHT)
    return replace(machines, wiring="swarm", window=IN_FLIGHT * n_peers, seed=seed)


def samples_per_s(machines: Fleet, results: Results, batch: int | None = None) -> float:
    """Sequences per second in the steady state, or in whole steps of `batch` sequences."""
    long_s = machines.step_s(LONG, results)
    each_s = (long_s - machines.step_s(SHORT, results)) / (LONG - SHORT)
    if batch is None:
        return machines.n_pipelines / each_s
    return batch / (long_s + (batch / machines.n_pipelines - LONG) * each_s)


@dataclass(frozen=True)
class Row:
    """Sequences per second of so many peers. `best` has no network; `stepped` has averaging and commit."""

    n_peers: int
    best: float
    pipelines: float
    swarm: Interval
    stepped: float = 0.0


def row(n_peers: int, layers: int, results: Results) -> Row:
    """The row of one size. Whole steps, of 1F1B and of the regime that the paper has, are simulated with one seed."""
    best = n_peers / STAGES / (layers * layer_s())
    machines = [fleet(n_peers, layers, SWARM, seed) for seed in SEEDS]
    pipelines = samples_per_s(fleet(n_peers, layers, ONE_F_ONE_B), results)
    swarm = interval(samples_per_s(fleet, results) for fleet in machines)
    if layers == ONE_LAYER:
        return Row(n_peers, best, pipelines, swarm)
    stepped = samples_per_s(replace(machines[0], synced=True), results, BATCH)
    return Row(n_peers, best, pipelines, swarm, stepped)


def run(out: Path, command: str, results: Results, peers: tuple[int, ...] = PEERS) -> str:
    """The text of the page. The picture is written to `out`."""
    results.fill(
        machines.job(size)
        for n in peers
        for layers in (MANY_LAYERS, ONE_LAYER)
        for seed in SEEDS
        for machines in (fleet(n, layers, SWARM, seed), fleet(n, layers, ONE_F_ONE_B))
        for size in (SHORT, LONG)
    )
    many, single = ([row(n, layers, results) for n in peers] for layers in (MANY_LAYERS, ONE_LAYER))
    draw(out / "swarm_scaling.png", {MANY_LAYERS: many, ONE_LAYER: single})
    return page(
        "SWARM Figure 7: throughput from 8 to 128 T4 (grade B: the shape)",
        command,
        [
            (
                f"Sequences per second, {MANY_LAYERS} layers a stage: compute to wire {compute_to_wire(MANY_LAYERS):.1f}",
                "![throughput](swarm_scaling.png)\n\n"
                + table(MANY_HEAD, [[*cells(r), r.stepped, r.stepped / r.best] for r in many])
                + f"\nThe paper: about linear. {least(many)} A network can hardly be seen here, so this table could not "
                "have come out otherwise.\n",
            ),
            (
                f"The same with one layer a stage: compute to wire {compute_to_wire(ONE_LAYER):.2f}",
                table(HEAD, [cells(r) for r in single]) + f"\n{least(single)} {growth(single)}\n",
            ),
            ("Where ours differs, and why", bullets(WHY)),
            ("Assumptions", bullets(assumptions())),
            ("Not modelled", bullets(NOT_MODELLED)),
        ],
    )


def cells(row: Row) -> list:
    return [
        row.n_peers,
        row.best,
        str(row.swarm),
        row.swarm.mean / row.best,
        row.pipelines,
        row.pipelines / row.best,
    ]


def least(rows: Sequence[Row]) -> str:
    """One sentence about the worst sizes."""
    swarm, pipelines = (100 * min(values) for values in zip(*(shares(r) for r in rows), strict=True))
    return f"Stochastic wiring reaches at least {swarm:.1f} % of the best case, 1F1B at least {pipelines:.1f} %."


def shares(row: Row) -> tuple[float, float]:
    """Swarm wiring and 1F1B, as parts of the best case."""
    return row.swarm.mean / row.best, row.pipelines / row.best


def growth(rows: Sequence[Row]) -> str:
    """One sentence about the largest size against the smallest."""
    first, last = rows[0], rows[-1]
    return (
        f"{last.n_peers // first.n_peers} times the peers do {last.swarm.mean / first.swarm.mean:.2f} times as much with "
        f"stochastic wiring and {last.pipelines / first.pipelines:.2f} times as much with 1F1B."
    )


def draw(path: Path, regimes: dict[int, list[Row]]) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for i, (layers, rows) in enumerate(regimes.items()):
        n_peers = [r.n_peers for r in rows]
        name = f"{layers} layer{'s' if layers > 1 else ''} a stage"
        axes[0].plot(n_peers, [r.best for r in rows], f"C{i}:", label=f"{name}: best case")
        axes[0].plot(n_peers, [r.swarm.mean for r in rows], f"C{i}o-", label=f"{name}: swarm")
        axes[1].errorbar(
            n_peers,
            [r.swarm.mean / r.best for r in rows],
            [r.swarm.half / r.best for r in rows],
            fmt=f"C{i}o-",
            label=f"{name}: swarm",
        )
        axes[1].plot(n_peers, [r.pipelines / r.best for r in rows], f"C{i}s--", ms=4, label=f"{name}: 1F1B")
    rows = regimes[MANY_LAYERS]
    axes[1].plot(n_peers, [r.stepped / r.best for r in rows], "C2^-.", ms=4, label="12 layers: swarm, with averaging")
    for ax in axes:
        ax.set(xscale="log", xlabel="T4 peers")
        ax.set_xticks(n_peers, [str(n) for n in n_peers])
        ax.minorticks_off()
        ax.legend(fontsize=7)
    axes[0].set(yscale="log", ylabel="sequences per second")
    axes[1].set(ylabel="part of the best case", ylim=(0, 1.05))
    figure.savefig(path, dpi=80)


HEAD = ["peers", "best case", "swarm", "of best", "1F1B, as many in flight", "of best"]
MANY_HEAD = [*HEAD, f"swarm, steps of {BATCH} with averaging and commit", "of best"]
WHY = (
    "The figure prints no numbers, so only its shape can be compared. The paper's Table 3 has 0.92 of the best case on "
    "400 T4, which includes peers that come and go.",
    "With averaging a step waits for it (delay 0), and its seconds do not shrink with more peers while the rest of the "
    "step does; the paper averages beside the next step's computation.",
    "The best case counts computation alone. Where computation is little longer than a line is busy, microbatches that "
    "choose their routes by chance meet on a line while another one is idle; those of a pipeline never do.",
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
        f"{STAGES} stages of {MANY_LAYERS} layers with one shared GeGLU block each, as in the published server code, "
        f"width {WIDTH}; 8-bit boundaries in blocks of 4096; microbatches of one sequence. The paper's own runs have 3 "
        "stages of one block applied 16 times (Sec. 4.3); the stages of this figure are not printed.",
        f"Compute to wire: the seconds of a stage's computation over those for which a line carries the activation and "
        f"the gradient that a peer sends. One layer a stage is the same fleet with a network that counts.",
        f"{1e3 * GBPS:g} Mb/s each way on each peer's line, shared by all its traffic; {1e3 * LATENCY_S:g} ms one way "
        "between all peers.",
        f"A step is linear in its microbatches: {SHORT} and {LONG} a pipeline are simulated. One router. "
        f"{IN_FLIGHT} microbatches a peer in flight on both sides.",
        f"Seeds {SEEDS.start} to {SEEDS.stop - 1} of the router's ties; +- is half the width of a 95 % interval (Student's "
        "t). Numbers without +- do not depend on the seed, but for the steps with averaging, which are of seed 0.",
    )
