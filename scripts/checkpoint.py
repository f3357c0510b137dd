"""Look after a run's checkpoints.

python scripts/checkpoint.py inspect --run_dir=runs/x     what there is: steps, sizes, model, entries
python scripts/checkpoint.py verify --run_dir=runs/x      read every array of every complete checkpoint
python scripts/checkpoint.py prune --run_dir=runs/x --keep=1
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

from jaxdt.cli import run_flags  # noqa: E402
from jaxdt.model.gpt import stage_entries  # noqa: E402
from jaxdt.runtime.storage import checkpoint  # noqa: E402
from jaxdt.spec import serialize  # noqa: E402
from jaxdt.spec.errors import BadInput  # noqa: E402
from jaxdt.spec.model import GPTConfig  # noqa: E402

KEEP = flags.DEFINE_integer("keep", 1, "With prune: how many of the newest complete checkpoints stay.")


def inspect(run_dir: Path) -> int:
    for folder in sorted(run_dir.glob("checkpoints/*")):
        size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if not (folder / checkpoint.COMPLETE).exists():
            print(f"{folder.name}  {size_bytes / 1e6:8.1f} MB  incomplete")
            continue
        try:
            model, generation = model_of(folder), checkpoint.complete_record(folder)["generation"]
        except BadInput as error:
            print(f"{folder.name}  {size_bytes / 1e6:8.1f} MB  damaged: {error}")
            continue
        sharing = f" in {model.n_shared_blocks} shared blocks" if model.n_shared_blocks else ""
        shape = f"{model.n_layers} layers{sharing}, d {model.d_model}, vocabulary {model.vocab_size}"
        print(f"{folder.name}  {size_bytes / 1e6:8.1f} MB  complete, generation {generation}, {shape}")
    return 0


def verify(run_dir: Path) -> int:
    """Exit code 1 if anything is missing, unreadable or not finite."""
    bad = 0
    for folder in checkpoint.complete_checkpoints(run_dir):
        problem = problem_of(folder)
        print(f"{folder.name}  {problem or 'good'}")
        bad += bool(problem)
    return 1 if bad else 0


def model_of(folder: Path) -> GPTConfig:
    """The model that a complete checkpoint holds; BadInput if that cannot be read."""
    return serialize.read(
        GPTConfig, checkpoint.complete_record(folder)["model"], f"{folder / checkpoint.COMPLETE}: model"
    )


def problem_of(folder: Path) -> str:
    try:
        model = model_of(folder)
        entries = checkpoint.load_entries(folder, stage_entries(model, 0, model.n_layers))
    except BadInput as error:
        return f"cannot be read: {error}"
    for name, entry in entries.items():
        for leaf in checkpoint.leaves(entry):
            if np.issubdtype(leaf.dtype, np.floating) and not np.isfinite(leaf).all():
                return f"{name} holds numbers that are not finite"
    return ""


def prune(run_dir: Path) -> int:
    if KEEP.value < 1:
        raise BadInput(f"--keep: got {KEEP.value}, expected at least 1")
    for path in checkpoint.prune(run_dir, KEEP.value):
        print(f"deleted {path}")
    return 0


COMMANDS = {"inspect": inspect, "verify": verify, "prune": prune}


def main(command: str) -> int:
    run_flags.required("run_dir")
    run_dir = Path(run_flags.RUN_DIR.value)
    if not (run_dir / "checkpoints").is_dir():
        raise BadInput(f"run_dir: {run_dir} holds no checkpoints")
    return COMMANDS[command](run_dir)


if __name__ == "__main__":
    run_flags.run(main, COMMANDS)
