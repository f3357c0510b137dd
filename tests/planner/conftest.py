"""One process of the test session runs the tests of the planner, so that each of its kernels is compiled once: side by
side they would all find the cache empty."""

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # the group is part of a test's name before the processes get to know it
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.xdist_group("kernels"))
