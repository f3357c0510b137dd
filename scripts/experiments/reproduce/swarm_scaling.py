"""SWARM's Figure 7: throughput of stochastic wiring from 8 to 128 T4, with and without a network that counts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.reproduce.page import bullets, page, table
from experiments.reproduce.results import Results
from experiments.reproduce.swarm_fleet import Fleet
from matplotlib.figure import Figure

from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Link
from jaxdt.runtime.reporting.interval import SEEDS, Interval, interval

PEERS = (8, 16, 32, 64, 128)
SINGLE_PEERS = (8, 16, 32, 64)  # with one layer a stage: ten seeds of 128 peers take ten CPU minutes
STAGES, WIDTH, SEQ_LEN = 4, 4096, 2048
MANY_LAYERS, ONE_LAYER = 12, 1  # of a stage: one shared block, as in the published server code; and nothing shared
T4_FLOPS = 6.5e13  # peak, fp16
BEST_SAMPLES_PER_S, BEST_NODES, BEST_LAYERS = 19.2, 400, 48  # Table 3: a sample through all layers on each node
GBPS, LATENCY_S = 0.5, 0.025
UNLIMITED_GBPS = 1e6
BOUNDARY_BYTES = SEQ_LEN * WIDTH * (1 + 4 / 4096)  # 8-bit, one absmax per block of 4096
BATCH = 4096
SHORT, LONG = 32, 64  # microbatches per pipeline that are simulated; a step is linear in them from there on
SYSTEMS = SWARM, ONE_F_ONE_B = ("swarm", "1F1B")
DEPTHS = FOUR, EIGHT = (4, 8)  # microbatches in flight a peer: swarm's default, and twice as many
PROBED = 32  # peers with which the reason is looked for


def layer_s() -> float:
    """Seconds of a layer and sequence on a T4: forward, recomputation and backward, by the best case of Table 3."""
    return BEST_NODES / BEST_SAMPLES_PER_S / BEST_LAYERS


def efficiency() -> float:
    """The part of a T4's peak FLOP/s that layer_s amounts to."""
    block = GPTConfig(1, WIDTH, 1, 4 * WIDTH, SEQ_LEN, 1, activation="geglu").facts.layers[0].n_params
    return 8.0 * block * SEQ_LEN / (layer_s() * T4_FLOPS)


def compute_to_wire(layers: int) -> float:
    """Seconds of a microbatch's computation in a stage over those for which a peer's line carries what it sends of it:
    an activation and a gradient."""
    return layers * layer_s() / (2 * Link(0.0, GBPS).occupied_s(round(BOUNDARY_BYTES)))


def fleet(n_peers: int, layers: int, system: str, a_peer: int = FOUR, seed: int = 0) -> Fleet:
    """`layers`: of a stage. `a_peer`: microbatches in flight for each peer. `seed`: of the router's ties."""
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
        return replace(machines, depth=a_peer)
    return replace(machines, wiring="swarm", window=a_peer * n_peers, seed=seed)


def fleets(n_peers: int, system: str, a_peer: int) -> list[Fleet]:
    """The fleets of all seeds with one layer a stage. Pipelines have nothing random."""
    return [fleet(n_peers, ONE_LAYER, system, a_peer, seed if system == SWARM else 0) for seed in SEEDS]


def best_samples_per_s(n_peers: int, layers: int) -> float:
    """Sequences per second without a network."""
    return n_peers / STAGES / (layers * layer_s())


def samples_per_s(machines: Fleet, results: Results, batch: int | None = None) -> float:
    """Sequences per second in the steady state, or in whole steps of `batch` sequences."""
    long_s = machines.step_s(LONG, results)
    each_s = (long_s - machines.step_s(SHORT, results)) / (LONG - SHORT)
    if batch is None:
        return machines.n_pipelines / each_s
    return batch / (long_s + (batch / machines.n_pipelines - LONG) * each_s)


def shares(machines: Sequence[Fleet], results: Results) -> Interval:
    """Sequences per second as a part of the best case. The fleets differ by their seeds."""
    best = best_samples_per_s(machines[0].n_pipelines * STAGES, ONE_LAYER)
    return interval(samples_per_s(fleet, results) / best for fleet in machines)


def run(out: Path, origin: str, results: Results) -> str:
    """The text of the page. The picture is written to `out`."""
    results.fill(machines.job(size) for machines in all_fleets() for size in (SHORT, LONG))
    many = [many_row(n, results) for n in PEERS]
    single = {
        (system, a_peer): [shares(fleets(n, system, a_peer), results) for n in SINGLE_PEERS]
        for a_peer in DEPTHS
        for system in SYSTEMS
    }
    rows = [
        [n, best_samples_per_s(n, ONE_LAYER), *map(str, row)]
        for n, *row in zip(SINGLE_PEERS, *single.values(), strict=True)
    ]
    head = ["peers", "best case", *(f"{system}, {a_peer} in flight a peer, of best" for system, a_peer in single)]
    draw(out / "swarm_scaling.png", many, single)
    return page(
        "SWARM Figure 7: throughput from 8 to 128 T4 (grade B: the shape)",
        origin,
        [
            (
                f"{MANY_LAYERS} layers a stage, compute to wire {compute_to_wire(MANY_LAYERS):.1f}: sequences a second",
                "![throughput](swarm_scaling.png)\n\n" + table(MANY_HEAD, many) + many_sentence(many),
            ),
            (
                f"One layer a stage, compute to wire {compute_to_wire(ONE_LAYER):.2f}: part of the best case",
                table(head, rows) + single_sentence(single),
            ),
            ("Where ours differs, and why", bullets([*WHY, reason(results)])),
            ("Assumptions", bullets(assumptions())),
            ("Not modelled", bullets(NOT_MODELLED)),
        ],
    )


def all_fleets() -> list[Fleet]:
    """All that the page shows."""
    many = [fleet(n, MANY_LAYERS, system) for n in PEERS for system in SYSTEMS]
    averaging = [replace(fleet(n, MANY_LAYERS, SWARM), synced=True) for n in PEERS]
    single = [one for n in SINGLE_PEERS for system in SYSTEMS for k in DEPTHS for one in fleets(n, system, k)]
    return [*many, *averaging, *single, *(one for changed in probes().values() for one in changed)]


def probes() -> dict[str, list[Fleet]]:
    """Fleets with one layer a stage in which one thing is changed."""
    machines = fleets(PROBED, SWARM, FOUR)
    return {
        "as above": machines,
        "with lines of unlimited bandwidth": [replace(fleet, gbps=UNLIMITED_GBPS) for fleet in machines],
        "without latency": [replace(fleet, latency_s=0.0) for fleet in machines],
        f"with {EIGHT} in flight a peer": fleets(PROBED, SWARM, EIGHT),
    }


def many_row(n_peers: int, results: Results) -> list:
    """A row of the table with many layers a stage: peers, best case, swarm, 1F1B, and swarm in whole steps."""
    best = best_samples_per_s(n_peers, MANY_LAYERS)
    swarm, pipelines = (fleet(n_peers, MANY_LAYERS, system) for system in SYSTEMS)
    steady = [samples_per_s(machines, results) for machines in (swarm, pipelines)]
    stepped = samples_per_s(replace(swarm, synced=True), results, BATCH)
    return [n_peers, best, *(cell for value in (*steady, stepped) for cell in (value, value / best))]


def many_sentence(rows: Sequence[list]) -> str:
    """A sentence about the table with many layers a stage."""
    swarm, pipelines = (100 * min(row[column] for row in rows) for column in (3, 5))
    return (
        f"\nThe paper: about linear. Stochastic wiring reaches at least {swarm:.1f} % of the best case, 1F1B at least "
        f"{pipelines:.1f} %. The network hardly counts here, so this table could not have come out otherwise.\n"
    )


def single_sentence(single: dict[tuple[str, int], list[Interval]]) -> str:
    """A sentence about the table with one layer a stage."""
    told = []
    for (system, a_peer), values in single.items():
        growth = SINGLE_PEERS[-1] / SINGLE_PEERS[0] * values[-1].mean / values[0].mean
        least = 100 * min(value.mean for value in values)
        told.append(f"{system} with {a_peer} a peer reaches at least {least:.1f} % and grows {growth:.2f}-fold")
    few, many = SINGLE_PEERS[0], SINGLE_PEERS[-1]
    return f"\nFrom {few} to {many} peers, {many // few} times as many: {'; '.join(told)}.\n"


def reason(results: Results) -> str:
    """A sentence about the reasons why stochastic wiring falls short: its throughput after each of some changes."""
    told = ", ".join(f"{shares(machines, results)} {name}" for name, machines in probes().items())
    return (
        f"One layer a stage, {PROBED} peers, stochastic wiring with {FOUR} in flight a peer, parts of the best case: "
        f"{told}."
    )


def draw(path: Path, many: list[list], single: dict[tuple[str, int], list[Interval]]) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, column, style in (("best case", 1, "k--"), ("swarm", 2, "o-"), ("swarm, averaging", 6, "s-")):
        left.plot(PEERS, [row[column] for row in many], style, label=label)
    left.set(yscale="log", ylabel="sequences per second", title=f"{MANY_LAYERS} layers a stage")
    for (system, a_peer), values in single.items():
        style = "o-" if system == SWARM else "s:"
        label = f"{system}, {a_peer} in flight a peer"
        right.errorbar(SINGLE_PEERS, [v.mean for v in values], [v.half for v in values], fmt=style, ms=4, label=label)
    right.set(ylabel="part of the best case", ylim=(0, 1.05), title="one layer a stage")
    for ax, peers in ((left, PEERS), (right, SINGLE_PEERS)):
        ax.set(xscale="log", xlabel="T4 peers")
        ax.set_xticks(peers, [str(n) for n in peers])
        ax.xaxis.minorticks_off()
        ax.legend(fontsize=8)
    figure.savefig(path, dpi=80)


MANY_HEAD = ["peers", "best case", "swarm", "of best", "1F1B, as many in flight", "of best"]
MANY_HEAD += [f"swarm, steps of {BATCH} with averaging and commit", "of best"]
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
        f"{STAGES} stages of {MANY_LAYERS} layers with one shared GeGLU block each, as in the published server code, "
        f"width {WIDTH}; 8-bit boundaries in blocks of 4096; microbatches of one sequence. The paper's own runs have 3 "
        "stages of one block applied 16 times (Sec. 4.3); the stages of this figure are not printed.",
        "Compute to wire: the seconds of a stage's computation over those for which a line carries the activation and "
        "the gradient that a peer sends. One layer a stage is the same fleet with a network that counts.",
        f"{1e3 * GBPS:g} Mb/s each way on each peer's line, shared by all its traffic; {1e3 * LATENCY_S:g} ms one way "
        "between all peers.",
        f"A step is linear in its microbatches: {SHORT} and {LONG} a pipeline are simulated. One router. {FOUR} "
        "microbatches a peer are in flight unless another number is given.",
        f"One layer a stage: seeds {SEEDS.start} to {SEEDS.stop - 1} of the router's ties; +- is half the width of a "
        "95 % interval (Student's t), left out where it would not show. The other table is of seed 0.",
    )
