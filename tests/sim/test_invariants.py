"""The invariants themselves: each breaks where it should, and says when, which and who in one line.

The mutants show (1), (2), (3), (6) and (7) in whole runs; here is what takes less than a run."""

import pytest

from jaxdt.protocol.events import (
    COORDINATOR,
    Boundary,
    Committed,
    Key,
    Persist,
    Persisted,
    Record,
    Reduced,
    Round,
    Send,
    Shard,
    SliceKey,
    Stop,
    View,
)
from jaxdt.sim.fuzz.invariants import InvariantBroken, Invariants
from jaxdt.sim.fuzz.symbolic_tensors import SymbolicTensors, counted_twice
from jaxdt.spec import serialize
from jaxdt.spec.sizes import Group
from jaxdt.spec.work import Work

GROUP = Group("stage1", (1,), 10)
ROUND = Round(0, "stage1", 1)


def record(step):
    return Record(step, (Round(step, "stage0", 1),), 1.0, 1, "apply")


def coordinator(*values, must_last=True):
    """Invariants of a run without peers, for which these have been made durable."""
    one = Invariants({}, must_last)
    for value in values:
        durable(one, value)
    return one


def durable(one, value, now_s=1.0):
    name = "view" if isinstance(value, View) else "records"
    written = serialize.write(value if isinstance(value, View) else (value,))
    one(now_s, COORDINATOR, None, [Persist(name, written)])
    one(now_s, COORDINATOR, Persisted(name), [])


EMPTY = View(1, 1, 0, (), (1, 1), 0)


def test_records_are_made_once_and_in_order():
    with pytest.raises(InvariantBroken, match=r"^2.500 s: \(4\) coordinator: record of step 2 after 1 steps$"):
        durable(coordinator(EMPTY, record(0)), record(2), 2.5)
    with pytest.raises(InvariantBroken, match=r"\(4\) coordinator: record of step 0 after 1 steps"):
        durable(coordinator(EMPTY, record(0)), record(0))


def test_a_view_says_how_many_steps_are_durable():
    later = View(2, 1, 0, (), (1, 1), 1)
    durable(coordinator(EMPTY, record(0)), later)
    with pytest.raises(InvariantBroken, match=r"\(4\) coordinator: view 2 says 1, durable are 0"):
        durable(coordinator(EMPTY), later)


@pytest.mark.parametrize(("must_last", "views"), [(False, [EMPTY]), (True, [])])
def test_a_run_may_end_if_a_stage_may_be_lost_or_before_it_began(must_last, views):
    coordinator(*views, must_last=must_last)(2.0, COORDINATOR, None, [Stop(3, "a peer was lost")])


def test_a_run_that_ends_or_goes_back_without_need_is_found():
    with pytest.raises(InvariantBroken, match=r"\(5\) coordinator: the run ends: a peer was lost"):
        coordinator(EMPTY)(2.0, COORDINATOR, None, [Stop(3, "a peer was lost")])
    back = View(2, 1, 1, (), (1, 1), 0, rolled_back=True)
    with pytest.raises(InvariantBroken, match=r"\(5\) coordinator: rolls back to 0 steps"):
        durable(coordinator(EMPTY, record(0)), back)
    spoilt = coordinator(EMPTY, record(0))
    spoilt.may_end()
    durable(spoilt, back)
    durable(spoilt, record(0))


def test_what_is_not_durable_is_not_announced():
    one = coordinator(EMPTY, record(0))
    one(2.0, COORDINATOR, None, [Send(0, Committed(record(0))), Send(0, EMPTY)])
    with pytest.raises(InvariantBroken, match=r"\(2\) coordinator: announces step 1 before its record is durable"):
        one(2.0, COORDINATOR, None, [Send(0, Committed(record(1)))])
    with pytest.raises(InvariantBroken, match=r"\(2\) coordinator: announces view 2 before it is durable"):
        one(2.0, COORDINATOR, None, [Send(0, View(2, 1, 0, (), (1, 1), 1))])


def test_a_run_that_is_not_over_in_time_is_found():
    with pytest.raises(InvariantBroken, match=r"\(7\) coordinator: the run is not over, with 1 steps of 3"):
        coordinator(EMPTY, record(0)).ended({}, [0], 3)
    coordinator(EMPTY, record(0)).ended({COORDINATOR: Stop(0, "done")}, [0], 1)


# ------------------------------------------------------------------------------------------------------------ contents


class Found(Exception):
    pass


def contents(peer=1, n_microbatches=2):
    """The last of two stages."""

    def broken(which, who, what):
        raise Found(f"({which}) {who}: {what}")

    return SymbolicTensors(peer, 1, 2, n_microbatches, (GROUP,), broken, lambda peer, step, rounds: None)


def backward(one, microbatch, generation=0):
    one.put(Boundary(Key("act", 0, 1, microbatch)), 0, generation)
    one.run(Work(1, "B", microbatch, one.peer, 0), 0.0)


def test_a_sum_counts_each_microbatch_once():
    mine, theirs = contents(1), contents(3)
    backward(mine, 0)
    backward(theirs, 1)
    for one in (mine, theirs):
        one.run(Work(1, "G", None, one.peer, 0), 0.0)
    part = Shard(SliceKey(ROUND, 0, 10, 3), (), 1)
    mine.put(part, 3, theirs.take(part))
    mine.sum(SliceKey(ROUND, 0, 10), (1, 3))
    assert mine.holds(ROUND) and not theirs.holds(ROUND)
    assert counted_twice({1: mine, 3: theirs}, 0) is None
    backward(theirs, 0)
    theirs.run(Work(1, "G", None, 3, 0), 0.0)
    assert counted_twice({1: mine, 3: theirs}, 0) == ((0, 0, 1, 0), (1, 3))
    mine.put(part, 3, theirs.take(part))
    with pytest.raises(Found, match=r"\(1\) 1: Round\(.*counts {\(0, 0, 1, 0\): 2}"):
        mine.sum(SliceKey(ROUND, 0, 10), (1, 3))


def test_an_update_wants_all_slices_of_one_round():
    one = contents()
    body = Reduced(SliceKey(ROUND, 0, 6), (), 1, 0, 1.0)
    one.put(body, 3, {})
    with pytest.raises(Found, match="the whole sum of Round"):
        one.run(Work(1, "U", None, 1, 0), 1.0, (ROUND,))
    one.put(Reduced(SliceKey(ROUND, 6, 10), (), 1, 0, 1.0), 3, {})
    one.run(Work(1, "U", None, 1, 0), 1.0, (ROUND,))
    assert one.version == 1


def test_tensors_are_used_once_with_their_own_version_and_lineage():
    one = contents()
    with pytest.raises(Found, match="wants a tensor that it does not hold: Key"):
        one.run(Work(1, "B", 0, 1, 0), 0.0)
    with pytest.raises(Found, match=r"1:1B0@p1 is computed with one of the versions \[0\]"):
        one.run(Work(1, "B", 0, 1, 1), 0.0)
    with pytest.raises(Found, match="in generation 0 uses .* of generation 1"):
        backward(one, 0, generation=1)


def test_what_comes_for_a_void_round_is_not_kept():
    one = contents()
    one.forget(ROUND)
    one.put(Reduced(SliceKey(ROUND, 0, 10), (), 1, 0, 1.0), 3, {})
    assert not one.holds(ROUND)
