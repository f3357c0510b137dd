"""Start a whole fleet on this machine, or write the files with which it is started on several hosts.

    python scripts/launch.py --config=configs/quickstart.py --run_dir=runs/x \\
        [--emulate=configs/networks/four_cities.json] [--config.train.steps=50]
    python scripts/launch.py --resume --run_dir=runs/x [--config.train.steps=100]
    python scripts/launch.py --config=configs/two_hosts.py --emit=DIR --hosts=10.0.0.1,10.0.0.2
    python scripts/launch.py --resume --emit=DIR [--config.train.steps=100]

On this machine the coordinator and the peers are children of this process. With --emit nothing is started. Exit codes:
0 done, 2 bad input, 3 a peer was lost, 130 interrupted.
"""

import check_installed  # noqa: F401

from jaxdt.cli import interrupts

# isort: split
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from absl import flags

from jaxdt.api import hosts
from jaxdt.api import launch as api
from jaxdt.cli import config_fields, config_flag, config_sources, environment, option_flags, resume_flags, script_main
from jaxdt.cli.run_inputs import ProcessOptions
from jaxdt.run.errors import BadInput, shell_line
from jaxdt.run.options import option
from jaxdt.run.run_folder import EMITTED_RUN_DIR, launch_flags
from jaxdt.runtime.reporting.console import print_line


@dataclass(frozen=True)
class Launch(hosts.HostOptions):
    """The flags of this script, beside --config and --run_dir."""

    show: bool = True
    report: bool = option(True, "Write trace.jsonl, timeline.json and report.png at the end.")
    print_config: bool = option(False, "Print the config and where each value comes from, and start nothing.")
    emit: str | None = option(None, "Folder for flag files, plan and credentials; nothing is started.")


option_flags.define(ProcessOptions, "run_dir")
option_flags.define(Launch)
FLAGS = flags.FLAGS
SUBJECTS = {  # of --help
    "What to train": ("config", "init_from", "untie", "plan", "print_config"),
    "The folder of the run": ("run_dir", "resume", "overwrite", "report"),
    "Links between the peers": ("emulate", "network", "profile"),
    "This machine": ("pin", "gpus_per_peer", "emulate_forward_s", "stall"),
    "Several hosts": ("emit", "hosts", "port"),
}


def main() -> int:
    began_s = time.monotonic() - time.process_time()  # imports are CPU-bound, so this is when the process began
    environment.keep_off_gpus()
    config, given = config_flag.config_dict(), option_flags.read(Launch)
    if given.resume:
        given = resume_flags.completed(resume_flags.folders(FLAGS.run_dir, given.emit).job, given)
    check_model_flags(given)
    checked = api.check(config, given)
    if given.print_config:
        print(config_table(checked))
        return 0
    check_used_flags(given)
    if given.init_from:
        facts = checked.config.model.facts
        shape = f"{facts.n_layers} layers, {facts.n_params:,} parameters, samples of at most {facts.max_len} tokens"
        say(f"--init_from: the run begins with {given.init_from}: {shape}")
    checked = api.with_codecs(checked, say)
    if given.emit:
        hosts.emit(Path(given.emit), checked, say)
        return 0
    run = api.start(checked, script_main.required("run_dir"), say, began_s)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: run.stop())
    code = run.wait()
    assert code is not None, "it has waited without a limit"
    to_draw = f"to draw these steps: {shell_line('python', 'scripts/report.py', f'--run_dir={run.run_dir}')}"
    interrupts.end_on_interrupt(f"interrupted when the run was over; {to_draw}")
    if code and run.summary.get("steps"):
        print(to_draw)
    if way_on := run.way_on:
        print(way_on)
    if code == 0 and given.report:
        print("draws the report", flush=True)
        print(run.report().text)
    return code


def say(line: str) -> None:
    print_line(line)


def config_table(inputs: api.LaunchInputs[Launch]) -> str:
    """Every field of the config and every flag that is not at its default, with where its value comes from."""
    given, run_dir = inputs.options, FLAGS.run_dir
    folders = resume_flags.folders(run_dir, given.emit)
    is_of_run = given.resume and given.plan == str(folders.run_dir / "plan.json")
    rows = config_sources.sourced(
        inputs.config,
        inputs.plan,
        config_flag.config_dict().to_dict(),
        by_flag=config_flag.overrides(),
        file_source=config_sources.RESUME if given.resume else "config file",
        plan_source=(config_sources.RESUME if is_of_run else "plan") if given.plan else None,
    )
    rows += [config_sources.SourcedValue("--run_dir", run_dir, config_sources.FLAG)] if run_dir else []
    kept = launch_flags(folders.job) if given.resume else {}
    return config_sources.table(
        rows + config_sources.sourced_flags(replace(given, plan=None, show=True, print_config=False), kept)
    )


def check_model_flags(given: Launch) -> None:
    """BadInput for a flag that says something else of a model that comes from a folder."""
    fields = config_flag.overrides()
    names = [name for name in fields if name.startswith("model.") and name != "model.adapter"]
    if given.init_from and names:
        expected = "expected no such flag, since the model is that of --init_from (--config.data.seq_len is the run's)"
        raise BadInput(f"--config.{names[0]}: got {fields[names[0]]!r}, {expected}")


def check_used_flags(given: Launch) -> None:
    """BadInput for a flag that would not be read beside the others, or a line for a field of the config."""
    if given.emit:
        hosts.check_folder(Path(given.emit))
    own = Path(given.emit) / EMITTED_RUN_DIR if given.emit else None
    if own and FLAGS.run_dir not in (None, str(own)):
        raise BadInput(f"--run_dir: got {FLAGS.run_dir}, expected none with --emit, whose run is in {own}")
    if own and given.pin:
        raise BadInput("--pin: is for the peers of this machine, expected no --emit")
    if given.hosts and not given.emit:
        raise BadInput("--hosts: is read with --emit=DIR only, which writes what each host needs")
    cut = [name for name in config_flag.overrides() if name.startswith("plan.")]
    if given.plan and cut:
        say(f"--config.{', --config.'.join(cut)}: not read, since --plan={given.plan} says it")


if __name__ == "__main__":
    script_main.run(
        main,
        complete=resume_flags.with_flags_of_run,
        help_text=lambda: config_fields.help_text(__doc__ or "", SUBJECTS),
    )
