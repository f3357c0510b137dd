"""Peers per stage while a stage waits for its last replica, which stays a member of the view; workers per stage."""

from jaxdt.protocol import events as ev
from jaxdt.protocol.presence import peers_there, workers_there


def said(at_s, kind, by=ev.COORDINATOR, **fields):
    return {"what": "report", "peer": by, "t": at_s, "kind": kind, "fields": fields}


def view(at_s, **members):
    return said(at_s, "view", members={name[1:]: stage for name, stage in members.items()})


def test_a_stage_whose_last_replica_is_silent_has_no_peer_until_it_is_heard_again():
    found = peers_there([view(1.0, p0=0, p1=1), said(5.0, "lost", peer=1), said(48.0, "returned", peer=1)])
    assert found == [(1.0, {0: 1, 1: 1}), (5.0, {0: 1, 1: 0}), (48.0, {0: 1, 1: 1})]


def test_a_view_that_only_another_stage_needed_does_not_bring_a_silent_peer_back():
    lost = [said(5.0, "lost", peer=1), said(6.0, "lost", peer=2)]
    again = [said(17.0, "candidate", peer=1), view(18.0, p0=0, p1=1)]
    found = peers_there([view(1.0, p0=0, p1=1, p2=0), *lost, view(6.5, p0=0, p1=1), *again])
    counts = [tuple(peers[stage] for stage in (0, 1)) for _, peers in found]
    assert counts == [(2, 1), (2, 0), (1, 0), (1, 1)] and [at_s for at_s, _ in found] == [1.0, 5.0, 6.0, 18.0]


def test_a_newcomer_takes_a_lost_stage_and_a_stage_without_members_has_0():
    lost = said(5.0, "lost", peer=1)
    found = peers_there([view(1.0, p0=0, p1=1), lost, view(6.0, p0=0), view(23.0, p0=0, p300002=1)])
    assert found == [(1.0, {0: 1, 1: 1}), (5.0, {0: 1, 1: 0}), (23.0, {0: 1, 1: 1})]


def test_a_coordinator_that_was_started_again_takes_the_members_for_present():
    lost = said(5.0, "lost", peer=1)
    found = peers_there([view(1.0, p0=0, p1=1), lost, said(30.0, "restarted", members=[0, 1])])
    assert [peers[1] for _, peers in found] == [1, 0, 1]


def here(at_s, worker, server):
    return said(at_s, "worker_here", worker=worker, server=server, is_back=False)


def gone(at_s, worker, server):
    return said(at_s, "worker_gone", worker=worker, server=server, reason="hung up", n_redone=0)


def test_workers_count_for_the_stage_of_the_server_that_let_them_in():
    found = workers_there([view(1.0, p0=0, p1=1), here(2.0, 4, 0), here(3.0, 5, 1), gone(9.0, 4, 0)])
    assert found == [(1.0, {0: 0, 1: 0}), (2.0, {0: 1, 1: 0}), (3.0, {0: 1, 1: 1}), (9.0, {0: 0, 1: 1})]


def test_a_server_that_is_lost_has_lost_its_workers_and_one_that_went_elsewhere_is_not_gone():
    moved = [here(2.0, 4, 0), here(5.0, 4, 1), gone(6.0, 4, 0)]
    found = workers_there([view(1.0, p0=0, p1=1), *moved, said(8.0, "lost", peer=1)])
    assert found == [(1.0, {0: 0, 1: 0}), (2.0, {0: 1, 1: 0}), (5.0, {0: 0, 1: 1}), (8.0, {0: 0, 1: 0})]


def test_a_run_without_workers_has_no_change_of_them():
    assert len(workers_there([view(1.0, p0=0, p1=1), said(5.0, "lost", peer=1), view(6.0, p0=0)])) == 1
