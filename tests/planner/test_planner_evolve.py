"""The genetic search: OR-Tools matches and routes every member, both decide its cost; `auto` contains the search."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from ortools.sat.python import cp_model
from planner_cases import brute_optimum, small

from planner.cost import placement
from planner.cost.communication import partition_s
from planner.search import annealing_chains, evolve, portfolio
from planner.search.evolve import EVOLVE, Population
from planner.search.incumbent import Budget, Incumbent, Share
from planner.search.solve import solve

SHAPE = 6, 4
FEW = replace(EVOLVE, population=6)  # so that children are bred soon


@functools.cache
def problem():
    return small(*SHAPE, 2)


def members_of_random_partitions():
    """The costs of six members that no annealing has touched."""
    population = Population(problem(), Share(Incumbent(Budget(None, 1))), EVOLVE)
    for seed in range(6):
        assert population.insert(np.random.default_rng(seed).permutation(24).reshape(SHAPE))
    return [cost_s for cost_s, _ in population.members]


def run_of_evolve():
    share = Share(Incumbent(Budget(None, None)), evaluations=500_000)
    return [cost_s for cost_s, _ in evolve.evolve(problem(), share, 0, FEW)]


def identity_matching(weights):
    return float(np.diag(weights).max()), np.arange(len(weights))


def order_as_it_comes(edge, start, start_s, work):
    return start


REPLACED = {"matching": ("bottleneck_matching", identity_matching), "route": ("_circuit", order_as_it_comes)}


@pytest.mark.parametrize("what", REPLACED)
def test_without_ortools_members_cost_more_and_the_search_ends_elsewhere(what, monkeypatch):
    costs_s, ends_s = members_of_random_partitions(), run_of_evolve()
    monkeypatch.setattr(placement, *REPLACED[what])
    worse_s = members_of_random_partitions()
    assert all(worse > cost for cost, worse in zip(costs_s, worse_s, strict=True))
    assert run_of_evolve() != ends_s


def test_each_member_is_routed_once_and_each_of_its_hops_matched_once(monkeypatch):
    """A child that compiled code finds no better than the worst member is not."""
    n_calls = dict.fromkeys(("matchings", "circuits", "members", "refused"), 0)
    matching, circuit, insert = placement.bottleneck_matching, cp_model.CpModel.add_circuit, Population.insert

    def counted(name, call):
        def wrapped(*arguments):
            n_calls[name] += 1
            return call(*arguments)

        return wrapped

    def inserted(population, groups):
        accepted = population.accepts(partition_s(problem().dp_s, problem().pp_s, groups))
        before = dict(n_calls)
        assert insert(population, groups) == accepted
        assert n_calls["circuits"] - before["circuits"] == accepted
        assert n_calls["matchings"] - before["matchings"] == (SHAPE[0] - 1) * accepted
        n_calls["members" if accepted else "refused"] += 1
        return accepted

    monkeypatch.setattr(placement, "bottleneck_matching", counted("matchings", matching))
    monkeypatch.setattr(cp_model.CpModel, "add_circuit", counted("circuits", circuit))
    monkeypatch.setattr(Population, "insert", inserted)
    run_of_evolve()
    assert n_calls["members"] >= FEW.population
    assert n_calls["refused"] > 0


@pytest.mark.parametrize(
    ("budget", "n_cores", "shape"),
    [
        (Budget(60.0), 1, (4, 6)),
        (Budget(60.0), 1, (14, 2)),
        (Budget(60.0), 2, (14, 2)),
        (Budget(None, 400_000), 1, (14, 2)),
    ],
)
def test_auto_contains_the_search_on_any_number_of_cores_and_stages(budget, n_cores, shape, monkeypatch):
    """A timed search ends with the third member: the layout that it began with, and two of its own."""
    monkeypatch.setattr(annealing_chains, "n_cores", lambda: n_cores)
    incumbent = Incumbent(budget)
    insert = Population.insert
    sizes = []

    def inserted(population, groups):
        accepted = insert(population, groups)
        sizes.append(len(population.members))
        if budget.time_s is not None and sizes[-1] == 3:
            incumbent.stop()
        return accepted

    monkeypatch.setattr(Population, "insert", inserted)
    monkeypatch.setattr(portfolio, "bound_by_clusters", lambda *_: None)
    solve(small(*shape, 3), incumbent, "auto", 0)
    assert max(sizes) >= 3
    assert "evolve" in incumbent.by_solver


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_eight_devices_are_searched_with_few_moves_a_child(shape):
    """So that a population is full, and starts again, within the evaluations of a second."""
    instance = small(*shape, 7)
    solution = solve(instance, Incumbent(Budget(None, 600_000)), "evolve", 0)
    assert solution.cost_s == pytest.approx(brute_optimum(instance), rel=1e-9)
    assert solution.evaluations < 700_000
