"""DT-FM's Figures 3 and 4: what their pages say follows from the results, whatever these are."""

import math
from dataclasses import replace
from zlib import crc32

import pytest
from experiments.page import TEMPLATE, filled
from experiments.reproduce import dtfm, dtfm_gain
from experiments.reproduce.dtfm_parts.cost import Costs, seeds_sentence
from experiments.reproduce.dtfm_parts.systems import (
    CASES,
    FOLDER,
    Options,
    System,
    Times,
    blocking,
    scenario_of,
    simulated_s,
)
from experiments.reproduce.targets import PAGES

from jaxdt.run import network as networks

COSTS = dict.fromkeys(CASES, Costs(2.0, 5.0, (1.5, 1.5, 2.5), 1.0, 0.9))


@pytest.fixture(scope="module")
def results():
    """Times that no simulation gave: between 1 and 2 s and 1 and 2 ms a sample, by the names of the system."""

    def draw(key, what):
        return 1 + crc32(f"{key} {what}".encode()) / 2**32

    return dtfm.Steps({key: Times(draw(key, "fixed"), draw(key, "each") / 1e3) for key in dtfm.all_keys()})


def test_the_parts_of_the_gain_are_the_whole(results):
    for row in dtfm.split_rows(results):
        base_s, depth, overlap, overlap_first, then_depth, placement, ours_s = row[1:]
        assert depth * overlap == pytest.approx(overlap_first * then_depth)
        assert depth * overlap * placement == pytest.approx(base_s / ours_s)


def test_with_equal_options_ours_never_loses_at_any_batch(results):
    for case in CASES:
        for options in (dtfm.THEIRS, dtfm.OURS):
            assert min(dtfm.over_rows(results, case, dtfm.OURS)) >= 1
            assert len(dtfm.over_rows(results, case, options)) == len(dtfm.SETTINGS)
        for n_layers in dtfm.LAYERS:
            for batch in dtfm.BATCHES:
                *_, ours_s = seconds = dtfm.systems(results, case, n_layers, batch)
                assert ours_s <= seconds[1]


def test_the_depth_section_counts_its_own_table(results):
    section = dtfm.depth_section(results)
    best = [row[-2] for row in section["depth_section_rows"]]
    for depth in set(best):
        assert f"depth {depth} in {best.count(depth)}" in section["where"]


def test_the_page_has_no_number_of_its_own(results):
    seeds = seeds_sentence([[1, 2, 1, 1]] * 7)
    assert "finds one cost in 14 and one plan in 7 of 14 pairs" in seeds
    text = page_of(results, seeds)
    assert "DeepSpeed | 3.6x | not modelled" in text and "1.7-2.3x" in text
    assert "43.5 to 49.5" in text and "1.5000 to 2.5000" in text
    assert "the line is off by 1.0% at most" in text and seeds in text
    slower = dtfm.Steps({key: replace(t, fixed_s=t.fixed_s + 9) for key, t in results.found.items()})
    assert dtfm.placement_gains(slower) != dtfm.placement_gains(results)
    assert dtfm.trends(slower) != dtfm.trends(results)


def page_of(steps, seeds):
    values = dtfm.shown(COSTS, steps) | dict(off=0.01, most_gb=12.0, seeds=seeds, origin="command")
    return filled((PAGES / "dtfm" / TEMPLATE).read_text(), dtfm, values)


def test_a_blocking_sender_computes_nothing_while_it_sends():
    """dtfm_debug_8 as 2 x 4: stage 0 sends one boundary tensor a microbatch."""
    network = networks.load(FOLDER / "dtfm_debug_8.json")
    system = System(network, 24, ((0, 1, 2, 3), (4, 5, 6, 7)), Options(overlap=False, depth=1))
    scenario = scenario_of(system, 16)
    conditions = scenario.conditions()
    link = network.link(0, 4)
    sent_s = link.transfer_s(2048 * 2048 * 2)
    assert blocking(scenario, conditions)[0]["F"] == pytest.approx(conditions.seconds[0]["F"] + sent_s)
    assert simulated_s(system, 16) > simulated_s(replace(system, options=Options(True, 1)), 16)


# ----------------------------------------------------------------------------------------------------- gain, Figure 4


def runs(ends):
    return [dtfm_gain.Run(end_s, ()) for end_s in ends]


def test_the_difference_is_paired_by_seed():
    ours, other = [10.0 + seed for seed in range(10)], [11.0 + seed + 0.1 * (-1) ** seed for seed in range(10)]
    found = dtfm_gain.difference(runs(ours), runs(other))
    assert found.mean_s == pytest.approx(-1.0)
    assert found.half_s == pytest.approx(2.262 * 0.1 * math.sqrt(10 / 9) / math.sqrt(10))
    assert found.verdict == "DT-FM's"
    assert dtfm_gain.difference(runs(other), runs(ours)).verdict == "Kernighan-Lin's"
    assert dtfm_gain.difference(runs(ours), runs(ours)).verdict == "neither"


@pytest.mark.parametrize("study", dtfm_gain.STUDIES)
def test_a_study_swaps_the_gain_alone(study, monkeypatch):
    """Both runs of a seed begin with the same random members, whatever the gain."""
    short = replace(dtfm_gain.STUDIES[study], evaluations=20)
    monkeypatch.setitem(dtfm_gain.STUDIES, study, short)
    ours, other = (dtfm_gain.curve_of(study, "derived/derived_random10_seed2022", gain, 0) for gain in (0, 1))
    assert ours == other
    assert ours[0] != dtfm_gain.curve_of(study, "derived/derived_random10_seed2022", 0, 1)[0]


def test_the_best_cost_at_some_numbers_of_plans():
    curve = [(10, 5.0), (20, 4.0), (40, 1.0)]
    assert dtfm_gain.best_at(curve, [5, 10, 19, 20, 39, 100]).tolist() == [5, 5, 5, 4, 4, 1]
