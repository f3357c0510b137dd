"""A simulated run and the compute thread of a real one pause before the same Work."""

import queue
from dataclasses import replace
from unittest import mock

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import StepReport
from jaxdt.run.config import default_plan, parse
from jaxdt.run.network import Link
from jaxdt.runtime.process import compute
from jaxdt.sim.predict import Conditions, predict_step_s, simulate
from jaxdt.sim.stragglers.stalls import PeerStalls, Stalls

SECONDS = dict(F=1.0, B=2.0, E=1.0, G=0.0, U=0.0)
STALL_S = 7.0


def config_of(steps):
    return parse(
        {
            "model": dict(preset="debug", n_layers=2, d_model=8, n_heads=2, max_len=4, vocab_size=16),
            "plan": dict(stages=2, pipelines=2, microbatches=4),
            "train": dict(steps=steps),
            "net": dict(heartbeat_s=1000.0, deadline_floor_s=10000.0),
        }
    )


def conditions(stalls):
    hosts = {peer: f"h{peer}" for peer in range(4)}
    seconds = dict.fromkeys(range(4), SECONDS)
    return Conditions(seconds, lambda src, dst: Link(), hosts, dict.fromkeys(hosts.values(), 1), stalls=stalls)


class WorkOf(dict):
    """A Recorder: peer -> [(Work, seconds)]."""

    def run(self, peer, start_s, seconds, work):
        self.setdefault(peer, []).append((work, seconds))

    def send(self, *_):
        pass

    recv = report = send


class FakeLoop:
    """The side of a loop that the compute thread sees; its tensors do nothing."""

    def __init__(self, works):
        self.work = queue.SimpleQueue()
        for work in works:
            self.work.put(ev.Run(work))
        self.work.put(None)
        self.posted = []
        self.post = self.posted.append
        self.tensors = mock.Mock(**{"run.return_value": {}})


@pytest.mark.parametrize("draws", ["step", "work"])
def test_both_pause_before_the_same_work(draws):
    stalls = Stalls(0.3, STALL_S, 5, draws)
    config, simulated = config_of(12), WorkOf()
    simulate(config, default_plan(config), conditions(stalls), simulated)
    for peer, works in simulated.items():
        stalled = [seconds == pytest.approx(SECONDS[work.kind] + STALL_S) for work, seconds in works]
        loop = FakeLoop([work for work, _ in works])
        with mock.patch("jaxdt.runtime.process.time.sleep") as sleep:
            compute(loop, lambda: "ready", stalls=PeerStalls(stalls, peer))
        assert [type(event) for event in loop.posted[1:]] == [ev.Ran] * len(works)
        assert [call.args[0] == STALL_S for call in sleep.call_args_list] == stalled
        assert 0 < sum(stalled) < len(works)


def test_a_prediction_counts_them():
    config = config_of(4)
    plan = default_plan(config)
    with_stalls = predict_step_s(config, plan, conditions(Stalls(1.0, STALL_S)))
    assert with_stalls > predict_step_s(config, plan, conditions(None)) + STALL_S


def test_a_stalled_peer_needs_no_core():
    """Two pipelines of one stage share one core: the other one has all of it during a stall of 7 s."""
    config = replace(config_of(1), plan=replace(config_of(1).plan, stages=1, microbatches=2))
    shared = replace(conditions(None), host_of=dict.fromkeys(range(4), "all"), cores={"all": 1})
    plan = default_plan(config)
    stalls = next(s for n in range(99) if bool((s := Stalls(0.5, STALL_S, n)).draw_s(0, 0)) != bool(s.draw_s(1, 0)))
    [report] = simulate(config, plan, replace(shared, stalls=stalls)).of(StepReport)
    assert report.step_s == pytest.approx(STALL_S + SECONDS["F"] + SECONDS["B"])
