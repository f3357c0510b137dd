from dataclasses import replace

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.schedule import stage_order
from jaxdt.run.plan import Plan
from jaxdt.run.work import Work
from jaxdt.wiring.base import StepShape
from jaxdt.wiring.compute_slot import ComputeSlot, ServiceTime
from jaxdt.wiring.fixed import FixedWiring, PlannedRoutes
from jaxdt.wiring.recovery import Recovery
from jaxdt.wiring.routed import RoutedWiring

# Three stages; pipeline 0 is 0, 1, 2 with microbatches 0..2, pipeline 1 is 5, 4, 3 with 3 and 4.
PLAN = Plan(3, ((0, 1), (1, 2), (2, 3)), ((0, 5), (1, 4), (2, 3)), (3, 2))
# Activations to the next stage, gradients to the one before.
BOUNDARY_BYTES = {0: (100, 0), 1: (200, 110), 2: (0, 210)}
VIEW = ev.View(1, 1, 0, tuple(ev.Member(p, PLAN.seat(p)[0], 1) for p in PLAN.peers), (1, 1, 1), 0)

VIEW_1 = replace(VIEW, n_committed=1)  # after the first step


def wiring(peer, plan=PLAN, n_steps=5, evals=(0, 4)):
    stage, _ = plan.seat(peer)
    sent_bytes = (BOUNDARY_BYTES[stage],) * 2
    return FixedWiring(plan, StepShape(peer, stage, 3, plan.n_microbatches, n_steps, sent_bytes, *evals, 1 << 20))


def arrival(kind, step, stage, microbatch, src=0):
    return ev.Received(ev.Header("r", 0, 1, src), ev.Boundary(ev.Key(kind, step, stage, microbatch)))


class Desk:
    """One wiring and its device: `runs` lists the Work that it started, `told` everything else."""

    def __init__(self, machine):
        self.machine, self.runs, self.told = machine, [], []

    def give(self, event):
        """With the first view the sync says that its version is there."""
        first = isinstance(event, ev.ViewChanged) and event.view.number == 1
        actions = self.machine.handle(0.0, event)
        for action in actions + (self.machine.handle(0.0, ev.Updated(0, event.view.n_committed)) if first else []):
            if isinstance(action, ev.Run):
                self.runs.append(action.work)
            else:
                self.told.append(action)

    def finish(self, **values):
        """The Work that was started last is done."""
        self.give(ev.Ran(self.runs[-1], 0.0, 1.0, values))

    def sent(self):
        return [(a.dst, a.body.key, a.n_bytes) for a in self.told if isinstance(a, ev.Send)]

    def texts(self):
        return [f"{work.kind}{work.microbatch}" for work in self.runs]


def at_desk(peer, view=VIEW, **options):
    desk = Desk(wiring(peer, **options))
    desk.give(ev.ViewChanged(view))
    return desk


def test_nothing_runs_before_there_is_a_view():
    desk = Desk(wiring(0))
    assert desk.runs == []
    desk.give(ev.ViewChanged(VIEW))
    assert desk.runs == [Work(0, "F", 0, 0, 0)]


def test_a_later_input_that_comes_first_waits_its_turn():
    desk = at_desk(1)
    for m in (2, 1):
        desk.give(arrival("act", 0, 1, m))
    assert desk.runs == []
    desk.give(arrival("act", 0, 1, 0))
    assert desk.texts() == ["F0"]
    desk.finish()
    assert desk.texts() == ["F0", "F1"]


def test_a_backward_that_could_run_waits_for_the_forward_before_it():
    """1F1B on stage 1 of 3: F0 F1 B0 F2 B1 B2."""
    desk = at_desk(1)
    desk.give(arrival("act", 0, 1, 0))
    desk.finish()
    desk.give(arrival("grad", 0, 2, 0))
    assert desk.texts() == ["F0"]
    desk.give(arrival("act", 0, 1, 1))
    desk.finish()
    assert desk.texts() == ["F0", "F1", "B0"]


def test_one_work_at_a_time():
    desk = at_desk(1)
    for m in range(3):
        desk.give(arrival("act", 0, 1, m))
    assert desk.texts() == ["F0"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("peer", PLAN.peers)
def test_the_whole_order_is_followed_when_all_inputs_are_there_from_the_start(peer, schedule):
    plan = Plan(3, PLAN.stages, PLAN.placement, PLAN.shares, schedule)
    stage, pipeline = plan.seat(peer)
    desk = at_desk(peer, plan=plan)
    for m in reversed(plan.microbatches(pipeline)):
        desk.give(arrival("grad", 0, stage + 1, m))
        desk.give(arrival("act", 0, stage, m))
    order = stage_order(plan, stage, pipeline)
    for _ in order:
        desk.finish(n_samples=2, loss_sum=1.0)
    assert desk.runs == [Work(w.stage, w.kind, w.microbatch, peer, 0) for w in order]
    assert desk.told[-1] == ev.Drained(0)
    assert [a.microbatch for a in desk.told if isinstance(a, ev.Accumulated)] == list(plan.microbatches(pipeline))


def test_tensors_go_to_the_neighbours_in_the_same_pipeline():
    desk = at_desk(4)  # stage 1 of pipeline 1, between peers 5 and 3
    for kind, stage in (("act", 1), ("grad", 2)):
        for m in (3, 4):
            desk.give(arrival(kind, 0, stage, m))
    for _ in range(4):
        desk.finish()
    assert desk.sent() == [
        (3, ev.Key("act", 0, 2, 3), 200),
        (3, ev.Key("act", 0, 2, 4), 200),
        (5, ev.Key("grad", 0, 1, 3), 110),
        (5, ev.Key("grad", 0, 1, 4), 110),
    ]


def test_the_ends_send_one_way_only():
    first, last = at_desk(0), at_desk(2)
    first.finish()
    assert first.sent() == [(1, ev.Key("act", 0, 1, 0), 100)]
    last.give(arrival("act", 0, 2, 0))
    last.finish()
    assert last.sent() == []
    last.finish(n_samples=2, loss_sum=3.0)
    assert last.sent() == [(1, ev.Key("grad", 0, 2, 0), 210)]


def test_a_backward_is_accumulated_with_its_samples_and_only_the_last_stage_knows_a_loss():
    last = at_desk(2)
    last.give(arrival("act", 0, 2, 0))
    last.finish()
    last.finish(n_samples=2, loss_sum=3.0)
    assert last.told[0] == ev.Accumulated(0, 2, 0, 2, 3.0)
    first = at_desk(5)
    for m in (3, 4):
        first.give(arrival("grad", 0, 1, m))
    for _ in range(3):
        first.finish(n_samples=2)
    assert [a for a in first.told if isinstance(a, ev.Accumulated)] == [ev.Accumulated(0, 0, 3, 2, None)]


def test_the_next_step_begins_with_the_update_and_uses_inputs_that_came_early():
    desk = at_desk(3)
    for step in (0, 1):
        for m in (3, 4):
            desk.give(arrival("act", step, 2, m))
    for _ in range(4):
        desk.finish(n_samples=2, loss_sum=1.0)
    assert desk.texts() == ["F3", "B3", "F4", "B4"] and desk.told[-1] == ev.Drained(0)
    desk.give(ev.Updated(2, 1))
    assert desk.runs[-1] == Work(2, "F", 3, 3, 1)


def test_after_the_last_step_nothing_runs():
    desk = at_desk(0, n_steps=2)
    desk.give(ev.Updated(0, 2))
    assert [work.step for work in desk.runs] == [0]


def test_other_events_and_work_do_not_concern_it():
    desk = at_desk(0)
    desk.give(ev.Ran(Work(0, "G", None, 0, 0), 0.0, 1.0))
    desk.give(ev.Received(ev.Header("r", 0, 1, ev.COORDINATOR), VIEW))
    assert desk.texts() == ["F0"] and desk.told == []


# ---------------------------------------------------------------------------------------------------------- evaluation


def eval_steps(every, n_steps):
    """The steps that a first stage begins with a held-out microbatch. Nothing but such a one comes after the last."""
    desks = []
    for version in range(n_steps + 2):
        desks.append(Desk(wiring(0, n_steps=n_steps, evals=(every, 1))))
        desks[-1].give(ev.ViewChanged(replace(VIEW, n_committed=version)))
    begun = [desk.runs[0] for desk in desks if desk.runs]
    assert not [work for work in begun if work.step >= n_steps and work.kind != "E"]
    return [work.step for work in begun if work.kind == "E"]


@pytest.mark.parametrize(
    ("every", "n_steps", "expected"),
    [(3, 8, [3, 6, 8]), (3, 6, [3, 6]), (1, 3, [1, 2, 3]), (100, 5, [5]), (0, 5, [])],
)
def test_evaluation_after_every_n_steps_and_after_the_last(every, n_steps, expected):
    assert eval_steps(every, n_steps) == expected


def test_held_out_microbatches_are_dealt_over_the_pipelines_and_come_first():
    """Five of them: 0, 2, 4 in pipeline 0 and 1, 3 in pipeline 1."""
    first = at_desk(0, VIEW_1, evals=(1, 5))
    for _ in range(3):
        first.finish()
    assert first.texts() == ["E0", "E2", "E4", "F0"]
    assert first.sent()[:3] == [(1, ev.Key("eval", 1, 1, m), 100) for m in (0, 2, 4)]
    last = at_desk(3, VIEW_1, evals=(1, 5))
    for m in (1, 3):
        last.give(arrival("eval", 1, 2, m))
        last.finish(n_samples=2, loss_sum=4.0)
    assert last.told == [ev.Evaluated(1, 1, 2, 4.0), ev.Evaluated(1, 3, 2, 4.0)]


def test_a_pipeline_without_held_out_microbatches_begins_to_train():
    assert at_desk(5, VIEW_1, evals=(1, 1)).texts() == ["F3"]


# ---------------------------------------------------------------------------------------------------------- open places


def view_without(*gone, number=2, newcomers=(), joining=()):
    """A later view in step 0; newcomers are (peer, stage)."""
    seats = {peer: PLAN.seat(peer)[0] for peer in PLAN.peers if peer not in gone} | dict(newcomers)
    members = tuple(ev.Member(p, stage, 1, first_step=int(p in joining)) for p, stage in sorted(seats.items()))
    return ev.View(number, 1, 0, members, (1, 2, 1), 0, joining=tuple(joining))


def test_a_view_in_mid_step_makes_a_peer_say_what_it_counted_and_keeps():
    desk = at_desk(4)
    for kind, stage, m in (("act", 1, 3), ("act", 1, 4), ("grad", 2, 3)):
        desk.give(arrival(kind, 0, stage, m))
    for _ in range(3):
        desk.finish(n_samples=2)
    assert desk.texts() == ["F3", "F4", "B3"]
    desk.told.clear()
    desk.give(ev.ViewChanged(view_without(1)))
    assert {(a.dst, a.body) for a in desk.told} == {(peer, ev.Inventory(0, (("B", 3),), (3,))) for peer in (0, 2, 3, 5)}


def test_work_that_runs_when_the_view_comes_is_counted_before_that_is_said():
    desk = at_desk(3)
    desk.give(arrival("act", 0, 2, 3))
    desk.finish()
    assert desk.texts() == ["F3", "B3"]
    desk.give(ev.ViewChanged(view_without(1)))
    assert desk.told == []
    desk.finish(n_samples=2, loss_sum=1.0)
    assert desk.told[0] == ev.Accumulated(0, 2, 3, 2, 1.0)
    assert {a.body for a in desk.told[1:]} == {ev.Inventory(0, (("B", 3),), (3,))}


def test_while_a_place_is_open_the_way_is_told_with_each_microbatch():
    desk = Desk(wiring(5))
    desk.give(ev.ViewChanged(VIEW))
    desk.give(ev.ViewChanged(view_without(4)))
    desk.finish()
    desk.told.clear()
    desk.give(ev.Updated(0, 1))
    desk.finish()
    assert desk.runs[-2:] == [Work(0, "F", 3, 5, 1), Work(0, "F", 4, 5, 1)]
    assert [a for a in desk.told if isinstance(a.body, ev.Boundary)] == [
        ev.Send(1, ev.Boundary(ev.Key("act", 1, 1, 3), (5, 1, 3)), 100)
    ]


def test_when_the_place_is_taken_nobody_is_told_anything_from_the_next_step_on():
    desk = Desk(wiring(5))
    desk.give(ev.ViewChanged(VIEW))
    desk.give(ev.ViewChanged(view_without(4, newcomers=[(7, 1)], joining=[7])))
    desk.finish()
    desk.told.clear()
    desk.give(ev.Updated(0, 1))
    for _ in range(2):
        desk.finish()
    assert desk.sent() == [(7, ev.Key("act", 1, 1, 3), 100), (7, ev.Key("act", 1, 1, 4), 100)]
    assert all(a.body.route == () for a in desk.told)


def test_a_newcomer_without_a_place_adds_nothing():
    desk = Desk(FixedWiring(PLAN, StepShape(7, 1, 3, PLAN.n_microbatches, 5, ((200, 110),) * 2, 0, 4, 1 << 20)))
    desk.give(ev.ViewChanged(view_without(newcomers=[(7, 1)], joining=[7])))
    assert desk.told == []
    desk.give(ev.Updated(1, 1))
    assert desk.told == [ev.Drained(1)] and desk.runs == []


def swarm(peer):
    stage, _ = PLAN.seat(peer)
    shape = StepShape(peer, stage, 3, PLAN.n_microbatches, 5, (BOUNDARY_BYTES[stage],) * 2, retain_bytes=1 << 20)
    routes = PlannedRoutes(PLAN, peer)
    return RoutedWiring(shape, routes, Recovery(shape), ComputeSlot(), ServiceTime())


@pytest.mark.parametrize("machine", [wiring, swarm])
def test_work_of_before_an_eviction_does_not_count_though_the_peer_is_back_in_the_same_step(machine):
    """Its tensors went with the eviction, so the Work may have found nothing to compute with."""
    desk = Desk(machine(2))
    desk.give(ev.ViewChanged(VIEW))
    desk.give(ev.Received(ev.Header("r", 0, 1, 1), ev.Boundary(ev.Key("act", 0, 2, 0), (0, 1, 2))))
    (begun,) = desk.runs
    others = tuple(member for member in VIEW.members if member.peer != 2)
    desk.give(ev.Evicted(replace(VIEW, number=2, members=others)))
    desk.give(ev.ViewChanged(replace(VIEW, number=3)))
    desk.give(ev.Updated(0, 0))
    desk.told.clear()
    desk.give(ev.Ran(begun, 0.0, 1.0, {}))
    inventories = [action for action in desk.told if isinstance(getattr(action, "body", None), ev.Inventory)]
    assert desk.told == inventories and {action.dst for action in inventories} == {0, 1, 3, 4, 5}
    assert all(action.body.counted == action.body.kept == () for action in inventories)
