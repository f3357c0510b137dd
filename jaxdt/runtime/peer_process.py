"""The process of one peer, from its job to its exit code."""

import contextlib
import functools
import secrets
import threading
from dataclasses import dataclass

from jaxdt.build import RunStart, build_newcomer, build_peer, replicas_may_differ
from jaxdt.membership.peer import Peer
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import PreparingReport, WriteFailedReport
from jaxdt.protocol.trace import Trace
from jaxdt.run.config import RunConfig
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import sync_groups
from jaxdt.run.work import ON_A_CORE
from jaxdt.runtime.calibrate.message_cost import MessageCostProbe
from jaxdt.runtime.calibrate.stage_times import TimedStage, compile_step, time_stage
from jaxdt.runtime.compute import compute
from jaxdt.runtime.jax_setup import device_text
from jaxdt.runtime.joining import claim_peer
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.address import Address, parse_address
from jaxdt.runtime.reporting.end_watch import EndWatch, end_of_run
from jaxdt.runtime.reporting.peer_log import PeerLog
from jaxdt.runtime.run_dir import shared
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.stop_requests import StopRequests
from jaxdt.runtime.storage.durable import LateFile
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.runtime.transport_setup import OwnAddress, start_transport


@dataclass(frozen=True)
class JoinedStage:
    """The stage of a peer that comes to a run which has done `from_step` steps."""

    stage: int
    from_step: int


@dataclass(frozen=True)
class PeerOptions:
    """The options of one peer beside the job of the run.

    coordinator: "host:port".
    own: where the peer listens, and where others reach it.
    n_devices: local devices over which the stage's microbatches are spread.
    joins: the stage of a newcomer, which the plan does not name; None for a peer of the plan.
    """

    peer: int
    coordinator: str
    own: OwnAddress
    n_devices: int = 1
    joins: JoinedStage | None = None


@dataclass(frozen=True)
class ServedStage:
    """The stage that a peer serves: its index, the peer's machine for it, and the plan with the peer in it. The stage's
    state is read from a checkpoint if `is_planned`, and fetched from other peers otherwise. No step before `from_step`
    is computed, unless the run goes back."""

    stage: int
    machine: Peer
    plan: Plan
    is_planned: bool
    from_step: int


def run_peer(job: RunJob, options: PeerOptions, log: PeerLog, stop_requests: StopRequests) -> ev.Stop:
    """Be one peer of the run until the run or the peer ends: a newcomer, or a peer of the plan that may be it
    (`jaxdt.runtime.joining.claim_peer`)."""
    with shared(job.run_dir):
        return end_of_run(job) or _serve(
            job, options, parse_address("coordinator", options.coordinator), log, stop_requests
        )


def _serve(
    job: RunJob, options: PeerOptions, coordinator: Address, log: PeerLog, stop_requests: StopRequests
) -> ev.Stop:
    """Serve one stage after the other. The coordinator may move the peer to another stage. There it acts as a
    newcomer: it drops the state of its old stage, compiles the functions of the new one, and fetches the new state from
    the peers that hold it. Where replicas may differ, an evicted peer starts again in the same way."""
    peer, joins = options.peer, options.joins
    has_moved = begins_anew = False
    while True:
        served = _planned_stage(job, peer) if joins is None else _joined_stage(job, peer, joins)
        checkpointer = job.checkpointer(served.stage)
        trace_file = LateFile(
            job.run_dir / "trace" / f"peer_{peer}.jsonl",
            failed=lambda reason: loop.post(WriteFailedReport(reason)),  # noqa: B023 (closed before the next loop)
            appends=has_moved,
        )
        with contextlib.closing(trace_file):
            trace = Trace(trace_file.write, job.trace_steps)
            watch = EndWatch(job, log.report)
            loop = Loop(peer, served.machine, trace, watch.report, checkpointer)
            watch.post = loop.post
            if begins_anew:  # what is still on its way to the machine before is not for this one
                loop.process = secrets.randbelow(1 << 31)
            address = start_transport(job, loop, peer, options.own, coordinator)
            loop.transport.connect(ev.COORDINATOR, coordinator)
            stop_requests.deliver_to(loop)
            prepare = functools.partial(_prepare, job, options, served, loop)
            arguments = (loop, prepare, checkpointer, job.work_s_min(served.stage), job.stalls_of(peer))
            compute_thread = threading.Thread(target=compute, args=arguments, name="compute", daemon=True)
            compute_thread.start()
            end = loop.run(address)
            if isinstance(end, ev.Stop):
                # A peer that moves was in the run, though not at its new stage yet.
                return ev.Stop(ExitCode.DONE, end.reason) if has_moved and end.code == ExitCode.NOT_JOINED else end
            compute_thread.join()  # only then is there room for the arrays of the next stage
        has_moved = True
        begins_anew = replicas_may_differ(job.config)
        if not begins_anew:
            joins = JoinedStage(end.stage, max(end.version, served.from_step))
        elif refused := claim_peer(job, peer, coordinator, options.own, stop_requests, log.report):
            return refused  # else it starts again in its own place


def _planned_stage(job: RunJob, peer: int) -> ServedStage:
    """The stage that the plan gives to the peer."""
    stage, _ = job.plan.seat(peer)
    machine = build_peer(job.config, job.plan, peer, job.run_start)
    return ServedStage(stage, machine, job.plan, True, job.start.version)


def _joined_stage(job: RunJob, peer: int, joins: JoinedStage) -> ServedStage:
    """A stage of a run that the peer joins later."""
    start = RunStart(job.run, data_checksum=job.data.checksum)
    machine = build_newcomer(job.config, job.plan, peer, joins.stage, start)
    return ServedStage(joins.stage, machine, job.plan.with_newcomer(peer, joins.stage), False, joins.from_step)


def compile_stage(loop: Loop, config: RunConfig, store: Store, seat: tuple[int, int], from_step: int) -> None:
    """Compile a stage's functions for all lengths of samples that are still to come; `seat`: peer and stage."""
    peer, stage = seat
    first_steps = config.seq_lengths.first_steps(from_step, config.train.steps)
    for n_before, step in enumerate(first_steps):
        which = f" ({n_before + 1} of {len(first_steps)})" if len(first_steps) > 1 else ""
        what = f"compiles stage {stage} for samples of {config.seq_lengths.at(step)} tokens{which}"
        loop.post(PreparingReport(what))
        compile_step(store, peer, stage, step)


def _prepare(job: RunJob, options: PeerOptions, served: ServedStage, loop: Loop) -> ev.Ready:
    """Make the stage's tensors, compile its functions and time them."""
    config = job.config
    plan = served.plan
    peer = options.peer
    stage = served.stage
    functions = stage_functions(config, plan, stage, options.n_devices)
    store = Store(config, plan, peer, job.data, functions, job.load_entries)
    if served.is_planned:
        store.restore(ev.Restore(job.start.version, job.start.generation, job.start.n_reseeds, job.start.parts))
    loop.tensors = store
    compile_stage(loop, config, store, (peer, stage), served.from_step)
    loop.post(PreparingReport(f"times stage {stage}"))
    timed = TimedStage(
        peer=peer,
        stage=stage,
        group_sizes={group.stage: group.n_elements for group in sync_groups(config, plan) if stage in group.stages},
        evaluates=config.train.eval_every_steps > 0,
        step=config.data.seq_growth_steps,
        microbatch=plan.microbatches(plan.seat(peer)[1]).start,
        is_brief=not served.is_planned,
    )
    with contextlib.ExitStack() as stack:
        probe = None
        if served.is_planned:  # the first prediction of a step needs it
            probe = stack.enter_context(MessageCostProbe(encrypted=job.credential is not None))
        measured_s = time_stage(store, timed, probe)
    work_s_min = job.work_s_min(stage)
    seconds = {kind: max(s, work_s_min.get(kind, 0.0)) for kind, s in measured_s.items()}
    seconds |= {kind + ON_A_CORE: s for kind, s in measured_s.items() if s < seconds[kind]}
    return ev.Ready(seconds, store.n_words, device_text(options.n_devices))
