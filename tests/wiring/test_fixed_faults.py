"""Fixed wiring that loses peers and gets them back: who does what meanwhile, and that the training stays the same."""

import random
from dataclasses import replace

import pytest
from report_fields import report_fields
from test_equivalence import assert_same_training, functions_of, make_config, one_process, train_in_pieces  # noqa: F401

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import NO_PEER
from jaxdt.run import config as run_config
from jaxdt.run.plan import Plan
from jaxdt.sim.faults import CRASH, JOIN, LEAVE, PAUSE, RESTART, Fault, draw
from jaxdt.wiring.fixed import PlannedRoutes, pipeline_assignment

pytestmark = pytest.mark.xdist_group("stage_functions")

# ------------------------------------------------------------------------------------------------------------- places

# Two stages; pipelines 0, 1; 2, 3; and 4, 5, with microbatches 0..2, 3..5 and 6..7.
PLAN = Plan(2, ((0, 1), (1, 2)), ((0, 2, 4), (1, 3, 5)), (3, 3, 2))


def view_of(stages):
    """A view of {peer: stage}."""
    return ev.View(2, 1, 0, tuple(ev.Member(peer, stage, 1) for peer, stage in sorted(stages.items())), (1, 2), 0)


def assignment(*gone, **newcomers):
    """The assignment of the plan's peers without those that are gone; p7=1 adds peer 7 at stage 1."""
    stages = {peer: PLAN.seat(peer)[0] for peer in PLAN.peers if peer not in gone}
    stages |= {int(name.removeprefix("p")): stage for name, stage in newcomers.items()}
    return pipeline_assignment(PLAN, view_of(stages), stages)


def test_a_plan_is_whole_while_every_place_is_taken():
    assert assignment().places == [[0, 2, 4], [1, 3, 5]] and assignment().is_whole
    assert assignment(3).places == [[0, 2, 4], [1, None, 5]] and not assignment(3).is_whole


def test_newcomers_take_open_places_of_their_stage_and_then_wait_in_reserve():
    found = assignment(2, 3, p6=1, p7=1)
    assert found.places == [[0, None, 4], [1, 6, 5]]
    assert found.pipeline_of(1, 6) == 1 and found.pipeline_of(1, 7) is None


def test_who_has_not_got_its_state_yet_holds_no_place():
    view = view_of({peer: PLAN.seat(peer)[0] for peer in PLAN.peers})
    assert pipeline_assignment(PLAN, view, [0, 1, 2, 4, 5]).places[1] == [1, None, 5]


def routes_of(peer, *gone, **newcomers):
    stages = {p: PLAN.seat(p)[0] for p in PLAN.peers if p not in gone} | {int(n[1:]): s for n, s in newcomers.items()}
    routes = PlannedRoutes(PLAN, peer)
    routes.adopt(view_of(stages), sorted(stages))
    return routes


def test_microbatches_go_their_own_way_and_past_an_open_place_by_the_others_in_turn():
    routes = routes_of(0, 3)
    assert routes.routes("F", range(8), 0, 1) == [
        *[(0, 1)] * 3,
        *[(2, 5), (2, 1), (2, 5)],
        *[(4, 5)] * 2,
    ]
    assert routes.routes("F", [4], 1, 1) == [(NO_PEER, 1)] and routes.routes("E", [5], 0, 1) == [(4, 5)]
    assert [routes.owning_router("F", m) for m in (0, 3, 7)] == [0, 2, 4]


def test_all_stay_busy_when_the_first_place_is_open():
    """Those who stand in for it steer its microbatches too, the pipelines in turn and more of them at a time."""
    routes = routes_of(0, 2)
    assert [routes.owning_router("F", m) for m in range(3, 6)] == [4, 0, 4]
    assert routes.in_flight_limit == 2 * routes_of(0).in_flight_limit == 2 * PLAN.depth(0)
    assert sorted((0, 1, 2, 4), key=lambda m: routes.priority("F", m)) == [0, 1, 4, 2]


# ------------------------------------------------------------------------------------------------------ same training


def elastic(stages, pipelines, head="tied", **options):
    config = make_config(stages, pipelines, head=head, eval_every_steps=8, eval_microbatches=5, **options)
    return replace(config, net=run_config.NetConfig(1.0, 4.0))


@pytest.mark.parametrize(("shape", "seed"), [((2, 2), 0), ((2, 3), 3)])
def test_a_crash_at_any_moment_changes_nothing(shape, seed, functions_of, one_process):  # noqa: F811
    """One peer of each stage, at moments of their own; the run goes on without."""
    config, chance = elastic(*shape, head=("tied", "untied")[seed % 2]), random.Random(seed)
    stages = run_config.default_plan(config).placement
    faults = [Fault(chance.uniform(5, 150), CRASH, chance.choice(row)) for row in stages]
    outcome = assert_same_training(config, functions_of, one_process, faults=sorted(faults, key=lambda f: f.at_s))
    assert len(report_fields(outcome, "lost")) == 2


@pytest.mark.parametrize("seed", range(2))
def test_faults_of_all_kinds_change_nothing(seed, functions_of, one_process):  # noqa: F811
    config = elastic(2, 3, schedule=("1f1b", "gpipe")[seed % 2])
    faults = draw(seed, run_config.default_plan(config).placement, 3, 120.0, 20.0)
    assert_same_training(config, functions_of, one_process, faults=faults)


@pytest.mark.parametrize("kind", [CRASH, PAUSE, LEAVE, JOIN])
def test_a_pipeline_is_whole_again_when_somebody_takes_the_place(kind, functions_of, one_process):  # noqa: F811
    """Restarted, paused for longer than a deadline, replaced by a newcomer; and one who finds no place open."""
    last = run_config.default_plan(elastic(2, 2)).placement[1][0]
    back = {CRASH: [Fault(90.0, RESTART, last)], LEAVE: [Fault(90.0, JOIN, 0)]}
    faults = [Fault(60.0, kind, last if kind != JOIN else 0, 60.0 * (kind == PAUSE)), *back.get(kind, [])]
    outcome = assert_same_training(elastic(2, 2), functions_of, one_process, faults=faults)
    assert len(report_fields(outcome, "download")) == 1
    done = {fields["peer"]: fields for fields in report_fields(outcome, "done")}
    assert len(done) == 4 + (kind == JOIN)


def test_tensors_beyond_the_budget_are_made_again(functions_of, one_process):  # noqa: F811
    config = elastic(3, 2)
    config = replace(config, wiring=replace(config.wiring, retain_bytes=0))
    middle = run_config.default_plan(config).placement[1][1]
    assert_same_training(config, functions_of, one_process, faults=[Fault(70.0, CRASH, middle)])


def test_a_borrowed_replica_reads_what_the_pipelines_own_codec_wrote(functions_of):  # noqa: F811
    """A codec for each pipeline and direction; either peer of the first stage is lost."""
    config = elastic(2, 2)
    plan = replace(run_config.default_plan(config), codec=("int8/bf16,none",))
    for lost in plan.placement[0]:
        losses, *_ = train_in_pieces(config, functions_of, plan, [Fault(30.0, CRASH, lost)])
        assert losses[-1] < losses[0]


def test_the_last_of_a_stage_is_waited_for(functions_of):  # noqa: F811
    """One pipeline: a newcomer takes the place of who is lost, and the run goes back to the start."""
    faults = [Fault(30.0, CRASH, 1), Fault(60.0, JOIN, 0)]
    losses, _, _, outcome = train_in_pieces(elastic(2, 1), functions_of, faults=faults)
    assert report_fields(outcome, "vacant")[0]["stage"] == 1 and len(report_fields(outcome, "rollback")) == 1
    assert losses[-1] < losses[0]


def test_one_pipeline_may_stop_instead(functions_of):  # noqa: F811
    config = elastic(2, 1)
    config = replace(config, wiring=replace(config.wiring, on_stage_lost="stop"))
    with pytest.raises(AssertionError, match=r"peer 1 \(stage 1\): lost, .*; it was the last of its stage"):
        train_in_pieces(config, functions_of, faults=[Fault(30.0, CRASH, 1)])
