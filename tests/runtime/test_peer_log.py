"""What a peer's own log says."""

import pytest

from jaxdt.protocol.reports import (
    CandidateReport,
    ConnectedReport,
    OverdueReport,
    PreparingReport,
    ReadyReport,
    SaveFailedReport,
    UnreachedReport,
    UsageReport,
    WaitingReport,
)
from jaxdt.runtime.reporting import peer_log
from jaxdt.runtime.reporting.report_lines import line_of


def test_a_log_has_a_line_a_report_and_one_for_a_step_now_and_then(monkeypatch, capsys):
    now_s = [100.0]
    monkeypatch.setattr(peer_log.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(peer_log.time, "strftime", lambda _: "12:00:00")
    log = peer_log.PeerLog(("host", 7700), n_steps=200)
    log.report(UnreachedReport())
    log.report(PreparingReport("times stage 1"))
    log.report(ReadyReport("cpu: 1 x cpu"))
    for step in range(4):
        log.report(UsageReport(step, 0.1))
        now_s[0] += 0.4 * peer_log.STEP_EVERY_S
    assert capsys.readouterr().out.splitlines() == [
        "12:00:00 waiting for the coordinator at host:7700",
        "12:00:00 times stage 1",
        "12:00:00 is ready on cpu: 1 x cpu; waits until the run takes it in",
        "12:00:00 step 1 of 200 is applied here",
        "12:00:00 step 4 of 200 is applied here",
    ]


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (
            OverdueReport(0, "1:0B2@p0", 4.008, 4.0, blocks=True),
            "peer 0: one computation (1:0B2@p0) takes 4.0 s, expected 4.0 s, and the run waits for it",
        ),
        (ConnectedReport(4, 0), "peer 4 (stage 0): is here, and gets ready"),
        (CandidateReport(4, "cpu: 1 x cpu"), "peer 4: is ready on cpu: 1 x cpu, and joins after this step"),
        (WaitingReport([0, 2, 3]), "waiting for peers 0, 2 and 3 to get ready"),
        (WaitingReport([1]), "waiting for peer 1 to get ready"),
        (SaveFailedReport(0, 2, "full", 1), "save_failed: peer 0, version 2, reason full, n_in_a_row 1"),
    ],
)
def test_what_a_person_must_know_is_a_sentence(report, line):
    assert line_of(report) == line
