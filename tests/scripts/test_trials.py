"""Trials as data: each makes sense; streams and expectations do what they say."""

import itertools
import random
from pathlib import Path

import processes
import pytest
from processes import AtShare, Join, Kill, Pause, Played, Trial, at, does_not_grow, every, goes_on, is_replayed, often

from jaxdt.cli import local_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", processes.NAMES)
def test_a_trial_has_a_config_and_ends(name):
    trial = processes.trial_of(name)
    assert (ROOT / trial.config).is_file() and trial.disturbances and trial.expected
    needs_steps = any(isinstance(one, AtShare) for one in trial.disturbances)
    assert not needs_steps or trial.steps


def test_a_trial_gives_its_config_where_the_command_line_names_none():
    argv = processes.with_config(["trial.py", "churn", "--seed=3"])
    assert argv == ["trial.py", f"--config={ROOT}/configs/swarm.py", "--config.codec=none", "churn", "--seed=3"]
    own = ["trial.py", "churn", "--config=mine.py"]
    assert processes.with_config(own) == own


def test_streams_say_when_what_happens():
    kill, pause = Kill("peer"), Pause("peer", 2.0)
    rng = random.Random(0)
    assert list(at(4.0, kill, Join())(rng)) == [(4.0, (kill, Join()))]
    ((drawn_s, _),) = at((2.0, 3.0), kill)(rng)
    assert 2.0 <= drawn_s <= 3.0
    assert [s for s, _ in itertools.islice(every(20.0, kill)(rng), 3)] == [20.0, 40.0, 60.0]
    drawn = list(itertools.islice(often(3.0, kill, pause)(rng), 400))
    assert {whats for _, whats in drawn} == {(kill,), (pause,)}
    assert drawn[-1][0] / 400 == pytest.approx(3.0, rel=0.2) and [s for s, _ in drawn] == sorted(s for s, _ in drawn)


def played(tmp_path, rows_s, **known):
    trial = Trial("configs/sdpipe.py", disturbances=(), expected=())
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "metrics.jsonl").write_text("".join('{"step_s": 0.5, "loss": 1.0}\n' for _ in rows_s))
    return Played(trial, tmp_path / "0", rows_s=rows_s, **known)


def test_a_gap_counts_after_the_loss_alone(tmp_path):
    run = played(tmp_path, [1.0, 9.0, 12.0, 12.5, 14.0], events=[(11.0, "leave", "peer 2")])
    assert goes_on(3.0, 3)(run) == "" and run.figures["gap_s"] == 1.5
    assert goes_on(1.0, 2)(run) == "no row for 1.50 s, expected at most 1.00"


def test_an_unwatched_process_and_a_run_that_failed_or_was_not_disturbed_are_no_success(tmp_path):
    run = played(tmp_path, [1.0])
    assert does_not_grow(0.05, 20.0)(run) == "no process was watched"
    judged = processes.judged
    assert judged(run.trial, run)[1] == ["nothing was disturbed: the run was over before"]
    run.code = 7
    assert "ended with code 7" in judged(run.trial, run)[1][0]


def test_a_log_that_cannot_be_replayed_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(local_run, "SCRIPTS", tmp_path)  # without a replay.py: its exit code is not 0
    assert is_replayed(played(tmp_path, [1.0])).startswith("replay.py: ")
