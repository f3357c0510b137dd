"""Write the model of a run, or of a model folder, as transformers loads it.

    python scripts/tools/export_model.py --run_dir=runs/x --to=DIR [--dtype=bf16] [--checkpoint=DIR]
    python scripts/tools/export_model.py --run_dir=runs/x --to=DIR --adapter
    python scripts/tools/export_model.py --model=models/x --to=DIR

DIR gets config.json, model.safetensors (shards above --shard_gb), and the tokenizer and chat template with which the
model came. Of a run that trains an adapter the matrices are those with which the model computes; with --adapter, DIR
gets the adapter alone, as peft loads it. Uses the newest checkpoint of the run that is whole, and holds one entry and
one tensor of it at a time.
Needs neither the extra hf nor torch.
"""

from collections.abc import Callable
from pathlib import Path

from absl import flags

from jaxdt.cli import environment, script_main
from jaxdt.interop.hf_files import DTYPES, write_adapter, write_folder
from jaxdt.run import config as configs
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput, read_text, require_one_of
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.run_folder import RunFolders
from jaxdt.runtime.storage.checkpoint import about_run, complete_record, newest_whole
from jaxdt.runtime.storage.model_folder import IN_A_RUN, ORIGIN, Leaves, as_leaves, as_tree, new_folder, open_model

RUN_DIR = flags.DEFINE_string("run_dir", None, "The folder of a run.")
CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A checkpoint of run_dir; by default the newest whole one.")
MODEL = flags.DEFINE_string("model", None, "A model folder, in place of a run.")
TO = flags.DEFINE_string("to", None, "The folder to write, a new one.")
DTYPE = flags.DEFINE_string("dtype", "fp32", f"Numbers of the tensors: {', '.join(DTYPES)}.")
BASE = flags.DEFINE_string("base", "", "With --adapter: where peft finds the model itself.")
ADAPTER = flags.DEFINE_boolean("adapter", False, "Write the adapter of the run alone, for peft.")
SHARD_GB = flags.DEFINE_float(
    "shard_gb", 4.0, "Size of a file, in 1e9 bytes, above which there are several.", 1e-6, 1e6
)


def main() -> int:
    environment.compute_on_cpu()
    if bool(RUN_DIR.value) == bool(MODEL.value) or not TO.value:
        raise BadInput("--run_dir, --model, --to: expected --to and one of the others, see --help")
    require_one_of("--dtype", DTYPE.value, tuple(DTYPES))
    options, load, origin = of_run(RunFolders.of(Path(RUN_DIR.value))) if RUN_DIR.value else of_model(Path(MODEL.value))
    if ADAPTER.value:
        return export_adapter(Path(TO.value), options, load)
    if options.adapter:
        options, load = options.without_adapter(), with_products(load)
    files = {path.name: path.read_bytes() for path in sorted(origin.glob("*"))}
    with new_folder(Path(TO.value), "a model") as folder:
        shard_bytes = int(SHARD_GB.value * 1e9)
        n_tensors = write_folder(folder, options, load, origin=files, dtype=DTYPE.value, shard_bytes=shard_bytes)
    print(f"{TO.value}: {n_tensors} tensors of {DTYPE.value}, with {', '.join(files) or 'config.json, no tokenizer'}")
    return 0


def export_adapter(to: Path, options: ModelSpec, load: Callable[[str], Leaves]) -> int:
    if not options.adapter:
        raise BadInput("--adapter: the model has none, expected a run with model.adapter")
    with new_folder(to, "an adapter") as folder:
        n_tensors = write_adapter(folder, options, load, base=BASE.value, dtype=DTYPE.value)
    print(f"{to}: {n_tensors} tensors of {DTYPE.value}, an adapter {options.adapter}")
    return 0


def with_products(load: Callable[[str], Leaves]) -> Callable[[str], Leaves]:
    """The entries of the model itself, each adapted matrix with its product."""
    from jaxdt.model.adapter import without_adapter

    return lambda name: as_leaves(without_adapter(as_tree(load(name))))


def of_model(folder: Path) -> tuple[ModelSpec, Callable[[str], Leaves], Path]:
    """The options of a model folder, how to read an entry, and the folder of what came with the model."""
    model = open_model(folder)
    return model.options, model.load, model.origin


def of_run(folders: RunFolders) -> tuple[ModelSpec, Callable[[str], Leaves], Path]:
    """The same of the newest whole checkpoint of a run."""
    from jaxdt.runtime.storage.entries import load_parts, whole_params

    path = folders.run_dir / "config.json"
    try:
        config = configs.parse(serialize.parse_json(read_text(path)))
    except (ValueError, BadInput) as error:
        raise BadInput(f"--run_dir: {folders.run_dir} holds no run (config.json: {error})") from None
    if CHECKPOINT.value:
        checkpoint = Path(CHECKPOINT.value)
        record = complete_record(checkpoint)
    else:
        found, problems = newest_whole(folders.run_dir, {"model": about_run(config, "")["model"]})
        for problem in problems:
            print(f"a newer checkpoint cannot be used, so this is of step {found.version}: {problem}")
        checkpoint, record = found.folder, found.record

    is_trained = {entry.name: bool(entry.n_trained) for entry in config.model.facts.entries}

    def load(name: str) -> Leaves:
        entry = load_parts(record.checkpoint.parts, [checkpoint], [name])[name] if is_trained[name] else None
        if entry and ADAPTER.value:  # needs none of the model's own
            return as_leaves(entry["params"])
        return as_leaves(whole_params(config, name, entry))

    return config.model, load, folders.job / IN_A_RUN / ORIGIN


if __name__ == "__main__":
    script_main.run(main)
