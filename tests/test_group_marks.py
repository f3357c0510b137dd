"""The groups of tests that one process of a session runs."""

from pathlib import Path
from types import SimpleNamespace

from groups import MARK, Groups

TESTS = Path(__file__).resolve().parent


def test_the_group_of_a_test_is_that_of_its_file_or_folder():
    root = SimpleNamespace(config=SimpleNamespace(rootpath=TESTS.parent))
    scope = lambda nodeid: Groups._split_scope(root, nodeid)  # noqa: E731
    assert scope("tests/sync/test_stash.py::test_it[a::b@c]") == "replicas_that_differ"
    assert scope("tests/planner/test_planner_cost.py::test_it") == "kernels"
    assert scope("tests/run/test_plan.py::test_it[1]") == "tests/run/test_plan.py::test_it[1]"


def test_every_mark_of_a_group_is_read():
    marked = [path for path in TESTS.rglob("test_*.py") if "mark.xdist_" + "group" in path.read_text()]
    assert len(marked) > 10 and all(MARK.search(path.read_text()) for path in marked)
