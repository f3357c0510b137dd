"""The process of a run's coordinator, from its job to its exit code."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxdt.build import build_coordinator
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import DurableState, load_durable_state, load_operator_state
from jaxdt.protocol.events import COORDINATOR, Interrupted, Stop
from jaxdt.protocol.trace import Trace
from jaxdt.runtime.identity.credential import load_signer
from jaxdt.runtime.identity.issuer import Issuer
from jaxdt.runtime.journal import Journal
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.stop_requests import StopRequests
from jaxdt.runtime.storage.checkpoint import check_resumable, complete_checkpoints
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
    revoked = load_operator_state({"operator": durable.get("operator")}).revoked
    machine = build_coordinator(job.config, job.plan, replace(job.run_start, revoked=revoked), durable_state)
    journal = Journal(job, machine, durable, options.live, options.launched_s)
    goes_on = durable_state is not None
    trace_file = LateFile(job.run_dir / "trace" / "coordinator.jsonl", appends=goes_on, by_line=True)
    with contextlib.closing(trace_file):
        trace = Trace(trace_file.write)
        loop = Loop(COORDINATOR, machine, trace, journal.report, job.checkpointer(None), durable)
        issuer = _issuer(job, durable, machine)
        address = start_transport(job, loop, COORDINATOR, options.listen, issuer.redeem if issuer else None)
        with journal:
            durable.put("run", job.run)
            on_address(address)
            StopRequests(Interrupted(), options.stop_with_parent).deliver_to(loop)
            stop = loop.run(address)
            assert isinstance(stop, Stop), "only a peer moves to another stage"
            durable.put("run", "")  # the run has ended: another coordinator has nothing to continue
            return stop


def _issuer(job: RunJob, durable: FileStore, machine: Coordinator) -> Issuer | None:
    """What signs the certificates of those who come with a token; None for a run in plaintext."""
    if job.credential is None:
        return None
    return Issuer(load_signer(job.credential), durable, machine.roster.first_newcomer)


def _unfinished_state(job: RunJob, durable: FileStore) -> DurableState | None:
    """The state of an earlier coordinator of this very run that ended before the run did; None if there was none."""
    if job.resume or durable.get("run") != job.run:
        return None
    complete = complete_checkpoints(job.run_dir)
    checkpoint = check_resumable(complete[-1], job.about).version if complete else job.start.version
    names = ("coordinator_term", "view", "records", "operator")
    return load_durable_state({name: durable.get(name) for name in names}, checkpoint)
