"""Newcomers in a simulation: where they run, what their state costs on the links, and whom a later crash hits."""

from dataclasses import replace

import pytest
from report_fields import report_fields

from jaxdt.protocol.events import TEMPORARY_IDS
from jaxdt.sim.arrivals import state_words
from jaxdt.sim.fault_report import run_with_faults, summary
from jaxdt.sim.faults import CRASH, JOIN, Fault
from jaxdt.sim.scenario import Scenario
from jaxdt.spec.config import PlanConfig, RunConfig, WiringConfig, default_plan
from jaxdt.spec.model import GPTConfig
from jaxdt.spec.network import uniform
from jaxdt.spec.profile import from_flops

GBPS, LATENCY_S, N_STEPS = 1e-3, 0.01, 5
MODEL = GPTConfig(2, 32, 2, 128, 16, 64)
GOES_AND_COMES = [Fault(1.0, CRASH, 4), Fault(4.0, JOIN, 0, others=(4,))]


def scenario(slow_device=None):
    """2 stages x 3, each device on a host of its own."""
    cut = PlanConfig(stages=2, pipelines=3, microbatches=12)
    config = RunConfig(MODEL, plan=cut, wiring=WiringConfig("swarm"))
    kind = lambda i: "slow" if i == slow_device else "fast"  # noqa: E731
    network = uniform(6, LATENCY_S, GBPS)
    devices = tuple(replace(device, host="", kind=kind(i)) for i, device in enumerate(network.devices))
    profile = from_flops(MODEL, 1, {"fast": 1e7, "slow": 1e6}, 0.5)
    return Scenario(config, default_plan(config), profile, replace(network, devices=devices))


def test_a_newcomer_computes_once_its_state_has_crossed_the_links():
    small = scenario()
    lost_stage = small.plan.seat(4)[0]
    outcome = run_with_faults(small, N_STEPS, GOES_AND_COMES)
    assert {stop.reason for peer, stop in outcome.stopped.items() if peer != 4} == {f"done: {N_STEPS} steps"}
    (download,) = report_fields(outcome, "download")
    n_bytes = 4 * state_words(small.config, small.plan, lost_stage)
    assert download["bytes"] == n_bytes == 4 * 3 * MODEL.stage_params(*small.plan.stages[lost_stage])
    one_slice_s = (n_bytes + 4) * 8 / (GBPS * 1e9)  # with its checksum
    assert download["seconds"] == pytest.approx(one_slice_s + 2 * LATENCY_S)
    assert max(view["view"] for view in report_fields(outcome, "view")) == 3


def test_a_newcomer_is_as_fast_as_its_machine():
    """A step lasts longer with a newcomer on a slow machine than with one on a fast one."""
    last_s = {}
    for machine in (0, 4):
        faults = [Fault(1.0, CRASH, 4), Fault(1.0, CRASH, 0), Fault(4.0, JOIN, 0, others=(machine,))]
        outcome = run_with_faults(scenario(slow_device=4), N_STEPS, faults)
        last_s[machine] = report_fields(outcome, "step")[-1]["step_s"]
    assert last_s[0] < last_s[4]


def test_a_crash_hits_the_newcomer_with_a_temporary_number():
    undisturbed = run_with_faults(scenario(), N_STEPS)
    outcome = run_with_faults(
        scenario(), N_STEPS, [*GOES_AND_COMES, Fault(8.0, CRASH, TEMPORARY_IDS), Fault(8.0, CRASH, TEMPORARY_IDS + 9)]
    )
    assert [fields["peer"] for fields in report_fields(outcome, "lost")] == [4, 6]
    assert outcome.stopped[6].reason == "crashed"
    assert summary(undisturbed, outcome)[-1].endswith(f"code 0, done: {N_STEPS} steps")


def test_equal_faults_give_an_equal_run():
    runs = [run_with_faults(scenario(), N_STEPS, GOES_AND_COMES) for _ in range(2)]
    assert runs[0].reports == runs[1].reports


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault(2.0, JOIN, 3, others=(5,)), "2.000 s: join newcomer 3 on the machine of p5"),
        (Fault(2.0, CRASH, TEMPORARY_IDS + 3), "2.000 s: crash newcomer 3"),
    ],
)
def test_a_newcomer_is_printed_by_its_number(fault, text):
    assert str(fault) == text
