"""The lines of a peer's own log."""

import dataclasses
import typing

import pytest

from jaxdt.protocol.reports import (
    SCHEMAS,
    AdoptedReport,
    CandidateReport,
    ConnectedReport,
    DownloadReport,
    DroppedReport,
    OverdueReport,
    PreparingReport,
    ReadyReport,
    SaveFailedReport,
    SteppedDownReport,
    StillReadyReport,
    UnreachedReport,
    UsageReport,
    WaitingReport,
    WorkerBeginsReport,
    WorkerLostReport,
    WorkerProgressReport,
)
from jaxdt.runtime.reporting import peer_log


def test_a_log_has_a_line_a_report_and_one_for_a_step_now_and_then(monkeypatch, capsys):
    now_s = [100.0]
    monkeypatch.setattr(peer_log.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(peer_log.time, "strftime", lambda _: "12:00:00")
    log = peer_log.PeerLog("peer 3", ("host", 7700), n_steps=200)
    log.report(UnreachedReport(118.0))
    log.report(PreparingReport("times stage 1"))
    log.report(ReadyReport("cpu: 1 x cpu"))
    for step in range(4):
        log.report(UsageReport(step, 0.1))
        now_s[0] += 0.4 * peer_log.STEP_EVERY_S
    assert capsys.readouterr().out.splitlines() == [
        "peer 3: 12:00:00 waiting for the coordinator at host:7700, for another 118 s at most",
        "peer 3: 12:00:00 times stage 1",
        "peer 3: 12:00:00 is ready on cpu: 1 x cpu; waits until the run takes it in",
        "peer 3: 12:00:00 step 1 of 200 is applied here",
        "peer 3: 12:00:00 step 4 of 200 is applied here",
    ]


def test_a_peer_that_waits_says_whether_the_coordinator_is_there(monkeypatch, capsys):
    monkeypatch.setattr(peer_log.time, "strftime", lambda _: "12:00:00")
    log = peer_log.PeerLog("peer 3", ("host", 7700), n_steps=200)
    log.report(StillReadyReport(10.0))
    log.report(StillReadyReport(30.0, is_heard=False))
    waits = "peer 3: 12:00:00 has waited {} s until the run takes it in; {}"
    assert capsys.readouterr().out.splitlines() == [
        waits.format(10, "the coordinator says for whom the run waits"),
        waits.format(30, "no process answers at host:7700, where the coordinator was"),
    ]


def test_steps_of_a_pipeline_of_its_own_are_not_those_of_the_run(monkeypatch, capsys):
    monkeypatch.setattr(peer_log.time, "strftime", lambda _: "12:00:00")
    peer_log.PeerLog("peer 3", ("host", 7700), n_steps=None).report(UsageReport(156, 0.1))
    assert capsys.readouterr().out == "peer 3: 12:00:00 local step 157 is applied here\n"


def test_a_worker_says_when_it_begins_and_then_now_and_then_how_much_it_has_done(monkeypatch, capsys):
    now_s = [100.0]
    monkeypatch.setattr(peer_log.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(peer_log.time, "strftime", lambda _: "12:00:00")
    log = peer_log.PeerLog("worker 4", ("host", 7700), n_steps=200)
    log.report(WorkerProgressReport(6, 1, 0, 0))
    log.report(WorkerBeginsReport(0, 1))
    for step in range(1, 5):
        log.report(WorkerProgressReport(6 + step, 1, 3 * step, 8 * step))
        now_s[0] += 0.4 * peer_log.STEP_EVERY_S
    assert capsys.readouterr().out.splitlines() == [
        "worker 4: 12:00:00 computes for peer 0, stage 1",
        "worker 4: 12:00:00 step 7 of 200 is done; has handed in 3 of 8 microbatches of stage 1 (38%) since it came",
        "worker 4: 12:00:00 step 10 of 200 is done; has handed in 12 of 32 microbatches of stage 1 (38%) since it came",
    ]


def test_the_last_line_of_a_peer_names_it_once():
    assert peer_log.named("peer 3", "done: 60 steps") == "peer 3: done: 60 steps"
    assert peer_log.named("peer 3", "peer 31: lost") == "peer 3: peer 31: lost"
    for line in ("peer 3: left the run", "peer 3 (stage 1): has version 2"):
        assert peer_log.named("peer 3", line) == line


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (
            OverdueReport(0, "1:0B2@p0", 4.008, 4.0, blocks=True),
            "peer 0: one computation (1:0B2@p0) takes 4.0 s, expected 4.0 s, and the run waits for it",
        ),
        (ConnectedReport(4, 0), "peer 4 (stage 0): is here, and gets ready"),
        (
            CandidateReport(4, "cpu: 1 x cpu"),
            "peer 4: is ready on cpu: 1 x cpu, and joins as soon as it can",
        ),
        (
            CandidateReport(4, "cpu: 1 x cpu", has_no_place=True),
            "peer 4: is ready on cpu: 1 x cpu, and stays idle until the end: this run admits no new peers",
        ),
        (WaitingReport([0, 2, 3]), "waiting for peers 0, 2 and 3 to get ready"),
        (WaitingReport([1]), "waiting for peer 1 to get ready"),
        (
            SaveFailedReport(0, 2, "full", 1),
            "peer 0: could not write its part of the checkpoint of 2 steps (1 in a row have failed): full",
        ),
        (AdoptedReport(4, [1, 0, 4]), "is in view 4, with peers 0, 1 and 4"),
        (
            DownloadReport(142, 3_249_000, 0.1654438759999266, [0]),
            "has the state of step 142 from peer 0: 3.2 MB in 0.17 s",
        ),
        (SteppedDownReport("coordinator: terminated"), "coordinator: terminated"),
        (WorkerLostReport(0, 4, "hung up", 3), "worker 4 is lost (hung up); 3 microbatches are computed again"),
        (
            WorkerLostReport(0, 4, "a backward came too late", 3, begins_anew=True),
            "worker 4 starts again (a backward came too late); 3 microbatches are computed again",
        ),
        (
            DroppedReport(-1, message="Ended", view=1, coordinator_term=1),
            "ignores a late message from the coordinator: Ended of view 1, which is over",
        ),
    ],
)
def test_what_a_person_must_know_is_a_sentence(report, line):
    assert report.line == line


# Reports that the live table, the journal or a peer's log show in a way of their own, and reports of the trace alone.
OTHERWISE = {"step", "view", "lost", "failed", "leaving", "vacant", "rollback", "checkpoint", "done", "ended"}
VALUES = {int: 7, float: 0.25, bool: True, list[int]: [1, 2]}
OTHERWISE |= {
    "still_waiting",
    "heartbeat",
    "operator",
    "usage",
    "tasks_stolen",
    "worker_progress",
    "unreached",
    "group",
    "state_mean",
    "held_out_mean",
    "push",
    "pull",
    "snapshot",
    "kept",
}


def test_no_report_is_printed_as_its_bare_fields():
    for kind, schema in SCHEMAS.items():
        if kind not in OTHERWISE:
            hints = typing.get_type_hints(schema)
            report = schema(**{one.name: VALUES.get(hints[one.name], "text") for one in dataclasses.fields(schema)})
            assert not report.line.startswith(f"{kind}: ") or kind == "refused", kind
