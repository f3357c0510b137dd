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

from jaxdt.cli import environment, interrupts  # noqa: F401
from jaxdt.run.exit_codes import ExitCode

if __name__ == "__main__":
    environment.restart_with_malloc_settings()  # before all that takes time

# isort: split
import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import NoReturn

from absl import flags

from jaxdt.cli import gpu_flags, option_flags, process_job, script_main
from jaxdt.cli.run_inputs import ProcessOptions
from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.runtime.compute_environment import set_cpus
from jaxdt.runtime.net.address import check_dialable, parse_address
from jaxdt.runtime.process import OwnAddress, StopRequests, requested_stop
from jaxdt.runtime.reporting.peer_log import PeerLog, named

option_flags.define(ProcessOptions)
PEER = flags.DEFINE_integer("peer", None, "Which peer of the plan this is; with --as=worker, which worker of it.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of the coordinator.")
JOIN = flags.DEFINE_string("join", None, "host:port of the coordinator of a run to join as a newcomer.")
AS = flags.DEFINE_enum("as", "member", ["member", "worker"], "With --join: what to be in the run (docs/pool.md).")
DATA = flags.DEFINE_string("data", "", "With --join: where the run's token file is here, if not where its config says.")
LISTEN = flags.DEFINE_string(
    "listen",
    None,
    "host:port to listen on; empty where nobody can dial this peer. By default a free port of the interface that leads "
    "to the coordinator.",
)
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
    if flags.FLAGS["join"].present and not JOIN.value:
        raise BadInput("--join: got '', expected the coordinator's host:port, which is in its coordinator_address")
    run_dir = script_main.required("run_dir")
    if JOIN.value:
        check_dialable("--join", parse_address("--join", JOIN.value))
        process_job.check_joinable(JOIN.value, run_dir)
    else:
        script_main.required("peer")
        check_dialable("--coordinator", parse_address("--coordinator", script_main.required("coordinator")))
    set_cpus(CPUS.value)
    gpu_flags.set_gpus(GPUS.value, GPU_MEMORY_FRAC.value)
    if JOIN.value and AS.value == "worker":
        worker(option_flags.read(ProcessOptions))
    member(option_flags.read(ProcessOptions))


def member(options: ProcessOptions) -> NoReturn:
    """Be a peer of the plan, or a newcomer. Steps that may be refused come before jax is loaded, which takes
    seconds."""
    from jaxdt.build import replicas_may_differ
    from jaxdt.runtime.coordinator_folder import check_not_ended
    from jaxdt.runtime.joining import claim_peer

    coordinator = parse_address("coordinator", JOIN.value or COORDINATOR.value)
    own = OwnAddress.of_peer(coordinator, LISTEN.value, ADVERTISE.value)
    if JOIN.value:
        job, welcome = process_job.newcomer(options, JOIN.value, DATA.value)
        peer = welcome.peer
        where = f"stage {welcome.stage}, after {welcome.n_committed} steps of the run"
        print(f"peer {peer}: joins for {where}", flush=True)
    else:
        job = process_job.job(options, COORDINATOR.value, PEER.value)
        check_not_ended(job)
        peer, welcome = PEER.value, None
    name = f"peer {peer}"
    n_steps = None if replicas_may_differ(job.config) else job.config.train.steps
    log = PeerLog(name, coordinator, n_steps)
    stop_requests = StopRequests(ev.Leave(), ev.Leave(), options.stop_with_parent)
    is_for_some = GPUS.value or job.config.platform != "any"
    if is_for_some:  # what jax finds here may refuse this host
        set_up_jax(name, job.config.platform)
    if not welcome:
        print(f"{name}: asks the coordinator at {COORDINATOR.value} whether it may be peer {peer}", flush=True)
        if refused := claim_peer(job, peer, coordinator, own, stop_requests, log.report):
            end_with(name, refused)
    stop_requests.end_by(lambda request: end_with(name, requested_stop(request, "left before it was admitted")))
    if not is_for_some:
        set_up_jax(name, job.config.platform)
    from jaxdt.runtime import peer_process

    n_devices = DEVICES.value or max(1, len(GPUS.value))
    stop = peer_process.run_peer(job, peer, coordinator, own, log, stop_requests, n_devices=n_devices, welcome=welcome)
    if JOIN.value and stop.code == ExitCode.FORGOTTEN:  # the coordinator that had let it in died before a view had it
        print(f"{named(name, stop.reason)}; it asks again", flush=True)
        os.execv(sys.executable, sys.orig_argv)
    end_with(name, stop)


def worker(options: ProcessOptions) -> NoReturn:
    job, welcome = process_job.newcomer(options, JOIN.value, DATA.value, is_worker=True, peer=PEER.value)
    name = f"worker {welcome.peer}"
    print(f"{name}: gets ready for stage {welcome.stage}", flush=True)
    set_up_jax(name, job.config.platform)
    from jaxdt.runtime.worker_process import run_worker

    ask = functools.partial(process_job.ask_again, JOIN.value, job, welcome.peer)
    stop_requests = StopRequests(ev.Leave(), ev.Leave(), options.stop_with_parent)
    coordinator, n_devices = parse_address("coordinator", JOIN.value), DEVICES.value or max(1, len(GPUS.value))
    stop = run_worker(job, welcome, coordinator, ask, stop_requests, n_devices=n_devices)
    end_with(name, stop)


def set_up_jax(name: str, platform: str) -> None:
    """Import jax, which counts the CPUs that this process may use, and check that it has what the run asks for."""
    print(f"{name}: loads jax", flush=True)
    from jaxdt.runtime import jax_setup

    jax_setup.set_up_jax(Path(CACHE_DIR.value).expanduser())
    jax_setup.check_platform("gpu" if GPUS.value else platform)


def end_with(name: str, stop: ev.Stop) -> NoReturn:
    """End this process: the compute thread may be inside XLA, where the interpreter's own exit would abort it."""
    with contextlib.suppress(OSError):  # the log may be on a disk that is full
        print(named(name, stop.reason), file=sys.stderr if stop.code else sys.stdout)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(stop.code)


if __name__ == "__main__":
    script_main.run(main)
