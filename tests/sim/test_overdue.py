"""A device that hangs or becomes very slow while its heartbeats go on: others do its Work, and each step is bounded."""

import re
from dataclasses import replace

import pytest
from mutants import UsesBothResults, of_peers

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import (
    LateResultReport,
    LostReport,
    OverdueReport,
    ReroutedReport,
    RollbackReport,
    StepReport,
)
from jaxdt.run.config import default_plan
from jaxdt.sim.faults import CRASH, JOIN, NEVER_DONE, SLOW, Fault
from jaxdt.testing.case import Busy, finding, play
from jaxdt.testing.cases import draw_case
from jaxdt.testing.promises import COVER, DISJOINT

N_STEPS = 20
FOR_EVER_S = 1e5
# A step may take the deadline of the Work under way, which is its floor here; then some heartbeats and messages until
# the view is there, and the step's lost Work once more.
FLOOR_S, SEEN_S, AGAIN_STEPS = 4.0, 2.0, 2.0
UPDATE_S = 0.01


def case(wiring, pipelines=3, faults=(), delay=0):
    """Two stages; a forward takes 0.1 s and a backward 0.2 s, and a compute thread does nothing else."""
    drawn = draw_case(0, wiring)
    config = replace(
        drawn.config,
        plan=replace(drawn.config.plan, stages=2, pipelines=pipelines, microbatches=2 * pipelines),
        train=replace(drawn.config.train, steps=N_STEPS, on_nonfinite="stop", checkpoint_every_steps=0),
        sync=replace(drawn.config.sync, delay=delay, delay_after_steps=0),
        wiring=replace(drawn.config.wiring, on_stage_lost="wait", window=0, retain_bytes=1 << 30),
    )
    plan = default_plan(config)
    seconds = {peer: {"F": 0.1, "B": 0.2, "E": 0.1, "G": 0.01, "U": UPDATE_S} for peer in plan.peers}
    link = next(iter(drawn.links.values()))
    ends = [ev.COORDINATOR, *plan.peers]
    links = {(src, dst): replace(link, latency_s=0.01, bandwidth_gbps=1.0) for src in ends for dst in ends}
    return replace(
        drawn,
        config=config,
        plan=plan,
        seconds=seconds,
        links=links,
        faults=tuple(faults),
        nonfinite=None,
        random_moves_s=0.0,
        busy=Busy(),
    )


def steps_s(outcome):
    return [report.step_s for report in outcome.of(StepReport)]


@pytest.mark.parametrize("wiring", ["swarm", "fixed"])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("factor", [NEVER_DONE, 200.0])
def test_a_step_takes_a_deadline_longer_and_the_next_ones_as_long_as_ever(wiring, delay, factor):
    """Without a deadline a hang is for ever, and a device that is 200 times slower makes a step 60 times longer."""
    calm = max(steps_s(play(case(wiring, delay=delay))[0])[1:])
    fault = Fault(4.0, SLOW, 2, FOR_EVER_S, factor=factor)
    outcome, _ = play(case(wiring, faults=[fault], delay=delay))
    assert outcome.stopped[ev.COORDINATOR] == ev.Stop(0, f"done: {N_STEPS} steps")
    assert {report.peer for report in outcome.of(OverdueReport)} == {2}
    measured_s = steps_s(outcome)
    bound_s = FLOOR_S + SEEN_S + AGAIN_STEPS * calm
    if delay and factor != NEVER_DONE:  # the update of the step before is slow too, but within its deadline
        bound_s += factor * UPDATE_S
    assert max(measured_s[1:]) < bound_s
    n_long = sum(step_s > 2 * calm for step_s in measured_s[1:])
    assert n_long <= (1 + delay if factor == NEVER_DONE else 4)  # a device that is never done does not come back


def long_case(delay):
    """A step of 12.6 s, in which a few forwards of peer 2 take 6 s each, one after another until its Work is over."""
    drawn = case("swarm", faults=[Fault(2.35, SLOW, 2, 0.11, factor=60.0)], delay=delay)
    config = replace(
        drawn.config,
        plan=replace(drawn.config.plan, microbatches=120),
        train=replace(drawn.config.train, steps=2 + delay),
    )
    return replace(drawn, config=config, plan=default_plan(config))


@pytest.mark.parametrize("delay", [0, 1])
def test_a_peer_that_is_free_again_before_the_step_waits_for_it_stays_and_what_came_second_is_not_used(delay):
    """The invariants see to it that each microbatch is counted once."""
    outcome, _ = play(long_case(delay))
    assert outcome.stopped[ev.COORDINATOR].code == 0 and not outcome.of(LostReport)
    assert [report.blocks for report in outcome.of(OverdueReport)] == [False]
    rerouted = {(report.step, report.microbatch) for report in outcome.of(ReroutedReport) if report.src == 2}
    late = [(report.step, report.microbatch) for report in outcome.of(LateResultReport) if report.peer == 2]
    assert late and len(late) == len(set(late)) and set(late) <= rerouted


@pytest.mark.parametrize("delay", [0, 1])
def test_if_both_results_are_used_a_microbatch_counts_twice_and_the_invariants_see_it(delay):
    broken = finding(long_case(delay), of_peers(UsesBothResults))
    assert re.search(rf" s: \(({DISJOINT}|{COVER})\) ", broken), broken


def test_a_peer_that_is_overdue_again_and_again_is_put_out():
    fault = Fault(4.0, SLOW, 2, FOR_EVER_S, factor=60.0)
    outcome, _ = play(case("swarm", faults=[fault]))
    lost = [report.reason for report in outcome.of(LostReport) if report.peer == 2]
    assert len(lost) == 3 and lost[-1].endswith("; its Work was overdue 3 times of late")
    assert outcome.stopped[2].code == 2 and "has run for" in outcome.stopped[2].reason
    assert outcome.stopped[ev.COORDINATOR].code == 0


def test_the_last_replica_of_a_stage_is_waited_for_and_the_run_says_so():
    fault = Fault(4.0, SLOW, 1, 5.0, factor=200.0)
    outcome, _ = play(case("fixed", pipelines=1, faults=[fault]))
    assert outcome.stopped[ev.COORDINATOR].code == 0 and not outcome.of(LostReport)
    overdue = outcome.of(OverdueReport)
    assert {report.peer for report in overdue} == {1} and len(overdue) <= 8  # told again each time it has doubled


@pytest.mark.parametrize("wiring", ["swarm", "fixed"])
def test_a_newcomer_gets_the_state_of_a_last_replica_that_is_never_done_and_takes_over(wiring):
    """Its device hangs, and it still gives its state. So the run need not wait, and nothing is lost."""
    faults = [Fault(2.0, CRASH, 3), Fault(4.0, SLOW, 1, FOR_EVER_S, factor=NEVER_DONE), Fault(5.0, JOIN, 0)]
    outcome, _ = play(case(wiring, pipelines=2, faults=faults))
    assert outcome.stopped[ev.COORDINATOR] == ev.Stop(0, f"done: {N_STEPS} steps")
    assert 1 in {report.peer for report in outcome.of(LostReport)} and not outcome.of(RollbackReport)


def test_a_device_that_is_a_little_slower_is_left_alone():
    fault = Fault(4.0, SLOW, 2, FOR_EVER_S, factor=7.0)
    outcome, _ = play(case("swarm", faults=[fault]))
    assert not outcome.of(OverdueReport) and outcome.stopped[ev.COORDINATOR].code == 0
