"""Trials as data: each makes sense; streams and expectations do what they say."""

import itertools
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import processes
import pytest
from processes import (
    PAUSE_S,
    AtShare,
    Played,
    Trial,
    at,
    does_not_grow,
    every,
    goes_on,
    in_turn,
    is_replayed,
    often,
)
from trial_fleets import Fleet, HostFleet, Life, Lines, Process, Scripts

from jaxdt.cli import local_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", processes.NAMES)
def test_a_trial_has_a_config_and_ends(name):
    trial = processes.trial_of(name)
    assert (ROOT / trial.config).is_file() and (trial.disturbances or trial.kinds) and trial.expected
    needs_steps = any(isinstance(one, AtShare) for one in trial.disturbances)
    assert not needs_steps or trial.steps


def test_a_trial_gives_its_config_where_the_command_line_names_none():
    argv = processes.with_config(["trial.py", "churn", "--seed=3"])
    assert argv == ["trial.py", f"--config={ROOT}/configs/swarm.py", "--config.codec=none", "churn", "--seed=3"]
    own = ["trial.py", "churn", "--config=mine.py"]
    assert processes.with_config(own) == own


class FakeFleet:
    """A clock that jumps to each moment for which something waits; `done`: (when, what happened)."""

    def __init__(self, **of_trial):
        self.rng, self.now_s, self.done, self.rows_s = random.Random(0), 0.0, [], []
        self.trial = Trial("configs/sdpipe.py", expected=(), **of_trial)
        self.played = Played(self.trial, Path())
        self.scripts = Scripts(self.has_come)

    def has_come(self, at_s):
        return self.now_s >= at_s

    def has_recovered(self):
        return not self.scripts

    def happens(self, what):
        """A disturbance that is over after a second."""

        def script(fleet):
            self.done.append((self.now_s, what))
            self.played.events.append((self.now_s, what, ""))
            yield self.now_s + 1.0

        return script

    def play(self, stream, until_s):
        streams = Scripts(self.has_come)
        streams.go(stream(self))
        while self.now_s < until_s:
            self.now_s = min(streams.next_s, self.scripts.next_s, self.now_s + 1.0)
            streams.run()
            self.scripts.run()
        return self.done


def test_streams_say_when_what_happens():
    fleet = FakeFleet()
    assert fleet.play(at(4.0, fleet.happens("a"), fleet.happens("b")), 9.0) == [(4.0, "a"), (4.0, "b")]
    fleet = FakeFleet()
    ((drawn_s, _),) = fleet.play(at((2.0, 3.0), fleet.happens("a")), 9.0)
    assert 2.0 <= drawn_s <= 3.0
    fleet = FakeFleet()
    assert [s for s, _ in fleet.play(every(20.0, fleet.happens("a")), 61.0)] == [20.0, 40.0, 60.0]
    fleet = FakeFleet()
    drawn = fleet.play(often(3.0, fleet.happens("a"), fleet.happens("b")), 1200.0)
    assert {what for _, what in drawn} == {"a", "b"}
    assert len(drawn) / 400 == pytest.approx(1.0, rel=0.2) and [s for s, _ in drawn] == sorted(s for s, _ in drawn)


def test_a_share_of_the_steps_is_waited_for():
    fleet = FakeFleet(steps=10)
    assert fleet.play(AtShare(0.5, fleet.happens("a")), 5.0) == []
    fleet.rows_s = [0.0] * 5
    assert [what for _, what in fleet.play(AtShare(0.5, fleet.happens("a")), 6.0)] == ["a"]


def test_each_kind_comes_once_before_any_comes_again_and_one_that_does_not_fit_is_tried_again():
    never = []

    def late(fleet):
        never.append(fleet.now_s)
        return (yield from fleet.happens("late")(fleet) if len(never) > 3 else ())

    fleet = FakeFleet(kinds={"late": late})
    kinds = fleet.trial.kinds | {what: fleet.happens(what) for what in ("a", "b", "c")}
    fleet.trial = replace(fleet.trial, kinds=kinds)
    done = fleet.play(in_turn, 100.0)
    assert sorted(what for _, what in done[:4]) == ["a", "b", "c", "late"] and len(done) > 8
    assert fleet.played.figures["failures"] == Counter(what for _, what in done)
    assert all(b - a >= PAUSE_S[0] for (a, _), (b, _) in itertools.pairwise(done))


def played(tmp_path, rows_s, **known):
    trial = Trial("configs/sdpipe.py", expected=())
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


# ------------------------------------------------------------------------------------------------ without a common disk


def test_whole_lines_of_a_growing_file_are_read_once(tmp_path):
    lines = Lines(tmp_path / "log")
    assert lines.new() == []
    (tmp_path / "log").write_text("one\ntw")
    assert lines.new() == ["one"] and lines.new() == []
    (tmp_path / "log").write_text("one\ntwo\n")
    assert lines.new() == ["two"]


class Hosts(HostFleet):
    """No launch.py: the processes of hosts are single lines of Python."""

    def __init__(self, tmp_path):
        trial = Trial("configs/sdpipe.py", expected=(), n_hosts=1)
        (tmp_path / "0" / "logs").mkdir(parents=True)
        self.logs, self.played = tmp_path / "0" / "logs", Played(trial, tmp_path / "0")
        self.trial, self.rows_s, self.scripts = trial, [], Scripts(lambda at_s: False)

    def process(self, code):
        popen = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
        popen.wait()
        (self.logs / f"{code}.log").write_text("its last line\n")
        return Process(self.logs / f"{code}.log", popen, Life(0))


@pytest.mark.parametrize(("code", "problems"), [(2, []), (3, ["3.log: code 3, expected [2]: its last line"])])
def test_the_exit_code_of_a_process_that_had_to_end_is_looked_at(tmp_path, code, problems):
    fleet = Hosts(tmp_path)
    fleet.scripts.go(fleet.ends(fleet.process(code), {2}))
    fleet.scripts.run()
    assert fleet.played.problems == problems and not fleet.scripts


def test_a_process_that_ends_by_itself_is_a_problem_once(tmp_path):
    fleet = Hosts(tmp_path)
    process = fleet.process(1)
    for _ in range(2):
        if process.is_watched:
            fleet._watch(process)
    assert fleet.played.problems == ["1.log: ended with code 1: its last line"]
    assert process.life.ended_s < float("inf")
    trial = replace(fleet.trial, expected=())
    fleet.played.events.append((0.0, "leave", "host_0"))
    assert processes.judged(trial, fleet.played)[1] == fleet.played.problems


def test_a_newcomer_is_known_by_its_own_line_and_a_worker_is_no_peer(tmp_path, monkeypatch):
    """A worker's log names peers, too: its servers."""
    fleet = Fleet(Played(Trial("configs/pool.py", expected=()), tmp_path / "0"), random.Random(0))
    logs = {
        "newcomer 0": "1 core\npeer 7: joins for stage 1\n",
        "newcomer 1": "worker 8: hands in to peer 1, stage 1\n",
    }
    monkeypatch.setattr(fleet, "_log", lambda name: tmp_path / name)
    for name, text in logs.items():
        (tmp_path / name).write_text(text)
    assert [fleet._peer_of(name) for name in (*logs, "peer 3", "coordinator")] == [7, None, 3, None]


def test_a_run_without_steps_is_over_and_a_problem_once_it_stands_still(tmp_path):
    fleet = Hosts(tmp_path)
    fleet.begin()
    fleet.rows_s = [0.0]
    fleet.check()
    assert fleet.played.problems == [] and not fleet.has_ended()
    fleet.played.began_s -= 151.0
    fleet.check()
    assert fleet.played.problems == [f"no step for 150 s; see {fleet.logs}"] and fleet.has_ended()
