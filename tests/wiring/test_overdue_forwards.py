"""A forward that is stuck at one peer is done by another replica too, and only the result that comes first is used.

Three stages: peer 0, peers 1 and 2, peer 3. Peer 0 is the router.
"""

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import LateResultReport, ReroutedReport
from jaxdt.run.work import Work
from jaxdt.wiring.base import StepShape
from jaxdt.wiring.compute_slot import ComputeSlot, ServiceTime
from jaxdt.wiring.measured_routes import MeasuredRoutes
from jaxdt.wiring.recovery import Recovery
from jaxdt.wiring.routed import RoutedWiring

STAGE_OF = {0: 0, 1: 1, 2: 1, 3: 2}
VIEW = ev.View(1, 1, 0, tuple(ev.Member(peer, stage, 1) for peer, stage in STAGE_OF.items()), (1, 1, 1), 0)
N_MICROBATCHES = 3


class Driver:
    """The wiring of one peer in step 0."""

    def __init__(self, peer, retain_bytes=1 << 20):
        stage = STAGE_OF[peer]
        shape = StepShape(peer, stage, 3, N_MICROBATCHES, 3, ((8, 8),), retain_bytes=retain_bytes)
        routes = MeasuredRoutes(3, 1, 4, N_MICROBATCHES, "seed")
        self.wiring = RoutedWiring(shape, routes, Recovery(shape), ComputeSlot(), ServiceTime())
        self.peer, self.stage = peer, stage
        self.wiring.handle(0.0, ev.ViewChanged(VIEW))
        self.begun = self.wiring.handle(0.0, ev.Updated(stage, 0))

    def hear(self, src, body):
        return self.wiring.handle(1.0, ev.Received(ev.Header("r", 0, 1, src), body))

    def ran(self, kind, m):
        return self.wiring.handle(2.0, ev.Ran(Work(self.stage, kind, m, self.peer, 0), 1.0, 1.0, {"n_samples": 1}))

    def overdue(self):
        return self.wiring.handle(3.0, ev.WorkOverdue())


def act(stage, m, route):
    return ev.Boundary(ev.Key("act", 0, stage, m), route)


def grad(stage, m, route):
    return ev.Boundary(ev.Key("grad", 0, stage, m), route)


def of(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def sent(actions, kind):
    return [(action.dst, action.body) for action in actions if isinstance(getattr(action, "body", None), kind)]


def counted(src, m):
    return src, ev.Progress(0, "B", 1, m, 1.0)


def test_a_stuck_peer_has_the_forwards_done_elsewhere_that_run_or_wait_here_and_says_so_once():
    run = Driver(1)
    for m in range(2):
        run.hear(0, act(1, m, (0, 1, 3)))
    assert sent(run.overdue(), ev.Reroute) == [(0, ev.Reroute(0, 1, m, (0, 1, 3))) for m in range(2)]
    assert run.overdue() == []
    run.hear(0, act(1, 2, (0, 1, 3)))
    assert sent(run.overdue(), ev.Reroute) == [(0, ev.Reroute(0, 1, 2, (0, 1, 3)))]  # what comes after, too


def test_no_work_of_a_step_begins_once_it_is_committed():
    """A tensor is made again here for nobody, since its stage was counted too. The update may run already."""
    run = Driver(1)
    run.hear(0, ev.Boundary(ev.Key("act", 0, 1, 0), (0, 1, 3), (0, 1)))
    run.ran("F", 0)
    run.hear(-1, ev.Committed(ev.Record(0, (), 1.0, 3, "apply")))
    assert run.hear(3, ev.Boundary(ev.Key("grad", 0, 2, 0), (0, 1, 3), (0, 1))) == []
    run.wiring.handle(4.0, ev.Updated(1, 1))
    next_step = run.hear(0, ev.Boundary(ev.Key("act", 1, 1, 0), (0, 1, 3)))
    assert of(next_step, ev.Run) == [ev.Run(Work(1, "F", 0, 1, 1))]


def test_a_tensor_that_comes_after_its_step_is_let_go():
    """A neighbour has made it again since it did not know yet that the step is committed."""
    run = Driver(1)
    run.wiring.handle(4.0, ev.Updated(1, 1))
    late = ev.Key("grad", 0, 2, 0)
    assert run.hear(3, ev.Boundary(late, (0, 1, 3), (0, 1))) == [ev.Discard(late)]


def test_what_is_done_elsewhere_meanwhile_is_not_done_here():
    run = Driver(1)
    for m in range(3):
        run.hear(0, act(1, m, (0, 1, 3)))
    run.overdue()
    run.hear(*counted(2, 1))
    assert of(run.ran("F", 0), ev.Run) == [ev.Run(Work(1, "F", 2, 1, 0))]


def test_a_backward_stays_where_its_forward_was_and_blocks_the_step_once_all_else_is_counted():
    run = Driver(1)
    run.hear(0, act(1, 0, (0, 1, 3)))
    run.ran("F", 0)
    run.hear(3, grad(2, 0, (0, 1, 3)))
    assert run.overdue() == []
    run.hear(*counted(2, 1))
    assert run.overdue() == []
    run.hear(*counted(2, 2))
    assert run.overdue() == [ev.StepBlocked()]


def test_nothing_that_others_may_do_as_well_blocks_the_step():
    run = Driver(1)
    run.hear(0, act(1, 0, (0, 1, 3)))
    for m in (1, 2):
        run.hear(*counted(2, m))
    assert not of(run.overdue(), ev.StepBlocked) and not of(run.overdue(), ev.StepBlocked)
    run.ran("F", 0)
    run.hear(3, grad(2, 0, (0, 1, 3)))  # it came first after all
    assert of(run.overdue(), ev.StepBlocked)


def test_a_forward_whose_result_nobody_waits_for_stays():
    """If nobody chooses between two results, both would be counted."""
    run = Driver(1)
    run.hear(0, act(1, 0, (0, 1, -2)))
    assert not sent(run.overdue(), ev.Reroute)


@pytest.mark.parametrize("src", [1, 2])
def test_the_router_sends_the_input_to_another_replica_and_the_same_peer_of_the_next_stage(src):
    run = Driver(0)
    sends = [send for m in range(N_MICROBATCHES) for send in sent(run.ran("F", m), ev.Boundary)]
    m = next(boundary.key.microbatch for dst, boundary in sends if dst == src)
    other = 3 - src
    actions = run.hear(src, ev.Reroute(0, 1, m, (0, src, 3)))
    assert of(actions, ReroutedReport) == [ReroutedReport(0, 1, m, src, other)]
    assert sent(actions, ev.Boundary) == [(other, act(1, m, (0, other, 3)))]
    assert run.hear(src, ev.Reroute(0, 1, m, (0, src, 3))) == []  # once
    assert run.hear(other, ev.Reroute(0, 1, m, (0, other, 3))) == []  # there is no third replica


def test_an_output_that_was_not_kept_cannot_be_sent_again():
    run = Driver(0, retain_bytes=0)
    run.ran("F", 0)
    assert run.hear(0, ev.Resend(ev.Key("act", 0, 1, 0), (0, 2, 3))) == []


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_the_result_that_comes_first_is_used_and_the_gradient_goes_back_to_its_peer_alone(first, second):
    run = Driver(3)
    begun = run.hear(first, act(2, 0, (0, first, 3)))
    assert of(begun, ev.Run) == [ev.Run(Work(2, "B", 0, 3, 0))]
    assert run.hear(second, act(2, 0, (0, second, 3))) == [LateResultReport(0, 1, 0, second)]
    actions = run.wiring.handle(2.0, ev.Ran(Work(2, "B", 0, 3, 0), 1.0, 1.0, {"n_samples": 1, "loss_sum": 1.0}))
    assert [dst for dst, _ in sent(actions, ev.Boundary)] == [first] and not of(actions, ev.Run)
    assert run.hear(second, act(2, 0, (0, second, 3))) == [LateResultReport(0, 1, 0, second)]  # also later on


def test_a_peer_that_has_a_microbatch_already_does_not_begin_it_again():
    run = Driver(0)
    assert of(run.hear(0, ev.Grant(0, "F", 0, (0, 1, 3))), ev.Run) == []
    works = [run.ran("F", 0), run.ran("F", 1), run.ran("F", 2)]
    assert [work.microbatch for actions in works for work in [action.work for action in of(actions, ev.Run)]] == [1, 2]
