"""State that moves from peers to a peer, whose donors leave and whose wishes change meanwhile; and states that arrive
for a compute thread that is busy: each is installed as one download has brought it."""

from dataclasses import replace

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.sync.state_transfer import StateTransfer
from jaxdt.sync.transfer import FetchedStates
from jaxdt.sync.worker_parameters import ParameterDownload

N_WORDS, SLICE_BYTES = 10, 16
VIEW = ev.View(2, 1, 0, tuple(ev.Member(peer, 0, 1) for peer in range(3)), (1,), 3)
COMMITTED = ev.Committed(ev.Record(3, (RoundId(RoundKind.GRADIENT, 0, 3, view=1),), 1.0, 1, "apply"))
WORKER = 7


def received(src, body):
    return ev.Received(ev.Header("r", 0, 2, src), body)


def fetches(actions):
    """The slices that are asked for, and of whom."""
    return [(a.dst, a.body.key) for a in actions if isinstance(a, ev.Send) and isinstance(a.body, ev.Fetch)]


def gives(actions):
    return [(a.dst, a.body.key) for a in actions if isinstance(a, ev.Send) and isinstance(a.body, ev.State)]


def member(peer, view=VIEW):
    machine = StateTransfer(peer, 0, SLICE_BYTES, worker_words=6)
    machine.handle(0.0, ev.Ready({}, N_WORDS))
    return machine, machine.handle(0.0, ev.ViewChanged(view))


def test_a_newcomer_whose_donor_dies_asks_the_other_for_what_is_missing():
    newcomer, actions = member(2, replace(VIEW, joining=(2,)))
    asked = dict(reversed(pair) for pair in fetches(actions))
    here, owed = ev.StateKey(3, 0, 4), ev.StateKey(3, 4, 8)
    assert asked == {here: 0, owed: 1, ev.StateKey(3, 8, 10): 0}
    assert ev.Fetching(16, 24, 40) in newcomer.handle(0.0, received(0, ev.State(here)))
    without = replace(VIEW, number=3, members=(VIEW.members[0], VIEW.members[2]), joining=(2,))
    assert fetches(newcomer.handle(0.0, ev.ViewChanged(without))) == [(0, owed)]
    assert newcomer.handle(0.0, received(1, ev.State(owed))) == []
    newcomer.handle(0.0, received(0, ev.State(owed)))
    assert ev.Install(3, 0) in newcomer.handle(0.0, received(0, ev.State(ev.StateKey(3, 8, 10))))


def test_a_version_that_is_superseded_while_it_is_fetched_or_installed_is_not_the_workers_own():
    worker = ParameterDownload(0, 1, N_WORDS, SLICE_BYTES)

    def fetch(actions, n=3):
        asked = fetches(actions)
        while n:
            n -= 1
            actions = worker.handle(0.0, received(1, ev.State(asked.pop(0)[1])))
            asked += fetches(actions)
        return actions

    admit = lambda version: worker.handle(0.0, ev.Admitted(5, 0, version, 0))  # noqa: E731
    fetch(admit(3), n=1)
    assert ev.Install(4, 0) in fetch(admit(4))  # behind a long Work
    late = received(1, ev.State(ev.StateKey(3, 4, 8)))
    actions = admit(5)
    assert worker.handle(0.0, late) == []
    assert ev.Install(5, 0) in fetch(actions)
    assert worker.handle(0.0, ev.Installed(4)) == []
    assert worker.handle(0.0, ev.Installed(5)) == [ev.Updated(0, 5)]
    assert ev.Install(6, 0, beside_work=True) in fetch(admit(6))


def test_a_server_gives_parameters_to_a_worker_until_their_update_begins():
    server, _ = member(0)
    ask = lambda version, lo: server.handle(0.0, received(WORKER, ev.Fetch(ev.StateKey(version, lo, lo + 2))))  # noqa: E731
    assert gives(ask(3, 0)) == [(WORKER, ev.StateKey(3, 0, 2))]
    assert ask(3, 6) == [] and ask(4, 0) == []  # the optimizer's state, and what is not here yet
    server.handle(0.0, received(ev.COORDINATOR, COMMITTED))
    assert ask(3, 0) == []
    assert server.handle(0.0, ev.Updated(0, 4)) == []
    assert gives(ask(4, 0)) == [(WORKER, ev.StateKey(4, 0, 2))]


def test_a_member_gets_the_next_version_once_it_is_here():
    donor, _ = member(0)
    donor.handle(0.0, received(ev.COORDINATOR, COMMITTED))
    key = ev.StateKey(4, 0, 4)
    for _ in range(2):  # the one that asks was not sure that its request has come
        assert donor.handle(0.0, received(1, ev.Fetch(key))) == []
    assert gives(donor.handle(0.0, ev.Updated(0, 4))) == [(1, key)]
    assert donor.handle(0.0, received(1, ev.Fetch(replace(key, version=3)))) == []


def test_a_state_of_the_generation_before_is_not_given():
    """A version has the same number in both."""
    donor, _ = member(0)
    donor.handle(0.0, ev.ViewChanged(replace(VIEW, number=3, generation=1, rolled_back=True)))
    key = ev.StateKey(3, 0, 4)
    assert donor.handle(0.0, received(1, ev.Fetch(key))) == []
    assert gives(donor.handle(0.0, ev.Updated(0, 3))) == [(1, key)]


# ------------------------------------------------------------------------------------------- what a driver keeps


def slices(version, label):
    return [(ev.StateKey(version, lo, min(lo + 4, N_WORDS)), f"{label} {lo}") for lo in range(0, N_WORDS, 4)]


def test_slices_of_the_next_version_come_before_the_one_before_is_taken():
    states = FetchedStates(N_WORDS)
    first, second = slices(1, "first"), slices(2, "second")
    for key, words in [*first, *second[:2]]:
        states.put(key, words)
    assert states.take(1) == first
    states.put(*second[2])
    assert states.take(2) == second


def test_the_same_version_may_be_fetched_from_another_donor_before_the_first_is_taken():
    states = FetchedStates(N_WORDS)
    first, second = slices(3, "first"), slices(3, "second")
    for donor in (first, reversed(second)):
        states.begin()
        for key, words in donor:
            states.put(key, words)
    assert states.take(3) == first
    assert states.take(3) == second


@pytest.mark.parametrize("begins", [False, True])
def test_what_a_download_that_was_given_up_has_brought_is_part_of_no_state(begins):
    """Another version tells by itself that it is another download."""
    states = FetchedStates(N_WORDS)
    given_up, whole = slices(1, "given up"), slices(1 if begins else 2, "whole")
    for key, words in given_up[:2]:
        states.put(key, words)
    if begins:
        states.begin()
    for key, words in reversed(whole):
        states.put(key, words)
    assert states.take(whole[0][0].version) == whole


def test_a_state_that_is_not_whole_is_not_taken():
    states = FetchedStates(N_WORDS)
    states.put(*slices(1, "part")[0])
    with pytest.raises(RuntimeError, match="installs the state of 1 steps: the one that is whole is of None"):
        states.take(1)
