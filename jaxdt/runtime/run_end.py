"""Reads from the files of a run that has ended how it ended, and which command continues it."""

from pathlib import Path

from jaxdt.run import config as configs
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, shell_line
from jaxdt.run.run_folder import RunFolders, has_ended
from jaxdt.run.serialize import parse_json
from jaxdt.runtime.storage.checkpoint import about_run, newest_whole


def ended_run(run_dir: Path) -> str:
    """A text that says how the run of a folder has ended, and which command continues it; '' if its coordinator was
    started since."""
    if not has_ended(run_dir):
        return ""
    try:
        reason = parse_json((run_dir / "summary.json").read_bytes())["reason"]
    except (OSError, ValueError, KeyError, TypeError):
        reason = "its summary.json cannot be read"
    return f"the run in {run_dir} has ended: {reason}; {how_to_go_on(run_dir)}"


def has_steps(run_dir: Path) -> bool:
    """Whether the run has done a step, so that there is something to draw."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def how_to_go_on(run_dir: Path, makes_one: bool = False) -> str:
    """The command that continues from a run's newest whole checkpoint. `makes_one`: the run is about to make it."""
    is_local, job = (run_dir / "run").exists(), RunFolders.of(run_dir).job  # launched here; or where --emit wrote it
    to_go_on, newest, steps = "to go on", "the newest of its checkpoints", list[str]()
    config = _config_of(run_dir)
    about = about_run(config, "") if config else {}
    about.pop("data", None)  # the token file may not be here
    if not makes_one:
        try:
            found, _ = newest_whole(run_dir, about, elsewhere=not is_local)
        except BadInput as problem:
            again = "; the same command with --overwrite starts again" if is_local else ""
            return f"there is nothing to go on from: {problem}{again}"
        to_go_on, newest = f"to go on from step {found.version}", found.folder
        if config and found.version >= config.train.steps:  # else the run would be refused: it has no steps left
            steps = [f"--config.train.steps={2 * found.version}"]
    words = ("python", "scripts/launch.py", "--resume")
    if is_local:
        return f"{to_go_on}: {shell_line(*words, f'--run_dir={run_dir}', *steps)}"
    if job != run_dir:
        resume = shell_line(*words, f"--emit={job}", *steps)
        return f"{to_go_on}: {resume}, and start each process again with its flag file as that prints"
    added = shell_line(f"--resume_from={newest}", *steps)
    return f"{to_go_on}: start each process again with its flag file and {added}"


def _config_of(run_dir: Path) -> RunConfig | None:
    """The config of a run, None if it cannot be read: the command that is printed says what is wrong with it."""
    try:
        return configs.parse(parse_json((run_dir / "config.json").read_bytes()))
    except (OSError, ValueError, TypeError, BadInput):
        return None
