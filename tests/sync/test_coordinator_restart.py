"""A coordinator that dies at any moment and is started again goes on with the groups that are open: what the replicas
hold at the end is the replay of the log, bit for bit, and no row of the metrics is missing."""

import itertools
from dataclasses import replace

import pytest
import test_server
from test_group_replay import N_STEPS, assert_equal_bits, make_config, replayed, simulated, simulation
from test_group_replay import store_of as store_of_group
from test_held_out import evaluated
from test_streaming import STREAMING

from jaxdt.build import RunStart, build_coordinator
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import CheckpointReport, LostReport, RestartedReport, StateMeanReport, StepReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run import config as run_config
from jaxdt.sim.faults import CRASH, POWER_OFF, RESTART, SAVE, STALE, STOP, Fault
from jaxdt.sim.tensors import NoTensors
from jaxdt.testing.case import play
from jaxdt.testing.cases import draw_case

pytestmark = pytest.mark.xdist_group("replicas_that_differ")

AWAY_S = 2500.0  # longer than the time after which a silent peer is given up
WINDOW = make_config("window", 3, microbatches=7, window_s=3.0, connectivity_groups=4)
ALL = make_config("all", 3, microbatches=7, every_steps=2, outer="nesterov")


def says(kind, is_it=lambda body: True):
    """The coordinator has just sent such a message."""
    return lambda peer, event, actions: (
        peer == ev.COORDINATOR
        and any(
            isinstance(action, ev.Send) and isinstance(action.body, kind) and is_it(action.body) for action in actions
        )
    )


def is_told(kind, is_it=lambda body: True):
    """Somebody has just been told such a thing."""
    return lambda peer, event, actions: (
        isinstance(event, ev.Received) and isinstance(event.body, kind) and is_it(event.body)
    )


is_group = lambda body: body.round.kind == RoundKind.MEAN  # noqa: E731
is_result = lambda body: body.round.kind == RoundKind.STATE and body.round.number == N_STEPS  # noqa: E731
is_first_state = lambda body: body.round.kind == RoundKind.STATE and body.round.stage == 0  # noqa: E731
MOMENTS = {
    "the group is under way to its members": (WINDOW, says(ev.GroupFormed, is_group), 8),
    "one of its members is told": (WINDOW, is_told(ev.GroupFormed, is_group), 15),
    "a member holds the result": (ALL, is_told(ev.ResultHeld, is_group), 4),
    "a mean of a fragment is pending": (
        make_config("all", 3, microbatches=7, layers=4, **STREAMING),
        is_told(ev.GroupFormed, is_group),
        5,
    ),
    "the result is averaged": (WINDOW, is_told(ev.ResultHeld, is_result), 3),
    "a held-out loss is told": (
        evaluated(make_config("all", 2), 3, checkpoint_every_steps=3),
        is_told(ev.MeanEvaluated),
        1,
    ),
}


def time_of(config, happens, number):
    """When something happens in the run without faults, for that many times."""
    times = []

    def observe(now_s, peer, event, actions):
        if happens(peer, event, actions):
            times.append(now_s)

    plan = run_config.default_plan(config)
    tensors = {peer: NoTensors(1, store_of_group(config, peer).n_words) for peer in plan.peers}
    simulation(config, tensors, observer=observe).run(until_s=1e5)
    return times[number - 1]


def restart(at_s, kind=POWER_OFF):
    """The coordinator dies, with what is on its way to others, and comes back."""
    return [Fault(at_s + 1e-6, kind, ev.COORDINATOR), Fault(at_s + AWAY_S, RESTART, ev.COORDINATOR)]


def assert_equals_replay(config, outcome, states, lost=()):
    plan, replay = run_config.default_plan(config), replayed(config, outcome, StateMeanReport)
    for stage, row in enumerate(plan.placement):
        for pipeline, peer in enumerate(row):
            if pipeline not in lost:
                assert outcome.stopped[peer].code == 0
                assert_equal_bits(states[peer], replay.states[stage, pipeline])
    rows = [report.step for report in dict.fromkeys(outcome.of(StepReport))]
    assert rows == list(range(len(rows))) and len(rows) in ([N_STEPS, N_STEPS - 1] if lost else [N_STEPS])


ALONE = [name for name in MOMENTS if name not in ("one of its members is told", "a member holds the result")]


@pytest.mark.parametrize(("name", "kind"), list(zip(ALONE, itertools.cycle([CRASH, POWER_OFF]))))
def test_the_run_goes_on_and_equals_the_replay(name, kind):
    """With a crash what is on its way arrives; the fuzzer draws all pairs, and all moments, of which these are some. At
    the others more happens below."""
    config, happens, number = MOMENTS[name]
    outcome, states = simulated(config, faults=restart(time_of(config, happens, number), kind))
    assert len(outcome.of(RestartedReport)) == 1 and not outcome.of(LostReport)
    assert_equals_replay(config, outcome, states)


def test_it_may_die_while_it_asks():
    """Some members have answered the second coordinator, and say the same again to the third."""
    faults = restart(time_of(WINDOW, *MOMENTS["one of its members is told"][1:]))
    asked = []

    def observe(now_s, peer, event, actions):
        if is_told(ev.AskReplicaState)(peer, event, actions):
            asked.append(now_s)

    simulated(WINDOW, faults=faults, observer=observe)
    faults += restart(asked[1])
    outcome, states = simulated(WINDOW, faults=faults)
    assert len(outcome.of(RestartedReport)) == 2
    assert_equals_replay(WINDOW, outcome, states)


def test_a_pipeline_may_be_lost_meanwhile():
    config, happens, number = MOMENTS["a member holds the result"]
    at_s = time_of(config, happens, number)
    lost = 2
    outcome, states = simulated(config, faults=[*restart(at_s), Fault(at_s + 5.0, CRASH, lost)])
    assert [report.peer for report in outcome.of(LostReport)] == [lost]
    assert_equals_replay(config, outcome, states, {run_config.default_plan(config).seat(lost)[1]})


def test_nobody_obeys_the_one_that_was_taken_for_dead():
    config, happens, number = MOMENTS["one of its members is told"]
    at_s = time_of(config, happens, number)
    stale = Fault(at_s + AWAY_S + 1.0, STALE, ev.COORDINATOR, 3000.0)
    outcome, states = simulated(config, faults=[*restart(at_s), stale])
    assert_equals_replay(config, outcome, states)


def test_a_checkpoint_says_whose_mean_it_is_also_after_a_restart():
    """The part of the first stage was written before, that of the second after it."""
    config = replace(WINDOW, train=replace(WINDOW.train, checkpoint_every_steps=3))
    at_s = time_of(
        config, is_told(ev.ResultHeld, lambda held: (held.round.kind, held.round.stage) == (RoundKind.STATE, 0)), 3
    )
    outcome, states = simulated(config, faults=restart(at_s))
    assert [report.version for report in outcome.of(CheckpointReport)][-1] == N_STEPS
    assert {mean.version for mean in outcome.of(StateMeanReport)} >= {3, N_STEPS}
    assert_equals_replay(config, outcome, states)


def test_servers_go_on_without_a_coordinator_and_with_the_next_one():
    config = test_server.make_config(1, 2)
    plan = run_config.default_plan(config)
    outcome, states = test_server.trained(config, faults=restart(160.0))
    replay = test_server.replayed(config, outcome)
    for stage, row in enumerate(plan.placement):
        assert_equal_bits(states[min(row)], test_server.result_of(replay, stage))
    rows = [report.step for report in dict.fromkeys(outcome.of(StepReport))]
    assert rows == list(range(config.train.steps)) and len(outcome.of(RestartedReport)) == 1


def without_arithmetic(config, faults=()):
    """The outcome of a run with averaging groups, or with servers."""
    if config.sync.kind == "server":
        return test_server.simulated(config, lambda peer, stage: NoTensors(1, 100), faults=faults)
    plan = run_config.default_plan(config)
    tensors = {peer: NoTensors(1, store_of_group(config, peer).n_words) for peer in plan.peers}
    return simulation(config, tensors, faults=faults).run(until_s=1e5)


@pytest.mark.parametrize(
    ("name", "dies_s", "kind"),
    [
        ("groups", 0.3, CRASH),
        ("groups", 3.0, POWER_OFF),
        ("groups", 30.0, CRASH),
        ("server", 0.3, POWER_OFF),
        ("server", 3.0, CRASH),
        ("server", 30.0, POWER_OFF),
    ],
)
def test_what_an_operator_was_promised_survives_it(name, dies_s, kind):
    """The coordinator dies so long after it has answered: before, while and after the checkpoint is made."""
    of_groups = make_config("window", 3, microbatches=7, window_s=3.0, steps=20)
    config = of_groups if name == "groups" else test_server.make_config(1, 2, steps=20)
    outcome = without_arithmetic(config)
    at_s = next(at_s for at_s, _, report in outcome.reports if isinstance(report, StepReport) and report.step == 2)
    dies = [Fault(at_s + dies_s, kind, ev.COORDINATOR), Fault(at_s + dies_s + 20.0, RESTART, ev.COORDINATOR)]
    outcome = without_arithmetic(config, [Fault(at_s, SAVE, ev.COORDINATOR), *dies])
    assert len(outcome.of(RestartedReport)) == 1
    (version, last) = (report.version for report in outcome.of(CheckpointReport))
    assert version < last == 20
    outcome = without_arithmetic(config, [Fault(at_s, STOP, ev.COORDINATOR), *dies])
    assert [report.version for report in outcome.of(CheckpointReport)] == [version]
    stop = outcome.stopped[ev.COORDINATOR]
    assert (stop.code, stop.reason) == (
        0,
        f"stopped by an operator after {version} steps, of which there is a checkpoint",
    )


def test_a_promise_that_is_kept_is_not_made_again():
    """The coordinator dies when the checkpoint is complete, and nobody wants another one."""
    outcome = without_arithmetic(WINDOW)
    at_s = next(at_s for at_s, _, report in outcome.reports if isinstance(report, StepReport) and report.step == 2)
    saves = Fault(at_s, SAVE, ev.COORDINATOR)
    outcome = without_arithmetic(WINDOW, [saves])
    at_s = next(at_s for at_s, _, report in outcome.reports if isinstance(report, CheckpointReport))
    again = without_arithmetic(WINDOW, [saves, *restart(at_s)])
    versions = [[report.version for report in one.of(CheckpointReport)] for one in (outcome, again)]
    assert versions[0] == versions[1] and len(versions[0]) == 2


def test_the_last_row_is_told_again_as_it_was():
    outcome, states = simulated(WINDOW, faults=restart(time_of(WINDOW, is_told(ev.StepDone), 11)))
    assert_equals_replay(WINDOW, outcome, states)
    told = outcome.of(StepReport)
    assert len(told) == N_STEPS + 1 and len(set(told)) == N_STEPS


@pytest.mark.parametrize("seed, sync", [(228, "groups"), (32, "server")])
def test_steps_that_a_lost_pipeline_has_done_count_if_its_last_stage_is_there_to_say_so(seed, sync):
    """All pipelines have ended when the coordinator dies, and with it the rows that were not durable; then a peer of
    the first stage is lost. Its pipeline cannot do steps any more, and nobody else will."""
    case = replace(draw_case(seed, sync), faults=())
    ends_s = []

    def observe(now_s, peer, event, actions):
        if peer == ev.COORDINATOR and isinstance(event, ev.Received) and isinstance(event.body, ev.Finished):
            ends_s.append(now_s)

    play(case, observer=observe)
    at_s = max(ends_s) + 0.01
    lost = Fault(at_s + 0.05, CRASH, case.plan.placement[0][0])
    faults = (Fault(at_s, POWER_OFF, ev.COORDINATOR), lost, Fault(at_s + 8.0, RESTART, ev.COORDINATOR))
    outcome, _ = play(replace(case, faults=faults))
    rows = [report.step for report in dict.fromkeys(outcome.of(StepReport))]
    assert outcome.of(LostReport) and rows == list(range(case.config.train.steps))


# ------------------------------------------------------------------------------ the answers of members, one by one

AVERAGED = RoundId(RoundKind.MEAN, 0, 0, view=1)
STEPS = (1, 1, 1)


def restarted(answers, lost=(), config=None):
    """(the agreement of a coordinator that was started again, what it does when all of three replicas of one stage have
    answered with these groups and messages, or are `lost`)."""
    config = config or make_config("all", 3, stages=1, microbatches=3)
    agreement = build_coordinator(config, run_config.default_plan(config), RunStart("r"))._agreement
    view = ev.View(1, 1, 0, tuple([ev.Member(peer, 0, 1) for peer in range(3)]), (1,), 0)
    agreement.restore(view, (), None)
    actions = []
    for peer, (groups, said) in answers.items():
        for message in (ev.ReplicaState(tuple(groups), None, len(said)), *said):
            assert not actions, "not all have answered"
            actions += agreement.hear(0.0, peer, message, {})
    if lost:
        left = tuple([member for member in view.members if member.peer not in lost])
        actions += agreement.on_view(1.0, replace(view, number=2, members=left))
    assert not agreement.is_asking
    return agreement, actions


def known(is_over, round=AVERAGED):
    return ev.KnownGroup(round, (0, 1, 2), STEPS, is_over)


def sent(actions):
    return [(action.dst, action.body) for action in actions if isinstance(action, ev.Send)]


HELD = ev.ResultHeld(AVERAGED, 7, STEPS)


def test_a_member_that_has_let_go_of_a_group_is_not_waited_for():
    """The coordinator died after it had told one of the members that the group was over."""
    _, actions = restarted({0: ([known(True)], []), 1: ([known(False)], [HELD]), 2: ([known(False)], [HELD])})
    assert sent(actions) == [(1, ev.GroupClosed(AVERAGED)), (2, ev.GroupClosed(AVERAGED))]
    _, actions = restarted({0: ([known(True)], []), 1: ([known(False)], [HELD]), 2: ([known(False)], [])})
    assert sent(actions) == [(2, ev.GroupFormed(AVERAGED, (0, 1, 2), (1,), STEPS))]


def test_a_result_that_a_member_holds_counts_before_those_that_are_lost_do():
    """Else the members that are left would average once more, and the one that has adopted the result with them."""
    _, actions = restarted({0: ([known(False)], [HELD]), 1: ([known(False)], [])}, lost=[2])
    assert sent(actions) and {body for _, body in sent(actions)} == {
        ev.GroupFormed(AVERAGED, (0, 1, 2), holders=(0,), steps=STEPS)
    }
    assert {dst for dst, _ in sent(actions)} == {1}
    _, actions = restarted({0: ([known(False)], []), 1: ([known(False)], [])}, lost=[2])
    again = ev.GroupFormed(replace(AVERAGED, attempt=1), (0, 1), steps=STEPS[:2])
    assert set(sent(actions)) == {(0, again), (1, again)}


def test_the_mean_of_a_state_that_is_over_for_all_is_that_of_its_checkpoint():
    state = RoundId(RoundKind.STATE, 0, 3, view=1)
    agreement, actions = restarted(dict.fromkeys(range(3), ([known(True, state)], [])))
    assert not sent(actions)
    assert agreement.mean_of(3) == (tuple(zip(range(3), STEPS, strict=True)),)


def test_a_held_out_loss_that_was_measured_is_not_measured_again():
    """One member still holds the sum, which nobody needs: the others were told that it is over."""
    config = evaluated(make_config("all", 3, stages=1, microbatches=3), 1)
    held_out = RoundId(RoundKind.HELD_OUT, 0, 1, view=1)
    answers = {peer: ([known(peer != 2, held_out)], []) for peer in range(3)}
    _, actions = restarted(answers, config=config)
    assert sent(actions) == [(2, ev.GroupClosed(held_out))]
