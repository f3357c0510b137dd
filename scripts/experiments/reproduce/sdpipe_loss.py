"""Held-out loss of a small GPT over simulated seconds: the bare event simulation says who averages when, and a trainer
in one process does the arithmetic of its log."""

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.page import centred
from experiments.reproduce.results import Job, Results, described
from experiments.reproduce.sdpipe_systems import (
    ALL,
    ENDLESS,
    FIRST_COME,
    HETPIPE,
    N_MICROBATCHES,
    NONE,
    PAIRS,
    PREDUCE,
    SDPIPE,
    SDPIPE_4N,
    Pipelines,
    gain,
)
from matplotlib.figure import Figure

from jaxdt.run import config as configs
from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.optim import OptimConfig

if TYPE_CHECKING:
    from experiments.reproduce.training.timed_run import Trained
    from experiments.reproduce.training.whole_model import WholeModel

SEEDS = range(5)
N_PIPELINES, N_STAGES = 8, 4
EVERY_S, N_EVALUATIONS = 3.0, 20
AT = 15  # the evaluation at which all-reduce's mean loss is the one to reach
N_STEPS_MAX = 280  # more than any pipeline does in the simulated time
MODEL = dict(preset="debug", n_layers=4, d_model=32, n_heads=2, d_ff=128, max_len=32, vocab_size=256, tied_head=False)
OPTIM = OptimConfig("adamw", lr=6e-3, b2=0.99, weight_decay=0.1, clip_norm=1.0, warmup_steps=20)
SAMPLES_A_STEP = 8  # of a pipeline
SYSTEMS = (ALL, PAIRS, SDPIPE, SDPIPE_4N, FIRST_COME, PREDUCE, HETPIPE, NONE)
SERVER_LR_PARTS = (64, 32, 16, N_PIPELINES, 4)  # HetPipe's lr is the others' over one of these
MANY_GROUPS = (2, 5, 10, 4 * N_PIPELINES, ENDLESS)
SECOND_MOMENTS = ("own", "corrected", "legacy")


@dataclass(frozen=True)
class Trainings:
    """A system of N_PIPELINES pipelines, trained for N_EVALUATIONS * EVERY_S simulated seconds with each seed."""

    system: str
    n_groups: int | None = None
    second_moment: str = "own"
    lr_parts: int = 1

    @property
    def pipelines(self) -> Pipelines:
        return Pipelines(self.system, N_PIPELINES, n_groups=self.n_groups, n_steps=N_STEPS_MAX)

    @property
    def optim(self) -> OptimConfig:
        return replace(OPTIM, lr=OPTIM.lr / self.lr_parts, second_moment=self.second_moment)

    def job(self, seed: int) -> Job:
        """The training. Its values: the held-out loss after EVERY_S, 2 EVERY_S, ... simulated seconds, then the local
        steps of all pipelines by then."""
        inputs = f"loss {described(self.pipelines)} {described(self.optim)} {MODEL} seed={seed}"
        return Job(inputs, 1 << 30, partial(values_of, self, seed))

    def curves(self, results: Results) -> list[list[float]]:
        """Held-out losses of each seed."""
        return [results.get(self.job(seed))[:N_EVALUATIONS] for seed in SEEDS]

    def n_steps(self, results: Results) -> float:
        """Local steps of all pipelines at the end, the mean over seeds."""
        return statistics.fmean(results.get(self.job(seed))[-1] for seed in SEEDS)


def values_of(trainings: Trainings, seed: int) -> list[float]:
    from experiments.reproduce.training.whole_model import Samples

    from jaxdt.cli.run_inputs import token_file

    config = config_of(trainings.optim, seed)
    model = model_of(trainings.optim)
    samples = Samples(config, configs.default_plan(config), token_file(""))
    outcome = trainings.pipelines.outcome(seed)
    trained = trainer_of(trainings.system)(model, samples, seed, outcome)
    held_out, losses, n_steps = samples.held_out(), [], []
    for n in range(1, N_EVALUATIONS + 1):
        trained.until(n * EVERY_S)
        losses.append(model.loss(trained.snapshot, held_out))
        n_steps.append(sum(len(group.members) for at_s, group in outcome.groups[0] if at_s < n * EVERY_S))
    return [*losses, *n_steps]


def trainer_of(system: str) -> "Callable[..., Trained]":
    from experiments.reproduce.training.timed_run import TrainedAllReduce, TrainedGroups, TrainedServers

    return {ALL: TrainedAllReduce, HETPIPE: TrainedServers}.get(system, TrainedGroups)


def config_of(optim: OptimConfig, seed: int) -> RunConfig:
    """The config of a training: N_MICROBATCHES microbatches for each pipeline."""
    return configs.parse(
        dict(
            model=MODEL,
            plan=dict(stages=N_STAGES, pipelines=N_PIPELINES, microbatches=N_MICROBATCHES * N_PIPELINES),
            train=dict(seed=seed, microbatch_size=SAMPLES_A_STEP // N_MICROBATCHES, eval_microbatches=64),
            optim=serialize.write(optim),
        )
    )


@functools.cache
def model_of(optim: OptimConfig) -> "WholeModel":
    from experiments.reproduce.training.whole_model import WholeModel, compute_on_one_core

    compute_on_one_core()
    config = config_of(optim, 0)
    return WholeModel(config, configs.default_plan(config), N_PIPELINES)


# -------------------------------------------------------------------------------------------------------------- tables


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    results.fill(all_jobs())
    picture = "\n![held-out losses over simulated seconds](sdpipe_loss.png)\n\n"
    return dict(pictures={"sdpipe_loss.png": draw(results)}, picture=picture)


def all_jobs() -> list[Job]:
    """The jobs that are computed side by side."""
    trainings = [Trainings(system) for system in SYSTEMS if system != HETPIPE]
    trainings += [Trainings(HETPIPE, lr_parts=parts) for parts in SERVER_LR_PARTS]
    trainings += [Trainings(SDPIPE, n_groups) for n_groups in MANY_GROUPS]
    trainings += [Trainings(SDPIPE_4N, second_moment=name) for name in SECOND_MOMENTS]
    return [training.job(seed) for training in trainings for seed in SEEDS]


def of_system(system: str, results: Results) -> Trainings:
    """The trainings of a system; of HetPipe those with the lr of which the mean loss at the end is the lowest."""
    if system != HETPIPE:
        return Trainings(system)
    many = [Trainings(HETPIPE, lr_parts=parts) for parts in SERVER_LR_PARTS]
    return min(many, key=lambda one: statistics.fmean(curve[-1] for curve in one.curves(results)))


def loss_to_reach(results: Results) -> float:
    """All-reduce's held-out loss after AT evaluations, the mean over seeds."""
    return statistics.fmean(curve[AT - 1] for curve in Trainings(ALL).curves(results))


def seconds_until(curve: Sequence[float], reached: float) -> float:
    """Simulated seconds until a loss is reached, by lines between evaluations; inf if it is not."""
    for n, loss in enumerate(curve):
        if loss <= reached:
            before = curve[n - 1] if n else loss
            return EVERY_S * (n + (1.0 if before == loss else (before - reached) / (before - loss)))
    return float("inf")


def row_of(training: Trainings, results: Results) -> list:
    """Seconds until the loss is reached, all-reduce's over them, and the loss at the end."""
    reached = loss_to_reach(results)
    seconds = [seconds_until(curve, reached) for curve in training.curves(results)]
    barrier = [seconds_until(curve, reached) for curve in Trainings(ALL).curves(results)]
    last = [curve[-1] for curve in training.curves(results)]
    faster = statistics.fmean(barrier) / statistics.fmean(seconds)
    return [spread(seconds, ".1f"), f"{faster:.2f}" if faster else "-", spread(last, ".3f"), training.n_steps(results)]


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and the least and the largest value; how many there are, where some seeds do not reach the loss."""
    n_reached = sum(value < float("inf") for value in values)
    if n_reached < len(values):
        return f"reached with {n_reached} of {len(values)} seeds"
    return centred(values, form)


def by_system(results: Results) -> list[list]:
    return [[system, *row_of(of_system(system, results), results)] for system in SYSTEMS]


def by_groups(results: Results) -> list[list]:
    rows = []
    for n_groups in MANY_GROUPS:
        place = Pipelines(SDPIPE, N_PIPELINES, n_groups=n_groups)
        speed, suspended = gain(place, ALL, results), place.groups(results)[1]
        training = Trainings(SDPIPE, n_groups)
        rows.append([n_groups or "not enforced", speed, f"{suspended:.2f}", *row_of(training, results)])
    return rows


def by_server_lr(results: Results) -> list[list]:
    return [[parts, *row_of(Trainings(HETPIPE, lr_parts=parts), results)] for parts in SERVER_LR_PARTS]


def by_second_moment(results: Results) -> list[list]:
    return [[name, *row_of(Trainings(SDPIPE_4N, second_moment=name), results)] for name in SECOND_MOMENTS]


def sentences(results: Results) -> list[str]:
    """Sentences about the tables."""
    reached = loss_to_reach(results)
    found = {
        system: [seconds_until(curve, reached) for curve in of_system(system, results).curves(results)]
        for system in SYSTEMS
    }
    told = []
    for one, other in ((SDPIPE, ALL), (SDPIPE, PAIRS), (SDPIPE_4N, FIRST_COME), (SDPIPE, HETPIPE)):
        n_ahead = sum(a < b for a, b in zip(found[one], found[other], strict=True))
        told.append(f"{one} reaches the loss before {other} with {n_ahead} of {len(SEEDS)} seeds.")
    n_alone = sum(seconds < float("inf") for seconds in found[NONE])
    told.append(f"Without averaging, the mean of the replicas reaches it with {n_alone} of {len(SEEDS)} seeds.")
    return told


def draw(results: Results) -> Figure:
    """The mean held-out loss of each system over simulated seconds."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    seconds = [EVERY_S * (n + 1) for n in range(N_EVALUATIONS)]
    for system in SYSTEMS:
        curves = of_system(system, results).curves(results)
        axes.plot(seconds, [statistics.fmean(losses) for losses in zip(*curves, strict=True)], label=system)
    axes.axhline(loss_to_reach(results), color="black", lw=0.8, ls=":")
    axes.set(xlabel="simulated seconds", ylabel="held-out loss, nats per byte", yscale="log")
    axes.set_yticks([2.5, 3, 3.5, 4, 5], ["2.5", "3", "3.5", "4", "5"])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    return figure
