"""A run of a plan under faults, beside the same run without: what it costs to lose peers, wait for links, and redo.

Timing alone, as in predict.py, but with the config's own heartbeats and deadlines, since these decide when a peer is
taken for lost.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxdt.core.config import RunConfig
from jaxdt.core.events import COORDINATOR
from jaxdt.sim.cluster import Outcome
from jaxdt.sim.faults import Fault
from jaxdt.sim.predict import simulate
from jaxdt.sim.scenario import Scenario

PATIENCE = 20.0  # times the undisturbed run's seconds, and as many seconds on top


def plain_config(scenario: Scenario, n_steps: int) -> RunConfig:
    """n_steps steps without evaluation and without checkpoints but the last; who loses a stage stops."""
    train = replace(scenario.config.train, steps=n_steps, eval_every_steps=0, checkpoint_every_steps=0)
    wiring = replace(scenario.config.wiring, on_stage_lost="stop")
    return replace(scenario.config, train=train, wiring=wiring)


def endure(scenario: Scenario, n_steps: int, faults: Sequence[Fault] = (), calm_s: float = float("inf")) -> Outcome:
    """What comes of it; given up after PATIENCE times calm_s."""
    until_s = PATIENCE * (calm_s + 1.0)
    config = plain_config(scenario, n_steps)
    return simulate(config, scenario.plan, scenario.conditions(), faults=faults, until_s=until_s)


def summary(calm: Outcome, stormy: Outcome) -> list[str]:
    """Lines for people: how long the steps took, who was lost, and how it ended."""
    steps = zip(calm.fields("step"), stormy.fields("step"), strict=False)
    lines = [f"step {s['step']:<4} {s['step_s']:10.3f} s   without faults {c['step_s']:.3f} s" for c, s in steps]
    lines += [
        f"{now_s:.3f} s: {report.fields['reason']}" for now_s, _, report in stormy.reports if report.kind == "lost"
    ]
    stop = stormy.stopped.get(COORDINATOR)
    end = f"code {stop.code}, {stop.reason}" if stop else "not over"
    return [*lines, f"after {stormy.now_s:.3f} s (without faults {calm.now_s:.3f} s): {end}"]
