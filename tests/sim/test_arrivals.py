"""Newcomers in a simulation, and peers that change stages: where they run, what their state costs on the links, and
whom a later crash hits."""

from dataclasses import replace

import pytest
from report_fields import report_fields

from jaxdt.protocol import events as ev
from jaxdt.run.config import PlanConfig, RunConfig, WiringConfig, default_plan
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import uniform
from jaxdt.run.profile import from_flops
from jaxdt.sim.arrivals import Arrivals, state_words
from jaxdt.sim.fault_report import run_with_faults, summary
from jaxdt.sim.faults import CRASH, JOIN, Fault
from jaxdt.sim.predict import predict_step_s
from jaxdt.sim.scenario import Scenario

GBPS, LATENCY_S, N_STEPS = 1e-3, 0.01, 5
MODEL = GPTConfig(2, 32, 2, 128, 16, 64)
GOES_AND_COMES = [Fault(1.0, CRASH, 4), Fault(4.0, JOIN, 0, others=(4,))]


def scenario(slow_device=None, rebalance_s=0.0):
    """2 stages x 3 (peers 0, 2, 4 and 1, 3, 5), each device on a host of its own."""
    cut = PlanConfig(stages=2, pipelines=3, microbatches=12)
    config = RunConfig(MODEL, plan=cut, wiring=WiringConfig("swarm", rebalance_s=rebalance_s))
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
    assert download["bytes"] == n_bytes == 4 * 3 * MODEL.facts.stage_params(*small.plan.stages[lost_stage])
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
        scenario(),
        N_STEPS,
        [*GOES_AND_COMES, Fault(8.0, CRASH, ev.TEMPORARY_IDS), Fault(8.0, CRASH, ev.TEMPORARY_IDS + 9)],
    )
    assert [fields["peer"] for fields in report_fields(outcome, "lost")] == [4, 6]
    assert outcome.stopped[6].reason == "crashed"
    assert summary(undisturbed, outcome)[-1].endswith(f"code 0, done: {N_STEPS} steps")


def test_a_peer_keeps_its_machine_when_its_stage_changes():
    """Only a newcomer takes the machine of a join, once."""
    small = scenario()
    conditions = small.conditions()
    joins = [Fault(4.0, JOIN, 0, others=(4,)), Fault(5.0, JOIN, 1, others=(2,))]
    arrivals = Arrivals(small.config, small.plan, conditions.link, conditions.host_of, conditions.seconds_at, joins)
    made = [(6, 0), (6, 1), (3, 0), (7, 0), (7, 1)]
    hosts = [arrivals.make_peer(peer, stage).host for peer, stage in made]
    assert hosts == ["device4", "device4", "device3", "device2", "device2"]


def test_a_peer_that_rebalancing_moves_does_not_end_the_simulation():
    lost_two_of_a_stage = [Fault(1.0, CRASH, 4), Fault(1.0, CRASH, 2)]
    outcome = run_with_faults(scenario(rebalance_s=5.0), 12, lost_two_of_a_stage)
    assert report_fields(outcome, "moving") == [{"to_stage": 0}]
    assert outcome.stopped[ev.COORDINATOR] == ev.Stop(0, "done: 12 steps")


def test_a_newcomer_that_is_sent_to_another_stage_leaves_the_next_machine_to_the_next_newcomer():
    faults = [
        *(Fault(1.0, CRASH, 4), Fault(3.0, CRASH, 5), Fault(3.0, CRASH, 3)),
        *(Fault(4.0, JOIN, 0, others=(4,)), Fault(12.0, JOIN, 1, others=(5,))),
    ]
    outcome = run_with_faults(scenario(), 12, faults)
    assert report_fields(outcome, "moving") == [{"to_stage": 1}]
    assert [fields["peer"] for fields in report_fields(outcome, "join_request")] == [6, 7]
    assert outcome.stopped[ev.COORDINATOR] == ev.Stop(0, "done: 12 steps")


def test_a_predicted_step_is_one_of_the_plan_whatever_rebalancing_would_do():
    """Stage 1 has ten times the Work of stage 0, so rebalancing would send it a peer in mid-prediction."""
    plan = scenario().plan
    conditions = replace(scenario().conditions(), seconds_at=None)
    seconds = {
        peer: {kind: s * (10 if plan.seat(peer)[0] else 1) for kind, s in of_kind.items()}
        for peer, of_kind in conditions.seconds.items()
    }
    predicted_s = [
        predict_step_s(scenario(rebalance_s=s).config, plan, replace(conditions, seconds=seconds), 6)
        for s in (0.0, 20.0)
    ]
    assert predicted_s[0] == predicted_s[1] > 0


def test_equal_faults_give_an_equal_run():
    runs = [run_with_faults(scenario(), N_STEPS, GOES_AND_COMES) for _ in range(2)]
    assert runs[0].reports == runs[1].reports


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault(2.0, JOIN, 3, others=(5,)), "2.000 s: join newcomer 3 on the machine of p5"),
        (Fault(2.0, CRASH, ev.TEMPORARY_IDS + 3), "2.000 s: crash newcomer 3"),
    ],
)
def test_a_newcomer_is_printed_by_its_number(fault, text):
    assert str(fault) == text
