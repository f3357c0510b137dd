"""Runs whose replicas may differ, as far as timing and members go: without arithmetic, under virtual time."""

from dataclasses import replace

import pytest

from jaxdt.build import RunStart, build_coordinator
from jaxdt.membership.member import ACCEPT, HOLD
from jaxdt.membership.peer import Peer
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import GroupReport, PipelineEndReport, StepReport, ViewReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.config import GroupsConfig, default_plan, parse
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.network import Link
from jaxdt.run.work import WorkKind
from jaxdt.sim.faults import CRASH, LEAVE, Fault
from jaxdt.sim.predict import Conditions, simulate
from jaxdt.sim.sim_peer import CRASHED
from jaxdt.sync.groups import Groups
from jaxdt.sync.held_out import HeldOutPlace, HeldOutWork
from jaxdt.sync.local_steps import PipelinePlace
from jaxdt.sync.replica import ReplicaOptions

N_STEPS = 12


def make_config(match="all", pipelines=2, **groups):
    return parse(
        {
            "model": {"preset": "debug", "tied_head": False},
            "plan": {"stages": 2, "pipelines": pipelines, "microbatches": 2 * pipelines},
            "train": {"steps": N_STEPS, "microbatch_size": 2},
            "sync": {"kind": "groups", "groups": {"match": match, **groups}},
        },
        vocab_size=64,
    )


def outcome_of(config, slow_pipeline=None, faults=()):
    """With a pipeline that takes four times as long, if one is given."""
    plan = default_plan(config)
    seconds = {"F": 1.0, "B": 2.0, "E": 1.0, "G": 0.1, "U": 0.1}
    factor = {peer: 4 if plan.seat(peer)[1] == slow_pipeline else 1 for peer in plan.peers}
    by_peer = {peer: {kind: s * factor[peer] for kind, s in seconds.items()} for peer in plan.peers}
    hosts = {peer: f"h{peer}" for peer in plan.peers}
    conditions = Conditions(by_peer, lambda src, dst: Link(0.01, 1.0), hosts, dict.fromkeys(hosts.values(), 1))
    return simulate(config, plan, conditions, faults=faults, until_s=1e5)


def ends(outcome):
    return {report.pipeline: report.n_steps for report in outcome.of(PipelineEndReport)}


@pytest.mark.parametrize("match", ["all", "pairs", "none", "window"])
def test_pipelines_of_one_speed_do_equal_shares(match):
    outcome = outcome_of(make_config(match))
    assert outcome.stopped[ev.COORDINATOR].code == 0
    assert [report.step for report in outcome.of(StepReport)] == list(range(N_STEPS))
    assert ends(outcome) == {0: N_STEPS, 1: N_STEPS}


@pytest.mark.parametrize("match", ["none", "window"])
def test_a_fast_pipeline_does_what_a_slow_one_does_not(match):
    """The run ends as soon as there are enough steps in all; each pipeline finishes the one under way."""
    equal, unequal = outcome_of(make_config("all"), slow_pipeline=1), outcome_of(make_config(match), slow_pipeline=1)
    steps = ends(unequal)
    assert steps[0] >= 2 * steps[1] and 2 * N_STEPS <= sum(steps.values()) <= 2 * N_STEPS + 2
    assert len(unequal.of(StepReport)) == N_STEPS and unequal.now_s < 0.7 * equal.now_s


def test_a_window_without_end_forms_the_groups_of_all():
    every, window = (
        [(report.stage, report.k, report.members, report.steps) for report in outcome.of(GroupReport)]
        for outcome in (
            outcome_of(make_config("all", 3), slow_pipeline=1),
            outcome_of(make_config("window", 3, window_s=float("inf"), connectivity_groups=0), slow_pipeline=1),
        )
    )
    assert every == window and len(every) == 2 * N_STEPS


@pytest.mark.parametrize("kind", [CRASH, LEAVE])
@pytest.mark.parametrize("match", ["all", "pairs", "none", "window"])
def test_the_others_do_what_a_lost_pipeline_leaves_undone(match, kind):
    """Peer 3 of its pipeline is told at once that it is out, and waits until the run is over."""
    outcome = outcome_of(make_config(match), faults=[Fault(30.0, kind, 2)])
    assert outcome.stopped[ev.COORDINATOR].code == 0
    assert [sorted(report.members) for report in outcome.of(ViewReport)] == [[0, 1, 2, 3], [0, 1]]
    assert [report.step for report in outcome.of(StepReport)] == list(range(N_STEPS))
    steps = ends(outcome)
    assert 0 < steps[1] < N_STEPS < steps[0] and 2 * N_STEPS <= sum(steps.values()) <= 2 * N_STEPS + 2
    assert outcome.stopped[2].code == (CRASHED if kind == CRASH else 0)
    assert outcome.stopped[3].code == ExitCode.NOT_JOINED  # it has waited for the lost one, with another machine


@pytest.mark.parametrize("kind", [CRASH, LEAVE])
def test_a_run_ends_in_one_line_when_the_last_pipeline_is_lost(kind):
    outcome = outcome_of(make_config("window"), faults=[Fault(30.0, CRASH, 2), Fault(40.0, kind, 1)])
    stop = outcome.stopped[ev.COORDINATOR]
    assert stop.code == 3 and "peer 1 (stage 1)" in stop.reason and "its pipeline was the last one" in stop.reason
    assert outcome.stopped[0] == outcome.stopped[3] == stop


def test_pipelines_that_are_lost_at_once_leave_at_once():
    """The groups that form then name none of them."""
    faults = [Fault(30.0, CRASH, 0), Fault(30.0, CRASH, 5)]
    outcome = outcome_of(make_config("all", 3), faults=faults)
    assert outcome.stopped[ev.COORDINATOR].code == 0
    assert [sorted(report.members) for report in outcome.of(ViewReport)] == [[0, 1, 2, 3, 4, 5], [2, 3]]
    sizes = [len(report.members) for report in outcome.of(GroupReport)]
    assert sizes == [3] * sizes.index(1) + [1] * (len(sizes) - sizes.index(1))


VIEW = ev.View(1, 1, 0, (ev.Member(0, 0, admission=1), ev.Member(1, 0, admission=1)), (1,), n_committed=0)


def replica(n_steps=9):
    """The machine of peer 0, a pipeline of one stage, whose vector has two slices."""
    place = PipelinePlace(peer=0, stage=0, pipeline=[0], n_steps=n_steps, clip_norm=0.0)
    options = ReplicaOptions(n_steps, fragment_elements=(4,), n_elements=4, slice_bytes=8)
    held_out = HeldOutWork(HeldOutPlace(0, 0, None, 0, []))
    return Groups(default_plan(make_config()), place, options, held_out, GroupsConfig())


def test_a_shard_that_comes_again_after_its_group_is_dropped():
    """One that comes before its group is kept until the group is told."""
    machine = replica()
    machine.handle(0.0, ev.ViewChanged(VIEW))

    def hear(src, body):
        """The actions of the machine, after the Work and the sums that it asks for are done too."""
        todo, done = [ev.Received(ev.Header("r", 0, 1, src), body)], []
        while todo:
            for action in machine.handle(0.0, todo.pop(0)):
                done.append(action)
                todo += [ev.Ran(action.work, 0.0, 1.0)] if isinstance(action, ev.Run) else []
                todo += [ev.Summed(action.key, 1, 1.0)] if isinstance(action, ev.Sum) else []
        return done

    for k in range(3):
        round = RoundId(RoundKind.MEAN, 0, k, view=1)
        shard = ev.Shard(ev.SliceKey(round, 0, 2, 1), ((1, k),), 1)
        assert hear(1, shard) == []
        assert any(isinstance(action, ev.Sum) for action in hear(ev.COORDINATOR, ev.GroupFormed(round, (0, 1))))
        cover = ((0, 1), (((0, 0),), ((1, k),)))
        told = hear(1, ev.Reduced(ev.SliceKey(round, 2, 4), cover, 1, 1, 1.0))
        assert [send.body.round for send in told if isinstance(getattr(send, "body", None), ev.ResultHeld)] == [round]
        if k == 1:  # the other one has not got the result, and is lost: this one holds it, and contributes no more
            again = hear(ev.COORDINATOR, ev.GroupFormed(replace(round, attempt=1), (0,)))
            assert [action.body for action in again] == [told[0].body]
        assert hear(ev.COORDINATOR, ev.GroupClosed(round)) == [ev.Forget(round)]
        assert hear(1, shard) == [ev.Forget(round)] and not machine._engine._early


class Gate:
    """A membership that holds the messages of a view until that is adopted."""

    READS = frozenset({ev.View})
    header = ev.Header("r", 0, 0, 0)

    def admit(self, header, body):
        return HOLD if header.view > self.header.view and not isinstance(body, ev.View) else ACCEPT

    def handle(self, now_s, event):
        self.header = replace(self.header, view=event.body.number)
        return [ev.ViewChanged(event.body)]


def test_a_mean_whose_slices_have_waited_for_a_view_is_adopted_once_all_are_stored():
    """Peer 1 has adopted view 2 before it sends its slices. A driver adds up as soon as it is asked to."""
    peer, held, adopted = Peer(Gate(), replica()), set(), []

    def perform(event):
        for action in peer.handle(0.0, event):
            match action:
                case ev.HandleAgain(message):
                    perform(message)
                case ev.StoreTensor(_, body):
                    held.add((body.key.lo, body.key.hi, body.key.src))
                case ev.Sum(key):
                    held.add((key.lo, key.hi, key.src))
                    perform(ev.Summed(key, 1, 1.0))
                case ev.Run(work) if work.kind == WorkKind.LAY_OUT:
                    perform(ev.Ran(work, 0.0, 1.0))
                case ev.Run(work) if work.kind == WorkKind.ADOPT:
                    adopted.append(set(held))

    def hear(src, view, body):
        perform(ev.Received(ev.Header("r", 0, view, src), body, None if src == ev.COORDINATOR else "tensor"))

    round = RoundId(RoundKind.MEAN, 0, 0, view=1)
    hear(ev.COORDINATOR, 1, VIEW)
    hear(ev.COORDINATOR, 1, ev.GroupFormed(round, (0, 1)))
    cover = ((0, 1), (((0, 0),), ((1, 1),)))
    hear(1, 2, ev.Shard(ev.SliceKey(round, 0, 2, 1), ((1, 1),), 1))
    hear(1, 2, ev.Reduced(ev.SliceKey(round, 2, 4), cover, 1, 1, 1.0))
    assert not adopted
    hear(ev.COORDINATOR, 2, replace(VIEW, number=2))
    assert [{(0, 2, None), (2, 4, None)} <= sums for sums in adopted] == [True]


def test_the_result_of_a_replica_that_is_alone_comes_after_its_snapshots():
    """A snapshot that was asked for during the last step is laid out after it. Else the checkpoint of an older version
    would be the newest one here."""
    machine, done = replica(), []

    def perform(event):
        for action in machine.handle(0.0, event):
            done.append(action)
            if isinstance(action, ev.Updated):
                perform(action)

    def hear(body):
        perform(ev.Received(ev.Header("r", 0, 1, ev.COORDINATOR), body))

    def ran(kind):
        [run] = [action for action in done if isinstance(action, ev.Run)]
        assert run.work.kind == kind
        done.clear()
        perform(ev.Ran(run.work, 0.0, 1.0))

    perform(ev.Ready({}, n_words=4))
    perform(ev.ViewChanged(replace(VIEW, members=VIEW.members[:1])))
    hear(ev.GroupFormed(RoundId(RoundKind.STATE, 0, 3, view=1), (0,)))
    hear(ev.EndOfSteps())
    done.clear()
    perform(ev.Accumulated(0, 0, 0, 1, 1.0))
    perform(ev.Drained(0))
    ran(WorkKind.NORM)
    ran(WorkKind.LOCAL_STEP)
    hear(ev.GroupFormed(RoundId(RoundKind.MEAN, 0, 0, view=1), (0,)))
    assert ev.Send(ev.COORDINATOR, ev.Finished(1)) in done
    hear(ev.GroupFormed(RoundId(RoundKind.STATE, 0, 9, view=1), (0,)))
    ran(WorkKind.LAY_OUT)
    for key in [action.key for action in done if isinstance(action, ev.Sum)]:
        perform(ev.Summed(key, 1, 1.0))
    done[:] = [action for action in done if not isinstance(action, ev.Sum)]
    ran(WorkKind.ADOPT)
    assert done == [ev.MeanKept(3), ev.Updated(0, 3), ev.MeanKept(9), ev.Updated(0, 9)]


def test_means_of_states_are_adopted_in_the_order_of_their_versions():
    """The first one has to be fetched of another member, so the second is whole before it."""
    machine, done = replica(n_steps=0), []

    def perform(event):
        for action in machine.handle(0.0, event):
            done.append(action)
            if isinstance(action, ev.Run) and action.work.kind == WorkKind.LAY_OUT:
                perform(ev.Ran(action.work, 0.0, 1.0))
            if isinstance(action, ev.Sum):
                perform(ev.Summed(action.key, 1, 1.0))

    def hear(src, body):
        perform(ev.Received(ev.Header("r", 0, 1, src), body))

    def adopted():
        return [action.rounds for action in done if isinstance(action, ev.Run) and action.work.kind == WorkKind.ADOPT]

    def give(round, lo, hi):
        hear(1, ev.Reduced(ev.SliceKey(round, lo, hi), ((0, 1), (((0, 0),), ((1, 0),))), 1, 1, 1.0))

    first, second = (RoundId(RoundKind.STATE, 0, version, view=1) for version in (3, 6))
    perform(ev.Ready({}, n_words=4))
    perform(ev.ViewChanged(VIEW))
    hear(ev.COORDINATOR, ev.GroupFormed(first, (0, 1)))
    hear(ev.COORDINATOR, ev.GroupFormed(first, (0, 1), holders=(1,)))
    assert done[-1] == ev.Send(1, ev.FetchResult(first))
    hear(ev.COORDINATOR, ev.GroupFormed(second, (0, 1)))
    hear(1, ev.Shard(ev.SliceKey(second, 0, 2, 1), ((1, 0),), 1))
    give(second, 2, 4)
    assert done[-1].body.round == second and not adopted()
    give(first, 0, 2)
    give(first, 2, 4)
    assert adopted() == [(first,)]


def test_the_scheduler_forgets_whose_mean_an_old_checkpoint_was():
    config = make_config("none")
    plan = default_plan(config)
    scheduler, row = build_coordinator(config, plan, RunStart("r"))._agreement, plan.placement[0]
    members = tuple(ev.Member(peer, plan.seat(peer)[0], admission=1) for peer in plan.peers)
    scheduler.on_view(0.0, ev.View(1, 1, 0, members, (1, 1), n_committed=0))
    for version in (3, 6, 9):
        round = RoundId(RoundKind.STATE, 0, version, view=1)
        scheduler._open.open(round, row)
        for peer in row:
            scheduler.hear(0.0, peer, ev.ResultHeld(round, 5, (version,) * len(row)), {})
    for version in (6, 6, 9):
        assert scheduler.mean_of(version) == (tuple((peer, version) for peer in row), ())
    assert list(scheduler._snapshots._mean_of) == [(9, 0)]
