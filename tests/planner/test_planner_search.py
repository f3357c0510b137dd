"""Search moves keep partitions whole, incremental costs are full costs, and equal limits give equal plans."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import C_DP, C_PP, brute_optimum, case, small

from planner.cost.communication import partition_s
from planner.cost.compiled import generator
from planner.model.problem import placement_s, problem_of
from planner.search.anneal import anneal
from planner.search.cluster import interchangeable, near_equal, types_of
from planner.search.crossover import cross, groups_of, repair
from planner.search.evolve import renamed
from planner.search.gain import DTFM, KERNIGHAN_LIN, improve_pass
from planner.search.incumbent import Board, Limits
from planner.search.portfolio import solve
from planner.search.smooth import smooth

SEEDS = st.integers(0, 10_000)
SHAPES = st.sampled_from([(2, 4), (4, 3), (6, 2), (3, 8), (1, 5), (5, 1)])
quick = settings(max_examples=25, deadline=None, derandomize=True)


def labels(shape, seed):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(shape[0]), shape[1]))


def balanced(label, shape):
    return (np.bincount(label, minlength=shape[0]) == shape[1]).all()


@quick
@given(SHAPES, SEEDS)
def test_offspring_are_balanced_partitions(shape, seed):
    one, two = labels(shape, seed), labels(shape, seed + 1)
    child = cross(one, renamed(one, two, shape[0]), generator(seed))
    repair(child, shape[0], generator(seed))
    assert balanced(child, shape)
    assert sorted(groups_of(child, shape[0]).ravel()) == list(range(shape[0] * shape[1]))


@quick
@given(SHAPES, SEEDS)
def test_renaming_changes_names_only_and_finds_equal_partitions(shape, seed):
    one = labels(shape, seed)
    two = np.random.default_rng(seed).permutation(shape[0])[one]
    assert (renamed(one, two, shape[0]) == one).all()


@quick
@given(SHAPES, SEEDS, st.sampled_from([DTFM, KERNIGHAN_LIN]))
def test_a_pass_keeps_balance_and_undoes_what_does_not_pay(shape, seed, rule):
    problem = small(*shape, seed)
    label = labels(shape, seed)
    before = label.copy()
    gain = improve_pass(problem.pp_s, label, shape[0], rule)
    assert balanced(label, shape)
    assert gain >= 0
    if gain == 0:
        assert (label == before).all()


def test_a_pass_finds_the_paper_move():
    """Two fast pairs that sit inside groups must be split over them, so that the hop between becomes fast."""
    pp_s = np.full((4, 4), 10.0)
    pp_s[0, 1] = pp_s[1, 0] = pp_s[2, 3] = pp_s[3, 2] = 1.0
    np.fill_diagonal(pp_s, 0.0)
    label = np.array([0, 0, 1, 1])
    assert improve_pass(pp_s, label, 2, DTFM) > 0
    assert label[0] != label[1]
    assert label[2] != label[3]


@quick
@given(SHAPES, SEEDS, st.sampled_from(["jitter", "random", "gaming"]))
def test_annealing_keeps_exact_costs(shape, seed, kind):
    problem = small(*shape, seed, kind)
    place = labels((problem.n_devices, 1), seed).reshape(shape)
    best = place.copy()
    kind_of = interchangeable(problem)
    costs = anneal(problem.dp_s, problem.pp_s, place, best, kind_of, generator(seed), 5.0, 0.5, 3000, 0.1, 0.3)
    for cost, groups in zip(costs, (best, place), strict=True):
        assert sorted(groups.ravel()) == list(range(problem.n_devices))
        in_this_order = sum_of_order(problem, groups)
        assert cost == pytest.approx(in_this_order, abs=1e-9)
        assert cost >= partition_s(problem.dp_s, problem.pp_s, groups) - 1e-9


def sum_of_order(problem, groups):
    from planner.cost.ortools import chain

    return placement_s(problem, chain(problem, groups))


@quick
@given(SHAPES, SEEDS)
def test_smooth_annealing_ends_in_the_true_cost(shape, seed):
    problem = small(*shape, seed)
    place = labels((problem.n_devices, 1), seed).reshape(shape)
    args = problem.dp_s, problem.pp_s, place, interchangeable(problem), generator(seed)
    smooth(*args, 3.0, 0.3, 1.0, 0.0, 2000, 0.3)
    assert sorted(place.ravel()) == list(range(problem.n_devices))
    last = smooth(*args, 0.3, 0.2, 0.0, 0.0, 500, 0.3)
    assert last == pytest.approx(placement_s(problem, place))


@quick
@given(SEEDS)
def test_devices_of_one_type_are_interchangeable(seed):
    problem = small(3, 4, seed, "random")
    label = interchangeable(problem)
    placement = labels((12, 1), seed).reshape(3, 4)
    cost = placement_s(problem, placement)
    for a in range(12):
        for b in range(a):
            swapped = np.where(placement == a, b, np.where(placement == b, a, placement))
            if label[a] == label[b]:
                assert placement_s(problem, swapped) == pytest.approx(cost)


def test_case_5_has_its_eight_cities_as_types_and_clusters():
    problem = problem_of(case("dtfm_case5_worldwide"), 8, 8, C_DP, C_PP)
    types = types_of(problem, interchangeable(problem))
    assert types.exact
    assert types.sizes == [8] * 8
    jittered = problem_of(case("derived_case5_jitter_seed2022"), 8, 8, C_DP, C_PP)
    assert len(set(interchangeable(jittered))) == 64
    clusters = types_of(jittered, near_equal(jittered, 8)[-1])
    assert not clusters.exact
    assert sorted(clusters.members) == sorted(types.members)


@pytest.mark.parametrize("solver", ["auto", "evolve", "kl", "random", "types"])
def test_equal_seed_and_evaluations_give_equal_plans(solver):
    problem = small(4, 6, 2, "jitter")
    runs = [
        solve(problem, Board(Limits(None, 12_000 if solver in ("auto", "types") else 200)), solver, 3) for _ in range(2)
    ]
    assert (runs[0].placement == runs[1].placement).all()
    assert runs[0].evaluations == runs[1].evaluations
    assert runs[0].bound_s == pytest.approx(runs[1].bound_s)


@functools.cache
def optimum_of(shape):
    return brute_optimum(small(*shape, 7))


@pytest.mark.parametrize("solver", ["auto", "exact", "types", "evolve", "kl", "random"])
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (1, 6), (6, 1), (1, 1)])
def test_small_instances(solver, shape):
    problem = small(*shape, 7)
    found = solve(problem, Board(Limits(None, 200 if solver in ("kl", "random") else 2000)), solver, 0)
    cost, optimum = placement_s(problem, found.placement), optimum_of(shape)
    assert sorted(found.placement.ravel()) == list(range(problem.n_devices))
    assert cost >= optimum - 1e-9
    assert found.bound_s <= optimum + 1e-9
    if solver in ("auto", "exact"):
        assert found.proved
    if found.proved:
        assert cost == pytest.approx(optimum, abs=1e-3)


def test_the_spot_optimum_needs_the_softened_cost():
    problem = problem_of(case("dtfm_case2_spot"), 8, 8, C_DP, C_PP)
    place = np.random.default_rng(0).permutation(64).reshape(8, 8)
    kind_of = interchangeable(problem)
    cost = smooth(problem.dp_s, problem.pp_s, place, kind_of, generator(0), 0.25, 0.02, 1.0, 0.0, 1_000_000, 0.2)
    assert cost == pytest.approx(31.6342, abs=1e-3)


def test_stopping_returns_the_best_so_far():
    problem = small(4, 6, 2)
    board = Board(Limits(3600.0))
    board.stop()
    found = solve(problem, board, "auto", 0)
    assert sorted(found.placement.ravel()) == list(range(24))
