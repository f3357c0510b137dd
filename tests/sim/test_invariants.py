"""The invariants themselves: each breaks where it should, and reports its time, number and machine in one line.

The mutants break (1), (2), (3), (6) and (7) in whole runs; these tests need less than a run."""

import itertools
from dataclasses import replace

import pytest
from test_mutants import FAMILIES

from jaxdt.membership.agreement import CommittedStep
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import AdoptedReport, LostReport, OverdueReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run import serialize
from jaxdt.run.config import PlanConfig, RunConfig, default_plan
from jaxdt.run.sizes import Group
from jaxdt.run.work import Work
from jaxdt.sim.faults import CLOG, CONTROL, CRASH, CUT, NEVER_DONE, PAUSE, SLOW, TAKEOVER, Fault
from jaxdt.testing import promises
from jaxdt.testing.cases import draw_case
from jaxdt.testing.invariants import InvariantBroken, Invariants
from jaxdt.testing.pool.invariants import OF_SERVER, PoolInvariants
from jaxdt.testing.symbolic_tensors import Checks, StageLayout, SymbolicTensors, counted_twice

GROUP = Group(1, (1,), 10)
ROUND = RoundId(RoundKind.GRADIENT, 1, 0, view=1)


def record(step):
    return ev.Record(step, (RoundId(RoundKind.GRADIENT, 0, step, view=1),), 1.0, 1, "apply")


def coordinator(*values):
    """Invariants of a run without peers, for which these values have been made durable."""
    invariants = Invariants({})
    for value in values:
        durable(invariants, value)
    return invariants


def durable(invariants, value, now_s=1.0):
    name = "view" if isinstance(value, ev.View) else "steps"
    written = serialize.write(value if isinstance(value, ev.View) else (CommittedStep(value, ev.Tally()),))
    invariants(now_s, ev.COORDINATOR, None, [ev.Persist(name, written)])
    invariants(now_s, ev.COORDINATOR, ev.Persisted(name), [])


EMPTY = ev.View(1, 1, 0, (), (1, 1), 0)


def test_each_promise_has_a_mutant_that_breaks_it():
    numbers = [value for value in vars(promises).values() if isinstance(value, promises.Promise)]
    assert numbers == list(range(1, 27)) and all(promise.text for promise in numbers)
    mutants = [mutant for family in FAMILIES.values() for mutant in family.values()]
    assert set(numbers) <= set().union(*(found for _, _, found, _ in mutants))


def test_records_are_made_once_and_in_order():
    with pytest.raises(InvariantBroken, match=r"^2.500 s: \(4\) coordinator: record of step 2 after 1 steps$"):
        durable(coordinator(EMPTY, record(0)), record(2), 2.5)
    with pytest.raises(InvariantBroken, match=r"\(4\) coordinator: record of step 0 after 1 steps"):
        durable(coordinator(EMPTY, record(0)), record(0))


def test_a_view_says_how_many_steps_are_durable():
    later = ev.View(2, 1, 0, (), (1, 1), 1)
    durable(coordinator(EMPTY, record(0)), later)
    with pytest.raises(InvariantBroken, match=r"\(4\) coordinator: view 2 says 1, durable are 0"):
        durable(coordinator(EMPTY), later)


def two_stages(faults=(), grace_s=10.0):
    """Invariants of a run of peers 0 and 1, one for each stage, with one committed step that both have applied."""
    invariants = Invariants(dict.fromkeys((0, 1)), faults, grace_s)
    invariants.tensors |= {stage: symbolic_tensors(stage, stage=stage) for stage in (0, 1)}
    durable(invariants, TWO)
    for tensors in invariants.tensors.values():
        tensors.version = 1
    durable(invariants, record(0))
    return invariants


TWO = ev.View(1, 1, 0, (ev.Member(0, 0, 1), ev.Member(1, 1, 1)), (1, 1), 0)
BACK = ev.View(2, 1, 1, TWO.members, (2, 2), 0, rolled_back=True)
LOST = ev.Stop(3, "a stage was lost")


@pytest.mark.parametrize("decision", [ev.Persist("view", serialize.write(BACK)), LOST])
def test_a_run_that_ends_or_goes_back_while_all_its_state_lives_is_found(decision):
    with pytest.raises(
        InvariantBroken, match=r"\(5\) coordinator: (rolls back to 0 steps|the run ends: a stage was lost)"
    ):
        two_stages()(50.0, ev.COORDINATOR, None, [decision])


def test_a_run_may_end_before_its_first_view_and_for_a_gradient_that_is_not_finite():
    coordinator()(2.0, ev.COORDINATOR, None, [LOST])
    nonfinite = two_stages()
    nonfinite.allow_end()
    nonfinite(50.0, ev.COORDINATOR, None, [LOST])


@pytest.mark.parametrize("kind", [PAUSE, CUT])
def test_a_peer_that_was_silent_for_the_grace_period_need_not_be_waited_for(kind):
    silence = Fault(30.0, kind, 1, 60.0, others=(ev.COORDINATOR,))
    two_stages([silence])(41.0, ev.COORDINATOR, None, [LOST])
    with pytest.raises(InvariantBroken):
        two_stages([silence])(39.0, ev.COORDINATOR, None, [LOST])
    with pytest.raises(InvariantBroken):
        two_stages([replace(silence, seconds=5.0)])(50.0, ev.COORDINATOR, None, [LOST])


def test_nor_one_that_has_died_or_holds_something_else():
    dead = two_stages()
    dead(40.0, 1, Fault(40.0, CRASH, 1), [])
    dead(41.0, ev.COORDINATOR, None, [LOST])
    for field, value in (("version", 0), ("generation", 1)):
        other = two_stages()
        setattr(other.tensors[1], field, value)
        other.tensors[1]._groups = {0: Group(0, (0,), 10)}  # of which it holds no result
        other(41.0, ev.COORDINATOR, None, [LOST])


def test_a_joining_member_counts_once_it_has_said_that_its_state_is_here():
    joins = two_stages()
    joins._served.discard(1)
    joins(41.0, ev.COORDINATOR, None, [LOST])
    said = ev.Received(ev.Header("r", 0, 1, 1), ev.Profiled({}, 1, state=ev.StateName(0, 1)))
    with pytest.raises(InvariantBroken):
        joins(42.0, ev.COORDINATOR, said, [LOST])


ENDED = ev.Ended(130, "interrupted")
LOSES_1 = [LostReport(1, "its connection broke and did not come back")]


def taken_over(*terms):
    """A coordinator of term 2 has begun. Then peer 1 hears coordinators of these terms, and the last one ends it."""
    invariants = two_stages()
    for term in (1, 2):
        invariants(40.0, ev.COORDINATOR, None, [ev.Persist("coordinator_term", term)])
    for term in terms[:-1]:
        invariants(41.0, 1, ev.Received(ev.Header("r", 0, 1, ev.COORDINATOR, term), ev.HeartbeatAck(1, 0.0)), [])
    invariants(
        42.0, 1, ev.Received(ev.Header("r", 0, 1, ev.COORDINATOR, terms[-1]), ENDED), [ev.Stop(130, "interrupted")]
    )
    return invariants


def test_a_peer_that_a_superseded_coordinator_has_ended_may_be_lost_if_it_had_not_heard_of_the_successor():
    taken_over(1)(50.0, ev.COORDINATOR, None, LOSES_1)
    taken_over(1, 1)(50.0, ev.COORDINATOR, None, LOSES_1)


@pytest.mark.parametrize("terms", [(1, 2, 1), (1, 2), (2,)])
def test_but_not_one_that_knew_better_or_that_its_own_coordinator_has_ended(terms):
    with pytest.raises(InvariantBroken, match=r"\(8\) coordinator: takes a living peer for lost: its connection broke"):
        taken_over(*terms)(50.0, ev.COORDINATOR, None, LOSES_1)


def test_a_process_that_began_after_the_one_that_was_admitted_holds_no_state():
    """A coordinator that took over does not know yet that peer 1 was started again, and makes a view with it."""
    started = two_stages()
    started.add_process(1, None, symbolic_tensors(1, stage=1))
    started.tensors[1].version = 1  # of a checkpoint
    started(40.0, 1, ev.Started(process=1), [])
    durable(started, replace(TWO, number=2, n_committed=1), 41.0)
    started(42.0, ev.COORDINATOR, None, [LOST])
    with pytest.raises(InvariantBroken):
        two_stages()(42.0, ev.COORDINATOR, None, [LOST])


HANGS = Fault(30.0, SLOW, 1, 20.0, factor=NEVER_DONE)
RUNS = ev.Run(Work(1, "F", 0, 1, 1))
STANDSTILL = Fault(30.0, CLOG, ev.COORDINATOR, 20.0, others=(1,), factor=0.0, channel=CONTROL)
JOINS = replace(TWO, number=2, n_committed=1, joining=(1,))


@pytest.mark.parametrize(
    ("faults", "view", "now_s"),
    [([], JOINS, 40.0), ([STANDSTILL], replace(JOINS, joining=()), 40.0), ([STANDSTILL], JOINS, 51.0)],
)
def test_only_a_joining_member_that_does_not_hear_the_coordinator_now_may_be_lost(faults, view, now_s):
    invariants = two_stages(faults)
    durable(invariants, view, 35.0)
    with pytest.raises(InvariantBroken, match=r"\(8\)"):
        invariants(now_s, ev.COORDINATOR, None, LOSES_1)
    unheard = two_stages([STANDSTILL])
    durable(unheard, JOINS, 35.0)
    unheard(40.0, ev.COORDINATOR, None, LOSES_1)


@pytest.mark.parametrize("hangs", [True, False])
def test_so_may_one_whose_donors_all_hang(hangs):
    invariants = two_stages([replace(HANGS, peer=2)])
    invariants.tensors[2] = symbolic_tensors(2, stage=1)
    durable(invariants, replace(JOINS, members=(*TWO.members, ev.Member(2, 1, 1))), 35.0)
    invariants(40.0 if hangs else 29.0, 2, None, [RUNS])
    invariants.tensors[2].version = 1
    if hangs:
        invariants(45.0, ev.COORDINATOR, None, LOSES_1)
    else:
        with pytest.raises(InvariantBroken, match=r"\(8\)"):
            invariants(45.0, ev.COORDINATOR, None, LOSES_1)


def successor(invariants, *disk):
    """A coordinator begins with these values on its disk."""
    plain = {"view" if isinstance(value, ev.View) else "steps": value for value in disk}
    forms = {"view": lambda view: view, "steps": lambda last: (CommittedStep(last, ev.Tally()),)}
    invariants.restart_coordinator({name: serialize.write(forms[name](value)) for name, value in plain.items()})


def test_what_was_being_written_counts_if_it_is_on_the_disk_of_the_next_coordinator():
    """Also of one that takes over: the first one had not heard yet that it was durable."""
    invariants = coordinator(EMPTY)
    written = serialize.write((CommittedStep(record(0), ev.Tally()),))
    invariants(2.0, ev.COORDINATOR, None, [ev.Persist("steps", written)])
    invariants(2.5, ev.COORDINATOR, Fault(2.5, TAKEOVER, ev.COORDINATOR), [])
    successor(invariants, EMPTY, record(0))
    invariants(3.0, ev.COORDINATOR, None, [ev.Send(0, ev.Committed(record(0)))])


def test_what_is_not_on_the_disk_of_the_next_coordinator_does_not():
    invariants = coordinator(EMPTY)
    written = serialize.write((CommittedStep(record(0), ev.Tally()),))
    invariants(2.0, ev.COORDINATOR, None, [ev.Persist("steps", written)])
    durable(invariants, replace(EMPTY, number=2))
    successor(invariants, EMPTY)
    for body in (ev.Committed(record(0)), replace(EMPTY, number=2)):
        with pytest.raises(InvariantBroken, match=r"\(2\) coordinator: announces"):
            invariants(3.0, ev.COORDINATOR, None, [ev.Send(0, body)])


def test_no_view_leaves_a_stage_without_members():
    with pytest.raises(InvariantBroken, match=r"\(5\) coordinator: view 2 leaves a stage without members"):
        durable(two_stages(), replace(TWO, number=2, members=TWO.members[:1], n_committed=1))


def test_what_is_not_durable_is_not_announced():
    invariants = coordinator(EMPTY, record(0))
    invariants(2.0, ev.COORDINATOR, None, [ev.Send(0, ev.Committed(record(0))), ev.Send(0, EMPTY)])
    with pytest.raises(InvariantBroken, match=r"\(2\) coordinator: announces step 1 before its record is durable"):
        invariants(2.0, ev.COORDINATOR, None, [ev.Send(0, ev.Committed(record(1)))])
    with pytest.raises(InvariantBroken, match=r"\(2\) coordinator: announces view 2 before it is durable"):
        invariants(2.0, ev.COORDINATOR, None, [ev.Send(0, ev.View(2, 1, 0, (), (1, 1), 1))])


def test_a_run_that_is_not_over_in_time_is_found():
    with pytest.raises(InvariantBroken, match=r"\(7\) coordinator: the run is not over, with 1 steps of 3"):
        coordinator(EMPTY, record(0)).ended({}, [0], 3)
    coordinator(EMPTY, record(0)).ended({ev.COORDINATOR: ev.Stop(0, "done")}, [0], 1)


@pytest.mark.parametrize(
    ("began_s", "blocks", "is_excused"), [(40.0, True, True), (40.0, False, False), (29.0, True, False)]
)
def test_a_run_may_wait_for_the_only_holder_of_a_state_whose_device_hangs_if_it_says_so(began_s, blocks, is_excused):
    invariants = two_stages([HANGS])
    invariants(began_s, 1, None, [RUNS])
    invariants(60.0, ev.COORDINATOR, None, [OverdueReport(1, "1:1F0@p1", 20.0, 4.0, blocks)])
    if is_excused:
        invariants.ended({}, [0], 3)
    else:
        with pytest.raises(InvariantBroken, match=r"\(7\) coordinator: the run is not over"):
            invariants.ended({}, [0], 3)


def test_but_not_if_another_peer_holds_that_state():
    invariants = two_stages([HANGS])
    invariants(40.0, 1, None, [RUNS])
    invariants(41.0, ev.COORDINATOR, None, [OverdueReport(1, "1:1F0@p1", 20.0, 4.0, True)])
    invariants.add_process(2, None, symbolic_tensors(2, stage=1))
    invariants.tensors[2].version = 1
    said = ev.Received(ev.Header("r", 0, 1, 2), ev.Profiled({}, 1, state=ev.StateName(0, 1)))
    invariants(42.0, ev.COORDINATOR, said, [])
    with pytest.raises(InvariantBroken, match=r"\(7\)"):
        invariants.ended({}, [0], 3)


# ---------------------------------------------------------------------------------------------------- symbolic tensors


class Found(Exception):
    pass


def symbolic_tensors(peer=1, n_microbatches=2, stage=1):
    """The last of two stages, or the first."""

    def broken(peer, problem):
        raise Found(f"{peer}: {problem}")

    layout = StageLayout(stage=stage, n_stages=2, n_microbatches=n_microbatches, groups=(GROUP,))
    return SymbolicTensors(peer, layout, Checks(broken, applied=lambda peer, step, rounds: None))


def backward(tensors, microbatch, generation=0):
    tensors.put(ev.Boundary(ev.Key("act", 0, 1, microbatch)), 0, generation)
    tensors.run(Work(1, "B", microbatch, tensors.peer, 0), 0.0)


def test_a_sum_counts_each_microbatch_once():
    own, other = symbolic_tensors(1), symbolic_tensors(3)
    backward(own, 0)
    backward(other, 1)
    for tensors in (own, other):
        tensors.run(Work(1, "G", None, tensors.peer, 0), 0.0, (ROUND,))
    part = ev.Shard(ev.SliceKey(ROUND, 0, 10, 3), (), 1)
    own.put(part, 3, other.tensor_to_send(part))
    own.sum(ev.SliceKey(ROUND, 0, 10), (1, 3))
    assert own.holds(ROUND) and not other.holds(ROUND)
    assert counted_twice({1: own, 3: other}, 0) is None
    backward(other, 0)
    other.run(Work(1, "G", None, 3, 0), 0.0, (ROUND,))
    assert counted_twice({1: own, 3: other}, 0) == ((0, 0, 1, 0), (1, 3))
    own.put(part, 3, other.tensor_to_send(part))
    with pytest.raises(Found, match=r"1: round 0 of stage1 counts {\(0, 0, 1, 0\): 2}"):
        own.sum(ev.SliceKey(ROUND, 0, 10), (1, 3))


def test_an_update_wants_all_slices_of_one_round():
    tensors = symbolic_tensors()
    body = ev.Reduced(ev.SliceKey(ROUND, 0, 6), (), 1, 0, 1.0)
    tensors.put(body, 3, {})
    with pytest.raises(Found, match="the whole sum of round 0 of stage1"):
        tensors.run(Work(1, "U", None, 1, 0), 1.0, (ROUND,))
    tensors.put(ev.Reduced(ev.SliceKey(ROUND, 6, 10), (), 1, 0, 1.0), 3, {})
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
    tensors.put(ev.Reduced(ev.SliceKey(ROUND, 0, 10), (), 1, 0, 1.0), 3, {})
    assert not tensors.holds(ROUND)


# --------------------------------------------------------------------------------------------------------------- pools


def holds_all_of_step_1():
    """A pool's invariants, which know of server 1 of stage 1 that it holds all of both microbatches of step 1, and that
    it has adopted the view in which it is alone in its stage."""
    invariants = Invariants({})
    invariants.tensors[1] = held = symbolic_tensors(1)
    config = RunConfig(draw_case(0).config.model, PlanConfig(stages=2, microbatches=2))
    pool = PoolInvariants(invariants, config, default_plan(config))
    hears_view(pool, TWO, AdoptedReport(TWO.number, [0, 1]))
    for kind, stage in itertools.product(("act", "grad"), (1, 2)):
        for microbatch in (0, 1):
            held.put(ev.Boundary(ev.Key(kind, 1, stage, microbatch)), 0, 0)
    assert len(held.boundary_keys) == OF_SERVER * 2
    return pool


def hears_view(pool, view, *reports):
    """Server 1 hears a view and says this. What it holds is checked when the next event comes."""
    pool(1, ev.Received(ev.Header("r", 0, view.number, ev.COORDINATOR), view), list(reports))
    pool(1, ev.Woke("heartbeat"), [])


SHARED_STAGE = replace(TWO, number=2, members=(*TWO.members, ev.Member(3, 1, 1)))


def test_a_server_owns_what_the_view_says_that_it_has_adopted():
    """With another server in its stage it owns one of the two microbatches. A view of a superseded coordinator, or one
    that comes late, changes nothing: the server drops it."""
    hears_view(holds_all_of_step_1(), SHARED_STAGE)
    with pytest.raises(InvariantBroken, match="holds 8 boundary tensors of step 1, expected at most 4"):
        hears_view(holds_all_of_step_1(), SHARED_STAGE, AdoptedReport(SHARED_STAGE.number, [0, 1, 3]))
