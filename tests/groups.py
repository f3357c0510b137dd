"""The distribution of tests over the processes of a session: one process runs all of a group, others come singly.

pytest-xdist 3.8 finds the group of a test at the end of its name, where pytest 9.2 no longer has it. Without this file
`xdist_group` has no effect there, and each process compiles what the others compile. So the group is read from the file
of the tests, which names it as its `pytestmark`, or follows from their folder.
"""

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

MARK = re.compile(r'^pytestmark = pytest.mark.xdist_group\("(\w+)"\)', re.MULTILINE)
OF_FOLDERS = {"planner": "kernels"}  # compiled by numba, and kept on disk for later sessions


@functools.cache
def group_of(path: Path) -> str:
    """The group of a file of tests, "" for none."""
    marked = MARK.search(path.read_text())
    return marked[1] if marked else OF_FOLDERS.get(path.parent.name, "")


class Groups(LoadScopeScheduling):
    """A scheduler of pytest-xdist; see the module text."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(self.config.rootpath / nodeid.partition("::")[0]) or nodeid
