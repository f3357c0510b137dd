"""The process of a pool's worker, from its job to its exit code.

A worker dials its server; no process dials the worker. If the server is silent, the worker asks the coordinator again
for whom it computes: another server of its stage, or the same one at another address. It drops what it has, which costs
the run what it had not contributed. No process waits for a worker.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxdt.build import RunStart, WorkerPlace, build_worker
from jaxdt.membership.worker_membership import NO_SERVER
from jaxdt.model.stage import StageFunctions
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import WriteFailedReport
from jaxdt.protocol.trace import Trace
from jaxdt.run.errors import BadInput
from jaxdt.run.exit_codes import ExitCode
from jaxdt.runtime.compute import compute
from jaxdt.runtime.coordinator_client import CoordinatorAway
from jaxdt.runtime.jax_setup import device_text
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.address import Address, parse_address
from jaxdt.runtime.peer_process import compile_stage
from jaxdt.runtime.reporting.console import print_line
from jaxdt.runtime.reporting.peer_log import PeerLog
from jaxdt.runtime.run_dir import shared
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.stop_requests import StopRequests, requested_stop
from jaxdt.runtime.storage.durable import LateFile
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.runtime.transport_setup import OwnAddress, start_transport

ASKS_EVERY_S = 1.0
SILENT_HEARTBEATS = 5.0  # a server that has not answered so many is asked for


@dataclass(frozen=True)
class WorkerOptions:
    """The options of a worker beside the job of the run.

    coordinator: "host:port".
    ask: asks the coordinator again for which server this worker computes; CoordinatorAway without an answer.
    n_devices: local devices over which the stage's microbatches are spread.
    stop_with_parent: end when standard input ends.
    """

    coordinator: str
    ask: Callable[[], ev.Welcome]
    n_devices: int = 1
    stop_with_parent: bool = False


def run_worker(job: RunJob, welcome: ev.Welcome, options: WorkerOptions) -> ev.Stop:
    """Be a worker, for one server after the other, until the run or the worker ends. `welcome`: the coordinator's
    answer."""
    stop_requests = StopRequests(ev.Leave(), ev.Leave(), options.stop_with_parent)
    functions: dict[int, StageFunctions] = {}  # of each stage: compiled functions serve for the next server, too
    with shared(job.run_dir):
        while True:
            found = _with_server(welcome, options, stop_requests, job.config.net.outage_s)
            if isinstance(found, ev.Stop):
                return found
            stage = found.stage
            if stage not in functions:
                plan = job.plan.with_worker(found.peer, stage)
                functions[stage] = stage_functions(job.config, plan, stage, options.n_devices)
            stop = _compute_for(job, found, functions[stage], options, stop_requests)
            if stop.code != NO_SERVER:
                return stop
            print_line(f"{stop.reason}; asks the coordinator for another")
            welcome = _without_server(found)


def _without_server(welcome: ev.Welcome) -> ev.Welcome:
    """The answer of before, whose server is not to be believed in any more."""
    return ev.Welcome(welcome.run, welcome.peer, welcome.stage, welcome.fingerprint, welcome.job, welcome.n_committed)


def _with_server(
    welcome: ev.Welcome, options: WorkerOptions, stop_requests: StopRequests, outage_s: float
) -> ev.Welcome | ev.Stop:
    """The coordinator's answer with a server that is here; a Stop if this process is asked to end before that, or if
    the coordinator is away for `outage_s`."""
    heard_s = time.monotonic()
    said = ""
    while welcome.server is None:
        if request := stop_requests.first:
            return requested_stop(request, f"worker {welcome.peer}: left the run")
        time.sleep(ASKS_EVERY_S)
        what = f"waits for a server of stage {welcome.stage}"
        try:
            welcome = options.ask()
            heard_s = time.monotonic()
        except CoordinatorAway as error:
            what = f"waits for the coordinator: {error}"
            if time.monotonic() - heard_s > outage_s:
                return ev.Stop(ExitCode.LOST, f"worker {welcome.peer}: {error}")
        if welcome.server is None and what != said:
            print_line(f"worker {welcome.peer}: {what}")
            said = what
    if not welcome.server_address:
        raise BadInput(
            f"--as: server {welcome.server} has no address that a worker can dial, expected one that listens (--listen)"
        )
    return welcome


def _compute_for(
    job: RunJob, welcome: ev.Welcome, functions: StageFunctions, options: WorkerOptions, stop_requests: StopRequests
) -> ev.Stop:
    """Compute for the server that the coordinator has named."""
    config, peer, stage, server = job.config, welcome.peer, welcome.stage, welcome.server
    assert server is not None, "the coordinator has named one"
    patience_s = max(config.net.deadline_floor_s, SILENT_HEARTBEATS * config.net.heartbeat_s)
    place = WorkerPlace(stage, server, patience_s)
    start = RunStart(job.run, data_checksum=job.data.checksum)
    machine = build_worker(config, job.plan, peer, start, place)
    coordinator = parse_address("coordinator", options.coordinator)
    log = PeerLog(f"worker {peer}", coordinator, config.train.steps)
    path = job.run_dir / "trace" / f"peer_{peer}.jsonl"
    trace_file = LateFile(path, failed=lambda reason: loop.post(WriteFailedReport(reason)))
    with contextlib.closing(trace_file):
        trace = Trace(trace_file.write, job.trace_steps)
        loop = Loop(peer, machine, trace, log.report)
        start_transport(job, loop, peer, OwnAddress(""))
        loop.transport.connect(server, _address(server, welcome.server_address))
        stop_requests.deliver_to(loop)
        prepare = functools.partial(_prepare, job, welcome, functions, options.n_devices, loop)
        arguments = (loop, prepare, None, job.work_s_min(stage), job.stalls_of(peer))
        compute_thread = threading.Thread(target=compute, args=arguments, name="compute", daemon=True)
        compute_thread.start()
        stop = loop.run("")
        assert isinstance(stop, ev.Stop), "only a member moves to another stage"
        if stop.code == NO_SERVER:
            compute_thread.join()  # only then is there room for the arrays that the next server's worker needs
        return stop


def _address(server: int, address: str) -> Address:
    return parse_address(f"server {server}", address)


def _prepare(job: RunJob, welcome: ev.Welcome, functions: StageFunctions, n_devices: int, loop: Loop) -> ev.Ready:
    """Make the stage's tensors, without an optimizer's, and compile its functions. Nothing is timed: a server learns
    from its workers' answers how long they take."""
    config, peer, stage = job.config, welcome.peer, welcome.stage
    store = Store(config, job.plan.with_worker(peer, stage), peer, job.data, functions)
    loop.tensors = store
    compile_stage(loop, config, store, (peer, stage), welcome.n_committed)
    return ev.Ready({}, store.n_words, device_text(n_devices))
