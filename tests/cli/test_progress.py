"""What is said while files are read."""

import io

import pytest

from jaxdt.cli import progress
from jaxdt.cli.progress import ReadingProgress

MB = 1_000_000


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds, in a list of one."""
    now_s = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.fixture
def paths(tmp_path):
    """Two files of 50 MB, which take no room."""
    found = [tmp_path / "a", tmp_path / "b"]
    for path in found:
        with path.open("wb") as file:
            file.truncate(50 * MB)
    return found


def said(monkeypatch, clock, paths, stderr: io.StringIO, seconds: int) -> str:
    """What is said while 10 MB are read in each second, twice 100 MB at most."""
    monkeypatch.setattr(progress.sys, "stderr", stderr)
    with ReadingProgress(paths, ("checked", "encoded")) as told:
        for _ in range(seconds):
            clock[0] += 1
            told.read(10 * MB)
    return stderr.getvalue()


def test_a_terminal_has_one_line_that_goes_away(monkeypatch, clock, paths):
    drawn = said(monkeypatch, clock, paths, Terminal(), 13).split("\r\x1b[K")
    assert drawn[:3] == ["", "checked: 20 of 100 MB, 10.0 MB/s, 8 s left", "checked: 30 of 100 MB, 10.0 MB/s, 7 s left"]
    assert drawn[-2:] == ["encoded: 30 of 100 MB, 10.0 MB/s, 7 s left", ""] and "\n" not in "".join(drawn)


def test_a_log_has_a_line_every_half_minute(monkeypatch, clock, paths):
    for path in paths:
        with path.open("r+b") as file:
            file.truncate(200 * MB)
    assert said(monkeypatch, clock, paths, io.StringIO(), 65).splitlines() == [
        "checked: 300 of 400 MB, 10.0 MB/s, 10 s left",
        "encoded: 200 of 400 MB, 10.0 MB/s, 20 s left",
    ]


def test_what_takes_no_time_says_nothing_and_what_has_no_size_says_less(monkeypatch, clock, paths, tmp_path):
    assert said(monkeypatch, clock, paths, Terminal(), 1) == ""
    assert said(monkeypatch, clock, [tmp_path / "none"], io.StringIO(), 30) == "read: 300 MB, 10.0 MB/s\n"
