"""The evaluators of Eq. 1-4: against brute force, against each other, and against printed costs."""

import ast
import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import (
    C_DP,
    C_PP,
    brute_matching,
    brute_optimum,
    brute_partition,
    brute_path,
    case,
    partitions,
    small,
)

from jaxdt.run.network import Device, Network, uniform
from planner.cost.communication import (
    held_karp,
    hop_matrix,
    improve_matching,
    matching_floor,
    matching_scratch,
    partition_s,
    short_path,
)
from planner.cost.placement import bottleneck_matching, match_pipelines, open_path, placement_of
from planner.cost.reference import cost_of
from planner.model.generate import generate
from planner.model.problem import placement_s, placement_terms, problem_of
from planner.search import layouts

ROOT = Path(__file__).resolve().parents[2]
BLOCK = {
    "dtfm_case1_datacenter": (2.9120, 0.5278),
    "dtfm_case2_spot": (7.2800, 42.2239),
    "dtfm_case3_multi_dc": (5.5169, 10.5700),
    "dtfm_case4_regional": (8.3420, 26.4600),
    "dtfm_case5_worldwide": (22.7584, 26.4600),
}
PLACEMENT_MEANS = {"dtfm_case1_datacenter": 19.80, "dtfm_case3_multi_dc": 54.7, "dtfm_case5_worldwide": 173.0}
SEEDS = st.integers(0, 10_000)
SHAPES = st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 4), (5, 1), (8, 1)])
quick = settings(max_examples=25)


def shuffled(problem, seed):
    shape = problem.n_stages, problem.n_pipelines
    return np.random.default_rng(seed).permutation(problem.n_devices).reshape(shape)


@pytest.mark.parametrize("name", BLOCK)
def test_block_layout_costs_what_the_paper_cases_say(name):
    problem = problem_of(case(name), 8, 8, C_DP, C_PP)
    assert placement_terms(problem, layouts.block(problem)) == pytest.approx(BLOCK[name], abs=1e-4)


@pytest.mark.parametrize("name", PLACEMENT_MEANS)
def test_random_placements_cost_what_the_paper_cases_say(name):
    problem = problem_of(case(name), 8, 8, C_DP, C_PP)
    assert layouts.mean_random(problem, 0)[0] == pytest.approx(PLACEMENT_MEANS[name], rel=0.02)


@pytest.mark.parametrize(("shape", "optimum"), [((4, 2), 5.571992538), ((2, 4), 3.075997513)])
def test_debug_8_by_enumeration(shape, optimum):
    assert brute_optimum(problem_of(case("dtfm_debug_8"), *shape, C_DP, C_PP)) == pytest.approx(optimum, abs=1e-9)


@quick
@given(SHAPES, SEEDS)
def test_partition_cost_is_brute_force_and_is_reached_by_the_emitted_placement(shape, seed):
    problem = small(*shape, seed)
    groups = shuffled(problem, seed)
    cost = partition_s(problem.dp_s, problem.pp_s, groups)
    assert cost == pytest.approx(brute_partition(problem, groups.tolist()), rel=1e-12)
    placement = placement_of(problem, groups)
    assert placement_s(problem, placement) == pytest.approx(cost, rel=1e-12)
    assert sorted(map(sorted, placement.tolist())) == sorted(map(sorted, groups.tolist()))


@quick
@given(SHAPES, SEEDS)
def test_no_placement_of_the_same_groups_is_cheaper(shape, seed):
    problem = small(*shape, seed)
    placement = shuffled(problem, seed)
    assert partition_s(problem.dp_s, problem.pp_s, placement) <= placement_s(problem, placement) + 1e-12
    assert placement_s(problem, match_pipelines(problem, placement)) <= placement_s(problem, placement) + 1e-12


@quick
@given(st.integers(1, 6), SEEDS, st.booleans())
def test_matchings_agree_with_brute_force(n, seed, ties):
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 6, (n, n)).astype(float) if ties else rng.uniform(0, 9, (n, n))
    value, match = bottleneck_matching(weights)
    assert value == brute_matching(weights) == max(weights[np.arange(n), match])
    assert sorted(match) == list(range(n))
    square = np.zeros((2 * n, 2 * n))
    square[:n, n:] = weights
    left, right, own = np.arange(n), np.arange(n, 2 * n), rng.permutation(n)
    square[n:, :n] = weights.T
    floor = matching_floor(square, left, right)
    assert improve_matching(square, left, right, own, floor, matching_scratch(n)) == value
    assert max(weights[np.arange(n), own]) == value
    assert floor <= value


def test_a_tie_goes_to_the_least_sum():
    value, match = bottleneck_matching(np.array([[5.0, 5.0, 1.0], [5.0, 1.0, 5.0], [5.0, 5.0, 5.0]]))
    assert value == 5.0
    assert match.tolist() == [2, 1, 0]


@quick
@given(st.integers(1, 7), SEEDS)
def test_paths_agree_with_brute_force(n, seed):
    edge = np.random.default_rng(seed).uniform(1, 9, (n, n))
    edge += edge.T
    best = brute_path(edge)
    order = np.empty(n, np.int64)
    assert held_karp(edge, order) == pytest.approx(best)
    assert sum(edge[a, b] for a, b in itertools.pairwise(order)) == pytest.approx(best)
    routed = open_path(edge)
    assert sorted(routed) == list(range(n))
    assert sum(edge[a, b] for a, b in itertools.pairwise(routed)) == pytest.approx(best, abs=1e-5 * n)
    assert short_path(edge, order) >= best - 1e-9
    assert sorted(order) == list(range(n))


def test_many_stages_are_routed_at_least_as_well_as_by_two_opt():
    problem = small(24, 2, 3)
    edge = hop_matrix(problem.pp_s, shuffled(problem, 0))
    order = np.empty(24, np.int64)
    start = short_path(edge, order)
    assert sum(edge[a, b] for a, b in itertools.pairwise(open_path(edge))) <= start + 1e-4


@quick
@given(SHAPES, SEEDS)
def test_costs_do_not_depend_on_names_direction_or_order(shape, seed):
    problem = small(*shape, seed, "gaming")
    placement = shuffled(problem, seed)
    cost = placement_s(problem, placement)
    assert placement_s(problem, placement[::-1]) == pytest.approx(cost)
    assert placement_s(problem, placement[:, ::-1]) == pytest.approx(cost)
    new = np.random.default_rng(seed + 1).permutation(problem.n_devices)
    renamed = replace(problem, dp_s=problem.dp_s[np.ix_(new, new)].T, pp_s=problem.pp_s[np.ix_(new, new)].T)
    assert placement_s(renamed, np.argsort(new)[placement]) == pytest.approx(cost)


@quick
@given(SHAPES, SEEDS, st.floats(0.01, 100))
def test_scaling_sizes_and_bandwidths_changes_nothing(shape, seed, factor):
    network = generate("jitter", shape[0] * shape[1], seed)
    wider = replace(network, bandwidth_gbps=tuple(tuple(b * factor for b in row) for row in network.bandwidth_gbps))
    placement = shuffled(small(*shape, seed), seed)
    before = placement_s(problem_of(network, *shape, C_DP, C_PP), placement)
    assert placement_s(problem_of(wider, *shape, C_DP * factor, C_PP * factor), placement) == pytest.approx(before)


@quick
@given(st.sampled_from([(2, 2), (3, 2), (2, 3)]), SEEDS)
def test_a_better_link_never_costs_more(shape, seed):
    problem = small(*shape, seed)
    a, b = np.random.default_rng(seed).choice(problem.n_devices, 2, replace=False)
    better = replace(problem, dp_s=problem.dp_s.copy(), pp_s=problem.pp_s.copy())
    for matrix in (better.dp_s, better.pp_s):
        matrix[a, b] = matrix[b, a] = matrix[a, b] / 3
    groups = shuffled(problem, seed)
    assert placement_terms(better, groups)[0] <= placement_terms(problem, groups)[0]
    assert (hop_matrix(better.pp_s, groups) <= hop_matrix(problem.pp_s, groups)).all()
    assert brute_optimum(better) <= brute_optimum(problem)


@pytest.mark.parametrize("kind", ["jitter", "gaming", "spot"])
def test_the_independent_evaluator_agrees(kind):
    network = generate(kind, 24, 5)
    problem = problem_of(network, 4, 6, C_DP, C_PP)
    placement = shuffled(problem, 1)
    cost = cost_of(network, placement.tolist(), C_DP, C_PP)
    assert (cost.datap_s, cost.pipelinep_s) == pytest.approx(placement_terms(problem, placement), rel=1e-12)
    assert cost.total_s == pytest.approx(sum(cost.hop_s) + cost.datap_s)


def test_a_pair_costs_what_each_direction_takes():
    """Activations go forward and gradients back, shards out and sums back; the slow direction is not averaged away."""
    links = {"latency_s": ((0.0, 0.01), (0.03, 0.0)), "bandwidth_gbps": ((0.0, 8.0), (0.08, 0.0))}
    network = Network((Device("fast"), Device("slow")), **links)
    boundary_s = 0.01 + 1e8 / 1e9 + 0.03 + 1e8 / 1e7
    for placement, c_dp_bytes, c_pp_bytes in (([[0], [1]], 0.0, 1e8), ([[0, 1]], 2e8, 0.0)):
        problem = problem_of(network, *np.shape(placement), c_dp_bytes, c_pp_bytes)
        for order in (placement, [row[::-1] for row in placement[::-1]]):
            assert cost_of(network, order, c_dp_bytes, c_pp_bytes).total_s == pytest.approx(boundary_s)
            assert placement_s(problem, np.array(order)) == pytest.approx(boundary_s)


def test_links_without_a_limit_cost_their_latency():
    network = uniform(4, latency_s=0.25)
    assert cost_of(network, [[0, 1], [2, 3]], C_DP, C_PP).total_s == pytest.approx(1.0)
    assert placement_s(problem_of(network, 2, 2, C_DP, C_PP), np.arange(4).reshape(2, 2)) == pytest.approx(1.0)


def test_one_stage_one_pipeline_and_equal_links():
    assert placement_terms(small(1, 6, 0), np.arange(6)[None])[1] == 0.0
    assert placement_terms(small(6, 1, 0), np.arange(6)[:, None])[0] == 0.0
    equal = small(3, 2, 0, "homogeneous")
    costs = [brute_partition(equal, groups) for groups in partitions(tuple(range(6)), 2)]
    assert max(costs) == pytest.approx(min(costs))


def test_a_missing_direction_is_no_link():
    network = case("four_cities")
    rows = [list(row) for row in network.bandwidth_gbps]
    rows[0][1] = 0.0
    network = replace(network, bandwidth_gbps=tuple(map(tuple, rows)))
    problem = problem_of(network, 2, 2, 1e6, 1e6)
    assert problem.pp_s[0, 1] == problem.pp_s[1, 0] == problem.dp_s[0, 1] == problem.missing_s
    assert placement_s(problem, np.array([[0, 2], [1, 3]])) >= problem.missing_s
    assert placement_s(problem, np.array([[0, 2], [3, 1]])) <= problem.dearest_s
    assert cost_of(network, [[0, 2], [1, 3]], 1e6, 1e6).total_s == math.inf
    assert cost_of(network, [[0, 1], [2, 3]], 1e6, 1e6).datap_s == math.inf
    assert cost_of(network, [[0, 2], [3, 1]], 1e6, 1e6).total_s < math.inf


KERNEL = """
from typing import NamedTuple
from planner.cost.compiled import compiled

class NAME(NamedTuple):
    value: float

@compiled
def double(argument):
    return 2 * argument.value

print(double(NAME(21.0)))
"""


def test_a_cache_from_before_a_type_was_renamed_is_dropped(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    for name in ("Before", "After"):
        (tmp_path / "kernel.py").write_text(KERNEL.replace("NAME", name))
        command = [sys.executable, "-c", "import kernel"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "42.0\n"
    assert list((tmp_path / "cache").rglob("*.nbi"))


def is_kernel(node):
    return isinstance(node, ast.FunctionDef) and any(ast.unparse(one) == "compiled" for one in node.decorator_list)


def called_by_python(tree):
    """The names that code outside of the kernels of a module reads."""
    for child in ast.iter_child_nodes(tree):
        if not is_kernel(child):
            if isinstance(child, ast.Name | ast.Attribute):
                yield child.id if isinstance(child, ast.Name) else child.attr
            yield from called_by_python(child)


def test_python_calls_no_kernel_that_has_no_entry_for_it():
    """Such a call would end the process, and only where the cache of kernels is new."""
    sources = [*ROOT.glob("planner/**/*.py"), *ROOT.glob("tests/planner/*.py"), *ROOT.glob("scripts/**/*.py")]
    trees = {path: ast.parse(path.read_text()) for path in sources}
    kernels = {path: {node.name for node in tree.body if is_kernel(node)} for path, tree in trees.items()}
    inner = {name for names in kernels.values() for name in names if name.startswith("_")}
    assert len(inner) > 30
    for path, tree in trees.items():
        own = {name for name in inner if name in kernels[path]}
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        modules = {ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {
            source.stem for source in sources
        }
        names = (
            own | inner & imported | {name for source in sources if source.stem in modules for name in kernels[source]}
        )
        assert not {name for name in called_by_python(tree) if name in names & inner}, path
