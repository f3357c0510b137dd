"""What SWARM's Table 2 and Figure 7 are reproduced with: closed forms of small fleets, and a page of two sizes."""

import json
from dataclasses import replace

import pytest
from experiments.reproduce import swarm_cost, swarm_rebalancing, swarm_scaling, swarm_table2
from experiments.reproduce.swarm_fleet import Fleet, each_s

from jaxdt.spec.errors import BadInput

FLEET = Fleet(2, 2, 64, 1, "none", compute_s=1.0, latency_s=0.0, gbps=1e6)


def test_without_a_network_a_microbatch_takes_its_compute():
    assert each_s(FLEET, 4, 8) == pytest.approx(1.0, rel=1e-3)
    assert each_s(replace(FLEET, wiring="swarm"), 8, 16) == pytest.approx(1.0, rel=1e-3)


def test_a_sender_that_blocks_waits_for_each_tensor():
    """Stage 0 sends one tensor a microbatch, and so does stage 1."""
    blocked = replace(FLEET, latency_s=0.25, blocking=True)
    assert each_s(blocked, 4, 8) == pytest.approx(1.25, rel=1e-3)


def test_a_line_is_shared_by_all_that_a_peer_sends():
    """A boundary of 512 x 64 numbers in bf16 over a line that takes 2 s for it: stage 1 of 3 sends two a microbatch."""
    narrow = replace(FLEET, n_stages=3, gbps=512 * 64 * 2 * 8 / 2e9, wiring="swarm", window=48)
    assert each_s(narrow, 8, 24) == pytest.approx(4.0, rel=0.1)


def test_averaging_and_the_commit_count_only_where_they_are_asked_for():
    far = replace(FLEET, latency_s=0.25, wiring="swarm", window=64)
    assert replace(far, synced=True).step_s(8) >= far.step_s(8) + 0.5


def test_round_trips_as_long_as_a_forward_hide_behind_the_default_window():
    """100 ms there and back, a microbatch of 400 ms a stage: at least 0.9 of the throughput without latency."""
    near = Fleet(4, 4, 64, 1, "none", compute_s=0.4, latency_s=0.0, gbps=1e6, wiring="swarm")
    assert each_s(near, 20, 60) >= 0.9 * each_s(replace(near, latency_s=0.05), 20, 60)
    assert each_s(near, 20, 60) <= each_s(replace(near, wiring="fixed"), 20, 60) / 0.95


def test_latency_costs_pipelines_more_than_stochastic_wiring():
    found = {
        wiring: [each_s(replace(swarm_table2.fleet("xxlarge", far), wiring=wiring), 10, 30) for far in (False, True)]
        for wiring in ("swarm", "fixed")
    }
    near, far = zip(*found.values(), strict=True)
    assert far[0] / near[0] < far[1] / near[1] and far[0] < far[1]


def test_the_page_of_the_scaling(tmp_path):
    text = swarm_scaling.run(tmp_path, "command", peers=(8, 16))
    assert "at least 100.0 % of the best case" in text and "0.156 of 65 TFLOP/s" in text
    assert (tmp_path / "swarm_scaling.png").stat().st_size < 150_000


def written(tmp_path, **data):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"t_s": [0, 3000, 9000], "nodes": [128, 100, 128]} | data))
    return path


def test_the_page_of_rebalancing_takes_other_traces(tmp_path):
    text = swarm_rebalancing.run(tmp_path, "command", [str(written(tmp_path, duration_s=12000))])
    assert "holds in 4 of 4 cases" in text and text.count("| trace | random | 5 |") == 3
    with pytest.raises(BadInput, match="duration_s: got 10, expected at least the last t_s, 9000"):
        swarm_rebalancing.run(tmp_path, "command", [str(written(tmp_path, duration_s=10))])


def test_machines_that_stay_have_the_speed_of_whole_stages_and_missing_ones_halve_it(tmp_path):
    steps = swarm_cost.Steps(parallel_s=10.0, pairs_s=11.0, singles_s=22.0, loss_s=36.0)
    always = swarm_cost.market(swarm_rebalancing.read(written(tmp_path, nodes=[8, 8, 8], duration_s=9001)))
    assert (always.present, always.losses_an_hour, always.share) == (8.0, 0.0, (0.0, 0.0, 1.0))
    assert always.speed(steps) == pytest.approx(1 / 11.0)
    halved = swarm_cost.Market("m", 4.0, 0.0, (0.0, 1.0, 0.0))
    assert halved.speed(steps) == pytest.approx(1 / 22.0)
    assert replace(halved, losses_an_hour=100.0).speed(steps) == pytest.approx(1 / 44.0)
