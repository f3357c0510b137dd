"""The process of a run's coordinator, from its job to its exit code."""

import math
import sys
from collections.abc import Callable

from jaxdt.build import build_coordinator
from jaxdt.membership.coordinator import Coordinator
from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.network import Network
from jaxdt.runtime.coordinator_folder import begin_run, end_run, load_beginning, locked_folder
from jaxdt.runtime.identity.credential import load_signer
from jaxdt.runtime.identity.issuer import Issuer
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.process import OwnAddress, StopRequests, start_transport, trace_into
from jaxdt.runtime.reporting.journal import Journal
from jaxdt.runtime.run_dir import shared, write_config_and_plan
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.storage.durable import FileStore

# Each peer has two threads here. At the interpreter's 5 ms, the loop waited up to so long after each message of a view
# that goes to hundreds of peers.
SWITCH_S = 0.0005


def run_coordinator(
    job: RunJob,
    own: OwnAddress,
    on_address: Callable[[str], None],
    *,
    live: bool,
    stop_with_parent: bool,
    launched_s: float | None = None,
    measured: Network | None = None,
) -> ev.Stop:
    """Be the coordinator until the run ends, or until this process has to leave it to another one: write its metrics
    and its summary, and show the fleet.

    on_address: is called with the address at which peers reach the coordinator.
    live: show the fleet as a live table, if in the foreground of a terminal.
    stop_with_parent: end when standard input ends.
    launched_s: when the launcher began, on this host's monotonic clock; None without a launcher.
    measured: the links of the plan's devices, for the prediction of a run whose links are not emulated."""
    if not own.listen:
        raise BadInput("listen: got no address, expected host:port, at which all peers reach the coordinator")
    sys.setswitchinterval(SWITCH_S)
    with locked_folder(job.run_dir / "coordinator") as folder:
        durable = FileStore(folder)
        beginning = load_beginning(job, durable)
        machine = build_coordinator(job.config, job.plan, beginning.start, beginning.durable_state)
        loop = Loop(ev.COORDINATOR, machine, checkpointer=job.checkpointer(None), durable=durable, run_dir=job.run_dir)
        journal = Journal(job, machine, durable, live, launched_s, measured)
        journal.post, loop.report = loop.post, journal.report
        path, goes_on = job.run_dir / "trace" / "coordinator.jsonl", beginning.durable_state is not None
        with trace_into(loop, path, math.inf, appends=goes_on, by_line=True):
            issuer = _issuer(job, durable, machine)
            term, issue = machine.coordinator_term, issuer.redeem if issuer else None
            address = start_transport(job, loop, ev.COORDINATOR, own, coordinator_term=term, issue=issue)
            with journal, shared(job.run_dir):
                begin_run(job, durable, beginning)
                write_config_and_plan(job.run_dir, job.config, job.plan)
                on_address(address)
                on_interrupt = ev.StopRequested() if job.config.train.checkpoint_on_stop else ev.Interrupted()
                StopRequests(on_interrupt, ev.Terminated(), stop_with_parent).deliver_to(loop)
                stop = loop.run(address)
                journal.finish(loop.busy_s_max)
                assert isinstance(stop, ev.Stop), "only a peer moves to another stage"
                if stop.code not in (ExitCode.TERMINATED, ExitCode.SUPERSEDED):
                    end_run(durable)
                return stop


def _issuer(job: RunJob, durable: FileStore, machine: Coordinator) -> Issuer | None:
    """The issuer of certificates for processes that come with a token; None for a run in plaintext."""
    if job.credential is None:
        return None
    return Issuer(load_signer(job.credential), durable, machine.roster.ids.first_id, machine.newcomer_ids)
