"""Rows of the metrics where replicas may differ: each is JSON, and has a time only where that is known."""

import json
import math

import pytest

from jaxdt.protocol import events as ev
from jaxdt.run.seq_lengths import SeqLengths
from jaxdt.sync.scheduling.rows import Rows


def rows_at(begun_s, *heard_s):
    """The rows of a run of one pipeline, of whose steps the coordinator hears at these moments."""
    rows = Rows(1, SeqLengths(16))
    rows.begin(begun_s)
    reports = []
    for row, now_s in enumerate(heard_s):
        rows.add(0, ev.StepDone(row, 4, ev.Tally(8.0, 4), 1.0))
        reports.append(rows.next(now_s, row, math.inf))
    return reports


def test_rows_that_arrive_in_a_burst_after_a_pause_of_the_coordinator_have_no_time(monkeypatch):
    """The peers went on meanwhile, at 2 s a step; the coordinator hears of their steps within milliseconds."""
    begin = Rows.begin
    monkeypatch.setattr(Rows, "begin", lambda rows, now_s: (begin(rows, now_s), rows.on_paused(33.0)))
    *burst, later, last = rows_at(0.0, 30.001, 30.002, 30.003, 32.0, 34.0, 36.0)
    assert all(math.isnan(row.step_s) and math.isnan(row.tokens_per_s) for row in burst)
    assert (later.step_s, later.tokens_per_s, last.step_s) == (2.0, 32.0, 2.0)


def test_rows_of_steps_that_were_done_while_there_was_no_coordinator_have_no_time():
    first, *held_back, later, last = rows_at(math.nan, 7.0, 7.0, 7.0, 7.5, 9.5)
    for row in (first, *held_back):
        assert math.isnan(row.step_s) and math.isnan(row.tokens_per_s)
        assert "Infinity" not in json.dumps(row.fields)
    assert (later.step_s, later.tokens_per_s, last.step_s, last.tokens_per_s) == (0.5, 128.0, 2.0, 32.0)


def losses_of_rows(arrivals, first_open=None):
    """The losses of the rows of two pipelines. Each arrival is (pipeline, step), and the loss of step n is 10 n at
    pipeline 0 and 10 n + 2 at pipeline 1."""
    rows, losses, n_steps = Rows(2, SeqLengths(16), by_step=True), [], [0, 0]
    for pipeline, step in arrivals:
        n_steps[pipeline] += 1
        rows.add(pipeline, ev.StepDone(step, 1, ev.Tally(10.0 * step + 2 * pipeline, 1), 1.0))
        while row := rows.next(0.0, len(losses), min(n_steps) if first_open is None else first_open):
            losses.append(row.loss)
    return losses


@pytest.mark.parametrize("arrivals", ["01 01 01 01", "00 11 00 11", "0000 1111", "0 11 00 1 01", "10 10 01 10"])
def test_rows_by_step_are_step_means_in_whatever_order_the_steps_arrive(arrivals):
    seen = {"0": 0, "1": 0}
    steps = []
    for pipeline in arrivals.replace(" ", ""):
        steps.append((int(pipeline), seen[pipeline]))
        seen[pipeline] += 1
    assert losses_of_rows(steps) == [1.0, 11.0, 21.0, 31.0][: min(seen.values())]


def test_rows_go_on_without_a_pipeline_that_is_lost():
    """Pipeline 1 is lost after its first step; rows are of as many steps as before."""
    assert losses_of_rows([(0, 0), (1, 0), (0, 1), (0, 2), (0, 3), (0, 4)], first_open=math.inf) == [1.0, 15.0, 35.0]


def test_a_skipped_step_is_that_of_its_row():
    rows = Rows(2, SeqLengths(16), by_step=True)
    rows.on_skipped(0, 1)
    for pipeline, step in ((0, 0), (0, 1), (1, 0), (1, 1)):
        rows.add(pipeline, ev.StepDone(step, 1, ev.Tally(1.0, 1), 1.0))
    assert [rows.next(0.0, row, math.inf).verdict for row in range(2)] == ["apply", "skip"]
