"""The coordinator's record of a run, written to metrics.jsonl and summary.json and shown on the terminal."""

import json
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from jaxdt.build import period, replicas_may_differ
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.newcomers import ASKED_S
from jaxdt.protocol import events as ev
from jaxdt.protocol.address import is_loopback
from jaxdt.protocol.reports import (
    CandidateReport,
    CheckpointReport,
    ConnectedReport,
    DoneReport,
    EndedReport,
    FailedReport,
    GroupReport,
    HeartbeatReport,
    HeldOutMeanReport,
    LeavingReport,
    LostReport,
    OperatorReport,
    PipelineEndReport,
    PredictionReport,
    Report,
    RollbackReport,
    StateMeanReport,
    StepReport,
    StillWaitingReport,
    VacantReport,
    ViewReport,
    WaitingReport,
    WorkerHereReport,
    WorkerPlacedReport,
    WriteFailedReport,
    names,
)
from jaxdt.run.cpus import allowed_cpus, usable_cores
from jaxdt.run.errors import shell_line
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import ADDRESS, COORDINATOR_FLAGS, RunFolders
from jaxdt.runtime.reporting.counts import (
    ExpertLoads,
    LinkCodecs,
    MembershipChanges,
    PoolSummary,
    ProcessorUse,
    Totals,
    link_bytes,
)
from jaxdt.runtime.reporting.display import Display
from jaxdt.runtime.reporting.metrics import Metrics, plain_steps
from jaxdt.runtime.reporting.prediction import Prediction, PredictionRequest, doubt
from jaxdt.runtime.reporting.run_history import RunHistory
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.storage.durable import FileStore, refusal, write_durably

WARM_UP_STEPS = 2
PREDICTION_S = 30.0  # how long a run that is over waits for its prediction
SAVES_MAX = 1000  # the summary counts no more than the last checkpoints


class Journal:
    """Records the reports of the coordinator's machine. A context manager: the metrics file is open inside it.

    `post` hands a report to the loop; it is set before the loop runs.
    launched_s: when the launcher began, on this host's monotonic clock; None without a launcher.
    measured: the links of the plan's devices, for the prediction of a run whose links are not emulated."""

    def __init__(
        self,
        job: RunJob,
        machine: Coordinator,
        durable: FileStore,
        live: bool,
        launched_s: float | None = None,
        measured: Network | None = None,
    ):
        self._job = job
        self._machine = machine
        self._durable = durable
        self._measured = measured
        write_failed = lambda reason: self.report(WriteFailedReport(reason))  # noqa: E731
        self._metrics = Metrics(job.run_dir / "metrics.jsonl", machine.n_committed, write_failed)
        self._history = RunHistory(durable, job.run, write_failed)
        self._prediction = Prediction()
        self._end: EndedReport | None = None
        self._run_s: float | None = None  # from the first view to the end, also under earlier coordinators
        self.post: Callable[[Report], None]
        self._start_s: float | None = None
        self._save_s: deque[float] = deque(maxlen=SAVES_MAX)
        self._links = Totals()
        self._pool = PoolSummary()
        self._experts = ExpertLoads()
        self._codecs = LinkCodecs(job.plan)
        self._changes = MembershipChanges()
        self._clock_offset_s: dict[str, float] = {}
        self._started_s, self._processors = time.monotonic(), ProcessorUse()
        self._launched_s = self._started_s if launched_s is None else launched_s
        self._display = Display(job.plan, job.config.train.steps, live, job.config.net.heartbeat_s)

    def __enter__(self):
        self._metrics.__enter__()
        start_version = self._machine.config.start_version
        if damage := self._history.load(time.monotonic(), start_version, self._metrics.written_s):
            self._display.print(damage)
        return self

    def __exit__(self, *exception):
        self._prediction.end(0.0)
        self._display.close()
        self._metrics.__exit__(*exception)

    def report(self, report: Report) -> None:
        """Record one report. Call this on the loop's thread."""
        self._history.hear(report)
        match report:
            case StepReport():
                by_source = self._by_source(report)
                row = {name: value for name, value in report.fields.items() if name != "eval_losses"}
                if self._metrics.add(row | ({"eval_losses": by_source} if by_source else {})):
                    self._history.step(time.monotonic())
                    self._display.step(report, by_source)
            case ViewReport():
                self._changes.view(report.members)
                self._codecs.view(report.members)
                (self._first_view if report.view == 1 else self._view)(report)
            case ConnectedReport():
                self._connected(report)
            case WaitingReport():
                self._waiting(report)
            case WorkerPlacedReport() | WorkerHereReport():
                self._worker_comes(report)
            case CandidateReport(peer):
                self._display.ready(peer)
                self._display.print(report.line)
            case LostReport() | FailedReport():
                self._display.gone(report.peer)
                self._display.print(report.reason)
            case LeavingReport():
                self._leaving(report)
            case VacantReport():
                self._vacant(report)
            case StillWaitingReport():
                self._display.print(still_waiting(report, self._job.run_dir, self._job.plan))
            case RollbackReport():
                self._rollback(report)
            case CheckpointReport():
                self._save_s.append(report.save_s)
                copies = f", {report.copies} copies" if report.copies > 1 else ""
                self._display.print(f"checkpoint of {report.version} steps is complete{copies}")
            case DoneReport():
                self._done(report)
            case EndedReport():
                self._end = report
                self._history.ended(time.monotonic())
                self._run_s = self._history.run_s(time.monotonic())
                self._display.ended()
            case GroupReport() | StateMeanReport() | HeldOutMeanReport():
                pass  # there are some for each step; the trace has them
            case PredictionReport(problem=None):
                self._predicted(report)
            case PipelineEndReport():
                self._pipeline_ended(report)
            case HeartbeatReport():
                self._heartbeat(report)
            case OperatorReport(command, answer):
                if command in ("pause", "resume"):
                    self._display.standstill("paused" if command == "pause" else "")
                self._display.print(f"{command}: {answer}")
            case _:
                self._display.print(report.line)

    def _by_source(self, report: StepReport) -> dict[str, float]:
        """The held-out loss of each source of a mixture, of those that were measured."""
        if report.eval_losses is None:
            return {}
        config, data = self._job.config, self._job.data
        return data.by_source(report.eval_losses, data.n_eval_batches(config.train.microbatch_size, config.seq_len))

    def _first_view(self, report: ViewReport) -> None:
        """All peers have timed their stages, so the step time can be predicted."""
        self._start_s = time.monotonic() - self._launched_s
        self._history.begun(time.monotonic())
        self._display.members(report.members)
        devices = Counter(self._machine.devices[peer] for peer in sorted(report.members))
        on = ", ".join(f"{n} on {device}" for device, n in devices.items())
        self._display.print(f"all {len(report.members)} peers are ready, {on}")
        self._prediction.start(self._prediction_request(), self.post)

    def _view(self, report: ViewReport) -> None:
        self._display.members(report.members, report.joining)
        verb = "fetches" if len(report.joining) == 1 else "fetch"
        joining = f"; {names(report.joining)} {verb} the state of the stage" if report.joining else ""
        self._display.print(f"view {report.view}: {names(report.members)}{joining}")

    def _connected(self, report: ConnectedReport) -> None:
        """A member that was cut off for a moment says hello again, too."""
        if report.peer not in self._machine.roster.members:
            self._display.arriving(report.peer, report.stage, "compiling")
            self._display.print(report.line)

    def _predicted(self, report: PredictionReport) -> None:
        self._history.predicted(time.monotonic(), report)
        lengths = self._job.config.seq_lengths
        of_longest = f" for samples of {lengths.full} tokens" if lengths.growth_steps else ""
        n_steps = period(self._job.config, self._job.plan).n_steps
        of_period = f", the mean over a period of {n_steps} steps" if n_steps > 1 else ""
        self._display.print(f"predicted step time {report.step_s:.3f} s{of_longest}{of_period}")

    def _pipeline_ended(self, report: PipelineEndReport) -> None:
        if self._history.pipeline_ended(time.monotonic(), report):
            self._display.print(report.line)

    def _waiting(self, report: WaitingReport) -> None:
        """The run has not begun. Peers of the plan for which it does not wait are ready."""
        for peer in set(self._job.plan.peers) - set(report.missing):
            self._display.ready(peer)
        self._display.print(report.line)

    def _worker_comes(self, report: WorkerPlacedReport | WorkerHereReport) -> None:
        """A pool's worker gets ready, and then computes: from then on its server's row counts it."""
        if isinstance(report, WorkerPlacedReport):
            self._display.arriving(report.worker, report.stage, "worker, compiling", for_s=ASKED_S)
        else:
            self._display.gone(report.worker)
        self._display.print(report.line)

    def _leaving(self, report: LeavingReport) -> None:
        last = last_of_its_stage(self._job.run_dir, self._job.config.wiring.on_stage_lost)
        self._display.print(f"peer {report.peer}: wants to leave{last if report.last_of_its_stage else ''}")

    def _vacant(self, report: VacantReport) -> None:
        self._display.standstill("waiting")
        back = f"go back to the checkpoint of {report.checkpoint} steps"
        if not report.waits_for:
            self._display.print(
                f"stage {report.stage} has lost all its peers; the run waits for another, and will {back}"
            )
            return
        peers = " or ".join(f"peer {peer}" for peer in report.waits_for)
        self._display.print(
            f"stage {report.stage} has no peer that is there; the run waits {report.waits_s:.0f} s for {peers}, which "
            f"may live; after that it will {back} as soon as another comes"
        )

    def _rollback(self, report: RollbackReport) -> None:
        """The steps since the checkpoint are undone, and their metrics are deleted."""
        self._metrics.cut(report.to)
        self._history.went_back(time.monotonic(), len(report.again))
        lost = f"lost steps {report.again[0] + 1} to {report.again[-1] + 1}" if report.again else "no step is lost"
        self._display.print(f"back from step {report.step} to the checkpoint of {report.to} steps; {lost}")

    def _heartbeat(self, report: HeartbeatReport) -> None:
        if report.bytes_to is not None:
            self._links.counted(report.peer, link_bytes(report.peer, report.bytes_to, report.bytes_from))
        self._pool.counted(report.peer, report.status)
        self._experts.counted(report.peer, report.status)
        self._processors.counted(report.peer, report.status)
        for worker, cpu_s in (report.worker_cpu_s or {}).items():
            self._processors.counted(worker, {ev.CPU_S: cpu_s})
        self._display.heartbeat(report)

    def _done(self, report: DoneReport) -> None:
        """A peer has ended, and reports what it sent."""
        self._links.counted(report.peer, link_bytes(report.peer, report.bytes_to, report.bytes_from))
        self._pool.counted(report.peer, report.totals)
        self._experts.counted(report.peer, report.totals)
        self._processors.counted(report.peer, report.totals)
        self._clock_offset_s[str(report.peer)] = report.totals["clock_offset_s"]

    def _prediction_request(self) -> PredictionRequest:
        """A prediction from the peers' own timings, on the emulated links or else on the measured ones. A measured
        network may say which devices share the cores of a host. A pool's worker is taken for as fast as its server,
        and to be on the same host."""
        job = self._job
        view = self._machine.view
        assert view is not None, "the first view comes before the prediction"
        host_of = {member.peer: host_name(member.address) for member in view.members}
        cores = {host: usable_cores() if host == "here" else math.inf for host in host_of.values()}
        network = job.network or self._measured
        if network is self._measured and network is not None:
            shared = {peer: network.shared_hosts[peer] for peer in host_of}
            host_of |= {peer: host.name for peer, host in shared.items() if host.cores}
            cores |= {host.name: host.cores for host in shared.values() if host.cores}
        profiles = dict(self._machine.profiles)
        for worker, (_, server) in (self._machine.config.workers or {}).items():
            profiles[worker], host_of[worker] = profiles[server], host_of[server]
        return PredictionRequest(
            job.config, job.plan, network, profiles, host_of, cores, self._durable.put_s, job.stalls
        )

    def finish(self, loop_busy_s_max: float) -> None:
        """The loop has ended: write the summary of the run and show it. A run that is done waits for its prediction.

        loop_busy_s_max: the longest time for which the loop was busy with one event."""
        if self._end is None:
            return
        code, reason = self._end.code, self._end.reason
        predicted = self._prediction.end(0.0 if code else PREDICTION_S) or self._history.prediction
        history = self._history.history
        steps = list(self._metrics)
        evaluated = [step for step in steps if "eval_loss" in step]
        measured_s, tokens_per_s = self._speed(steps)
        bytes_on_links = self._links.by_name()
        summary = {
            "code": code,
            "reason": reason,
            "steps": len(steps),
            "loss_first": steps[0]["loss"] if steps else None,
            "loss_last": steps[-1]["loss"] if steps else None,
            "eval_loss_last": evaluated[-1]["eval_loss"] if evaluated else None,
            "eval_losses_last": evaluated[-1].get("eval_losses") if evaluated else None,
            "eval_loss_step": evaluated[-1]["step"] + 1 if evaluated else None,
            "n_steps_skipped": sum(step.get("verdict") == "skip" for step in steps),
            "resumed_at": self._machine.config.start_version,
            "resumes": history.resumes,
            "step_s_predicted": predicted.step_s,
            "step_s_predicted_uncompressed": predicted.step_s_uncompressed,
            "step_s_measured": measured_s,
            "prediction_doubt": self._doubt(predicted.step_s, measured_s, len(steps)),
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_overall": self._n_tokens(steps) / self._run_s if self._run_s else None,
            "n_rollbacks": history.n_rollbacks,
            "n_steps_again": history.n_steps_again,
            "stood_still_s": history.stood_still_s,
            "bytes_on_links": bytes_on_links,
            "codec_on_links": self._codecs.on(bytes_on_links),
            "pool": self._pool.fields,
            "experts": self._experts.fields,
            "start_s": self._start_s,
            "save_s_p50": statistics.median(self._save_s) if self._save_s else None,
            "save_s_max": max(self._save_s, default=None),
            "wall_s": time.monotonic() - self._started_s,
            "clock_offset_s": self._clock_offset_s,
            "loop_busy_s_max": loop_busy_s_max,
        }
        try:
            write_durably(self._job.run_dir / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
        except OSError as error:
            self.report(WriteFailedReport(refusal(error, str(self._job.run_dir))))
        self._display.summary(summary)

    def _doubt(self, predicted_s: float | None, measured_s: float | None, n_steps: int) -> str:
        """The reasons why the prediction may be off, as far as this host knows; '' if there is none."""
        view = self._machine.view
        n_peers = sum(host_name(member.address) == "here" for member in view.members) if view else 0
        n_peers += len(self._machine.config.workers or ()) if n_peers else 0
        changes = f"{self._changes.text}: the prediction is of the first plan" if self._changes.text else ""
        lengths = self._job.config.seq_lengths
        longest = lengths.at(n_steps - 1)
        tokens = f"samples had at most {longest} tokens, the prediction is for {lengths.full}"
        of_run = [*filter(None, (changes, self._pool.doubt, tokens if longest < lengths.full else ""))]
        others_cores = self._processors.others_cores(time.monotonic() - self._started_s)
        off = predicted_s / measured_s - 1 if predicted_s and measured_s else 0.0
        of_host = doubt(n_peers, len(allowed_cpus()), usable_cores(), others_cores, off, bool(of_run))
        return "; ".join([*of_run, *filter(None, [of_host])])

    def _speed(self, steps: list[dict]) -> tuple[float | None, float | None]:
        """(seconds of a step, tokens per second) of the steps since the run was begun or resumed whose time is known,
        without warm-up and evaluation: the median, or where replicas may differ the mean, as predicted. Only steps of
        the greatest length count, since a step is predicted at the full length. Where a period has several steps, such
        as those up to an average, the seconds are the mean over whole periods; periods with an evaluation count only if
        all have one."""
        config = self._job.config
        plan = self._job.plan
        lengths = config.seq_lengths
        longest = lengths.at(len(steps) - 1)
        known = [
            step
            for step in self._own(steps)[WARM_UP_STEPS:]
            if lengths.at(step["step"]) == longest and not math.isnan(step["step_s"])
        ]
        plain = {step["step"] for step in plain_steps(self._own(steps), 1 + config.sync.delay)}
        quiet = [step for step in known if step["step"] in plain]
        n = period(config, plan).n_steps
        if n == 1 or len(known) < n:
            timed, mean = quiet, statistics.fmean if replicas_may_differ(config) else statistics.median
        else:
            periods = [known[i - n : i] for i in range(len(known), n - 1, -n)]
            whole = [steps for steps in periods if all(step["step"] in plain for step in steps)] or periods
            timed, mean = [step for steps in whole for step in steps], statistics.fmean
        if not timed:
            return None, None
        measured_s = mean(step["step_s"] for step in timed)
        n_tokens = plan.n_microbatches * config.train.microbatch_size * longest
        return measured_s, n_tokens / measured_s if measured_s else None

    def _own(self, steps: list[dict]) -> list[dict]:
        """The steps of this run, without those before it was resumed."""
        return [step for step in steps if step["step"] >= self._machine.config.start_version]

    def _n_tokens(self, steps: list[dict]) -> int:
        """The tokens in the steps of this run that count: steps that were undone do not."""
        config = self._job.config
        n_positions = sum(config.seq_lengths.at(step["step"]) for step in self._own(steps))
        return self._job.plan.n_microbatches * config.train.microbatch_size * n_positions


def still_waiting(report: StillWaitingReport, run_dir: Path, plan: Plan) -> str:
    """A line about the peers for which the run waits, the ones that were refused meanwhile, and the command to start.
    Peers of a lost stage that the plan has may come back with their own flag files."""
    folders = RunFolders.of(run_dir)
    is_emitted = (folders.job / COORDINATOR_FLAGS).exists()
    planned = [peer for stage in report.stages for peer in sorted(plan.placement[stage])]
    parts = [f"the run has waited {report.waited_s:.0f} s"]
    if report.missing:
        parts[0] += f" for {names(report.missing)} to get ready (a peer loads jax and compiles its stage)"
    if report.absent:
        parts.append(f"{names(report.absent)} {'is' if len(report.absent) == 1 else 'are'} not connected")
    for stage in report.stages:
        parts.append(f"stage {stage} has no peer")
    if report.refusal:
        parts.append(f"refused meanwhile: {report.refusal}")
    if (to_start := [*report.absent, *planned]) and is_emitted:
        flag_files = [folders.job / f"host_{peer}.flags" for peer in to_start]
        commands = [shell_line("python", "scripts/train.py", f"--flagfile={path}") for path in flag_files]
        parts.append(f"to start: {', '.join(commands)}")
    if report.stages:
        folder = f"--run_dir={run_dir}"
        token = shell_line("python", "scripts/tools/credential.py", "token", folder)
        join = f'--join="$({shell_line("cat", folders.job / ADDRESS)})" --token="$({token})" {shell_line(folder)}'
        parts.append(f"to start a newcomer: python scripts/train.py {join}")
    return "; ".join(parts)


def last_of_its_stage(run_dir: Path, on_stage_lost: str) -> str:
    """A text for a peer that wants to leave as the last of its stage: it stays, a second interrupt has a cost, and
    there is a command that ends the run instead."""
    cost = "waits for another and goes back to its last checkpoint" if on_stage_lost == "wait" else "ends with code 3"
    return (
        "; it is the last of its stage, and stays until another joins; a second interrupt ends it at once, and the run "
        f"then {cost}; to end the run with a checkpoint: "
        + shell_line("python", "scripts/fleet.py", "stop", f"--run_dir={run_dir}")
    )


def host_name(address: str) -> str:
    """The host of an address. Peers of one host share its cores; a loopback address is on the coordinator's own host,
    which is called "here"."""
    host = address.rpartition(":")[0].strip("[]")
    return "here" if is_loopback(host) else host
