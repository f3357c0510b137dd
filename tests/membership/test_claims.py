"""A peer id belongs to one process at a time: a second one is refused while the first answers."""

import itertools
from dataclasses import replace

import pytest
from test_coordinator import STAGE_OF, TERMS, Driver, lose, of, reports, sent

from jaxdt.build import RunStart, build_coordinator
from jaxdt.membership.admission import GRANTED_S
from jaxdt.membership.claimant import SAID_S, Claimant
from jaxdt.membership.run_state import TERM
from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import FIRST_CONTACT_S, RECONNECT_S
from jaxdt.protocol.reports import UnreachedReport
from jaxdt.run.config import GroupsConfig
from jaxdt.run.errors import BadInput
from jaxdt.testing.cases import draw_case

ASKS = ev.TEMPORARY_IDS + 7
BEAT_S = TERMS.heartbeat_s


def running():
    """All peers were heard at 9.9 s."""
    run = Driver()
    run.begin()
    for peer in STAGE_OF:
        run.message(peer, ev.Heartbeat(1, {}), 9.9)
    return run


def asks(run, now_s, temporary_id=ASKS, peer=2):
    return run.message(temporary_id, ev.Join(peer, "h9:1 (process 5 on h9)"), now_s, view=0)


def test_a_second_process_is_refused_once_the_first_is_heard_and_nobody_is_put_out():
    run = running()
    assert asks(run, 10.0) == []
    run.message(2, ev.Heartbeat(1, {}), 10.1)  # may have been sent before the question
    assert run.event(ev.Woke("tick"), 10.2)[:-1] == []
    run.message(2, ev.Heartbeat(2, {}), 10.0 + 2.2 * BEAT_S)
    for peer in (0, 1, 3):
        run.message(peer, ev.Heartbeat(2, {}), 11.0)
    actions = run.event(ev.Woke("tick"), 11.2)
    answers = "peer 2 (stage 0): runs at h2:1 and answers; a second one, h9:1 (process 5 on h9), is refused"
    reason = f"{answers}: another peer needs a token of its own"
    assert sent(actions, ev.Ended) == {ASKS: ev.Ended(2, reason)} and reports(actions, "refused") == [
        {"reason": reason}
    ]
    assert not reports(run.actions, "lost")


def test_a_process_that_starts_again_after_a_kill_is_admitted_with_a_new_admission():
    run = running()
    run.event(ev.LinkChanged(2, False), 10.0)
    assert asks(run, 10.4) == []
    for peer in (0, 1, 3):
        run.message(peer, ev.Heartbeat(2, {}), 11.0)
    actions = run.event(ev.Woke("link"), 10.0 + RECONNECT_S)
    assert [fields["peer"] for fields in reports(actions, "lost")] == [2]
    assert sent(actions, ev.Welcome) == {ASKS: ev.Welcome("r", 2, 0, "", {})}
    run.event(ev.Persisted("view"), 11.6)
    assert reports(run.message(2, ev.Hello(2, 0, "f", "h2:2", 77), 11.7, view=0), "connected")


def test_a_process_of_a_peer_without_a_lease_is_admitted_at_once():
    run = running()
    lose(run, 2)
    assert sent(asks(run, 12.0), ev.Welcome) == {ASKS: ev.Welcome("r", 2, 0, "", {})}


def test_of_two_that_start_at_once_one_is_admitted():
    run = Driver()
    assert sent(asks(run, 0.0), ev.Welcome)
    assert asks(run, 0.1, ASKS + 1) == []
    run.message(2, ev.Hello(2, 0, "f", "h2:1", 1), 0.2)
    run.message(2, ev.Heartbeat(2, {}), 0.1 + 2.2 * BEAT_S)
    assert sent(run.event(ev.Woke("tick"), 1.5), ev.Ended).keys() == {ASKS + 1}


def test_an_admitted_process_that_never_says_hello_makes_room():
    run = Driver()
    asks(run, 0.0)
    assert asks(run, 0.1, ASKS + 1) == []
    assert not sent(run.event(ev.Woke("tick"), GRANTED_S - 0.1), ev.Welcome)
    assert sent(run.event(ev.Woke("tick"), GRANTED_S + 0.1), ev.Welcome).keys() == {ASKS + 1}


def test_a_process_that_stops_to_ask_gets_no_answer():
    run = running()
    asks(run, 10.0)
    run.event(ev.LinkChanged(ASKS, False), 10.1)
    run.message(2, ev.Heartbeat(2, {}), 12.0)
    assert not sent(run.event(ev.Woke("tick"), 12.1), ev.Ended)


def test_a_peer_that_nobody_knows_is_refused():
    (told,) = sent(asks(running(), 0.0, peer=55), ev.Ended).values()
    assert told == ev.Ended(6, "peer 55: is not known any more, and may join again as a newcomer")


# ------------------------------------------------------------------------------------------------------- the process


def claimant():
    machine = Claimant("r", 2, ASKS, "here")
    question = ev.Send(ev.COORDINATOR, ev.Join(2, "here"), header=ev.Header("r", 0, 0, ASKS))
    assert machine.handle(0.0, ev.Started("")) == [
        question,
        ev.WakeAt(SAID_S, "say"),
        ev.WakeAt(FIRST_CONTACT_S, "claim"),
    ]
    return machine, question


def test_a_claimant_asks_again_when_it_reaches_the_coordinator_again():
    machine, question = claimant()
    assert machine.handle(1.0, ev.LinkChanged(ev.COORDINATOR, True)) == []
    assert machine.handle(2.0, ev.LinkChanged(ev.COORDINATOR, False)) == []
    assert machine.handle(3.0, ev.LinkChanged(ev.COORDINATOR, True)) == [question]


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (ev.Received(ev.Header("r", 0, 0, ev.COORDINATOR), ev.Welcome("r", 2, 0, "", {})), 0),
        (ev.Received(ev.Header("r", 0, 0, ev.COORDINATOR), ev.Ended(2, "runs already")), 2),
        (ev.Refused(ev.COORDINATOR, "credential"), 2),
        (ev.Interrupted(), 130),
        (ev.Leave(), 0),
        (ev.Woke("claim"), 3),
    ],
)
def test_what_ends_a_claim(event, code):
    machine, _ = claimant()
    assert [stop.code for stop in of(machine.handle(5.0, event), ev.Stop)] == [code]


def test_a_process_that_waits_for_the_coordinator_says_so_until_it_reaches_it():
    machine, _ = claimant()
    assert machine.handle(SAID_S, ev.Woke("say")) == [
        UnreachedReport(FIRST_CONTACT_S - SAID_S),
        ev.WakeAt(3 * SAID_S, "say"),
    ]
    assert machine.handle(3 * SAID_S, ev.Woke("say")) == [
        UnreachedReport(FIRST_CONTACT_S - 3 * SAID_S),
        ev.WakeAt(7 * SAID_S, "say"),
    ]
    machine.handle(8.0, ev.LinkChanged(ev.COORDINATOR, True))
    assert machine.handle(7 * SAID_S, ev.Woke("say")) == []


def test_a_claim_waits_while_the_coordinator_is_reached():
    machine, _ = claimant()
    machine.handle(1.0, ev.LinkChanged(ev.COORDINATOR, True))
    assert machine.handle(120.0, ev.Woke("claim")) == [ev.WakeAt(240.0, "claim")]


# --------------------------------------------------------------------------------------- where replicas may differ

NO_SUCH = ev.Join(99, "h9:1", is_new=True)
NEW = ev.Join(None, "h9:1", is_new=True)
TAKES = "replicas may differ in this run, so a newcomer takes the place of a peer that was lost"


def differing(sync="groups", schedule="1f1b"):
    """A coordinator in its first view, and its plan."""
    cases = (draw_case(seed, sync) for seed in itertools.count())
    case = next(case for case in cases if (case.plan.n_stages, case.plan.n_pipelines) == (2, 2))
    config = replace(
        case.config,
        sync=replace(case.config.sync, groups=GroupsConfig()),
        optim=replace(case.config.optim, clip_norm=0.0),
        train=replace(case.config.train, eval_every_steps=0),
    )
    plan = replace(case.plan, schedule=schedule, shares=(1, 1))
    run = Driver()
    run.machine = build_coordinator(config, plan, RunStart("r"))
    run.event(ev.Started())
    run.event(ev.Persisted(TERM))
    digest = run.machine.config.fingerprint
    for peer in plan.peers:
        stage = plan.seat(peer)[0]
        run.message(peer, ev.Hello(peer, stage, digest, f"h{peer}:1"))
        run.message(peer, ev.Profiled({"F": 1.0}, 0))
    run.event(ev.Persisted("view"))
    return run, plan


def refused(run, join):
    actions = run.message(ASKS, join, 20.0, run="")
    [ended] = sent(actions, ev.Ended).values()
    assert not sent(actions, ev.Welcome) and reports(actions, "refused") == [{"reason": f"a newcomer: {ended.reason}"}]
    assert ended.code == 2
    return ended.reason


def test_a_newcomer_gets_the_id_and_the_place_of_a_lost_peer():
    run, plan = differing()
    lost = plan.placement[-1][0]
    assert refused(run, NEW) == f"{TAKES}, and none of the {len(plan.peers)} peers of the plan is lost"
    lose(run, lost)
    assert refused(run, NEW).endswith("is lost"), "it is a member until the view is durable"
    run.event(ev.Persisted("view"))
    assert run.machine.newcomer_ids() == [lost], "the others of its pipeline are there, and wait"
    assert "its credential is of peer 99" in refused(run, NO_SUCH)
    actions = run.message(ASKS, NEW, 20.0, run="")
    welcome = sent(actions, ev.Welcome)[ASKS]
    assert (welcome.peer, welcome.stage) == (lost, plan.n_stages - 1) and welcome.job
    assert reports(actions, "join_request") == [{"peer": lost, "stage": plan.n_stages - 1}]
    assert refused(run, NEW).endswith("is lost"), "it is on its way"
    run.message(lost, ev.Hello(lost, welcome.stage, welcome.fingerprint, "h9:1", 7), 21.0)
    with pytest.raises(BadInput):
        run.machine.newcomer_ids()


@pytest.mark.parametrize(
    ("sync", "schedule", "reason"),
    [("server", "1f1b", "sync.kind server"), ("groups", "stash", "plan.schedule stash")],
)
def test_where_no_pipeline_comes_back_a_newcomer_is_refused_in_one_line(sync, schedule, reason):
    run, plan = differing(sync, schedule)
    lose(run, plan.placement[0][0])
    run.event(ev.Persisted("view"))
    assert refused(run, NEW).startswith(f"{TAKES}, and nobody does here: ") and reason in refused(run, NEW)
    assert not run.machine.roster.coming
