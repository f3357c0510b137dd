"""A run whose processes are all on this machine: start it, look at it, wait for it, stop it. scripts/launch.py is this
with flags.

    run = launch(config, "runs/python", LaunchOptions(emulate="configs/networks/four_cities.json"))
    run.metrics  # of the steps so far
    run.wait()

A thread of this process looks after the coordinator and the peers, which are its children. They end when it ends.
"""

import functools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar

from jaxdt import build
from jaxdt.api.config import Config, fields_of
from jaxdt.cli import environment, gpu_flags, local_run, resume_flags, run_inputs
from jaxdt.cli.local_run import SCRIPTS
from jaxdt.cli.run_inputs import RunOptions
from jaxdt.membership.operations import STOPPED
from jaxdt.model.data import verify_checksum
from jaxdt.run import codec, codec_choice
from jaxdt.run import profile as profiles
from jaxdt.run.config import RunConfig
from jaxdt.run.cpus import cores_text, usable_cores
from jaxdt.run.errors import BadInput, require_text
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.options import at_least, option, with_meanings
from jaxdt.run.plan import Plan
from jaxdt.run.profile import CodecTimes
from jaxdt.runtime import run_dir as run_dirs
from jaxdt.runtime.coordinator_folder import drop_damaged
from jaxdt.runtime.fleet import LocalFleet
from jaxdt.runtime.run_end import has_steps, how_to_go_on
from jaxdt.runtime.run_job import RunInputs
from jaxdt.runtime.storage.checkpoint import Found, about_run, mark_complete, newest_whole
from jaxdt.runtime.storage.model_folder import check_model_of_run

VERIFIED_BYTES_MAX = 1 << 30  # takes about a second; scripts/doctor.py verifies larger token files
COORDINATOR_LOG = "coordinator.log"


@dataclass(frozen=True, repr=False)
class Picture:
    """A PNG file; a notebook shows it inline. `text`: what was said when it was drawn."""

    path: Path
    text: str = ""

    def __repr__(self) -> str:
        return f"Picture({self.path.name})"

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


def report(run_dir: str | Path) -> Picture:
    """Write trace.jsonl, timeline.json and report.png into the folder of a run that has ended: loss, timeline of a
    step, bytes per link, predicted and measured step times. BadInput for any other folder.

    A process of its own draws, so that this one need not hold the trace and matplotlib."""
    command = [sys.executable, str(SCRIPTS / "report.py"), f"--run_dir={run_dir}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BadInput((done.stderr.strip().splitlines() or [f"{run_dir}: cannot be reported"])[-1])
    return Picture(Path(run_dir) / "report.png", done.stdout.strip())


@with_meanings
@dataclass(frozen=True)
class LaunchOptions(RunOptions):
    """The options of a launch, beside the config of the run. `plan` may also be a Plan.

    With `resume`, a (kept) option that is None is what it was; an empty text or 0 is the default. Flags of
    scripts/launch.py have the same names:"""

    network: str | Path | None = option(
        None, "Measured links, for the prediction and codec auto; else those of --emulate.", kept=True
    )
    profile: str | Path | None = option(None, "For codec auto: a profile.json; by default int8 is measured.")
    pin: int | None = option(
        None,
        "CPUs of each peer; 0, the default, divides this machine's among them if there are enough.",
        at_least(0),
        kept=True,
    )
    gpus_per_peer: str | None = option(
        None,
        "GPUs of each peer: an integer, or 1/N for N peers on one GPU. By default the peers of this machine divide its "
        "GPUs, and with --emit each peer takes what jax finds.",
        kept=True,
    )
    init_from: str | Path | None = option(
        None,
        "A model folder of tools/import_model.py: the run begins with its parameters, and its config chooses no more "
        "of its model than the length of samples.",
    )
    untie: bool = option(
        False,
        "With --init_from: the head gets a copy of the table that it shared with the embedding, and is trained apart "
        "from it.",
    )
    overwrite: bool = option(False, "Delete the files of an earlier run in run_dir.")
    resume: bool = option(False, "Continue from the newest complete checkpoint of run_dir, or of --emit.")
    show: bool = option(
        False, "Print what the coordinator prints, which else goes to logs/coordinator.log.", has_flag=False
    )


Options = TypeVar("Options", bound=LaunchOptions)
GivenOptions = TypeVar("GivenOptions", bound=LaunchOptions, covariant=True)


@dataclass(frozen=True, kw_only=True)
class LaunchInputs(RunInputs, Generic[GivenOptions]):
    """The inputs of a run, and the options with which it is launched. notes: what was said of the codecs of the
    links."""

    options: GivenOptions
    notes: tuple[str, ...] = ()


class Run:
    """A run that `start` has started, in its folder `run_dir`. Its output begins at byte `output_start` of its log."""

    def __init__(self, run_dir: Path, fleet: LocalFleet, lock: int, output_start: int):
        self.run_dir = run_dir
        self._fleet = fleet
        self._lock = lock
        self._output_start = output_start
        self._code: int | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._look_after, name="fleet", daemon=True)
        self._thread.start()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """An object for each committed step so far: step, loss, step_s, tokens_per_s (docs/reference/files.md)."""
        return local_run.metrics(self.run_dir)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json, empty until the run has ended."""
        return local_run.summary(self.run_dir)

    @property
    def output(self) -> str:
        """The output of the coordinator since this launch, if the run was not launched to show it. The output of
        earlier launches stands before it in logs/coordinator.log."""
        path = self.run_dir / "logs" / COORDINATOR_LOG
        return path.read_bytes()[self._output_start :].decode() if path.exists() else ""

    @property
    def way_on(self) -> str:
        """The command that continues a run that has ended before its last step, or why none does; '' for a run that is
        under way, done, or has failed before its first step."""
        is_stopped = self.summary.get("reason", "").startswith(STOPPED)
        is_cut = self._code == ExitCode.INTERRUPTED or is_stopped or (self._code and has_steps(self.run_dir))
        return how_to_go_on(self.run_dir) if self._code is not None and is_cut else ""

    def __repr__(self) -> str:
        state = "is under way" if self._thread.is_alive() else "has ended"
        return f"Run({str(self.run_dir)!r}: {state}, {len(self.metrics)} steps)"

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until the run has ended, for at most `timeout_s`. Returns its exit code (docs/reference/exit_codes.md),
        or None while it is under way."""
        self._thread.join(timeout_s)
        if self._error:
            raise self._error
        return self._code

    def stop(self) -> None:
        """End the run after a checkpoint, as Ctrl-C does at launch.py. A second call ends the run at once. This only
        asks: `wait` returns when the run has ended, with code 130."""
        self._fleet.interrupt()

    def report(self) -> Picture:
        """The picture of the report of the run, which must have ended (jaxdt.report)."""
        return report(self.run_dir)

    def _look_after(self) -> None:
        try:
            self._code = self._fleet.run()
        except BaseException as error:  # wait raises it where somebody reads it
            self._error = error
        finally:
            os.close(self._lock)


def launch(config: Config, run_dir: str | Path, options: LaunchOptions = LaunchOptions()) -> Run:
    """Start a run of the config in a new folder, and return while it is under way. The config is what `load_config` or
    `base_config` returns, or a RunConfig. BadInput where it is wrong, where the options do not fit it, or where the
    folder holds something else; nothing is started then. It names fields of LaunchOptions where scripts/launch.py
    names flags."""
    try:
        if options.resume:
            options = resume_flags.completed(Path(run_dir), options)
        say = print if options.show else _say_nothing
        checked = check(config, options, "config")
        return start(with_codecs(checked, say), run_dir, say)
    except BadInput as error:
        names = "|".join(field.name for field in fields(LaunchOptions))
        raise BadInput(re.sub(rf"(?<!\S)--({names})\b", r"LaunchOptions.\1", str(error))) from None


def check(config: Config, options: Options, source: str = "--config") -> LaunchInputs[Options]:
    """Read and check what a launch is given; `source` names the plan of the config in errors."""
    if options.resume and options.overwrite:
        raise BadInput("--overwrite: deletes what --resume continues from, expected one of them")
    fields = run_inputs.with_model(fields_of(config), options.init_from, options.untie)
    checked = LaunchInputs(**vars(run_inputs.check(fields, options, source)), options=options)
    check_model_of_run(checked.config, resumes=options.resume)
    checked.config.model.check_source(resumes=options.resume)
    for file in checked.data.files or [checked.data]:
        if file.tokens.nbytes <= VERIFIED_BYTES_MAX:
            verify_checksum(file)
    if options.network:
        run_inputs.network_of(str(options.network), checked.plan)
    gpus_per_peer(checked)
    return checked


def with_codecs(checked: LaunchInputs[Options], say: Callable[[str], None]) -> LaunchInputs[Options]:
    """The run with a codec for each link where its plan says auto; `say` hears each choice and its reason."""
    options = checked.options
    config, path = checked.config, options.network or options.emulate
    if not codec_choice.undecided(config, checked.plan):
        return checked
    if not path:
        raise BadInput("codec: auto needs to know the links, expected --emulate=NETWORK.json or --network=NETWORK.json")
    network = run_inputs.network_of(str(path), checked.plan)
    if options.profile:
        times = codec_choice.profiled(config, network, profiles.load(str(options.profile)))
    else:
        times = _measured_int8(config)
    plan, choices = codec_choice.choose(config, checked.plan, network, times, build.follows_plan(config))
    for choice in choices:
        say(str(choice))
    return replace(checked, plan=plan, notes=tuple(map(str, choices)))


def _measured_int8(config: RunConfig) -> Callable[[int, int], CodecTimes]:
    """Seconds of int8 at (peer, layer), measured on this machine and taken for every peer."""
    from jaxdt.runtime.calibrate.stage_times import time_codec  # imports jax

    environment.keep_off_gpus()

    @functools.cache
    def timed(width: int) -> CodecTimes:
        shape = (*config.microbatch_shape, width)
        return time_codec(codec.parse(codec.INT8), shape, config.dtype)

    return lambda peer, layer: timed(config.model.facts.boundary_width(layer))


def start(
    checked: LaunchInputs[LaunchOptions], run_dir: str | Path, say: Callable[[str], None], began_s: float | None = None
) -> Run:
    """Start the processes of a run that was checked. `say` hears which run was replaced, or what a resumed run
    changes and where it continues. If the coordinator's output goes to a log, that begins with what was said.
    `began_s`: since when the user waits, on the monotonic clock."""
    run_dir, config, plan, options = Path(run_dir), checked.config, checked.plan, checked.options
    require_text("run_dir", str(run_dir))
    began_s = time.monotonic() if began_s is None else began_s
    if not (SCRIPTS / "train.py").exists():
        raise BadInput(f"{SCRIPTS}: has no train.py, expected an installation from the repository: pip install -e .")
    _check_pin(options.pin or 0, plan)
    gpus = gpu_flags.flags_of_local_peers(sorted([*plan.peers, *plan.workers]), config.platform, gpus_per_peer(checked))
    flags = run_inputs.process_flags(options)
    replaced = ""
    if options.resume:
        if not run_dirs.has_checkpoints(run_dir):  # nothing is written there then
            run_dirs.check_not_live(run_dir)
            raise BadInput(f"{run_dir}: holds no complete checkpoint; with --overwrite the run starts again")
    else:
        replaced = run_dirs.clear(run_dir, options.overwrite)
    lock = run_dirs.hold(run_dir)
    log = None if options.show else run_dir / "logs" / COORDINATOR_LOG
    output_start = log.stat().st_size if log and log.exists() else 0
    try:
        lines = [replaced] if replaced else []
        if options.resume:
            found, lines = resumed(run_dir, checked)
            flags.append(f"--resume_from={found.folder}")
        for line in lines:
            say(line)
        run_dirs.write_job(run_dir, config, plan)
        resume_flags.save(run_dir, options)
        if log:
            _append(log, [*checked.notes, *lines])
    except BaseException:
        os.close(lock)
        raise
    fleet = LocalFleet(
        run_dir,
        plan,
        SCRIPTS,
        flags=flags,
        coordinator_flags=coordinator_flags(options),
        began_s=began_s,
        lock=lock,
        log=log,
        n_cpus=options.pin or 0,
        gpu_flags=gpus,
    )
    return Run(run_dir, fleet, lock, output_start)


def coordinator_flags(options: LaunchOptions) -> list[str]:
    """The flag of coordinate.py with the measured links, on which it predicts the step and looks for better plans."""
    return [f"--network={options.network}"] if options.network else []


def resumed(run_dir: Path, checked: LaunchInputs[LaunchOptions], elsewhere: bool = False) -> tuple[Found, list[str]]:
    """The newest checkpoint from which this config can continue the run in the folder, and lines: why a newer one
    cannot be used, what was damaged, what the run changes, and where it continues. BadInput if there is no checkpoint,
    or no step left; nothing is deleted then. `elsewhere`: parts of it may be on other hosts."""
    found, problems = newest_whole(run_dir, about_run(checked.config, checked.data.checksum), elsewhere)
    mark_complete(run_dir, found.record.checkpoint, found.record.about)
    n_steps = checked.config.train.steps
    if found.version >= n_steps:
        raise BadInput(f"train.steps: got {n_steps}, expected more than the {found.version} of {found.folder}")
    changes = resume_flags.changes(run_dir, checked.config, checked.plan, checked.options)
    older = f"--resume: a newer checkpoint cannot be used, so the run continues from step {found.version}"
    begins = f"--resume: the run continues from step {found.version}, checkpoint {found.folder}"
    return found, [*(f"{older}: {problem}" for problem in problems), *drop_damaged(run_dir), *changes, begins]


def _append(log: Path, lines: Sequence[str]) -> None:
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def _say_nothing(line: str) -> None:
    del line


def _check_pin(pin: int, plan: Plan) -> None:
    """BadInput unless this process may use `pin` CPUs for each peer."""
    n_peers, n_cpus = len([*plan.peers, *plan.workers]), int(usable_cores())
    if pin * n_peers > n_cpus:
        most = f"at most {n_cpus // n_peers}" if n_peers <= n_cpus else "0, which lets them share"
        raise BadInput(
            f"--pin: got {pin} for each of {n_peers} peers, this machine has {cores_text()}, expected {most}"
        )


def gpus_per_peer(inputs: LaunchInputs[LaunchOptions]) -> Fraction | None:
    """GPUs of each peer, which must fit the platform and the microbatches of the config; None: they are not counted."""
    config, per_peer = inputs.config, gpu_flags.parse_gpus_per_peer(inputs.options.gpus_per_peer or "")
    if per_peer and config.platform not in ("any", "gpu"):
        raise BadInput(f"--gpus_per_peer: got {per_peer}, but platform is {config.platform}, expected any or gpu")
    size = config.train.microbatch_size
    if per_peer and per_peer > 1 and size % per_peer:
        raise BadInput(f"--gpus_per_peer: got {per_peer}, expected a divisor of train.microbatch_size {size}")
    return per_peer
