"""Faults of the simulator: the events that they cause, and how they are drawn."""

import json

import pytest

from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Link
from jaxdt.run.work import Work
from jaxdt.sim.availability import from_trace
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.faults import (
    CLOG,
    CONTROL,
    CRASH,
    CRASH_SEEN_S,
    CUT,
    DATA,
    DEAD_LINK_S,
    DRAWERS,
    DUPLICATE,
    JOIN,
    PAUSE,
    POWER_OFF,
    REORDER,
    RESTART,
    SLOW,
    Fault,
    draw,
    spares_every_stage,
)
from jaxdt.sim.sim_peer import Environment, ProcessFactory, SimPeer
from jaxdt.sim.tensors import NoTensors

LATENCY_S = 0.25
ONE_SECOND_BYTES = 125_000_000  # at 1 Gbit/s


class Talker:
    """Does the actions of its script at their times, and writes down the events that it hears."""

    def __init__(self, script=()):
        self.script, self.heard = dict(script), []

    def handle(self, now_s, event):
        if isinstance(event, ev.Started):
            return [ev.WakeAt(at_s, str(at_s)) for at_s in self.script]
        if isinstance(event, ev.Woke):
            return self.script[float(event.tag)]
        if isinstance(event, ev.Received | ev.LinkChanged | ev.Ran):
            self.heard.append((now_s, event.body if isinstance(event, ev.Received) else event))
        return []


def heartbeat(number, dst=1):
    return ev.Send(dst, ev.Heartbeat(number, {}), header=ev.Header("r", 0, 0, 0))


def activation(number, n_bytes=0, dst=1):
    return ev.Send(dst, ev.Boundary(ev.Key("act", 0, 1, number)), n_bytes, header=ev.Header("r", 0, 0, 0))


def play(faults, script, until_s=100.0):
    """The events that peer 0, which does the script, and peer 1 hear."""
    talkers = {0: Talker(script), 1: Talker(), ev.COORDINATOR: Talker()}
    simulate(talkers, faults, until_s)
    return talkers[0].heard, talkers[1].heard


def simulate(talkers, faults, until_s=100.0):
    seconds = {kind: 1.0 for kind in "FBEGU"}
    peers = {peer: SimPeer(talkers[peer], NoTensors(1), f"h{peer}", seconds) for peer in (0, 1)}
    environment = Environment(lambda src, dst: Link(LATENCY_S, 1.0), cores={"h0": 1, "h1": 1})
    processes = ProcessFactory(lambda peer, stage: SimPeer(Talker(), NoTensors(1), f"h{peer}", seconds))
    simulation = Simulation(talkers[ev.COORDINATOR], peers, environment, faults, processes=processes)
    try:
        simulation.run(until_s)
    except RuntimeError as error:
        assert "nothing left to happen" in str(error)


def numbers(heard):
    """(when, number) of the messages."""
    bodies = [(now_s, body) for now_s, body in heard if isinstance(body, ev.Heartbeat | ev.Boundary)]
    return [(now_s, body.count if isinstance(body, ev.Heartbeat) else body.key.microbatch) for now_s, body in bodies]


STEADY = {float(at): [heartbeat(at), activation(at)] for at in range(10)}


# ------------------------------------------------------------------------------------------------------ single faults


def test_a_cut_makes_messages_late_and_leaves_them_in_order():
    _, heard = play([Fault(2.5, CUT, 0, 4.0, others=(1,))], STEADY)
    late = lambda at: 6.5 if 2.5 <= at + LATENCY_S < 6.5 else at + LATENCY_S  # noqa: E731
    for kind in (ev.Heartbeat, ev.Boundary):
        assert numbers([item for item in heard if isinstance(item[1], kind)]) == [(late(at), at) for at in range(10)]
    assert not [event for _, event in heard if isinstance(event, ev.LinkChanged)], "shorter than breaks_s"


def test_both_ends_see_a_long_cut_break_and_heal():
    silent, heard = play([Fault(1.0, CUT, 0, 5.0, others=(1,), breaks_s=2.0)], {})
    assert heard == [(3.0, ev.LinkChanged(0, False, CUT)), (6.0, ev.LinkChanged(0, True))]
    assert silent == [(3.0, ev.LinkChanged(1, False, CUT)), (6.0, ev.LinkChanged(1, True))]


def test_a_peer_that_dials_over_a_link_that_is_seen_to_be_cut_learns_of_it_unless_it_heals_meanwhile():
    """Otherwise it would believe for ever that a link is down which has healed."""
    cut = Fault(1.0, CUT, 0, 1.5, others=(1,), breaks_s=0.25)
    dials, _ = play([cut], {at: [ev.Connect(1, "")] for at in (1.125, 2.0, 2.4375)})
    down = [now_s for now_s, event in dials if event == ev.LinkChanged(1, False, CUT)]
    assert down == [1.25, 2.0 + CRASH_SEEN_S] and dials[-1] == (2.5, ev.LinkChanged(1, True))


def test_overlapping_cuts_last_until_the_last_is_healed():
    faults = [Fault(0.5, CUT, 0, 2.0, others=(1,)), Fault(1.0, CUT, 1, 4.0, others=(0,))]
    assert numbers(play(faults, {1.0: [heartbeat(7)]})[1]) == [(5.0, 7)]


def test_a_link_is_not_up_again_before_the_last_cut_that_both_ends_see_is_healed():
    faults = [
        Fault(1.0, CUT, 0, 5.0, others=(1,), breaks_s=0.5),
        Fault(2.0, CUT, 1, 2.0, others=(0,), breaks_s=0.5),
        Fault(5.5, CUT, 0, 1.0, others=(1,), breaks_s=2.0),  # which nobody sees
    ]
    _, heard = play(faults, {})
    assert [now_s for now_s, event in heard if event == ev.LinkChanged(0, True)] == [6.0]


def test_who_is_hung_up_on_dials_again_unless_it_hangs_up_too():
    """Else the two would hang up on each other for ever."""
    _, heard = play([Fault(50.0, PAUSE, 0)], {1.0: [ev.Disconnect(1)]})
    assert [event.up for _, event in heard] == [False, True]

    class HangsUp(Talker):
        def handle(self, now_s, event):
            actions = super().handle(now_s, event)
            return [*actions, ev.Disconnect(0)] if isinstance(event, ev.LinkChanged) else actions

    talkers = {0: Talker({1.0: [ev.Disconnect(1)]}), 1: HangsUp(), ev.COORDINATOR: Talker()}
    simulate(talkers, [Fault(50.0, PAUSE, 0)])
    assert [event.up for _, event in talkers[1].heard] == [False] and talkers[0].heard == []


@pytest.mark.parametrize(
    ("channel", "late"), [("", {ev.Heartbeat, ev.Boundary}), (CONTROL, {ev.Heartbeat}), (DATA, {ev.Boundary})]
)
def test_one_channel_may_stand_still_one_way(channel, late):
    script = {1.0: [heartbeat(0), activation(0)]}
    _, heard = play([Fault(0.5, CLOG, 0, 3.0, others=(1,), factor=0.0, channel=channel)], script)
    assert {type(body) for now_s, body in heard if now_s == 3.5} == late
    _, heard = play([Fault(0.5, CLOG, 1, 3.0, others=(0,), factor=0.0, channel=channel)], script)
    assert {now_s for now_s, _ in heard} == {1.25}


def test_a_clogged_link_has_less_bandwidth_while_it_is_clogged():
    script = {at: [activation(0, ONE_SECOND_BYTES)] for at in (1.0, 20.0)}
    _, heard = play([Fault(0.5, CLOG, 0, 3.0, others=(1,), factor=0.25)], script)
    assert [now_s for now_s, _ in heard] == pytest.approx([1.0 + 4.0 + LATENCY_S, 20.0 + 1.0 + LATENCY_S])


def test_work_that_begins_on_a_slow_device_takes_longer():
    script = {at: [ev.Run(Work(0, "F", 0, 0, 0))] for at in (0.0, 3.0, 20.0)}
    heard, _ = play([Fault(2.0, SLOW, 0, 4.0, factor=5.0), Fault(2.5, SLOW, 0, 1.0, factor=2.0)], script)
    assert [event.seconds for _, event in heard] == pytest.approx([1.0, 10.0, 1.0])


def test_messages_of_a_crashed_process_arrive_and_those_of_a_machine_that_lost_power_do_not():
    script = {1.0: [heartbeat(1)], 2.0: [heartbeat(2)]}
    crash, power_off = (play([Fault(1.125, kind, 0)], script)[1] for kind in (CRASH, POWER_OFF))
    assert crash == [
        (1.125 + CRASH_SEEN_S, ev.LinkChanged(0, False, "crashed", gone=True)),
        (1.25, ev.Heartbeat(1, {})),
    ]
    assert power_off == [(1.125 + DEAD_LINK_S, ev.LinkChanged(0, False, "crashed"))]


class Host(Talker):
    """A coordinator that lets every process begin again that asks."""

    def handle(self, now_s, event):
        if isinstance(event, ev.Received) and isinstance(event.body, ev.Join):
            return [
                ev.Send(event.header.src, ev.Welcome("r", event.body.peer, 0, "", {}), header=ev.Header("r", 0, 0, 0))
            ]
        return super().handle(now_s, event)


def test_the_end_of_a_process_is_not_seen_once_its_successor_runs():
    """A machine that lost power answers again before anyone has missed it."""
    peer, host = Talker(), Host()
    faults = [Fault(1.0, POWER_OFF, 0), Fault(2.0, RESTART, 0)]
    simulate({0: Talker(), 1: peer, ev.COORDINATOR: host}, faults)
    assert peer.heard == [] and host.heard == [(2.0, ev.LinkChanged(0, True, "started again"))]


def test_messages_that_a_cut_holds_are_lost_when_their_sender_crashes():
    faults = [Fault(0.5, CUT, 0, 5.0, others=(1,)), Fault(3.0, CRASH, 0)]
    assert numbers(play(faults, {1.0: [heartbeat(1)]})[1]) == []


def test_a_peer_that_wakes_up_hears_messages_before_timers():
    class Order(Talker):
        def handle(self, now_s, event):
            self.heard.append(event)
            return super().handle(now_s, event)

    talkers = {0: Order({1.0: []}), 1: Talker({1.5: [heartbeat(1, 0)]}), ev.COORDINATOR: Talker()}
    peers = {peer: SimPeer(talkers[peer], NoTensors(1), "h", {}) for peer in (0, 1)}
    environment = Environment(lambda src, dst: Link(), cores={"h": 2})
    with pytest.raises(RuntimeError, match="nothing left"):
        Simulation(talkers[ev.COORDINATOR], peers, environment, [Fault(0.5, PAUSE, 0, 3.0)]).run()
    kinds = [type(event) for event in talkers[0].heard if not isinstance(event, tuple)]
    assert kinds.index(ev.Received) < kinds.index(ev.Woke)


@pytest.mark.parametrize("kind", [DUPLICATE, REORDER])
def test_only_harmless_messages_come_twice_or_out_of_order(kind):
    script = {
        0.1 * at: [heartbeat(at), activation(at), ev.Send(1, ev.Inventory(at, (), ()), header=ev.Header("r", 0, 0, 0))]
        for at in range(50)
    }
    _, heard = play([Fault(0.0, kind, 0, 60.0, others=(1,))], script)
    beats = [body.count for _, body in heard if isinstance(body, ev.Heartbeat)]
    assert set(beats) == set(range(50)) and beats != sorted(set(beats))
    assert (len(beats) > 50) == (kind == DUPLICATE)
    assert [body.key.microbatch for _, body in heard if isinstance(body, ev.Boundary)] == list(range(50))
    assert [body.step for _, body in heard if isinstance(body, ev.Inventory)] == list(range(50))


def test_a_fault_that_the_simulator_cannot_do_is_refused():
    with pytest.raises(ValueError, match="cannot do 1.000 s: melt p0"):
        play([Fault(1.0, "melt", 0)], STEADY)


# ------------------------------------------------------------------------------------------------------ random faults

STAGES = ((0, 1, 2), (3, 4))


def test_an_equal_seed_draws_equal_faults_of_all_kinds():
    drawn = [draw(seed, STAGES, 6, 10.0, 5.0) for seed in range(100)]
    assert drawn == [draw(seed, STAGES, 6, 10.0, 5.0) for seed in range(100)]
    assert {fault.kind for faults in drawn for fault in faults} == set(DRAWERS)
    lines = [str(fault) for faults in drawn for fault in faults]
    assert all("\n" not in line for line in lines) and len(set(lines)) == len(lines)
    assert {fault.kind for fault in draw(1, STAGES, 9, 10.0, 5.0, (SLOW, CLOG))} == {SLOW, CLOG}


def test_drawn_faults_leave_each_stage_a_peer_and_begin_in_time():
    for seed in range(300):
        faults = draw(seed, STAGES, 8, 10.0, 5.0)
        assert spares_every_stage(faults, STAGES)
        assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
        assert all(0.0 <= fault.at_s < 10.0 and fault.seconds <= 5.0 for fault in faults)


# -------------------------------------------------------------------------------------------------------------- traces


def written(tmp_path, **data):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data))
    return path


def test_a_trace_of_node_counts_gives_crashes_and_joins(tmp_path):
    """The run begins at the largest count, which stands for all five peers."""
    path = written(tmp_path, t_s=[0, 100, 200, 300, 900], nodes=[3, 10, 6, 8, 0])
    faults = from_trace(path, STAGES, seed=1, until_s=20.0, speed=10.0)
    assert [(fault.at_s, fault.kind) for fault in faults] == [(10.0, CRASH), (10.0, CRASH)]
    whole = from_trace(path, STAGES, seed=1, until_s=1e9)
    assert [fault.kind for fault in whole] == [CRASH] * 2 + [JOIN] + [CRASH] * 4
    assert whole[2].others == (whole[0].peer,), "the machine that has been away for longest comes back first"
    assert {fault.peer for fault in whole[3:]} == {*range(5), ev.TEMPORARY_IDS} - {fault.peer for fault in whole[:2]}
    assert whole == from_trace(path, STAGES, seed=1, until_s=1e9) != from_trace(path, STAGES, seed=2, until_s=1e9)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (dict(t_s=[0]), "expected t_s and nodes, two lists of one length"),
        (dict(t_s=[0, 5, 5], nodes=[1, 2, 3]), "t_s: expected numbers that grow"),
        (dict(t_s=[0, 5], nodes=[1, -2]), "nodes: expected integers >= 0"),
        (dict(t_s=[0, 5], nodes=[0, 0]), "nodes: expected integers >= 0"),
    ],
)
def test_a_bad_trace_is_refused(tmp_path, data, line):
    with pytest.raises(BadInput, match=line):
        from_trace(written(tmp_path, **data), STAGES, 0, 1.0)
    with pytest.raises(BadInput, match="cannot be read"):
        from_trace(tmp_path / "none.json", STAGES, 0, 1.0)
