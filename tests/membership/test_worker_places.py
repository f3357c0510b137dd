"""For which server each of a pool's workers computes."""

import json
from dataclasses import replace

import fleet
import pytest

from jaxdt.build import RunStart, build_coordinator
from jaxdt.membership.newcomers import ASKED_S
from jaxdt.membership.roster import Roster
from jaxdt.membership.worker_places import JOIN_RULES, WorkerPlaces
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import HeartbeatReport, Report
from jaxdt.run import config as configs
from jaxdt.run.config import PlanConfig, RunConfig, WiringConfig, default_plan
from jaxdt.run.families.gpt import GPTConfig

PLANNED = {4: (0, 0), 5: (1, 1)}


def test_a_worker_of_the_plan_gets_its_server_and_without_that_another_of_its_stage():
    places = WorkerPlaces(PLANNED)
    assert places.place(5, ({0, 2}, {1, 3})) == (1, 1)
    assert places.place(5, ({0, 2}, {3})) == (1, 3)
    assert places.place(5, ({0, 2}, set())) == (1, None)
    assert places.place(5, ({0, 2}, {1, 3})) == (1, 1)


def test_any_other_worker_gets_the_server_with_the_fewest_and_keeps_its_stage():
    places = WorkerPlaces(PLANNED)
    assert places.place(7, (set(), set())) == (0, None)
    for server, n_workers in ((0, 2), (2, 3), (1, 1), (3, 1)):
        places.on_workers(0.0, server, n_workers, ())
    assert places.place(7, ({0, 2}, {1, 3})) == (1, 1)
    assert places.place(8, ({0, 2}, {1, 3})) == (1, 3)  # the one before is on its way to server 1
    assert places.place(7, ({0, 2}, {3})) == (1, 3)
    assert places.place(7, ({0, 2}, set())) == (1, None)


def test_by_bandwidth_a_worker_gets_the_stage_to_whose_servers_its_links_are_fastest_in_the_mean():
    places, servers = WorkerPlaces(PLANNED, "bandwidth"), ({0, 2}, {1, 3})
    assert places.to_measure(7, servers, None) == [0, 1, 2, 3]
    assert places.to_measure(7, (set(), set()), None) == []
    gbps = {0: 1.0, 2: 0.0, 1: 0.4, 3: 0.5}
    places.on_workers(0.0, 0, 9, ())
    assert places.to_measure(7, servers, gbps) == []
    assert places.place(7, servers, gbps) == (0, 2)  # 0.5 to 0.45; of its servers that with the fewest
    assert places.place(8, servers, gbps | {2: 0.5, 3: 1.5}) == (1, 1)
    assert places.place(9, servers, dict.fromkeys(gbps, 0.1)) == (0, 2)
    assert places.place(10, (set(), {3}), {}) == (1, 3)  # the servers that it has measured are gone
    for known in (4, 7):
        assert places.to_measure(known, servers, None) == []
    assert places.place(4, servers) == (0, 0) and places.place(7, servers)[0] == 0


def test_workers_that_get_ready_are_known_until_a_server_has_let_them_in():
    places = WorkerPlaces(PLANNED)
    places.on_asked(1.0, 7)
    places.on_asked(2.0, 8)
    assert places.coming(3.0) == [7, 8]
    places.on_here(7)
    assert places.coming(3.0) == [8]
    assert places.coming(2.0 + ASKED_S + 1.0) == []


def test_a_balanced_pool_asks_for_no_measurement():
    assert WorkerPlaces(PLANNED).to_measure(7, ({0}, {1}), None) == []
    assert set(JOIN_RULES) == set(configs.JOIN_RULES)


def test_a_second_process_of_a_worker_gets_the_server_that_has_the_first():
    places = WorkerPlaces(PLANNED)
    assert places.place(7, ({0, 2}, set())) == (0, 0)
    places.on_workers(1.0, 0, 3, (ev.WorkerStatus(7, 0, 0.1),))
    assert places.place(7, ({0, 2}, set())) == (0, 0)  # though server 2 has none
    assert places.place(7, ({2}, set())) == (0, 2)  # server 0 is gone
    places.on_workers(2.0, 0, 3, ())
    assert places.place(7, ({0, 2}, set())) == (0, 2)


def test_an_operator_sees_the_workers_of_servers_that_are_here():
    places = WorkerPlaces(PLANNED)
    places.on_workers(1.0, 0, 2, (ev.WorkerStatus(4, 30, 0.5), ev.WorkerStatus(9, 0, 0.0)))
    places.on_workers(1.5, 1, 1, (ev.WorkerStatus(5, 12, 7.25),))
    rows = places.rows(2.0, ({0}, {1, 3}))
    assert rows == [
        {"worker": 4, "stage": 0, "server": 0, "n_counted": 30, "silent_s": 1.5},
        {"worker": 9, "stage": 0, "server": 0, "n_counted": 0, "silent_s": 1.0},
        {"worker": 5, "stage": 1, "server": 1, "n_counted": 12, "silent_s": 7.8},
    ]
    assert [row["worker"] for row in places.rows(2.0, ({0}, set()))] == [4, 9]


def test_the_coordinator_says_who_is_gone_and_who_is_back_and_status_lists_who_is_here():
    coordinator, plan = coordinator_of("pool")
    for server in plan.peers:
        hello = ev.Hello(server, server, coordinator.config.fingerprint, address=f"h{server}:1")
        coordinator.handle(0.0, ev.Received(ev.Header("r", 0, 0, server), hello))
    reported = []
    for body in (ev.WorkerHere(3), ev.WorkerGone(3, "hung up", 2), ev.WorkerHere(3)):
        actions = coordinator.handle(1.0, ev.Received(ev.Header("r", 0, 0, 1), body))
        reported += [action.line for action in actions if isinstance(action, Report)]
    assert reported == [
        "worker 3: computes for peer 1",
        "worker 3: is lost to peer 1 (hung up); 2 microbatches that it had not handed in are computed again",
        "worker 3: is back, and computes for peer 1",
    ]
    beat = ev.Heartbeat(1, {"workers": 1.0}, None, {}, (ev.WorkerStatus(3, 8, 0.5, 4.5),))
    actions = coordinator.handle(2.0, ev.Received(ev.Header("r", 0, 0, 1), beat))
    assert [action.worker_cpu_s for action in actions if isinstance(action, HeartbeatReport)] == [{3: 4.5}]
    asked = ev.Received(ev.Header("", 0, 0, ev.OPERATOR_IDS), ev.OperatorRequest("status"))
    [answer] = [action.body for action in coordinator.handle(3.0, asked) if isinstance(action, ev.Send)]
    lines = fleet.table(json.loads(answer.text)).splitlines()
    assert lines[-2:] == [
        "  worker  stage  server  microbatches  last heard",
        "       3      1       1             8  1.5 s ago",
    ]


def test_the_coordinator_has_a_worker_measure_its_links_before_it_gets_a_place():
    coordinator, plan = coordinator_of("pool", join_rule="bandwidth")
    for server in plan.peers:
        hello = ev.Hello(server, server, coordinator.config.fingerprint, address=f"h{server}:1")
        coordinator.handle(0.0, ev.Received(ev.Header("r", 0, 0, server), hello))

    def answer(join):
        [sent] = coordinator.handle(1.0, ev.Received(ev.Header("", 0, 0, ev.TEMPORARY_IDS), join))[-1:]
        return sent.body

    asks = ev.Join(None, is_new=True, is_worker=True)
    first = answer(asks)
    assert (first.servers, first.server) == (((0, "h0:1"), (1, "h1:1")), None) and set(first.job) == {"config", "plan"}
    placed = answer(replace(asks, peer=first.peer, gbps=((0, 0.1), (1, 0.2))))
    assert (placed.servers, placed.stage, placed.server) == ((), 1, 1)
    again = answer(replace(asks, peer=first.peer))
    assert (again.servers, again.stage) == ((), 1)


def coordinator_of(kind: str, **wiring):
    """A coordinator of a run with 2 servers and 2 workers, and the run's plan."""
    model = GPTConfig(vocab_size=16, n_layers=2, d_model=8, n_heads=2, d_ff=16, seq_len=8)
    plan_config = PlanConfig(stages=2, pipelines=1, microbatches=2, workers=1 if kind == "pool" else 0)
    config = RunConfig(model=model, plan=plan_config, wiring=WiringConfig(kind, **wiring))
    plan = default_plan(config)
    coordinator = build_coordinator(config, plan, RunStart("r"))
    coordinator.handle(0.0, ev.Started())
    coordinator.handle(0.0, ev.Persisted("coordinator_term"))
    return coordinator, plan


def answer_of(kind: str, *, peer: int | None, hello: bool = True):
    """The answer of a coordinator, of a run with 2 servers and 2 workers, to a worker."""
    coordinator, plan = coordinator_of(kind)
    if hello:
        fingerprint = coordinator.config.fingerprint
        for server in plan.peers:
            said = ev.Hello(server, server, fingerprint, address=f"h{server}:1")
            coordinator.handle(0.0, ev.Received(ev.Header("r", 0, 0, server), said))
    asks = ev.Received(ev.Header("", 0, 0, ev.TEMPORARY_IDS), ev.Join(peer, is_new=True, is_worker=True))
    (sent,) = [action for action in coordinator.handle(0.0, asks) if isinstance(action, ev.Send)]
    assert sent.dst == ev.TEMPORARY_IDS
    return sent.body


def test_the_coordinator_says_where_the_server_is_once_that_is_here():
    said = answer_of("pool", peer=3)
    assert isinstance(said, ev.Welcome) and (said.peer, said.stage, said.server, said.server_address) == (
        3,
        1,
        1,
        "h1:1",
    )
    assert set(said.job) == {"config", "plan"}
    waits = answer_of("pool", peer=3, hello=False)
    assert isinstance(waits, ev.Welcome) and waits.server is None
    newcomer = answer_of("pool", peer=None)
    assert isinstance(newcomer, ev.Welcome) and newcomer.peer > 3 and newcomer.server == 0


def test_the_coordinator_refuses_a_worker_where_there_are_none_and_one_with_a_members_id():
    assert answer_of("swarm", peer=9) == ev.Ended(2, "asks to be a worker, and the wiring of this run has none")
    said = answer_of("pool", peer=1)
    assert isinstance(said, ev.Ended) and said.code == 2 and "peer 1 (stage 1): is a member of the run" in said.reason


@pytest.mark.parametrize(
    ("workers", "between_steps", "stage_views"),
    [(None, False, (6, 1)), ((4,), False, (6, 6)), ((), False, (6, 6)), ((4,), True, (6, 6)), (None, True, (6, 1))],
)
def test_a_lost_server_gives_all_stages_of_a_pool_another_round(workers, between_steps, stage_views):
    """A server of another stage may have sent its part of the gradient, and gets more to do of the step. Between two
    steps as well: the members begin the next one while the view is made durable."""
    stage_of = {0: 0, 1: 1, 2: 0, 3: 1}
    roster = Roster(stage_of, 2, 1, workers=workers)
    roster.adopt(ev.View(5, 1, 0, tuple(ev.Member(peer, stage, 1) for peer, stage in stage_of.items()), (1, 1), 0))
    roster.lose(0.0, 2, is_dead=True)
    view = roster.next_view(between_steps, 3, (), None)
    assert view and view.number == 6 and view.stage_views == stage_views
