"""The invariants themselves: each breaks where it should, and reports its time, number and machine in one line.

The mutants break (1), (2), (3), (6) and (7) in whole runs; these tests need less than a run."""

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
from jaxdt.sim.fuzz.symbolic_tensors import Checks, StageLayout, SymbolicTensors, counted_twice
from jaxdt.spec import serialize
from jaxdt.spec.sizes import Group
from jaxdt.spec.work import Work

GROUP = Group("stage1", (1,), 10)
ROUND = Round(0, "stage1", 1)


def record(step):
    return Record(step, (Round(step, "stage0", 1),), 1.0, 1, "apply")


def coordinator(*values, plan_survives=True):
    """Invariants of a run without peers, for which these values have been made durable."""
    invariants = Invariants({}, plan_survives)
    for value in values:
        durable(invariants, value)
    return invariants


def durable(invariants, value, now_s=1.0):
    name = "view" if isinstance(value, View) else "records"
    written = serialize.write(value if isinstance(value, View) else (value,))
    invariants(now_s, COORDINATOR, None, [Persist(name, written)])
    invariants(now_s, COORDINATOR, Persisted(name), [])


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


@pytest.mark.parametrize(("plan_survives", "views"), [(False, [EMPTY]), (True, [])])
def test_a_run_may_end_if_a_stage_may_be_lost_or_before_it_began(plan_survives, views):
    coordinator(*views, plan_survives=plan_survives)(2.0, COORDINATOR, None, [Stop(3, "a peer was lost")])


def test_a_run_that_ends_or_goes_back_without_need_is_found():
    with pytest.raises(InvariantBroken, match=r"\(5\) coordinator: the run ends: a peer was lost"):
        coordinator(EMPTY)(2.0, COORDINATOR, None, [Stop(3, "a peer was lost")])
    back = View(2, 1, 1, (), (1, 1), 0, rolled_back=True)
    with pytest.raises(InvariantBroken, match=r"\(5\) coordinator: rolls back to 0 steps"):
        durable(coordinator(EMPTY, record(0)), back)
    nonfinite = coordinator(EMPTY, record(0))
    nonfinite.allow_end()
    durable(nonfinite, back)
    durable(nonfinite, record(0))


def test_what_is_not_durable_is_not_announced():
    invariants = coordinator(EMPTY, record(0))
    invariants(2.0, COORDINATOR, None, [Send(0, Committed(record(0))), Send(0, EMPTY)])
    with pytest.raises(InvariantBroken, match=r"\(2\) coordinator: announces step 1 before its record is durable"):
        invariants(2.0, COORDINATOR, None, [Send(0, Committed(record(1)))])
    with pytest.raises(InvariantBroken, match=r"\(2\) coordinator: announces view 2 before it is durable"):
        invariants(2.0, COORDINATOR, None, [Send(0, View(2, 1, 0, (), (1, 1), 1))])


def test_a_run_that_is_not_over_in_time_is_found():
    with pytest.raises(InvariantBroken, match=r"\(7\) coordinator: the run is not over, with 1 steps of 3"):
        coordinator(EMPTY, record(0)).ended({}, [0], 3)
    coordinator(EMPTY, record(0)).ended({COORDINATOR: Stop(0, "done")}, [0], 1)


# ---------------------------------------------------------------------------------------------------- symbolic tensors


class Found(Exception):
    pass


def symbolic_tensors(peer=1, n_microbatches=2):
    """The last of two stages."""

    def broken(invariant, peer, problem):
        raise Found(f"({invariant}) {peer}: {problem}")

    layout = StageLayout(stage=1, n_stages=2, n_microbatches=n_microbatches, groups=(GROUP,))
    return SymbolicTensors(peer, layout, Checks(broken, applied=lambda peer, step, rounds: None))


def backward(tensors, microbatch, generation=0):
    tensors.put(Boundary(Key("act", 0, 1, microbatch)), 0, generation)
    tensors.run(Work(1, "B", microbatch, tensors.peer, 0), 0.0)


def test_a_sum_counts_each_microbatch_once():
    own, other = symbolic_tensors(1), symbolic_tensors(3)
    backward(own, 0)
    backward(other, 1)
    for tensors in (own, other):
        tensors.run(Work(1, "G", None, tensors.peer, 0), 0.0, (ROUND,))
    part = Shard(SliceKey(ROUND, 0, 10, 3), (), 1)
    own.put(part, 3, other.tensor_to_send(part))
    own.sum(SliceKey(ROUND, 0, 10), (1, 3))
    assert own.holds(ROUND) and not other.holds(ROUND)
    assert counted_twice({1: own, 3: other}, 0) is None
    backward(other, 0)
    other.run(Work(1, "G", None, 3, 0), 0.0, (ROUND,))
    assert counted_twice({1: own, 3: other}, 0) == ((0, 0, 1, 0), (1, 3))
    own.put(part, 3, other.tensor_to_send(part))
    with pytest.raises(Found, match=r"\(1\) 1: Round\(.*counts {\(0, 0, 1, 0\): 2}"):
        own.sum(SliceKey(ROUND, 0, 10), (1, 3))


def test_an_update_wants_all_slices_of_one_round():
    tensors = symbolic_tensors()
    body = Reduced(SliceKey(ROUND, 0, 6), (), 1, 0, 1.0)
    tensors.put(body, 3, {})
    with pytest.raises(Found, match="the whole sum of Round"):
        tensors.run(Work(1, "U", None, 1, 0), 1.0, (ROUND,))
    tensors.put(Reduced(SliceKey(ROUND, 6, 10), (), 1, 0, 1.0), 3, {})
    tensors.run(Work(1, "U", None, 1, 0), 1.0, (ROUND,))
    assert tensors.version == 1


def test_tensors_are_used_once_with_their_own_version_and_generation():
    tensors = symbolic_tensors()
    with pytest.raises(Found, match="wants a tensor that it does not hold: Key"):
        tensors.run(Work(1, "B", 0, 1, 0), 0.0)
    with pytest.raises(Found, match=r"1:1B0@p1 is computed with one of the versions \[0\]"):
        tensors.run(Work(1, "B", 0, 1, 1), 0.0)
    with pytest.raises(Found, match="in generation 0 uses .* of generation 1"):
        backward(tensors, 0, generation=1)


def test_tensors_of_a_void_round_are_dropped():
    tensors = symbolic_tensors()
    tensors.forget(ROUND)
    tensors.put(Reduced(SliceKey(ROUND, 0, 10), (), 1, 0, 1.0), 3, {})
    assert not tensors.holds(ROUND)
