"""A run of a plan under faults, beside the same run without: what it costs to lose peers, wait for links, and redo.

Timing alone, as in predict.py, but with the config's own heartbeats and deadlines, since these decide when a peer is
taken for lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxdt.protocol.events import COORDINATOR
from jaxdt.sim.faults import JOIN, Fault
from jaxdt.sim.predict import simulate
from jaxdt.sim.scenario import Scenario
from jaxdt.sim.sim_peer import Outcome
from jaxdt.spec.config import RunConfig

PATIENCE = 20.0  # times the undisturbed run's seconds, and as many seconds on top


def plain_config(scenario: Scenario, n_steps: int, joined: bool = False) -> RunConfig:
    """n_steps steps without evaluation. Where nobody joins: without checkpoints but the last, and who loses a stage
    stops; else both as the config says."""
    config = replace(scenario.config, train=replace(scenario.config.train, steps=n_steps, eval_every_steps=0))
    if joined:
        return config
    train, wiring = replace(config.train, checkpoint_every_steps=0), replace(config.wiring, on_stage_lost="stop")
    return replace(config, train=train, wiring=wiring)


def patience_s(calm_s: float) -> float:
    """When a run is given up that takes calm_s without faults."""
    return PATIENCE * (calm_s + 1.0)


def endure(scenario: Scenario, n_steps: int, faults: Sequence[Fault] = (), calm_s: float = float("inf")) -> Outcome:
    """What comes of it; given up after patience_s."""
    config = plain_config(scenario, n_steps, any(fault.kind == JOIN for fault in faults))
    return simulate(config, scenario.plan, scenario.conditions(), faults=faults, until_s=patience_s(calm_s))


def summary(calm: Outcome, stormy: Outcome) -> list[str]:
    """Lines for people: how long the steps took, who was lost and who came, and how it ended."""
    calm_s = {fields["step"]: fields["step_s"] for fields in calm.fields("step")}
    lines = [
        f"step {s['step']:<4} {s['step_s']:10.3f} s   without faults {calm_s[s['step']]:.3f} s"
        for s in stormy.fields("step")
    ]
    for now_s, peer, report in stormy.reports:
        if report.kind in TOLD:
            lines.append(f"{now_s:.3f} s: {TOLD[report.kind](peer, report.fields)}")
    stop = stormy.stopped.get(COORDINATOR)
    end = f"code {stop.code}, {stop.reason}" if stop else "not over"
    return [*lines, f"after {_ended_s(stormy):.3f} s (without faults {_ended_s(calm):.3f} s): {end}"]


TOLD: dict[str, Callable[[int, dict], str]] = {
    "lost": lambda peer, fields: fields["reason"],
    "asked": lambda peer, fields: f"peer {fields['peer']} comes, for stage {fields['stage']}",
    "download": lambda peer, fields: (
        f"peer {peer} has the state of step {fields['version']}: {fields['bytes'] / 1e6:.3f} MB "
        f"in {fields['seconds']:.3f} s"
    ),
    "rollback": lambda peer, fields: f"back from step {fields['step']} to step {fields['to']}",
}


def _ended_s(outcome: Outcome) -> float:
    """When the coordinator ended the run; who had just come hears of it later."""
    return next((now_s for now_s, _, report in outcome.reports if report.kind == "ended"), outcome.now_s)


def records(outcome: Outcome) -> list[dict]:
    """The coordinator's reports of steps and of views in the form of a trace (jaxdt.protocol.trace)."""
    return [
        {"what": "report", "t": now_s, "peer": peer, "kind": report.kind, "fields": report.fields}
        for now_s, peer, report in outcome.reports
        if peer == COORDINATOR and report.kind in ("step", "view")
    ]
