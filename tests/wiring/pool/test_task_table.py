"""A server's tasks: the life of a microbatch step by step, and random runs in which workers are lost or late.

`python -m jaxdt.testing.pool.task_runs` makes ten times as many runs."""

import itertools

import pytest

from jaxdt.run.work import WorkKind
from jaxdt.testing.pool.reissue_only import ReissueOnly
from jaxdt.testing.pool.task_runs import RunOptions, TaskRun, is_right
from jaxdt.wiring.pool.task_table import FAILURES_MAX, TaskTable, Verdict

SERVER, SLOW, FAST = 0, 1, 2
N_RUNS = 200
CALM = RunOptions(24, 2, False, 0.0, 0.0, 0.0, 0.0)


def table(n=4, is_last_stage=False):
    """All inputs are here."""
    made = TaskTable(range(n), SERVER, is_last_stage, itertools.count(1))
    for m in range(n):
        made.input_arrived(m)
    return made


def do(tasks, client, kind, m, now_s=0.0):
    lease = tasks.lease(kind, m, client, now_s)
    assert tasks.finish(lease.number) is Verdict.ACCEPTED
    return lease


def test_a_microbatch_from_its_input_to_the_servers_sum():
    tasks = table(1)
    assert tasks.next_task(FAST, 1) == (WorkKind.FORWARD, 0)
    do(tasks, FAST, WorkKind.FORWARD, 0)
    assert tasks.next_task(FAST, 1) is None  # its output's gradient is still to come
    tasks.gradient_arrived(0)
    tasks.gradient_arrived(0)
    assert tasks.next_task(SLOW, 9) is None and tasks.own_backward(FAST) == 0  # who did the forward has its result
    lease = do(tasks, FAST, WorkKind.BACKWARD, 0)
    assert not lease.with_forward and tasks.is_done and not tasks.is_committed
    assert tasks.commit(FAST, ((0, lease.number),)) and tasks.is_committed
    assert not tasks.commit(FAST, ((0, lease.number),))  # said twice


def test_on_the_last_stage_there_is_one_task():
    tasks = table(1, is_last_stage=True)
    assert tasks.next_task(FAST, 0) == (WorkKind.BACKWARD, 0)
    assert not do(tasks, FAST, WorkKind.BACKWARD, 0).with_forward and tasks.is_done


def test_a_backward_goes_first_then_the_oldest_and_few_forwards_wait_for_theirs():
    tasks = table()
    for m in (0, 1):
        do(tasks, FAST, WorkKind.FORWARD, m)
    assert tasks.next_task(FAST, 2) is None and tasks.next_task(FAST, 3) == (WorkKind.FORWARD, 2)
    tasks.gradient_arrived(1)
    assert tasks.next_task(FAST, 3) == (WorkKind.BACKWARD, 1)


def test_what_a_lost_worker_did_is_done_again_with_its_forward_and_the_server_keeps_its_own():
    tasks = table(3)
    for client, m in ((FAST, 0), (SERVER, 1), (FAST, 2)):
        do(tasks, client, WorkKind.FORWARD, m)
        tasks.gradient_arrived(m)
    for client, m in ((FAST, 0), (SERVER, 1)):
        do(tasks, client, WorkKind.BACKWARD, m)
    running = tasks.lease(WorkKind.BACKWARD, 2, FAST, 0.0)
    assert tasks.void(FAST) == [0]
    assert tasks.finish(running.number) is Verdict.STALE
    first, second = (tasks.lease(WorkKind.BACKWARD, m, SLOW, 0.0) for m in (0, 2))
    assert first.with_forward and first.is_redo  # its input's gradient has gone to the stage before
    assert second.with_forward and not second.is_redo
    assert tasks.contributors == [SERVER]


def test_a_lease_that_ran_out_counts_no_more():
    tasks = table(1)
    late = tasks.lease(WorkKind.FORWARD, 0, SLOW, 0.0, 5.0)
    assert tasks.next_deadline_s == 5.0 and not tasks.expire(4.9) and tasks.expire(5.0) == [late]
    again = tasks.lease(WorkKind.FORWARD, 0, FAST, 5.0)
    assert tasks.finish(late.number) is Verdict.STALE and tasks.leases_of(FAST) == [again]
    assert [tasks.finish(again.number) for _ in range(2)] == [Verdict.ACCEPTED, Verdict.DUPLICATE]


def test_a_worker_whose_backward_is_late_does_not_get_it_again():
    """It may have the gradient in its accumulator, which would hold it twice."""
    tasks = table(1, is_last_stage=True)
    tasks.lease(WorkKind.BACKWARD, 0, SLOW, 0.0, 5.0)
    tasks.expire(5.0)
    assert tasks.next_task(SLOW, 9) is None and tasks.next_task(FAST, 9) == (WorkKind.BACKWARD, 0)
    tasks.void(SLOW)  # it begins anew
    assert tasks.next_task(SLOW, 9) == (WorkKind.BACKWARD, 0)


def test_a_forward_follows_a_backward_and_a_backward_a_forward():
    tasks = table(2)
    do(tasks, SERVER, WorkKind.FORWARD, 0)
    tasks.gradient_arrived(0)
    assert tasks.next_task(SERVER, 2, last=WorkKind.FORWARD) == (WorkKind.BACKWARD, 0)
    assert tasks.next_task(SERVER, 2, last=WorkKind.BACKWARD) == (WorkKind.FORWARD, 1)
    assert tasks.next_task(SERVER, 1, last=WorkKind.BACKWARD) == (
        WorkKind.BACKWARD,
        0,
    )  # one forward in flight is all that it may have


def test_microbatches_are_left_until_somebody_has_them():
    tasks = table(3)
    assert tasks.n_left == 3 and not tasks.held(FAST)
    tasks.lease(WorkKind.FORWARD, 0, FAST, 0.0)
    do(tasks, SLOW, WorkKind.FORWARD, 1)
    assert tasks.n_left == 1 and tasks.held(FAST) == {0} and tasks.held(SLOW) == {1}
    tasks.gradient_arrived(1)
    do(tasks, SLOW, WorkKind.BACKWARD, 1)
    assert tasks.n_left == 1 and not tasks.held(SLOW)
    tasks.void(SLOW)
    assert tasks.n_left == 2


def test_after_so_many_failures_only_the_server_may():
    tasks = table(1)
    for _ in range(FAILURES_MAX):
        tasks.lease(WorkKind.FORWARD, 0, SLOW, 0.0, 1.0)
        tasks.expire(1.0)
    assert tasks.next_task(FAST, 9) is None and tasks.next_task(SERVER, 9) == (WorkKind.FORWARD, 0)


def test_a_contribution_counts_only_if_it_holds_exactly_what_was_done():
    tasks = table(2, is_last_stage=True)
    one, two = (do(tasks, FAST, WorkKind.BACKWARD, m).number for m in (0, 1))
    for items in ((), ((0, one),), ((0, one), (1, two + 1)), ((0, one), (1, two), (2, 9))):
        assert not tasks.commit(FAST, items)
    assert tasks.commit(FAST, ((0, one), (1, two))) and tasks.is_committed


# ------------------------------------------------------------------------------------------------------- random runs


class AnyContribution(TaskTable):
    """A planted mistake: nobody looks at what a contribution holds."""

    def commit(self, client, items):
        return super().commit(client, self.contribution(client))


def test_every_microbatch_is_in_the_servers_sum_once():
    assert [seed for seed in range(N_RUNS) if not is_right(seed)] == []


@pytest.mark.parametrize("mistake", [ReissueOnly, AnyContribution])
def test_the_runs_find_what_would_be_wrong(mistake):
    n_wrong = sum(not is_right(seed, mistake) for seed in range(N_RUNS))
    assert n_wrong > 0.05 * N_RUNS


def test_a_faster_worker_never_gets_a_smaller_share():
    for seed in range(20):
        run = TaskRun(seed, options=CALM)
        run.workers[SLOW].speed, run.workers[FAST].speed = 0.5, 2.0
        run.run()
        assert run.workers[FAST].n_backwards >= run.workers[SLOW].n_backwards
