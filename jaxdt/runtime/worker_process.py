"""The process of a pool's worker, from its job to its exit code.

A worker dials its server; no process dials the worker. If the server is silent, the worker asks the coordinator again
for whom it computes: another server of its stage, or the same one at another address. It drops what it has, which costs
the run what it had not contributed. No process waits for a worker.
"""

import functools
import time
from collections.abc import Callable

from jaxdt.build import RunStart, WorkerPlace, build_worker
from jaxdt.membership.worker_membership import NO_SERVER
from jaxdt.model.stage import StageFunctions
from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.run.exit_codes import ExitCode
from jaxdt.runtime.coordinator_client import CoordinatorAway
from jaxdt.runtime.net.address import Address, parse_address
from jaxdt.runtime.peer_process import prepare_stage
from jaxdt.runtime.process import StopRequests, requested_stop, run_machine
from jaxdt.runtime.reporting.console import print_line
from jaxdt.runtime.reporting.peer_log import PeerLog
from jaxdt.runtime.run_dir import shared
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.storage.store import stage_functions

ASKS_EVERY_S = 1.0
SILENT_HEARTBEATS = 5.0  # a server that has not answered so many is asked for


def run_worker(
    job: RunJob,
    welcome: ev.Welcome,
    coordinator: Address,
    ask: Callable[[], ev.Welcome],
    stop_requests: StopRequests,
    *,
    n_devices: int = 1,
) -> ev.Stop:
    """Be a worker, for one server after the other, until the run or the worker ends.

    welcome: the coordinator's answer.
    ask: asks the coordinator again for which server this worker computes; CoordinatorAway without an answer.
    n_devices: local devices over which the stage's microbatches are spread."""
    config, functions = job.config, dict[int, StageFunctions]()  # of each stage: compiled, they serve the next server
    with shared(job.run_dir):
        while True:
            found = _with_server(welcome, ask, stop_requests, config.net.outage_s)
            if isinstance(found, ev.Stop):
                return found
            peer, stage, server = found.peer, found.stage, found.server
            assert server is not None, "the coordinator has named one"
            plan = job.plan.with_worker(peer, stage)
            if stage not in functions:
                functions[stage] = stage_functions(config, plan, stage, n_devices, vocab_size=job.data.vocab_size)
            patience_s = max(config.net.deadline_floor_s, SILENT_HEARTBEATS * config.net.heartbeat_s)
            start, place = RunStart(job.run, data_checksum=job.data.checksum), WorkerPlace(stage, server, patience_s)
            stop = run_machine(
                job,
                peer,
                build_worker(config, job.plan, peer, start, place),
                dials=(server, parse_address(f"server {server}", found.server_address)),
                report=PeerLog(f"worker {peer}", coordinator, config.train.steps).report,
                stop_requests=stop_requests,
                trace=job.run_dir / "trace" / f"peer_{peer}.jsonl",
                stage=stage,
                prepare=functools.partial(
                    prepare_stage,
                    job,
                    plan,
                    peer,
                    from_step=found.n_committed,
                    n_devices=n_devices,
                    is_timed=False,  # a server learns from its workers' answers how long they take
                    functions=functions[stage],
                ),
            )
            assert isinstance(stop, ev.Stop), "only a member moves to another stage"
            if stop.code != NO_SERVER:
                return stop
            print_line(f"{stop.reason}; asks the coordinator for another")
            welcome = _without_server(found)


def _without_server(welcome: ev.Welcome) -> ev.Welcome:
    """The answer of before, whose server is not to be believed in any more."""
    return ev.Welcome(welcome.run, welcome.peer, welcome.stage, welcome.fingerprint, welcome.job, welcome.n_committed)


def _with_server(
    welcome: ev.Welcome, ask: Callable[[], ev.Welcome], stop_requests: StopRequests, outage_s: float
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
            welcome = ask()
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
