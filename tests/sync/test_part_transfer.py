"""Machines that copy a part of a checkpoint, over a wire of the test."""

import math

import pytest

from jaxdt.protocol import events as ev
from jaxdt.sync.part_transfer import PartTransfer

SLICE_BYTES = 400
PART = ev.Part(8, 1, "abc", 450, ("d1", "d2"))  # five slices
OTHER = ev.Part(8, 0, "def", 90, ("d0",))
MEMBERS = tuple(ev.Member(peer, int(peer > 0), 1, disk=f"d{peer}") for peer in range(4))
VIEW = ev.View(1, 1, 0, MEMBERS, (1, 1), 9)
BACK = ev.View(2, 1, 1, MEMBERS, (2, 2), 8, rolled_back=True, parts=(OTHER, PART), n_reseeds=1)


class Wire:
    """Four peers and what is on their disks. Messages travel when `run` is called."""

    def __init__(self, view=VIEW, bytes_per_s=math.inf):
        self.machines = {
            member.peer: PartTransfer(member.peer, member.stage, SLICE_BYTES, bytes_per_s, 0) for member in MEMBERS
        }
        self.disks = {0: {"def": 90}, 1: {"abc": 450}, 2: {"abc": 450}, 3: {}}
        self.slices = {}
        self.log, self.queue, self.now_s = [], [], 0.0
        for peer in self.machines:
            self.handle(peer, ev.ViewChanged(view))

    def handle(self, peer, event):
        for action in self.machines[peer].handle(self.now_s, event):
            self.log.append((peer, action))
            if isinstance(action, ev.Send) and action.dst != ev.COORDINATOR:
                self.queue.append((action.dst, ev.Received(ev.Header("r", 0, 1, peer), action.body)))
            elif isinstance(action, ev.FindPart):
                n_words = self.disks[peer].get(action.digest, 0)
                self.queue.append((peer, ev.FoundPart(action.digest, n_words, self.slices.get(peer, ()))))
            elif isinstance(action, ev.KeepPart):
                self.disks[peer][action.part.digest] = action.part.n_words
                self.queue.append((peer, ev.KeptPart(action.part.digest)))

    def tell(self, peer, body):
        self.handle(peer, ev.Received(ev.Header("r", 0, 1, ev.COORDINATOR), body))

    def run(self, n=1000):
        while self.queue and n:
            self.handle(*self.queue.pop(0))
            n -= 1

    def of(self, kind, peer=None):
        return [action for who, action in self.log if isinstance(action, kind) and peer in (None, who)]

    def asked(self):
        """Donor of each slice that was asked for."""
        return [action.dst for action in self.of(ev.Send) if isinstance(action.body, ev.Fetch)]


def test_a_copy_is_fetched_from_all_who_hold_the_part_and_then_said_to_be_there():
    wire = Wire()
    wire.tell(3, ev.CopyPart(PART))
    wire.run()
    assert sorted(wire.asked()) == [1, 1, 1, 2, 2] and len(wire.of(ev.State)) == 0
    assert wire.of(ev.KeepPart) == [ev.KeepPart(PART)] and wire.of(ev.HoldsPart) == [ev.HoldsPart(PART)]
    assert len(wire.of(ev.FindPart)) == 3  # each disk is looked at once
    wire.tell(3, ev.CopyPart(PART))
    assert len(wire.of(ev.HoldsPart)) == 2 and len(wire.asked()) == 5


def test_a_disk_that_holds_it_already_fetches_nothing():
    wire = Wire()
    wire.disks[3]["abc"] = 450
    wire.tell(3, ev.CopyPart(PART))
    wire.run()
    assert wire.of(ev.HoldsPart) == [ev.HoldsPart(PART)] and wire.asked() == []


def test_what_an_earlier_attempt_has_fetched_is_not_fetched_again():
    wire = Wire()
    wire.slices[3] = ((0, 100), (200, 300), (400, 450))
    wire.tell(3, ev.CopyPart(PART))
    wire.run()
    assert len(wire.asked()) == 2 and wire.of(ev.HoldsPart)


def test_a_donor_that_leaves_or_has_lost_it_is_replaced():
    wire = Wire()
    del wire.disks[1]["abc"]
    wire.tell(3, ev.CopyPart(PART))
    wire.run()
    assert wire.of(ev.HoldsPart) == [ev.HoldsPart(PART)]
    assert {action.dst for action in wire.of(ev.Send, 1)} == {3, ev.COORDINATOR}

    wire = Wire()
    wire.tell(3, ev.CopyPart(PART))
    wire.run(2)  # the first slices have been asked for
    rest = tuple(member for member in MEMBERS if member.peer != 1)
    wire.queue = [(peer, event) for peer, event in wire.queue if peer != 1]
    for peer in (0, 2, 3):
        wire.handle(peer, ev.ViewChanged(ev.View(2, 1, 0, rest, (1, 2), 9)))
    wire.run()
    assert wire.of(ev.HoldsPart) == [ev.HoldsPart(PART)]


def test_a_part_that_cannot_be_read_any_more_is_fetched_from_others():
    wire = Wire()
    wire.tell(3, ev.CopyPart(PART))
    wire.run(6)
    wire.handle(1, ev.LostPart("abc", "stage_1: damaged"))
    wire.queue = [(peer, e) for peer, e in wire.queue if not (type(e) is ev.Received and e.header.src == 1)] + [
        (3, ev.Received(ev.Header("r", 0, 1, 1), ev.PartMissing("abc", "stage_1: damaged")))
    ]
    wire.run()
    assert wire.of(ev.HoldsPart) == [ev.HoldsPart(PART)]


def test_copies_keep_below_the_rate_and_a_part_that_the_run_waits_for_does_not():
    """A slice of 400 bytes each 2 s."""
    wire = Wire(bytes_per_s=200.0)
    wire.tell(3, ev.CopyPart(PART))
    wire.run()
    for n_asked in (1, 2, 3, 4, 5):
        assert len(wire.asked()) == n_asked
        wire.now_s = max((action.at_s for action in wire.of(ev.WakeAt)), default=0.0)
        wire.handle(3, ev.Woke("transfer"))
        wire.run()
    assert wire.now_s == pytest.approx(8.0) and wire.of(ev.HoldsPart)
    wire = Wire(BACK, bytes_per_s=1.0)
    wire.handle(3, ev.GoBack(BACK))
    wire.run()
    assert wire.now_s == 0.0 and wire.of(ev.Restore)


def test_two_copies_below_one_rate_ask_to_be_woken_once_for_each_slice():
    """Each waking asks for the next one; with two for each, there would soon be thousands."""
    wire = Wire(bytes_per_s=200.0)
    wire.tell(3, ev.CopyPart(PART))
    wire.tell(3, ev.CopyPart(OTHER))
    wire.run()
    n_done = 0
    while len(wire.of(ev.WakeAt)) > n_done:
        for wake in sorted(wire.of(ev.WakeAt)[n_done:], key=lambda wake: wake.at_s):
            n_done += 1
            wire.now_s = wake.at_s
            wire.handle(3, ev.Woke(wake.tag))
            wire.run()
    assert {action.part for action in wire.of(ev.HoldsPart)} == {PART, OTHER} and len(wire.asked()) == 6
    assert n_done == 5 and wire.now_s == pytest.approx(9.0)  # the last one begins when 1,800 bytes were asked for


def test_going_back_needs_the_part_of_the_own_stage_here():
    wire = Wire(BACK)
    for peer in wire.machines:
        wire.handle(peer, ev.GoBack(BACK))
    wire.run()
    assert wire.of(ev.Restore, 0) == [ev.Restore(8, 1, 1, (OTHER,))]
    assert [wire.of(ev.Restore, peer) for peer in (1, 2, 3)] == [[ev.Restore(8, 1, 1, (PART,))]] * 3
    assert wire.of(ev.HoldsPart, 3) == [ev.HoldsPart(PART)] and not wire.of(ev.KeepPart, 1)


def test_without_parts_the_initial_state_is_restored_at_once():
    start = ev.View(2, 1, 1, MEMBERS, (2, 2), 0, rolled_back=True)
    wire = Wire(start)
    wire.handle(1, ev.GoBack(start))
    assert wire.of(ev.Restore) == [ev.Restore(0, 1, 0, ())]


def test_who_finds_no_donor_waits_and_goes_on_when_one_comes():
    wire = Wire(BACK)
    gone = ev.View(3, 1, 1, (MEMBERS[0], MEMBERS[3]), (2, 2), 8, parts=(OTHER, PART))
    wire.handle(3, ev.ViewChanged(gone))
    wire.handle(3, ev.GoBack(BACK))
    wire.run()
    assert not wire.of(ev.Restore, 3) and not wire.of(ev.Stop)
    wire.handle(3, ev.ViewChanged(ev.View(4, 1, 1, MEMBERS, (2, 4), 8, parts=(OTHER, PART))))
    wire.run()
    assert wire.of(ev.Restore, 3)


def test_a_disk_that_cannot_take_a_copy_fails_this_copy_alone():
    wire = Wire()
    wire.tell(3, ev.CopyPart(PART))
    wire.run(4)
    wire.handle(3, ev.LostPart("abc", "run_dir: No space left on device"))
    assert wire.of(ev.Send, 3)[-1] == ev.Send(ev.COORDINATOR, ev.PartMissing("abc", "run_dir: No space left on device"))
    assert not wire.of(ev.Stop)
    wire = Wire(BACK)
    wire.handle(3, ev.GoBack(BACK))
    wire.handle(3, ev.LostPart("abc", "run_dir: No space left on device"))
    assert wire.of(ev.Stop) == [ev.Stop(2, "peer 3: run_dir: No space left on device")]


def test_a_copy_that_fails_is_not_waited_for():
    """Somebody has asked for it meanwhile."""
    wire = Wire()
    wire.tell(3, ev.CopyPart(PART))
    wire.handle(3, ev.Received(ev.Header("r", 0, 1, 0), ev.Fetch(ev.StateKey(8, 0, 100, "abc"))))
    wire.handle(3, ev.LostPart("abc", "full"))
    missing = ev.PartMissing("abc", "full")
    assert wire.of(ev.Send, 3)[-2:] == [ev.Send(dst, missing) for dst in (ev.COORDINATOR, 0)]


def test_a_new_generation_voids_copies_for_the_one_before():
    wire = Wire()
    wire.tell(3, ev.CopyPart(PART))
    wire.run(2)
    wire.queue.clear()
    wire.handle(3, ev.ViewChanged(ev.View(2, 1, 1, MEMBERS, (2, 2), 0, rolled_back=True)))
    wire.handle(3, ev.ViewChanged(ev.View(3, 1, 1, MEMBERS, (2, 2), 1)))
    assert len(wire.asked()) == 4 and not wire.of(ev.KeepPart)
