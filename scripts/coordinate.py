"""The coordinator of one run: python scripts/coordinate.py --flagfile=coordinator.flags"""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the coordinator computes nothing

from absl import flags  # noqa: E402

from jaxdt.cli import run_flags  # noqa: E402
from jaxdt.runtime import process  # noqa: E402
from jaxdt.runtime.storage.durable import write_durably  # noqa: E402

LISTEN = flags.DEFINE_string("listen", "127.0.0.1:0", "host:port to listen on; port 0 takes any free one.")
ADDRESS_FILE = flags.DEFINE_string("address_file", None, "Where to write the address that was bound.")
LIVE = flags.DEFINE_bool("live", True, "Show the fleet as a live table, if on a terminal.")
BEGAN_S = flags.DEFINE_float("began_s", None, "When the launcher began, on this host's monotonic clock.")


def main() -> int:
    run_flags.required("run_dir")
    job = run_flags.job()

    def started(address: str) -> None:
        if ADDRESS_FILE.value:
            write_durably(Path(ADDRESS_FILE.value), address.encode())

    stop = process.run_coordinator(
        job, LISTEN.value, started, LIVE.value, run_flags.STOP_WITH_PARENT.value, BEGAN_S.value
    )
    return stop.code


if __name__ == "__main__":
    run_flags.run(main)
