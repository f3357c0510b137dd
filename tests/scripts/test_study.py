"""The comparison `study` without processes: the schedule of a trace, the run that carries it out, the results."""

import itertools
import os
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import processes
import pytest
import trial_fleets
from churn_comparison import results
from churn_comparison.setup import Setup
from comparison import PAGE
from comparisons import study

from jaxdt.cli import local_run, plots
from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.sim.availability import from_trace
from jaxdt.sim.faults import CRASH

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "configs/reproduce/traces/bamboo_aws_p3_v100.json"
STAGES = ((0, 2, 4, 6), (1, 3, 5, 7))
BEGIN_S, SPEED, SECONDS = 24060.0, 14.0, 160.0
BEGAN_S = 1000.0


def schedule(seed, **options):
    return from_trace(TRACE, STAGES, seed, SECONDS, SPEED, BEGIN_S, **options)


def sizes_after(faults):
    """Peers of each stage after each fault, if newcomers go to the smallest stage."""
    stage_of = {peer: stage for stage, peers in enumerate(STAGES) for peer in peers}
    for fault in faults:
        sizes = Counter(stage_of.values())
        if fault.kind == CRASH:
            del stage_of[fault.peer]
        else:
            stage_of[ev.TEMPORARY_IDS + fault.peer] = min((0, 1), key=lambda stage: (sizes[stage], stage))
        yield tuple(Counter(stage_of.values())[stage] for stage in (0, 1))


# ---------------------------------------------------------------------------------------------------------- schedule


def test_a_part_of_a_trace_is_the_same_for_equal_seeds_and_spares_who_is_alone():
    for seed in range(50):
        faults = schedule(seed, spare=True)
        assert all(min(sizes) >= 1 for sizes in sizes_after(faults))
        assert faults == schedule(seed, spare=True)
    assert any(0 in sizes for seed in range(50) for sizes in sizes_after(schedule(seed))), "nobody is spared unasked"
    assert schedule(1, spare=True) != schedule(2, spare=True)


def test_a_part_of_a_trace_begins_with_all_peers_and_has_its_counts():
    faults = schedule(1, spare=True)
    assert [round(fault.at_s * SPEED + BEGIN_S) for fault in faults] == [
        *[24240, 24240, 24360, 24480],
        *[24960, 25200, 25440],
        *[25860, 25860, 26100],
    ]
    assert [sum(sizes) for sizes in sizes_after(faults)] == [7, 6, 5, 4, 5, 6, 5, 6, 7, 8]
    with pytest.raises(BadInput, match="begin_s: got 1e.06, expected 0 to 40920"):
        from_trace(TRACE, STAGES, 1, 1.0, 1.0, 1e6)


# -------------------------------------------------------------------------------------------------------------- a run


class FakeMachine:
    """A clock, processes and a run that does a step a second; `kills` and `joins` with their moments."""

    def __init__(self, monkeypatch, members):
        self.now_s, self.members, self.done = BEGAN_S, members, []
        for module, name, own in (
            (local_run, "start", lambda *_: self),
            (local_run, "join", self._join),
            (local_run, "children", lambda _: {f"peer {peer}": peer for peer in range(8)}),
            (local_run, "objects", self._objects),
            (processes.counts, "idle_s", self.monotonic),
            (trial_fleets.os, "kill", lambda pid, number: self.done.append((self.now_s, "kill", pid))),
            (processes, "time", self),
            (trial_fleets, "time", self),
        ):
            monkeypatch.setattr(module, name, own)
        self.pid, self.returncode = 99, None

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds

    def poll(self):
        return None

    def wait(self):
        return 0

    def send_signal(self, number):
        self.done.append((self.now_s, "end", number))

    kill = wait

    def _join(self, run_dir, log, *flags):
        n = sum(what == "join" for _, what, _ in self.done)
        log.write_text(f"peer {8 + n}: joins for stage 0\n")
        self.done.append((self.now_s, "join", n))
        newcomer = type(
            "Newcomer", (), dict(pid=ev.TEMPORARY_IDS + n, poll=lambda _: None, kill=lambda _: 0, wait=lambda _: 0)
        )
        return newcomer()

    def _objects(self, path):
        if path.name == "metrics.jsonl":
            return [{}] * int(self.now_s - BEGAN_S)
        view = dict(members={str(peer): stage for peer, stage in self.members.items()}, joining=[])
        return [dict(kind="view", t=BEGAN_S, fields=view)]


def played(tmp_path, monkeypatch, name, seed=1, members=None):
    members = members or {peer: stage for stage, peers in enumerate(STAGES) for peer in peers} | {8: 0, 9: 1}
    with monkeypatch.context() as patch:
        machine = FakeMachine(patch, members)
        faults = schedule(seed, spare=True)
        return study.played_run(tmp_path / name, name, Setup(2, 4, 24, 0.1), faults, SECONDS), machine.done


def test_every_run_sees_the_same_events_at_the_same_times(tmp_path, monkeypatch):
    (one, done), (other, same) = (played(tmp_path, monkeypatch, name, seed=4) for name in ("fixed", "swarm"))
    assert replace(one, name="swarm") == other and done == same
    faults = schedule(4, spare=True)
    assert [at_s for at_s, *_ in one.events] == pytest.approx([fault.at_s for fault in faults], abs=1e-6)
    assert [what for _, what, _ in one.events] == ["leave" if f.kind == CRASH else "join" for f in faults]
    assert [pid for _, what, pid in done if what == "kill"] == [f.peer for f in faults if f.kind == CRASH]
    assert one.held_up_s < 0.01 and one.cores_busy == os.cpu_count() - 1
    assert done[-1][1] == "end" and done[-1][0] > BEGAN_S + SECONDS + 3


def test_who_is_alone_at_its_stage_in_the_run_itself_is_spared(tmp_path, monkeypatch):
    """The run has moved all others of stage 1 to stage 0."""
    crashed = [fault.peer for fault in schedule(1, spare=True) if fault.kind == CRASH]
    members = {peer: int(peer == crashed[0]) for peer in range(8)}
    saw, done = played(tmp_path, monkeypatch, "swarm", members=members)
    assert [who for _, what, who in saw.events if what == "spared"] == [f"peer {crashed[0]}"]
    assert crashed[0] not in [pid for _, what, pid in done if what == "kill"]


# ------------------------------------------------------------------------------------------------------------ results


def records(step_s, losses, views=()):
    """A coordinator's trace: a step after each of step_s seconds, and (time, members, joining) views."""
    ends = list(itertools.accumulate(step_s, initial=BEGAN_S))[1:]
    steps = [
        dict(kind="step", t=end_s, fields=dict(step=n, loss=loss, step_s=own))
        for n, (end_s, own, loss) in enumerate(zip(ends, step_s, losses, strict=True))
    ]
    first = (0.0, {"0": 0, "2": 0, "4": 0, "1": 1}, [])
    seen = [
        dict(kind="view", t=BEGAN_S + at_s, fields=dict(members=members, joining=joining))
        for at_s, members, joining in (first, *views)
    ]
    return sorted([*steps, *seen, dict(kind="heartbeat", t=BEGAN_S, fields={})], key=lambda record: record["t"])


def run(name="fixed", step_s=(2.0,) * 10, losses=None, events=((3.0, "leave", "peer 1"),), views=()):
    saw = dict(name=name, began_s=BEGAN_S + 4.0, seconds=10.0, events=events, n_samples=24)
    saw |= dict(held_up_s=0.0, cores_busy=1.0)
    return results.run_of(saw, records(step_s, losses or [1.0] * len(step_s), views))


def test_throughput_is_of_committed_steps_and_of_parts_of_those_under_way():
    found = run()
    assert found.rate(0.0, 10.0) == pytest.approx(12.0) == pytest.approx(found.rate(0.5, 1.0))
    assert found.rates == [(0.0, pytest.approx(12.0)), (5.0, pytest.approx(12.0))]
    slower = run(step_s=(2.0, 2.0, 5.0, 10.0))
    assert slower.rates == [(0.0, pytest.approx(24 / 5)), (5.0, pytest.approx(2.4))]
    assert results.figures_of(slower)["steps"] == 1


def test_uneven_stages_are_told_from_even_ones():
    """Three and one from the beginning; a newcomer counts when it has the state, a step later."""
    members = {"0": 0, "2": 0, "4": 0, "1": 1, "8": 1}
    found = run(views=[(4.5, members, [8])])
    assert found.peers == ((0.0, (3, 1)), (0.5, (3, 1)), (2.0, (3, 2)))
    figures = results.figures_of(found)
    assert figures["uneven_s"] == 2.0 and figures["samples_per_s_uneven"] == pytest.approx(12.0)
    assert (figures["leaves"], figures["joins"], figures["spared"], figures["moves"]) == (1, 0, 0, 0)


def test_losses_that_differ_and_events_that_differ_are_bad(tmp_path):
    compare = results.compare
    one, longer = run(), run("swarm", step_s=(1.0,) * 20)
    good = compare([one, longer])
    assert good["bad"] == [] and good["loss_difference"] == 0.0 and good["steps_compared"] == 10
    assert good["runs"]["swarm"]["samples_per_s"] == 24.0
    off = run("swarm", losses=[1.0] * 9 + [1.0001])
    assert compare([one, off])["bad"] == ["losses differ by 1.0e-04"]
    other = run("swarm", events=((3.0, "spared", "peer 1"),))
    assert compare([one, other])["bad"] == ["swarm: other events than fixed"]
    late = run("swarm", events=((5.0, "leave", "peer 1"),))
    assert compare([one, late])["bad"] == ["an event came 2.0 s later in one run than in another"]
    plots.churn_comparison(tmp_path / "study.png", [one, longer])
    assert (tmp_path / "study.png").stat().st_size < 60_000


def test_the_page_of_ten_seeds_comes_from_its_raw_data(tmp_path, monkeypatch):
    """A run that is a quarter faster with all seeds; with one seed a run saw another event."""
    monkeypatch.setattr(study, "WIRINGS", dict.fromkeys(("fixed", "swarm")))
    by_seed = {
        seed: [run(step_s=(2.0 + seed / 100,) * 10), run("swarm", (1.6 + seed / 125,) * 10)] for seed in range(10)
    }
    by_seed[3][1] = run("swarm", (1.6 + 3 / 125,) * 10, events=((3.0, "spared", "peer 1"),))
    for seed, runs in by_seed.items():
        assert not study.COMPARISON.write(tmp_path, tmp_path)
        for own in runs:
            study.COMPARISON.add(tmp_path, "Two cores.", {"seed": seed, "run": asdict(own)})
    lines = study.COMPARISON.read(tmp_path)[1]
    assert study.by_seed(lines) == by_seed
    assert study.result(lines)["bad"] == ["seed 3: swarm: other events than fixed"]
    assert study.COMPARISON.write(tmp_path, tmp_path) and (tmp_path / "study.png").exists()
    text = (tmp_path / PAGE).read_text()
    assert "`swarm` over `fixed`: 1.250 (95 % interval 1.250 to 1.250), more; ahead with 10 of 10 seeds." in text
    assert "seed 3: swarm: other events than fixed" in text and "Two cores. **Compute is emulated" in text
    assert all(f"| {name} | " in text for name in ("fixed", "swarm"))


def test_who_is_alone_is_read_off_the_last_view():
    """Not counted: who was killed, and who has not got the state yet."""
    is_alone = results.is_alone
    trace = records((2.0,) * 3, (1.0,) * 3)
    assert is_alone(trace, 1, set()) and not is_alone(trace, 0, set()) and not is_alone(trace, 7, set())
    assert is_alone(trace, 0, {2, 4})
    members = {"0": 0, "2": 0, "1": 1, "8": 1}
    assert is_alone(records((2.0,) * 3, (1.0,) * 3, [(7.0, members, [8])]), 1, set())
    assert not is_alone(records((2.0,) * 3, (1.0,) * 3, [(5.0, members, [8])]), 1, set())
