"""Committed pages of scripts/reproduce.py are what their values give, and a sample of the values is what is simulated.

`python scripts/reproduce.py all --check` simulates every value again, and paints every picture.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from experiments.page import differences
from experiments.reproduce.results import FILE, Job, Results, computed, read
from experiments.reproduce.targets import TARGETS, write
from matplotlib.figure import Figure

from jaxdt.run.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "configs/reproduce"
PAGES = [name for name in TARGETS if (COMMITTED / name / FILE).is_file()]
NUMBER = re.compile(r"\b\d+\.\d+\b")
PAGE = re.compile(r"configs/reproduce/(\w+)/README\.md")
N_SAMPLED, N_WORKS_MAX = 2, 4_000
SLOWLY_PAINTED = {"dtfm", "dtfm_gain", "hybrid_ps", "hybrid_ps_figures"}  # dozens of axes, several seconds each


@pytest.fixture
def unpainted(monkeypatch):
    """Has pictures drawn, but takes those of the page that is committed instead of painting them."""

    def savefig(figure, path, **options):
        shutil.copy(COMMITTED / path.parent.name / path.name, path)

    return lambda: monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_command_writes(name, tmp_path, unpainted):
    results = read(COMMITTED / name)
    if name in SLOWLY_PAINTED:
        unpainted()
    write(name, tmp_path / name, results, {})
    wrong = differences(COMMITTED / name, tmp_path / name)
    assert not wrong, f"{wrong}; python scripts/reproduce.py {name} --from_results writes the page again"
    for job in results.sample(N_SAMPLED, N_WORKS_MAX):
        assert computed([job])[job.inputs] == results.get(job), (
            f"the simulator now gives other values for {job.inputs}: python scripts/reproduce.py {name}"
        )


@pytest.mark.parametrize("guide", ["README.md", "docs/evidence.md"])
def test_numbers_quoted_beside_a_page_stand_on_it(guide):
    rows = [line for line in (ROOT / guide).read_text().splitlines() if line.startswith("| ")]
    quoted = [(page[1], number) for row in rows if (page := PAGE.search(row)) for number in NUMBER.findall(row)]
    quoted = [(name, number) for name, number in quoted if name in PAGES]
    assert len(quoted) > 4
    wrong = [f"{number} is not on {name}" for name, number in quoted if number not in text_of(name)]
    assert not wrong, f"{guide}: {wrong}"


def text_of(name: str) -> str:
    return (COMMITTED / name / "README.md").read_text()


def test_a_changed_value_text_or_picture_is_noticed(tmp_path, unpainted):
    unpainted()
    shutil.copytree(COMMITTED / "square_cube", tmp_path / "square_cube")
    folder = tmp_path / "square_cube"
    assert differences(COMMITTED / "square_cube", folder) == []
    head, first, *others = (folder / FILE).read_text().splitlines()
    entry = json.loads(first)
    entry["values"][0] *= 1.01
    (folder / FILE).write_text("\n".join([head, json.dumps(entry), *others]) + "\n")
    write("square_cube", folder, read(folder), {})
    shutil.copy(COMMITTED / "swarm_table1" / "swarm_table1.png", folder / "square_cube.png")
    (folder / "extra.md").write_text("")
    told = " ".join(differences(COMMITTED / "square_cube", folder))
    for part in (f"{FILE}: differs", "README.md: differs", "the picture differs", "extra.md: is missing"):
        assert part in told


def test_a_page_names_the_commit_of_its_values(tmp_path, unpainted):
    unpainted()
    tmp_path = tmp_path / "square_cube"
    results = read(COMMITTED / "square_cube")
    assert re.fullmatch("[0-9a-f]{7,}", results.commit)
    assert f"commit {results.commit}." in write("square_cube", tmp_path, results, {})
    results.commit = "1234567 with changes"
    assert "commit 1234567 with changes." in write("square_cube", tmp_path, results, {})
    assert read(tmp_path).commit == results.commit


def test_a_value_that_nobody_has_simulated_is_refused():
    job = Job("Fleet(n_stages=3)", 1, lambda: [1.23456789012])
    with pytest.raises(BadInput, match="has no values for Fleet"):
        Results({}).get(job)
    assert Results().get(job) == [1.23456789]


def test_values_that_a_page_lacks_are_added_with_their_own_commit(tmp_path):
    (tmp_path / FILE).write_text('{"commit": "1111111"}\n{"of": "a", "values": [1.0]}\n')
    jobs = [Job("a", 1, lambda: [5.0]), Job("b", 1, lambda: [2.0]), Job("c", 1, lambda: [3.0])]
    results = read(tmp_path, adds="2222222")
    results.fill(jobs[:2])
    (tmp_path / FILE).write_text(results.lines())
    assert results.commits() == "1111111, 1 of 2 at 2222222"
    results = read(tmp_path, adds="3333333")
    assert [results.get(job) for job in jobs] == [[1.0], [2.0], [3.0]]
    assert results.commits() == "1111111, 1 of 3 at 2222222, 1 of 3 at 3333333"
    again = Results(commit=results.commit, added=results.added)  # as --check makes them
    again.fill(jobs)
    assert again.lines() == results.lines().replace("1.0", "5.0")


def test_a_sample_is_of_small_jobs_and_spread_over_all():
    results = Results()
    for size in range(100):
        results.get(Job(str(size), size, lambda: [0.0]))
    assert [job.n_works for job in results.sample(4, 39)] == [0, 10, 20, 30]
