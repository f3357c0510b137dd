"""The planners to compare with: the rules of their papers, and the table of `bench`."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import C_DP, C_PP, NETWORKS, case, small

from planner.__main__ import main
from planner.cost.communication import partition_s
from planner.cost.compiled import generator
from planner.model.problem import placement_s, problem_of
from planner.report.bench_page import BenchRun, against_first, cell
from planner.search import crossover, layouts
from planner.search.baselines.amp_like import tiled
from planner.search.baselines.dtfm import improve_as_published, offspring, weights_of
from planner.search.baselines.partitions import nodes_of, stages_in_turn
from planner.search.crossover import DTFM_GAIN, KERNIGHAN_LIN_GAIN, Pass
from planner.search.evolve import EVOLVE, KERNIGHAN_LIN
from planner.search.incumbent import Budget, Incumbent
from planner.search.solve import solve

SEEDS = st.integers(0, 10_000)
SHAPES = st.sampled_from([(2, 4), (4, 3), (6, 2), (3, 8), (1, 5), (5, 1)])
quick = settings(max_examples=20)


def labels(shape, seed):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(shape[0]), shape[1]))


def end_s(problem, solver, evaluations, seed=0):
    return solve(problem, Incumbent(Budget(None, evaluations)), solver, seed).cost_s


# -------------------------------------------------------------------------------------------------------------- DT-FM


@pytest.mark.parametrize(("solver", "published_s"), [("dtfm", 49.2184), ("dtfm_kl", 59.437)])
def test_the_published_search_ends_where_its_code_does(solver, published_s):
    """After the 5,000 candidates at which the published code stops: its medians on case 5."""
    problem = problem_of(case("dtfm_case5_worldwide"), 8, 8, C_DP, C_PP)
    assert end_s(problem, solver, 5000) == pytest.approx(published_s, abs=1e-3)


@quick
@given(SHAPES, SEEDS, st.sampled_from([DTFM_GAIN, KERNIGHAN_LIN_GAIN]))
def test_offspring_of_the_published_search_are_balanced(shape, seed, rule):
    problem = small(*shape, seed, "random")
    one, two = labels(shape, seed), labels(shape, seed + 1)
    child = offspring(weights_of(problem, rule), one, two, generator(seed), shape[0], rule)
    assert (np.bincount(child, minlength=shape[0]) == shape[1]).all()


def test_the_published_pass_never_keeps_its_last_cycle():
    """Two groups: the first cycle visits both and is the last. Two fast pairs stay inside, where ours takes them
    apart. With a third group the same cycle may be followed by another one, and stays."""
    weights = np.full((6, 6), 10.0)
    weights[0, 1] = weights[1, 0] = weights[2, 3] = weights[3, 2] = 1.0
    np.fill_diagonal(weights, 0.0)
    label = np.array([0, 0, 1, 1])
    improve_as_published(weights[:4, :4].copy(), label, 2, DTFM_GAIN)
    assert label.tolist() == [0, 0, 1, 1]
    label = np.array([0, 0, 1, 1, 2, 2])
    improve_as_published(weights, label, 3, DTFM_GAIN)
    assert label[0] != label[1]


# --------------------------------------------------------------------------------------------------- Metis and AMP like


def test_nodes_are_the_regions_of_the_network_file():
    network = case("dtfm_case4_regional")
    problem = problem_of(network, 8, 8, C_DP, C_PP)
    assert [node.tolist() for node in nodes_of(problem)] == [list(range(16 * k, 16 * k + 16)) for k in range(4)]
    nowhere = replace(network, devices=tuple(replace(device, region=None) for device in network.devices))
    assert len(nodes_of(problem_of(nowhere, 8, 8, C_DP, C_PP))) == 64


def test_metis_like_tries_every_order_of_the_nodes():
    problem = replace(small(4, 4, 3), region=np.repeat(np.arange(5), [4, 3, 5, 2, 2]))
    nodes = nodes_of(problem)
    orders = itertools.permutations(nodes)
    costs = [partition_s(problem.dp_s, problem.pp_s, stages_in_turn(np.concatenate(o), problem)) for o in orders]
    incumbent = Incumbent(Budget(None, 10_000))
    assert solve(problem, incumbent, "metis_like", 0).cost_s == pytest.approx(min(costs))
    assert incumbent.evaluations == len(costs)


def test_amp_like_stages_are_rectangles_of_nodes_and_devices():
    nodes = [np.arange(4), np.arange(4, 8), np.arange(8, 10)]
    assert tiled(nodes, np.array([0, 1, 2]), 4).tolist() == list(range(10))
    assert tiled(nodes, np.array([1, 0, 2]), 2).tolist() == [4, 5, 0, 1, 8, 9, 6, 7, 2, 3]
    assert tiled(nodes, np.array([0, 1, 2]), 1).tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 3, 7]


def test_amp_like_knows_the_block_layout():
    """In case 5 the layout is optimal, and a rectangle of one device in each city."""
    problem = problem_of(case("dtfm_case5_worldwide"), 8, 8, C_DP, C_PP)
    assert end_s(problem, "amp_like", 500) == pytest.approx(placement_s(problem, layouts.block(problem)))


# ------------------------------------------------------------------------------------------------------ layouts, gains


def test_block_is_emitted_as_it_is():
    problem = problem_of(case("derived/derived_random10_seed2022"), 8, 8, C_DP, C_PP)
    assert end_s(problem, "block", 1) == placement_s(problem, layouts.block(problem)) == pytest.approx(85.382, abs=1e-3)


def test_kl_differs_from_evolve_by_the_gain_alone():
    assert replace(EVOLVE, name="kl", gain_rule=KERNIGHAN_LIN_GAIN) == KERNIGHAN_LIN


@quick
@given(SHAPES, SEEDS, st.sampled_from([DTFM_GAIN, KERNIGHAN_LIN_GAIN]))
def test_gains_from_sums_are_those_of_the_formula(shape, seed, rule):
    pp_s, label = small(*shape, seed).pp_s, labels(shape, seed)
    S, n = shape[0], len(label)
    is_of = label[:, None] == np.arange(S)
    flags = np.zeros(n, bool), np.zeros(S, bool), np.zeros(n, np.int64)
    search = Pass(pp_s, label, np.bincount(label, minlength=S), pp_s @ is_of, *flags, rule)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        crossover.move_device(search, int(rng.integers(n)), int(rng.integers(S)))
    device = int(rng.integers(n))
    own = [x for x in range(n) if label[x] == label[device] and x != device]
    for target in set(range(S)) - {label[device]}:
        there = [x for x in range(n) if label[x] == target]
        if rule == KERNIGHAN_LIN_GAIN:
            expected = pp_s[device, there].sum() - pp_s[device, own].sum()
        elif not own or not there:
            expected = -np.inf
        else:
            expected = pp_s[device, there].mean() - pp_s[device, own].min()
        assert crossover.gain_of(search, device, target) == pytest.approx(expected)


# -------------------------------------------------------------------------------------------------------------- bench


def run_of(solver, seed, cost_s, proved=False, network="n"):
    return BenchRun(network, solver, seed, cost_s, 1.0, proved, 1, 1.0, ((0.5, cost_s),))


def test_a_cell_has_the_median_and_the_range_where_runs_differ():
    assert cell([run_of("a", 0, 2.0), run_of("a", 1, 2.001), run_of("a", 2, 2.001)]) == "2.001"
    assert cell([run_of("a", 0, 2.0), run_of("a", 1, 2.5), run_of("a", 2, 4.0)]) == "2.500 (2.000 to 4.000)"
    assert cell([run_of("a", 0, 2.0, proved=True)]) == "**2.000**"
    assert cell([run_of("a", 0, np.inf)]) == "-"


def test_solvers_are_compared_by_ratios_of_medians():
    runs = [
        run_of("a", 0, 2.0),
        run_of("b", 0, 4.0),
        run_of("a", 0, 9.0, network="m"),
        run_of("b", 0, 9.0, network="m"),
    ]
    assert against_first(runs)[2:] == [
        "| `a` | 2 of 2 | 1.000 | 1.000 | 1.000 |",
        "| `b` | 1 of 2 | 1.414 | 1.000 | 2.000 |",
    ]


def test_bench_writes_the_section_of_a_page(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench -->\nold\n<!-- end of bench -->\nafter\n")
    network = str(NETWORKS / "small_gaming16.json")
    flags = ["--stages", "4", "--pipelines", "4", "--solvers", "block,random", "--evaluations", "30", "--n_seeds", "3"]
    assert main(["bench", network, *flags, "--out", str(tmp_path / "b"), "--write", str(page)]) == 0
    table = (tmp_path / "b" / "bench.md").read_text()
    assert page.read_text() == f"before\n<!-- bench -->\n\n{table}\n<!-- end of bench -->\nafter\n"
    assert "30 plans scored" in table and "seeds 0 to 2" in table
    assert len(json.loads((tmp_path / "b" / "bench.json").read_text())) == 6
    page.write_text("no section")
    assert main(["bench", network, *flags, "--out", str(tmp_path / "b"), "--write", str(page)]) == 2
    assert "has no lines <!-- bench -->" in capsys.readouterr().err
