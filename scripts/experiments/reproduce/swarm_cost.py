"""SWARM's Table 9: hours and price of reliable data-parallel GPUs and of preemptible ones, in simulation."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.reproduce.counts import HOUR_S, SMALLEST, Rules, replay
from experiments.reproduce.page import bullets, page, table
from experiments.reproduce.square_cube import FLOPS
from experiments.reproduce.swarm_fleet import Fleet
from experiments.reproduce.swarm_rebalancing import OWN, TRACES, Recorded, read
from matplotlib.figure import Figure

from jaxdt.sim.faults import CRASH, Fault
from jaxdt.spec.config import NetConfig
from jaxdt.spec.model import GPTConfig

PEERS, STAGES = 8, 4
LAYERS, WIDTH, SEQ_LEN, BATCH = 24, 1024, 512, 4096  # ALBERT-Large
GBPS, LATENCY_S = 0.5, 0.005
HOURS, PAPER_HOURS = 175.4, 192.6  # Table 9: reliable and preemptible
PAPER_USD = (7.834, 5.383)  # an hour of 8 of them
SHORT, LONG = 64, 128  # microbatches a pipeline that are simulated; a step is linear in them from there on
CRASHES = (0.1, 0.3, 0.5, 0.7, 0.9)  # parts of a step after which a peer is lost
PERIOD_S = 300.0
SEEDS = range(10)
SECOND_STEP = 1


@dataclass(frozen=True)
class Steps:
    """Seconds of a whole step.

    parallel_s: with 8 data-parallel GPUs.
    pairs_s, singles_s: with stages, of which the smallest has 2 peers, or 1 peer.
    loss_s: additional seconds when a peer is lost, mean over the moments of the loss.
    """

    parallel_s: float
    pairs_s: float
    singles_s: float
    loss_s: float


def sample_s() -> float:
    """Seconds of a sequence on one GPU: forward, recomputation and backward."""
    block = GPTConfig(1, WIDTH, 1, 4 * WIDTH, SEQ_LEN, 1).block_params
    return LAYERS * 8.0 * block * SEQ_LEN / FLOPS


def fleet(n_stages: int, n_pipelines: int, wiring: str) -> Fleet:
    return Fleet(
        n_stages=n_stages,
        n_pipelines=n_pipelines,
        d_model=WIDTH,
        n_sequences=1,
        codec="none",
        compute_s=sample_s() / n_stages,
        latency_s=LATENCY_S,
        gbps=GBPS,
        wiring=wiring,
        synced=True,
        seq_len=SEQ_LEN,
        n_layers=STAGES,
    )


def linear(short: float, long: float, share: float) -> float:
    """The value at `share` microbatches a pipeline, from the values at SHORT and at LONG."""
    return long + (share - LONG) * (long - short) / (LONG - SHORT)


def step_s(machines: Fleet) -> float:
    """Seconds of a step of BATCH sequences."""
    return linear(machines.step_s(SHORT), machines.step_s(LONG), BATCH / machines.n_pipelines)


def loss_s(share: int) -> float:
    """Additional seconds of a step with pairs in which one peer is lost, compared with a step that has pairs before the
    moment of the loss and a stage of one peer after it."""
    pairs = fleet(STAGES, 2, "swarm")
    net = NetConfig()
    calm_s = pairs.seconds(share, net=net)
    alone_s = fleet(STAGES, 1, "swarm").step_s(2 * share)
    extra = []
    for part in CRASHES:
        at_s = calm_s[0] + part * calm_s[SECOND_STEP]
        stormy_s = pairs.seconds(share, [Fault(at_s, CRASH, 1)], net)[SECOND_STEP]
        extra.append(stormy_s - part * calm_s[SECOND_STEP] - (1 - part) * alone_s)
    return statistics.fmean(extra)


def simulated() -> Steps:
    return Steps(
        step_s(fleet(1, PEERS, "fixed")),
        step_s(fleet(STAGES, 2, "swarm")),
        step_s(fleet(STAGES, 1, "swarm")),
        linear(loss_s(SHORT), loss_s(LONG), BATCH / 2),
    )


@dataclass(frozen=True)
class Market:
    """Eight machines with the availability of a trace. `present`: the mean number of machines that are there. `share`:
    the parts of the time in which the smallest stage has 0, 1 and 2 peers."""

    name: str
    present: float
    losses_an_hour: float
    share: tuple[float, float, float]

    def speed(self, steps: Steps) -> float:
        """Steps per second."""
        plain = self.share[1] / steps.singles_s + self.share[2] / steps.pairs_s
        return plain / (1.0 + self.losses_an_hour / HOUR_S * steps.loss_s)


def market(trace: Recorded) -> Market:
    """The market of a trace. Its largest number of machines stands for eight; the losses per machine and hour are those
    of the trace."""
    most = max(n for _, n in trace.counts)
    scaled = replace(trace, counts=tuple((t_s, round(PEERS * n / most)) for t_s, n in trace.counts))
    ends = [t_s for t_s, _ in trace.counts[1:]] + [trace.end_s]
    spans = [end - t_s for (t_s, _), end in zip(trace.counts, ends, strict=True)]
    node_hours = sum(s * n for s, (_, n) in zip(spans, trace.counts, strict=True)) / HOUR_S
    leaves = sum(max(0, a - b) for (_, a), (_, b) in zip(trace.counts, trace.counts[1:], strict=False))
    rules = Rules(STAGES, PERIOD_S, SMALLEST, least=PEERS // STAGES)
    seconds = [0.0, 0.0, 0.0]
    began_s = 0.0
    for seed in SEEDS:
        run = replay(scaled.counts, scaled.end_s, 1, rules, seed)
        for n, t_s, end in zip(run.throughput, run.t_s, (*run.t_s[1:], run.end_s), strict=True):
            seconds[n] += end - t_s
        began_s = run.began_s  # the same for all seeds
    present_s = sum(s * n for s, (t_s, n) in zip(spans, scaled.counts, strict=True) if t_s >= began_s)
    present = present_s / (trace.end_s - began_s)
    total = sum(seconds)
    return Market(trace.name, present, present * leaves / node_hours, tuple(s / total for s in seconds))


def run(
    out: Path,
    command: str,
    traces: Sequence[str] = (),
    reliable_usd: float = PAPER_USD[0],
    spot_usd: float = PAPER_USD[1],
) -> str:
    """The text of the page. The picture is written to `out`. Prices are those of an hour of 8 GPUs."""
    steps = simulated()
    markets = [market(read(Path(path))) for path in traces or [TRACES / f"{name}.json" for name in OWN]]
    hours = {place.name: HOURS / (place.speed(steps) * steps.parallel_s) for place in markets}
    calm = HOURS * steps.pairs_s / steps.parallel_s
    rows = [
        ["8 reliable, data parallel", HOURS, HOURS, 1.0, reliable_usd, HOURS * reliable_usd, HOURS * PAPER_USD[0]],
        ["8 preemptible that all stay, SWARM", "", calm, calm / HOURS, spot_usd, calm * spot_usd, ""],
    ]
    for place in markets:
        h = hours[place.name]
        price = spot_usd * place.present / PEERS
        rows.append([f"8 preemptible, SWARM, {place.name}", PAPER_HOURS, h, h / HOURS, price, h * price, 1037.0])
    draw(out / "swarm_cost.png", rows)
    losses = [
        [place.name, place.present, place.losses_an_hour, *(100 * share for share in place.share), steps.loss_s]
        for place in markets
    ]
    return page(
        "SWARM Table 9: hours and price of preemptible GPUs (grade C: context)",
        command,
        [
            ("Hours and price", "![hours and price](swarm_cost.png)\n\n" + table(HEAD, rows)),
            ("What the machines of the traces do, for eight of them", table(MARKET_HEAD, losses)),
            (
                "Seconds of a step of 4096 sequences, simulated",
                table(
                    ["8 data parallel", "4 stages of 2", "4 stages, the smallest with 1"],
                    [[steps.parallel_s, steps.pairs_s, steps.singles_s]],
                ),
            ),
            ("Where ours differs, and why", bullets(WHY)),
            ("Assumptions", bullets(assumptions())),
            ("Not modelled", bullets(NOT_MODELLED)),
        ],
    )


def draw(path: Path, rows: list[list]) -> None:
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    names = [row[0] for row in rows]
    for ax, column, paper, title in ((axes[0], 2, 1, "hours"), (axes[1], 5, 6, "US dollars")):
        ax.barh(names, [row[column] for row in rows], color="C0", label="ours")
        known = [(row[0], row[paper]) for row in rows if row[paper] != ""]
        ax.plot([value for _, value in known], [name for name, _ in known], "ko", label="paper")
        ax.set(title=title)
        ax.tick_params(axis="y", labelsize=7)
    axes[0].invert_yaxis()
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=80)


HEAD = ["machines", "hours, paper", "hours, ours", "of the reliable", "USD an hour", "USD", "USD, paper"]
MARKET_HEAD = [
    "trace",
    "there, of 8",
    "losses an hour",
    "smallest stage empty, % of time",
    "smallest stage 1",
    "smallest stage 2",
    "s lost by a loss",
]
WHY = (
    f"The reliable run's {HOURS} hours are the paper's: how many steps ALBERT needs is not stated, so only the ratio "
    "is ours. The paper's curves agree by step (Fig. 8), so both runs have as many steps here.",
    "The paper's ratio is 1.098, with machines whose availability it does not print. With eight machines in four "
    "stages, one that is missing halves a stage and with it the run, so the ratio is the market's: the first of these "
    "traces gives about the paper's; in the second and third one machine of eight and one of four are missing on "
    "average, and that costs so many hours more that most of what the lower price saves is gone, or all of it.",
    "The paper pays for eight machines all the time; here only those are paid that are there.",
)
NOT_MODELLED = (
    "That a market which has fewer machines than at its best may still have eight; who leaves and comes at the same "
    "moment (losses are counted by the changes of the numbers). A stage without machines counts as standing still.",
    "LAMB and embeddings; attention scores in the FLOP; the seconds of a checkpoint; 32 T4 (Table 9's third row).",
    "The time that a move or a newcomer takes; its download is beside the computation.",
)


def assumptions() -> tuple[str, ...]:
    return (
        f"{FLOPS / 1e12:g} TFLOP/s for a V100, as fitted in square_cube: {sample_s():.3f} s for a sequence of "
        f"{SEQ_LEN} tokens through {LAYERS} layers of width {WIDTH} with recomputation. Microbatches of one sequence, "
        "fp16 boundaries, four layer groups with parameters of their own (one a stage).",
        f"{1e3 * GBPS:g} Mb/s each way on each machine's line, {1e3 * LATENCY_S:g} ms one way; averaging and commit "
        "at the end of every step.",
        f"A step is linear in its microbatches: {SHORT} and {LONG} a pipeline are simulated. So is the cost of a loss: "
        f"the mean over losses after {', '.join(f'{part:g}' for part in CRASHES)} of a step.",
        f"A trace's largest number of machines stands for eight, the others are scaled and rounded; rebalancing every "
        f"{PERIOD_S:g} s, who joins takes the smallest stage; mean of 10 seeds.",
    )
