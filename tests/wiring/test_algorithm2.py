"""Algorithm 2 as its listing says it: which peer moves, and that a run can be told to follow it."""

from jaxdt.build import RunStart, build_coordinator
from jaxdt.membership.rebalance_api import Move
from jaxdt.protocol import events as ev
from jaxdt.run.config import default_plan, parse
from jaxdt.run.network import Link
from jaxdt.sim.predict import Conditions, predict_step_s
from jaxdt.wiring.rebalance import Algorithm2, Rebalancer

STAGES = ({0, 1}, {2, 3}, {4, 5})


def rule(queues, period_s=5.0):
    """A rule that has seen its first period begin at 0 s, and a report of each peer."""
    found = Algorithm2(period_s)
    assert found.moves(0.0, STAGES, set()) == []
    for peer, queue in enumerate(queues):
        found.report(1.0, peer, ev.Load(queue, 0.5))
    return found


def test_the_listing_moves_the_peer_with_the_shortest_queue_each_period():
    found = rule((3.0, 2.0, 4.0, 5.0, 1.0, 1.5))
    everybody = set(range(6))
    assert found.moves(4.9, STAGES, everybody) == []
    assert found.moves(5.0, STAGES, everybody) == [Move(4, 2, 1)]
    assert found.moves(9.9, STAGES, everybody) == []
    assert found.moves(10.0, ({0, 1}, {2, 3, 4}, {5}), everybody - {5}) == [], "a stage keeps its last peer"


def test_the_listing_asks_for_no_difference_and_sends_newcomers_to_the_greatest_load():
    found = rule((1.0, 1.0, 1.0, 1.0, 1.0, 1.001))
    assert found.moves(5.0, STAGES, set(range(6))) == [Move(0, 0, 2)]
    assert found.stage_for(STAGES) == 2 and found.better(STAGES, 0) is None
    assert Algorithm2(5.0).stage_for(({0, 1}, {2})) == 1


def test_several_moves_of_a_period_follow_one_another():
    """Each by the loads that those before it leave."""
    stages = ({0, 1}, {2, 3}, {4, 5, 6})
    found = Algorithm2(5.0, n_moves=3)
    found.moves(0.0, stages, set())
    for peer, queue in enumerate((9.0, 9.0, 3.0, 2.0, 1.0, 1.5, 0.25)):
        found.report(1.0, peer, ev.Load(queue, 0.5))
    assert found.moves(5.0, stages, set(range(7))) == [Move(6, 2, 0), Move(4, 2, 0)], "stage 2 keeps its last peer"


def test_the_config_chooses_the_rule():
    for name, rule in (("bottleneck", Rebalancer), ("algorithm2", Algorithm2)):
        wiring = dict(kind="swarm", rebalance_s=5.0, rebalance_rule=name)
        config = parse(dict(model=dict(preset="debug"), wiring=wiring))
        assert type(build_coordinator(config, default_plan(config), RunStart("r")).roster.balance) is rule


def test_a_run_of_either_rule_is_predicted():
    """A step is predicted without moves."""
    predicted = []
    for name in ("bottleneck", "algorithm2"):
        wiring = dict(kind="swarm", rebalance_s=5.0, rebalance_rule=name)
        config = parse(
            dict(model=dict(preset="debug"), plan=dict(stages=2, pipelines=2, microbatches=4), wiring=wiring)
        )
        plan = default_plan(config)
        seconds = dict.fromkeys(plan.peers, dict.fromkeys("FBEGU", 1.0))
        hosts = {peer: f"h{peer}" for peer in plan.peers}
        link = lambda src, dst: Link(0.01, 1.0)  # noqa: E731
        conditions = Conditions(seconds, link, hosts, dict.fromkeys(hosts.values(), 1.0))
        predicted.append(predict_step_s(config, plan, conditions))
    assert predicted[0] == predicted[1] > 1.0
