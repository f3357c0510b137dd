"""The code that reproduces SWARM's Table 2 and Figure 7: closed forms of small fleets, and a page of two sizes."""

import json
from dataclasses import replace

import pytest
from experiments.reproduce import hybrid_ps_table1 as hybrid_table1
from experiments.reproduce import swarm_cost, swarm_rebalancing, swarm_table2, swarm_tables34
from experiments.reproduce.results import Results
from experiments.reproduce.swarm_fleet import Fleet
from experiments.reproduce.swarm_fleet import each_s as recorded_each_s
from experiments.reproduce.targets import write

from jaxdt.run.errors import BadInput
from jaxdt.runtime.reporting.interval import interval, paired_ratio


def each_s(fleet: Fleet, short: int, long: int) -> float:
    return recorded_each_s(fleet, short, long, Results())


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
    assert replace(far, synced=True).step_s(8, Results()) >= far.step_s(8, Results()) + 0.5


def test_round_trips_as_long_as_a_forward_hide_behind_the_default_window():
    """100 ms there and back, a microbatch of 400 ms a stage: at least 0.9 of the throughput without latency."""
    near = Fleet(4, 4, 64, 1, "none", compute_s=0.4, latency_s=0.0, gbps=1e6, wiring="swarm")
    assert each_s(near, 20, 60) >= 0.9 * each_s(replace(near, latency_s=0.05), 20, 60)
    assert each_s(near, 20, 60) <= each_s(replace(near, wiring="fixed"), 20, 60) / 0.95


def test_a_slow_peer_slows_its_pipeline_and_weights_take_work_from_it():
    slow = replace(FLEET, slow=(2, 3))  # both peers of pipeline 1
    assert each_s(slow, 4, 8) == pytest.approx(2.0, rel=1e-3)
    assert each_s(replace(slow, weights=(2, 1)), 6, 12) == pytest.approx(4 / 3, rel=1e-3)


def test_pipelines_of_swarms_depth_hide_the_latency_that_they_show_at_their_usual_depth():
    far = replace(FLEET, n_pipelines=1, n_stages=3, latency_s=0.5)
    assert each_s(far, 12, 24) >= 1.2
    assert each_s(replace(far, depth=4), 12, 24) == pytest.approx(1.0, rel=1e-3)


def test_sorted_slow_peers_stay_in_their_stages_in_few_pipelines():
    for seed in range(20):
        slow = swarm_table2.slow_peers(seed)
        placed = swarm_table2.by_speed(slow)
        assert swarm_table2.n_slow(placed) == swarm_table2.n_slow(slow)
        assert len({peer // 4 for peer in placed}) == max(swarm_table2.n_slow(slow))


def test_no_system_is_faster_than_the_bound():
    for system in (swarm_table2.SWARM, swarm_table2.SORTED):
        fleet = swarm_table2.unequal("Ours", system, far=False, seed=0)
        assert fleet.step_s(60, Results()) >= 60 * swarm_table2.bound_s("Ours", 0), system


def test_an_interval_is_students():
    assert (interval(range(10)).mean, round(interval(range(10)).half, 4)) == (4.5, 2.1659)
    assert str(interval([2.0] * 10)) == "2" and str(paired_ratio([2.0] * 10, [4.0] * 10)) == "0.5"
    with pytest.raises(ValueError, match="got 3 values, expected one for each of 10 seeds"):
        interval([1.0, 2.0, 3.0])


def written(tmp_path, **data):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"t_s": [0, 3000, 9000], "nodes": [128, 100, 128]} | data))
    return path


def test_the_page_of_rebalancing_takes_other_traces(tmp_path):
    def page(**trace):
        return write("swarm_rebalancing", tmp_path, Results(), {"traces": [str(written(tmp_path, **trace))]})

    text = page(duration_s=12000)
    assert "holds in the mean in 4 of 4 cases" in text and text.count("| trace | random | 5 |") == 3
    with pytest.raises(BadInput, match="duration_s: got 10, expected at least the last t_s, 9000"):
        page(duration_s=10)


def test_machines_that_stay_have_the_speed_of_whole_stages_and_missing_ones_halve_it(tmp_path):
    steps = swarm_cost.Steps(smallest_s=(22.0, 11.0), loss_s=36.0)
    trace = swarm_rebalancing.read(written(tmp_path, nodes=[8, 8, 8], duration_s=9001))
    always = swarm_cost.market(trace, 8, Results())
    assert (always.present, always.losses_an_hour, always.mean_shares()) == (8.0, 0.0, [0.0, 0.0, 1.0])
    assert always.speeds(steps) == pytest.approx([1 / 11.0] * 10)
    halved = swarm_cost.Market("m", 4.0, 0.0, ((0.0, 1.0, 0.0),))
    assert halved.speeds(steps) == pytest.approx([1 / 22.0])
    assert replace(halved, losses_an_hour=100.0).speeds(steps) == pytest.approx([1 / 44.0])


def test_recomputation_is_counted_once():
    """A rate that was fitted to times with recomputation gives those times back: Table 1's 57.5 ms of a layer."""
    wide_s = swarm_cost.RATES[0].sample_s("V100") * (4096 / 1024) ** 2 / swarm_cost.LAYERS
    assert wide_s == pytest.approx(0.0575, rel=0.01)


def test_the_fleets_of_tables_3_and_4_reach_the_best_case_but_for_averaging():
    """The faster GPUs come first, and 1F1B's shares go by speed. Without sharing, 16 times as much is averaged."""
    mixed, alone = (swarm_tables34.Row(3, gpus) for gpus in (swarm_tables34.MIXED, swarm_tables34.A100))
    fleet = mixed.fleet(swarm_tables34.ONE_F_ONE_B)
    ratio = (400 / 19.2) / (56 / 25.5)
    assert fleet.slowdown == pytest.approx(ratio) and list(fleet.slow) == [*range(18, 150)]
    assert fleet.weights[:6] == (round(1000 * ratio),) * 6 and set(fleet.weights[6:]) == {1000}
    assert mixed.best == pytest.approx(19.2 * 132 / 400 + 25.5 * 18 / 56)
    assert swarm_tables34.Row(4, swarm_tables34.A100).ring_s == pytest.approx(16 * alone.ring_s)
    step_s = alone.fleet(swarm_tables34.ONE_F_ONE_B).step_s(8, Results())
    assert step_s >= 8 * alone.stage_s(swarm_tables34.A100) + alone.ring_s


def test_costs_of_table_1_are_those_of_seven_tokens_and_days_follow_from_costs():
    shapes = {shape.name: shape for shape in hybrid_table1.SHAPES}
    assert shapes["GPT-3 175B"].macs == 12 * 96 * 12288**2
    assert hybrid_table1.tokens(shapes["ALBERT-xxlarge"], Results())[2] == pytest.approx(7.3, abs=0.05)
    days = [hybrid_table1.days_of_cost(row, Results())[0] for row in hybrid_table1.PRINTED]
    assert max(days[:3]) / min(days[:3]) < 1.001 < days[3] / days[0] == pytest.approx(1.055, abs=0.001)
