"""The flags of a run that is resumed: those that it was launched with, unless they are given again. Needs no jax."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from absl import flags

from jaxdt.cli.config_sources import flat
from jaxdt.run import plan as plans
from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, shell_line, why
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import LAUNCH, LAUNCH_PATHS, RunFolders, launch_flags
from jaxdt.runtime.storage.durable import write_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

# Flags of launch.py, beside the config and the plan, that a resumed run keeps, and their types; some of them are paths.
KEPT = {"emulate": str, "network": str, "emulate_forward_s": float, "stall": str, "pin": int, "gpus_per_peer": str}
KEPT_OF_HOSTS = ("hosts", "port")  # with --emit
NOT_GIVEN = "not given"
OF_THE_PLAN = ("--config.plan.", "--config.codec", "--config.model.compression")


def with_flags_of_run(argv: Sequence[str]) -> list[str]:
    """The command line of launch.py; with --resume it is completed from the folder of the run: config and plan are
    those that the run had, fields of the config change by --config.FIELD=VALUE, and a new cut needs a new plan.

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
    earlier = launch_flags(places.job)
    names = [*KEPT, *KEPT_OF_HOSTS]
    added += [f"--{name}={earlier[name]}" for name in names if name in earlier and getattr(given, name) is None]
    return [argv[0], *added, *_without_config(argv[1:])]


def folders(run_dir: str | None, emitted: str | None) -> RunFolders:
    """The folders of the run that is resumed, from --run_dir or --emit."""
    return RunFolders.of(Path(emitted or run_dir or ""))


def _given(argv: Sequence[str]) -> flags.FlagValues:
    """The flags that matter here, as the command line gives them; the others are checked later."""
    values = flags.FlagValues()
    flags.DEFINE_bool("resume", False, "", flag_values=values)
    for name in ("run_dir", "emit", "config", "plan", *KEPT, *KEPT_OF_HOSTS):
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


def completed(run_dir: Path, options: Options) -> Options:
    """The options with which the run in this folder is resumed: those that are None are what they were. Their names are
    those of flags."""
    earlier = launch_flags(run_dir)
    missing = [name for name in KEPT if name in earlier and getattr(options, name) is None]
    return replace(options, **{name: KEPT[name](earlier[name]) for name in missing})


def save(folder: Path, options: object, **of_hosts: str) -> None:
    """Write launch.json: what a resumed run keeps of the options of this launch, which have the names of flags, and of
    those of KEPT_OF_HOSTS. A file in the folder goes with it to another host, and is named without it."""
    fields = _as_kept(options)
    paths = {name: Path(fields[name]) for name in LAUNCH_PATHS if name in fields}
    in_folder = {name: path.name for name, path in paths.items() if path.parent == folder.resolve()}
    write_json(folder / LAUNCH, fields | in_folder | of_hosts)


def _as_kept(options: object) -> dict[str, str]:
    fields = {name: str(getattr(options, name)) for name in KEPT if getattr(options, name)}
    return fields | {name: str(Path(fields[name]).resolve()) for name in LAUNCH_PATHS if name in fields}


def changes(run_dir: Path, config: RunConfig, plan: Plan, options: object) -> list[str]:
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
    had, has = launch_flags(RunFolders.of(run_dir).job), _as_kept(options)
    for name in KEPT:
        if has.get(name) != had.get(name):
            lines.append(f"--resume: --{name} is {has.get(name, NOT_GIVEN)}, it was {had.get(name, NOT_GIVEN)}")
    return lines


def _cut(plan: Plan) -> str:
    return f"{plan.n_stages} stages on {len(plan.peers)} peers"
