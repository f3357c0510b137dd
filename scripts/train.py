"""One peer of a run on this host: python scripts/train.py --flagfile=host_2.flags"""

import os
import sys
from pathlib import Path

import memory_settings

if __name__ == "__main__":
    memory_settings.restart()

import run_flags  # noqa: E402
from absl import flags  # noqa: E402

PEER = flags.DEFINE_integer("peer", None, "Which peer of the plan this is.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of the coordinator.")
LISTEN = flags.DEFINE_string("listen", "127.0.0.1:0", "host:port on which others reach this peer; empty behind NAT.")
DEVICES = flags.DEFINE_integer("devices", 1, "Local devices to spread the stage's microbatches over.")
CPUS = flags.DEFINE_list("cpus", [], "Numbers of the CPUs that this process may use; XLA takes as many threads.")
CACHE_DIR = flags.DEFINE_string("cache_dir", "~/.cache/jaxdt", "Where compiled programs are kept.")


def main() -> int:
    run_flags.required("run_dir", "peer", "coordinator")
    run_flags.set_cpus(CPUS.value)
    from jaxdt.runtime import process  # imports jax, which counts the CPUs

    job = run_flags.job()
    process.set_up_jax(Path(CACHE_DIR.value).expanduser())
    stop = process.run_peer(
        job, PEER.value, COORDINATOR.value, LISTEN.value, DEVICES.value, run_flags.STOP_WITH_PARENT.value
    )
    if stop.code:
        print(stop.reason, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(stop.code)  # the compute thread may be inside XLA, where the interpreter's own exit would abort it


if __name__ == "__main__":
    run_flags.run(main)
