"""Delayed parameter updates: every run equals one process that delays by hand (SWARM App. E)."""

from dataclasses import replace

import pytest
from report_fields import report_fields
from test_equivalence import assert_same_training, elastic, functions_of, make_config, one_process  # noqa: F401

from jaxdt.protocol import events as ev
from jaxdt.run.config import WiringConfig, default_plan
from jaxdt.run.delay import Delay
from jaxdt.run.work import Work
from jaxdt.sim.faults import CRASH, JOIN, LEAVE, PAUSE, RESTART, Fault, draw
from jaxdt.wiring.delayed_update import DelayedUpdate
from jaxdt.wiring.routed import RoutedWiring

pytestmark = pytest.mark.xdist_group("stage_functions")


FEW_STEPS = 10  # three of them are delayed where the first seven are not


def delayed(config, after_steps=0):
    return replace(config, sync=replace(config.sync, delay=1, delay_after_steps=after_steps))


def test_versions_and_steps_without_delay():
    assert [Delay().version_of(step) for step in range(4)] == [0, 1, 2, 3]
    assert [Delay().open(version) for version in range(3)] == [(0,), (1,), (2,)]


def test_from_the_second_step_on_the_version_lags_by_one():
    assert [Delay(1).version_of(step) for step in range(5)] == [0, 0, 1, 2, 3]
    assert [Delay(1).open(version) for version in range(3)] == [(0, 1), (1, 2), (2, 3)]


def test_the_first_steps_are_spared():
    late = Delay(1, after_steps=3)
    assert [late.version_of(step) for step in range(6)] == [0, 1, 2, 2, 3, 4]
    assert [late.open(version) for version in range(5)] == [(0,), (1,), (2, 3), (3, 4), (4, 5)]


class Told:
    """A wiring that writes down what it hears, and answers a grant with Work."""

    READS = RoutedWiring.READS

    def __init__(self):
        self.heard = []

    def handle(self, now_s, event):
        match event:
            case ev.Received(_, ev.Grant(step)):
                return [ev.Run(Work(0, "F", 0, 0, step))]
            case ev.Updated(_, step):
                self.heard.append(f"begin {step}")
        return []

    def cancel_run(self):
        self.heard.append("let go")


VIEW = ev.View(1, 0, 0, (ev.Member(0, 0, 1),), (1,), 0)
FROM_MEMBER, FROM_COORDINATOR = ev.Header("run", 0, 1, 1), ev.Header("run", 0, 1, ev.COORDINATOR)
COMMITTED = ev.Received(FROM_COORDINATOR, ev.Committed(ev.Record(0, (), 1.0, 1, "apply", 0)))


@pytest.mark.parametrize("over", [ev.Updated(0, 1), COMMITTED, ev.ViewChanged(replace(VIEW, number=2, n_committed=1))])
def test_work_of_a_step_that_is_over_is_let_go(over):
    """Its update may run as soon as it is committed: nothing of it is computed any more. A wiring that believes it has
    some under way would not say what it has counted."""
    even, odd = Told(), Told()
    overlap = DelayedUpdate(0, 0, (even, odd), Delay(1))
    grant = lambda step: ev.Received(FROM_MEMBER, ev.Grant(step, "F", 0, (0,)))  # noqa: E731
    overlap.handle(0.0, ev.ViewChanged(VIEW))
    overlap.handle(0.0, ev.Updated(0, 0))
    (busy,) = overlap.handle(1.0, grant(1))
    assert not overlap.handle(1.0, grant(0))  # the device is busy with step 1
    overlap.handle(2.0, over)
    assert even.heard[:2] == ["begin 0", "let go"] and odd.heard == ["begin 1"]
    assert not overlap.handle(3.0, ev.Ran(busy.work, 1.0, 2.0, {}))


@pytest.mark.parametrize(("stages", "pipelines", "head", "after_steps"), [(2, 2, "untied", 0), (3, 1, "tied", 7)])
def test_fixed_pipelines(stages, pipelines, head, after_steps, functions_of, one_process):  # noqa: F811
    config = make_config(stages, pipelines, head=head, steps=FEW_STEPS)
    assert_same_training(delayed(config, after_steps), functions_of, one_process)


def test_stochastic_wiring(functions_of, one_process):  # noqa: F811
    config = make_config(3, 2, head="tied", steps=FEW_STEPS, eval_every_steps=8, eval_microbatches=5)
    config = replace(config, wiring=WiringConfig("swarm", routers=6))
    assert_same_training(delayed(config, 7), functions_of, one_process)


@pytest.mark.parametrize(("seed", "after_steps"), [(0, 0), (1, 3)])
def test_peers_that_are_lost_change_nothing(seed, after_steps, functions_of, one_process):  # noqa: F811
    """Two steps are under way when a peer goes: what it counted of both is done again, each with its own version."""
    config = delayed(elastic(2, 3), after_steps)
    faults = draw(seed, default_plan(config).placement, 3, 100.0, 20.0)
    assert_same_training(config, functions_of, one_process, faults=faults)


FAULTS = {
    "join": [Fault(60.0, JOIN, 0)],
    "leave": [Fault(60.0, LEAVE, 0)],
    "start anew": [Fault(60.0, CRASH, 1), Fault(90.0, RESTART, 1)],
    "join, then lose the others": [Fault(40.0, JOIN, 0), Fault(150.0, CRASH, 0), Fault(155.0, CRASH, 2)],
    "pause": [Fault(60.0, PAUSE, 1, 60.0)],
    "coordinator": [Fault(60.0, CRASH, ev.COORDINATOR), Fault(80.0, RESTART, ev.COORDINATOR)],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_who_comes_and_goes(faults, functions_of, one_process):  # noqa: F811
    """A newcomer gets both versions that are in use, and computes from the first step on that nobody has begun."""
    outcome = assert_same_training(delayed(elastic(2, 2)), functions_of, one_process, faults=faults)
    assert report_fields(outcome, "view")[1:] or ev.COORDINATOR in {fault.peer for fault in faults}
