"""The folder of one run: the files that all its processes share, and the lock that keeps other runs out."""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, read_text, shell_line, shortened
from jaxdt.run.plan import Plan, to_json
from jaxdt.run.run_folder import EMITTED_RUN_DIR, has_ended
from jaxdt.runtime.identity import authority
from jaxdt.runtime.storage.checkpoint import step_folders
from jaxdt.runtime.storage.durable import lock_file, write_durably
from jaxdt.runtime.storage.model_folder import copy_description

LOCK = "lock"
CREDENTIALS = "credentials"
NOT_ENDED = "processes of a run there have not ended yet, expected another folder"
POLL_S = 0.1
NAMES_MAX = 5  # of files in one line
# The files and folders that the processes of a run, launch.py, report.py and credential.py write into its folder.
WRITTEN = re.compile(
    r"config\.json|config\.py|plan\.json|run|model|launch\.json|credentials|coordinator_address|emulated_network\.json"
    rf"|{EMITTED_RUN_DIR}|(coordinator|host_\d+|worker_\d+)\.flags|checkpoints|fetching|disk_id|coordinator|logs|trace"
    r"|new_\d+\.token|tensorboard|(metrics|trace)\.jsonl(\.1)?|summary\.json|timeline\.json|(report|comparison)\.png|.*\.\w+\.tmp"
)

CONFIG_PY = '''"""The resolved config of a run, as a config file: its fields stand in config.json."""

import json
from pathlib import Path

from ml_collections import ConfigDict


def get_config():
    path = Path(__file__).with_name("config.json")
    try:
        return ConfigDict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error}), expected what a run wrote") from None
'''


def write_job(folder: Path, config: RunConfig, plan: Plan) -> None:
    """Write what the processes of a run share: config.py, config.json, plan.json and run (the run's name, a new one
    each time). Beside them stand the credentials of the run, which a resumed run keeps, and what is known of the model
    with which it begins."""
    write_config_and_plan(folder, config, plan)
    copy_description(config, folder)
    (folder / "run").write_text(secrets.token_hex(6) + "\n")
    authority.create_missing(folder / CREDENTIALS)


def write_config_and_plan(folder: Path, config: RunConfig, plan: Plan) -> None:
    """Write config.py, config.json and plan.json, from which others read what the run in this folder is. A file that
    is there and right is left alone: other processes may be reading it."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.json": serialize.write(config), "plan.json": to_json(plan)}
    texts = {name: json.dumps(fields, indent=1) + "\n" for name, fields in files.items()} | {"config.py": CONFIG_PY}
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != text.encode():
            write_durably(path, text.encode())


def job_flags(folder: Path) -> list[str]:
    """The flags by which a process joins the run whose job was written into the folder."""
    return [
        f"--config={folder / 'config.py'}",
        f"--plan={folder / 'plan.json'}",
        f"--run={read_text(folder / 'run').strip()}",
    ]


def coordinator_credential(folder: Path) -> str:
    return f"--credential={authority.coordinator_file(folder / CREDENTIALS)}"


def peer_credential(folder: Path, peer: int) -> str:
    """The flag with the credential of a peer of this machine. The credential is made if it is missing."""
    authority.create_missing(folder / CREDENTIALS, [peer])
    return f"--credential={authority.peer_file(folder / CREDENTIALS, peer)}"


def token_file(folder: Path, name: str) -> Path:
    return folder / CREDENTIALS / f"{name}.token"


def token_flag(folder: Path, name: str, peer: int | None = None) -> str:
    """The flag with the token of this name, for this peer or for a newcomer. It is made where it is missing."""
    path = token_file(folder, name)
    if not path.exists():
        authority.create_token(folder / CREDENTIALS, path, peer)
    return f"--token={path}"


def clear(run_dir: Path, overwrite: bool) -> str:
    """Delete what an earlier run wrote into its folder if `overwrite` is set. Returns one line about that run and about
    what is left, which no run wrote, or '' if the folder was empty. BadInput for a folder that may not be emptied."""
    if run_dir.exists() and not run_dir.is_dir():
        raise BadInput(f"run_dir: {run_dir} is not a folder, expected one, or a name for a new one")
    if not run_dir.exists() or not _content(run_dir):
        return ""
    if not (run_dir / "config.json").exists():
        raise BadInput(f"run_dir: {run_dir} is not empty and not a run's folder, expected a new or empty one")
    places = [run_dir, *filter(Path.is_dir, [run_dir / EMITTED_RUN_DIR])]
    for place in places:
        if holder := _in_use(place):
            raise BadInput(f"run_dir: {place} is in use: {holder}")
    if not overwrite:
        resume = ", or --resume" if has_checkpoints(run_dir) else ""
        raise BadInput(f"run_dir: {run_dir} holds another run, expected a new one{resume}, or --overwrite")
    for place in places:
        os.close(hold(place))
    n_steps = sum(map(n_steps_of, places))
    left = [path.relative_to(run_dir).as_posix() for path in _delete_run(run_dir)]
    kept = f"; left {shortened(left, NAMES_MAX)}, which no run wrote" if left else ""
    return f"replaced {run_dir}: its run had {n_steps} steps{kept}"


def _delete_run(run_dir: Path) -> list[Path]:
    """Delete what a run has written into its folder. Returns what is left."""
    left: list[Path] = []
    # config.json goes last: it marks the folder as a run's.
    for path in sorted(_content(run_dir), key=lambda path: (path.name == "config.json", path)):
        if not WRITTEN.fullmatch(path.name):
            left.append(path)
        elif not path.is_dir() or path.is_symlink():
            path.unlink()
        elif path.name == EMITTED_RUN_DIR:
            left += _delete_run(path)
            (path / LOCK).unlink(missing_ok=True)
        elif path.name == "checkpoints":
            for folder in step_folders(run_dir):
                if not folder.is_symlink():
                    shutil.rmtree(folder)
            left += sorted(path.iterdir())
        else:
            shutil.rmtree(path)
        if path.is_dir() and not any(path.iterdir()) and path not in left:
            path.rmdir()
    return left


def n_steps_of(run_dir: Path) -> int:
    """The number of steps in the metrics of a run."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def has_checkpoints(run_dir: Path) -> bool:
    """Whether a checkpoint was begun in this folder, so that there may be something to go on from."""
    return any(run_dir.glob("checkpoints/*/"))


def live_holder(run_dir: Path) -> int:
    """The process that has locked the folder, if it lives; else 0. If several processes share the lock, the one that
    came last counts."""
    try:
        with (run_dir / LOCK).open("rb") as lock:
            pid = int(lock.read(20) or b"0")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nor may others share it
            except BlockingIOError:
                os.kill(pid, 0)
            else:
                return 0
    except (OSError, ValueError):  # no such file, or no such process
        return 0
    return pid


def _in_use(run_dir: Path) -> str:
    """A text that says which live process has locked the folder and how to end it or its run; '' if there is none."""
    pid = live_holder(run_dir)
    if not pid:
        return ""
    if has_ended(run_dir):
        return f"process {pid} is left of the run that has ended there, or begins another; kill {pid} ends it"
    stop = shell_line("python", "scripts/fleet.py", "stop", f"--run_dir={run_dir}")
    return f"a run is under way there (process {pid}); {stop} ends it"


def _content(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.iterdir() if path.name != LOCK]


def check_not_live(run_dir: Path) -> None:
    """BadInput if a run is under way in the folder."""
    if (run_dir / LOCK).exists():
        os.close(hold(run_dir))


def hold(run_dir: Path, timeout_s: float = 10.0) -> int:
    """Lock the folder. Returns a file descriptor that keeps other runs out while this process lives, or a child that
    inherits it. BadInput if a run is under way there. The processes of a run whose launcher was killed need a moment to
    end: BadInput if some still hold the folder after timeout_s."""
    run_dir.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return lock_file(run_dir / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB, str(os.getpid()))
        except BlockingIOError:
            if (holder := _in_use(run_dir)) or time.monotonic() > deadline_s:
                raise BadInput(f"run_dir: {run_dir} is in use: {holder or NOT_ENDED}") from None
        time.sleep(POLL_S)


@contextlib.contextmanager
def shared(run_dir: Path) -> Iterator[None]:
    """Inside this context a process of a run that has no launcher shares the lock of its folder with the others of that
    run, so that no launcher deletes the folder. Where a launcher has locked the folder, that is enough. A disk that
    takes no lock does not keep the process from its work."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            run_dir.mkdir(parents=True, exist_ok=True)
            held.callback(os.close, lock_file(run_dir / LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB, str(os.getpid())))
        yield
