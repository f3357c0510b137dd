"""The walk through the library in docs/planner.md runs as it is written."""

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
    blocks = BLOCK.findall((ROOT / "docs" / "planner.md").read_text())
    assert len(blocks) >= 3
    session = {}
    for block in blocks:
        exec(compile(block, "docs/planner.md", "exec"), session)
    assert session["found"].moves and session["result"].step_s > 0 and session["pool"].levels
