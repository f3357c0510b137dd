"""One peer of a run on this host: a peer of the plan, or one that joins later.

    python scripts/train.py --flagfile=host_2.flags
    python scripts/train.py --join=HOST:PORT --token=FILE --run_dir=DIR [--data=FILE.tok] [--as=worker]

With a token (scripts/tools/credential.py) the process first gets a credential of its own, which it keeps beside the
token. A newcomer asks the coordinator at HOST:PORT for a stage, fetches the stage's state from the peers that hold it,
and then takes Work. With --as=worker it computes for a server of a pool instead (docs/pool.md): it is no member of the
run, and may end at any moment. The first SIGTERM or SIGINT lets a peer leave without loss, a second one ends it at
once.
"""

import check_installed  # noqa: F401

from jaxdt.cli import interrupts  # noqa: F401

# isort: split
import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import NoReturn

from absl import flags

from jaxdt.cli import gpu_flags, memory_settings, run_flags

PEER = flags.DEFINE_integer("peer", None, "Which peer of the plan this is; with --as=worker, which worker of it.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of the coordinator.")
JOIN = flags.DEFINE_string("join", None, "host:port of the coordinator of a run to join as a newcomer.")
AS = flags.DEFINE_enum("as", "member", ["member", "worker"], "With --join: what to be in the run (docs/pool.md).")
DATA = flags.DEFINE_string("data", "", "With --join: where the run's token file is here, if not where its config says.")
LISTEN = flags.DEFINE_string("listen", "127.0.0.1:0", "host:port to listen on; empty where nobody can dial this peer.")
ADVERTISE = flags.DEFINE_string("advertise", "", "host:port at which others reach this peer, if it is not --listen.")
DEVICES = flags.DEFINE_integer(
    "devices", None, "Local devices to spread the stage's microbatches over; by default those of --gpus, else one."
)
GPUS = flags.DEFINE_list("gpus", [], "The GPUs that this process may use, named as CUDA_VISIBLE_DEVICES names them.")
GPU_MEMORY_FRAC = flags.DEFINE_float(
    "gpu_memory_frac", None, "The share of a GPU's memory that this process takes, for peers that share one.", 0.0, 1.0
)
CPUS = flags.DEFINE_list("cpus", [], "Numbers of the CPUs that this process may use; XLA takes as many threads.")
CACHE_DIR = flags.DEFINE_string("cache_dir", "~/.cache/jaxdt", "Where compiled programs are kept.")


def main() -> NoReturn:
    run_flags.required("run_dir", *([] if JOIN.value else ["peer", "coordinator"]))
    if JOIN.value:
        run_flags.check_joinable(JOIN.value)
        print(f"loads jax, then asks the coordinator at {JOIN.value} to join", flush=True)
    run_flags.set_cpus(CPUS.value)
    gpu_flags.set_gpus(GPUS.value, GPU_MEMORY_FRAC.value)
    from jaxdt.membership.coordinator import FORGOTTEN
    from jaxdt.runtime import jax_setup, peer_process  # these import jax, which counts the CPUs
    from jaxdt.runtime.coordinator_folder import check_not_ended
    from jaxdt.runtime.peer_process import JoinedStage
    from jaxdt.runtime.reporting.peer_log import named
    from jaxdt.runtime.transport_setup import OwnAddress

    jax_setup.set_up_jax(Path(CACHE_DIR.value).expanduser())
    if JOIN.value and AS.value == "worker":
        worker()
    if JOIN.value:
        job, welcome = run_flags.newcomer(JOIN.value, DATA.value)
        peer = welcome.peer
        joins = JoinedStage(welcome.stage, welcome.n_committed)
        print(f"peer {peer}: joins for stage {joins.stage}, after {joins.from_step} steps of the run", flush=True)
    else:
        job = run_flags.job(COORDINATOR.value, PEER.value)
        check_not_ended(job)
        peer = PEER.value
        joins = None
    jax_setup.check_platform("gpu" if GPUS.value else job.config.platform)
    options = peer_process.PeerOptions(
        peer=peer,
        coordinator=JOIN.value or COORDINATOR.value,
        own=OwnAddress(LISTEN.value, ADVERTISE.value),
        n_devices=DEVICES.value or max(1, len(GPUS.value)),
        stop_with_parent=run_flags.STOP_WITH_PARENT.value,
        joins=joins,
    )
    stop = peer_process.run_peer(job, options)
    last_line = named(f"peer {options.peer}", stop.reason)
    if JOIN.value and stop.code == FORGOTTEN:  # the coordinator that had let it in died before a view had it
        print(f"{last_line}; it asks again", flush=True)
        os.execv(sys.executable, sys.orig_argv)
    end(last_line, stop.code)


def worker() -> NoReturn:
    """Be a worker of a pool. This imports jax, as `main` does."""
    from jaxdt.runtime import jax_setup
    from jaxdt.runtime.worker_process import WorkerOptions, run_worker

    job, welcome = run_flags.newcomer(JOIN.value, DATA.value, is_worker=True, peer=PEER.value)
    jax_setup.check_platform("gpu" if GPUS.value else job.config.platform)
    ask = functools.partial(run_flags.ask_again, JOIN.value, job, welcome.peer)
    n_devices = DEVICES.value or max(1, len(GPUS.value))
    stop = run_worker(job, welcome, WorkerOptions(JOIN.value, ask, n_devices, run_flags.STOP_WITH_PARENT.value))
    name = f"worker {welcome.peer}: "
    end(stop.reason if stop.reason.startswith(name) else name + stop.reason, stop.code)


def end(last_line: str, code: int) -> NoReturn:
    """End this process: the compute thread may be inside XLA, where the interpreter's own exit would abort it."""
    with contextlib.suppress(OSError):  # the log may be on a disk that is full
        print(last_line, file=sys.stderr if code else sys.stdout)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    memory_settings.restart()
    run_flags.run(main)
