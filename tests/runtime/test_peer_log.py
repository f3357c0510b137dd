"""What a peer's own log says."""

from jaxdt.protocol.reports import ReadyReport, UnreachedReport, UsageReport
from jaxdt.runtime.reporting import peer_log


def test_a_log_has_a_line_a_report_and_one_for_a_step_now_and_then(monkeypatch, capsys):
    now_s = [100.0]
    monkeypatch.setattr(peer_log.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(peer_log.time, "strftime", lambda _: "12:00:00")
    log = peer_log.PeerLog(("host", 7700), n_steps=200)
    log.report(UnreachedReport())
    log.report(ReadyReport("cpu: 1 x cpu"))
    for step in range(4):
        log.report(UsageReport(step, 0.1))
        now_s[0] += 0.4 * peer_log.STEP_EVERY_S
    assert capsys.readouterr().out.splitlines() == [
        "12:00:00 waiting for the coordinator at host:7700",
        "12:00:00 ready device=cpu: 1 x cpu",
        "12:00:00 step 1 of 200 is applied here",
        "12:00:00 step 4 of 200 is applied here",
    ]
