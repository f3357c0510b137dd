"""SWARM's Figure 7: throughput of stochastic wiring from 8 to 128 T4, with and without a network that counts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.page import bars
from experiments.reproduce.results import Results
from experiments.reproduce.swarm_fleet import Fleet, each_s, step_at_s
from matplotlib.figure import Figure

from jaxdt.run.codec import BF16_BYTES, parse, wire_bytes
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
CODEC = "int8-dynamic"
UNLIMITED_GBPS = 1e6
BOUNDARY_BYTES = wire_bytes(parse(CODEC), SEQ_LEN * WIDTH, BF16_BYTES)
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
    return layers * layer_s() / (2 * Link(0.0, GBPS).occupied_s(BOUNDARY_BYTES))


def fleet(n_peers: int, layers: int, system: str, a_peer: int = FOUR, seed: int = 0) -> Fleet:
    """`layers`: of a stage. `a_peer`: microbatches in flight for each peer. `seed`: of the router's ties."""
    machines = Fleet(
        n_stages=STAGES,
        n_pipelines=n_peers // STAGES,
        d_model=WIDTH,
        n_sequences=1,
        codec=CODEC,
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
    if batch is None:
        return machines.n_pipelines / each_s(machines, SHORT, LONG, results)
    return batch / step_at_s(machines, batch / machines.n_pipelines, SHORT, LONG, results)


def shares(machines: Sequence[Fleet], results: Results) -> Interval:
    """Sequences per second as a part of the best case. The fleets differ by their seeds."""
    best = best_samples_per_s(machines[0].n_pipelines * STAGES, ONE_LAYER)
    return interval(samples_per_s(fleet, results) / best for fleet in machines)


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
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
    pictures = {"swarm_scaling.png": draw(many, single)}
    return dict(pictures=pictures, many=many, rows=rows, **least_of_many(many), **growth_of_single(single), SEEDS=SEEDS)


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


def least_of_many(rows: Sequence[list]) -> dict[str, Any]:
    """The least parts of the best case, with many layers a stage, in percent."""
    swarm, pipelines = (100 * min(row[column] for row in rows) for column in (3, 5))
    return dict(least_of_many_pipelines=pipelines, least_of_many_swarm=swarm)


def growth_of_single(single: dict[tuple[str, int], list[Interval]]) -> dict[str, Any]:
    """How each system grows with one layer a stage."""
    told = []
    for (system, a_peer), values in single.items():
        growth = SINGLE_PEERS[-1] / SINGLE_PEERS[0] * values[-1].mean / values[0].mean
        least = 100 * min(value.mean for value in values)
        told.append(f"{system} with {a_peer} a peer reaches at least {least:.1f} % and grows {growth:.2f}-fold")
    few, many = SINGLE_PEERS[0], SINGLE_PEERS[-1]
    return dict(growth_of_single_few=few, growth_of_single_many=many, growth_of_single_told=told)


def reason(results: Results) -> str:
    """Why stochastic wiring falls short: its throughput after each of some changes."""
    return ", ".join(f"{shares(machines, results)} {name}" for name, machines in probes().items())


def draw(many: list[list], single: dict[tuple[str, int], list[Interval]]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, column, style in (("best case", 1, "k--"), ("swarm", 2, "o-"), ("swarm, averaging", 6, "s-")):
        left.plot(PEERS, [row[column] for row in many], style, label=label)
    left.set(yscale="log", ylabel="sequences per second", title=f"{MANY_LAYERS} layers a stage")
    for (system, a_peer), values in single.items():
        style = "o-" if system == SWARM else "s:"
        label = f"{system}, {a_peer} in flight a peer"
        right.errorbar(SINGLE_PEERS, *bars(values), fmt=style, ms=4, label=label)
    right.set(ylabel="part of the best case", ylim=(0, 1.05), title="one layer a stage")
    for ax, peers in ((left, PEERS), (right, SINGLE_PEERS)):
        ax.set(xscale="log", xlabel="T4 peers")
        ax.set_xticks(peers, [str(n) for n in peers])
        ax.xaxis.minorticks_off()
        ax.legend(fontsize=8)
    return figure
