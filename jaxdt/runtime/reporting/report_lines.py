"""One line for people from each report of a run."""

from collections.abc import Collection

from jaxdt.protocol.events import COORDINATOR
from jaxdt.protocol.reports import (
    AdoptedReport,
    AsksToLeaveReport,
    CandidateReport,
    ConnectedReport,
    DownloadReport,
    DroppedReport,
    EvictedReport,
    JoinRequestReport,
    LateResultReport,
    MoveReport,
    MovingReport,
    NoHolderReport,
    NoteReport,
    OutageReport,
    OverdueReport,
    PartMissingReport,
    PausedReport,
    PipelineEndReport,
    PipelineJoinReport,
    PredictionReport,
    PreparingReport,
    ReadyReport,
    RefusedReport,
    RepairReport,
    Report,
    ReroutedReport,
    RestartedReport,
    ReturnedReport,
    SaveFailedReport,
    SteppedDownReport,
    StillReadyReport,
    UnequalBitsReport,
    WaitingReport,
    WorkerBeginsReport,
    WorkerGoneReport,
    WorkerHereReport,
    WorkerJoinedReport,
    WorkerLostReport,
    WorkerPlacedReport,
    WriteFailedReport,
)

DIGITS = 12  # digits that are printed of a part's digest


def line_of(report: Report) -> str:
    """The line that a process prints for a report, if it does not show the report in another way."""
    known = _line_of_members(report) or _line_of_state(report) or _line_of_peer(report)
    return known or f"{report.kind}: " + ", ".join(f"{name} {value}" for name, value in report.fields.items())


def _line_of_members(report: Report) -> str | None:
    """The line for a report of the coordinator about the run's members; None for other reports."""
    match report:
        case JoinRequestReport(peer, stage):
            return f"peer {peer}: asks to join, and gets stage {stage}"
        case ConnectedReport(peer, stage):
            return f"peer {peer} (stage {stage}): is here, and gets ready"
        case CandidateReport(peer, device, has_no_place=True):
            return f"peer {peer}: is ready on {device}, and waits for the end: nobody takes a place in this run"
        case CandidateReport(peer, device):
            return f"peer {peer}: is ready on {device}, and joins as soon as it can"
        case WaitingReport(missing):
            return f"waiting for {names(missing)} to get ready"
        case WorkerPlacedReport(worker, stage, server):
            return f"worker {worker}: comes to compute for peer {server} (stage {stage}), and gets ready"
        case WorkerHereReport(worker, server, is_back):
            return f"worker {worker}: {'is back, and ' if is_back else ''}computes for peer {server}"
        case WorkerGoneReport(worker, server, reason, n_redone):
            again = f"; {n_redone} microbatches that it had not handed in are computed again" if n_redone else ""
            return f"worker {worker}: is lost to peer {server} ({reason}){again}"
        case MoveReport(peer, stage, to_stage):
            return f"peer {peer}: moves from stage {stage} to stage {to_stage}, which needs it more"
        case ReturnedReport(peer):
            return f"peer {peer}: is heard again"
        case RestartedReport(view=view, step=step):
            return f"a coordinator was started again: the run goes on at step {step} with the members of view {view}"
        case SteppedDownReport(reason):
            return reason
        case PausedReport(paused_s, patience_s):
            return f"this process stood still for {paused_s} s, so no peer counts as lost for {patience_s:.0f} s"
        case OverdueReport(peer, work, seconds, deadline_s, blocks):
            waiting = ", and the run waits for it" if blocks else ""
            return f"peer {peer}: one computation ({work}) takes {seconds:.1f} s, expected {deadline_s:.1f} s{waiting}"
    return None


def _line_of_state(report: Report) -> str | None:
    """The line for a report of the coordinator about checkpoints, replicas or the prediction; None for other
    reports."""
    match report:
        case SaveFailedReport(peer, version, reason, n_in_a_row):
            part = f"its part of the checkpoint of {version} steps"
            return f"peer {peer}: could not write {part} ({n_in_a_row} in a row have failed): {reason}"
        case PartMissingReport(peer, digest, reason):
            return f"peer {peer}: cannot give part {digest[:DIGITS]} of a checkpoint: {reason}"
        case NoHolderReport(version, stages):
            which = ", ".join(map(str, stages))
            return f"nobody here has the parts of stage {which} of the checkpoint of {version} steps; the run waits"
        case UnequalBitsReport(version, stage, peer, reference, difference):
            where = f"after {version} steps stage {stage} is not bit for bit that of peer {reference}"
            return f"peer {peer}: {where} (relative difference {difference:.1e}), which is tolerated"
        case RepairReport(version, stage, peer, donor, difference):
            where = f"after {version} steps stage {stage} is not that of peer {donor}"
            return f"peer {peer}: {where} (relative difference {difference:.1e}), whose state it takes over"
        case PredictionReport(problem=problem) if problem is not None:
            return f"no prediction of the step time: {problem}"
        case PipelineEndReport(pipeline, n_steps):
            return f"pipeline {pipeline} has done its last step, {n_steps} in all"
        case PipelineJoinReport(pipeline, donor, n_steps):
            return f"pipeline {pipeline} is back, with the states of pipeline {donor} after {n_steps} local steps"
    return None


def _line_of_peer(report: Report) -> str | None:
    """The line for a report that a peer makes, or any process; None for other reports."""
    match report:
        case PreparingReport(what):
            return what
        case AsksToLeaveReport():
            rest = "at once, and may cost the run the steps since its last checkpoint"
            return f"asks to leave between two steps; a second interrupt ends it {rest}"
        case ReadyReport(device):
            return f"is ready on {device}; waits until the run takes it in"
        case StillReadyReport(waited_s):
            return f"has waited {waited_s:.0f} s until the run takes it in; the coordinator says for whom the run waits"
        case AdoptedReport(view, members, back_to):
            back = "" if back_to is None else f"; goes back to the checkpoint of {back_to} steps"
            return f"is in view {view}, with {names(members)}{back}"
        case NoteReport(text):
            return text or "the run goes on"
        case EvictedReport(view):
            return f"is not in view {view}: the run goes on without it"
        case MovingReport(to_stage):
            return f"moves to stage {to_stage}"
        case OutageReport(silent_s, waits_s):
            return f"the coordinator has been silent for {silent_s:.1f} s; waits for it for up to {waits_s:.0f} s"
        case DownloadReport(version, n_bytes, seconds, donors):
            return f"has the state of step {version} from {names(donors)}: {n_bytes / 1e6:.1f} MB in {seconds:.2f} s"
        case ReroutedReport(step, stage, microbatch, src, dst):
            what = f"microbatch {microbatch} of step {step + 1} waits too long at peer {src} for stage {stage}"
            return f"{what}: peer {dst} computes it, too"
        case LateResultReport(step, stage, microbatch, peer):
            what = f"microbatch {microbatch} of step {step + 1}, stage {stage}"
            return f"{what}: the result of peer {peer} came second and is not used"
        case DroppedReport(src, run, message, view):
            sender = "the coordinator" if src == COORDINATOR else f"peer {src}"
            late = f"{message} of view {view}, which is over" if message else f"it is of run {run}"
            return f"ignores a late message from {sender}: {late}"
        case WorkerJoinedReport(_, worker, version):
            return f"lets worker {worker} compute for it, with the parameters of {version} steps"
        case WorkerBeginsReport(server, stage):
            return f"computes for peer {server}, stage {stage}"
        case WorkerLostReport(_, worker, reason, n_redone, begins_anew):
            what = "begins anew" if begins_anew else "is lost"
            return f"worker {worker} {what} ({reason}); {n_redone} microbatches are computed again"
        case WriteFailedReport(reason):
            return f"could not be written, and the run goes on without it: {reason}"
        case RefusedReport(reason):
            return f"refused: {reason}"
    return None


def names(peers: Collection[int]) -> str:
    """Peers, for people."""
    ordered = [str(peer) for peer in sorted(peers)]
    together = " and ".join(filter(None, [", ".join(ordered[:-1]), ordered[-1]]))
    return f"peer {together}" if len(ordered) == 1 else f"peers {together}"
