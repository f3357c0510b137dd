"""`bench_planner.py solvers`: its tables, its files, the section of a page."""

import json
import math
import subprocess
import sys
from pathlib import Path

from solver_page import BenchRun, Settings, against_first, cell, markdown

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = ROOT / "configs" / "networks"
SETTINGS = Settings(4, 4, 1e6, 2e6, 5.0, None, range(3))


def run_of(solver, seed, cost_s, proved=False, network="n"):
    return BenchRun(network, solver, seed, cost_s, 1.0, proved, 1, 1.0, ((0.5, cost_s),))


def test_a_cell_has_the_median_and_the_range_where_runs_differ():
    assert cell([run_of("a", 0, 2.0), run_of("a", 1, 2.001), run_of("a", 2, 2.001)]) == "2.001"
    assert cell([run_of("a", 0, 2.0), run_of("a", 1, 2.5), run_of("a", 2, 4.0)]) == "2.500 (2.000 to 4.000)"
    assert cell([run_of("a", 0, 2.0, proved=True)]) == "**2.000**"
    assert cell([run_of("a", 0, math.inf)]) == "-"


def test_solvers_are_compared_by_ratios_of_medians():
    runs = [
        run_of("a", 0, 2.0),
        run_of("b", 0, 4.0),
        run_of("a", 0, 9.0, network="m"),
        run_of("b", 0, 9.0, network="m"),
    ]
    assert against_first(runs).splitlines()[2:] == [
        "| `a` | 2 of 2 | 1.000 | 1.000 | 1.000 |",
        "| `b` | 1 of 2 | 1.414 | 1.000 | 2.000 |",
    ]


def test_no_infinite_cost_reaches_a_table():
    text = markdown([run_of("a", 0, math.inf), run_of("b", 0, 2.0)], SETTINGS)
    assert "| n | 1.000 | - | 2.000 |" in text and "inf" not in text
    assert "4 stages x 4 pipelines, c_dp 1000000 B, c_pp 2000000 B; each run: 5 s, one core; seeds 0 to 2:" in text


def bench(*words):
    command = [sys.executable, str(ROOT / "scripts/bench/bench_planner.py"), "solvers", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_solvers_write_their_files_and_the_section_of_a_page(tmp_path):
    page, out = tmp_path / "page.md", tmp_path / "bench"
    page.write_text("before\n<!-- bench -->\nold\n<!-- end of bench -->\nafter\n")
    paths = [NETWORKS / f"small_{name}.json" for name in ("gaming16", "random24")]
    flags = ["--stages=4", "--pipelines=4", "--solvers=block,random", "--evaluations=30", "--n_seeds=2", "--jobs=2"]
    done = bench(*paths, *flags, f"--out={out}", f"--write={page}")
    assert done.returncode == 0, done.stderr
    table = (out / "bench.md").read_text()
    assert page.read_text() == f"before\n<!-- bench -->\n\n{table}\n<!-- end of bench -->\nafter\n"
    assert done.stdout == table and "30 plans scored" in table and "seeds 0 to 1" in table
    assert "| network | best bound | `block` | `random` |" in table and "| gaming_16_seed1 |" in table
    assert "random_24" not in table  # of another size
    runs = json.loads((out / "bench.json").read_text())
    assert [(run["solver"], run["seed"]) for run in runs] == [(s, n) for s in ("block", "random") for n in range(2)]
    assert (out / "bench.png").exists()


def test_a_page_without_the_section_is_refused_before_any_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no section")
    done = bench(NETWORKS / "small_gaming16.json", f"--out={tmp_path}", f"--write={page}")
    assert done.returncode == 2 and "has no lines <!-- bench -->" in done.stderr
    assert len(done.stderr.splitlines()) == 1
