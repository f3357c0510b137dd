"""Errors of the system at a durable write: a second try where that is safe, else one line that names the file."""

import errno
import os
import pathlib

import pytest

from jaxdt.run.errors import BadInput
from jaxdt.run.run_folder import read_json
from jaxdt.runtime.storage import durable
from jaxdt.runtime.storage.durable import disk_id, fsync, refusal, write_durably


@pytest.fixture
def fault(monkeypatch):
    """Makes os.FUNCTION fail n times for a path that ends so, and counts the calls; the error names no file."""
    monkeypatch.setattr(durable, "RETRY_S", 0.0)

    def make(function, number, n_times, end):
        real, calls = getattr(os, function), []

        def failing(*arguments, **options):
            path = os.readlink(f"/proc/self/fd/{arguments[0]}") if function == "fsync" else str(arguments[0])
            if not path.endswith(end):
                return real(*arguments, **options)
            calls.append(path)
            if len(calls) <= n_times:
                raise OSError(number, os.strerror(number))
            return real(*arguments, **options)

        monkeypatch.setattr(os, function, failing)
        if function == "replace":
            monkeypatch.setattr(pathlib.Path, "replace", lambda path, target: failing(path, target))
        return calls

    return make


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.EINVAL, errno.EIO])
def test_a_folder_whose_fsync_failed_is_named_and_not_synced_again(tmp_path, fault, number):
    calls = fault("fsync", number, 1, tmp_path.name)
    with pytest.raises(OSError) as failed:
        write_durably(tmp_path / "a.json", b"new")
    assert refusal(failed.value, "run_dir") == f"{tmp_path}: {os.strerror(number)}" and len(calls) == 1


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(("number", "n_times", "is_written"), [
    (errno.ESTALE, 1, True),
    (errno.ETIMEDOUT, 1, True),
    (errno.ESTALE, 2, False),
    (errno.ENOSPC, 1, False),
])  # fmt: skip
def test_a_write_that_failed_in_passing_is_tried_once_more(tmp_path, fault, function, number, n_times, is_written):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    fault(function, number, n_times, ".tmp")
    if is_written:
        write_durably(path, b"new")
    else:
        with pytest.raises(OSError) as failed:
            write_durably(path, b"new")
        assert refusal(failed.value, "run_dir") == f"{path}: {os.strerror(number)}"
    assert path.read_bytes() == (b"new" if is_written else b"old") and list(tmp_path.iterdir()) == [path]


def test_the_file_of_a_disks_name_is_named(tmp_path, fault):
    fault("link", errno.EPERM, 1, ".tmp")
    with pytest.raises(OSError) as failed:
        disk_id(tmp_path)
    assert refusal(failed.value, "run_dir") == f"{tmp_path / 'disk_id'}: Operation not permitted"
    with pytest.raises(FileNotFoundError, match="none"):
        fsync(tmp_path / "none")


@pytest.mark.parametrize(("error", "line"), [
    (OSError(errno.ESTALE, "Stale file handle", "a"), "a: Stale file handle"),
    (OSError(errno.ESTALE, "Stale file handle"), "run_dir: Stale file handle"),
    (OSError("no more of it\nat line 3"), "run_dir: no more of it"),
    (OSError(), "run_dir: OSError"),
    (MemoryError("Unable to allocate 1.00 TiB"), "memory: the system gave this process no more (Unable to allocate "
     "1.00 TiB)"),
    (MemoryError(), "memory: the system gave this process no more (MemoryError)"),
])  # fmt: skip
def test_every_error_of_the_system_is_one_line(error, line):
    assert refusal(error, "run_dir") == line


def test_a_file_of_objects_in_objects_is_refused(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(BadInput, match="deep.json: cannot be read .objects or lists are nested too deeply.,"):
        read_json(tmp_path / "deep.json")
