"""Two servers of a stage, one whose clients have little left to do and one with much: who does which microbatch."""

import itertools

from jaxdt.protocol.events import Boundary, Discard, Key, Send, StealOffer, StealReply, StealRequest
from jaxdt.protocol.reports import TasksStolenReport
from jaxdt.spec.work import BACKWARD, FORWARD
from jaxdt.wiring.base import StepShape
from jaxdt.wiring.pool.task_table import TaskTable
from jaxdt.wiring.pool.work_stealing import StepSteals, WorkStealing

STEP, STAGE = 4, 1
OWNER, WORKER, THIEF, OTHER = 0, 1, 2, 3
ACT, GRAD = (Key("act", STEP, STAGE, 3), Key("grad", STEP, STAGE + 1, 3))
IDLE, BUSY = ((0.0, 1.0),), ((9.0, 1.0),)  # loads of one client


class Server:
    def __init__(self, numbers, peer=OWNER, n_stages=3, stage=STAGE):
        self.peer = peer
        self.table = TaskTable(numbers, peer, stage == n_stages - 1, itertools.count(1))
        for m in numbers:
            self.table.input_arrived(m)
        self.steals = StepSteals()
        shape = StepShape(peer, stage, n_stages, 8, 10, ((10, 20),), received_bytes=(30, 40))
        self.stealing = WorkStealing(shape)

    def asked(self, request, src=THIEF, now_s=0.0, own=BUSY):
        """What it sends after a request: the offer, and the tensors."""
        self.stealing.on_request(now_s, self.steals, src, request)
        return self.offers(now_s, own)

    def offers(self, now_s, own=BUSY):
        return self.stealing.offer(now_s, STEP, self.table, self.steals, own)

    def offered(self, offer, n_max=9):
        return self.stealing.on_offer(self.table, self.steals, OWNER, offer, n_max)

    def arrived(self, key):
        return self.stealing.arrived(self.table, self.steals, key)

    def do(self, client, kind, m):
        self.table.finish(self.table.lease(kind, m, client, 0.0).number)


def request(clients=IDLE, n_max=4):
    return StealRequest(STEP, n_max, clients)


def test_a_forward_goes_with_its_input_and_its_gradient_follows():
    owner, thief = Server(range(4)), Server(range(4, 8), THIEF)
    offer, act = owner.asked(request(n_max=1))
    assert offer == Send(THIEF, StealOffer(STEP, ((FORWARD, 3, False),)))
    assert act.dst == THIEF and act.body == Boundary(ACT) and act.n_bytes == 30
    assert 3 not in owner.table and owner.steals.is_open

    reply, report = thief.offered(offer.body)
    assert reply == Send(OWNER, StealReply(STEP, True)) and report == TasksStolenReport(STEP, STAGE, OWNER, 1)
    assert 3 not in thief.table and thief.steals.is_open  # its input is still to come
    assert thief.arrived(ACT) == [] and not thief.steals.is_open
    for m in (4, 5, 6, 7):
        thief.do(THIEF, FORWARD, m)
    assert thief.table.next_task(THIEF, 9) == (FORWARD, 3)

    owner.stealing.on_reply(owner.table, owner.steals, THIEF, reply.body)
    assert not owner.steals.is_open
    (gradient,) = owner.arrived(GRAD)
    assert (gradient.dst, gradient.body, gradient.n_bytes) == (THIEF, Boundary(GRAD), 40)


def test_tensors_may_come_before_the_offer():
    thief = Server(range(4, 8), THIEF)
    assert thief.arrived(ACT) == []
    thief.offered(StealOffer(STEP, ((FORWARD, 3, False),)))
    assert 3 in thief.table and not thief.steals.is_open


def test_what_a_lost_worker_had_done_is_stolen_with_both_tensors_and_done_again_by_the_thief():
    owner, thief = Server(range(4)), Server(range(4, 8), THIEF)
    owner.do(WORKER, FORWARD, 3)
    owner.table.gradient_arrived(3)
    assert (BACKWARD, 3) not in owner.table.spare  # it is the worker's, who holds the forward's result
    owner.do(WORKER, BACKWARD, 3)
    assert owner.table.void(WORKER) == [3]
    offer, *tensors = owner.asked(request(n_max=1))
    assert offer.body == StealOffer(STEP, ((BACKWARD, 3, True),))
    assert [send.body.key for send in tensors] == [ACT, GRAD]
    thief.offered(offer.body)
    for key in (ACT, GRAD):
        assert 3 not in thief.table
        thief.arrived(key)
    lease = thief.table.lease(BACKWARD, 3, WORKER, 0.0)
    assert lease.with_forward and lease.is_redo and thief.steals.lacks_output(3)


def test_the_last_stage_has_one_tensor_and_a_single_stage_none():
    for n_stages, stage, keys in ((2, 1, [ACT]), (1, 0, [])):
        _, *tensors = Server(range(4), n_stages=n_stages, stage=stage).asked(request(n_max=1))
        assert [send.body.key for send in tensors] == keys


def test_a_task_that_a_client_may_have_done_is_not_offered():
    owner = Server(range(1))
    for client in (WORKER, OTHER):
        owner.table.lease(FORWARD, 0, client, 0.0, 5.0)
        owner.table.expire(5.0)
    assert owner.table.spare == [] == owner.asked(request())


def test_nothing_is_offered_to_a_server_that_would_be_done_later():
    owner = Server(range(4))
    assert owner.asked(request(BUSY), own=IDLE) == []
    assert owner.asked(request(((12.0, 1.0),)), own=BUSY) == []  # done at 14 s with what has to travel, the owner at 13
    assert len(owner.offers(8.0, BUSY)) > 1  # the other one's clients have gone on since it asked


def test_nobody_is_offered_two_things_at_a_time_or_without_asking_again():
    owner = Server(range(8))
    (offer, *_) = owner.asked(request(n_max=1))
    assert owner.offers(0.0) == [] == owner.asked(request())
    owner.stealing.on_reply(owner.table, owner.steals, THIEF, StealReply(STEP, True))
    assert len(owner.offers(0.0)) > 1


def test_a_refused_task_is_done_by_its_owner_and_its_tensors_are_dropped():
    owner, thief = Server(range(4)), Server(range(4, 8), THIEF)
    offer, _ = owner.asked(request(n_max=1))
    thief.arrived(ACT)
    reply, discard = thief.offered(offer.body, n_max=0)
    assert reply.body == StealReply(STEP, False) and discard == Discard(ACT)
    assert thief.arrived(GRAD) == [Discard(GRAD)] and not thief.steals.is_open
    owner.stealing.on_reply(owner.table, owner.steals, THIEF, reply.body)
    assert (FORWARD, 3) in owner.table.spare and not owner.steals.is_open
    assert owner.table.n_left == 4


def test_what_is_stolen_is_not_offered_on():
    thief = Server(range(4, 8), THIEF, n_stages=1, stage=0)
    thief.offered(StealOffer(STEP, ((BACKWARD, 3, False),)))
    (offer,) = thief.asked(request(n_max=9), src=OTHER)
    assert 3 not in {m for _, m, _ in offer.body.tasks}


def test_a_server_asks_once_until_it_has_taken_something():
    thief = Server(range(4), THIEF, n_stages=1, stage=0)
    asks = thief.stealing.ask(request(), thief.steals, (OWNER, OTHER))
    assert [ask.dst for ask in asks] == [OWNER, OTHER] and thief.steals.has_asked
    thief.offered(StealOffer(STEP, ((BACKWARD, 5, False),)))
    assert not thief.steals.has_asked
    assert thief.stealing.ask(request(n_max=0), thief.steals, (OWNER,)) == []
