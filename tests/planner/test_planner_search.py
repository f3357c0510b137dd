"""Search moves keep partitions whole, incremental costs are full costs, and equal limits give equal plans."""

import functools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import C_DP, C_PP, NETWORKS, brute_optimum, case, small

from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput
from planner.__main__ import main
from planner.cost.communication import partition_s
from planner.cost.compiled import generator
from planner.cost.placement import match_pipelines
from planner.model.problem import placement_s, problem_of
from planner.search import annealing_chains, portfolio
from planner.search.anneal import (
    Cooling,
    MoveShares,
    Softness,
    anneal,
    anneal_softened,
    devices_of,
    soft_walk_from,
    walk_from,
)
from planner.search.base import SOLVERS, SolverEntry, solver_entry
from planner.search.charges import NOTHING
from planner.search.crossover import DTFM_GAIN, KERNIGHAN_LIN_GAIN, cross, groups_of, improve_pass, repair
from planner.search.device_types import interchangeable, near_equal, types_of
from planner.search.evolve import relabelled
from planner.search.incumbent import N_LOCAL_OPTIMA, Budget, Incumbent
from planner.search.solve import solve

SEEDS = st.integers(0, 10_000)
SHAPES = st.sampled_from([(2, 4), (4, 3), (6, 2), (3, 8), (1, 5), (5, 1)])
quick = settings(max_examples=25)


def labels(shape, seed):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(shape[0]), shape[1]))


def balanced(label, shape):
    return (np.bincount(label, minlength=shape[0]) == shape[1]).all()


@quick
@given(SHAPES, SEEDS)
def test_offspring_are_balanced_partitions(shape, seed):
    one, two = labels(shape, seed), labels(shape, seed + 1)
    child = cross(one, relabelled(one, two, shape[0]), generator(seed))
    repair(child, shape[0], generator(seed))
    assert balanced(child, shape)
    assert sorted(groups_of(child, shape[0]).ravel()) == list(range(shape[0] * shape[1]))


@quick
@given(SHAPES, SEEDS)
def test_renaming_changes_names_only_and_finds_equal_partitions(shape, seed):
    one = labels(shape, seed)
    two = np.random.default_rng(seed).permutation(shape[0])[one]
    assert (relabelled(one, two, shape[0]) == one).all()


@quick
@given(SHAPES, SEEDS, st.sampled_from([DTFM_GAIN, KERNIGHAN_LIN_GAIN]))
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
    assert improve_pass(pp_s, label, 2, DTFM_GAIN) > 0
    assert label[0] != label[1]
    assert label[2] != label[3]


@quick
@given(SHAPES, SEEDS, st.sampled_from(["jitter", "random", "gaming"]))
def test_annealing_keeps_exact_costs(shape, seed, kind):
    problem = small(*shape, seed, kind)
    place = labels((problem.n_devices, 1), seed).reshape(shape)
    walk = walk_from(place, problem.n_devices)
    costs = anneal(
        devices_of(problem),
        walk,
        NOTHING,
        generator(seed),
        Cooling(5.0, 0.5, 3000),
        MoveShares(reorder=0.1, runs=0.3),
    )
    for cost, groups in zip(costs, (walk.best, place), strict=True):
        assert sorted(groups.ravel()) == list(range(problem.n_devices))
        in_this_order = sum_of_order(problem, groups)
        assert cost == pytest.approx(in_this_order, abs=1e-9)
        assert cost >= partition_s(problem.dp_s, problem.pp_s, groups) - 1e-9


def sum_of_order(problem, groups):
    return placement_s(problem, match_pipelines(problem, groups))


@quick
@given(SHAPES, SEEDS)
def test_softened_annealing_ends_in_the_true_cost(shape, seed):
    problem = small(*shape, seed)
    place = labels((problem.n_devices, 1), seed).reshape(shape)
    devices = devices_of(problem)
    bits = generator(seed)
    walk = soft_walk_from(place)
    anneal_softened(devices, walk, bits, Cooling(3.0, 0.3, 2000), Softness(1.0, 0.0), 0.3)
    assert sorted(place.ravel()) == list(range(problem.n_devices))
    last = anneal_softened(devices, walk, bits, Cooling(0.3, 0.2, 500), Softness(0.0, 0.0), 0.3)
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
    jittered = problem_of(case("derived/derived_case5_jitter_seed2022"), 8, 8, C_DP, C_PP)
    assert len(set(interchangeable(jittered))) == 64
    clusters = types_of(jittered, near_equal(jittered, 8)[-1])
    assert not clusters.exact
    assert sorted(clusters.members) == sorted(types.members)


BASELINES = ["dtfm", "dtfm_kl", "metis_like", "amp_like", "random", "block"]


@pytest.mark.parametrize("solver", ["auto", "evolve", "kl", "types", *BASELINES])
def test_equal_seed_and_evaluations_give_equal_plans(solver):
    problem = small(4, 6, 2, "jitter")
    budget = Budget(None, 12_000 if solver in ("auto", "types") else 200)
    runs = [solve(problem, Incumbent(budget), solver, 3) for _ in range(2)]
    assert (runs[0].placement == runs[1].placement).all()
    assert runs[0].evaluations == runs[1].evaluations
    assert runs[0].bound_s == pytest.approx(runs[1].bound_s)


@functools.cache
def optimum_of(shape):
    return brute_optimum(small(*shape, 7))


@pytest.mark.parametrize("solver", ["auto", "exact", "types", "evolve", "kl", *BASELINES])
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (1, 6), (6, 1), (1, 1)])
def test_small_instances(solver, shape):
    problem = small(*shape, 7)
    solution = solve(problem, Incumbent(Budget(None, 200 if solver in ("kl", *BASELINES) else 2000)), solver, 0)
    cost, optimum = placement_s(problem, solution.placement), optimum_of(shape)
    assert sorted(solution.placement.ravel()) == list(range(problem.n_devices))
    assert cost >= optimum - 1e-9
    assert solution.bound_s <= optimum + 1e-9
    if solver in ("auto", "exact"):
        assert solution.proved
    if solution.proved:
        assert cost == pytest.approx(optimum, rel=1e-6)


def test_the_spot_optimum_needs_the_softened_cost():
    problem = problem_of(case("dtfm_case2_spot"), 8, 8, C_DP, C_PP)
    place = np.random.default_rng(0).permutation(64).reshape(8, 8)
    cooling = Cooling(0.25, 0.02, 1_000_000)
    walk = soft_walk_from(place)
    cost = anneal_softened(devices_of(problem), walk, generator(0), cooling, Softness(1.0, 0.0), 0.2)
    assert cost == pytest.approx(31.6342, abs=1e-3)


def test_stopping_returns_the_best_so_far():
    problem = small(4, 6, 2)
    incumbent = Incumbent(Budget(3600.0))
    incumbent.stop()
    solution = solve(problem, incumbent, "auto", 0)
    assert sorted(solution.placement.ravel()) == list(range(24))


def test_plans_come_while_the_kernel_of_the_true_cost_is_compiled(monkeypatch):
    problem = small(4, 6, 2, "jitter")
    incumbent = Incumbent(Budget(5.0))
    offered = threading.Event()
    offer = incumbent.offer
    monkeypatch.setattr(incumbent, "offer", lambda *plan: (offer(*plan), offered.set()))
    monkeypatch.setattr(annealing_chains, "compile_anneal", offered.wait)
    annealing_chains.anneal_while_compiling(annealing_chains.chain_sequences(problem, incumbent, 0)[0])
    assert incumbent.best is not None
    assert sorted(incumbent.best.ravel()) == list(range(24))
    assert incumbent.best_s == placement_s(problem, incumbent.best)
    assert not incumbent.interrupted  # it came back when the kernel was there, not when the time was up


def test_a_compilation_that_takes_longer_than_the_time_limit_is_not_waited_for(monkeypatch):
    problem = small(4, 6, 2, "jitter")
    compiled = threading.Event()
    monkeypatch.setattr(portfolio, "compile_anneal_softened", compiled.wait)
    solution = solve(problem, Incumbent(Budget(0.2)), "auto", 0)
    compiled.set()
    assert sorted(solution.placement.ravel()) == list(range(24))


def test_local_optima_do_not_depend_on_which_thread_came_first():
    ends = [(10.0 + 0.0004 * k, k % 3, np.array([[k]])) for k in range(40)]
    incumbents = [Incumbent(Budget(None, 1)) for _ in range(2)]
    for incumbent, order in zip(incumbents, (ends, ends[::-1]), strict=True):
        for cost_s, source, groups in order:
            incumbent.add_local_optimum(groups, cost_s, source)
    one, two = (incumbent.local_optima() for incumbent in incumbents)
    assert one == two
    assert [cost_s for cost_s, _ in one] == sorted(cost_s for cost_s, _ in one)
    assert len(one) == N_LOCAL_OPTIMA


# ----------------------------------------------------------------------------------------------------- table of solvers


@pytest.mark.parametrize("name", SOLVERS)
def test_every_entry_of_the_table_is_a_solver(name):
    assert isinstance(solver_entry(name), SolverEntry)


def test_a_solver_refuses_more_devices_than_it_is_for():
    problem = small(3, 6, 0)
    with pytest.raises(BadInput, match="exact is for at most 16 devices, got 18"):
        solve(problem, Incumbent(Budget(None, 10)), "exact", 0)


def offer_in_order(problem, incumbent, seed):
    groups = np.arange(problem.n_devices).reshape(problem.n_stages, problem.n_pipelines)
    incumbent.offer(groups, placement_s(problem, groups))


ENTRY = SolverEntry(offer_in_order)


def test_a_new_solver_is_one_entry_of_the_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SOLVERS, "toy", __name__)
    sizes = ["--stages", "2", "--pipelines", "2", "--c_dp_bytes", "1e6", "--c_pp_bytes", "1e6"]
    out = tmp_path / "plan.json"
    network = str(NETWORKS / "four_cities.json")
    assert main(["solve", "--network", network, *sizes, "--solver", "toy", "--out", str(out)]) == 0
    assert plans.load(out).found["solver"] == "toy"
