"""The process of a run's coordinator, from its job to its exit code."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from jaxdt.build import build_coordinator
from jaxdt.membership.coordinator_config import DurableState, load_durable_state
from jaxdt.protocol.events import COORDINATOR, Interrupted, Stop
from jaxdt.protocol.trace import Trace
from jaxdt.runtime.journal import Journal
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.stop_requests import StopRequests
from jaxdt.runtime.storage.durable import FileStore, LateFile
from jaxdt.runtime.transport_setup import start_transport
from jaxdt.spec.errors import BadInput


@dataclass(frozen=True)
class CoordinatorOptions:
    """What the coordinator is given beside the job of the run.

    listen: "host:port".
    live: show the fleet as a live table, if on a terminal.
    stop_with_parent: end when standard input ends.
    launched_s: when the launcher began, on this host's monotonic clock; None without a launcher.
    """

    listen: str
    live: bool
    stop_with_parent: bool
    launched_s: float | None = None


def run_coordinator(job: RunJob, options: CoordinatorOptions, on_address: Callable[[str], None]) -> Stop:
    """Be the coordinator until the run ends: write its metrics and its summary, and show the fleet. `on_address` is
    called with the address that was bound."""
    if not options.listen:
        raise BadInput("listen: got no address, expected host:port, at which all peers reach the coordinator")
    durable = FileStore(job.run_dir / "coordinator")
    durable_state = _unfinished_state(job, durable)
    machine = build_coordinator(job.config, job.plan, job.run_start, durable_state)
    journal = Journal(job, machine, durable, options.live, options.launched_s)
    goes_on = durable_state is not None
    trace_file = LateFile(job.run_dir / "trace" / "coordinator.jsonl", appends=goes_on, by_line=True)
    with contextlib.closing(trace_file):
        trace = Trace(trace_file.write)
        loop = Loop(COORDINATOR, machine, trace, journal.report, job.checkpointer(None), durable)
        address = start_transport(job, loop, COORDINATOR, options.listen)
        with journal:
            if durable_state is None:
                for name in ("records", "checkpoint"):
                    durable.put(name, None)  # an earlier run in this folder may have left its own
            durable.put("run", job.run)
            on_address(address)
            StopRequests(Interrupted(), options.stop_with_parent).deliver_to(loop)
            stop = loop.run(address)
            assert isinstance(stop, Stop), "only a peer moves to another stage"
            durable.put("run", "")  # the run has ended: another coordinator has nothing to continue
            return stop


def _unfinished_state(job: RunJob, durable: FileStore) -> DurableState | None:
    """The state of an earlier coordinator of this very run that ended before the run did; None if there was none."""
    if job.resume or durable.get("run") != job.run:
        return None
    names = ("coordinator_term", "view", "records", "checkpoint")
    return load_durable_state({name: durable.get(name) for name in names})
