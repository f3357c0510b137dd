"""Rows of the metrics where replicas may differ: each is JSON, and has a time only where that is known."""

import json
import math

from jaxdt.protocol.events import StepDone, Tally
from jaxdt.spec.seq_lengths import SeqLengths
from jaxdt.sync.scheduling.rows import Rows


def rows_at(begun_s, *heard_s):
    """The rows of a run of one pipeline, of whose steps the coordinator hears at these moments."""
    rows = Rows(1, SeqLengths(16))
    rows.begin(begun_s)
    return [rows.add(now_s, row, StepDone(row, 4, Tally(8.0, 4), 1.0)) for row, now_s in enumerate(heard_s)]


def test_rows_that_arrive_in_a_burst_after_a_pause_of_the_coordinator_have_no_time(monkeypatch):
    """The peers went on meanwhile, at 2 s a step; the coordinator hears of their steps within milliseconds."""
    begin = Rows.begin
    monkeypatch.setattr(Rows, "begin", lambda rows, now_s: (begin(rows, now_s), rows.paused(33.0)))
    *burst, later, last = rows_at(0.0, 30.001, 30.002, 30.003, 32.0, 34.0, 36.0)
    assert all(math.isnan(row.step_s) and math.isnan(row.tokens_per_s) for row in burst)
    assert (later.step_s, later.tokens_per_s, last.step_s) == (2.0, 32.0, 2.0)


def test_rows_of_steps_that_were_done_while_there_was_no_coordinator_have_no_time():
    first, *held_back, later, last = rows_at(math.nan, 7.0, 7.0, 7.0, 7.5, 9.5)
    for row in (first, *held_back):
        assert math.isnan(row.step_s) and math.isnan(row.tokens_per_s)
        assert "Infinity" not in json.dumps(row.fields)
    assert (later.step_s, later.tokens_per_s, last.step_s, last.tokens_per_s) == (0.5, 128.0, 2.0, 32.0)
