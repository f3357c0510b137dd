"""Requests of operators to the coordinator: the ones that it carries out or refuses, and the news that a peer gets."""

import json
import math
from dataclasses import replace

import fleet
import pytest
from test_coordinator import STAGE_OF, TERMS, Driver, assert_lost, assert_over, lose, of, reports, sent
from test_membership import from_coordinator, member

from jaxdt.membership.commit import TwoPhaseCommit
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import load_durable_state, load_operator_state
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import NoteReport, OperatorReport

OPERATOR = ev.OPERATOR_IDS + 7


def ask(run, command, peer=None, now_s=0.0):
    """The coordinator's answer, and its actions until what has to be durable for it is so."""
    actions = run.event(ev.Received(ev.Header("", 0, 0, OPERATOR), ev.OperatorRequest(command, peer)), now_s)
    if [persist for persist in of(actions, ev.Persist) if persist.name == "operator"]:
        assert OPERATOR not in sent(actions, ev.OperatorAnswer), "what is not durable may be forgotten by a restart"
        actions = actions + run.event(ev.Persisted("operator"))
    return sent(actions, ev.OperatorAnswer)[OPERATOR], actions


@pytest.fixture
def run():
    begun = Driver()
    begun.begin()
    return begun


# ------------------------------------------------------------------------------------------------ steps and checkpoints


def test_a_pause_holds_back_the_step_that_all_are_prepared_for(run):
    answer, actions = ask(run, "pause")
    assert answer == ev.OperatorAnswer(True, "pauses: step 1 is computed, and committed when the run is resumed")
    assert [persist.value["paused"] for persist in of(actions, ev.Persist)] == [True]
    assert not of(run.prepare(0), ev.Persist)
    answer, actions = ask(run, "resume")
    assert [persist.name for persist in of(actions, ev.Persist)] == ["operator", "steps"]
    assert set(sent(run.event(ev.Persisted("steps")), ev.Committed)) == set(STAGE_OF)
    assert [report["command"] for report in reports(run.actions, "operator")] == ["pause", "resume"]


def test_a_pause_outlives_the_coordinator(run):
    ask(run, "pause")
    disk = {action.name: action.value for action in of(run.actions, ev.Persist)}
    assert load_operator_state(disk).paused
    disk["coordinator_term"] = 1
    again = Driver()
    again.machine = Coordinator(TERMS, TwoPhaseCommit(TERMS), load_durable_state(disk))
    again.event(ev.Started())
    again.event(ev.Persisted("coordinator_term"))
    assert not of(again.prepare(0), ev.Persist)
    assert "steps" in [persist.name for persist in of(ask(again, "resume")[1], ev.Persist)]


def test_the_step_under_way_at_a_restart_has_no_known_time(run):
    """It began under the earlier coordinator, at a moment that the later one does not know."""
    run.commit(0, now_s=2.0)
    disk = {action.name: action.value for action in of(run.actions, ev.Persist)} | {"coordinator_term": 1}
    again = Driver()
    again.machine = Coordinator(TERMS, TwoPhaseCommit(TERMS), load_durable_state(disk))
    again.event(ev.Started(), 17.0)
    (last,) = reports(again.event(ev.Persisted("coordinator_term"), 17.0), "step")
    (first,) = reports(again.commit(1, now_s=21.2), "step")
    (second,) = reports(again.commit(2, now_s=22.2), "step")
    assert [report["step"] for report in (last, first, second)] == [0, 1, 2]
    assert all(math.isnan(report[name]) for report in (last, first) for name in ("step_s", "tokens_per_s"))
    assert second["step_s"] == pytest.approx(1.0)


def test_the_next_record_asks_for_a_checkpoint_and_the_one_after_it_does_not(run):
    assert ask(run, "checkpoint")[0] == ev.OperatorAnswer(True, "makes a checkpoint of 1 steps")
    records = [body.record for step in (0, 1) for body in [sent(run.commit(step), ev.Committed)[0]]]
    assert [record.checkpoint for record in records] == [True, False]


@pytest.mark.parametrize("paused", [False, True])
def test_a_stop_waits_for_its_checkpoint_and_commits_no_further_step(run, paused):
    if paused:
        ask(run, "pause")
    assert ask(run, "stop")[0].text == "stops when the checkpoint of 1 steps is complete"
    assert sent(run.commit(0), ev.Committed)[0].record.checkpoint
    assert not of(run.prepare(1), ev.Persist)
    assert not of(run.message(0, ev.Saved(1, 0)), ev.Stop)
    assert not of(run.message(1, ev.Saved(1, 1)), ev.Stop)
    assert_over(
        run.event(ev.Persisted("checkpoint")), 0, "stopped by an operator after 1 steps, of which there is a checkpoint"
    )


def test_the_first_interrupt_ends_the_run_with_a_checkpoint(run):
    run.commit(0)
    actions = run.event(ev.StopRequested())
    assert [report.answer for report in of(actions, OperatorReport)] == [
        "stops when the checkpoint of 2 steps is complete; interrupt it again to end it at once"
    ]
    run.commit(1)
    assert not of(run.prepare(2), ev.Persist)
    run.message(0, ev.Saved(2, 0))
    run.message(1, ev.Saved(2, 1))
    assert_over(run.event(ev.Persisted("checkpoint")), 130, "interrupted after 2 steps, of which there is a checkpoint")


def test_an_interrupt_ends_a_paused_run_with_a_checkpoint_too(run):
    run.commit(0)
    ask(run, "pause")
    assert [persist.name for persist in of(run.event(ev.StopRequested()), ev.Persist)] == ["operator"]
    run.event(ev.Persisted("operator"))
    assert of(run.prepare(1), ev.Persist)


def test_an_interrupt_without_a_step_to_save_ends_the_run_at_once(run):
    assert_over(run.event(ev.StopRequested()), 130, "interrupted")


def test_a_second_interrupt_ends_the_run_at_once(run):
    run.commit(0)
    assert not of(run.event(ev.StopRequested()), ev.Stop)
    assert_over(run.event(ev.Interrupted()), 130, "interrupted")


def test_a_stop_outlives_a_rollback():
    run = Driver(on_nonfinite="rollback")
    run.begin()
    ask(run, "stop")
    run.commit(0)
    run.machine._roll_back(run.machine.roster.roll_back(ev.Checkpoint()))
    run.event(ev.Persisted("view"))
    assert sent(run.commit(0), ev.Committed)[0].record.checkpoint
    run.message(0, ev.Saved(1, 0), generation=1)
    run.message(1, ev.Saved(1, 1), generation=1)
    assert of(run.event(ev.Persisted("checkpoint")), ev.Stop)


def test_a_peer_writes_the_checkpoint_that_a_record_asks_for():
    record = ev.Record(0, (), 1.0, 4, "apply", 0, True)
    assert ev.WriteCheckpoint(1) not in member().handle(1.0, ev.Updated(1, 1))
    machine = member()
    machine.handle(1.0, from_coordinator(ev.Committed(record)))
    assert ev.WriteCheckpoint(1) in machine.handle(1.0, ev.Updated(1, 1))
    machine = member()
    machine.handle(1.0, from_coordinator(replace(machine.view, number=2, records=(record,))))
    assert ev.WriteCheckpoint(1) in machine.handle(1.0, ev.Updated(1, 1))


# ---------------------------------------------------------------------------------------------------------------- peers


def test_a_drained_peer_leaves_as_if_it_had_been_asked_on_its_host(run):
    answer, actions = ask(run, "drain", 2)
    assert answer == ev.OperatorAnswer(True, "peer 2 (stage 0) is asked to leave")
    assert sent(actions, ev.Drain) == {2: ev.Drain()}
    machine = member()
    said, letter = machine.handle(1.0, from_coordinator(ev.Drain()))
    assert type(letter.body).__name__ == "Leaving"
    assert "a second interrupt ends it at once" in said.line
    assert machine.admit(ev.Header("r", 0, 1, 0), ev.Drain()) == "drop"  # another peer may not ask for it


def test_an_evicted_peer_goes_at_once_and_only_its_next_process_comes_back(run):
    answer, actions = ask(run, "evict", 2)
    assert answer == ev.OperatorAnswer(True, "peer 2 (stage 0) is evicted; its process ends, and may be started again")
    assert_lost(actions, 2, "peer 2 (stage 0): lost, evicted by an operator")
    run.event(ev.Persisted("view"))
    ended = sent(run.message(2, ev.Hello(2, 0, "f", "h2:1")), ev.Ended)
    assert ended == {2: ev.Ended(3, "peer 2: evicted by an operator")}
    run.message(2, ev.Hello(2, 0, "f", "h2:1", process=6))
    assert [fields["peer"] for fields in reports(run.message(2, ev.Profiled({}, 0, 6)), "candidate")] == [2]


def test_the_last_replica_of_a_stage_is_not_evicted_and_is_drained_later(run):
    ask(run, "evict", 2)
    run.event(ev.Persisted("view"))
    answer, actions = ask(run, "evict", 0)
    assert answer.text == "evict: peer 0 (stage 0) is the last replica of its stage, whose state would be lost"
    assert not answer.accepted and not of(actions, ev.Persist)
    assert ask(run, "drain", 0)[0].text.endswith("it is the last of its stage, and stays until another joins")


def test_a_revoked_peer_is_put_out_after_that_is_durable_and_all_have_heard_of_it(run):
    actions = run.event(ev.Received(ev.Header("", 0, 0, OPERATOR), ev.OperatorRequest("revoke", 2)))
    assert not of(actions, ev.Revoke) and not of(actions, ev.Disconnect)
    actions = run.event(ev.Persisted("operator"))
    assert actions[0] == ev.Revoke((2,))
    assert set(sent(actions, ev.Revoked)) == set(STAGE_OF)
    assert_lost(actions, 2, "peer 2 (stage 0): lost, revoked by an operator")


def test_a_revoked_peer_stays_out(run):
    ask(run, "revoke", 2)
    run.event(ev.Persisted("view"))
    for src, body in (
        (2, ev.Hello(2, 0, "f", "h2:1", 9)),
        (2, ev.Heartbeat(1, {})),
        (ev.TEMPORARY_IDS + 2, ev.Join(2)),
    ):
        actions = run.event(ev.Received(ev.Header("r", 0, 2, src), body))
        assert not of(actions, ev.Send) and reports(actions, "dropped")
    told = run.message(3, ev.Hello(3, 1, "f", "h3:1"))
    assert sent(told, ev.Revoked) == {3: ev.Revoked((2,))}
    again = Driver(revoked=(2,))
    again.event(ev.Started())
    assert ev.Revoke((2,)) in again.event(ev.Persisted("coordinator_term"))
    assert not of(again.join(2), ev.Connect)


def test_a_peer_refuses_those_that_are_revoked():
    assert member().handle(1.0, from_coordinator(ev.Revoked((0,)))) == [ev.Revoke((0,))]
    assert member().admit(ev.Header("r", 0, 1, 0), ev.Revoked((1,))) == "drop"


# -------------------------------------------------------------------------------------------------------------- answers


def test_status(run):
    run.commit(0)
    ask(run, "drain", 2)
    answer, actions = ask(run, "status")
    status = json.loads(answer.text)
    assert (status["view"], status["steps"], status["of_steps"], status["paused"]) == (1, 1, 3, False)
    assert {peer["peer"]: (peer["stage"], peer["address"], peer["state"]) for peer in status["members"]} == {
        peer: (stage, f"h{peer}:1", "live") for peer, stage in STAGE_OF.items()
    }
    assert len(actions) == 1


def test_status_says_when_each_peer_was_heard(run):
    run.message(2, ev.Heartbeat(1, {}), 1.5)
    answer, _ = ask(run, "status", now_s=2.0)
    silences = {peer["peer"]: peer["silent_s"] for peer in json.loads(answer.text)["members"]}
    assert silences == {0: 2.0, 1: 2.0, 2: 0.5, 3: 2.0}
    lines = fleet.table(json.loads(answer.text)).splitlines()
    heard = [line[26:38].strip() for line in lines[1:]]
    assert heard == ["last heard", "2.0 s ago", "0.5 s ago", "2.0 s ago", "2.0 s ago"]  # by stage


def note_to(run, peer):
    """The note in the coordinator's answer to a heartbeat."""
    return sent(run.message(peer, ev.Heartbeat(1, {})), ev.HeartbeatAck)[peer].note


def test_a_peers_heartbeat_is_answered_with_why_the_run_does_not_go_on(run):
    assert [note_to(run, peer) for peer in STAGE_OF] == ["", "", "", ""]
    ask(run, "pause")
    assert {note_to(run, peer) for peer in STAGE_OF} == {"the run is paused by an operator, until fleet.py resume"}
    ask(run, "resume")
    lose(run, 1)
    run.event(ev.Persisted("view"))
    run.message(3, ev.Leaving())
    stays = "stays until another joins, as the last of its stage; fleet.py stop ends the run with a checkpoint"
    assert [note_to(run, peer) for peer in (0, 2, 3)] == ["", "", stays]


def test_a_peer_says_once_why_the_run_does_not_go_on_and_once_that_it_does():
    machine = member()
    said = [
        machine.handle(1.0, from_coordinator(ev.HeartbeatAck(n, 1.0, note)))
        for n, note in enumerate(("", "p", "p", ""))
    ]
    assert said == [[], [NoteReport("p")], [], [NoteReport("")]]
    assert [NoteReport(text).line for text in ("p", "")] == ["p", "the run continues"]


REFUSED = {
    "resume": (("resume", None), "resume: the run is not paused"),
    "a word": (("dance", None), "command: got 'dance', expected one of status, pause"),
    "no peer": (("drain", None), "drain: got no peer, expected a peer"),
    "a peer too many": (("pause", 1), "pause: got peer 1, expected none"),
    "no member": (("evict", 9), "evict: peer 9 is no member, expected one of 0, 1, 2, 3"),
}


@pytest.mark.parametrize(("request_", "words"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused_in_one_line(run, request_, words):
    answer, actions = ask(run, *request_)
    assert not answer.accepted and words in answer.text and "\n" not in answer.text
    assert [type(action) for action in actions if isinstance(action, ev.Send | ev.Persist | ev.Stop)] == [ev.Send]


def test_before_the_first_view_only_status_and_revoke_are_answered():
    run = Driver()
    assert json.loads(ask(run, "status")[0].text)["members"] == []
    assert ask(run, "pause")[0].text == (
        "pause: the run has not begun, it waits for the peers of the plan; Ctrl-C at its coordinator ends it"
    )
    assert ask(run, "revoke", 17)[0].accepted
    assert ask(run, "revoke", 17)[0].text == "revoke: peer 17 is revoked already"


def test_a_peer_is_no_operator(run):
    assert not of(run.message(1, ev.OperatorRequest("stop")), ev.Send)
    assert not of(run.event(ev.Received(ev.Header("", 0, 0, ev.TEMPORARY_IDS), ev.OperatorRequest("stop"))), ev.Send)


def test_nothing_is_kept_of_an_operator_that_is_gone(run):
    ask(run, "status")
    assert run.event(ev.LinkChanged(OPERATOR, False)) == [ev.Disconnect(OPERATOR)]


# ------------------------------------------------------------------------------------- newcomers with a certificate


def join(run, peer, now_s=0.0, nonce=0):
    """The messages of the coordinator to a newcomer with the certificate of a peer."""
    src = ev.TEMPORARY_IDS + nonce * ev.PEER_IDS + peer
    actions = run.event(ev.Received(ev.Header("", 0, 0, src), ev.Join(peer, is_new=True)), now_s)
    return [action.body for action in of(actions, ev.Send) if action.dst == src]


def test_a_newcomer_with_a_certificate_keeps_its_id(run):
    """It gets the stage that needs it most. A second process waits for the first, and takes its place when that is
    lost."""
    (welcome,) = join(run, 40)
    assert (welcome.peer, welcome.stage, welcome.fingerprint) == (40, 0, "f")
    run.message(40, ev.Hello(40, 0, "f", "h40:1", 1), view=1)
    run.message(40, ev.Profiled({}, 0, process=1))
    run.commit(0)
    run.event(ev.Persisted("view"))
    assert 40 in run.machine.roster.members
    assert join(run, 40, now_s=10.0, nonce=3) == []
    assert lose(run, 40, now_s=10.0)
    welcome = sent(run.actions, ev.Welcome)[ev.TEMPORARY_IDS + 3 * ev.PEER_IDS + 40]
    assert (welcome.peer, welcome.stage, welcome.fingerprint) == (40, 0, "f")


def test_two_newcomers_with_one_certificate_do_not_both_come(run):
    assert len(join(run, 40)) == 1
    assert join(run, 40, nonce=1) == []


def test_views_go_to_members_only(run):
    ask(run, "evict", 2)
    assert set(sent(run.event(ev.Persisted("view")), ev.View)) == {0, 1, 3}
