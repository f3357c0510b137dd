"""One line for people from each report of a run, where its fields alone would be a riddle."""

from collections.abc import Collection

from jaxdt.protocol.reports import (
    CandidateReport,
    ConnectedReport,
    JoinRequestReport,
    MoveReport,
    OverdueReport,
    PausedReport,
    PreparingReport,
    ReadyReport,
    RefusedReport,
    Report,
    RestartedReport,
    ReturnedReport,
    WaitingReport,
)


def line_of(report: Report) -> str:
    """What the coordinator prints of a report."""
    match report:
        case JoinRequestReport(peer, stage):
            return f"peer {peer}: asks to join, and gets stage {stage}"
        case ConnectedReport(peer, stage):
            return f"peer {peer} (stage {stage}): is here, and gets ready"
        case CandidateReport(peer, device):
            return f"peer {peer}: is ready on {device}, and joins after this step"
        case WaitingReport(missing):
            return f"waiting for {names(missing)} to get ready"
        case MoveReport(peer, stage, to_stage):
            return f"peer {peer}: moves from stage {stage} to stage {to_stage}, which needs it more"
        case ReturnedReport(peer):
            return f"peer {peer}: is heard again"
        case RestartedReport(_, view, step):
            return f"a coordinator was started again: the run goes on at step {step} with the members of view {view}"
        case PausedReport(paused_s, patience_s):
            return f"this process stood still for {paused_s} s, so no peer counts as lost for {patience_s:.0f} s"
        case OverdueReport(peer, work, seconds, deadline_s, blocks):
            waiting = ", and the run waits for it" if blocks else ""
            return f"peer {peer}: one computation ({work}) takes {seconds:.1f} s, expected {deadline_s:.1f} s{waiting}"
        case RefusedReport(reason):
            return f"refused: {reason}"
    return f"{report.kind}: " + ", ".join(f"{name} {value}" for name, value in report.fields.items())


def peer_line_of(report: Report) -> str:
    """What a peer writes of a report into its own log."""
    match report:
        case PreparingReport(what):
            return what
        case ReadyReport(device):
            return f"is ready on {device}; waits until the run takes it in"
        case RefusedReport(reason):
            return f"refused: {reason}"
    return " ".join([report.kind, *(f"{name}={value}" for name, value in report.fields.items())])


def names(peers: Collection[int]) -> str:
    """Peers, for people."""
    ordered = [str(peer) for peer in sorted(peers)]
    together = " and ".join(filter(None, [", ".join(ordered[:-1]), ordered[-1]]))
    return f"peer {together}" if len(ordered) == 1 else f"peers {together}"
