"""The process of a run's coordinator, from its job to its exit code."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from jaxdt.build import build_coordinator
from jaxdt.membership.coordinator import SUPERSEDED, TERMINATED
from jaxdt.protocol.events import COORDINATOR, Interrupted, Stop, Terminated
from jaxdt.protocol.trace import Trace
from jaxdt.runtime.coordinator_folder import begin_run, end_run, load_beginning, lock_folder
from jaxdt.runtime.journal import Journal
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.stop_requests import StopRequests
from jaxdt.runtime.storage.durable import FileStore, LateFile
from jaxdt.runtime.transport_setup import OwnAddress, start_transport
from jaxdt.spec.errors import BadInput


@dataclass(frozen=True)
class CoordinatorOptions:
    """What the coordinator is given beside the job of the run.

    own: where it listens, and where peers reach it.
    live: show the fleet as a live table, if on a terminal.
    stop_with_parent: end when standard input ends.
    launched_s: when the launcher began, on this host's monotonic clock; None without a launcher.
    """

    own: OwnAddress
    live: bool
    stop_with_parent: bool
    launched_s: float | None = None


def run_coordinator(job: RunJob, options: CoordinatorOptions, on_address: Callable[[str], None]) -> Stop:
    """Be the coordinator until the run ends, or until this process has to leave it to another one: write its metrics
    and its summary, and show the fleet. `on_address` is called with the address at which peers reach it."""
    if not options.own.listen:
        raise BadInput("listen: got no address, expected host:port, at which all peers reach the coordinator")
    folder = job.run_dir / "coordinator"
    lock_folder(folder)
    durable = FileStore(folder)
    beginning = load_beginning(job, durable)
    machine = build_coordinator(job.config, job.plan, beginning.start, beginning.durable_state)
    journal = Journal(job, machine, durable, options.live, options.launched_s)
    goes_on = beginning.durable_state is not None
    trace_file = LateFile(job.run_dir / "trace" / "coordinator.jsonl", appends=goes_on, by_line=True)
    with contextlib.closing(trace_file):
        trace = Trace(trace_file.write)
        loop = Loop(COORDINATOR, machine, trace, journal.report, job.checkpointer(None), durable)
        address = start_transport(job, loop, COORDINATOR, options.own)
        with journal:
            begin_run(job, durable, beginning)
            on_address(address)
            StopRequests(Interrupted(), Terminated(), options.stop_with_parent).deliver_to(loop)
            stop = loop.run(address)
            assert isinstance(stop, Stop), "only a peer moves to another stage"
            if stop.code not in (TERMINATED, SUPERSEDED):
                end_run(durable)
            return stop
