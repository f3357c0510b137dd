"""Folders of checkpoints drawn at random, as crashes, disks and users leave them: what is whole is never deleted unless
enough newer ones that are whole stay, what no run wrote is never touched, and all who ask get the same answer."""

import dataclasses
import json
import os
import queue
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxdt.protocol import events as ev
from jaxdt.run import config as configs
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.run_folder import read_json
from jaxdt.runtime.run_end import ended_run
from jaxdt.runtime.storage.checkpoint import (
    about_run,
    complete_record,
    mark_complete,
    newest_whole,
    prune,
    step_folders,
)
from jaxdt.runtime.storage.checkpointer import Checkpointer
from jaxdt.runtime.storage.durable import write_json
from jaxdt.runtime.storage.parts import Manifest, part_name, put_in_place, seal, step_folder, temporary_part

MODEL = dict(n_layers=2, d_model=8, n_heads=2, d_ff=8, max_len=4, vocab_size=12)
CONFIG = configs.parse({"model": MODEL})
OURS = about_run(CONFIG, "abc")
OTHERS = OURS | {"optimizer": "lamb"}
N_STAGES = 2
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a busy disk takes minutes for so many folders
VERSIONS = range(1, 8)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with one whole checkpoint of each version, of our run and of another. Nothing waits for the disk."""
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield from checkpoints_in(folder)


def checkpoints_in(folder):
    for name, about in (("ours", OURS), ("others", OTHERS)):
        for version in (*VERSIONS, 8, 10):
            write(folder / name, version, about)
    yield folder


def write(run_dir, version, about):
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "disk_id").write_text("here")
    parts = []
    for stage in range(N_STAGES):
        temporary = temporary_part(run_dir, version)
        (temporary / "d").mkdir(parents=True)
        (temporary / "d" / "array").write_bytes(bytes([version, stage]) * 40)
        manifest = seal(temporary, Manifest(run_dir.name, 0, 0, version, stage, N_STAGES, about, {}))
        put_in_place(temporary, run_dir, manifest)
        parts.append(ev.Part(version, stage, manifest.digest, manifest.n_words, ("here",)))
    mark_complete(run_dir, ev.Checkpoint(version, 0, tuple(parts)), about)


# Each kind changes the copy of a checkpoint that is whole.


def first_array(folder):
    return next(iter(sorted(folder.glob("stage_*/d/array"))))


def flip(folder):
    content = bytearray(first_array(folder).read_bytes())
    content[7] ^= 1
    first_array(folder).write_bytes(content)


def truncate(folder):
    os.truncate(first_array(folder), 30)


def as_link(folder):
    target = folder.parent.parent / f"moved_{folder.name}"
    folder.rename(target)
    folder.symlink_to(target)


def as_file(folder):
    shutil.rmtree(folder)
    folder.write_text("a file")


def only_unfinished(folder):
    shutil.rmtree(folder)
    (folder / "writing.0a1b2c3d").mkdir(parents=True)


def partly_elsewhere(folder):
    checkpoint = complete_record(folder).checkpoint
    first, last = checkpoint.parts
    parts = (first, dataclasses.replace(last, disks=("elsewhere",)))
    shutil.rmtree(folder / part_name(last.stage, last.digest))
    mark_complete(folder.parent.parent, dataclasses.replace(checkpoint, parts=parts), complete_record(folder).about)


def deep(folder):
    (folder / "complete.json").write_text("[" * 100_000 + "]" * 100_000)


def changed_mark(**changes):
    """Writes the mark of a checkpoint with other fields."""

    def change(folder):
        write_json(folder / "complete.json", read_json(folder / "complete.json") | changes)

    return change


def of_another_attempt(folder):
    """As by a run with disks of its own whose file was copied here."""
    mark = read_json(folder / "complete.json")
    parts = [part | {"digest": "0" * 64, "disks": ["there"]} for part in mark["checkpoint"]["parts"]]
    changed_mark(checkpoint=mark["checkpoint"] | {"parts": parts})(folder)


def nested(depth):
    return [nested(depth - 1)] if depth else []


WHOLE = {
    "whole": lambda folder: None,
    "not marked": lambda folder: (folder / "complete.json").unlink(),
    "mark cut off": lambda folder: os.truncate(folder / "complete.json", 40),
    "deep mark": deep,
    "mark of another attempt": of_another_attempt,
    "as a link": as_link,
}
NOT_WHOLE = {
    "flipped": flip,
    "truncated": truncate,
    "a file is gone": lambda folder: first_array(folder).unlink(),
    "a part is gone": lambda folder: shutil.rmtree(first_array(folder).parent.parent),
    "a manifest is damaged": lambda folder: os.truncate(first_array(folder).parent.parent / "manifest.json", 9),
    "neither marked nor all there": lambda folder: (
        (folder / "complete.json").unlink(),
        shutil.rmtree(first_array(folder).parent.parent),
    ),
    "unfinished": only_unfinished,
    "partly elsewhere": partly_elsewhere,
}
UNKNOWN = {  # a run of this version did not write it so
    "of another format": changed_mark(format="3.0"),
    "another run's mark": changed_mark(about=OURS | {"optimizer": "sgd"}),
    "a mark that is deep": changed_mark(about={"model": nested(300)}),
    "of another step": lambda folder: None,
    "a file": as_file,
    "mark and parts damaged": lambda folder: (
        (folder / "complete.json").write_text("{"),
        [os.truncate(path, 3) for path in folder.glob("stage_*/manifest.json")],
    ),
}
KINDS = WHOLE | NOT_WHOLE | UNKNOWN
STAYS = ("as a link", *UNKNOWN)


def user_files(checkpoints, whole):
    """Names that no run writes, some of them with a whole checkpoint in it."""
    for name in ("00000010.backup", "10"):
        shutil.copytree(whole, checkpoints / name)
    (checkpoints / "best").mkdir()
    (checkpoints / "best" / "complete.json").write_text("{}")
    (checkpoints / "notes.txt").write_text("best run so far")
    (checkpoints / "latest").symlink_to("00000010.backup")
    (checkpoints / "gone").symlink_to("nowhere")


def contents(path):
    if path.is_symlink():
        return os.readlink(path), contents(path.resolve()) if path.exists() else None
    if path.is_file():
        return path.read_bytes()
    return {file.name: contents(file) for file in path.iterdir()}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A folder of checkpoints: for each version its kind, and whether another run has written it."""

    run_dir: Path
    kinds: dict[int, tuple[str, bool]]

    @property
    def newest(self):
        """The newest checkpoint that is whole and ours."""
        return max((v for v, (kind, others) in self.kinds.items() if kind in WHOLE and not others), default=None)

    def here(self):
        return {path.name: contents(path) for path in (self.run_dir / "checkpoints").iterdir()}

    def check(self, before, keep, up_to=None, resumed=None):
        """What is left of `before` is right."""
        after = self.here()
        assert all(before[name] == content for name, content in after.items())
        kinds = {v: kind for v, kind in self.kinds.items() if up_to is None or v <= up_to}
        deleted = {v for v in kinds if f"{v:08d}" not in after}
        assert set(before) - set(after) == {f"{v:08d}" for v in deleted}
        n_whole, n_here = Counter(), Counter()
        for version in sorted(kinds, reverse=True):
            kind, others = kinds[version]
            if version in deleted:
                assert kind not in STAYS and version != resumed
                n_enough = n_here[others] if kind in WHOLE else n_whole[others]
                assert (max(n_whole.values()) if kind == "unfinished" else n_enough) >= keep, (version, kind)
            elif kind in WHOLE or kind == "partly elsewhere":
                assert n_here[others] < keep or kind in STAYS or version == resumed, (version, kind, "was left")
                n_whole[others] += 1
                n_here[others] += kind != "partly elsewhere"


def drawn(written, folder, kinds):
    run_dir = folder / "run"
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(parents=True)
    user_files(checkpoints, step_folder(written / "ours", 10))
    for version, (kind, others) in kinds.items():
        path = step_folder(run_dir, version)
        source = 10 if kind == "of another step" else version
        shutil.copytree(step_folder(written / ("others" if others else "ours"), source), path)
    (run_dir / "disk_id").write_text("here")
    for version, (kind, _) in kinds.items():
        KINDS[kind](step_folder(run_dir, version))
    (run_dir / "run").write_text("ours")
    (run_dir / "config.json").write_text(json.dumps(serialize.write(CONFIG)))
    (run_dir / "summary.json").write_text(json.dumps({"reason": "done"}))
    return Drawn(run_dir, kinds)


KINDS_DRAWN = st.dictionaries(
    st.sampled_from(VERSIONS),
    st.tuples(st.sampled_from(["whole", "whole", *KINDS]), st.sampled_from([False] * 4 + [True])),
)


@given(kinds=KINDS_DRAWN, keep=st.integers(1, 3))
@settings(max_examples=int(os.environ.get("RETENTION_EXAMPLES", "150")), suppress_health_check=list(HealthCheck))
def test_what_is_whole_or_unknown_is_never_deleted_and_all_choose_the_same(written, kinds, keep):
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        run = drawn(written, Path(folder), kinds)
        before, said = run.here(), []
        assert chosen(run) == run.newest
        prune(run.run_dir, keep, say=said.append)
        run.check(before, keep)
        assert chosen(run) == run.newest
        assert not any("\n" in line for line in said)
        left = run.here()
        for version, (kind, _) in kinds.items():
            is_left = f"{version:08d}" in left and kind in (
                {**NOT_WHOLE, **UNKNOWN}.keys() - {"partly elsewhere", "a file"}
            )
            assert any(f"/{version:08d}" in line for line in said) == is_left, (version, kind, said)


@given(kinds=KINDS_DRAWN, keep=st.integers(1, 3), n_steps=st.integers(1, 3))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_resumed_run_keeps_what_it_writes_and_what_it_began_with(written, kinds, keep, n_steps):
    """It may come to a step that is older than others there, which are not whole."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        run = drawn(written, Path(folder), kinds)
        resumed = run.newest
        step = min((resumed or 0) + n_steps, 8)
        path = step_folder(run.run_dir, step)
        if os.path.lexists(path):
            return
        shutil.copytree(step_folder(written / "ours", step), path)
        run.kinds[step] = ("whole", False)
        before, posted = run.here(), queue.SimpleQueue()
        begun = step_folder(run.run_dir, resumed) if resumed else None
        saver = Checkpointer(run.run_dir, "ours", OURS, keep, (N_STAGES, None), begun)
        saver.mark_complete(complete_record(path).checkpoint, posted.put).join()
        assert posted.empty()
        run.check(before, keep, step, resumed)


def chosen(run):
    """The step from which a resume, a sample, and the lines of a run that has ended go on."""
    text = ended_run(run.run_dir)
    assert "\n" not in text
    try:
        found, problems = newest_whole(run.run_dir, OURS)
    except BadInput as refused:
        assert "\n" not in str(refused) and f"there is nothing to go on from: {refused}" in text
        return None
    assert f"to go on from step {found.version}: " in text and not any("\n" in problem for problem in problems)
    return found.version


def test_a_disk_without_a_readable_id_keeps_what_is_whole(written, tmp_path):
    """Only a part that is not here asks for the disk's id."""
    run_dir = shutil.copytree(written / "ours", tmp_path / "ours")
    (run_dir / "disk_id").write_bytes(b"\xff\xfe\0")
    *older, newest = step_folders(run_dir)
    assert newest_whole(run_dir, {})[0].folder == newest
    partly_without_id(newest)
    found, problems = newest_whole(run_dir, {})
    assert found.folder == older[-1] and problems[0].startswith(f"{run_dir / 'disk_id'}: cannot be read")
    prune(run_dir, 1)
    assert step_folders(run_dir) == [older[-1], newest]


def partly_without_id(folder):
    for part in complete_record(folder).checkpoint.parts[1:]:
        shutil.rmtree(folder / part_name(part.stage, part.digest))
