"""configs/replicas: what a page of runs says, counted by hand, and which bytes are those between replicas."""

import functools
import json
import runpy

import pytest
from comparison import Given
from comparisons import replicas, stragglers
from comparisons.replicas import Run
from page import ROOT

from jaxdt.build import check
from jaxdt.run import config as configs


def run(system: str, seed: int, step_s: float, replica_bytes: int, held_out: float) -> Run:
    return Run(system, "even", seed, 100, step_s, replica_bytes, held_out)


RUNS = [
    run("allreduce", 0, 0.6, 400_000_000, 2.5),
    run("none", 0, 0.5, 10_000_000, 2.8),
    run("none", 1, 0.4, 10_000_000, 2.9),
    run("streaming_diloco", 0, 0.55, 30_000_000, 2.6),
    run("streaming_diloco", 1, 0.42, 30_000_000, 2.7),
]


def test_a_row_has_the_median_the_ratio_of_equal_seeds_and_the_bytes_of_a_run():
    rows = [line for line in replicas.table(RUNS).splitlines() if line.startswith(("| allr", "| none", "| str"))]
    assert rows == [
        "| allreduce | 1 | 0.600 (0.600 to 0.600) | 1.200 | 400 | 2.500 |",
        "| none | 2 | 0.450 (0.400 to 0.500) | 1.000 | 10 | 2.850 +- 0.071 |",
        "| streaming_diloco | 2 | 0.485 (0.420 to 0.550) | 1.075 | 30 | 2.650 +- 0.071 |",
    ]
    assert "takes 1.075 times the seconds" in replicas.hidden(RUNS)[0] and not replicas.hidden(RUNS[:3])


def test_without_runs_that_exchange_nothing_their_columns_stay_empty():
    assert "| streaming_diloco | 2 | 0.485 (0.420 to 0.550) | - | 30 | 2.650 +- 0.071 |" in replicas.table(RUNS[3:])


def test_bytes_between_replicas_are_those_of_links_inside_a_stage(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"placement": [[0, 2], [1, 3]]}))
    on_links = {"0->1": 1, "1->0": 2, "0->2": 10, "2->0": 20, "3->1": 40, "2->3": 4}
    assert replicas.replica_bytes(tmp_path, on_links) == 70


@pytest.mark.parametrize(
    ("setting", "system"), [(own.SETTING, name) for own in (replicas, stragglers) for name in own.SYSTEMS]
)
def test_every_system_is_a_run_that_makes_sense(setting, system):
    config, *flags = setting.systems[system]
    path, *reading = config.removeprefix("--config=").split(":")
    fields = runpy.run_path(str(ROOT / path))["get_config"](*reading)
    for flag in flags:
        name, value = flag.removeprefix("--config.").split("=")
        *groups, field = name.split(".")
        group = functools.reduce(lambda node, key: node[key], groups, fields)
        group[field] = value == "true" if value in ("true", "false") else type(group[field])(value)
    parsed = configs.parse(fields.to_dict(), 256)
    check(parsed, configs.default_plan(parsed))


def test_gains_over_all_reduce_are_those_of_equal_seeds():
    """Beside them those that the simulator predicted, where it did."""
    runs = [
        Run("allreduce", "stalling", 0, 100, 0.6, 1, 2.5, 0.66, 0.6),
        Run("allreduce", "stalling", 1, 100, 0.4, 1, 2.7, 0.44, 0.5),
        Run("sdpipe_p10", "stalling", 0, 100, 0.3, 1, 2.6, 0.33, 0.3),
        Run("sdpipe_p10", "stalling", 1, 100, 0.32, 1, 2.6, None, 0.3),
        Run("none", "stalling", 2, 100, 0.2, 1, 2.8, 0.2, None),
    ]
    assert stragglers.rows_of_gains(runs)[1:] == [
        ["sdpipe_p10", 2, "0.310", "1.62 (1.25 to 2.00)", "+10.0% (+10.0% to +10.0%)", "2.600 +- 0.000"],
        ["none", 1, "0.200", "-", "-", "2.800"],
    ]


def test_the_committed_runs_are_all_of_a_comparison():
    for own in (replicas.COMPARISON, stragglers.COMPARISON):
        lines = own.read(own.page)[1]
        given = Given([*range(own.n_seeds)], own.steps)
        assert not [case for case in own.cases(given) if own.lacks(case, lines)]
