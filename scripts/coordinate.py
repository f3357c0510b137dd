"""The coordinator of one run: python scripts/coordinate.py --flagfile=coordinator.flags"""

import check_installed  # noqa: F401

from jaxdt.cli import interrupts  # noqa: F401
from jaxdt.run.exit_codes import ExitCode

# isort: split
import functools
from pathlib import Path

from absl import flags

from jaxdt.cli import environment, option_flags, process_job, run_inputs, script_main
from jaxdt.cli.run_inputs import ProcessOptions
from jaxdt.run.errors import BadInput, shell_line
from jaxdt.run.run_folder import ADDRESS
from jaxdt.runtime.coordinator_process import run_coordinator
from jaxdt.runtime.process import OwnAddress
from jaxdt.runtime.reporting.console import print_line
from jaxdt.runtime.run_end import has_steps, how_to_go_on
from jaxdt.runtime.storage.durable import refusal, write_durably

option_flags.define(ProcessOptions)
LISTEN = flags.DEFINE_string("listen", "127.0.0.1:0", "host:port to listen on; port 0 takes any free one.")
ADVERTISE = flags.DEFINE_string("advertise", "", "host:port at which peers reach it, if it is not --listen.")
LIVE = flags.DEFINE_bool("live", True, "Show the fleet as a live table, if in the foreground of a terminal.")
NETWORK = flags.DEFINE_string(
    "network", None, "Measured links of the run's devices, for the prediction; else those of --emulate."
)
BEGAN_S = flags.DEFINE_float("began_s", None, "When the launcher began, on this host's monotonic clock.")


def main() -> int:
    environment.keep_off_gpus()
    script_main.required("run_dir")
    options = option_flags.read(ProcessOptions)
    job = process_job.job(options)
    try:
        code = run_coordinator(
            job,
            OwnAddress(LISTEN.value, ADVERTISE.value),
            functools.partial(show_address, job.run_dir, not options.stop_with_parent),
            live=LIVE.value,
            stop_with_parent=options.stop_with_parent,
            launched_s=BEGAN_S.value,
            measured=run_inputs.network_of(NETWORK.value, job.plan) if NETWORK.value else None,
        ).code
    except OSError as error:  # a disk that is full, or one that was lost
        way_on = "" if options.stop_with_parent else f"; {how_to_go_on(job.run_dir)}"
        raise BadInput(f"{refusal(error, str(job.run_dir))}{way_on}") from None
    if code != ExitCode.TERMINATED and not options.stop_with_parent:  # else launch.py says it
        if has_steps(job.run_dir):
            print(f"to draw the run: {shell_line('python', 'scripts/report.py', f'--run_dir={job.run_dir}')}")
        print(how_to_go_on(job.run_dir), flush=True)
    return code


def show_address(run_dir: Path, says: bool, address: str) -> None:
    """Write where the coordinator listens into its run's folder, and say it: launch.py does so for its own."""
    write_durably(run_dir / ADDRESS, address.encode())
    if says:
        print_line(f"coordinator at {address}; waits for the peers")


if __name__ == "__main__":
    script_main.run(main)
