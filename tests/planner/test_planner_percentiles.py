"""Plans by a percentile of uncertain bandwidths: solve, explain, verify and replan go by the same numbers."""

import json
from dataclasses import replace

import pytest

from jaxdt.run import network as networks
from jaxdt.run import plan as plans
from jaxdt.run.network import BandwidthPercentile, Device, Network, to_json
from planner.__main__ import main
from planner.cost.reference import cost_of
from planner.model.change import Change, changed

SIZES = ["--c_dp_bytes", "1e6", "--c_pp_bytes", "1e8"]


def uncertain():
    """Usually a and b are near, and so are c and d. In bad hours a - c and b - d are the better pairs."""

    def matrix(near, across):
        pairs = {(0, 1): near, (2, 3): near, (0, 2): across, (1, 3): across}
        return tuple(
            tuple(pairs.get((min(i, j), max(i, j)), 0.1) if i != j else 0.0 for j in range(4)) for i in range(4)
        )

    latency_s = tuple(tuple(0.01 if i != j else 0.0 for j in range(4)) for i in range(4))
    percentiles = (BandwidthPercentile(10, matrix(0.2, 0.5)), BandwidthPercentile(90, matrix(2.0, 1.0)))
    return Network(
        tuple(map(Device, "abcd")), latency_s, matrix(2.0, 1.0), "uncertain", bandwidth_percentiles=percentiles
    )


@pytest.fixture
def network_file(tmp_path):
    path = tmp_path / "network.json"
    path.write_text(json.dumps(to_json(uncertain())))
    return str(path)


def solved(network_file, tmp_path, *flags):
    out = tmp_path / "plan.json"
    shape = ["--stages", "2", "--pipelines", "2", "--evaluations", "500", "--out", str(out)]
    assert main(["solve", "--network", network_file, *SIZES, *shape, *flags]) == 0
    return out


def pipelines(plan):
    return {frozenset(plan.devices[d] for d in column) for column in zip(*plan.placement, strict=True)}


def test_a_plan_by_a_percentile_is_another_plan(network_file, tmp_path):
    assert pipelines(plans.load(solved(network_file, tmp_path))) == {frozenset("ab"), frozenset("cd")}
    plan = plans.load(solved(network_file, tmp_path, "--percentile=10"))
    assert pipelines(plan) == {frozenset("ac"), frozenset("bd")}
    cost = cost_of(uncertain().at_percentile(10), plan.placement, 1e6, 1e8)
    assert plan.found["cost"]["total_s"] == pytest.approx(cost.total_s)
    assert plan.found["percentile"] == 10


def test_a_plan_is_looked_at_by_its_own_percentile(network_file, tmp_path, capsys):
    out = str(solved(network_file, tmp_path, "--percentile=10"))
    plan = plans.load(out)
    assert main(["verify", out]) == 0
    capsys.readouterr()
    shown = {}
    for percentile in (None, 10, 90):
        assert main(["explain", out, *([f"--percentile={percentile}"] if percentile else [])]) == 0
        shown[percentile] = capsys.readouterr().out
        cost = cost_of(uncertain().at_percentile(percentile or 10), plan.placement, 1e6, 1e8)
        assert f"{cost.total_s:.3f} s a step" in shown[percentile]
    assert shown[None] == shown[10]
    assert "proved" in shown[10] and "proved" not in shown[90]


def test_a_percentile_that_is_not_known_is_one_line(network_file, capsys):
    flags = [*SIZES, "--stages", "2", "--pipelines", "2", "--percentile=25"]
    assert main(["solve", "--network", network_file, *flags]) == 2
    assert capsys.readouterr().err == (
        "error: --percentile: got 25, the bandwidth_percentiles of uncertain are 10, 90\n"
    )


def test_a_replan_goes_by_the_percentile_of_its_plan(network_file, tmp_path, capsys):
    out = str(solved(network_file, tmp_path, "--percentile=10"))
    files = ["--out", str(tmp_path / "new.json"), "--out_network", str(tmp_path / "after.json")]
    assert main(["replan", "--from", out, "--without", "d", "--evaluations", "500", *files]) == 0
    plan, after = plans.load(files[1]), networks.load(files[3])
    assert after == changed(uncertain(), Change(("d",)))
    assert [one.percentile for one in after.bandwidth_percentiles] == [10, 90]
    assert plan.found["percentile"] == 10
    assert main(["verify", files[1]]) == 0
    assert pipelines(plan) == {frozenset("ac")}


def test_devices_that_came_without_percentiles_leave_none():
    came = replace(uncertain(), devices=tuple(map(Device, "cdef")), bandwidth_percentiles=())
    assert changed(uncertain(), Change(("a",), came)).bandwidth_percentiles == ()
    with_them = replace(came, bandwidth_percentiles=uncertain().bandwidth_percentiles[1:])
    (kept,) = changed(uncertain(), Change(("a",), with_them)).bandwidth_percentiles
    assert kept.percentile == 90
