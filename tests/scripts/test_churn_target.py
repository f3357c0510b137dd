"""The simulated study of machines that come and go: who is spared, and what is said."""

import pytest
from experiments.reproduce import churn

from jaxdt.runtime.reporting.interval import SEEDS, sentence
from jaxdt.sim.faults import CRASH, Fault


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
