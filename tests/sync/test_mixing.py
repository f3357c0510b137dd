"""Who met whom in averaging groups, which replicas never do, and how fast a rule mixes."""

import itertools
import random
import sys
import types

import numpy as np
import pytest

from jaxdt.api.simulate import SimulateOptions, profile_of_flops, simulate
from jaxdt.run.config import parse
from jaxdt.sync.matching.base import MATCHERS, MatcherEntry
from jaxdt.sync.matching.mixing import mixing
from jaxdt.sync.matching.pairs import MatchPairs

PAIRS = list(itertools.combinations(range(4), 2))


@pytest.mark.parametrize(
    "groups, components, second",
    [
        ([(0, 1, 2, 3)], ((0, 1, 2, 3),), 0.0),
        (PAIRS, ((0, 1, 2, 3),), 1 / 3),
        ([(0, 1), (2, 3)], ((0, 1), (2, 3)), 1.0),
        ([(0, 1, 2)], ((0, 1, 2), (3,)), 1.0),
        ([(0,), (1,), (2,), (3,)], ((0,), (1,), (2,), (3,)), 1.0),
    ],
)
def test_components_and_rate_of_known_rules(groups, components, second):
    found = mixing(range(4), groups)
    assert found.components == components and found.mixes == (len(components) == 1)
    assert found.second_eigenvalue == pytest.approx(second, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_rate_is_the_second_eigenvalue_of_the_mean_exchange(seed):
    draw, n = random.Random(seed), 7
    groups = [tuple(draw.sample(range(n), draw.randint(1, 4))) for _ in range(40)]
    sums = np.zeros((n, n))
    for group in groups:
        sums[np.ix_(group, group)] += 1 / len(group)
    eigenvalues = np.sort(np.linalg.eigvals(sums / sums.sum(axis=1, keepdims=True)).real)
    assert mixing(range(n), groups).second_eigenvalue == pytest.approx(eigenvalues[-2], abs=1e-5)


def averaging(match, every_steps=1):
    fields = dict(
        model=dict(preset="debug", tied_head=False),
        plan=dict(stages=1, pipelines=4, microbatches=4),
        sync=dict(kind="groups", groups=dict(match=match, every_steps=every_steps)),
    )
    config = parse(fields)
    return simulate(config, profile_of_flops(config, 1e9), options=SimulateOptions(steps=1))


class RightNeighbour(MatchPairs):
    """In even steps pipelines 0 and 1 average, and 2 and 3; in odd ones 1 and 2, and 3 and 0. With an even number of
    local steps in between the two pairs never meet."""

    def _mate(self, peer: int, step: int) -> int | None:
        place = self._places.index(peer)
        return self._places[place ^ 1 if step % 2 == 0 else (place + (1 if place % 2 else -1)) % len(self._places)]


def test_a_simulation_warns_of_a_rule_that_does_not_mix(monkeypatch):
    module = types.ModuleType("right_neighbour")
    build = lambda settings, stage, replicas, token: RightNeighbour(replicas, settings.seed)  # noqa: E731
    module.ENTRY = MatcherEntry(build, lambda config, plan: "")
    monkeypatch.setitem(sys.modules, "right_neighbour", module)
    monkeypatch.setitem(MATCHERS, "right", "right_neighbour")
    mixed, islands = averaging("right"), averaging("right", every_steps=2)
    assert mixed.mixing[0].components == ((0, 1, 2, 3),) and "warning" not in str(mixed)
    assert islands.mixing[0].components == ((0, 1), (2, 3))
    [line] = [line for line in str(islands).splitlines() if line.startswith("warning")]
    assert line.startswith("warning: stage 0: replicas 0 1 | 2 3 never met in 32 groups: the rule does not mix")
    assert islands.to_json()["mixing"][0]["second_eigenvalue"] == pytest.approx(1.0)


def test_pairs_mix_and_equal_replicas_have_no_rule():
    found = averaging("pairs").mixing[0]
    assert found.mixes and 0.2 < found.second_eigenvalue < 0.8
    assert averaging("all").mixing[0].second_eigenvalue < 1e-9
    assert averaging("none").mixing == {}
