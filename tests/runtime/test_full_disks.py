"""A disk that refuses a file for people costs that file, and neither the process nor the run."""

import errno
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import RefusedReport, WriteFailedReport
from jaxdt.protocol.trace import Trace, read
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.reporting import metrics as metrics_module
from jaxdt.runtime.reporting.console import print_line
from jaxdt.runtime.reporting.metrics import Metrics
from jaxdt.runtime.storage import checkpointer as checkpointer_module
from jaxdt.runtime.storage import durable
from jaxdt.runtime.storage.checkpointer import Checkpointer
from jaxdt.runtime.storage.durable import LateFile, append_whole

needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is full")


class FullDisk:
    """Stands in for `append_whole`: while `is_full`, the file takes half of the content and fails."""

    def __init__(self):
        self.is_full = False

    def __call__(self, file, content, size):
        append_whole(FullFile(file) if self.is_full else file, content, size)


class FullFile:
    def __init__(self, file):
        self._file = file
        self.truncate, self.seek = file.truncate, file.seek

    def write(self, content):
        self._file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch):
    found = FullDisk()
    for module in (durable, metrics_module):
        monkeypatch.setattr(module, "append_whole", found)
    return found


class OneEvent:
    """A machine that does `actions` and stops."""

    def __init__(self, *actions):
        self.actions = actions

    def handle(self, now_s, event):
        return [*self.actions, ev.Stop(0, "done")] if isinstance(event, ev.Started) else []


class NoTransport:
    def close(self, flush_s):
        pass


def run(machine, trace=lambda line: None, **options):
    """The end of a loop with this machine, and its reports."""
    found = []
    loop = Loop(-1, machine, Trace(trace), found.append, **options)
    loop.transport = NoTransport()
    return loop.run(""), found


@needs_dev_full
def test_a_trace_on_a_full_disk_ends_nobody(tmp_path):
    (tmp_path / "coordinator.jsonl").symlink_to("/dev/full")
    problems = []
    trace = LateFile(tmp_path / "coordinator.jsonl", problems.append, by_line=True)
    stop, found = run(OneEvent(RefusedReport("a"), RefusedReport("b")), trace.write)
    assert stop == ev.Stop(0, "done") and found == [RefusedReport("a"), RefusedReport("b")]
    assert problems == [f"{tmp_path / 'coordinator.jsonl'}: No space left on device"]
    trace.close()


def test_a_trace_has_no_half_line_and_goes_on_when_there_is_room_again(tmp_path, disk):
    problems = []
    path = tmp_path / "trace.jsonl"
    file = LateFile(path, problems.append, by_line=True)
    trace = Trace(file.write)
    for number in range(6):
        disk.is_full = number in (1, 2, 4)
        trace.report(0, float(number), RefusedReport(str(number)))
    file.close()
    assert [record["t"] for record in read(path.read_text().splitlines())] == [0.0, 3.0, 5.0]
    assert problems == [f"{path}: No space left on device"] * 2


def test_metrics_that_find_no_room_wait_for_it(tmp_path, disk):
    problems = []
    steps = [{"step": k, "loss": 1.5} for k in range(6)]
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 0, problems.append) as metrics:
        for step in steps[:5]:
            disk.is_full = step["step"] >= 2
            metrics.add(step)
        assert list(metrics) == steps[:5] and len(path.read_text().splitlines()) == 2
        metrics.cut(4)
        disk.is_full = False
        for step in steps[4:]:
            metrics.add(step)
        assert list(metrics) == steps
    assert len(path.read_text().splitlines()) == 6 and problems == [f"{path}: No space left on device"]


@needs_dev_full
def test_a_log_on_a_full_disk_ends_nobody(monkeypatch):
    with open("/dev/full", "w") as full:
        with pytest.raises(OSError):
            print("x", file=full, flush=True)
        monkeypatch.setattr(sys, "stdout", full)
        for _ in range(3):
            print_line("x" * 5000)
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # so that it can be closed


def test_a_checkpoint_that_cannot_be_marked_complete_ends_nobody():
    class Writer(Checkpointer):
        disk = ""

        def mark_complete(self, checkpoint, post):
            raise OSError(errno.ENOSPC, "No space left on device", "complete.json")

    writer = Writer(Path("/runs/x"), "r", {}, 2, (1, None))
    stop, found = run(OneEvent(ev.MarkCheckpoint(ev.Checkpoint(2))), checkpointer=writer)
    assert stop == ev.Stop(0, "done")
    assert found == [WriteFailedReport("checkpoint of 2 steps: complete.json: No space left on device")]


def test_a_checkpoint_for_which_there_is_no_thread_fails_alone(tmp_path, monkeypatch):
    class Store:
        def state_of(self, version):
            return ({}, ())

    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    outcomes = []
    writer = Checkpointer(tmp_path, "r", {}, 1, (1, 0))
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    for version in (2, 4):
        writer.save(ev.WriteCheckpoint(version), Store(), outcomes.append)
        writer.wait()
    assert [type(outcome) for outcome in outcomes] == [ev.CheckpointFailed] * 2
    assert outcomes[0].reason.endswith("can't start new thread")


def test_a_checkpoint_of_a_state_that_has_changed_fails_and_is_never_written(tmp_path):
    """A disk that was full may refuse it until the next step has been applied."""

    class Store:
        def state_of(self, version):
            raise LookupError(f"the state is that of 5 steps by now, not of {version}")

    outcomes = []
    Checkpointer(tmp_path, "r", {}, 1, (1, 0)).save(ev.WriteCheckpoint(4), Store(), outcomes.append)
    (failed,) = outcomes
    assert failed.version == 4 and failed.reason.endswith("/stage_0: the state is that of 5 steps by now, not of 4")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("error", "reason"), [
    (OSError(errno.ESTALE, "Stale file handle"), "/runs/x: Stale file handle"),
    (OSError("odd"), "/runs/x: odd"),
    (MemoryError(), "memory: the system gave this process no more (MemoryError)"),
])  # fmt: skip
def test_the_others_are_told_of_an_error_of_the_system(error, reason):
    class Machine:
        heard = ()

        def handle(self, now_s, event):
            self.heard += (event,) if isinstance(event, ev.Interrupted) else ()
            return []

    class Durable:
        def put(self, name, value):
            raise error

    machine = Machine()
    loop = Loop(-1, machine, Trace(lambda line: None), print, durable=Durable(), run_dir=Path("/runs/x"))
    loop.transport = NoTransport()
    loop._durable_writes.put(("view", {}))
    with pytest.raises(type(error)):
        loop.run("")
    assert machine.heard == (ev.Interrupted(2, reason),)


def test_a_process_ends_after_its_old_checkpoints_are_deleted(tmp_path, monkeypatch):
    """It ends by os._exit, which waits for no thread."""
    is_closed, deleted = threading.Event(), []

    def prune(*_):
        assert is_closed.wait(60.0)
        time.sleep(0.2)
        deleted.append(True)

    class Transport(NoTransport):
        def close(self, flush_s):
            is_closed.set()

    monkeypatch.setattr(checkpointer_module, "prune", prune)
    machine = OneEvent(ev.MarkCheckpoint(ev.Checkpoint(3)))
    loop = Loop(0, machine, checkpointer=Checkpointer(tmp_path, "r", {}, 2, (1, None)))
    loop.transport = Transport()
    assert loop.run("") == ev.Stop(0, "done")
    assert deleted == [True]
