"""A coordinator finds in its folder the lock of another one, and the state of this run or of an earlier run."""

import json
import multiprocessing
import os
from types import SimpleNamespace

import pytest

from jaxdt.membership.run_state import CHECKPOINT, STEPS, TERM, VIEW
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import OutageReport, ReadyReport, StillReadyReport, UnreachedReport
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.exit_codes import ExitCode
from jaxdt.runtime.coordinator_folder import (
    begin_run,
    check_not_ended,
    drop_damaged,
    end_run,
    last_members,
    load_beginning,
    lock_folder,
)
from jaxdt.runtime.process import ending_with_the_run
from jaxdt.runtime.storage.checkpoint import mark_complete
from jaxdt.runtime.storage.durable import FileStore

PRUNED = "the checkpoint that the run began from is gone"


class Job(SimpleNamespace):
    """The part of a job that a coordinator's folder concerns. `checkpoint` is the one to resume from, or None if it
    has been deleted."""

    @property
    def start(self):
        if self.checkpoint is None:
            raise BadInput(PRUNED)
        return self.checkpoint


def job(tmp_path, run="run 2", checkpoint=ev.Checkpoint(6, 1)):
    resume = tmp_path if checkpoint != ev.Checkpoint() else None
    return Job(run=run, run_dir=tmp_path, resume=resume, checkpoint=checkpoint, data=SimpleNamespace(checksum="c"))


def view(number, n_committed):
    return serialize.write(ev.View(number, 1, 1, (ev.Member(0, 0, 1),), (1,), n_committed))


def begun(tmp_path, run="run 2"):
    """The folder of a run that resumed from version 6 and whose coordinator made a view durable."""
    store = FileStore(tmp_path / "coordinator")
    begin_run(job(tmp_path, run), store, load_beginning(job(tmp_path, run), store))
    store.put(TERM, 1)
    store.put(VIEW, view(3, 9))
    return store


def test_a_restarted_coordinator_knows_the_newest_complete_checkpoint(tmp_path):
    store = begun(tmp_path)
    store.put(CHECKPOINT, serialize.write(ev.Checkpoint(8, 1, n_reseeds=1)))
    found = load_beginning(job(tmp_path, checkpoint=None), store)
    assert found.durable_state is not None and found.durable_state.checkpoint == ev.Checkpoint(8, 1, n_reseeds=1)


def test_a_restarted_coordinator_of_a_resumed_run_goes_on_from_its_own_state(tmp_path):
    found = load_beginning(job(tmp_path, checkpoint=None), begun(tmp_path))
    assert (found.start.checkpoint, found.start.last_term) == (ev.Checkpoint(6, 1), 1)
    assert found.durable_state is not None and found.durable_state.checkpoint is None
    assert (found.durable_state.view.number, found.durable_state.view.n_committed) == (3, 9)


def test_the_state_of_an_earlier_run_is_not_that_of_a_resumed_one(tmp_path):
    store = begun(tmp_path, run="run 1")
    resumed = job(tmp_path, checkpoint=ev.Checkpoint(8, 1))
    beginning = load_beginning(resumed, store)
    assert beginning.durable_state is None and beginning.start.last_term == 1
    begin_run(resumed, store, beginning)
    assert [store.get(name) for name in (VIEW, STEPS, CHECKPOINT)] == [None] * 3
    again = load_beginning(resumed, store)  # the coordinator died before its first view
    assert again.durable_state is None and again.start.checkpoint.version == 8


def test_a_run_that_has_ended_has_nothing_to_go_on_from(tmp_path):
    store = begun(tmp_path)
    end_run(store)
    assert load_beginning(job(tmp_path), store).durable_state is None


def test_a_resumed_run_that_has_ended_is_not_done_again_by_its_own_flags(tmp_path):
    store = begun(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n" * 9)
    end_run(store)
    with pytest.raises(BadInput, match="holds 9 steps of a run that has ended"):
        load_beginning(job(tmp_path), store)
    later = load_beginning(job(tmp_path, checkpoint=ev.Checkpoint(9, 1)), store)
    assert later.durable_state is None and later.start.checkpoint.version == 9
    assert load_beginning(job(tmp_path, run="run 3"), store).start.checkpoint.version == 6
    with pytest.raises(BadInput, match="holds 9 steps of a run that has ended"):
        load_beginning(job(tmp_path, checkpoint=None), store)  # its checkpoint is gone


def test_a_peer_of_a_run_that_has_ended_does_not_wait_for_its_coordinator(tmp_path):
    check_not_ended(job(tmp_path))
    assert not (tmp_path / "coordinator").exists()
    store = begun(tmp_path)
    check_not_ended(job(tmp_path))
    end_run(store)
    with pytest.raises(BadInput, match="the run in .* has ended"):
        check_not_ended(job(tmp_path))
    check_not_ended(job(tmp_path, run="run 3"))


@pytest.mark.parametrize("waits", [UnreachedReport(116.0), StillReadyReport(10.0), OutageReport(4.0, 300.0)])
def test_a_peer_that_waits_ends_once_the_run_has_ended(tmp_path, waits):
    """It may have loaded jax, or have been paused, while the coordinator told the others."""
    store, reports, ends = begun(tmp_path), [], []
    report = ending_with_the_run(job(tmp_path), reports.append, ends.append)
    report(waits)
    assert (reports, ends) == ([waits], [])
    end_run(store)
    report(ReadyReport("cpu"))
    report(waits)
    assert reports == [waits, ReadyReport("cpu")]
    assert [(end.code, "has ended" in end.reason) for end in ends] == [(ExitCode.NOT_JOINED, True)]


def test_the_steps_of_a_run_that_has_ended_are_not_replaced(tmp_path):
    """The same command line once more begins a run from the beginning, and would empty the metrics."""
    store = begun(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    assert load_beginning(job(tmp_path, checkpoint=ev.Checkpoint()), store).durable_state, "a coordinator that died"
    end_run(store)
    with pytest.raises(BadInput, match="holds 2 steps of a run that has ended; to begin again: launch.py with --overw"):
        load_beginning(job(tmp_path, checkpoint=ev.Checkpoint()), store)
    (tmp_path / "summary.json").write_text('{"reason": "stopped by an operator"}')
    with pytest.raises(BadInput, match="has ended: stopped by an operator; .* holds no complete checkpoint"):
        load_beginning(job(tmp_path, checkpoint=ev.Checkpoint()), store)
    assert load_beginning(job(tmp_path, run="run 3"), store).durable_state is None, "a resumed run"


def _lock(folder, sender):
    try:
        lock_folder(folder)
        sender.send("")
    except BadInput as error:
        sender.send(str(error))


def test_a_second_coordinator_is_told_who_has_the_folder(tmp_path):
    lock = lock_folder(tmp_path / "coordinator")
    context = multiprocessing.get_context("spawn")
    for is_held in (True, False):
        receiver, sender = context.Pipe(duplex=False)
        other = context.Process(target=_lock, args=(tmp_path / "coordinator", sender))
        other.start()
        refusal = receiver.recv()
        other.join()
        assert bool(refusal) == is_held
        if is_held:
            assert f"{tmp_path} has a coordinator already (process {os.getpid()} on " in refusal
            os.close(lock)


@pytest.mark.parametrize("content", ["7", '{"version": 6}', '"x"'])
def test_a_damaged_start_is_refused_by_name(tmp_path, content):
    store = begun(tmp_path)
    (tmp_path / "coordinator" / "start.json").write_text(content)
    with pytest.raises(BadInput, match="start"):
        load_beginning(job(tmp_path), store)
    assert json.loads((tmp_path / "coordinator" / "run.json").read_text())["value"] == "run 2"


@pytest.mark.parametrize("name", [TERM, "run", "start", "ended", "history", VIEW, STEPS, "rows", CHECKPOINT])
def test_a_run_that_is_resumed_begins_without_the_damaged_files_of_the_one_before(tmp_path, name):
    store, path = begun(tmp_path, "run 1"), tmp_path / "coordinator" / f"{name}.json"
    end_run(store)
    path.write_text('{"sha256": "ab')
    (line,) = drop_damaged(tmp_path)
    assert str(path) in line and line.endswith("deleted, since a run that is resumed does not need it")
    assert not drop_damaged(tmp_path) and store.get("view") == (None if name == VIEW else view(3, 9))
    beginning = load_beginning(job(tmp_path), store)
    assert beginning.durable_state is None and beginning.start.checkpoint.version == 6
    assert beginning.start.last_term == 1, "where the term is damaged, the last view has it"


@pytest.mark.parametrize("name", ["operator", "issued"])
def test_a_damaged_file_that_a_resumed_run_needs_is_refused_with_the_remedy(tmp_path, name):
    begun(tmp_path)
    path = tmp_path / "coordinator" / f"{name}.json"
    path.write_text("")
    with pytest.raises(BadInput, match=f"{name}.json: cannot be read.*; restore it, or delete {path}: then "):
        drop_damaged(tmp_path)


def test_without_a_coordinators_folder_on_this_host_nothing_is_damaged(tmp_path):
    assert drop_damaged(tmp_path) == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [TERM, "run", "operator", VIEW])
def test_a_coordinator_that_is_started_again_names_a_remedy_for_a_damaged_file(tmp_path, name):
    store = begun(tmp_path)
    (tmp_path / "run").write_text("run 2\n")
    (tmp_path / "config.json").write_text('{"train": {"steps": 9}}')
    (tmp_path / "coordinator" / f"{name}.json").write_text("[")
    mark_complete(tmp_path, ev.Checkpoint(4), {})
    remedy = "restore that file; or to go on from step 4: .*launch.py --resume"
    with pytest.raises(BadInput, match=f"{name}.json: cannot .*; {remedy}"):
        load_beginning(job(tmp_path), store)


def test_the_members_of_a_view_of_an_earlier_protocol_are_read(tmp_path):
    """Its rounds have other fields, which a resume and a report do not need."""
    assert last_members(tmp_path) == ()
    member = ev.Member(3, 1, admission=1, address="host:7701")
    stored = serialize.write(ev.View(2, 1, 0, (member,), (1,), n_committed=1))
    stored["records"] = [{"step": 0, "rounds": [{"step": 0, "group": "stage1", "group_view": 1, "attempt": 0}]}]
    FileStore(tmp_path / "coordinator").put(VIEW, stored)
    assert last_members(tmp_path) == (member,)
