"""Plans with unequal numbers of replicas a stage: the cut of the layers, the search, the simulated step."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import planner
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.work import WorkKind
from jaxdt.wiring.swarm import load_of
from planner.__main__ import main
from planner.api.by_step import workload_of
from planner.cost.reference import cost_of
from planner.model.generate import generate
from planner.search.incumbent import Budget, Incumbent
from planner.step_time.unequal import (
    LayerTables,
    StageSets,
    _sets_of_sites,
    climb,
    estimate_s,
    plan_of_sets,
    search_sets,
    simulated_s,
)

FLOPS = {"A100": 312e12, "V100": 125e12, "T4": 65e12}


def workload(n_devices=6, memory_bytes=None, n_layers=5):
    network = generate("mixed", n_devices, 0)
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in network.devices)
    network = replace(network, devices=devices)
    model = GPTConfig.of("debug", n_layers=n_layers, d_model=256, d_ff=1024, max_len=128)
    run = planner.run_of_model(model, planner.StepOptions(global_batch=16))
    return workload_of(planner.Job(run, None, None, planner.profile_of_flops(run, network, FLOPS)), network)


def brute_cut(work, rows):
    """The least seconds of the slowest stage, over all cuts that fit."""
    best_s = np.inf
    for inner in itertools.combinations(work.cuts[1:-1], len(rows) - 1):
        ends = (work.cuts[0], *inner, work.cuts[-1])
        stages_s = []
        for row, (lo, hi) in zip(rows, itertools.pairwise(ends), strict=True):
            load = load_of(work.run, sum(map(len, rows)), len(row), work.n_microbatches)
            fits = all(work.stage_bytes(lo, hi, load) <= work.memory_bytes[d] for d in row)
            seconds = [work.seconds(work.network.devices[d].kind, lo, hi) for d in row]
            speed = sum(1 / (found[WorkKind.FORWARD] + found[WorkKind.BACKWARD]) for found in seconds)
            stages_s.append(1 / speed if fits else np.inf)
        best_s = min(best_s, max(stages_s))
    return best_s


def slowest_s(work, rows, stages):
    worst_s = 0.0
    for row, (lo, hi) in zip(rows, stages, strict=True):
        seconds = [work.seconds(work.network.devices[d].kind, lo, hi) for d in row]
        worst_s = max(worst_s, 1 / sum(1 / (found[WorkKind.FORWARD] + found[WorkKind.BACKWARD]) for found in seconds))
    return worst_s


@pytest.mark.parametrize("rows", [((0, 1), (2, 3, 4), (5,)), ((5,), (0,)), ((4, 2, 0), (1, 3, 5)), ((0, 1, 2, 3),)])
@pytest.mark.parametrize("memory_bytes", [None, 130_000_000])
def test_the_cut_is_the_best_of_all_that_fit(rows, memory_bytes):
    work = workload(memory_bytes=memory_bytes)
    stages = LayerTables(work).cut(rows)
    best_s = brute_cut(work, rows)
    if stages is None:
        assert best_s == np.inf
    else:
        assert slowest_s(work, rows, stages) == pytest.approx(best_s)


def test_the_search_finds_a_plan_that_the_simulator_scores():
    work = workload()
    found = search_sets(work, 2, Incumbent(Budget(None, 2000)), 0)
    steps_s = [sets.step_s for sets in found]
    assert steps_s == sorted(steps_s)
    plan = plan_of_sets(work, found[0])
    assert plan.n_stages == 2 and plan.n_microbatches == 16
    assert set(plan.peers) <= set(range(6))
    assert simulated_s(work, found[0]) == found[0].step_s
    equal = search_sets(work, 2, Incumbent(Budget(None, 2000)), 0, equal=True)
    assert plan_of_sets(work, equal[0]).is_even
    estimates_s = [min(estimate_s(work, sets.rows, sets.stages) for sets in pool) for pool in (found, equal)]
    assert estimates_s[0] <= estimates_s[1] + 1e-12


def test_equal_seeds_and_evaluations_give_equal_sets():
    runs = [search_sets(workload(), 2, Incumbent(Budget(None, 500)), 3) for _ in range(2)]
    assert runs[0] == runs[1]


def test_what_cannot_fit_is_refused_in_one_line():
    with pytest.raises(BadInput, match="memory_bytes: found no split of 5 layers over 2 stages"):
        search_sets(workload(memory_bytes=1000), 2, Incumbent(Budget(None, 100)), 0)
    with pytest.raises(BadInput, match="--stages: got 7, expected at most 5"):
        search_sets(workload(), 7, Incumbent(Budget(None, 100)), 0)


# ------------------------------------------------------------------------------------------- Eq. 1-4 for unequal stages


def brute_cost_s(network, rows, c_dp_bytes, c_pp_bytes):
    """Eq. 2 with each stage's own shard; Eq. 3 over all ways to give each device of the larger stage a partner."""
    pair_s = lambda a, b, n: 2 * (network.latency_s[a][b] + n * 8 / (network.bandwidth_gbps[a][b] * 1e9))  # noqa: E731
    datap_s = max(sum(pair_s(d, e, c_dp_bytes / len(row)) for e in row if e != d) for row in rows for d in row)
    largest = max(map(len, rows))
    total_s = datap_s
    for left, right in itertools.pairwise(rows):
        many, few = (left, right) if len(left) >= len(right) else (right, left)
        n_bytes = c_pp_bytes * largest / len(many)
        most = -(-len(many) // len(few))
        ways = [way for way in itertools.product(few, repeat=len(many)) if max(map(way.count, few)) <= most]
        total_s += min(max(pair_s(a, b, n_bytes) for a, b in zip(many, way, strict=True)) for way in ways)
    return total_s


@pytest.mark.parametrize("rows", [((0, 1), (2, 3, 4), (5,)), ((6,), (0, 3, 5, 1, 2)), ((0, 4, 2, 6), (1, 3, 5))])
@pytest.mark.parametrize("seed", range(3))
def test_the_reference_cost_of_unequal_stages_is_that_of_the_best_pairs(rows, seed):
    network = generate("jitter", 7, seed)
    cost = cost_of(network, rows, 3e8, 2e8)
    assert cost.total_s == pytest.approx(brute_cost_s(network, rows, 3e8, 2e8))
    assert cost.total_s == pytest.approx(cost.datap_s + sum(cost.hop_s))


def test_with_equal_numbers_the_best_pairs_are_those_of_the_best_matching():
    network = generate("jitter", 6, 1)
    rows = ((0, 1, 2), (3, 4, 5))
    best_s = min(cost_of(network, (rows[0], order), 3e8, 2e8).total_s for order in itertools.permutations(rows[1]))
    assert best_s == pytest.approx(brute_cost_s(network, rows, 3e8, 2e8))


# ----------------------------------------------------------------------------------------------- the search's parts


def test_stages_of_one_site_are_starts_of_the_search():
    work = workload(12)
    rows = {frozenset(sets.rows) for sets in _sets_of_sites(LayerTables(work))}
    by_region = {}
    for d, device in enumerate(work.network.devices):
        by_region.setdefault(device.region, []).append(d)
    assert rows == {frozenset(map(tuple, by_region.values()))}


@pytest.mark.parametrize("equal", [False, True])
def test_a_climb_ends_at_the_best_of_what_it_simulated_and_keeps_the_numbers_of_replicas(equal):
    work = workload()
    tables = LayerTables(work)
    rows = ((0, 3, 4), (1, 2, 5))
    start = StageSets(rows, tables.cut(rows), 0.0)
    start = replace(start, step_s=simulated_s(work, start))
    found = climb(tables, [start], Incumbent(Budget(None, 100)), equal)
    assert len(found) > 1 and len({(sets.rows, sets.stages) for sets in found}) == len(found)
    assert found[0].step_s == min(sets.step_s for sets in found) <= start.step_s
    assert all(simulated_s(work, sets) == sets.step_s for sets in found)
    sizes = {tuple(map(len, sets.rows)) for sets in found}
    assert (sizes == {(3, 3)}) == equal
    assert all(sorted(d for row in sets.rows for d in row) == list(range(6)) for sets in found)


def test_the_command_line_plans_unequal_numbers_of_replicas(tmp_path, capsys):
    network = tmp_path / "network.json"
    assert main(["network", "generate", "--kind=mixed", "--devices=6", f"--out={network}"]) == 0
    flags = [f"--network={network}", "--stages=2", "--model=debug", "--flops=A100=312e12,V100=125e12,T4=65e12"]
    flags += ["--objective=step_time", "--global_batch=16", "--evaluations=500", "--replicas=unequal"]
    out = tmp_path / "plan.json"
    assert main(["solve", *flags, "--pipelines=auto", f"--out={out}"]) == 0
    table = capsys.readouterr().out
    plan = planner.load_plan(out)
    assert plan.shape in table and plan.n_stages == 2 and len(plan.shares) in (1, plan.n_replicas[0])
    assert main(["solve", *flags, "--pipelines=3"]) == 2
    assert "--replicas: got unequal with a number of pipelines" in capsys.readouterr().err


def test_a_job_by_cost_has_equal_numbers_of_replicas():
    with pytest.raises(BadInput, match="--replicas: got unequal"):
        planner.Job(planner.ByteSizes(1e8, 1e8), 2, 3, unequal=True)
