"""The process of one peer, from its job to its exit code."""

import contextlib
import functools
import secrets

from jaxdt.build import RunStart, build_newcomer, build_peer, replicas_may_differ
from jaxdt.model.stage import StageFunctions
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import PreparingReport
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import sync_groups
from jaxdt.run.work import ON_A_CORE
from jaxdt.runtime.calibrate.message_cost import MessageCostProbe
from jaxdt.runtime.calibrate.stage_times import compile_step, time_stage
from jaxdt.runtime.coordinator_folder import end_of_run
from jaxdt.runtime.jax_setup import device_text
from jaxdt.runtime.joining import claim_peer
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.address import Address
from jaxdt.runtime.process import OwnAddress, StopRequests, run_machine
from jaxdt.runtime.reporting.peer_log import PeerLog
from jaxdt.runtime.run_dir import shared
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.storage.store import Store, stage_functions


def run_peer(
    job: RunJob,
    peer: int,
    coordinator: Address,
    own: OwnAddress,
    log: PeerLog,
    stop_requests: StopRequests,
    *,
    n_devices: int = 1,
    welcome: ev.Welcome | None = None,
) -> ev.Stop:
    """Be one peer of the run until the run or the peer ends: a newcomer with the coordinator's `welcome`, or a peer of
    the plan that may be it (`jaxdt.runtime.joining.claim_peer`). The stage's microbatches are spread over `n_devices`.

    The peer serves one stage after the other. The coordinator may move it to another stage. There it acts as a
    newcomer: it drops the state of its old stage, compiles the functions of the new one, and fetches the new state from
    the peers that hold it. Where replicas may differ, an evicted peer starts again in the same way."""
    with shared(job.run_dir):
        if ended := end_of_run(job):
            return ended
        joined = (welcome.stage, welcome.n_committed) if welcome else None  # a stage, after so many steps of the run
        has_moved = False
        process: int | None = None
        while True:
            if joined:
                stage, from_step = joined
                start = RunStart(job.run, data_checksum=job.data.checksum)
                machine = build_newcomer(job.config, job.plan, peer, stage, start)
                plan = job.plan.with_newcomer(peer, stage)
            else:
                (stage, _), from_step, plan = job.plan.seat(peer), job.start.version, job.plan
                machine = build_peer(job.config, plan, peer, job.run_start)
            prepare = functools.partial(
                prepare_stage, job, plan, peer, from_step=from_step, n_devices=n_devices, is_planned=not joined
            )
            end = run_machine(
                job,
                peer,
                machine,
                dials=(ev.COORDINATOR, coordinator),
                own=own,
                report=log.report,
                stop_requests=stop_requests,
                process=process,
                trace=job.run_dir / "trace" / f"peer_{peer}.jsonl",
                trace_appends=has_moved,
                stage=stage,
                prepare=prepare,
                checkpointer=job.checkpointer(stage),
            )
            if isinstance(end, ev.Stop):
                # A peer that moves was in the run, though not at its new stage yet.
                return ev.Stop(ExitCode.DONE, end.reason) if has_moved and end.code == ExitCode.NOT_JOINED else end
            has_moved = True
            if not replicas_may_differ(job.config):
                joined = end.stage, max(end.version, from_step)
                continue
            process = secrets.randbelow(1 << 31)  # what is still on its way to the machine before is not for the next
            if refused := claim_peer(job, peer, coordinator, own, stop_requests, log.report):
                return refused  # else it starts again in its own place


def prepare_stage(
    job: RunJob,
    plan: Plan,
    peer: int,
    loop: Loop,
    *,
    from_step: int,
    n_devices: int,
    is_planned: bool = False,
    is_timed: bool = True,
    functions: StageFunctions | None = None,
) -> ev.Ready:
    """Make the tensors of a peer's stage, compile the functions for all lengths of samples that are still to come, and
    time them, with parameters that are drawn. Then the state is read from the checkpoint of the run's beginning if
    `is_planned`, and fetched from other peers otherwise: so no second state is held meanwhile. A checkpoint that is
    not there is reported before all that. No step before `from_step` is computed, unless the run goes back."""
    config, (stage, pipeline) = job.config, plan.seat(peer)
    functions = functions or stage_functions(config, plan, stage, n_devices, vocab_size=job.data.vocab_size)
    store = Store(config, plan, peer, job.data, functions, job.load_entries, job.load_owed)
    start = job.start
    restore = ev.Restore(start.version, start.generation, start.n_reseeds, start.parts) if is_planned else None
    if restore:
        store.entries_of(restore)
    loop.tensors = store
    first_steps = config.seq_lengths.first_steps(from_step, config.train.steps)
    for n_before, step in enumerate(first_steps):
        which = f" ({n_before + 1} of {len(first_steps)})" if len(first_steps) > 1 else ""
        what = f"compiles stage {stage} for samples of {config.seq_lengths.at(step)} tokens{which}"
        loop.post(PreparingReport(what))
        compile_step(store, peer, stage, step)
    if not is_timed:
        return ev.Ready({}, store.n_words, device_text(n_devices))
    loop.post(PreparingReport(f"times stage {stage}"))
    with contextlib.ExitStack() as stack:
        probe = None
        if is_planned:  # the first prediction of a step needs it
            probe = stack.enter_context(MessageCostProbe(encrypted=job.credential is not None))
        measured_s = time_stage(
            store,
            peer,
            stage,
            sync_groups(config, plan),
            evaluates=config.train.eval_every_steps > 0,
            step=config.data.seq_growth_steps,
            microbatch=plan.microbatches(pipeline).start,
            is_brief=not is_planned,
            probe=probe,
        )
    if restore:
        store.restore(restore)
    work_s_min = job.work_s_min(stage)
    seconds = {kind: max(s, work_s_min.get(kind, 0.0)) for kind, s in measured_s.items()}
    seconds |= {kind + ON_A_CORE: s for kind, s in measured_s.items() if s < seconds[kind]}
    return ev.Ready(seconds, store.n_words, device_text(n_devices))
