import pytest

from jaxdt.membership.work_watch import FACTOR, PROFILE_FACTOR, UNKNOWN_S, WorkWatch
from jaxdt.protocol import events as ev
from jaxdt.run.work import Work

TICK_S = 0.5
FORWARD = Work(0, "F", 3, 1, 7)


def watch(kind="F", seconds=1.0, floor_s=4.0, n=3):
    machine = WorkWatch(floor_s, TICK_S)
    for m in range(n):
        machine.on_done(Work(0, kind, m, 1, 0), seconds)
    return machine


def overdue(machine, work, until_s, step_s=TICK_S):
    """The reports of the machine in the ticks until `until_s`."""
    ticks = [step_s * n for n in range(int(until_s / step_s) + 1)]
    return [told for now_s in ticks if (told := machine.tick(now_s, work))]


def test_a_work_that_takes_many_times_the_median_of_its_kind_is_overdue():
    assert overdue(watch(), FORWARD, FACTOR) == []
    assert overdue(watch(), FORWARD, FACTOR + 1) == [ev.Overdue("7:0F3@p1", FACTOR + TICK_S, FACTOR)]


def test_it_is_told_again_each_time_it_has_doubled():
    told = overdue(watch(), FORWARD, 100.0)
    assert [one.seconds for one in told] == [8.5, 17.5, 35.5, 71.5]
    assert [one.blocks for one in told] == [False, False, True, True]  # nobody waits for ever


def test_that_the_run_waits_for_it_is_told_once():
    machine = watch()
    assert machine.blocked() is None
    overdue(machine, FORWARD, FACTOR + 1)
    assert machine.blocked() == ev.Overdue("7:0F3@p1", FACTOR + 1, FACTOR, blocks=True) and machine.blocked() is None
    machine.on_done(FORWARD, 40.0)
    assert machine.blocked() is None


def test_nobody_but_this_peer_can_lay_out_its_gradient():
    assert overdue(watch("G"), Work(0, "G", None, 1, 7), FACTOR + 1)[0].blocks


def test_a_tensor_is_only_made_again_because_another_peer_waits_for_it():
    assert overdue(watch(n=0), Work(0, "R", 3, 1, 7), UNKNOWN_S + 1)[0].blocks


def test_the_deadline_has_a_floor_and_leaves_room_for_durations_that_vary():
    assert overdue(watch(seconds=0.01), FORWARD, 4.0) == []
    assert overdue(watch(seconds=0.01), FORWARD, 4.5)[0].deadline_s == 4.0
    machine = watch(n=0)
    for seconds in (1.0, 2.0, 3.0):
        machine.on_done(FORWARD, seconds)
    assert overdue(machine, FORWARD, 30.0)[0].deadline_s == FACTOR * 2.0 + 8.0 * 1.0


@pytest.mark.parametrize(("known", "kind"), [("R", "R"), ("B", "F")])
def test_a_kind_that_was_never_timed_may_have_to_be_compiled(known, kind):
    work = Work(0, kind, 3, 1, 7)
    assert overdue(watch(known), work, UNKNOWN_S, TICK_S) == []
    assert overdue(watch(known), work, UNKNOWN_S + 1, TICK_S)


def test_the_first_work_of_a_kind_is_compared_with_its_profile():
    machine = watch(n=0)
    machine.on_profiled({"F": 1.0})
    assert overdue(machine, FORWARD, PROFILE_FACTOR) == []
    assert overdue(machine, FORWARD, PROFILE_FACTOR + 1)


def test_a_work_that_was_overdue_says_nothing_of_its_like():
    machine = watch(n=1)
    assert overdue(machine, FORWARD, 40.0)
    machine.on_done(FORWARD, 40.0)
    assert overdue(machine, FORWARD, 40.0)[0].deadline_s == FACTOR


def test_another_work_begins_anew():
    machine = watch()
    for n in range(20):
        assert machine.tick(n * 5 * TICK_S, Work(0, "F", n, 1, 7)) is None
    overdue(machine, FORWARD, 20.0)
    assert machine.is_overdue
    machine.on_done(FORWARD, 20.0)
    assert not machine.is_overdue and machine.tick(30.0, None) is None


def test_a_process_that_stood_still_has_not_computed_meanwhile():
    """A pause is the lease's to judge. Otherwise a peer would accuse itself when it wakes."""
    machine = watch()
    assert machine.tick(0.0, FORWARD) is None
    assert machine.tick(1000.0, FORWARD) is None
    assert machine.tick(1000.5, FORWARD) is None
