"""Replicas that differ: when people hear of it, who takes over whose state, and that the step waits for it."""

import math
from dataclasses import replace

import pytest
from test_coordinator import STAGE_OF, Driver, of, prepared, reports, sent

from jaxdt.membership.state_check import TOLERANCE, deviations, relative_difference
from jaxdt.protocol import events as ev

SUMS = (3.0, 4.0)
EQUAL = ev.StateDigest(0, 1, 77, 100.0, SUMS)


def state(stage, version, digest=77, shift=0.0):
    return ev.StateDigest(stage, version, digest, 100.0, (SUMS[0] + shift, SUMS[1]))


def vote(run, peer, step, digest=77, shift=0.0):
    body = replace(prepared(peer, step), state=state(STAGE_OF[peer], step, digest, shift))
    return run.message(peer, body)


def begun(step):
    """A run in which the steps before `step` are committed."""
    run = Driver()
    run.begin()
    for earlier in range(step):
        run.commit(earlier)
    return run


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (EQUAL, 0.0),
        (replace(EQUAL, sums=(3.0, 5.0)), 0.01),
        (replace(EQUAL, sums=(math.nan, 4.0)), math.nan),
        (replace(EQUAL, sums=()), math.nan),
    ],
)
def test_the_difference_is_relative_to_the_norm(other, difference):
    assert relative_difference(other, EQUAL) == pytest.approx(difference, nan_ok=True)


def test_any_difference_from_zero_is_infinite():
    zero = replace(EQUAL, norm=0.0)
    assert relative_difference(zero, zero) == 0.0
    assert relative_difference(replace(EQUAL, sums=(3.0, 5.0)), zero) == math.inf


def test_each_replica_is_compared_with_the_lowest_numbered_of_its_own_stage():
    votes = {peer: replace(prepared(peer, 1), state=state(STAGE_OF[peer], 1, digest=peer)) for peer in STAGE_OF}
    assert [(one.peer, one.reference) for one in deviations(votes)] == [(2, 0), (3, 1)]
    assert deviations({peer: replace(body, state=None) for peer, body in votes.items()}) == []


def test_a_difference_within_the_tolerance_is_told_once_and_holds_nobody_up():
    run = begun(1)
    for peer in (0, 1, 3):
        vote(run, peer, 1)
    (persist,) = vote(run, 2, 1, digest=78, shift=0.5 * TOLERANCE * 100)
    assert persist.name == "steps"
    (told,) = reports(run.event(ev.Persisted("steps")), "unequal_bits")
    assert (told["peer"], told["reference"], told["stage"], told["version"]) == (2, 0, 0, 1)
    assert told["difference"] == pytest.approx(0.5 * TOLERANCE)
    for peer in STAGE_OF:
        vote(run, peer, 2, digest=79 if peer == 2 else 77)
    assert reports(run.event(ev.Persisted("steps")), "unequal_bits") == []


@pytest.mark.parametrize(("version", "shift"), [(1, 2 * TOLERANCE * 100), (1, math.nan), (0, 0.0)])
def test_beyond_it_the_step_waits_until_the_replica_has_the_others_state(version, shift):
    """The initial parameters have no tolerance."""
    run = begun(version)
    for peer in (0, 1, 3):
        vote(run, peer, version)
    actions = vote(run, 2, version, digest=78, shift=shift)
    repairs = {2: ev.Repair(version, 78, donor=0), 0: ev.Repair(version, 77, donor=0)}
    assert not of(actions, ev.Persist) and sent(actions, ev.Repair) == repairs
    (told,) = reports(actions, "repair")
    assert (told["peer"], told["donor"], told["version"]) == (2, 0, version)
    assert not of(vote(run, 2, version), ev.Persist)
    assert of(vote(run, 0, version), ev.Persist)


def test_a_vote_that_comes_twice_before_the_repair_is_answered_again():
    run = begun(1)
    for peer in (0, 1, 3):
        vote(run, peer, 1)
    for _ in range(2):
        actions = vote(run, 2, 1, digest=78, shift=1.0)
        assert sent(actions, ev.Repair)[2] == ev.Repair(1, 78, 0)
        vote(run, 0, 1)


def test_a_reference_whose_state_has_changed_since_votes_with_another_digest():
    """The replica that took its state over has that one too, and the step goes on."""
    run = begun(1)
    for peer in (0, 1, 3):
        vote(run, peer, 1)
    vote(run, 2, 1, digest=78, shift=1.0)
    vote(run, 2, 1, digest=99, shift=5.0)
    assert of(vote(run, 0, 1, digest=99, shift=5.0), ev.Persist)


def test_two_wrong_replicas_are_both_repaired():
    run = begun(1)
    actions = []
    for peer in (3, 2, 1, 0):
        actions = vote(run, peer, 1, digest=77 + peer, shift=float(peer))
    donors = {action.dst: action.body.donor for action in actions if isinstance(action, ev.Send)}
    assert donors == {0: 0, 1: 1, 2: 0, 3: 1}
    for peer, digest, shift in ((0, 77, 0.0), (2, 77, 0.0), (1, 78, 1.0)):
        assert not of(vote(run, peer, 1, digest=digest, shift=shift), ev.Persist)
    assert of(vote(run, 3, 1, digest=78, shift=1.0), ev.Persist)
