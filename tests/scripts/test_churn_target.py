"""The simulated study of machines that come and go: the rule of Algorithm 2's listing, who is spared, what is said."""

import pytest
from churn_comparison import results
from experiments.reproduce import churn
from experiments.reproduce.literal_rule import LiteralRule

from jaxdt.membership.rebalance_api import Move
from jaxdt.protocol.events import Load
from jaxdt.runtime.reporting.interval import SEEDS, sentence
from jaxdt.sim.faults import CRASH, Fault

STAGES = ({0, 1}, {2, 3}, {4, 5})


def rule(queues, period_s=5.0):
    """A rule that has seen its first period begin at 0 s, and a report of each peer."""
    found = LiteralRule(period_s)
    assert found.moves(0.0, STAGES, set()) == []
    for peer, queue in enumerate(queues):
        found.report(1.0, peer, Load(queue, 0.5))
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
    assert LiteralRule(5.0).stage_for(({0, 1}, {2})) == 1


def test_who_is_alone_at_its_stage_is_spared():
    """Seven leave within three seconds; one of each stage has to stay."""
    crashes = [Fault(12.0 + 0.5 * peer, CRASH, peer) for peer in (1, 3, 5, 7, 0, 2, 4)]
    outcome = churn.simulated(churn.Case(churn.SWARM, 320.0, 0), crashes)
    assert churn.first_alone(outcome, crashes) == crashes[3]
    left = [crash for crash in crashes if crash != crashes[3]]
    assert churn.first_alone(churn.simulated(churn.Case(churn.SWARM, 320.0, 0), left), left) is None


def test_all_arms_of_a_seed_have_the_same_events_and_other_seeds_others():
    assert len({tuple(churn.schedule(churn.Case(arm, 14.0, 3))) for arm in churn.ARMS}) == 1
    assert len({tuple(churn.schedule(churn.Case(churn.SWARM, 14.0, seed))) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize(("factor", "verdict"), [(1.2, "more; ahead with 10"), (0.8, "less; ahead with 0")])
def test_a_sentence_follows_from_the_rates(factor, verdict):
    rates = {
        "a": [factor * (3.0 + seed % 2 / 10 + seed / 100) for seed in SEEDS],
        "b": [3.0 + seed % 2 / 10 for seed in SEEDS],
    }
    assert verdict in sentence("a", "b", rates)
    assert "no difference is shown; ahead with 0" in sentence("b", "b", rates)


def test_ten_real_seeds_take_turns_and_are_paired():
    names = ["fixed", "swarm", "swarm + rebalancing"]
    firsts = [results.rotated(names, seed)[0] for seed in SEEDS]
    assert [firsts.count(name) for name in names] == [4, 3, 3]
    by_seed = [{name: {"samples_per_s": 2.0 + seed / 10 + names.index(name)} for name in names} for seed in SEEDS]
    text = results.seeds_table(by_seed)
    assert "| fixed | 2.45 +- 0.22 | 2.00 | 2.10 |" in text
