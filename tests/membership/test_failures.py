"""One peer's failure is that peer's: who is put out for it, and when nobody is left to go on."""

from dataclasses import replace

import pytest
from test_coordinator import (
    STAGE_OF,
    Driver,
    assert_lost,
    header,
    lose,
    of,
    reports,
    sent,
)

from jaxdt.membership.evictions import OVERDUE_MAX, SAME_FAILURES_MAX, SAVE_FAILURES_MAX
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import OverdueReport


def begun(**terms):
    run = Driver(**terms)
    run.begin()
    return run


def newcomer(run, number=0):
    """The peer id of a newcomer that has said hello."""
    actions = run.event(ev.Received(header(ev.TEMPORARY_IDS + number, run=""), ev.Join()))
    (welcome,) = [action.body for action in of(actions, ev.Send) if isinstance(action.body, ev.Welcome)]
    run.message(welcome.peer, ev.Hello(welcome.peer, welcome.stage, "f", "h9:1", process=1))
    return welcome.peer


def test_all_whose_leases_are_over_leave_with_one_view():
    run = begun()
    actions = lose(run, 0, 1)
    assert [report["peer"] for report in reports(actions, "lost")] == [0, 1]
    (persist,) = of(actions, ev.Persist)
    assert [member["peer"] for member in persist.value["members"]] == [2, 3]


# ------------------------------------------------------------------------------------------------------ a peer fails


@pytest.mark.parametrize(
    ("message", "words"), [(ev.Failed("disk: full"), "disk: full"), (ev.Leaving(), "left before it was admitted")]
)
def test_a_newcomer_that_fails_or_leaves_before_it_is_a_member_harms_nobody(message, words):
    run = begun()
    peer = newcomer(run)
    actions = run.message(peer, message)
    stage = run.machine.roster.peers[peer].stage
    assert reports(actions, "failed") == [{"peer": peer, "reason": f"peer {peer} (stage {stage}): {words}"}]
    assert ev.Disconnect(peer) in actions and not of(actions, ev.Stop) and not of(actions, ev.Persist)
    run.commit(0)
    assert run.machine.n_committed == 1


def test_a_candidate_that_fails_is_no_candidate_any_more():
    run = begun()
    peer = newcomer(run)
    run.message(peer, ev.Profiled({"F": 1.0}, 0, process=1))
    run.message(peer, ev.Failed("disk: full"))
    run.prepare(0)
    assert [persist.name for persist in of(run.event(ev.Persisted("steps")), ev.Persist)] == []


def test_a_member_that_fails_leaves_with_its_reason_and_the_run_goes_on():
    run = begun()
    assert_lost(run.message(2, ev.Failed("disk: full")), 2, "peer 2 (stage 0): lost, disk: full")
    assert set(sent(run.event(ev.Persisted("view")), ev.View)) == {0, 1, 3}
    assert not of(run.actions, ev.Stop)


def test_the_last_of_a_stage_that_fails_is_waited_for_as_one_that_is_lost():
    run = begun(waits=True)
    lose(run, 2)
    run.event(ev.Persisted("view"))
    actions = run.message(0, ev.Failed("disk: full"))
    assert [report["stage"] for report in reports(actions, "vacant")] == [0] and not of(actions, ev.Stop)


def test_a_run_that_does_not_wait_ends_with_code_2():
    run = begun()
    lose(run, 2)
    run.event(ev.Persisted("view"))
    (stop,) = of(run.message(0, ev.Failed("disk: full")), ev.Stop)
    assert stop == ev.Stop(2, "peer 0 (stage 0): lost, disk: full; it was the last of its stage")


def test_when_everybody_has_failed_the_run_is_over():
    run = begun(waits=True)
    for peer in (0, 1, 2):
        assert not of(run.message(peer, ev.Failed("disk: full")), ev.Stop)
        run.event(ev.Persisted("view")) if run.machine._being_persisted else None
    assert of(run.message(3, ev.Failed("disk: full")), ev.Stop) == [ev.Stop(2, "peer 3 (stage 1): disk: full")]


def test_a_stage_at_which_one_after_another_fails_for_the_same_reason_ends_the_run():
    """The checkpoint that they all begin with is damaged, say: a person has to mend it."""
    run = begun(waits=True)
    lose(run, 2)
    run.event(ev.Persisted("view"))
    run.message(0, ev.Failed("stage_0: damaged"))
    for number in range(SAME_FAILURES_MAX - 1):
        peer = newcomer(run, number)
        actions = run.message(peer, ev.Failed("stage_0: damaged"))
    assert of(actions, ev.Stop) == [ev.Stop(2, f"peer {peer} (stage 0): stage_0: damaged")]


def test_but_not_while_a_silent_replica_is_waited_for():
    run = begun(waits=True, stage_grace_s=60.0)
    lose(run, 2)
    run.event(ev.Persisted("view"))
    run.message(0, ev.Failed("disk: full"))
    for number in range(SAME_FAILURES_MAX):
        run.message(newcomer(run, number), ev.Failed("disk: full"))
    assert not of(run.actions, ev.Stop)


def test_nor_while_another_newcomer_is_ready():
    """The view with which it takes the place is being written."""
    run = begun(waits=True)
    lose(run, 2)
    run.event(ev.Persisted("view"))
    run.message(0, ev.Failed("disk: full"))
    ready = newcomer(run)
    assert reports(run.message(ready, ev.Profiled({"F": 1.0}, 0, process=1)), "rollback")
    for number in range(1, SAME_FAILURES_MAX + 1):
        run.message(newcomer(run, number), ev.Failed("disk: full"))
    assert not of(run.actions, ev.Stop)


def test_failures_for_different_reasons_do_not():
    run = begun(waits=True)
    lose(run, 2)
    run.event(ev.Persisted("view"))
    run.message(0, ev.Failed("stage_0: damaged"))
    for number in range(2 * SAME_FAILURES_MAX):
        run.message(newcomer(run, number), ev.Failed(f"disk {number % 2}: full"))
    assert not of(run.actions, ev.Stop)


# ------------------------------------------------------------------------------------------------ a checkpoint fails


def fail_to_save(run, peer, n):
    """The actions of the last of n failures in a row."""
    for i in range(n):
        actions = run.message(peer, ev.SaveFailed(2 * i + 2, "disk: full"))
        assert reports(actions, "save_failed")[0]["n_in_a_row"] == i + 1
    return actions


def test_a_checkpoint_that_fails_is_reported_and_the_run_goes_on():
    run = begun()
    fail_to_save(run, 0, SAVE_FAILURES_MAX - 1)
    assert not of(run.actions, ev.Stop) and set(run.machine.roster.members) == set(STAGE_OF)
    run.message(0, ev.Saved(4, 0))
    fail_to_save(run, 0, SAVE_FAILURES_MAX - 1)
    assert not reports(run.actions, "lost")


def test_a_copy_of_another_stages_part_does_not_make_up_for_checkpoints_that_fail():
    run = begun()
    fail_to_save(run, 0, SAVE_FAILURES_MAX - 1)
    run.message(0, ev.Saved(4, 1))
    assert reports(run.message(0, ev.SaveFailed(6, "disk: full")), "save_failed")[0]["n_in_a_row"] == SAVE_FAILURES_MAX


def test_a_member_that_cannot_write_checkpoints_is_put_out_if_its_stage_has_another():
    run = begun()
    why = f"{SAVE_FAILURES_MAX} checkpoints in a row could not be written, the last of 6 steps: disk: full"
    assert_lost(fail_to_save(run, 0, SAVE_FAILURES_MAX)[1:], 0, f"peer 0 (stage 0): lost, {why}")
    run.event(ev.Persisted("view"))
    for body in (ev.Heartbeat(9, {}), ev.Hello(0, 0, "f", "h0:1")):
        assert sent(run.message(0, body), ev.Ended) == {0: ev.Ended(2, f"peer 0 (stage 0): {why}")}
    assert not of(run.actions, ev.Stop)
    again = run.message(0, ev.Hello(0, 0, "f", "h0:1", process=7))  # a person has mended it and started it again
    assert not sent(again, ev.Ended) and run.machine.roster.has_lease(0)


def test_if_there_is_no_other_the_run_ends_with_code_2():
    run = begun(waits=True)
    lose(run, 2)
    run.event(ev.Persisted("view"))
    actions = fail_to_save(run, 0, SAVE_FAILURES_MAX)
    why = f"{SAVE_FAILURES_MAX} checkpoints in a row could not be written, the last of 6 steps: disk: full"
    assert of(actions, ev.Stop) == [ev.Stop(2, f"peer 0 (stage 0): {why}")]


# ------------------------------------------------------------------------------------------------- Work is overdue

WORK = ev.Overdue("3:0B1@p2", 4.5, 4.0, blocks=True)
WHY = "3:0B1@p2 has run for 4.5 s, expected at most 4.0 s"


def test_a_peer_whose_work_is_overdue_stays_as_long_as_nobody_waits_for_it():
    run = begun()
    told = run.message(2, ev.Overdue("3:0F1@p2", 4.5, 4.0))
    assert [type(action) for action in told] == [OverdueReport] and not told[0].blocks


def test_a_peer_whose_overdue_work_blocks_the_run_leaves_if_its_stage_has_another():
    run = begun()
    assert_lost(run.message(2, WORK), 2, f"peer 2 (stage 0): lost, {WHY}")
    assert reports(run.actions, "overdue") == [
        {"peer": 2, "work": "3:0B1@p2", "seconds": 4.5, "deadline_s": 4.0, "blocks": True},
    ]
    run.event(ev.Persisted("view"))
    assert type(run.message(2, ev.Heartbeat(9, {}))[-1].body) is ev.View  # it learns of it, and may come back


def test_the_last_of_a_stage_is_waited_for():
    run = begun()
    lose(run, 2)
    assert [type(action) for action in run.message(0, WORK)] == [OverdueReport]  # also while the view is being written
    run.event(ev.Persisted("view"))
    assert [type(action) for action in run.message(0, WORK)] == [OverdueReport]


def test_the_third_time_a_peer_is_put_out():
    run = begun()
    for n in range(OVERDUE_MAX):
        run.message(2, replace(WORK, work=f"{n}:0B1@p2"))
        run.event(ev.Persisted("view"))
        told = run.message(2, ev.Heartbeat(9, {}))[-1].body
        if n + 1 < OVERDUE_MAX:
            assert type(told) is ev.View
            view = run.machine.roster.first_view(1, ev.Checkpoint())
            members = tuple(replace(m, admission=n + 2) if m.peer == 2 else m for m in view.members)
            run.machine.roster.adopt(replace(view, members=members))  # peer 2 is admitted again
            run.machine.roster.on_message(2, 1.0)
    why = WHY.replace("3:", f"{OVERDUE_MAX - 1}:")
    assert told == ev.Ended(2, f"peer 2 (stage 0): {why}; its Work was overdue 3 times of late")


def test_also_if_nobody_ever_waited_for_it_and_the_same_work_counts_once():
    run = begun()
    for n in range(OVERDUE_MAX):
        assert not reports(run.actions, "lost")
        for _ in range(3):
            run.message(2, ev.Overdue(f"{n}:0F1@p2", 4.5, 4.0))
    assert reports(run.actions, "lost")[0]["reason"].endswith("its Work was overdue 3 times of late")
