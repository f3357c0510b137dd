"""scripts/experiments/rollback_proof.py: which rollbacks a living process would have made needless."""

import math

import pytest
from rollback_proof import Life, rollbacks

STAGES = {"0": 0, "1": 1, "2": 1}
FOREVER = math.inf


def record(at_s, kind, **fields):
    return {"what": "report", "peer": -1, "t": at_s, "kind": kind, "fields": fields}


def trace(*more):
    """Three members commit three steps in view 1, the last one at 3 s; the run goes back to step 2 at 10 s."""
    steps = [record(float(step + 1), "step", step=step) for step in range(3)]
    back = record(10.0, "rollback", step=3, to=2, again=[2])
    return [record(0.0, "view", view=1, members=STAGES, joining=[]), *steps, *more, back]


def lives(ended_s, *more):
    """Peer 0, and the two peers of stage 1, which end at these times."""
    return [Life(0, FOREVER, [1]), *(Life(1 + n, end_s, [1]) for n, end_s in enumerate(ended_s)), *more]


@pytest.mark.parametrize(
    ("ended_s", "holders"), [((5.0, 6.0), []), ((5.0, FOREVER), [2]), ((5.0, 11.0), [2]), ((FOREVER, 6.0), [1])]
)
def test_a_rollback_is_needed_if_nobody_of_a_stage_lives(ended_s, holders):
    (found,) = rollbacks(trace(), lives(ended_s), 2)
    assert found.holders == {0: [0], 1: holders}
    assert found.was_needed == (not holders)


def test_a_new_process_of_a_dead_peer_holds_nothing():
    """It is in a later view than the one in which the last step was committed."""
    later = record(8.0, "view", view=2, members=STAGES, joining=[1])
    (found,) = rollbacks(trace(later), lives((5.0, 6.0), Life(1, FOREVER, [2])), 2)
    assert found.was_needed


@pytest.mark.parametrize(("downloads", "is_needed"), [([(6.0, 3)], False), ([(6.0, 2)], True), ([(9.5, 3)], True)])
def test_but_one_that_has_fetched_the_last_version_does(downloads, is_needed):
    """The version of 2 updates is too old, and what came within a second may not be known yet."""
    later = record(5.5, "view", view=2, members={"0": 0, "3": 1}, joining=[3])
    (found,) = rollbacks(trace(later), lives((5.0, 6.0), Life(3, FOREVER, [2], downloads)), 2)
    assert found.was_needed == is_needed


def test_a_step_that_a_killed_coordinator_did_not_report_counts():
    restarted = record(9.0, "restarted", step=4, view=1, coordinator_term=2, members=[0])
    back = record(9.5, "rollback", step=4, to=2, again=[2, 3])
    records = [*trace()[:-1], restarted, back]
    assert [found.was_needed for found in rollbacks(records, lives((5.0, 6.0)), 2)] == [True]
    assert [found.was_needed for found in rollbacks(records, lives((5.0, FOREVER)), 2)] == [False]


def test_what_cannot_be_told_is_no_proof():
    back = record(9.5, "rollback", step=9, to=2, again=[2])
    (found,) = rollbacks([*trace()[:-1], back], lives((5.0, 6.0)), 2)
    assert found.holders is None and not found.was_needed


def test_a_rollback_that_loses_no_step_is_none():
    assert rollbacks([record(1.0, "rollback", step=2, to=2, again=[])], [], 2) == []


def test_the_log_of_a_process_says_what_it_held():
    life = Life(None)
    for at_s, line in enumerate(
        (
            "peer 1: joins for stage 0",
            "22:59:59 is in view 3, with peers 0 and 1",
            "22:59:59 is in view 4, with peers 0 and 11",
            "23:00:00 has the state of step 7 from peer 0: 0.0 MB in 1.00 s",
            "23:00:01 is in view 5, with peers 0, 1 and 11",
        )
    ):
        life.note(line, float(at_s))
    assert life == Life(1, FOREVER, [3, 5], [(3.0, 7)])
