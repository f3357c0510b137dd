import json
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import jax
import numpy as np
import pytest

from jaxdt.model.gpt import init_stage, stage_entries
from jaxdt.model.optim import optimizer
from jaxdt.protocol.events import CheckpointFailed, WroteCheckpoint
from jaxdt.runtime.storage import checkpoint as checkpoint_module
from jaxdt.runtime.storage.checkpoint import (
    Checkpointer,
    Stamp,
    check_resumable,
    complete_checkpoints,
    join_entries,
    load_entries,
    mark_complete,
    newest,
    prune,
    split_entries,
    step_folder,
)
from jaxdt.spec.errors import BadInput
from jaxdt.spec.model import GPTConfig
from jaxdt.spec.optim import OptimConfig

ROOT = Path(__file__).resolve().parents[3]
MODEL = GPTConfig(n_layers=3, d_model=8, n_heads=2, d_ff=8, seq_len=4, vocab_size=12, tied_head=True)
OPTIMIZERS = [
    OptimConfig("adamw", weight_decay=0.1, lr_schedule="cosine", decay_steps=9),
    OptimConfig("lamb", weight_decay=0.1),
    OptimConfig("sgd", weight_decay=0.1),
]
MARK = {"generation": 0, "stages": 1}
ABOUT = {"model": {"n_layers": 3, "d_model": 8}, "optimizer": "adamw", "data": "abc"}


def blank(lo, hi, optim):
    """Parameters and optimizer state of a stage as they are before training."""
    params = init_stage(MODEL, lo, hi, 0)
    return params, optimizer(optim).init(params)


@pytest.fixture(scope="module")
def trained():
    """(optim) -> parameters and state of the whole model with a different number everywhere, counts at 7."""

    def of(optim):
        tree = blank(0, MODEL.n_layers, optim)
        rng = np.random.default_rng(0)
        fill = lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) if leaf.ndim else np.int32(7)  # noqa: E731
        return jax.tree.map(fill, tree)

    return of


def assert_equal(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert jax.tree.structure(got) == jax.tree.structure(expected)


def stage_of(entries, lo, hi, optim):
    return join_entries({name: entries[name] for name in stage_entries(MODEL, lo, hi)}, blank(lo, hi, optim))


def save_stages(run_dir, cuts, version, params, opt_state, optim):
    """Each stage writes its part of the whole model's state; the events that come of it."""
    entries, told = split_entries((params, opt_state)), queue.SimpleQueue()
    for stage, (lo, hi) in enumerate(zip(cuts, cuts[1:], strict=False)):
        store = SimpleNamespace(parameter_versions=SimpleNamespace(state=stage_of(entries, lo, hi, optim)))
        Checkpointer(run_dir, ABOUT, 2, stage).save(version, store, told.put)
    return [told.get(timeout=60) for _ in cuts[1:]]


# ------------------------------------------------------------------------------------------------------------ entries


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: optim.name)
def test_join_is_the_inverse_of_split(optim, trained):
    params, opt_state = trained(optim)
    entries = split_entries((params, opt_state))
    assert sorted(entries) == stage_entries(MODEL, 0, 3)
    assert_equal(join_entries(entries, blank(0, 3, optim)), (params, opt_state))


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: optim.name)
def test_an_entry_does_not_depend_on_the_cut(optim, trained):
    """Cut into stages, split there and joined again, the whole is what it was; a middle stage has one entry only."""
    params, opt_state = trained(optim)
    whole, again = split_entries((params, opt_state)), {}
    for lo, hi in ((0, 1), (1, 2), (2, 3)):
        again |= split_entries(stage_of(whole, lo, hi, optim))
    assert_equal(again, whole)


def test_moments_go_with_their_parameters(trained):
    params, opt_state = trained(OPTIMIZERS[0])
    entry = split_entries((params, opt_state))["tok"]
    matrices = [leaf for leaf in entry["optimizer"] if leaf.ndim]
    assert [leaf.shape for leaf in matrices] == [params["tok"].shape] * 2
    np.testing.assert_array_equal(matrices[0], opt_state[0].mu["tok"])
    assert all(leaf == 7 for leaf in entry["optimizer"] if not leaf.ndim)


# -------------------------------------------------------------------------------------------------------------- files


def test_two_stages_save_and_other_cuts_load(tmp_path, trained):
    optim = OPTIMIZERS[0]
    params, opt_state = trained(optim)
    told = save_stages(tmp_path, [0, 1, 3], 5, params, opt_state, optim)
    assert [(type(event), event.version) for event in told] == [(WroteCheckpoint, 5)] * 2
    mark_complete(tmp_path, 5, ABOUT | MARK | {"stages": 2})
    folder = newest(tmp_path)
    assert_equal(join_entries(load_entries(folder), blank(0, 3, optim)), (params, opt_state))
    whole = split_entries((params, opt_state))
    for lo, hi in ((0, 2), (2, 3), (1, 2)):
        names = stage_entries(MODEL, lo, hi)
        got = join_entries(load_entries(folder, names), blank(lo, hi, optim))
        assert_equal(got, stage_of(whole, lo, hi, optim))


def test_an_entry_that_is_not_there_is_named(tmp_path, trained):
    save_stages(tmp_path, [0, 1], 5, *trained(OPTIMIZERS[2]), OPTIMIZERS[2])
    mark_complete(tmp_path, 5, ABOUT | MARK)
    with pytest.raises(BadInput, match="00000005: holds no block_002, expected all of block_000, block_002"):
        load_entries(step_folder(tmp_path, 5), ["block_000", "block_002"])


def test_the_state_may_change_once_it_is_copied(tmp_path, trained):
    """The training goes on, and an update gives the buffers away while the thread still writes."""
    optim = OPTIMIZERS[2]
    params, opt_state = trained(optim)
    expected = jax.tree.map(np.array, split_entries((params, opt_state)))
    told = queue.SimpleQueue()
    checkpointer = Checkpointer(tmp_path, ABOUT, 2, 0)
    checkpointer.wait()
    checkpointer.save(1, SimpleNamespace(parameter_versions=SimpleNamespace(state=(params, opt_state))), told.put)
    checkpointer.wait()
    jax.tree.map(lambda leaf: leaf.fill(0) if leaf.ndim else None, params)
    assert told.get(timeout=60).version == 1
    mark_complete(tmp_path, 1, ABOUT | MARK)
    assert_equal(load_entries(step_folder(tmp_path, 1)), expected)


def test_a_slow_disk_holds_up_the_next_update_instead_of_filling_the_memory(tmp_path, trained, monkeypatch):
    params, opt_state = trained(OPTIMIZERS[2])
    store, told = SimpleNamespace(parameter_versions=SimpleNamespace(state=(params, opt_state))), queue.SimpleQueue()
    disk, updated = threading.Event(), threading.Event()
    monkeypatch.setattr(checkpoint_module, "digest", lambda entry: (disk.wait(60), 0)[1])
    checkpointer = Checkpointer(tmp_path, ABOUT, 2, 0)
    for version in (1, 2):
        checkpointer.save(version, store, told.put)
        checkpointer.wait()
    checkpointer.save(3, store, told.put)
    update = threading.Thread(target=lambda: (checkpointer.wait(), updated.set()))
    update.start()
    assert not updated.is_set() and told.empty()
    disk.set()
    assert [told.get(timeout=60).version for _ in range(3)] == [1, 2, 3]
    update.join()


def test_a_disk_that_refuses_is_told_and_not_raised(tmp_path, trained):
    (tmp_path / "checkpoints").write_text("a file where a folder must be")
    (told,) = save_stages(tmp_path, [0, 3], 1, *trained(OPTIMIZERS[2]), OPTIMIZERS[2])
    assert isinstance(told, CheckpointFailed) and told.version == 1


LOAD_ALL = """
import sys
from pathlib import Path
from jaxdt.spec.errors import BadInput
from jaxdt.runtime.storage.checkpoint import load_entries
for folder in sys.argv[1:]:
    try:
        print(len(load_entries(Path(folder))), "entries")
    except BadInput as error:
        print("refused", len(str(error).splitlines()))
"""


def test_no_numbers_come_out_of_a_damaged_part(tmp_path, trained):
    """Versions: 1 whole, 2 with truncated data, 3 without, 4 with numbers that are not those of its digest. In its own
    process: after a failed read tensorstore goes on to call into Orbax's closed event loop, when it comes to it."""
    folders = [step_folder(tmp_path, version) for version in (1, 2, 3, 4)]
    for version in (1, 2, 3, 4):
        save_stages(tmp_path, [0, 3], version, *trained(OPTIMIZERS[2]), OPTIMIZERS[2])
        mark_complete(tmp_path, version, ABOUT | MARK)
    for path in (folders[1] / "stage_0" / "d").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    shutil.rmtree(folders[2] / "stage_0" / "d")
    digests = json.loads((folders[3] / "stage_0.json").read_text())
    (folders[3] / "stage_0.json").write_text(json.dumps(digests | {"tok": digests["tok"] ^ 1}))
    command = [sys.executable, "-c", LOAD_ALL, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    results = [line.split()[:2] for line in done.stdout.splitlines()]
    assert results[0] == [str(len(stage_entries(MODEL, 0, 3))), "entries"]
    assert results[1:] == [["refused", "1"]] * 3


def test_parts_of_an_earlier_attempt_on_another_cut_do_not_count(tmp_path, trained):
    """A run of three stages was killed while it wrote: one part is whole, one begun. The next run has one stage."""
    optim = OPTIMIZERS[2]
    params, opt_state = trained(optim)
    save_stages(tmp_path, [0, 1, 2, 3], 5, jax.tree.map(np.zeros_like, params), opt_state, optim)
    folder = step_folder(tmp_path, 5)
    (folder / "stage_1").rename(folder / "stage_1.orbax-checkpoint-tmp")
    (folder / "stage_2.json").unlink()
    save_stages(tmp_path, [0, 3], 5, params, opt_state, optim)
    mark_complete(tmp_path, 5, ABOUT | MARK)
    assert_equal(join_entries(load_entries(folder), blank(0, 3, optim)), (params, opt_state))


def test_what_is_written_again_does_not_count_until_it_is_whole(tmp_path, trained):
    save_stages(tmp_path, [0, 3], 5, *trained(OPTIMIZERS[2]), OPTIMIZERS[2])
    mark_complete(tmp_path, 5, ABOUT | MARK)
    save_stages(tmp_path, [0, 1, 3], 5, *trained(OPTIMIZERS[2]), OPTIMIZERS[2])
    assert complete_checkpoints(tmp_path) == []


def test_two_savers_of_one_part_do_not_get_into_each_others_way(tmp_path, trained):
    """One was taken for dead and is not: whoever is last, the part is whole, and nothing else is left."""
    optim, state = OPTIMIZERS[2], trained(OPTIMIZERS[2])
    abandoned = step_folder(tmp_path, 5) / "stage_0.dead.orbax-checkpoint-tmp"
    abandoned.mkdir(parents=True)
    posted = queue.Queue()
    savers = [Checkpointer(tmp_path, ABOUT | MARK | {"stages": 1}, 2, 0) for _ in range(4)]
    for saver in savers:
        saver.save(5, SimpleNamespace(parameter_versions=SimpleNamespace(state=state)), posted.put)
    assert [posted.get(timeout=60) for _ in savers] == [WroteCheckpoint(5, ANY)] * 4
    savers[0].mark_complete(5, 0)
    folder = newest(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["complete.json", "stage_0", "stage_0.json"]
    assert_equal(join_entries(load_entries(folder), blank(0, 3, optim)), state)


def test_who_fails_to_write_what_others_have_completed_has_not_failed(tmp_path, trained, monkeypatch):
    state, posted = trained(OPTIMIZERS[2]), queue.Queue()
    folder_of(tmp_path, 5)
    saver = Checkpointer(tmp_path, ABOUT | MARK, 2, 0)

    def swept(own, folder):
        mark_complete(tmp_path, 5, ABOUT | MARK)
        raise FileNotFoundError(2, "swept up", str(own))

    monkeypatch.setattr(checkpoint_module, "put_in_place", swept)
    saver.save(5, SimpleNamespace(parameter_versions=SimpleNamespace(state=state)), posted.put)
    assert posted.get(timeout=60) == WroteCheckpoint(5, ANY)


# ------------------------------------------------------------------------------------------------ what counts as one


def folder_of(run_dir, version, complete=True, **about):
    folder = step_folder(run_dir, version)
    (folder / "stage_0").mkdir(parents=True)
    if complete:
        mark_complete(run_dir, version, ABOUT | MARK | about)
    return folder


def test_newest_is_the_newest_complete_one(tmp_path):
    with pytest.raises(BadInput, match="holds no complete checkpoint"):
        newest(tmp_path)
    folder_of(tmp_path, 3, complete=False)
    with pytest.raises(BadInput, match="holds no complete checkpoint"):
        newest(tmp_path)
    folders = [folder_of(tmp_path, version) for version in (9, 100)]
    (folder_of(tmp_path, 200, complete=False) / "complete.json.tmp").write_text("{")
    assert newest(tmp_path) == folders[1]
    assert complete_checkpoints(tmp_path) == folders


def test_prune_keeps_the_newest_and_what_is_under_way(tmp_path):
    old = [folder_of(tmp_path, 1), folder_of(tmp_path, 2, complete=False), folder_of(tmp_path, 3)]
    kept = [folder_of(tmp_path, 4), folder_of(tmp_path, 5), folder_of(tmp_path, 6, complete=False)]
    assert prune(tmp_path, 2) == old
    assert sorted(tmp_path.glob("checkpoints/*")) == kept


def test_prune_deletes_nothing_without_a_complete_checkpoint(tmp_path):
    folder_of(tmp_path, 1, complete=False)
    assert prune(tmp_path, 1) == []


def test_mark_complete_of_a_checkpointer_stamps_and_prunes(tmp_path):
    for version in (1, 2, 3):
        folder_of(tmp_path, version, complete=version < 3)
    Checkpointer(tmp_path, ABOUT | MARK, 2).mark_complete(3, 4)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["00000002", "00000003"]
    assert check_resumable(newest(tmp_path), ABOUT) == Stamp(3, 4)
    assert json.loads((newest(tmp_path) / "complete.json").read_text())["optimizer"] == "adamw"


def test_one_that_another_process_of_the_host_has_deleted_is_not_marked(tmp_path):
    """Its parts were marked, and newer ones too, before this process heard of it."""
    folder_of(tmp_path, 3)
    Checkpointer(tmp_path, ABOUT | MARK, 1).mark_complete(2, 0)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["00000003"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b'{"version": 1, "linea', "cannot be read"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"[1]", "format: got None, expected 1.0 to 1.1"),
        (b'{"version": 1, "generation": 0, "stages": 1, "model": {}}', "format: got None, expected 1.0 to 1.1"),
        (b'{"format": "1.2", "version": 1}', "format: got '1.2', expected 1.0 to 1.1"),
        (b'{"format": "2.0", "version": 1}', "format: got '2.0', expected 1.0 to 1.1"),
        (b'{"format": "1.1"}', "version: got None, expected int"),
        (b'{"format": "1.0", "version": 1, "generation": 0, "stages": "1"}', "stages: got '1', expected int"),
        (
            b'{"format": "1.0", "version": 9, "generation": 0, "stages": 1, "model": {}}',
            "version: got 9, expected the 00000001 of its",
        ),
    ],
)
def test_a_damaged_mark_is_named(tmp_path, content, message):
    folder = folder_of(tmp_path, 1)
    (folder / "complete.json").write_bytes(content)
    for read in (lambda: check_resumable(folder, ABOUT), lambda: load_entries(folder)):
        with pytest.raises(BadInput, match=f"00000001/complete.json: {message}") as caught:
            read()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"model": {"n_layers": 3, "d_model": 16}}, "made with model.d_model 8, the config has 16"),
        ({"model": {"n_layers": 3}}, "made with model.d_model 8, the config has None"),
        ({"optimizer": "sgd"}, "made with optimizer 'adamw', this run has 'sgd'"),
        ({"data": "xyz"}, "made with data 'abc', this run has 'xyz'"),
    ],
)
def test_another_run_may_not_resume_it(tmp_path, about, message):
    folder = folder_of(tmp_path, 1)
    assert check_resumable(folder, ABOUT) == Stamp(1, 0)
    with pytest.raises(BadInput, match=f"00000001: {message}"):
        check_resumable(folder, ABOUT | about)
