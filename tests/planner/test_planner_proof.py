"""Proofs and bounds hold: against enumeration, against each other, and for the paper's cases."""

import numpy as np
import pytest
from planner_cases import C_DP, C_PP, brute_optimum, case, small

from jaxdt.run.network import Device, Network
from planner.cost.bounds import floor_s
from planner.model.problem import placement_s, problem_of
from planner.search.compositions import prove_by_compositions
from planner.search.device_types import near_equal, types_of
from planner.search.exact import prove
from planner.search.incumbent import Budget, Incumbent
from planner.search.layouts import block, rows
from planner.search.solve import solve
from planner.search.types_sat import Effort, TypesModel, bound_by_clusters, cp_sat, exact_types, prove_types

SMALL = [((2, 4), 0), ((4, 2), 1), ((3, 2), 2), ((2, 3), 3), ((8, 1), 4), ((1, 8), 5), ((7, 1), 6)]


def cp_sat_optimum(problem, pool=np.min, n_types=None):
    label = np.arange(problem.n_devices) if n_types is None else near_equal(problem, n_types)[-1]
    model = TypesModel(types_of(problem, label, pool), problem.n_stages, problem.n_pipelines, problem.dearest_s)
    result = model.solve(cp_sat(np.inf, Effort(True, 30.0), 0))
    assert result.proved
    return result.bound_s


@pytest.mark.parametrize("kind", ["jitter", "gaming", "random"])
@pytest.mark.parametrize(("shape", "seed"), SMALL)
def test_enumeration_and_device_level_cp_sat_find_the_optimum(shape, seed, kind):
    problem = small(*shape, seed, kind)
    optimum = brute_optimum(problem) if shape[0] < 7 else None
    groups, cost_s = prove(problem, rows(problem), placement_s(problem, rows(problem)))
    if optimum is not None:
        assert cost_s == pytest.approx(optimum)
    assert cp_sat_optimum(problem) == pytest.approx(cost_s, rel=1e-5)
    assert sorted(groups.ravel()) == list(range(problem.n_devices))


@pytest.mark.parametrize("shape", [(3, 4), (4, 3)])
def test_enumeration_and_cp_sat_agree_on_12_devices(shape):
    problem = small(*shape, 3, "gaming")
    _, cost_s = prove(problem, rows(problem), placement_s(problem, rows(problem)))
    assert cp_sat_optimum(problem) == pytest.approx(cost_s, rel=1e-5)


@pytest.mark.parametrize("kind", ["gaming", "spot"])
def test_bounds_stay_below_the_optimum_of_16_devices(kind):
    problem = small(4, 4, 1, kind)
    solution = solve(problem, Incumbent(Budget(None, 5_000)), "auto", 0)
    assert solution.proved
    optimum = placement_s(problem, solution.placement)
    assert 0 < floor_s(problem) <= optimum + 1e-9
    assert cp_sat_optimum(problem, np.min, 3) <= optimum + 1e-9
    incumbent = Incumbent(Budget(None, 1000), problem.missing_s)
    incumbent.offer(rows(problem), placement_s(problem, rows(problem)))
    bound_by_clusters(problem, incumbent, lambda: np.inf, 0.3, 0)
    assert floor_s(problem) - 1e-9 <= max(incumbent.bound_s, floor_s(problem)) <= optimum + 1e-9


CASES = {
    "dtfm_case1_datacenter": 3.4398,
    "dtfm_case2_spot": 31.6342,
    "dtfm_case3_multi_dc": 16.0868,
    "dtfm_case4_regional": 34.8020,
}


@pytest.mark.parametrize("name", CASES)
def test_paper_cases_are_proved(name):
    problem = problem_of(case(name), 8, 8, 650_000_000, 471_249_220)
    incumbent = Incumbent(Budget(60.0), problem.missing_s)
    incumbent.offer(rows(problem), placement_s(problem, rows(problem)))
    assert prove_types(problem, exact_types(problem), incumbent, cp_sat(60.0, Effort(True, 60.0), 0))
    assert incumbent.proved
    assert incumbent.best_s == pytest.approx(CASES[name], abs=1e-3)


def test_equal_links_are_proved_by_the_floors_alone():
    problem = problem_of(case("dtfm_homogeneous_50ms_1gbps"), 8, 8, C_DP, C_PP)
    assert floor_s(problem) == pytest.approx(placement_s(problem, rows(problem)))


# ------------------------------------------------------------------------------------------------------- compositions


def network_of_kinds(n_devices, n_kinds, seed, decades):
    """A network whose links depend on the kinds of its devices alone."""
    rng = np.random.default_rng(seed)
    kind = np.sort(rng.integers(n_kinds, size=n_devices))
    a, b = np.meshgrid(kind, kind, indexing="ij")

    def symmetric(low, high):
        values = np.triu(10 ** rng.uniform(low, high, (n_kinds, n_kinds)))
        values = values + np.triu(values, 1).T
        links = values[a, b]
        np.fill_diagonal(links, 0.0)
        return tuple(map(tuple, links.tolist()))

    devices = tuple(Device(f"d{d}", f"r{kind[d]}") for d in range(n_devices))
    return Network(devices, symmetric(-3, -1), symmetric(-1, -1 + decades), "kinds")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (3, 2), (8, 1), (1, 6)])
def test_compositions_prove_the_optimum_of_brute_force(shape, seed):
    n_devices = shape[0] * shape[1]
    network = network_of_kinds(n_devices, 2 + seed % 4, seed, decades=(0.3, 1.0, 3.0)[seed % 3])
    problem = problem_of(network, *shape, 1e8, 10 ** np.random.default_rng(seed).uniform(7, 9))
    incumbent = Incumbent(Budget(60.0), problem.missing_s)
    prove_by_compositions(problem, exact_types(problem), incumbent, lambda: np.inf)
    assert incumbent.proved
    enumerated_s = prove(problem, rows(problem), placement_s(problem, rows(problem)))[1]
    optimum = brute_optimum(problem) if shape[0] < 7 else enumerated_s
    assert incumbent.best_s == pytest.approx(optimum, rel=1e-6)
    proved_s = incumbent.bound_s
    known = Incumbent(Budget(60.0), problem.missing_s)
    known.offer(incumbent.best, incumbent.best_s)
    prove_by_compositions(problem, exact_types(problem), known, lambda: np.inf)
    assert known.proved and known.bound_s <= optimum * (1 + 1e-9)
    assert proved_s <= optimum * (1 + 1e-9)


def test_compositions_prove_case_5_from_the_block_layout():
    problem = problem_of(case("dtfm_case5_worldwide"), 8, 8, 650_000_000, 471_249_220)
    incumbent = Incumbent(Budget(60.0), problem.missing_s)
    incumbent.offer(block(problem), placement_s(problem, block(problem)))
    prove_by_compositions(problem, exact_types(problem), incumbent, lambda: np.inf)
    assert incumbent.proved
    assert incumbent.best_s == pytest.approx(49.2184, abs=1e-3)


def test_compositions_of_many_equal_types_are_given_up_without_a_bound():
    problem = problem_of(case("dtfm_case2_spot"), 8, 8, 650_000_000, 471_249_220)
    incumbent = Incumbent(Budget(None, 2000), problem.missing_s)
    prove_by_compositions(problem, exact_types(problem), incumbent, lambda: np.inf)
    assert not incumbent.proved and incumbent.bound_s == 0.0
