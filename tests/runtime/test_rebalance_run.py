"""Peers that change stages: in the simulator by what they report, as machines by the coordinator's word, and as real
processes, with the losses of one process."""

import json
import re
from dataclasses import replace

import pytest
from fleets import trained_in_one_process
from report_fields import report_fields

from jaxdt.api import launch as api
from jaxdt.api.config import load_config
from jaxdt.build import check_config
from jaxdt.membership.member import Membership, PeerIdentity
from jaxdt.protocol import events as ev
from jaxdt.run import config as run_config
from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan
from jaxdt.sim.faults import JOIN, LEAVE, POWER_OFF, Fault
from jaxdt.testing.case import RandomMoves, play
from jaxdt.testing.cases import draw_case
from jaxdt.wiring.load_report import LoadReporter

CASES = [case for seed in range(60) if (case := draw_case(seed)).moves]
EMPTY = ev.View(1, 1, 0, (), (1,), 0)


# ----------------------------------------------------------------------------------------------------- what is reported


class FakeWiring:
    READS = frozenset({ev.ViewChanged})
    queue = (0, False)

    def handle(self, now_s, event):
        return []


def test_a_queue_is_averaged_over_time_in_whole_steps():
    wiring = FakeWiring()
    reporter = LoadReporter(wiring, 4.0)
    reporter.handle(10.0, ev.ViewChanged(EMPTY))
    wiring.queue = (3, True)
    reporter.handle(11.0, ev.ViewChanged(EMPTY))
    reporter.handle(11.5, ev.ViewChanged(EMPTY))
    wiring.queue = (0, False)
    reporter.handle(12.0, ev.ViewChanged(EMPTY))
    assert reporter.handle(13.9, ev.Updated(0, 1)) == [], "too short"
    assert reporter.handle(14.0, ev.Updated(0, 2)) == [ev.Send(ev.COORDINATOR, ev.Load(queue=1.0, busy=0.25))]
    reporter.handle(16.0, ev.Evicted(EMPTY))
    assert reporter.handle(20.0, ev.Updated(0, 3)) == [], "outside it has no queue to speak of"
    reporter.handle(21.0, ev.ViewChanged(EMPTY))
    assert reporter.handle(25.0, ev.Updated(0, 4)) == [ev.Send(ev.COORDINATOR, ev.Load(0.0, 0.0))]


def test_rebalancing_needs_peers_that_may_have_any_stage():
    base = dict(model=dict(preset="debug"))
    with pytest.raises(BadInput, match="wiring.rebalance_s: got 5.0, expected 0 with wiring fixed"):
        check_config(run_config.parse(base | {"wiring": dict(rebalance_s=5.0)}))
    with pytest.raises(BadInput, match="wiring.rebalance_s: got -1.0, expected seconds from 0 to"):
        run_config.parse(base | {"wiring": dict(kind="swarm", rebalance_s=-1.0)})
    with pytest.raises(BadInput, match="wiring.rebalance_moves: got 0"):
        run_config.parse(base | {"wiring": dict(kind="swarm", rebalance_moves=0)})


def test_a_plan_knows_a_peer_that_changes_stages_once():
    plan = Plan(2, ((0, 1), (1, 2)), ((0, 2), (1, 3)), (1, 1))
    assert plan.with_newcomer(3, 0).placement == ((3, 2), (1, 0))
    assert plan.with_newcomer(9, 1).placement == ((0, 2), (9, 3))
    assert plan.with_newcomer(0, 0).placement == plan.placement


# ----------------------------------------------------------------------------------------------------- in virtual time


def calm(case, **changes):
    """The case without faults."""
    wiring = replace(case.config.wiring, routers=2, window=0, retain_bytes=1 << 30)
    return replace(case, faults=(), nonfinite=None, config=replace(case.config, wiring=wiring), **changes)


def views_of(outcome):
    return [fields for fields in report_fields(outcome, "view") if "joining" in fields]


def test_nobody_is_lost_by_moving_and_no_stage_ever_has_nobody():
    """The dice move peers that a queue never would; invariants are looked at besides."""
    n_moves = 0
    for case in CASES[:6]:
        case = calm(case, random_moves_s=case.random_moves_s or 2.0)
        outcome, _ = play(case)
        peers = set(case.plan.peers)
        assert outcome.stopped[ev.COORDINATOR].code == 0 and set(outcome.stopped) == peers | {ev.COORDINATOR}
        n_moves += len(report_fields(outcome, "moving"))
        for view in views_of(outcome):
            assert set(view["members"]) <= peers
            working = {stage for peer, stage in view["members"].items() if peer not in view["joining"]}
            assert working == set(range(case.plan.n_stages))
    assert n_moves > 10


def test_who_wants_to_leave_while_it_is_to_move_leaves():
    case = next(case for case in CASES if case.plan.n_pipelines > 2)
    case = calm(case, random_moves_s=0.5)
    leaver = case.plan.placement[0][0]
    outcome, _ = play(replace(case, faults=(Fault(1.0, LEAVE, leaver),)))
    assert outcome.stopped[ev.COORDINATOR].code == 0
    assert "left" in outcome.stopped[leaver].reason  # as a member, or on its way to another stage


def test_a_newcomer_that_asked_before_a_loss_was_noticed_is_sent_to_the_stage_that_lost():
    case = next(c for c in map(draw_case, range(300)) if c.plan.n_stages == 2 and c.plan.n_pipelines == 3)
    config = replace(case.config, wiring=replace(case.config.wiring, rebalance_s=0.0))
    case = calm(replace(case, config=config), random_moves_s=0.0)
    lost = case.plan.placement[1][1:]
    faults = (Fault(2.0, JOIN, 0), *(Fault(1.9, POWER_OFF, peer) for peer in lost))
    outcome, _ = play(replace(case, faults=faults))
    asked, *_ = report_fields(outcome, "join_request")
    assert outcome.stopped[ev.COORDINATOR].code == 0 and asked["stage"] == 0
    assert views_of(outcome)[-1]["members"][asked["peer"]] == 1


def test_equal_seeds_move_equally():
    stages = [{0, 1, 2}, {3, 4}]
    drawn = [RandomMoves(3, 1.0).moves(5.0, stages, range(5)) for _ in range(2)]
    assert drawn[0] == drawn[1] != []


# ------------------------------------------------------------------------------------------------------- one machine


def test_a_peer_writes_its_part_of_a_checkpoint_before_it_goes():
    one = Membership(PeerIdentity("r", "f", 3, 0, 0, 0, 9, 1, 0.5, 4.0))
    one.handle(0.0, ev.Started())
    wanted = ev.Received(ev.Header("r", 0, 0, ev.COORDINATOR), ev.Reassign(1))
    one._writing.add(4)
    assert one.handle(1.0, wanted) == []
    assert ev.MoveTo(1) in one.handle(2.0, ev.WroteCheckpoint(4))
    assert one.handle(3.0, ev.Received(wanted.header, ev.Reassign(0))) == [], "it is for that stage"


# --------------------------------------------------------------------------------------------------------- processes


def test_processes_change_stages_and_the_losses_are_those_of_one(churning, tmp_path):
    """A plan with unequal numbers of replicas: three of the first stage, of which one goes over to the second."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plans.to_json(Plan(2, ((0, 1), (1, 2)), ((0, 2, 3), (1,)), (12,)))))
    steps = {"train.steps": 20, "plan.microbatches": 12, "train.checkpoint_every_steps": 20}
    swarm = {"wiring.kind": "swarm", "wiring.rebalance_s": 3.0, "net.heartbeat_s": 0.2, "net.deadline_floor_s": 60.0}
    flags = [f"--config.{name}={value}" for name, value in (steps | swarm).items()]
    fleet = churning(*flags, f"--plan={plan}", "--emulate_forward_s=0.02")
    assert fleet.ended() == 0, fleet.output
    moves = re.findall(r"peer (\d+): moves from stage 0 to stage 1", fleet.output)
    assert moves and moves[0] in "023" and "back from step" not in fleet.output, fleet.output
    config = load_config(tmp_path / "config.py")
    config.update_from_flattened_dict(steps | {"plan.stages": 1, "plan.pipelines": 1})
    losses, _ = trained_in_one_process(api.check(config, api.LaunchOptions()))
    assert fleet.losses() == pytest.approx(losses, rel=1e-5)
    summary = json.loads((fleet.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["loss_last"]) == (20, fleet.losses()[-1])
    assert {"step_s_predicted", "step_s_measured", "tokens_per_s", "bytes_on_links", "loss_first"} <= set(summary)
    log = (fleet.run_dir / "logs" / f"peer_{moves[0]}.log").read_text()
    assert " moves to stage 1\n" in log and " has the state of step " in log
