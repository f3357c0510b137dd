"""A pipeline that loses a peer leaves, at any moment, and the others go on: what they hold at the end is the replay of
the log, bit for bit."""

from collections import defaultdict
from dataclasses import replace

import pytest
from test_group_replay import (
    N_STEPS,
    assert_equal_bits,
    incarnations_of,
    make_config,
    replayed,
    simulated,
    simulation,
    store_of,
)
from test_held_out import evaluated
from test_stash import stashing
from test_streaming import STREAMING

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import LostReport, StateMeanReport, StepReport
from jaxdt.protocol.round_id import RoundKind
from jaxdt.run import config as run_config
from jaxdt.run.work import WorkKind
from jaxdt.sim.faults import CRASH, Fault
from jaxdt.sim.tensors import NoTensors
from jaxdt.testing.case import play
from jaxdt.testing.cases import draw_case

pytestmark = pytest.mark.xdist_group("replicas_that_differ")

LOST = 2  # a peer of the first stage, in pipeline 1


def sends(kind, is_it=lambda body: True):
    """The moment at which a peer sends such a message."""

    def happens(event, actions):
        bodies = [action.body for action in actions if isinstance(action, ev.Send)]
        bodies += [body for action in actions if isinstance(action, ev.Post) for _, body, _ in action.letters]
        return any(isinstance(body, kind) and is_it(body) for body in bodies)

    return happens


def has_run(kind):
    return lambda event, actions: isinstance(event, ev.Ran) and event.work.kind == kind


is_state = lambda round: round.kind == RoundKind.STATE  # noqa: E731
WINDOW = dict(window_s=3.0, connectivity_groups=4)
MOMENTS = {
    "it has sent its parts": (make_config("pairs", 3, microbatches=7), sends(ev.Shard), 2),
    "it has the outer optimizer's step": (
        make_config("all", 3, microbatches=7, every_steps=2, outer="nesterov"),
        has_run(WorkKind.ADOPT),
        1,
    ),
    "a mean of a fragment is pending": (
        make_config("all", 3, microbatches=7, layers=4, **STREAMING),
        sends(ev.Shard, lambda shard: not is_state(shard.key.round)),
        2,
    ),
    "its forwards run ahead": (stashing("window", 3, 8, **WINDOW), has_run(WorkKind.BACKWARD), 3),
    "the result is averaged": (
        make_config("window", 3, microbatches=7, **WINDOW),
        sends(ev.Shard, lambda shard: is_state(shard.key.round) and shard.key.round.number == N_STEPS),
        1,
    ),
    "a held-out loss is measured": (
        evaluated(make_config("all", 2), 3, checkpoint_every_steps=3),
        sends(ev.ResultHeld, lambda held: held.round.kind == RoundKind.HELD_OUT),
        1,
    ),
}


def time_of(config, happens, number):
    """When something happens at the peer that will be lost, for that many times."""
    times = []

    def observe(now_s, peer, event, actions):
        if peer == LOST and happens(event, actions):
            times.append(now_s)

    plan = run_config.default_plan(config)
    tensors = {peer: NoTensors(1, store_of(config, peer).n_words) for peer in plan.peers}
    simulation(config, tensors, observer=observe).run(until_s=1e5)
    return times[number - 1]


@pytest.mark.parametrize("name", MOMENTS)
def test_the_others_go_on_and_equal_the_replay(name):
    config, happens, number = MOMENTS[name]
    plan, n_pipelines = run_config.default_plan(config), config.plan.pipelines
    outcome, states = simulated(config, faults=[Fault(time_of(config, happens, number) + 1e-6, CRASH, LOST)])
    assert [report.peer for report in outcome.of(LostReport)] == [LOST]
    replay = replayed(config, outcome, StateMeanReport)
    for stage, row in enumerate(plan.placement):
        for pipeline, peer in enumerate(row):
            if pipeline != plan.seat(LOST)[1]:
                assert outcome.stopped[peer].code == 0
                assert_equal_bits(states[peer], replay.states[stage, pipeline])
    rows = [report.step for report in outcome.of(StepReport)]
    assert rows == list(range(len(rows))) and N_STEPS - 1 <= len(rows) <= N_STEPS
    n_steps = incarnations_of(config, outcome).n_steps
    assert n_pipelines * N_STEPS - n_pipelines <= sum(n_steps.values()) <= n_pipelines * (N_STEPS + 2)


def test_what_one_of_the_others_holds_is_fetched_by_the_rest():
    """Peers are lost at many moments of some small runs, whose numbers show what each replica has adopted."""
    seen = defaultdict(int)

    def observe(now_s, peer, event, actions):
        for action in actions:
            if isinstance(action, ev.Send) and isinstance(action.body, ev.GroupFormed):
                seen["again"] += action.body.round.attempt > 0
                seen["held"] += bool(action.body.holders)
            seen["fetched"] += isinstance(action, ev.Send) and isinstance(action.body, ev.FetchResult)

    for seed in (1, 14):
        case, times = replace(draw_case(seed, "groups"), faults=()), defaultdict(list)
        play(case, observer=lambda now_s, peer, event, actions, times=times: times[peer].append(now_s))
        for number, peer in enumerate(case.plan.peers):
            at_s = times[peer][len(times[peer]) * (number + 1) // (len(case.plan.peers) + 1)]
            play(replace(case, faults=(Fault(at_s + 1e-6, CRASH, peer),)), observer=observe)
    assert seen["again"] and seen["held"] and seen["fetched"], seen
