"""Two servers of a stage, one whose clients have little to do and one with much: who does which microbatch."""

import itertools

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import TasksStolenReport
from jaxdt.run.work import WorkKind
from jaxdt.wiring.base import StepShape
from jaxdt.wiring.pool.task_table import TaskTable
from jaxdt.wiring.pool.work_stealing import StepSteals

STEP, STAGE = 4, 1
OWNER, WORKER, THIEF, OTHER = 0, 1, 2, 3
ACT, GRAD = (ev.Key("act", STEP, STAGE, 3), ev.Key("grad", STEP, STAGE + 1, 3))
IDLE, BUSY = ((0.0, 1.0),), ((9.0, 1.0),)  # loads of one client


class Server:
    def __init__(self, numbers, peer=OWNER, n_stages=3, stage=STAGE):
        self.table = TaskTable(numbers, peer, stage == n_stages - 1, itertools.count(1))
        for m in numbers:
            self.table.input_arrived(m)
        shape = StepShape(peer, stage, n_stages, 8, 10, ((10, 20),), received_bytes=(30, 40))
        self.steals = StepSteals(shape, STEP, self.table)

    def tasks_for(self, clients=IDLE, n_max=4, src=THIEF, own=BUSY):
        """What it offers in answer to a request."""
        return self.steals.tasks_for(src, ev.StealRequest(STEP, n_max, clients), own)

    def replied(self, n_taken):
        return self.steals.on_reply(THIEF, ev.StealReply(STEP, n_taken))

    def offered(self, *tasks, n_taken=1):
        return self.steals.on_offer(OWNER, ev.StealOffer(STEP, tasks, BUSY), n_taken)

    def arrived(self, key):
        return self.steals.on_arrived(key)

    def do(self, client, kind, m):
        self.table.finish(self.table.lease(kind, m, client, 0.0).number)


def test_a_forward_goes_with_its_input_and_its_gradient_follows():
    owner, thief = Server(range(4)), Server(range(4, 8), THIEF)
    (task,) = owner.tasks_for(n_max=1)
    assert task == (WorkKind.FORWARD, 3, False) and 3 not in owner.table and owner.steals.is_open

    reply, report = thief.offered(task)
    assert reply == ev.Send(OWNER, ev.StealReply(STEP, 1)) and report == TasksStolenReport(STEP, STAGE, OWNER, 1)
    assert 3 not in thief.table and thief.steals.is_open  # its input is still to come
    (act,) = owner.replied(1)
    assert (act.dst, act.body, act.n_bytes) == (THIEF, ev.Boundary(ACT), 30) and not owner.steals.is_open
    assert thief.arrived(ACT) == [] and not thief.steals.is_open
    for m in (4, 5, 6, 7):
        thief.do(THIEF, WorkKind.FORWARD, m)
    assert thief.table.next_task(THIEF, 9) == (WorkKind.FORWARD, 3)

    (gradient,) = owner.arrived(GRAD)
    assert (gradient.dst, gradient.body, gradient.n_bytes) == (THIEF, ev.Boundary(GRAD), 40)


def test_a_gradient_may_come_before_the_answer_to_the_offer():
    """Over two short links, while the answer has a long one."""
    owner = Server(range(4))
    owner.tasks_for(n_max=1)
    (gradient,) = owner.arrived(GRAD)
    assert (gradient.dst, gradient.body) == (THIEF, ev.Boundary(GRAD))
    owner.replied(1)
    assert [send.body for send in owner.arrived(GRAD)] == [ev.Boundary(GRAD)]


def test_what_a_lost_worker_had_done_is_stolen_with_both_tensors_and_done_again_by_the_thief():
    owner, thief = Server(range(4)), Server(range(4, 8), THIEF)
    owner.do(WORKER, WorkKind.FORWARD, 3)
    owner.table.gradient_arrived(3)
    assert (WorkKind.BACKWARD, 3) not in owner.table.spare  # it is the worker's, who holds the forward's result
    owner.do(WORKER, WorkKind.BACKWARD, 3)
    assert owner.table.void(WORKER) == [3]
    (task,) = owner.tasks_for(n_max=1)
    assert task == (WorkKind.BACKWARD, 3, True)
    thief.offered(task)
    for send in owner.replied(1):
        assert 3 not in thief.table
        thief.arrived(send.body.key)
    lease = thief.table.lease(WorkKind.BACKWARD, 3, WORKER, 0.0)
    assert lease.with_forward and lease.is_redo and thief.steals.lacks_output(3)


def test_the_last_stage_has_one_tensor_and_a_single_stage_none():
    for n_stages, stage, keys in ((2, 1, [ACT]), (1, 0, [])):
        owner, thief = (Server(numbers, n_stages=n_stages, stage=stage) for numbers in (range(4), range(4, 8)))
        thief.offered(*owner.tasks_for(n_max=1))
        assert (3 in thief.table) == (not keys)
        assert [send.body.key for send in owner.replied(1)] == keys


def test_a_task_that_a_client_may_have_done_is_not_offered():
    owner = Server(range(1))
    for client in (WORKER, OTHER):
        owner.table.lease(WorkKind.FORWARD, 0, client, 0.0, 5.0)
        owner.table.expire(5.0)
    assert owner.table.spare == [] and owner.tasks_for() == ()


def test_nothing_is_offered_to_a_server_that_would_be_done_later():
    owner = Server(range(4))
    assert owner.tasks_for(BUSY, own=IDLE) == ()
    assert owner.tasks_for(((12.0, 1.0),), own=BUSY) == ()  # done at 14 s with what has to travel, the owner at 13
    assert len(owner.tasks_for(IDLE, own=BUSY)) > 1


def test_nobody_is_offered_two_things_at_a_time():
    owner = Server(range(8))
    assert len(owner.tasks_for(n_max=1)) == 1 and owner.tasks_for() == ()
    assert len(owner.tasks_for(src=OTHER)) > 1
    owner.replied(1)
    assert owner.tasks_for()


def test_what_is_not_taken_is_done_by_its_owner():
    owner, thief = Server(range(4)), Server(range(4, 8), THIEF)
    tasks = owner.tasks_for(n_max=2)
    assert [m for _, m, _ in tasks] == [3, 2] and owner.table.n_left == 2
    assert thief.offered(*tasks, n_taken=0) == [ev.Send(OWNER, ev.StealReply(STEP, 0))]
    assert not thief.steals.is_open and thief.arrived(ACT) == [ev.Discard(ACT)]  # nothing of the kind is sent
    assert len(owner.replied(1)) == 1 and not owner.steals.is_open
    assert 3 not in owner.table and (WorkKind.FORWARD, 2) in owner.table.spare and owner.table.n_left == 3


def test_what_is_stolen_is_not_offered_on():
    thief = Server(range(4, 8), THIEF, n_stages=1, stage=0)
    thief.offered((WorkKind.BACKWARD, 3, False))
    offered = {m for _, m, _ in thief.tasks_for(n_max=9, src=OTHER)}
    assert offered and 3 not in offered
