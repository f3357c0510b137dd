"""Comparisons as data: each page is what its raw data give; which runs are there; lines of raw data."""

import json
from pathlib import Path

import pytest
from comparison import NAMES, PAGE, Given, comparison_of, rotated
from comparisons import delay
from page import differences

from jaxdt.run.errors import BadInput


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_page_is_what_its_raw_data_give(name, tmp_path):
    comparison = comparison_of(name)
    assert comparison.write(comparison.page, tmp_path)
    files = [path.name for path in tmp_path.iterdir()]
    assert PAGE in files and not differences(comparison.page, tmp_path, files)


def test_a_run_is_there_where_a_line_has_its_values(tmp_path):
    """A line of a whole case stands for all seeds; a line may keep its figures under `run`."""
    comparison = comparison_of("replicas")
    comparison.add(tmp_path, "Two cores.", dict(system="none", peers="even", seed=0, steps=9))
    comparison.add(tmp_path, "Two cores.", dict(seed=1, run=dict(name="fixed")) | dict(system="a", peers="b", steps=9))
    about, lines = comparison.read(tmp_path)
    assert about == "Two cores." and len(lines) == 2
    there = [dict(system="none", seed=0), dict(seed=1, name="fixed")]
    left = [dict(system="none", seed=1), dict(seed=2, name="fixed")]
    assert [case for case in there + left if comparison.lacks(case, lines)] == left
    emulated = comparison_of("emulated")
    first, *_ = emulated.cases(Given([4], 4))
    assert not emulated.lacks(first, emulated.read(emulated.page)[1])
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"system": "none"')  # a crash
    comparison.add(tmp_path, "", lines[0])
    assert comparison.read(tmp_path)[1] == [*lines, lines[0]]
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"system": "none"}\n')
    with pytest.raises(BadInput, match="line 5: got .*, expected system, peers, seed, steps"):
        comparison.read(tmp_path)


def test_runs_take_turns():
    names = ["fixed", "swarm", "swarm + rebalancing"]
    firsts = [rotated(names, seed)[0] for seed in range(10)]
    assert [firsts.count(name) for name in names] == [4, 3, 3]


# --------------------------------------------------------------------------------------------------------------- delay

NAMED = dict(config="c", steps=10, b1=0.9, gradient_frac=0.1)


def run(lr: float, seed: int, delay: int, held_out: float) -> dict:
    return NAMED | dict(lr=lr, seed=seed, delay=delay, held_out=held_out)


def test_rows_have_the_seeds_of_which_both_runs_are_there_and_prices_are_of_common_seeds(tmp_path):
    lines = [run(0.1, 0, 0, 2.0), run(0.1, 0, 1, 2.01), run(0.1, 1, 0, 4.0), run(0.1, 1, 1, 4.03), run(0.2, 0, 0, 1.0)]
    assert [row.settings[0] for row in delay.rows_of(lines)] == [0.1]
    lines.append(run(0.2, 0, 1, 1.5))
    free, best = delay.rows_of(lines)
    assert free.losses == {0: (2.0, 2.01), 1: (4.0, 4.03)} and best.losses == {0: (1.0, 1.5)}
    assert free.cost == "+0.0200 +- 0.1271" and best.cost == "+0.5000"
    assert abs(free.price(best) - 1.0) < 1e-9
    (tmp_path / "losses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert delay.COMPARISON.write(tmp_path, tmp_path)
    assert "ends 1.000 above 0.2, 0.9, 0.1, 50 times as much" in Path(tmp_path / PAGE).read_text()
