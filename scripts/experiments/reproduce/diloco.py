"""DiLoCo (Douillard et al. 2023) on a small GPT: held-out loss against tokens and against bytes, for H local steps."""

import re
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from experiments.page import ROOT, centred
from experiments.reproduce.results import Job, Results, described
from matplotlib.figure import Figure

from jaxdt.api.config import load_config
from jaxdt.run import config as configs
from jaxdt.run.config import GroupsConfig, RunConfig
from jaxdt.run.sizes import sync_groups

CONFIG = ROOT / "configs/reference_2000.py"
STATES = ROOT / "runs/diloco"  # where runs go on that were stopped
VOCAB_SIZE = 256  # bytes
N_STEPS = 2000
OUTER = GroupsConfig(match="all", outer="nesterov", outer_lr=0.7, outer_momentum=0.9)
H_50, H_200 = "DiLoCo, H = 50", "DiLoCo, H = 200"
H_50_LOWER = "DiLoCo, H = 50, outer momentum 0.5"
ALL_REDUCE = "all-reduce, H = 1"
RULES: dict[str, GroupsConfig | None] = {
    ALL_REDUCE: None,
    "DiLoCo, H = 10": replace(OUTER, every_steps=10),
    H_50: replace(OUTER, every_steps=50),
    H_200: replace(OUTER, every_steps=200),
    H_50_LOWER: replace(OUTER, every_steps=50, outer_momentum=0.5),
    "local SGD, H = 50": GroupsConfig(match="all", every_steps=50),
    "streaming, H = 50": replace(OUTER, every_steps=50, fragments=2, lag_steps=2, mix_frac=0.5),
}
SEEDS = (0, 1, 2)
GAP_MAX = 0.05  # nats per byte at H = 50
EVALUATED = range(200, N_STEPS + 1, 200)  # as the config says
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Training:
    """A run of the reference config by one of RULES."""

    rule: str
    seed: int

    @property
    def groups(self) -> GroupsConfig | None:
        return RULES[self.rule]

    def job(self) -> Job:
        """The training. Its values: the held-out loss after each of eval_steps(), then the mean training loss of the
        steps before each."""
        return Job(self.inputs, 1 << 40, partial(values_of, self))

    @property
    def inputs(self) -> str:
        config = config_of(self)
        samples = f"{config.plan.microbatches} x {config.train.microbatch_size} samples"
        rule = described(self.groups) if self.groups else "all-reduce"
        return f"{described(config.model)} {described(config.optim)} {samples} {rule} seed={self.seed} steps={N_STEPS}"


def config_of(training: Training) -> RunConfig:
    """The reference config with the seed of a run."""
    config = configs.parse(load_config(CONFIG).to_dict(), VOCAB_SIZE)
    return replace(config, train=replace(config.train, seed=training.seed))


def values_of(training: Training) -> list[float]:
    """Train, or go on with a training that was stopped."""
    from experiments.reproduce.training.local_steps import LocalSteps, StateFile
    from experiments.reproduce.training.whole_model import Samples, WholeModel, compute_on_one_core

    from jaxdt.cli.run_inputs import token_file

    compute_on_one_core()
    config = config_of(training)
    plan = configs.default_plan(config)
    name = re.sub("[^a-z0-9]+", "_", f"{training.rule} seed {training.seed}".lower())
    file = StateFile(STATES / f"{name}.npz", training.inputs)
    samples = Samples(config, plan, token_file(config.data.path))
    progress = LocalSteps(config, training.groups, WholeModel(config, plan), samples, file).run(N_STEPS)
    every = config.train.eval_every_steps
    means = [statistics.fmean(progress.losses[n - every : n]) for n, _ in progress.held_out]
    return [loss for _, loss in progress.held_out] + means


# -------------------------------------------------------------------------------------------------------------- page


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    results.fill(Training(rule, seed).job() for rule in RULES for seed in SEEDS)
    curves = {rule: curves_of(rule, results) for rule in RULES}
    return dict(pictures={"diloco.png": draw(curves)}, curves=curves, ROOT=ROOT)


Curves = dict[str, dict[int, list[float]]]  # held-out losses after EVALUATED steps, by rule and seed


def curves_of(rule: str, results: Results) -> dict[int, list[float]]:
    return {seed: results.get(Training(rule, seed).job())[: len(EVALUATED)] for seed in SEEDS}


def gaps(rule: str, curves: Curves) -> list[float]:
    """Held-out loss at the end less that of all-reduce, for the seeds that both have."""
    other = curves[ALL_REDUCE]
    return [curve[-1] - other[seed][-1] for seed, curve in curves[rule].items() if seed in other]


def targets(curves: Curves) -> list[list]:
    rows = []
    for rule in (rule for rule in curves if rule != ALL_REDUCE):
        found = gaps(rule, curves)
        target, met = ("as found", "-")
        if rule in (H_50, H_50_LOWER):
            target, met = f"at most {GAP_MAX:g}", "yes" if statistics.fmean(found) <= GAP_MAX else "NO"
        rows.append([f"{rule}: loss after {N_STEPS:,} steps less all-reduce's", target, centred(found, "+.4f"), met])
    return rows


def losses(curves: Curves) -> list[list]:
    shown = [n for n, steps in enumerate(EVALUATED) if steps in (200, 600, 1000, 2000)]
    rows = []
    for rule, runs in curves.items():
        cells = [f"{statistics.fmean(run[n] for run in runs.values()):.3f}" for n in shown]
        cells += [centred(gaps(rule, curves), "+.4f"), f"{exchanged_bytes(rule, N_STEPS) / 1e6:.1f}"]
        rows.append([rule, len(runs), *cells])

    return rows


def exchanged_bytes(rule: str, n_steps: int) -> int:
    """The bytes that the replicas of all stages send one another in n_steps: an exchange sends each number to its owner
    and its sum back, from or to every replica but the owner. Fragments send as much, one part after the other."""
    config, groups = config_of(Training(rule, 0)), RULES[rule]
    plan = configs.default_plan(config)
    n_numbers = sum(group.n_elements for group in sync_groups(config, plan))
    return 2 * (plan.n_pipelines - 1) * FLOAT_BYTES * n_numbers * (n_steps // (groups.every_steps if groups else 1))


def draw(curves: Curves) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    config = config_of(Training(ALL_REDUCE, 0))
    step_tokens = config.plan.microbatches * config.microbatch_shape.n_tokens
    for i, (rule, runs) in enumerate(curves.items()):
        for run in runs.values():
            label = rule if run is next(iter(runs.values())) else None
            left.plot([n * step_tokens / 1e6 for n in EVALUATED], run, f"C{i}", lw=1, label=label)
            right.plot([exchanged_bytes(rule, n) / 1e6 for n in EVALUATED], run, f"C{i}", lw=1)
    left.set(xlabel="tokens, millions", ylabel="held-out loss, nats per byte")
    right.set(xlabel="MB between replicas", xscale="log")
    left.legend()
    return figure
