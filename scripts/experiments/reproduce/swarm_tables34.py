"""SWARM's Tables 3 and 4: throughput of T4 and A100 fleets with shared and with own layers, in simulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.reproduce.results import Results
from experiments.reproduce.swarm_fleet import Fleet, each_s, step_at_s
from experiments.reproduce.swarm_scaling import BOUNDARY_BYTES, GBPS, LATENCY_S, SEQ_LEN, WIDTH
from matplotlib.figure import Figure

from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Link

STAGES, APPLIED = 3, 16  # Sec. 4.3: three stages of one block that is applied 16 times
T4, A100, MIXED = "T4", "A100", "T4 & A100"
GPUS = {T4: 400, A100: 56}
BEST = {3: {T4: 19.2, A100: 25.5}, 4: {T4: 19.3, A100: 25.1}}  # by table: samples/s without a network
ACTUAL = {3: {T4: 17.6, A100: 16.9, MIXED: 27.3}, 4: {T4: 8.8, A100: 8.0, MIXED: 13.4}}
BANDWIDTH_MBPS = {T4: 317.8, A100: 436.1}  # Table 3: up
A_STAGE = {T4: {T4: 44}, A100: {A100: 19}, MIXED: {A100: 6, T4: 44}}  # GPUs of a stage that are simulated
BATCHES = 16384, 4096  # of the paper's run, and of its published code
SHORT, LONG = 24, 48  # microbatches a pipeline that are simulated; a step is linear in them from there on
SYSTEMS = SWARM, ONE_F_ONE_B = ("swarm", "1F1B")
A_PEER = 4  # microbatches in flight
PAPERS_RING = 7.4 * 60 / 174  # Table 2's averaging of GPT-3 by swarm, over the bound of a ring with fp32 on 500 Mb/s
TITLES = {3: "Table 3: one shared block a stage", 4: "Table 4: 16 blocks of their own a stage"}


@dataclass(frozen=True)
class Row:
    """A fleet in one of the tables."""

    number: int
    gpus: str

    def __str__(self) -> str:
        return f"{self.gpus} of Table {self.number}"

    @property
    def n_a_stage(self) -> int:
        return sum(A_STAGE[self.gpus].values())

    def stage_s(self, gpu: str) -> float:
        """Seconds of a stage and sequence on a GPU: forward, recomputation and backward, by the table's best case."""
        return GPUS[gpu] / BEST[self.number][gpu] / STAGES

    @property
    def best(self) -> float:
        """Sequences a second of the simulated fleet without a network."""
        return sum(n / self.stage_s(gpu) for gpu, n in A_STAGE[self.gpus].items())

    @property
    def papers_best(self) -> float:
        """Sequences a second of the paper's fleet without a network; the sum of both where it has both."""
        best = BEST[self.number]
        return sum(best.values()) if self.gpus == MIXED else best[self.gpus]

    def fleet(self, system: str) -> Fleet:
        """The faster GPUs are the first pipelines. 1F1B knows all speeds: its shares go by them."""
        present = A_STAGE[self.gpus]
        fastest, *slower = present
        ratio = self.stage_s(slower[0]) / self.stage_s(fastest) if slower else 1.0
        weights = (round(1000 * ratio),) * present[fastest] + (1000,) * (self.n_a_stage - present[fastest])
        is_swarm = system == SWARM
        return Fleet(
            n_stages=STAGES,
            n_pipelines=self.n_a_stage,
            d_model=WIDTH,
            n_sequences=1,
            codec="int8-dynamic",
            compute_s=self.stage_s(fastest),
            latency_s=LATENCY_S,
            gbps=GBPS,
            wiring="swarm" if is_swarm else "fixed",
            window=A_PEER * STAGES * self.n_a_stage if is_swarm else 0,
            synced=True,
            seq_len=SEQ_LEN,
            activation="geglu",
            n_layers=STAGES if self.number == 3 else STAGES * APPLIED,
            depth=1 if is_swarm else A_PEER,
            slow=range(STAGES * present[fastest], STAGES * self.n_a_stage) if slower else (),
            slowdown=ratio,
            weights=weights if slower and not is_swarm else (),
        )

    def each_s(self, system: str, results: Results) -> float:
        """Seconds of one more microbatch a pipeline."""
        return each_s(self.fleet(system), SHORT, LONG, results)

    def of_best(self, system: str, results: Results, batch: int | None = None) -> float:
        """Sequences per second as a part of the best case: of steps of `batch` sequences with averaging at the end, or
        without it."""
        each = self.each_s(system, results)
        if batch is None:
            return self.n_a_stage / each / self.best
        share = batch / (self.papers_best / self.best) / self.n_a_stage  # of a batch, as much as of the paper's fleet
        return share * self.n_a_stage / step_at_s(self.fleet(system), share, SHORT, LONG, results) / self.best

    def with_papers_averaging(self, system: str, results: Results) -> float:
        """The same for BATCHES[0], with an averaging as slow as the paper's instead of the simulated one."""
        share = BATCHES[0] / (self.papers_best / self.best) / self.n_a_stage
        seconds = share * self.each_s(system, results) + PAPERS_RING * self.ring_s
        return share * self.n_a_stage / seconds / self.best

    @property
    def ring_s(self) -> float:
        """The bound of averaging a stage's parameters in fp32: 2 (n - 1) / n times their bytes on a line."""
        n_blocks = 1 if self.number == 3 else APPLIED
        block = GPTConfig(1, WIDTH, 1, 4 * WIDTH, SEQ_LEN, 1, activation="geglu").facts.layers[0].n_params
        return 2 * (self.n_a_stage - 1) / self.n_a_stage * Link(0.0, GBPS).occupied_s(4 * n_blocks * block)


ROWS = {number: [Row(number, gpus) for gpus in A_STAGE] for number in TITLES}


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    every = [row for rows in ROWS.values() for row in rows]
    results.fill(row.fleet(system).job(share) for row in every for system in SYSTEMS for share in (SHORT, LONG))
    return dict(
        pictures={"swarm_tables34.png": draw(results)},
        **order(results),
        **first_rows(),
        **told_bandwidths(),
        GBPS=GBPS,
        LATENCY_S=LATENCY_S,
        SEQ_LEN=SEQ_LEN,
        WIDTH=WIDTH,
    )


def papers(row: Row) -> float:
    """The paper's part of the best case."""
    return ACTUAL[row.number][row.gpus] / row.papers_best


def table(number: int, results: Results) -> list[list]:
    return [cells(row, results) for row in ROWS[number]]


def cells(row: Row, results: Results) -> list:
    ours = [row.of_best(system, results, batch) for system in SYSTEMS for batch in (None, *BATCHES)]
    slow = [row.with_papers_averaging(SWARM, results)]
    return [row.gpus, row.papers_best, ACTUAL[row.number][row.gpus], *(f"{x:.3f}" for x in (papers(row), *ours, *slow))]


def together(number: int, results: Results) -> str:
    """Both kinds of GPU together against the sum of each alone."""
    alone, mixed = ROWS[number][:2], ROWS[number][2]
    paper = ACTUAL[number][MIXED] / sum(ACTUAL[number][row.gpus] for row in alone)
    told = []
    for system in SYSTEMS:
        parts = sum(row.of_best(system, results, BATCHES[0]) * row.papers_best for row in alone)
        told.append(f"{mixed.of_best(system, results, BATCHES[0]) * mixed.papers_best / parts:.3f} with {system}")
    return (
        f"Both kinds together reach {paper:.3f} of the sum of each alone in the paper; ours, in steps of "
        f"{BATCHES[0]}: {', '.join(told)}."
    )


def order(results: Results) -> dict[str, Any]:
    """Whether the fleets stand in the paper's order."""
    every = [row for rows in ROWS.values() for row in rows]
    paper = sorted(every, key=papers, reverse=True)
    told = []
    for what, value in (
        ("Simulated", lambda row: row.of_best(SWARM, results, BATCHES[0])),
        ("With the paper's averaging", lambda row: row.with_papers_averaging(SWARM, results)),
    ):
        ours = sorted(every, key=value, reverse=True)
        worst = max(abs(value(row) / papers(row) - 1) for row in every)
        is_it = "the paper's" if ours == paper else ", ".join(map(str, ours))
        told.append(f"{what} it is {is_it}; parts differ by up to {100 * worst:.0f} %.")
    return dict(paper=paper, order_told=told)


def first_rows() -> dict[str, Any]:
    """The first fleet of each table, whose times of averaging are compared."""
    shared, own = (rows[0] for rows in ROWS.values())
    return dict(own=own, shared=shared)


def told_bandwidths() -> dict[str, Any]:
    """The bandwidth that the peers of Table 3 need, by our arithmetic, and as printed."""
    told = []
    for gpu, papers_mbps in BANDWIDTH_MBPS.items():
        a_second = ACTUAL[3][gpu] * STAGES / GPUS[gpu]
        sent = 2 * (STAGES - 1) / STAGES * BOUNDARY_BYTES  # of a sequence, in the mean over stages
        told.append(f"{8e-6 * sent * a_second:.1f} Mb/s for each {gpu} (printed: {papers_mbps:g})")
    return dict(told_mbps=told)


def draw(results: Results) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for ax, (number, title) in zip(figure.subplots(1, 2, sharey=True), TITLES.items(), strict=True):
        rows = ROWS[number]
        bars: dict[str, Sequence[float]] = {
            "paper": [papers(row) for row in rows],
            f"swarm, steps of {BATCHES[0]}": [row.of_best(SWARM, results, BATCHES[0]) for row in rows],
            f"1F1B, steps of {BATCHES[0]}": [row.of_best(ONE_F_ONE_B, results, BATCHES[0]) for row in rows],
            "swarm, with the paper's averaging": [row.with_papers_averaging(SWARM, results) for row in rows],
        }
        for index, (label, values) in enumerate(bars.items()):
            at = [i + 0.2 * (index - 1.5) for i in range(len(rows))]
            ax.bar(at, values, 0.18, label=label, color="k" if index == 0 else f"C{index - 1}")
        ax.set_xticks(range(len(rows)), [row.gpus for row in rows])
        ax.set(title=title, ylim=(0, 1.05))
    figure.axes[0].set(ylabel="part of the best case")
    figure.axes[1].legend(fontsize=8)
    return figure


def sizes() -> str:
    return "; ".join(
        f"{gpus}: {', '.join(f'{n} {gpu}' for gpu, n in present.items())}" for gpus, present in A_STAGE.items()
    )
