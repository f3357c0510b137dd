"""The suggestions of `explain`: every gain is the difference of two costs by an evaluator of this file, and no swap,
boundary or factor that was left out is better."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner_cases import C_DP, C_PP, NETWORKS, case

import planner
from jaxdt.run import codec as codecs
from jaxdt.run.network import to_json
from jaxdt.run.plan import Plan, even_shares, ranges
from planner.__main__ import main
from planner.model.comm_workload import CommBytes
from planner.model.generate import generate
from planner.report import suggest
from planner.report.plan_file import cost_plan, save_plan
from planner.report.suggest import FACTORS, MOST_OF_IT, suggestions

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    ((2, 3), "jitter", 1),
    ((3, 2), "gaming", 2),
    ((4, 2), "gaming", 3),
    ((2, 4), "random", 4),
    ((6, 1), "jitter", 5),
]


def one_way_s(network, src, dst, n_bytes):
    return network.latency_s[src][dst] + n_bytes * 8 / (network.bandwidth_gbps[src][dst] * 1e9)


def pair_s(network, a, b, n_bytes):
    return one_way_s(network, a, b, n_bytes) + one_way_s(network, b, a, n_bytes)


def cost_s(network, placement, c_dp=C_DP, hops_pp=None):
    """Eq. 1-4 of a placement, with the bytes of each hop."""
    hops_pp = hops_pp or [C_PP] * (len(placement) - 1)
    datap = max(sum(pair_s(network, d, e, c_dp / len(row)) for e in row if e != d) for row in placement for d in row)
    hops = [
        max(pair_s(network, a, b, n_bytes) for a, b in zip(*rows, strict=True))
        for rows, n_bytes in zip(itertools.pairwise(placement), hops_pp, strict=True)
    ]
    return datap + sum(hops)


def costed(shape, kind, seed, n_spare=0):
    """A random placement, and some devices that it leaves out."""
    n_stages, n_pipelines = shape
    network = generate(kind, n_stages * n_pipelines + n_spare, seed)
    order = np.random.default_rng(seed).permutation(network.n_devices)[: n_stages * n_pipelines]
    plan = Plan(
        n_layers=12,
        stages=ranges(even_shares(12, n_stages)),
        placement=tuple(map(tuple, order.reshape(shape).tolist())),
        shares=even_shares(24, n_pipelines),
        codec=("none",) * (n_stages - 1),
        devices=tuple(device.name for device in network.devices),
        found={"c_dp_bytes": C_DP, "c_pp_bytes": C_PP, "bound_s": 0.0, "proved": False, "cost": {}, "gap": None},
    )
    return cost_plan(plan, network, CommBytes(C_DP, C_PP))


def applied_s(before, change):
    """The cost after a change, by this file's evaluator."""
    network, placement = before.network, before.plan.placement
    index = {device.name: d for d, device in enumerate(network.devices)}
    if isinstance(change, planner.Swap):
        other = {index[change.a]: index[change.b], index[change.b]: index[change.a]}
        return cost_s(network, [[other.get(d, d) for d in row] for row in placement])
    if isinstance(change, planner.Shape):
        return cost_s(network, change.placement, change.c_dp_bytes, [change.c_pp_bytes] * (change.n_stages - 1))
    if isinstance(change, planner.BoundaryCodec):
        hops_pp = [C_PP] * (len(placement) - 1)
        hops_pp[change.boundary] *= change.bytes_frac
        return cost_s(network, placement, hops_pp=hops_pp)
    return faster_s(before, [(index[a], index[b]) for a, b in change.pairs], change.factor)


def faster_s(before, pairs, factor):
    rows = [list(row) for row in before.network.bandwidth_gbps]
    for a, b in pairs:
        rows[a][b] *= factor
        rows[b][a] *= factor
    network = replace(before.network, bandwidth_gbps=tuple(map(tuple, rows)))
    return cost_s(network, before.plan.placement)


def of_kind(before, kind, **options):
    return [one for one in suggestions(before, **options) if isinstance(one.change, kind)]


@pytest.mark.parametrize(("shape", "kind", "seed"), CASES)
def test_each_gain_is_a_difference_of_two_costs(shape, kind, seed):
    before = costed(shape, kind, seed, n_spare=seed % 2)
    total_s = cost_s(before.network, before.plan.placement)
    found = suggestions(before)
    for one in found:
        assert one.saved_s == pytest.approx(total_s - applied_s(before, one.change), rel=1e-9, abs=1e-9), one.text
        assert one.saved_s > 0
    kinds = {type(one.change) for one in found}
    assert {planner.Swap, planner.BoundaryCodec, planner.FasterLinks} <= kinds
    assert [one.saved_s for one in found] == sorted((one.saved_s for one in found), reverse=True)


@pytest.mark.parametrize(("shape", "kind", "seed"), CASES)
def test_no_swap_is_better_than_the_suggested_one(shape, kind, seed):
    before = costed(shape, kind, seed, n_spare=seed % 2)
    names = before.plan.devices
    every = [applied_s(before, planner.Swap(a, b)) for a, b in itertools.combinations(names, 2)]
    (best,) = of_kind(before, planner.Swap)
    assert applied_s(before, best.change) == pytest.approx(min(every))


def test_the_boundary_of_a_codec_is_the_one_where_it_saves_most():
    before = costed((4, 2), "gaming", 3)
    found = {one.change.codec: one for one in of_kind(before, planner.BoundaryCodec)}
    assert set(found) == {"int8"}  # the plan does not say of what its boundaries are: bfloat16 then
    frac = found["int8"].change.bytes_frac
    assert frac == pytest.approx(codecs.wire_bytes(codecs.parse("int8"), 1 << 20, 2) / (2 << 20))
    every = [applied_s(before, planner.BoundaryCodec(boundary, "int8", frac)) for boundary in range(3)]
    assert applied_s(before, found["int8"].change) == pytest.approx(min(every))
    wide = replace(before, plan=replace(before.plan, found=before.plan.found | {"dtype": "float32"}))
    assert {one.change.codec for one in of_kind(wide, planner.BoundaryCodec)} == {"bf16", "int8"}
    encoded = replace(before, plan=replace(before.plan, codec=("int8",) * 3))
    assert of_kind(encoded, planner.BoundaryCodec) == []


@pytest.mark.parametrize(("shape", "kind", "seed"), CASES)
def test_a_link_gets_no_faster_than_is_worth_it(shape, kind, seed):
    before = costed(shape, kind, seed)
    total_s = cost_s(before.network, before.plan.placement)
    index = {device.name: d for d, device in enumerate(before.network.devices)}
    for one in of_kind(before, planner.FasterLinks):
        pairs = [(index[a], index[b]) for a, b in one.change.pairs]
        saved_s = {factor: total_s - faster_s(before, pairs, factor) for factor in FACTORS}
        assert one.saved_s >= MOST_OF_IT * max(saved_s.values()) - 1e-9
        assert all(saved_s[f] < MOST_OF_IT * max(saved_s.values()) for f in FACTORS if f < one.change.factor)


def test_another_shape_has_the_sizes_of_its_layers_and_microbatches():
    before = costed((4, 2), "jitter", 3)
    (one,) = of_kind(before, planner.Shape)
    shape = one.change
    assert (shape.n_stages, shape.n_pipelines) in {(1, 8), (2, 4), (8, 1)}
    assert sorted(d for row in shape.placement for d in row) == list(range(8))
    assert shape.c_dp_bytes == pytest.approx(C_DP * -(-12 // shape.n_stages) / 3)
    assert shape.c_pp_bytes == pytest.approx(C_PP * -(-24 // shape.n_pipelines) / 12)


def test_a_shape_that_devices_cannot_hold_is_not_suggested():
    before = costed((4, 2), "jitter", 3)
    devices = tuple(replace(device, memory_bytes=round(4 * C_DP)) for device in before.network.devices)
    small = replace(before, network=replace(before.network, devices=devices))
    assert [one.change.n_stages for one in of_kind(before, planner.Shape)] != []
    assert all(one.change.n_stages > 4 for one in of_kind(small, planner.Shape))


def test_with_search_a_shape_saves_no_less(monkeypatch):
    monkeypatch.setattr(suggest, "SHAPE_SEARCH_S", 0.2)
    before = costed((4, 2), "jitter", 3)
    (quick,), (searched,) = of_kind(before, planner.Shape), of_kind(before, planner.Shape, search=True)
    assert searched.saved_s >= quick.saved_s - 1e-9
    total_s = cost_s(before.network, before.plan.placement)
    assert searched.saved_s == pytest.approx(total_s - applied_s(before, searched.change))


def test_without_search_the_work_is_bounded(monkeypatch):
    before = costed((4, 2), "gaming", 3)
    (best,) = of_kind(before, planner.Swap)
    monkeypatch.setattr(suggest, "PAIRS_MAX", 2 * 2 * 3)  # one swap
    few = of_kind(before, planner.Swap)
    assert all(one.saved_s < best.saved_s for one in few)
    assert of_kind(before, planner.Swap, search=True) == [best]


def test_a_plan_over_a_missing_link_gets_no_suggestion():
    before = costed((2, 3), "jitter", 1)
    rows = tuple((0.0,) * 6 for _ in range(6))
    missing = replace(before.network, bandwidth_gbps=rows)
    assert suggestions(cost_plan(before.plan, missing, CommBytes(C_DP, C_PP))) == []


def test_unequal_numbers_of_replicas_get_codecs_and_links():
    before = costed((2, 3), "jitter", 1)
    a, b = before.plan.placement
    plan = replace(before.plan, placement=((*a, b[0]), b[1:]), shares=(24,))
    found = suggestions(cost_plan(plan, before.network, CommBytes(C_DP, C_PP)))
    assert {type(one.change) for one in found} <= {planner.BoundaryCodec, planner.FasterLinks}
    assert found


NEITHER = """
import sys
from planner.__main__ import main
assert main(["explain", sys.argv[1], "--network", sys.argv[2]]) == 0
assert not {"numpy", "numba", "ortools"} & set(sys.modules)
"""


def test_the_command_prints_them_and_imports_no_solver(tmp_path, capsys, monkeypatch):
    network, few = case("dtfm_case2_spot"), costed((4, 2), "jitter", 3)
    known = {"cost": {"total_s": 0.0, "datap_s": 0.0, "pipelinep_s": 0.0}}
    block = tuple(tuple(8 * p + s for p in range(8)) for s in range(8))
    plan = Plan(
        n_layers=24,
        stages=ranges((3,) * 8),
        placement=block,
        shares=(8,) * 8,
        devices=tuple(device.name for device in network.devices),
        found=few.plan.found | known,
    )
    save_plan(plan, tmp_path / "plan.json")
    files = [str(tmp_path / "plan.json"), str(NETWORKS / "dtfm_case2_spot.json")]
    done = subprocess.run(
        [sys.executable, "-c", NEITHER, *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Would help, each by itself, in seconds of Eq. 1-4:\n  saves " in done.stdout
    monkeypatch.setattr(suggest, "SHAPE_SEARCH_S", 0.1)
    # With --suggest all swaps are tried, which takes seconds for 64 devices.
    save_plan(replace(few.plan, found=few.plan.found | known), tmp_path / "few.json")
    (tmp_path / "few_network.json").write_text(json.dumps(to_json(few.network)))
    words = [str(tmp_path / "few.json"), "--network", str(tmp_path / "few_network.json"), "--suggest"]
    assert main(["explain", *words]) == 0
    assert "found in a short search" in capsys.readouterr().out
