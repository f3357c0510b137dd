"""A run of a plan under faults beside the same run without: the cost of lost peers, slow links and repeated Work.

Timing alone, as in predict.py, but with the heartbeats and deadlines of the config, since these decide when a peer is
taken for lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import StepReport
from jaxdt.run.config import RunConfig
from jaxdt.sim.faults import CLOG, CRASH, CUT, DUPLICATE, JOIN, PAUSE, POWER_OFF, REORDER, SLOW, Fault
from jaxdt.sim.predict import predict_step_s, simulate
from jaxdt.sim.scenario import Scenario
from jaxdt.sim.sim_peer import Outcome

PATIENCE = 20.0  # times the undisturbed run's seconds, and as many seconds on top


def plain_config(scenario: Scenario, n_steps: int, has_joiners: bool = False) -> RunConfig:
    """The config for n_steps steps without evaluation. Without joiners only the last checkpoint is written, and a run
    that loses a stage stops; with joiners both are as the config says."""
    config = replace(scenario.config, train=replace(scenario.config.train, steps=n_steps, eval_every_steps=0))
    if has_joiners:
        return config
    train = replace(config.train, checkpoint_every_steps=0)
    wiring = replace(config.wiring, on_stage_lost="stop")
    return replace(config, train=train, wiring=wiring)


def time_limit_s(undisturbed_s: float) -> float:
    """The time at which a run under faults is given up, if it takes undisturbed_s without faults."""
    return PATIENCE * (undisturbed_s + 1.0)


def check_heartbeats(scenario: Scenario, n_steps: int) -> None:
    """BadInput for n_steps steps that take so long that their heartbeats take too long to simulate."""
    scenario.check_length(n_steps)
    step_s = predict_step_s(scenario.quiet(1), scenario.plan, scenario.conditions())
    scenario.check_length(n_steps, n_steps * step_s / scenario.config.net.heartbeat_s * len(scenario.peers))


def run_with_faults(
    scenario: Scenario, n_steps: int, faults: Sequence[Fault] = (), undisturbed_s: float = float("inf")
) -> Outcome:
    """The outcome of n_steps steps under faults, given up after time_limit_s(undisturbed_s)."""
    config = plain_config(scenario, n_steps, any(fault.kind == JOIN for fault in faults))
    until_s = time_limit_s(undisturbed_s)
    return simulate(config, scenario.plan, scenario.conditions(), faults=faults, until_s=until_s)


def summary(undisturbed: Outcome, disturbed: Outcome) -> list[str]:
    """Lines for people: how long the steps took, which peers were lost, which came, and how the run ended."""
    undisturbed_step_s = {report.step: report.step_s for report in undisturbed.of(StepReport)}
    lines = [
        f"step {report.step + 1:<4} {report.step_s:10.3f} s   without faults {undisturbed_step_s[report.step]:.3f} s"
        for report in disturbed.of(StepReport)
    ]
    for now_s, peer, report in disturbed.reports:
        if report.kind in REPORT_LINES:
            lines.append(f"{now_s:.3f} s: {REPORT_LINES[report.kind](peer, report.fields)}")
    stop = disturbed.stopped.get(ev.COORDINATOR)
    end = f"code {stop.code}, {stop.reason}" if stop else "not over"
    lines.append(f"after {_ended_s(disturbed):.3f} s (without faults {_ended_s(undisturbed):.3f} s): {end}")
    return lines


REPORT_LINES: dict[str, Callable[[int, dict], str]] = {
    "lost": lambda peer, fields: fields["reason"],
    "join_request": lambda peer, fields: f"peer {fields['peer']} comes, for stage {fields['stage']}",
    "download": lambda peer, fields: (
        f"peer {peer} has the state of step {fields['version']}: {fields['bytes'] / 1e6:.3f} MB "
        f"in {fields['seconds']:.3f} s"
    ),
    "rollback": lambda peer, fields: f"back from step {fields['step']} to step {fields['to']}",
}


def _ended_s(outcome: Outcome) -> float:
    """The time when the coordinator ended the run; a peer that has just joined hears of the end later."""
    return next((now_s for now_s, _, report in outcome.reports if report.kind == "ended"), outcome.now_s)


def records(outcome: Outcome) -> list[dict]:
    """The coordinator's reports as records of a trace (jaxdt.protocol.trace)."""
    return [
        {"what": "report", "t": now_s, "peer": peer, "kind": report.kind, "fields": report.fields}
        for now_s, peer, report in outcome.reports
        if peer == ev.COORDINATOR
    ]


# -------------------------------------------------------------------------------------------------- faults as sentences


def sentence(fault: Fault) -> str:
    """A text about a fault: its begin, its effect on which peers, its duration. KeyError for kinds of the fuzzer
    only."""
    duration = f" for {fault.seconds:.3f} s" if fault.seconds else ""
    is_noticed = fault.kind == CUT and fault.seconds > fault.breaks_s
    noticed = f", which both sides notice after {fault.breaks_s:g} s" if is_noticed else ""
    return f"{fault.at_s:.3f} s: {EFFECTS[fault.kind](fault)}{duration}{noticed}"


def _clog(fault: Fault) -> str:
    if fault.factor:
        return f"the link from {_names(fault.peers)} to {_names(fault.others)} has {fault.factor:g} of its bandwidth"
    messages = {"": "messages", "data": "tensors", "control": "messages without a tensor"}[fault.channel]
    return f"{messages} from {_names(fault.peers)} to {_names(fault.others)} are held back"


EFFECTS: dict[str, Callable[[Fault], str]] = {
    CRASH: lambda fault: f"the process of {_names(fault.peers)} is killed",
    POWER_OFF: lambda fault: f"the machine of {_names(fault.peers)} loses power",
    PAUSE: lambda fault: f"{_names(fault.peers)} does nothing",
    SLOW: lambda fault: f"{_names(fault.peers)} takes {fault.factor:g} times as long for its work",
    CLOG: _clog,
    CUT: lambda fault: f"{_names(fault.peers)} cannot reach {_names(fault.others)}, nor the other way round,",
    DUPLICATE: lambda fault: f"some messages from {_names(fault.peers)} to {_names(fault.others)} arrive twice",
    REORDER: lambda fault: f"some messages from {_names(fault.peers)} to {_names(fault.others)} arrive out of order",
    JOIN: lambda fault: f"newcomer {fault.peer} asks to join, on the machine of {_names(fault.others)}",
}


def _names(ends: tuple[int, ...]) -> str:
    """Such as "peers 3, 5 and the coordinator"."""
    peers = [str(end) for end in sorted(ends) if 0 <= end < ev.TEMPORARY_IDS]
    words = [f"peer{'s' * (len(peers) > 1)} {', '.join(peers)}"] if peers else []
    words += [f"newcomer {end - ev.TEMPORARY_IDS}" for end in ends if end >= ev.TEMPORARY_IDS]
    words += ["the coordinator"] * (ev.COORDINATOR in ends)
    return " and ".join(words)
