import asyncio
import json
import os
import queue
import shutil
import sys
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxdt.model.base import init_stage, stage_entries
from jaxdt.model.optim import optimizer
from jaxdt.protocol import events as ev
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.optim import OptimConfig
from jaxdt.run.run_folder import read_json
from jaxdt.runtime.run_end import how_to_go_on
from jaxdt.runtime.storage import checkpointer as checkpointer_module
from jaxdt.runtime.storage import entries as entries_module
from jaxdt.runtime.storage import parts as parts_module
from jaxdt.runtime.storage.checkpoint import check_resumable, mark_complete, newest_whole, prune, step_folders
from jaxdt.runtime.storage.checkpointer import Checkpointer
from jaxdt.runtime.storage.durable import write_json
from jaxdt.runtime.storage.entries import join_entries, load_entries, split_entries
from jaxdt.runtime.storage.parts import step_folder

MODEL = GPTConfig(n_layers=3, d_model=8, n_heads=2, d_ff=8, max_len=4, vocab_size=12, tied_head=True)
OPTIMIZERS = [
    OptimConfig("adamw", weight_decay=0.1, lr_schedule="cosine", decay_steps=9),
    OptimConfig("lamb", weight_decay=0.1),
    OptimConfig("sgd", weight_decay=0.1),
    OptimConfig("adamw", second_moment="corrected"),
    OptimConfig("muon", weight_decay=0.1),
]
ABOUT = {"model": {"n_layers": 3, "d_model": 8}, "optimizer": "adamw", "data": "abc"}


class Held:
    """A store with this state."""

    def __init__(self, state):
        self.state = state

    def state_of(self, version):
        return self.state


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
        store = Held(stage_of(entries, lo, hi, optim))
        Checkpointer(run_dir, "r", ABOUT, 2, (len(cuts) - 1, stage)).save(ev.WriteCheckpoint(version), store, told.put)
    return [told.get(timeout=60) for _ in cuts[1:]]


def save_complete(run_dir, cuts, version, params, opt_state, optim):
    """A whole checkpoint; its folder."""
    told = save_stages(run_dir, cuts, version, params, opt_state, optim)
    assert [(type(event), event.version) for event in told] == [(ev.WroteCheckpoint, version)] * (len(cuts) - 1)
    return complete(run_dir, told)


def complete(run_dir, told):
    """Mark what these events are about."""
    stage_of = {path.name.split("-")[1]: int(path.name[6]) for path in run_dir.glob("checkpoints/*/stage_*")}
    parts = [ev.Part(e.version, stage_of[e.digest[:16]], e.digest, e.n_words, ("d",)) for e in told]
    checkpoint = ev.Checkpoint(told[0].version, 0, tuple(sorted(parts, key=lambda part: part.stage)))
    mark_complete(run_dir, checkpoint, ABOUT)
    return step_folder(run_dir, checkpoint.version)


def newest(run_dir):
    """The folder of the newest checkpoint that is whole, if no newer one is damaged."""
    found, problems = newest_whole(run_dir, ABOUT)
    assert problems == []
    return found.folder


def complete_checkpoints(run_dir):
    return [folder for folder in step_folders(run_dir) if (folder / "complete.json").exists()]


def part_of(folder, stage=0):
    (part,) = folder.glob(f"stage_{stage}-*")
    return part


# ------------------------------------------------------------------------------------------------------------ entries


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: f"{optim.name}-{optim.second_moment}")
def test_join_is_the_inverse_of_split(optim, trained):
    params, opt_state = trained(optim)
    entries = split_entries((params, opt_state))
    assert sorted(entries) == stage_entries(MODEL, 0, 3)
    assert_equal(join_entries(entries, blank(0, 3, optim)), (params, opt_state))


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: f"{optim.name}-{optim.second_moment}")
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
    save_complete(tmp_path, [0, 1, 3], 5, params, opt_state, optim)
    folder = newest(tmp_path)
    assert_equal(join_entries(load_entries(folder), blank(0, 3, optim)), (params, opt_state))
    whole = split_entries((params, opt_state))
    for lo, hi in ((0, 2), (2, 3), (1, 2)):
        names = stage_entries(MODEL, lo, hi)
        got = join_entries(load_entries(folder, names), blank(lo, hi, optim))
        assert_equal(got, stage_of(whole, lo, hi, optim))


def test_an_entry_that_is_not_there_is_named(tmp_path, trained):
    save_complete(tmp_path, [0, 1], 5, *trained(OPTIMIZERS[2]), OPTIMIZERS[2])
    with pytest.raises(BadInput, match="00000005: holds no block_002, expected all of block_000, block_002"):
        load_entries(step_folder(tmp_path, 5), ["block_000", "block_002"])


def test_the_parts_that_are_on_other_hosts_only_are_named(tmp_path, trained):
    folder = save_complete(tmp_path, [0, 1, 3], 5, *trained(OPTIMIZERS[2]), OPTIMIZERS[2])
    elsewhere = part_of(folder, 1)
    elsewhere.rename(tmp_path / elsewhere.name)
    assert sorted(load_entries(folder, stage_entries(MODEL, 0, 1))) == stage_entries(MODEL, 0, 1)
    with pytest.raises(BadInput) as refused:
        load_entries(folder, stage_entries(MODEL, 1, 3))
    lacks = f"{folder}: lacks {elsewhere.name}, expected the parts with block_001, block_002, head"
    copy = "copy them from that folder on other hosts: each lies where a peer of its stage ran"
    assert str(refused.value) == f"{lacks}; {copy}"


def test_the_state_may_change_once_it_is_copied(tmp_path, trained):
    """The training goes on, and an update gives the buffers away while the thread still writes."""
    optim = OPTIMIZERS[2]
    params, opt_state = trained(optim)
    expected = jax.tree.map(np.array, split_entries((params, opt_state)))
    told = queue.SimpleQueue()
    checkpointer = Checkpointer(tmp_path, "r", ABOUT, 2, (1, 0))
    checkpointer.wait()
    store = Held((params, opt_state))
    checkpointer.save(ev.WriteCheckpoint(1), store, told.put)
    checkpointer.wait()
    jax.tree.map(lambda leaf: leaf.fill(0) if leaf.ndim else None, params)
    assert_equal(load_entries(complete(tmp_path, [told.get(timeout=60)])), expected)


def test_a_slow_disk_holds_up_the_next_update_instead_of_filling_the_memory(tmp_path, trained, monkeypatch):
    params, opt_state = trained(OPTIMIZERS[2])
    store, told = Held((params, opt_state)), queue.SimpleQueue()
    disk, updated = threading.Event(), threading.Event()
    seal = checkpointer_module.seal
    monkeypatch.setattr(checkpointer_module, "seal", lambda *arguments: (disk.wait(60), seal(*arguments))[1])
    checkpointer = Checkpointer(tmp_path, "r", ABOUT, 2, (1, 0))
    for version in (1, 2):
        checkpointer.save(ev.WriteCheckpoint(version), store, told.put)
        checkpointer.wait()
    checkpointer.save(ev.WriteCheckpoint(3), store, told.put)
    update = threading.Thread(target=lambda: (checkpointer.wait(), updated.set()))
    update.start()
    assert not updated.is_set() and told.empty()
    disk.set()
    assert [told.get(timeout=60).version for _ in range(3)] == [1, 2, 3]
    update.join()


def test_a_disk_that_refuses_is_told_and_not_raised(tmp_path, trained):
    (tmp_path / "checkpoints").write_text("a file where a folder must be")
    (told,) = save_stages(tmp_path, [0, 3], 1, *trained(OPTIMIZERS[2]), OPTIMIZERS[2])
    assert isinstance(told, ev.CheckpointFailed) and told.version == 1


FILES = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "manifest.json", "d/*")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, trained):
    """A run's folder with checkpoints of 1 and 2 steps."""
    run_dir = tmp_path_factory.mktemp("whole")
    for version in (1, 2):
        save_complete(run_dir, [0, 3], version, *trained(OPTIMIZERS[2]), OPTIMIZERS[2])
    return run_dir


def damaged(whole, tmp_path, name, damage):
    """A copy in which one file of the newer checkpoint's part is changed."""
    run_dir = tmp_path / "damaged"
    shutil.copytree(whole, run_dir)
    path = next(iter(sorted(part_of(step_folder(run_dir, 2)).glob(name))))
    content = damage(path.read_bytes())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    return run_dir


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-1], lambda content: None])
def test_a_damaged_part_is_named_in_one_line_and_a_resume_goes_back_to_one_that_is_whole(whole, tmp_path, name, damage):
    """As after a loss of power: a file is empty, has not its end, or is not there."""
    run_dir = damaged(whole, tmp_path, name, damage)
    with pytest.raises(BadInput, match="00000002/stage_0-") as caught:
        load_entries(step_folder(run_dir, 2))
    assert "\n" not in str(caught.value)
    found, problems = newest_whole(run_dir, ABOUT)
    assert found.folder == step_folder(run_dir, 1) and problems == [str(caught.value)]


def test_no_bit_of_a_part_can_be_flipped_unseen(whole, tmp_path):
    """A bit is flipped in every file, at random places: the file is named, or the entries are equal."""
    rng = np.random.default_rng(3)
    expected = load_entries(step_folder(whole, 2))
    part = part_of(step_folder(whole, 2))
    n_named = 0
    for path in sorted(path for path in part.rglob("*") if path.is_file() and path.stat().st_size):
        original = path.read_bytes()
        for _ in range(4):
            path.write_bytes(flipped(original, int(rng.integers(len(original) * 8))))
            try:
                assert_equal(load_entries(step_folder(whole, 2)), expected)
            except BadInput as error:
                n_named += "\n" not in str(error)
        path.write_bytes(original)
    assert n_named > 30
    assert newest(whole) == step_folder(whole, 2)


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=12,
    ),
    place=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_of_a_durable_value_is_named_or_changes_nothing(tmp_path, value, place):
    path = tmp_path / "value.json"
    write_json(path, value)
    content = path.read_bytes()
    path.write_bytes(flipped(content, int(place * len(content) * 8)))
    try:
        assert repr(read_json(path)) == repr(json.loads(json.dumps(value)))
    except BadInput as error:
        assert str(path) in str(error) and "\n" not in str(error)


def test_every_bit_of_a_view_is_watched(tmp_path):
    """Every single bit of a durable value is flipped: none of the results is taken for another value."""
    path = tmp_path / "view.json"
    members = (ev.Member(0, 0, 1, "10.0.0.1:7701", 7, 0, "d0"), ev.Member(1, 1, 1, "10.0.0.2:7702", 8, 3, "d1"))
    value = serialize.write(ev.View(3, 1, 0, members, (1, 3), 17, (ev.Record(16, (), 2.5, 8, "apply"),)))
    write_json(path, value)
    content = path.read_bytes()
    n_named = 0
    for bit in range(8 * len(content)):
        path.write_bytes(flipped(content, bit))
        try:
            assert read_json(path) == value
        except BadInput:
            n_named += 1
    assert n_named > 7 * len(content)


def test_a_part_survives_a_loss_of_power_before_anybody_hears_of_it(tmp_path, trained, monkeypatch):
    """Every file of it is fsynced after it was last written, and every folder after it last got a name."""
    synced = []
    fsync = os.fsync

    def noted(file):
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    (told,) = save_stages(tmp_path, [0, 3], 5, *trained(OPTIMIZERS[2]), OPTIMIZERS[2])
    part = part_of(step_folder(tmp_path, 5))
    assert told.digest.startswith(part.name.split("-")[1])
    names = {"/".join(path.parts[path.parts.index("00000005") + 2 :]) for path in synced if "00000005" in path.parts}
    expected = {path.relative_to(part).as_posix() for path in part.rglob("*")}
    assert expected <= names
    assert {part.parent, part.parent.parent, tmp_path} <= set(synced)
    assert synced.index(part.parent) > max(i for i, path in enumerate(synced) if "writing." in str(path))


def test_parts_of_an_earlier_attempt_on_another_cut_do_not_count(tmp_path, trained):
    """A run of three stages was killed while it wrote: two parts are whole, one begun. The next run has one stage."""
    optim = OPTIMIZERS[2]
    params, opt_state = trained(optim)
    save_stages(tmp_path, [0, 1, 2, 3], 5, jax.tree.map(np.zeros_like, params), opt_state, optim)
    folder = step_folder(tmp_path, 5)
    part_of(folder, 1).rename(folder / "writing.0a1b")
    assert save_complete(tmp_path, [0, 3], 5, params, opt_state, optim) == folder
    assert_equal(join_entries(load_entries(folder), blank(0, 3, optim)), (params, opt_state))


def test_a_complete_checkpoint_stays_complete_while_its_version_is_written_again(tmp_path, trained):
    state = trained(OPTIMIZERS[2])
    folder = save_complete(tmp_path, [0, 3], 5, *state, OPTIMIZERS[2])
    save_stages(tmp_path, [0, 1, 3], 5, *jax.tree.map(np.zeros_like, state), OPTIMIZERS[2])
    assert complete_checkpoints(tmp_path) == [folder]
    assert_equal(join_entries(load_entries(folder), blank(0, 3, OPTIMIZERS[2])), state)


def test_two_savers_of_one_part_do_not_get_into_each_others_way(tmp_path, trained):
    """One was taken for dead and is not: each part is whole, one of them counts, and nothing else is left."""
    optim, state = OPTIMIZERS[2], trained(OPTIMIZERS[2])
    (step_folder(tmp_path, 5) / "writing.dead.orbax-checkpoint-tmp").mkdir(parents=True)
    posted = queue.Queue()
    savers = [Checkpointer(tmp_path, "r", ABOUT, 2, (1, 0)) for _ in range(4)]
    for saver in savers:
        saver.save(ev.WriteCheckpoint(5), Held(state), posted.put)
    told = [posted.get(timeout=60) for _ in savers]
    assert len({event.digest for event in told}) == 4
    part = ev.Part(5, 0, told[2].digest, told[2].n_words, ("d",))
    retained(savers[0], ev.Checkpoint(5, 0, (part,)))
    folder = newest(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["complete.json", f"stage_0-{part.digest[:16]}"]
    assert_equal(join_entries(load_entries(folder), blank(0, 3, optim)), state)


def test_who_fails_to_write_what_others_have_completed_has_not_failed(tmp_path, trained, monkeypatch):
    state, posted = trained(OPTIMIZERS[2]), queue.Queue()
    (other,) = save_stages(tmp_path, [0, 3], 5, *state, OPTIMIZERS[2])
    saver = Checkpointer(tmp_path, "r", ABOUT, 2, (1, 0))

    def swept(temporary, *_):
        complete(tmp_path, [other])
        raise FileNotFoundError(2, "swept up", str(temporary))

    monkeypatch.setattr(checkpointer_module, "put_in_place", swept)
    saver.save(ev.WriteCheckpoint(5), Held(state), posted.put)
    assert posted.get(timeout=60) == ev.WroteCheckpoint(5, ANY, other.digest, other.n_words)


# ------------------------------------------------------------------------------------------------ what counts as one


def retained(saver, checkpoint):
    """What a checkpointer does when a checkpoint is complete, to its end."""
    posted = queue.SimpleQueue()
    saver.mark_complete(checkpoint, posted.put).join()
    assert posted.empty()


def folder_of(run_dir, version, complete=True, generation=0):
    folder = step_folder(run_dir, version)
    (folder / "stage_0-0123456789abcdef").mkdir(parents=True)
    if complete:
        mark_complete(run_dir, ev.Checkpoint(version, generation), ABOUT)
    return folder


def test_newest_is_the_newest_complete_one(tmp_path):
    with pytest.raises(BadInput, match="complete checkpoint; a run writes one every .*fleet.py checkpoint --run_dir="):
        newest(tmp_path)
    missing = folder_of(tmp_path, 3, complete=False) / "complete.json"
    with pytest.raises(BadInput) as refused:
        load_entries(missing.parent)
    assert str(refused.value) == f"{missing}: cannot be read (No such file or directory), expected what a run wrote"
    with pytest.raises(BadInput, match="holds no complete checkpoint"):
        newest(tmp_path)
    folders = [folder_of(tmp_path, version) for version in (9, 100)]
    (folder_of(tmp_path, 200, complete=False) / "complete.json.tmp").write_text("{")
    assert newest(tmp_path) == folders[1]
    assert complete_checkpoints(tmp_path) == folders


def test_prune_keeps_the_newest_and_what_is_under_way(tmp_path):
    old = [folder_of(tmp_path, 1), folder_of(tmp_path, 2, complete=False), folder_of(tmp_path, 3)]
    kept = [folder_of(tmp_path, 4), folder_of(tmp_path, 5), folder_of(tmp_path, 6, complete=False)]
    assert sorted(prune(tmp_path, 2)) == old
    assert sorted(tmp_path.glob("checkpoints/*")) == kept


def test_prune_keeps_the_checkpoint_with_which_the_run_began(tmp_path, monkeypatch):
    folders = [folder_of(tmp_path, version) for version in (1, 2, 3, 4)]
    monkeypatch.chdir(tmp_path)
    assert sorted(prune(tmp_path, 1, Path("checkpoints") / folders[1].name)) == [folders[0], folders[2]]


def test_a_run_that_begins_with_an_older_one_keeps_what_it_writes(tmp_path):
    """It was told so by hand, or the newer one is damaged in a way that only a reader finds."""
    folders = [folder_of(tmp_path, version) for version in (10, 15, 16, 20)]
    retained(Checkpointer(tmp_path, "r", ABOUT, 1, (1, None), folders[1]), ev.Checkpoint(16))
    assert complete_checkpoints(tmp_path) == folders[1:]


def test_a_flipped_bit_in_the_newest_keeps_the_one_before(whole, tmp_path):
    content = lambda path: flipped(path, 8 * 9)  # noqa: E731
    run_dir, said = damaged(whole, tmp_path, "d/*", content), []
    assert prune(run_dir, 1, say=said.append) == [] and len(said) == 1
    assert "damaged, it has SHA-256" in said[0]


def test_prune_deletes_nothing_without_a_complete_checkpoint(tmp_path):
    folder_of(tmp_path, 1, complete=False)
    assert prune(tmp_path, 1) == []


def test_mark_complete_of_a_checkpointer_stamps_and_prunes(tmp_path):
    for version in (1, 2):
        mark_complete(tmp_path, ev.Checkpoint(version, 0, (ev.Part(version, 0, "abc", 9, ("d0",)),)), ABOUT)
    checkpoint = ev.Checkpoint(
        3, 4, (ev.Part(3, 0, "abc", 9, ("d0", "d1", "d2")), ev.Part(3, 1, "def", 9, ("d0", "d2")))
    )
    retained(Checkpointer(tmp_path, "r", ABOUT, 2, (1, None)), checkpoint)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["00000002", "00000003"]
    newest = newest_whole(tmp_path, ABOUT, elsewhere=True)[0].folder
    assert check_resumable(newest, ABOUT) == checkpoint
    mark = json.loads((newest / "complete.json").read_text())["value"]
    assert mark["about"] == ABOUT and mark["copies"] == 2


def test_one_that_another_process_of_the_host_has_deleted_is_not_marked(tmp_path):
    """Its parts were marked, and newer ones too, before this process heard of it."""
    folder_of(tmp_path, 3)
    retained(Checkpointer(tmp_path, "r", ABOUT, 1, (1, None)), ev.Checkpoint(2, 0, (ev.Part(2, 0, "abc", 9),)))
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["00000003"]


def test_a_host_that_holds_no_part_knows_from_which_step_to_go_on(tmp_path):
    """It has a coordinator, and a disk of its own."""
    part = ev.Part(20, 0, "abc", 9, ("a peer's disk",))
    retained(Checkpointer(tmp_path, "r", ABOUT, 2, (1, None)), ev.Checkpoint(20, 0, (part,)))
    assert how_to_go_on(tmp_path).startswith("to go on from step 20: start each process again")
    (tmp_path / "run").touch()  # launched on this host alone: all parts should be here
    assert "lacks stage_0-abc, expected all parts; copy them from that folder on other hosts" in how_to_go_on(tmp_path)


def mark_of(**changes):
    checkpoint = {"version": 1, "generation": 0, "parts": []}
    return {"format": "2.0", "checkpoint": checkpoint, "copies": 0, "about": ABOUT} | changes


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:30]), "cannot be read"),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "cannot be read"),
        (lambda path: path.write_text(json.dumps(mark_of())), "got {.*, expected an object with sha256 and value"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'n": 1', b'n": 3')), "damaged, its content has"),
        (lambda path: write_json(path, [1]), "format: got None, expected 2.0 to 2.1"),
        (lambda path: write_json(path, mark_of(format=None)), "format: got None, expected 2.0 to 2.1"),
        (lambda path: write_json(path, mark_of(format="2.2")), "format: got '2.2', expected 2.0 to 2.1"),
        (lambda path: write_json(path, mark_of(format="1.0")), "format: got '1.0', expected 2.0 to 2.1"),
        (lambda path: write_json(path, mark_of(format="2.1", copies="1")), "copies: got '1', expected int"),
        (lambda path: write_json(path, mark_of(checkpoint={"version": 9})), "version: got 9, expected the 00000001"),
    ],
)
def test_a_damaged_mark_is_named_and_a_resume_goes_back(tmp_path, write, message):
    older, folder = folder_of(tmp_path, 0), folder_of(tmp_path, 1)
    write(folder / "complete.json")
    for read in (lambda: check_resumable(folder, ABOUT), lambda: load_entries(folder)):
        with pytest.raises(BadInput, match=f"00000001/complete.json[:.] ?{message}") as caught:
            read()
        assert "\n" not in str(caught.value)
    found, problems = newest_whole(tmp_path, ABOUT)
    assert found.folder == older and problems == [str(caught.value)]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"model": {"n_layers": 3, "d_model": 16}}, "made with model.d_model 8, the config has 16"),
        ({"model": {"n_layers": 3}}, "made with model.d_model 8, the config has None"),
        ({"optimizer": "sgd"}, "made with optimizer 'adamw', this run has 'sgd'"),
        ({"data": "xyz"}, "made with tokens of SHA256 abc, this run has xyz; data.path must name the text"),
    ],
)
def test_another_run_may_not_resume_it(tmp_path, about, message):
    folder = folder_of(tmp_path, 1)
    assert check_resumable(folder, ABOUT) == ev.Checkpoint(1, 0)
    with pytest.raises(BadInput, match=f"00000001: {message}"):
        check_resumable(folder, ABOUT | about)


# ------------------------------------------------------------------------------------------------ without a coordinator


def test_the_parts_that_all_peers_wrote_before_they_gave_up_are_a_checkpoint(tmp_path, trained):
    """Nobody has marked it. Two replicas of stage 0 wrote one each."""
    optim = OPTIMIZERS[2]
    state = trained(optim)
    save_complete(tmp_path, [0, 3], 1, *state, optim)
    save_stages(tmp_path, [0, 1, 3], 4, *state, optim)
    save_stages(tmp_path, [0, 1, 3], 4, *state, optim)
    found, problems = newest_whole(tmp_path, ABOUT)
    assert found.folder == step_folder(tmp_path, 4) and problems == []
    mark_complete(tmp_path, found.record.checkpoint, found.record.about)
    assert_equal(join_entries(load_entries(found.folder), blank(0, 3, optim)), state)
    assert check_resumable(found.folder, ABOUT).version == 4


def test_parts_of_different_runs_generations_or_versions_make_no_checkpoint(tmp_path, trained):
    optim = OPTIMIZERS[2]
    params, opt_state = trained(optim)
    older = save_complete(tmp_path, [0, 3], 1, params, opt_state, optim)
    entries, told = split_entries((params, opt_state)), queue.SimpleQueue()
    for stage, (run, version, generation) in enumerate((("r", 4, 0), ("r", 4, 1), ("s", 4, 0), ("r", 5, 0))):
        lo, hi = ((0, 1), (1, 3))[min(stage, 1)]
        store = Held(stage_of(entries, lo, hi, optim))
        saver = Checkpointer(tmp_path, run, ABOUT, 2, (2, min(stage, 1)))
        saver.save(ev.WriteCheckpoint(version, generation), store, told.put)
        assert isinstance(told.get(timeout=60), ev.WroteCheckpoint)
    assert newest(tmp_path) == older


# --------------------------------------------------------------------------------------------- from one disk to another


@pytest.mark.parametrize("slice_words", [7, 100, 1 << 20])
def test_a_part_travels_in_slices_and_is_the_same_there(tmp_path, trained, slice_words):
    optim, told = OPTIMIZERS[2], queue.SimpleQueue()
    state = trained(optim)
    (wrote,) = save_stages(tmp_path / "a", [0, 3], 5, *state, optim)
    part = ev.Part(5, 0, wrote.digest, wrote.n_words, ("a",))
    donor, other = (Checkpointer(tmp_path / name, "r", ABOUT, 2, (1, None)) for name in "ab")
    donor.find(ev.FindPart(5, part.digest), told.put)
    assert told.get(timeout=60) == ev.FoundPart(part.digest, part.n_words)
    starts = range(0, part.n_words, slice_words)
    keys = [ev.StateKey(5, lo, min(lo + slice_words, part.n_words), part.digest) for lo in starts]
    for key in reversed(keys):
        other.put_slice(key, donor.read_slice(key))
    other.find(ev.FindPart(5, part.digest), told.put)
    assert told.get(timeout=60) == ev.FoundPart(part.digest, 0, tuple((key.lo, key.hi) for key in keys))
    other.keep(part, told.put)
    assert told.get(timeout=60) == ev.KeptPart(part.digest)
    retained(other, ev.Checkpoint(5, 0, (part,)))
    assert_equal(join_entries(load_entries(step_folder(tmp_path / "b", 5)), blank(0, 3, optim)), state)
    assert not list((tmp_path / "b/fetching").iterdir())


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_part_that_cannot_be_read_stays_until_a_whole_one_has_its_place(tmp_path, trained, monkeypatch, is_damaged):
    """Where it was not damaged but the disk failed for a moment, it stays."""
    told, optim = queue.SimpleQueue(), OPTIMIZERS[2]
    state = trained(optim)
    (wrote,) = save_stages(tmp_path / "a", [0, 3], 5, *state, optim)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    path = part_of(step_folder(tmp_path / "b", 5))
    array = next(path.glob("d/*"))
    if is_damaged:
        os.truncate(array, 10)
    inode, part = path.stat().st_ino, ev.Part(5, 0, wrote.digest, wrote.n_words, ("a",))
    donor, other = (Checkpointer(tmp_path / name, "r", ABOUT, 2, (1, None)) for name in "ab")
    with monkeypatch.context() as failing:
        failing.setattr(parts_module.hashlib, "file_digest", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
        other.find(ev.FindPart(5, part.digest), told.put)
        assert told.get(timeout=60).n_words == 0
    assert array.exists()
    donor.find(ev.FindPart(5, part.digest), told.put)
    told.get(timeout=60)
    key = ev.StateKey(5, 0, part.n_words, part.digest)
    other.put_slice(key, donor.read_slice(key))
    other.keep(part, told.put)
    assert told.get(timeout=60) == ev.KeptPart(part.digest)
    assert (path.stat().st_ino == inode) == (not is_damaged)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert_equal(load_entries(complete(tmp_path / "b", [wrote])), split_entries(state))


def test_a_damaged_slice_is_refused_and_a_damaged_whole_is_not_kept(tmp_path, trained):
    told = queue.SimpleQueue()
    (wrote,) = save_stages(tmp_path / "a", [0, 3], 5, *trained(OPTIMIZERS[2]), OPTIMIZERS[2])
    part = ev.Part(5, 0, wrote.digest, wrote.n_words, ("a",))
    donor, other = (Checkpointer(tmp_path / name, "r", ABOUT, 2, (1, None)) for name in "ab")
    donor.find(ev.FindPart(5, part.digest), told.put)
    told.get(timeout=60)
    key = ev.StateKey(5, 0, part.n_words, part.digest)
    words = donor.read_slice(key)
    words[3] ^= 1
    with pytest.raises(BadInput, match="checksum"):
        other.put_slice(key, words)
    words[-1:].view(np.uint32)[0] = zlib.crc32(words[:-1].data)
    other.put_slice(key, words)
    other.keep(part, told.put)
    kept = told.get(timeout=60)
    assert kept.digest == part.digest and "digest" in kept.problem and "\n" not in kept.problem
    other.find(ev.FindPart(5, part.digest), told.put)
    assert told.get(timeout=60) == ev.FoundPart(part.digest, 0)


def test_arrays_that_end_after_a_disk_has_refused_one_print_no_traceback(tmp_path, monkeypatch):
    """Python hands what a thread of TensorStore cannot raise to `sys.unraisablehook`."""
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: shown.append(ignored.exc_type))
    entries_module._take_no_notice_of_late_results.cache_clear()
    entries_module.write_entries(tmp_path / "part", {"tok": {"params": {"w": np.zeros(2)}}})
    loop = asyncio.new_event_loop()
    loop.close()
    for raises in (lambda: loop.call_soon_threadsafe(print), lambda: 1 / 0, lambda: next(map(raise_closed, [0]))):
        with pytest.raises((RuntimeError, ZeroDivisionError)) as raised:
            raises()
        sys.unraisablehook(SimpleNamespace(exc_type=raised.type, exc_value=raised.value, exc_traceback=raised.tb))
    assert shown == [ZeroDivisionError, RuntimeError]


def raise_closed(_):
    raise RuntimeError("Event loop is closed")
