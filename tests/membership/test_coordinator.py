import math
import re
from dataclasses import replace

import pytest

from jaxdt.membership.commit import ROLLBACKS_MAX, TwoPhaseCommit
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.membership.held_out_rows import HeldOutRows
from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import RECONNECT_S
from jaxdt.protocol.reports import CandidateReport, DroppedReport, Report
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run import serialize
from jaxdt.run.config import TrainConfig
from jaxdt.run.seq_lengths import SeqLengths

# Two stages, two replicas each.
STAGE_OF = {0: 0, 1: 1, 2: 0, 3: 1}
TERMS = CoordinatorConfig(
    run="r",
    fingerprint="f",
    stage_of=STAGE_OF,
    n_stages=2,
    start_version=0,
    start_generation=0,
    n_steps=3,
    tokens_per_sample=SeqLengths(16),
    on_nonfinite="stop",
    heartbeat_s=0.5,
    deadline_floor_s=4.0,
)


def header(peer, generation=0, run="r", view=1):
    return ev.Header(run, generation, view, peer)


class Driver:
    """A coordinator and all that it did, so far."""

    def __init__(self, rows=None, **terms):
        config = replace(TERMS, **terms)
        self.machine = Coordinator(config, TwoPhaseCommit(config, rows))
        self.actions = []

    def event(self, event, now_s=0.0):
        new = self.machine.handle(now_s, event)
        self.actions += new
        return new

    def message(self, peer, body, now_s=0.0, **head):
        if self.machine.view is None:
            head = {"view": 0} | head  # a peer has a view only if the coordinator has made one
        return self.event(ev.Received(header(peer, **head), body), now_s)

    def join(self, peer, version=0):
        return self.message(peer, ev.Hello(peer, STAGE_OF[peer], "f", f"h{peer}:1")) + self.message(
            peer, ev.Profiled({"F": 1.0}, version)
        )

    def begin(self, now_s=0.0):
        for peer in STAGE_OF:
            self.join(peer)
        return self.event(ev.Persisted("view"), now_s)

    def prepare(self, step, peers=STAGE_OF, now_s=0.0, **changes):
        """The actions after the last of them."""
        actions = []
        for peer in peers:
            view = self.machine.view
            head = {"generation": view.generation, "view": view.number}
            actions = self.message(peer, prepared(peer, step, **changes), now_s, **head)
        return actions

    def save(self, version):
        """Each stage's part is durable, on one disk that all see."""
        for peer in (0, 1):
            view = self.machine.view
            head = {"generation": view.generation, "view": view.number}
            self.message(peer, ev.Saved(version, STAGE_OF[peer], 0.0, f"digest{peer}", 9), **head)
        return self.event(ev.Persisted("checkpoint"))

    def commit(self, step, now_s=0.0):
        self.prepare(step, now_s=now_s)
        return self.event(ev.Persisted("steps"), now_s)


def prepared(peer, step, digest=5, sq_norm=9.0, n_samples=4, losses=(2.0, 2)):
    """Losses are known on the last stage only."""
    stage = STAGE_OF[peer]
    tally = ev.Tally(*losses) if stage == 1 else ev.Tally()
    return ev.Prepared(
        step, 1, (ev.GroupResult(RoundId(RoundKind.GRADIENT, stage, step, view=1), digest, sq_norm, n_samples, tally),)
    )


def sent(actions, kind):
    return {
        action.dst: action.body for action in actions if isinstance(action, ev.Send) and isinstance(action.body, kind)
    }


def of(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def reports(actions, kind):
    return [action.fields for action in actions if isinstance(action, Report) and action.kind == kind]


def assert_over(actions, code, reason):
    """Everybody is told, and the coordinator stops."""
    told = sent(actions, ev.Ended)
    assert set(told) == set(STAGE_OF) and set(told.values()) == {ev.Ended(code, reason)}
    assert of(actions, ev.Stop) == [ev.Stop(code, reason)]
    assert reports(actions, "ended") == [{"code": code, "reason": reason}]


def assert_lost(actions, peer, reason):
    """Its connection is ended, and a view without it is being made."""
    assert reports(actions, "lost") == [{"peer": peer, "reason": reason}]
    assert ev.Disconnect(peer) in actions
    (persist,) = of(actions, ev.Persist)
    assert {member["peer"] for member in persist.value["members"]} == set(STAGE_OF) - {peer}


# --------------------------------------------------------------------------------------------------------- beginning


def test_a_peer_that_the_run_s_other_hosts_cannot_dial_is_refused_and_not_let_in():
    driver = Driver()
    driver.event(ev.Started("10.0.0.1:7700"))
    driver.event(ev.Persisted("coordinator_term"))
    driver.begin()
    for number, address in enumerate(("127.0.0.1:7", "localhost:7", "0.0.0.0:7")):
        told = driver.message(0, ev.Hello(0, 0, "f", address, process=7 + number))
        assert sent(told, ev.Ended)[0].code == 2 and "--listen" in sent(told, ev.Ended)[0].reason, told
        assert ev.Connect(0, address) in told and 0 in driver.machine.roster.members, "the peer in its place stays"
    assert not sent(driver.message(0, ev.Hello(0, 0, "f", "10.0.0.2:7", process=9)), ev.Ended)


def test_the_first_view_waits_for_the_last_profile():
    run = Driver()
    for peer in (0, 1, 2):
        actions = run.join(peer)
        assert not of(actions, ev.Persist)
    assert reports(actions, "waiting") == [{"missing": [3]}]
    run.message(3, ev.Hello(3, 1, "f", "h3:1"))
    assert not of(run.actions, ev.Persist) and not sent(run.actions, ev.View)
    (persist,) = run.message(3, ev.Profiled({}, 0))
    assert persist.name == "view"


def test_a_coordinator_that_waits_says_so_again_after_waits_that_double_up_to_a_minute():
    run = Driver()
    for peer in (0, 2):
        run.join(peer)
    run.message(1, ev.Hello(1, 1, "f", "h1:1"))
    run.event(ev.Refused(None, "an expired credential"))
    said = {}
    for now_s in range(0, 200, 2):
        for peer in (0, 1, 2):
            run.message(peer, ev.Heartbeat(0, {}), float(now_s))
        for report in reports(run.event(ev.Woke("tick"), float(now_s)), "still_waiting"):
            said[now_s] = report
    assert list(said) == [10, 30, 70, 130, 190]
    assert (said[10]["missing"], said[10]["absent"], said[10]["stages"]) == ([1, 3], [3], [])
    assert (said[10]["refusal"], said[10]["waited_s"]) == ("an expired credential", 10.0)


def test_the_view_is_durable_before_it_is_sent():
    run = Driver()
    for peer in STAGE_OF:
        run.join(peer)
    assert not sent(run.actions, ev.View) and run.machine.view is None
    views = sent(run.event(ev.Persisted("view")), ev.View)
    assert set(views) == set(STAGE_OF) and len(set(views.values())) == 1
    view = views[0]
    assert (view.number, view.generation, view.stage_views, view.n_committed) == (1, 0, (1, 1), 0)
    assert [(m.peer, m.stage, m.admission, m.address) for m in view.members] == [
        (peer, stage, 1, f"h{peer}:1") for peer, stage in STAGE_OF.items()
    ]


def test_a_profile_that_comes_again_makes_no_second_view():
    run = Driver()
    run.begin()
    assert not of(run.message(0, ev.Profiled({}, 0)), ev.Persist)


def test_hello_opens_the_way_back():
    assert of(Driver().message(2, ev.Hello(2, 0, "f", "h2:1")), ev.Connect) == [ev.Connect(2, "h2:1")]


@pytest.mark.parametrize("hello", [ev.Hello(1, 1, "g", "h:1"), ev.Hello(1, 0, "f", "h:1"), ev.Hello(0, 0, "f", "h:1")])
def test_hello_of_another_config_or_seat_is_refused(hello):
    run = Driver()
    actions = run.message(1, hello)
    (told,) = sent(actions, ev.Ended).items()
    assert told[0] == 1 and told[1].code == 2
    assert told[1].reason.startswith("peer 1: refused, it runs stage") and "expected stage 1 of f" in str(told)
    assert not of(run.actions, ev.Stop) and not of(run.actions, ev.Connect)


def test_a_run_of_a_refused_peer_goes_on_without_it():
    run = Driver()
    for peer in (0, 2, 3):
        run.join(peer)
    run.message(1, ev.Hello(1, 1, "g", "h:1"))
    run.join(1)
    assert set(sent(run.event(ev.Persisted("view")), ev.View)) == set(STAGE_OF)
    assert not of(run.actions, ev.Stop)


def test_strangers_and_other_runs_are_dropped():
    run = Driver()
    assert of(run.message(9, ev.Hello(9, 0, "f", "h:1")), Report) == [DroppedReport(9, run="r")]
    assert run.message(0, ev.Hello(0, 0, "f", "h:1"), run="other") == [DroppedReport(0, run="other")]


def test_a_peer_with_another_version_ends_the_run_before_it_begins():
    run = Driver()
    run.join(0)
    actions = run.join(1, version=7)
    assert of(actions, ev.Stop) == [ev.Stop(2, "peer 1 (stage 1): has version 7, expected 0")]


def test_a_resumed_run_begins_where_the_checkpoint_was():
    run = Driver(start_version=2, start_generation=1)
    for peer in STAGE_OF:
        run.join(peer, version=2)
    view = sent(run.event(ev.Persisted("view")), ev.View)[0]
    assert (view.n_committed, view.generation) == (2, 1)
    assert sent(run.commit(2), ev.Committed)[0].record.step == 2


# -------------------------------------------------------------------------------------------------------------- commit


def test_a_step_commits_when_every_member_is_prepared():
    run = Driver()
    run.begin()
    assert run.prepare(0, peers=(0, 1, 2)) == []
    (persist,) = run.prepare(0, peers=(3,))
    assert persist.name == "steps"
    (step,) = persist.value
    assert (step["record"]["step"], step["record"]["verdict"]) == (0, "apply")
    assert (step["record"]["sq_norm"], step["record"]["n_samples"]) == (18.0, 4)


def test_no_committed_before_the_record_is_durable():
    run = Driver()
    run.begin()
    run.prepare(0)
    assert not sent(run.actions, ev.Committed) and run.machine.n_committed == 0
    told = sent(run.event(ev.Persisted("steps")), ev.Committed)
    assert set(told) == set(STAGE_OF) and len(set(told.values())) == 1
    assert [r.stage for r in told[0].record.rounds] == [0, 1]
    assert run.machine.n_committed == 1


def test_prepared_that_is_repeated_is_not_two_members():
    run = Driver()
    run.begin()
    assert run.prepare(0, peers=(0, 1, 2, 2, 0)) == []
    assert len(of(run.prepare(0, peers=(3, 3)), ev.Persist)) == 0  # the record is under way already
    assert len(of(run.actions, ev.Persist)) == 2


@pytest.mark.parametrize("step", [1, -1])
def test_prepared_of_another_step_is_ignored(step):
    run = Driver()
    run.begin()
    assert run.prepare(step) == []
    assert len(of(run.prepare(0), ev.Persist)) == 1


def test_prepared_of_an_earlier_step_is_ignored():
    run = Driver()
    run.begin()
    run.commit(0)
    assert run.prepare(0) == []


def test_unequal_results_of_replicas_end_the_run():
    run = Driver()
    run.begin()
    run.prepare(0, peers=(0, 1, 3))
    actions = run.prepare(0, peers=(2,), digest=6)
    assert_over(actions, 3, "step 0: peer 2 holds another result of round 0 of stage0")
    assert run.event(ev.Persisted("steps")) == []


def test_replicas_in_different_rounds_end_the_run():
    run = Driver()
    run.begin()
    run.prepare(0, peers=(0, 1, 3))
    other = ev.GroupResult(RoundId(RoundKind.GRADIENT, 0, 0, view=2), 5, 9.0, 4)
    assert_over(
        run.message(2, ev.Prepared(0, 1, (other,))), 3, "step 0: peer 2 holds another result of round 0 of stage0"
    )


def test_unequal_sample_counts_end_the_run():
    run = Driver()
    run.begin()
    run.prepare(0, peers=(0, 2))
    actions = run.prepare(0, peers=(1, 3), n_samples=5)
    assert of(actions, ev.Stop)[0].code == 3
    assert "the groups counted different numbers of samples" in of(actions, ev.Stop)[0].reason


def test_metrics_of_a_step():
    run = Driver()
    run.begin(now_s=10.0)
    (fields,) = reports(run.commit(0, now_s=12.0), "step")
    assert fields == {
        "step": 0,
        "loss": 1.0,  # two peers of the last stage, 2.0 over 2 samples each
        "step_s": 2.0,
        "tokens_per_s": 4 * 16 / 2.0,
        "gradient_norm": math.sqrt(18.0) / 4,
        "verdict": "apply",
    }


@pytest.mark.parametrize("sq_norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_the_run(sq_norm):
    run = Driver()
    run.begin()
    assert_over(run.prepare(0, sq_norm=sq_norm), 4, "step 0: the gradient is not finite")
    assert not sent(run.actions, ev.Committed)


@pytest.mark.parametrize("sq_norm", [math.nan, math.inf])
def test_or_its_update_is_skipped(sq_norm):
    run = Driver(on_nonfinite="skip")
    run.begin()
    run.prepare(0, sq_norm=sq_norm)
    told = sent(run.event(ev.Persisted("steps")), ev.Committed)
    assert set(told) == set(STAGE_OF) and told[0].record.verdict == "skip"
    assert sent(run.commit(1), ev.Committed)[0].record.verdict == "apply"


def test_or_the_run_rolls_back_to_the_last_complete_checkpoint():
    run = Driver(on_nonfinite="rollback")
    run.begin()
    run.commit(0)
    run.save(1)
    run.commit(1)
    actions = run.prepare(2, sq_norm=math.nan)
    assert reports(actions, "rollback") == [{"step": 2, "to": 1, "generation": 1, "again": [1]}]
    assert not sent(actions, ev.View)
    views = sent(run.event(ev.Persisted("view")), ev.View)
    assert set(views) == set(STAGE_OF)
    assert (views[0].number, views[0].generation, views[0].n_committed, views[0].rolled_back) == (2, 1, 1, True)
    assert sent(run.commit(1), ev.Committed)[3].record.step == 1


def test_what_was_said_before_the_rollback_does_not_count_after_it():
    run = Driver(on_nonfinite="rollback")
    run.begin()
    run.prepare(0, sq_norm=math.nan)
    run.event(ev.Persisted("view"))
    assert [run.message(peer, prepared(peer, 0), generation=0) for peer in STAGE_OF] == [[]] * 4
    assert run.message(0, ev.Saved(1, 0), generation=0) == []
    assert len(of(run.prepare(0), ev.Persist)) == 1


def test_a_run_that_only_rolls_back_ends():
    run = Driver(on_nonfinite="rollback")
    run.begin()
    for _ in range(ROLLBACKS_MAX):
        run.prepare(0, sq_norm=math.nan)
        assert sent(run.event(ev.Persisted("view")), ev.View)
    assert_over(run.prepare(0, sq_norm=math.nan), 4, "step 0: the gradient is not finite")


# ------------------------------------------------------------------------------------------------- leases and the end


def test_the_coordinator_looks_at_leases_at_every_heartbeat():
    run = Driver()
    assert run.event(ev.Started(), 1.0) == [ev.Persist("coordinator_term", 1)]
    assert run.event(ev.Persisted("coordinator_term"), 1.0) == [ev.WakeAt(1.5, "tick")]
    assert Driver().event(ev.Woke("tick"), 2.0) == [ev.WakeAt(2.5, "tick")]


def test_a_heartbeat_is_answered_with_the_clock_and_shown():
    run = Driver()
    run.begin()
    actions = run.message(2, ev.Heartbeat(17, {"busy_s": 3.0}), now_s=1.25)
    assert sent(actions, ev.HeartbeatAck) == {2: ev.HeartbeatAck(17, 1.25)}
    assert reports(actions, "heartbeat") == [{"peer": 2, "busy_s": 3.0}]


def test_a_silent_peer_is_lost():
    run = Driver()
    run.begin()
    for now_s in (2.0, 4.0):
        for peer in (0, 1, 3):
            run.message(peer, ev.Heartbeat(1, {}), now_s)
    assert not reports(run.event(ev.Woke("tick"), 4.0), "lost")
    assert_lost(run.event(ev.Woke("tick"), 4.1), 2, "peer 2 (stage 0): lost, silent for 4.1 s")


def test_any_message_renews_the_lease():
    run = Driver()
    run.begin()
    run.prepare(0, now_s=3.9)
    assert not reports(run.event(ev.Woke("tick"), 7.8), "lost")


def test_a_broken_connection_is_a_loss_unless_it_comes_back():
    run = Driver()
    run.begin()
    assert run.event(ev.LinkChanged(3, False, "reset"), 1.0) == [ev.WakeAt(1.0 + RECONNECT_S, "link")]
    assert not reports(run.event(ev.Woke("tick"), 0.9 + RECONNECT_S), "lost")
    run.event(ev.LinkChanged(3, True), 2.4)
    assert run.event(ev.Woke("link"), 1.0 + RECONNECT_S) == []
    assert not reports(run.event(ev.Woke("tick"), 3.0), "lost")
    run.event(ev.LinkChanged(3, False, "reset"), 3.0)
    run.event(ev.LinkChanged(3, False, "refused"), 3.5)  # the first loss counts
    reason = "peer 3 (stage 1): lost, its connection broke and did not come back"
    assert_lost(run.event(ev.Woke("link"), 3.0 + RECONNECT_S), 3, reason)


def test_a_connection_of_somebody_who_never_said_hello_is_nobodys_loss():
    run = Driver()
    run.join(0)
    run.event(ev.LinkChanged(3, False, "port scan"), 0.1)
    assert not reports(run.event(ev.Woke("tick"), 3.0), "lost")


def test_a_suspicion_is_believed():
    run = Driver()
    run.begin()
    assert not of(run.message(0, ev.Suspect(2, "no link for 4.5 s")), ev.Stop)
    actions = run.event(ev.Woke("tick"), 2 * TERMS.heartbeat_s)
    assert_lost(actions, 2, "peer 2 (stage 0): lost, no link for 4.5 s (said by peer 0 of peer 2)")


def test_a_pair_without_a_way_is_refused_in_one_line():
    """One of the two is put out at once, told why when it speaks again, and stays out until it is started anew."""
    run = elastic()
    line = "peer 0 and peer 2 have no way to each other: neither of the two listens (--listen=); forward a port to one"
    actions = run.message(0, ev.CannotReach(2, "neither of the two listens (--listen=)"))
    (lost,) = reports(actions, "lost")
    assert lost["peer"] == 2 and line in lost["reason"], lost
    run.event(ev.Persisted("view"))
    for body in (ev.Heartbeat(9, {}), ev.Hello(2, 0, "f", "h2:1")):
        (ended,) = [send.body for send in of(run.message(2, body), ev.Send) if isinstance(send.body, ev.Ended)]
        assert ended.code == 2 and ended.reason.startswith(line)
    again = run.message(2, ev.Hello(2, 0, "f", "h2:2", process=7))
    assert not [send for send in of(again, ev.Send) if isinstance(send.body, ev.Ended)]
    assert reports(again, "connected")


def test_a_silent_peer_is_not_said_to_be_out_of_reach():
    """It may be paused, or cut off for a while: whether it is lost, its lease says. A coordinator that has just been
    started again has not heard it yet."""
    run = elastic()
    accusation = ev.CannotReach(2, "cannot dial h2:1: no answer")
    run.message(2, ev.Heartbeat(1, {}), 10.0)
    assert reports(run.message(0, accusation, 10.0 + 3 * TERMS.heartbeat_s), "lost") == []
    restarted = elastic()
    restarted.event(ev.Paused(5.0), 20.0)
    restarted.message(2, ev.Heartbeat(1, {}), 20.0)
    assert reports(restarted.message(0, accusation, 20.0), "lost") == []


def test_interrupted_is_130_for_all():
    run = Driver()
    run.begin()
    assert_over(run.event(ev.Interrupted()), 130, "interrupted")


def test_a_peer_of_the_plan_that_fails_before_the_run_begins_ends_it_with_its_reason():
    run = Driver()
    for peer in (0, 1, 2):
        run.join(peer)
    actions = run.message(1, ev.Failed("disk: full"))
    assert of(actions, ev.Stop) == [ev.Stop(2, "peer 1 (stage 1): disk: full")]


def test_a_peer_of_the_plan_that_leaves_before_the_run_begins_ends_it_and_is_not_called_lost():
    run = Driver()
    for peer in (0, 1, 2):
        run.join(peer)
    (stop,) = of(run.message(1, ev.Leaving()), ev.Stop)
    assert stop.code == 3
    assert stop.reason.startswith("peer 1 (stage 1): left before it was admitted; the run has not begun")


def test_a_peer_that_is_silent_before_the_run_begins_has_the_grace_period():
    """All load and compile, and some host is too busy to speak; nothing is lost while the run waits."""
    run = Driver(stage_grace_s=60.0)
    for peer in (0, 1, 2):
        run.join(peer)
    for second in range(1, 60):
        for peer in (0, 2):
            run.message(peer, ev.Heartbeat(1, {}), float(second))
        assert not of(run.event(ev.Woke("tick"), float(second)), ev.Stop)
    run.message(0, ev.Heartbeat(1, {}), 61.0)
    run.message(2, ev.Heartbeat(1, {}), 61.0)
    (stop,) = of(run.event(ev.Woke("tick"), 61.0), ev.Stop)
    assert stop.code == 3
    assert re.fullmatch(r"peer 1 \(stage 1\): lost, silent for 6\d\.\d s; the run has not begun, and .+", stop.reason)


def test_nothing_happens_after_the_end():
    run = Driver()
    run.begin()
    run.event(ev.Interrupted())
    assert run.message(0, ev.Heartbeat(1, {})) == [] and run.event(ev.Woke("tick"), 99.0) == []


def test_the_run_is_done_when_every_member_is():
    run = Driver(n_steps=1)
    run.begin()
    run.commit(0)
    run.save(1)
    for peer in (0, 1, 2):
        actions = run.message(peer, ev.Done(1, {"busy_s": 2.0}, {"1": 100}))
        assert reports(actions, "done") == [{"peer": peer, "bytes_to": {"1": 100}, "busy_s": 2.0}]
        assert not of(actions, ev.Stop)
    assert_over(run.message(3, ev.Done(1, {}, {})), 0, "done: 1 steps")


def test_a_checkpoint_and_the_end_wait_for_the_held_out_loss_of_its_parameters():
    """So a run that goes on from it has all rows, and the last loss is of the checkpoint that is kept. The loss of the
    step before is told with the commit."""
    train = TrainConfig(steps=3, eval_every_steps=1, eval_microbatches=2)
    run = Driver(HeldOutRows(train))
    run.begin()
    assert [row["step"] for row in reports(run.commit(0), "step")] == []
    assert [(row["step"], "eval_loss" in row) for row in reports(run.commit(1), "step")] == [(0, False)]
    run.commit(2)
    for peer in STAGE_OF:
        run.message(peer, ev.Done(3, {}, {}))
    for peer in (0, 1):
        assert not of(run.message(peer, ev.Saved(3, STAGE_OF[peer], 0.0, f"digest{peer}", 9)), ev.Persist)
    assert not run.message(1, ev.HeldOutMeasured(3, ((0, 2, 8.0),)))
    actions = run.message(2, ev.HeldOutMeasured(3, ((1, 2, 4.0),)))
    assert [(row["step"], row["eval_loss"]) for row in reports(actions, "step")] == [(2, 3.0)]
    assert [persist.name for persist in of(actions, ev.Persist)] == ["checkpoint"]
    assert_over(run.event(ev.Persisted("checkpoint")), 0, "done: 3 steps")


def test_a_pause_holds_the_next_step_back_while_a_row_waits_for_its_loss():
    run = Driver(HeldOutRows(TrainConfig(steps=3, eval_every_steps=1)))
    run.begin()
    run.commit(0)
    run.event(ev.Received(ev.Header("", 0, 0, ev.OPERATOR_IDS + 7), ev.OperatorRequest("pause")))
    run.event(ev.Persisted("operator"))
    assert not of(run.prepare(1), ev.Persist)


def test_a_checkpoint_is_complete_with_every_stages_part():
    run = Driver()
    run.begin()
    assert run.message(0, ev.Saved(1, 0, 0.2, "a", 9)) == []
    assert run.message(1, ev.Saved(2, 1, 0.0, "b", 9)) == []
    (persist,) = run.message(1, ev.Saved(1, 1, 0.1, "b", 9))
    checkpoint = ev.Checkpoint(1, 0, (ev.Part(1, 0, "a", 9, ("",)), ev.Part(1, 1, "b", 9, ("",))))
    assert persist == ev.Persist("checkpoint", serialize.write(checkpoint))
    actions = run.event(ev.Persisted("checkpoint"))
    assert actions[0] == ev.MarkCheckpoint(checkpoint)
    assert reports(actions, "checkpoint") == [{"version": 1, "save_s": 0.2, "copies": 1}]
    assert sent(actions, ev.CheckpointComplete) == dict.fromkeys(STAGE_OF, ev.CheckpointComplete(checkpoint))


def test_messages_of_the_coordinator_carry_its_run_view_and_term():
    run = Driver()
    run.join(0)
    before = run.message(0, ev.Heartbeat(1, {}))[0].header
    assert before == ev.Header("r", 0, 0, ev.COORDINATOR, 1)
    for peer in (1, 2, 3):
        run.join(peer)
    run.event(ev.Persisted("view"))
    assert {action.header for action in run.commit(0) if isinstance(action, ev.Send)} == {
        ev.Header("r", 0, 1, ev.COORDINATOR, 1)
    }


# ------------------------------------------------------------------------------------------------- those not let in


def test_a_refused_hello_opens_no_lease():
    run = Driver()
    run.message(1, ev.Hello(1, 1, "wrong", "h1:1"))
    for peer in (0, 2, 3):
        run.join(peer)
    for now_s in (1.0, 2.0, 3.0, 4.0, 5.0):
        for peer in (0, 2, 3):
            run.message(peer, ev.Heartbeat(1, {}), now_s)
        assert not of(run.event(ev.Woke("tick"), now_s), ev.Stop)


def test_on_what_each_peer_computes_is_known():
    run = Driver()
    run.message(0, ev.Hello(0, 0, "f", "h0:1"))
    run.message(0, ev.Profiled({"F": 1.0}, 0, device="gpu: 1 x H100"))
    assert run.machine.devices == {0: "gpu: 1 x H100"}
    run.begin()
    run.event(ev.LinkChanged(1, False, "gone"))
    run.event(ev.Woke("link"), 99.0)
    run.message(1, ev.Hello(1, 1, "f", "h1:1", process=7), 99.0)
    actions = run.message(1, ev.Profiled({"F": 1.0}, 0, 7, "cpu: 1 x cpu"), 99.0)
    assert CandidateReport(1, "cpu: 1 x cpu") in actions


def test_a_refused_peer_cannot_complete_the_view_or_end_the_run():
    run = Driver()
    for peer in (0, 2, 3):
        run.join(peer)
    run.message(1, ev.Hello(1, 1, "wrong", "h1:1"))
    assert run.message(1, ev.Profiled({}, 0)) == []
    assert run.message(1, ev.Profiled({}, 9)) == []
    assert of(run.join(1), ev.Persist)


@pytest.mark.parametrize("body", [prepared(1, 0), ev.Saved(1, 1)])
def test_what_belongs_to_a_view_is_ignored_before_there_is_one(body):
    run = Driver()
    run.join(1)
    assert run.message(1, body) == []


# ------------------------------------------------------------------------------------------------------------ losses


def elastic():
    run = Driver()
    run.begin()
    return run


def lose(run, *peers, now_s=10.0):
    """Their connections break and stay broken; the actions of the tick that notices."""
    for peer in peers:
        run.event(ev.LinkChanged(peer, False), now_s)
    return run.event(ev.Woke("tick"), now_s + RECONNECT_S + 0.1)


def test_a_lost_peer_leaves_the_view_if_its_stage_has_another():
    run = elastic()
    assert reports(lose(run, 2), "lost") == [
        {"peer": 2, "reason": "peer 2 (stage 0): lost, its connection broke and did not come back"}
    ]
    views = sent(run.event(ev.Persisted("view")), ev.View)
    assert set(views) == {0, 1, 3}
    view = views[0]
    assert (view.number, view.stage_views, view.n_committed, view.results) == (2, (2, 1), 0, ())
    assert [member.peer for member in view.members] == [0, 1, 3]


def test_the_last_of_a_stage_ends_the_run():
    run = elastic()
    lose(run, 2)
    run.event(ev.Persisted("view"))
    actions = lose(run, 0, now_s=20.0)
    assert [stop.code for stop in of(actions, ev.Stop)] == [3]


def test_who_left_learns_of_it():
    run = elastic()
    lose(run, 2)
    run.event(ev.Persisted("view"))
    reach, told = run.message(2, ev.Heartbeat(9, {}))
    assert reach == ev.Connect(2, "h2:1") and type(told.body) is ev.View


def test_a_view_names_the_results_that_survivors_hold():
    """Peers 0 and 1 hold their stages' results when 2 is lost: stage 0's round of view 1 stays, so does stage 1's."""
    run = elastic()
    for peer in (0, 1):
        run.message(peer, prepared(peer, 0))
    lose(run, 2)
    (view,) = set(sent(run.event(ev.Persisted("view")), ev.View).values())
    assert view.results == (
        (RoundId(RoundKind.GRADIENT, 0, 0, view=1), (0,)),
        (RoundId(RoundKind.GRADIENT, 1, 0, view=1), (1,)),
    )


def test_what_only_the_lost_one_held_is_not_named():
    run = elastic()
    run.message(2, prepared(2, 0))
    lose(run, 2)
    (view,) = set(sent(run.event(ev.Persisted("view")), ev.View).values())
    assert view.results == ()


def test_prepared_counts_only_when_it_was_said_in_the_view():
    """A message of peer 0 in view 1 may be about a round that view 2 has voided; otherwise the peer sends it again."""
    run = elastic()
    lose(run, 2)
    run.event(ev.Persisted("view"))
    for peer in (0, 1, 3):
        run.message(peer, prepared(peer, 0), view=1)
    assert run.machine.n_committed == 0 and not of(run.prepare(0, (0, 1)), ev.Persist)
    assert len(of(run.prepare(0, (3,)), ev.Persist)) == 1


def test_a_peer_lost_while_a_record_is_made_durable_leaves_after_it():
    run = elastic()
    run.prepare(0)
    assert not of(lose(run, 2), ev.Persist)
    actions = run.event(ev.Persisted("steps"))
    assert len(sent(actions, ev.Committed)) == 4 and [p.name for p in of(actions, ev.Persist)] == ["view"]
    (view,) = set(sent(run.event(ev.Persisted("view")), ev.View).values())
    assert view.n_committed == 1 and [record.step for record in view.records] == [0]


def test_a_rolled_back_view_carries_no_records_of_the_lost_lineage():
    run = Driver(on_nonfinite="rollback")
    run.begin()
    run.commit(0)
    run.prepare(1, sq_norm=math.nan)
    (view,) = set(sent(run.event(ev.Persisted("view")), ev.View).values())
    assert view.rolled_back and view.records == () and view.n_committed == 0
    lose(run, 2)
    (view,) = set(sent(run.event(ev.Persisted("view")), ev.View).values())
    assert view.records == ()


def test_a_part_that_is_durable_counts_whoever_wrote_it():
    """Peer 2 writes, leaves meanwhile, and says so afterwards."""
    run = elastic()
    run.commit(0)
    lose(run, 2)
    run.event(ev.Persisted("view"))
    run.message(3, ev.Saved(1, 1))
    run.message(2, ev.Saved(1, 0))
    assert reports(run.event(ev.Persisted("checkpoint")), "checkpoint") == [{"version": 1, "save_s": 0.0, "copies": 1}]


def test_what_somebody_said_before_it_was_let_in_again_accuses_nobody():
    """A peer that was cut off says late, over the link that has healed, whom it could not reach."""
    run = elastic()
    lose(run, 2, now_s=0.0)
    run.event(ev.Persisted("view"))
    run.join(2)
    for peer in (0, 1, 3):
        run.message(peer, prepared(peer, 0), view=2)
    run.event(ev.Persisted("steps"))
    run.event(ev.Persisted("view"))
    assert run.machine.roster.admissions[2] == 3
    run.message(2, ev.Suspect(1, "no link for 9.0 s"), now_s=2.0, view=1)
    assert not reports(run.event(ev.Woke("tick"), 2.1), "lost")
    run.message(2, ev.Suspect(1, "no link for 9.0 s"), now_s=2.2, view=3)
    assert [fields["peer"] for fields in reports(run.event(ev.Woke("tick"), 2.3), "lost")] == [2]


@pytest.mark.parametrize("durable_first", [True, False])
def test_who_was_put_out_and_greets_again_learns_of_it(durable_first):
    """Its connection was ended, so it dials and says hello, as a member that was merely cut off would."""
    run = elastic()
    lose(run, 2)
    hello = ev.Hello(2, 0, "f", "h2:1")
    if durable_first:
        run.event(ev.Persisted("view"))
        told = run.message(2, hello)
    else:
        run.message(2, hello)
        told = run.event(ev.Persisted("view"))
    assert sent(told, ev.View)[2].number == 2


def test_who_asked_under_a_passing_name_and_is_gone_leaves_no_connection_behind():
    run = elastic()
    run.event(ev.Received(ev.Header("", 0, 0, ev.TEMPORARY_IDS + 5), ev.Join()))
    assert run.event(ev.LinkChanged(ev.TEMPORARY_IDS + 5, False), 1.0) == [ev.Disconnect(ev.TEMPORARY_IDS + 5)]
    assert not [action for action in run.event(ev.LinkChanged(3, False), 1.0) if isinstance(action, ev.Disconnect)]


# ------------------------------------------------------------------------------------------------ no common disk


def own_disks(**terms):
    """Four peers with a disk each; the parts of version 1 are written on those of 0 and 1, and step 0 is committed."""
    run = Driver(waits=True, n_copies=2, **terms)
    for peer in STAGE_OF:
        run.message(peer, ev.Hello(peer, STAGE_OF[peer], "f", f"h{peer}:1", 0, f"d{peer}"))
        run.message(peer, ev.Profiled({"F": 1.0}, 0))
    run.event(ev.Persisted("view"))
    run.commit(0)
    return run


def write(run, peer, stage):
    return run.message(peer, ev.Saved(1, stage, 0.0, f"part{stage}", 9))


def test_a_checkpoint_is_complete_when_its_parts_are_copied():
    run = own_disks()
    assert write(run, 0, 0) == []
    orders = sent(write(run, 1, 1), ev.CopyPart)
    assert {peer: order.part.digest for peer, order in orders.items()} == {3: "part0", 2: "part1"}
    assert not of(write(run, 3, 0), ev.Persist)
    assert of(write(run, 2, 1), ev.Persist)
    (complete,) = set(sent(run.event(ev.Persisted("checkpoint")), ev.CheckpointComplete).values())
    assert [part.disks for part in complete.checkpoint.parts] == [("d0", "d3"), ("d1", "d2")]


def test_a_copier_that_is_lost_is_replaced():
    run = own_disks()
    write(run, 0, 0)
    write(run, 1, 1)
    lose(run, 3)
    orders = sent(run.event(ev.Persisted("view")), ev.CopyPart)
    assert {peer: order.part.digest for peer, order in orders.items()} == {1: "part0", 2: "part1"}


def test_a_stage_waits_while_nobody_holds_its_part():
    """Both peers of stage 1 are lost, and with them both disks that hold stage 0's part of the checkpoint."""
    run = own_disks()
    for peer, stage in ((1, 0), (3, 0), (0, 1), (2, 1)):
        write(run, peer, stage)
    run.event(ev.Persisted("checkpoint"))
    lose(run, 1)
    run.event(ev.Persisted("view"))
    lost = lose(run, 3, now_s=20.0)
    assert reports(lost, "no_holder") == [{"version": 1, "stages": [0]}]
    (told,) = sent(run.message(ev.TEMPORARY_IDS, ev.Join(), run=""), ev.Welcome).values()
    assert told.n_committed == run.machine.n_committed > 0
    run.message(told.peer, ev.Hello(told.peer, told.stage, "f", "n:1", 5, "new"))
    waits = run.message(told.peer, ev.Profiled({"F": 1.0}, 0, 5))
    assert reports(waits, "candidate") and not of(waits, ev.Persist)
    run.message(1, ev.Hello(1, 1, "f", "h1:1", 6, "d1"))  # the host is back, with another process
    actions = run.message(1, ev.Profiled({"F": 1.0}, 0, 6))
    assert reports(actions, "rollback")[0]["to"] == 1
    (view,) = set(sent(run.event(ev.Persisted("view")), ev.View).values())
    assert view.rolled_back and view.n_reseeds == 0 and [part.stage for part in view.parts] == [0, 1]


def test_only_a_gradient_that_is_not_finite_takes_other_samples():
    run = own_disks(on_nonfinite="rollback")
    run.prepare(1, sq_norm=math.nan)
    (view,) = set(sent(run.event(ev.Persisted("view")), ev.View).values())
    assert (view.generation, view.n_reseeds) == (1, 1)
