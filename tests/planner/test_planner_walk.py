"""The walk through the library in docs/planner.md, and that of pools in docs/planner_fleets.md, run as written."""

import re
from pathlib import Path

import pytest

import planner

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_walk_runs(tmp_path, monkeypatch):
    """All blocks in one session, in a folder that has configs/ as the repository has. Their searches, which would keep
    all cores busy until the time is up, get a tenth of it."""
    stop = planner.Stop
    monkeypatch.setattr(planner, "Stop", lambda time_s: stop(time_s / 10))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    pools = (ROOT / "docs" / "planner_fleets.md").read_text().partition("## Pools")[2]
    blocks = BLOCK.findall((ROOT / "docs" / "planner.md").read_text() + pools)
    assert len(blocks) >= 4
    session = {}
    for block in blocks:
        exec(compile(block, "docs", "exec"), session)
    assert session["found"].moves and session["result"].step_s > 0 and session["pool"].levels
