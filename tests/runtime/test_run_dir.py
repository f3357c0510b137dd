"""One run at a time may use a folder, and a refusal says at once which run that is."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdt.run.errors import BadInput
from jaxdt.run.run_folder import EMITTED_RUN_DIR
from jaxdt.runtime import run_dir as run_dirs
from jaxdt.runtime.storage.durable import FileStore

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def held(tmp_path):
    """A folder in which a run goes on."""
    lock = run_dirs.hold(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    yield tmp_path
    os.close(lock)


@pytest.mark.parametrize(
    "use", [run_dirs.hold, lambda path: run_dirs.clear(path, True), lambda p: run_dirs.clear(p, False)]
)
def test_a_live_run_keeps_its_folder_and_is_named(held, use):
    with pytest.raises(BadInput) as refused:
        use(held)
    ends = f"a run is under way there (process {os.getpid()}); python scripts/fleet.py stop --run_dir={held} ends it"
    assert str(refused.value) == f"run_dir: {held} is in use: {ends}"
    assert (held / "config.json").exists()


def test_a_process_that_a_run_has_left_behind_is_named_with_what_ends_it(held):
    (held / "summary.json").write_text('{"reason": "interrupted after 9 steps"}')
    with pytest.raises(BadInput) as refused:
        run_dirs.hold(held)
    left = f"process {os.getpid()} is left of the run that has ended there, or begins another"
    assert str(refused.value) == f"run_dir: {held} is in use: {left}; kill {os.getpid()} ends it"


def test_an_emitted_folder_is_not_replaced_while_processes_write_into_its_run_dir(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    run_dir = tmp_path / EMITTED_RUN_DIR
    with run_dirs.shared(run_dir):  # one of them ends before the other
        with run_dirs.shared(run_dir):
            pass
        with pytest.raises(BadInput, match=f"{run_dir} is in use: a run is under way there .process {os.getpid()}."):
            run_dirs.clear(tmp_path, True)
    run_dirs.clear(tmp_path, True)
    assert not run_dir.exists()


def test_only_what_a_run_wrote_is_replaced(tmp_path):
    """Also where the folder of another program has a config.json: what that wrote stays."""
    own = ["config.json", "metrics.jsonl", "logs/peer_0.log", "checkpoints/00000004/complete.json", "run_dir/disk_id"]
    own.append("new_1.token")
    users = [
        "model.safetensors",
        "checkpoints/00000004.backup/complete.json",
        "checkpoints/notes.txt",
        "run_dir/my/table",
    ]
    for name in [*own, *users]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")
    left = "checkpoints/00000004.backup, checkpoints/notes.txt, model.safetensors, run_dir/my"
    said = run_dirs.clear(tmp_path, True)
    assert said == f"replaced {tmp_path}: its run had 1 steps; left {left}, which no run wrote"
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()) == sorted(
        [*users, "lock"]
    )


def test_processes_of_a_launcher_need_no_lock_of_their_own(held):
    with run_dirs.shared(held):
        assert (held / run_dirs.LOCK).read_text() == f"{os.getpid()}\n"
    with pytest.raises(BadInput, match="is in use: a run is under way there"):
        run_dirs.clear(held, True)


def test_processes_whose_launcher_is_gone_are_waited_for(held):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (held / run_dirs.LOCK).write_text(f"{ended.pid}\n")
    with pytest.raises(BadInput, match="is in use: processes of a run there have not ended yet"):
        run_dirs.hold(held, timeout_s=0.2)


def test_a_run_whose_folder_is_deleted_does_not_go_on(tmp_path):
    store = FileStore(tmp_path / "coordinator")
    store.put("term", 1)
    (tmp_path / "coordinator/term.json").unlink()
    (tmp_path / "coordinator").rmdir()
    with pytest.raises(BadInput, match="run_dir: .*coordinator was deleted during the run"):
        store.put("term", 2)
    assert not (tmp_path / "coordinator").exists()


def test_a_damaged_config_of_a_run_is_named(tmp_path):
    (tmp_path / "config.py").write_text(run_dirs.CONFIG_PY)
    (tmp_path / "config.json").write_text('{"train": ')
    command = [sys.executable, str(ROOT / "scripts/launch.py"), "--resume", f"--run_dir={tmp_path}"]
    (tmp_path / "plan.json").write_text("{}")
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert f"{tmp_path}/config.json: cannot be read (Expecting value: " in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", [b'{"model": {', b"\xff", b"[1]", b"7", b"[" * 100_000])
def test_the_config_of_a_run_that_is_damaged_is_named(tmp_path, content):
    (tmp_path / "config.py").write_text(run_dirs.CONFIG_PY)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json: cannot be read .*, expected what a run wrote") as refused:
        runpy.run_path(str(tmp_path / "config.py"))["get_config"]()
    assert "\n" not in str(refused.value)
