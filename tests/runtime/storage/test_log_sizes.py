"""Traces and logs of a run that lasts do not grow without end."""

import pytest

from jaxdt.run.run_folder import kept_lines, older_part
from jaxdt.runtime.storage import durable
from jaxdt.runtime.storage.durable import LateFile, cut_log, refusal


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(durable, "LOG_BYTES_MAX", 1000)
    monkeypatch.setattr(durable, "BUFFERED_BYTES", 90)  # so that ten lines of ten bytes are written at a time


@pytest.mark.parametrize("by_line", [True, False])
def test_a_trace_keeps_its_newest_lines(tmp_path, by_line):
    path = tmp_path / "trace" / "peer_0.jsonl"
    file = LateFile(path, by_line=by_line)
    for i in range(1000):
        file.write(f"{i:09}\n")
    file.close()
    parts = [part.read_text() for part in (older_part(path), path) if part.exists()]
    assert all(len(part) <= 1000 for part in parts)
    lines = kept_lines(path)
    assert len(lines) >= 100 and [int(line) for line in lines] == list(range(1000 - len(lines), 1000))
    assert sorted(path.parent.iterdir()) == [file for file in sorted([path, older_part(path)]) if file.exists()]


def test_a_process_that_is_killed_loses_its_last_second(tmp_path, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(durable.time, "monotonic", lambda: now_s[0])
    file = LateFile(tmp_path / "peer_0.jsonl")
    for i in range(4):
        file.write(f"{i}\n")
        now_s[0] += 0.4
    file.write("4\n")
    on_the_disk = (tmp_path / "peer_0.jsonl").read_text()
    file.close()
    assert on_the_disk == "0\n1\n2\n3\n"


def test_a_file_that_goes_on_is_as_full_as_it_was(tmp_path):
    path = tmp_path / "peer_0.jsonl"
    path.write_text("x" * 995 + "\n")
    file = LateFile(path, appends=True, by_line=True)
    file.write("12345\n")
    file.write("next\n")
    file.close()
    assert (older_part(path).stat().st_size, path.read_text()) == (1002, "next\n")


def test_a_trace_that_begins_anew_leaves_no_older_part(tmp_path):
    path = tmp_path / "peer_0.jsonl"
    older_part(path).write_text("of an earlier run\n")
    file = LateFile(path)
    assert older_part(path).exists()
    file.write("first\n")
    file.close()
    assert not older_part(path).exists()


def test_a_log_is_cut_under_the_process_that_writes_it(tmp_path):
    path = tmp_path / "peer_0.log"
    with path.open("a", buffering=1) as log:
        log.write("x" * 998 + "\n")
        cut_log(path)
        assert not older_part(path).exists()
        log.write("y\n")
        cut_log(path)
        log.write("z\n")
    assert (older_part(path).stat().st_size, path.read_text()) == (1001, "z\n")


def test_a_file_whose_folder_was_moved_is_not_only_a_missing_file(tmp_path):
    with pytest.raises(OSError) as missing:
        (tmp_path / "metrics.jsonl").open()
    assert refusal(missing.value, "disk") == f"{tmp_path / 'metrics.jsonl'}: No such file or directory"
    with pytest.raises(OSError) as moved:
        (tmp_path / "run" / "metrics.jsonl").open("w")
    told = refusal(moved.value, "disk")
    assert f"{tmp_path / 'run'} is not there any more: it was moved or deleted meanwhile; a run that" in told
