"""A coordinator that is started again knows the run's prediction, how often it went back, and how long it stood still;
the summary says so."""

import json
import math
import os
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxdt.model.data import write_tokens
from jaxdt.model.mixture import open_mixture
from jaxdt.protocol.reports import (
    EndedReport,
    OperatorReport,
    PipelineEndReport,
    PredictionReport,
    RestartedReport,
    RollbackReport,
    StepReport,
    VacantReport,
    ViewReport,
)
from jaxdt.runtime.reporting import journal as journal_module
from jaxdt.runtime.reporting.display import Display
from jaxdt.runtime.reporting.journal import Journal
from jaxdt.runtime.reporting.prediction import Prediction
from jaxdt.runtime.reporting.run_history import History, RunHistory
from jaxdt.runtime.storage.durable import FileStore
from jaxdt.testing.cases import draw_case

CASE = draw_case(0)
MEMBERS = {peer: CASE.plan.seat(peer)[0] for peer in CASE.plan.peers}
FIRST_VIEW = ViewReport(1, MEMBERS, [])
VACANT = VacantReport(1, "it is gone", 0, [0, 1], [], 0.0)
N_TOKENS = CASE.plan.n_microbatches * CASE.config.train.microbatch_size * CASE.config.seq_lengths.at(0)


def step(number, step_s=1.0, verdict="apply", eval_loss=None):
    return StepReport(number, 5.0, step_s, 10.0, 0.0, verdict, eval_loss)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(Prediction, "start", lambda *arguments: None)
    return clock


def play(clock, folder, *moments, n_committed=0, start_version=0, data=None):
    """A coordinator of the run in the folder: at each of these moments it makes these reports."""
    clock.now_s = moments[0][0]
    config = SimpleNamespace(start_version=start_version, workers=None)
    view = SimpleNamespace(members=[])
    devices = dict.fromkeys(MEMBERS, "cpu")
    machine = SimpleNamespace(n_committed=n_committed, config=config, view=view, devices=devices, profiles={})
    job = SimpleNamespace(run_dir=folder, config=CASE.config, plan=CASE.plan, network=None, stalls=None, run="r")
    job.data = data
    with Journal(job, machine, FileStore(folder / "coordinator"), live=False) as journal:
        journal.post = journal.report
        for at_s, *reports in moments:
            clock.now_s = at_s
            for report in reports:
                journal.report(report)
        if isinstance(report, EndedReport):
            journal.finish(0.0)
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_the_summary_says_that_the_run_went_back_and_stood_still(clock, tmp_path, capsys):
    steps = [(1001.0 + n, step(n)) for n in range(5)]
    back = RollbackReport(5, 2, 1, [2, 3, 4])
    again = [(1020.0 + n, step(n)) for n in range(2, 7)]
    summary = play(
        clock,
        tmp_path,
        (1000.0, FIRST_VIEW),
        *steps,
        (1006.5, VACANT),
        (1021.0, back),
        *again,
        (1030.0, EndedReport(0, "")),
    )
    assert (summary["n_rollbacks"], summary["n_steps_again"], summary["stood_still_s"]) == (1, 3, 17.0)
    assert summary["tokens_per_s"] == N_TOKENS and summary["tokens_per_s_overall"] == 7 * N_TOKENS / 30
    shown = capsys.readouterr().out
    assert "\ninterruptions  went back once, 3 steps computed again; stood still for 17.0 s\n" in shown
    assert f"\nthroughput     {N_TOKENS} tokens/s, {7 * N_TOKENS / 30:.0f} over the whole time\n" in shown


def test_a_run_without_interruptions_has_no_line_of_them(clock, tmp_path, capsys):
    play(
        clock, tmp_path, (1000.0, FIRST_VIEW), *((1001.0 + n, step(n)) for n in range(5)), (1006.0, EndedReport(0, ""))
    )
    shown = capsys.readouterr().out
    assert "throughput" in shown and "interruptions" not in shown


def test_another_coordinator_goes_on_with_prediction_and_counts(clock, tmp_path, capsys):
    """It is killed after 6 steps, and another one begins 14 s after the last of them, with a clock of its own."""
    begun = [(1000.0, FIRST_VIEW, PredictionReport(0.25, 0.5)), *((1001.0 + n, step(n)) for n in range(5))]
    assert play(clock, tmp_path, *begun, (1005.5, RollbackReport(5, 5, 1, [])), (1006.0, step(5))) is None
    history, metrics = tmp_path / "coordinator" / "history.json", tmp_path / "metrics.jsonl"
    os.utime(metrics, (now_s := history.stat().st_mtime - 14.0, now_s))
    os.utime(history, (now_s - 0.5, now_s - 0.5))
    restarted = (20.0, step(5, math.nan), RestartedReport(2, 1, 6, list(MEMBERS)))
    rest = [(23.0, step(6, math.nan)), *((18.0 + n, step(n)) for n in range(7, 10)), (30.0, EndedReport(0, ""))]
    summary = play(clock, tmp_path, restarted, *rest, n_committed=6)
    assert (summary["step_s_predicted"], summary["step_s_predicted_uncompressed"]) == (0.25, 0.5)
    assert (summary["n_rollbacks"], summary["step_s_measured"]) == (1, 1.0)
    assert summary["stood_still_s"] == pytest.approx(17.0, abs=1.0), "the file system's clock runs meanwhile"
    assert summary["tokens_per_s_overall"] == pytest.approx(10 * N_TOKENS / 30, rel=0.05)
    shown = capsys.readouterr().out
    assert "1.000 s measured, 0.250 s predicted (-75.0 %)" in shown and "nan" not in shown


def test_the_end_of_a_pipeline_is_said_once_however_often_the_coordinator_is_started_again(clock, tmp_path, capsys):
    play(clock, tmp_path, (1000.0, FIRST_VIEW), (1001.0, PipelineEndReport(0, 9)))
    again = [PipelineEndReport(0, 9), PipelineEndReport(1, 8)]
    play(clock, tmp_path, (20.0, RestartedReport(2, 1, 6, list(MEMBERS))), (21.0, *again))
    play(clock, tmp_path, (30.0, RestartedReport(3, 1, 6, list(MEMBERS))), (31.0, *again, PipelineEndReport(0, 12)))
    shown = [line for line in capsys.readouterr().out.splitlines() if "last step" in line]
    assert shown == [
        f"pipeline {end} in all"
        for end in ("0 has done its last step, 9", "1 has done its last step, 8", "0 has done its last step, 12")
    ]


def test_a_pause_that_an_operator_asked_for_counts(clock, tmp_path):
    moments = [(1000.0, FIRST_VIEW), (1001.0, step(0)), (1001.5, OperatorReport("checkpoint", "")), (1002.0, step(1))]
    pause = [(1002.5, OperatorReport("pause", "")), (1024.0, step(2)), (1025.0, step(3)), (1026.0, EndedReport(0, ""))]
    assert play(clock, tmp_path, *moments, *pause)["stood_still_s"] == 22.0


def test_a_run_that_ends_while_it_stands_still_says_for_how_long(clock, tmp_path):
    ended = [(1000.0, FIRST_VIEW), (1001.0, step(0)), (1002.0, VACANT), (1011.0, EndedReport(130, "interrupted"))]
    assert play(clock, tmp_path, *ended)["stood_still_s"] == 10.0


def test_all_resumes_are_known_but_those_that_a_later_one_undid(tmp_path):
    store = FileStore(tmp_path)
    for run, start_version, resumes in (("a", 0, ()), ("b", 60, (60,)), ("c", 120, (60, 120)), ("d", 90, (60, 90))):
        history = RunHistory(store, run, pytest.fail)
        history.load(7.0, start_version, None)
        assert history.history == History(run, resumes)
        history.went_back(8.0, 7)
        again = RunHistory(store, run, pytest.fail)
        again.load(9.0, start_version, None)
        assert again.history == History(run, resumes, n_rollbacks=1, n_steps_again=7)


def test_a_damaged_history_begins_again_and_a_line_says_so(tmp_path):
    store = FileStore(tmp_path)
    (tmp_path / "history.json").write_text('{"sha')
    history = RunHistory(store, "a", pytest.fail)
    line = history.load(7.0, 60, 3.0)
    assert line.startswith(f"{tmp_path / 'history.json'}: cannot be read") and line.endswith("from now on")
    assert history.history == History("a", (60,), run_s=0.0) and history.run_s(9.0) == 2.0
    assert RunHistory(store, "a", pytest.fail).load(8.0, 60, 3.0) == ""


def test_what_is_since_the_last_resume_says_so(capsys):
    links = {"0->1": 3_000_000}
    Display(CASE.plan, 9, heartbeat_s=1.0, live=False).summary(
        dict.fromkeys(("eval_loss_last", "step_s_predicted", "pool", "experts"))
        | dict(reason="done", steps=9, loss_first=2.0, loss_last=1.0, resumed_at=6, step_s_measured=0.5)
        | dict(tokens_per_s=20.0, tokens_per_s_overall=10.0, prediction_doubt="", bytes_on_links=links)
        | dict(n_steps_skipped=0, n_rollbacks=2, n_steps_again=1, stood_still_s=0.0)
    )
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "throughput     20 tokens/s, 10 over the whole time since step 6",
        "interruptions  went back twice, 1 step computed again since step 6",
        "on the links   3.0 MB since step 6",
    ]


def test_skipped_steps_are_said_and_steps_that_measure_a_held_out_loss_are_not_timed(clock, tmp_path, capsys):
    """The loss in the row of a step is measured in the next one."""
    steps = [step(0), step(1), step(2, 1.0, "skip"), step(3, 1.0, eval_loss=4.0), step(4, 9.0, "skip"), step(5)]
    moments = [(1001.0 + n, one) for n, one in enumerate(steps)]
    summary = play(clock, tmp_path, (1000.0, FIRST_VIEW), *moments, (1010.0, EndedReport(0, "done")))
    assert (summary["n_steps_skipped"], summary["step_s_measured"]) == (2, 1.0)
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("step ") and "not finite" in line]
    assert [line.split("/")[0].split()[1] for line in lines] == ["3", "5"]
    assert "skipped        2 steps, with a gradient that was not finite" in said


def test_a_mixture_has_the_held_out_loss_of_each_source_beside_the_mean(clock, tmp_path, capsys):
    numbers = np.arange(10 * CASE.config.train.microbatch_size * CASE.config.seq_len) % 7
    sources = []
    for name, share in (("wiki.tok", 2), ("code.tok", 1)):
        write_tokens(tmp_path / name, "x", 7, numbers, numbers)
        sources.append({"path": name, "share": share})
    (tmp_path / "mix.json").write_text(json.dumps({"sources": sources}))
    data = open_mixture(tmp_path / "mix.json")
    of_code = [data.held_out_source(m) for m in range(3)].index(1)
    losses = [(m, 5.0 if m == of_code else 1.0 + m) for m in range(3)]
    wiki = statistics.fmean(loss for m, loss in losses if m != of_code)
    measured = replace(step(1, eval_loss=3.0), eval_losses=tuple(losses))
    end = (1010.0, EndedReport(0, "done"))
    summary = play(clock, tmp_path, (1000.0, FIRST_VIEW), (1001.0, step(0)), (1002.0, measured), end, data=data)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "eval_losses" not in rows[0]
    assert (rows[1]["eval_loss"], rows[1]["eval_losses"]) == (3.0, {"wiki.tok": wiki, "code.tok": 5.0})
    assert summary["eval_losses_last"] == rows[1]["eval_losses"]
    said = capsys.readouterr().out
    assert f"held-out 3.0000 (wiki.tok {wiki:.4f}, code.tok 5.0000)" in said
    assert f"held-out loss  3.0000, measured at step 2 of 2\n               {wiki:.4f} of wiki.tok\n" in said
    plain = play(clock, tmp_path / "plain", (1000.0, FIRST_VIEW), (1001.0, step(0, eval_loss=3.0)), end)
    assert plain["eval_losses_last"] is None
