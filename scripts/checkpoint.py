"""List, verify or delete the checkpoints of a run.

    python scripts/checkpoint.py inspect --run_dir=runs/x
    python scripts/checkpoint.py verify --run_dir=runs/x
    python scripts/checkpoint.py prune --run_dir=runs/x --keep=1

inspect  prints the step, the size and the model of each checkpoint, and whether its files are as they were written
verify   reads every array of every complete checkpoint; exit code 1 if one is missing, unreadable or not finite
prune    deletes what is older than the newest whole checkpoints, which it reads before, and says what else it leaves
"""

import check_installed  # noqa: F401

# isort: split
from pathlib import Path

import numpy as np
from absl import flags

from jaxdt.cli import environment, option_flags, script_main
from jaxdt.cli.run_inputs import ProcessOptions
from jaxdt.run.errors import BadInput, printable
from jaxdt.run.model import read_options
from jaxdt.run.model_spec import ModelSpec
from jaxdt.runtime.coordinator_folder import begun_with
from jaxdt.runtime.storage import checkpoint, entries

option_flags.define(ProcessOptions, "run_dir")
KEEP = flags.DEFINE_integer("keep", 1, "With prune: how many of the newest complete checkpoints stay.")


def inspect(run_dir: Path) -> int:
    """Print one line per checkpoint."""
    steps = checkpoint.step_folders(run_dir)
    for folder in steps:
        size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        try:
            found = checkpoint.examine(folder)
            model = found and model_of(found.record, folder)
        except BadInput as error:
            print(f"{folder.name}  {size_bytes / 1e6:8.1f} MB  damaged: {error}")
            continue
        if not found or not model:
            print(f"{folder.name}  {size_bytes / 1e6:8.1f} MB  incomplete")
            continue
        record = found.record
        facts = model.facts
        n_runs = facts.n_runs(0, facts.n_layers)
        sharing = f" in {n_runs} shared blocks" if n_runs < facts.n_layers else ""
        shape = f"{facts.n_layers} layers{sharing}, d {facts.in_width}, vocabulary {facts.vocab_size}"
        about = f"generation {record.checkpoint.generation}, copies {record.copies}"
        elsewhere = f", {len(found.elsewhere)} parts on other disks" if found.elsewhere else ""
        print(f"{folder.name}  {size_bytes / 1e6:8.1f} MB  complete{elsewhere}, {about}, {shape}")
    for path in sorted(set((run_dir / "checkpoints").iterdir()) - set(steps)):
        print(
            f"{printable(path.name)}  is not of a run, which writes folders such as 00000050: neither read nor deleted"
        )
    return 0


def verify(run_dir: Path) -> int:
    """Print what is wrong with each complete checkpoint. Exit code 1 if something is."""
    n_bad = 0
    for folder in checkpoint.step_folders(run_dir):
        if not (folder / checkpoint.COMPLETE).exists():
            continue
        problem = problem_of(folder)
        print(f"{folder.name}  {problem or 'good'}")
        n_bad += bool(problem)
    return 1 if n_bad else 0


def model_of(record: checkpoint.CompleteRecord, folder: Path) -> ModelSpec:
    """The model that a complete checkpoint holds. BadInput if its record does not say."""
    return read_options(record.about.get("model"), f"{folder / checkpoint.COMPLETE}: model")


def problem_of(folder: Path) -> str:
    """The reason why a complete checkpoint cannot be used; '' if it can."""
    try:
        model = model_of(checkpoint.complete_record(folder), folder)
        state = entries.load_entries(folder, [entry.name for entry in model.facts.entries if entry.n_trained])
    except BadInput as error:
        return f"cannot be read: {error}"
    for name, entry in state.items():
        for leaf in entries.leaves(entry):
            if np.issubdtype(leaf.dtype, np.floating) and not np.isfinite(leaf).all():
                return f"{name} holds numbers that are not finite"
    return ""


def prune(run_dir: Path) -> int:
    """Delete the oldest checkpoints, without that with which a run began that has not ended."""
    if KEEP.value < 1:
        raise BadInput(f"--keep: got {KEEP.value}, expected at least 1")
    for path in checkpoint.prune(run_dir, KEEP.value, begun_with(run_dir), say=print):
        print(f"deleted {path}")
    return 0


COMMANDS = {"inspect": inspect, "verify": verify, "prune": prune}


def main(command: str) -> int:
    environment.compute_on_cpu()
    run_dir = Path(script_main.required("run_dir"))
    if not (run_dir / "checkpoints").is_dir():
        raise BadInput(f"run_dir: {run_dir} holds no checkpoints")
    return COMMANDS[command](run_dir)


if __name__ == "__main__":
    script_main.run(main, COMMANDS)
