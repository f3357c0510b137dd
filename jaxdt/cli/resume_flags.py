"""What a resumed run keeps of its launch unless it is given again: its config, its plan, and options that launch.json
holds. Needs no jax."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from absl import flags

from jaxdt.cli import option_flags
from jaxdt.cli.config_sources import flat
from jaxdt.run import plan as plans
from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, shell_line, why
from jaxdt.run.options import kept_names
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import LAUNCH, LAUNCH_PATHS, RunFolders, launch_flags
from jaxdt.runtime.storage.durable import write_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

NOT_GIVEN = "not given"
OF_THE_PLAN = ("--config.plan.", "--config.codec", "--config.model.compression")


def with_flags_of_run(argv: Sequence[str]) -> list[str]:
    """The command line of launch.py; with --resume it gets the config and the plan of the run in the folder. Fields of
    the config change by --config.FIELD=VALUE, and a new cut needs a new plan.

    A --config that is given with --resume is not read."""
    given = _given(argv)
    if not given.resume or not (given.run_dir or given.emit):
        return list(argv)
    places = folders(given.run_dir, given.emit)
    run_dir = places.run_dir
    if not (run_dir / "config.py").exists():
        hosts = launch_flags(places.job).get("hosts", "") if places.job != run_dir else ""
        where = f"; on {hosts.split(',')[0]}, where its coordinator ran, the same command finds it" if hosts else ""
        raise BadInput(f"--resume: {run_dir} holds no run, expected the folder of one{where}")
    if places.job != run_dir and not given.emit:
        expected = shell_line(f"--emit={places.job}")
        raise BadInput(f"--resume: {run_dir} is of a run on several hosts, expected {expected}")
    if given.config:
        print(f"--resume: {given.config} is not read, the run continues with {run_dir / 'config.json'}", flush=True)
    added = [f"--config={run_dir / 'config.py'}"]
    if given.plan is None and not any(word.startswith(OF_THE_PLAN) for word in argv):
        added.append(f"--plan={run_dir / 'plan.json'}")
    return [argv[0], *added, *_without_config(argv[1:])]


def folders(run_dir: str | None, emitted: str | None) -> RunFolders:
    """The folders of the run that is resumed, from --run_dir or --emit."""
    return RunFolders.of(Path(emitted or run_dir or ""))


def _given(argv: Sequence[str]) -> flags.FlagValues:
    """The flags that matter here, as the command line gives them; the others are checked later."""
    values = flags.FlagValues()
    flags.DEFINE_bool("resume", False, "", flag_values=values)
    for name in ("run_dir", "emit", "config", "plan"):
        flags.DEFINE_string(name, None, "", flag_values=values)
    with contextlib.suppress(flags.Error):  # it is refused when all flags are read
        values(argv, known_only=True)
    values.mark_as_parsed()
    return values


def _without_config(words: Sequence[str]) -> Iterator[str]:
    takes_next = False
    for word in words:
        is_value, takes_next = takes_next, word in ("--config", "-config")
        if not is_value and not takes_next and not word.startswith(("--config=", "-config=")):
            yield word


def completed(folder: Path, options: Options) -> Options:
    """The options with which the run in this folder is resumed: those that are None are what they were."""
    earlier = launch_flags(folder)
    missing = {
        name: earlier[name] for name in kept_names(options) if name in earlier and getattr(options, name) is None
    }
    return replace(options, **option_flags.of_texts(type(options), missing))


def save(folder: Path, options: "DataclassInstance") -> None:
    """Write launch.json: those options of this launch that a resumed run keeps. A file in the folder goes with it to
    another host, and is named without it."""
    fields = kept_texts(options)
    paths = {name: Path(fields[name]) for name in LAUNCH_PATHS if name in fields}
    in_folder = {name: path.name for name, path in paths.items() if path.parent == folder.resolve()}
    write_json(folder / LAUNCH, fields | in_folder)


def kept_texts(options: "DataclassInstance") -> dict[str, str]:
    """The options that a resumed run keeps and that are given, as flags write them; paths are whole ones."""
    values = {name: getattr(options, name) for name in kept_names(options)}
    texts = {name: option_flags.as_text(value) for name, value in values.items() if value}
    return texts | {name: str(Path(texts[name]).resolve()) for name in LAUNCH_PATHS if name in texts}


def changes(run_dir: Path, config: RunConfig, plan: Plan, options: "DataclassInstance") -> list[str]:
    """One line for each field or kept flag in which a resumed run differs from what the run in this folder was."""
    path = run_dir / "config.json"
    try:
        before = dict(flat(serialize.parse_json(path.read_bytes())))
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected what a run wrote") from None
    after = dict(flat(serialize.write(config)))
    names = [name for name in after if after[name] != before.get(name)]
    lines = [f"--resume: {name} is {after[name]!r}, it was {before.get(name)!r}" for name in names]
    earlier = plans.load(str(run_dir / "plan.json"))
    if plan != earlier:
        lines.append(f"--resume: the plan has {_cut(plan)}, it had {_cut(earlier)}")
    had, has = launch_flags(RunFolders.of(run_dir).job), kept_texts(options)
    for name in kept_names(options):
        if has.get(name) != had.get(name):
            lines.append(f"--resume: --{name} is {has.get(name, NOT_GIVEN)}, it was {had.get(name, NOT_GIVEN)}")
    return lines


def _cut(plan: Plan) -> str:
    return f"{plan.n_stages} stages on {len(plan.peers)} peers"
