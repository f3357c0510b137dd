"""Reads from the files of a run that has ended how it ended, and which command goes on."""

from pathlib import Path
from typing import Any

from jaxdt.runtime.run_folders import ADDRESS, RunFolders
from jaxdt.runtime.storage.checkpoint import complete_checkpoints
from jaxdt.spec.errors import BadInput, shell_line, why
from jaxdt.spec.serialize import parse_json


def ended_run(run_dir: Path) -> str:
    """A text that says how the run of a folder has ended, and which command goes on from there; '' if its coordinator
    was started since."""
    summary, address = run_dir / "summary.json", run_dir / ADDRESS
    if not summary.exists() or (address.exists() and address.stat().st_mtime > summary.stat().st_mtime):
        return ""
    reason = _read(summary)["reason"]
    return f"the run in {run_dir} has ended: {reason}; {how_to_go_on(run_dir)}"


def has_steps(run_dir: Path) -> bool:
    """Whether the run has done a step, so that there is something to draw."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def how_to_go_on(run_dir: Path, makes_one: bool = False) -> str:
    """The command that goes on from a run's newest checkpoint. `makes_one`: the run is about to make it."""
    checkpoints = complete_checkpoints(run_dir)
    words, steps = ("python", "scripts/launch.py", "--resume"), _more_steps(run_dir)
    to_go_on = f"to go on from step {int(checkpoints[-1].name)}" if checkpoints and not makes_one else "to go on"
    if (run_dir / "run").exists():  # launched here
        return f"{to_go_on}: {shell_line(*words, f'--run_dir={run_dir}', *steps)}"
    if not checkpoints and not makes_one:
        return f"{run_dir} holds no complete checkpoint to go on from"
    job = RunFolders.of(run_dir).job
    if job != run_dir:
        resume = shell_line(*words, f"--emit={job}", *steps)
        return f"{to_go_on}: {resume}, and start each process again with its flag file as that prints"
    newest = "the newest of its checkpoints" if makes_one else checkpoints[-1]
    added = shell_line(f"--resume_from={newest}", *steps)
    return f"{to_go_on}: start each process again with its flag file and {added}"


def _read(path: Path) -> Any:
    """The content of a file that a run wrote; BadInput for a damaged one."""
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected what a run wrote") from None


def what_is_left(run_dir: Path) -> str:
    """A line about the checkpoint that a run has left which ended before its last step, and the command that goes on
    from it."""
    if (run_dir / "run").exists() and not complete_checkpoints(run_dir):
        return f"{run_dir} holds no complete checkpoint to go on from; the same command with --overwrite starts again"
    return how_to_go_on(run_dir)


def _more_steps(run_dir: Path) -> list[str]:
    """The flag without which a run that has done all its steps is not resumed; none for another run."""
    checkpoints = complete_checkpoints(run_dir)
    n_done = int(checkpoints[-1].name) if checkpoints else 0
    if not n_done or n_done < _read(run_dir / "config.json")["train"]["steps"]:
        return []
    return [f"--config.train.steps={2 * n_done}"]
