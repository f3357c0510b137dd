"""AllReduce machines over a fake wire: whatever can happen next is a list, and the test chooses from it. Vectors are
lists of integers, so every sum is exact in whatever order."""

import math
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.membership.commit import TwoPhaseCommit
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.delay import Delay
from jaxdt.run.seq_lengths import SeqLengths
from jaxdt.run.sizes import SHARED_TABLE, Group
from jaxdt.run.work import Work
from jaxdt.sync.allreduce import AllReduce
from jaxdt.sync.exchange import update_scale

STEP = 0
ROUND = RoundId(RoundKind.GRADIENT, 0, STEP, view=1)


def gradient(stage, microbatch, n):
    """The summands that one microbatch adds to a vector of n numbers."""
    return [(stage + 2) * 100 + microbatch * 10 + i for i in range(n)]


class Wire:
    """Machines, their tensors and their messages. `view` is adopted by all; messages arrive one by one by `deliver`."""

    def __init__(self, stage_of, groups, n_microbatches, slice_bytes=8, clip_norm=0.0):
        self.stage_of, self.n_microbatches = stage_of, n_microbatches
        n_stages = max(stage_of.values()) + 1
        members = tuple(ev.Member(peer, stage, 1) for peer, stage in sorted(stage_of.items()))
        self.view = ev.View(1, 1, 0, members, (1,) * n_stages, STEP)
        self.groups = {peer: tuple(g for g in groups if stage in g.stages) for peer, stage in stage_of.items()}
        self.machines = {
            peer: AllReduce(peer, stage, self.groups[peer], n_microbatches, slice_bytes, clip_norm=clip_norm)
            for peer, stage in stage_of.items()
        }
        self.items = {peer: [] for peer in stage_of}
        self.vectors, self.slices = {}, {}
        self.waiting, self.said, self.internal = [], [], []
        for peer in stage_of:
            self.tell(peer, ev.ViewChanged(self.view))
        assert self.internal == [(peer, ev.Updated(stage, STEP)) for peer, stage in stage_of.items()]
        self.internal.clear()

    def compute(self, peer, microbatches, n_samples=1, loss=None):
        """The peer's backward Work, then the word that nothing more will come, and the vector's making."""
        stage = self.stage_of[peer]
        for m in microbatches:
            self.items[peer].append(m)
            self.tell(peer, ev.Accumulated(STEP, stage, m, n_samples, loss))
        self.tell(peer, ev.Drained(STEP))

    def tell(self, peer, event):
        for action in self.machines[peer].handle(0.0, event):
            self.act(peer, action)

    def act(self, peer, action):
        match action:
            case ev.Send(dst, body) if dst == ev.COORDINATOR:
                self.said.append((peer, body))
            case ev.Send(dst, body):
                tensor = self.tensor(peer, body.key)
                assert action.n_bytes == 4 * len(tensor)
                self.waiting.append((dst, peer, body, tensor))
            case ev.Post(letters):
                for letter in letters:
                    self.act(peer, ev.Send(*letter))
            case ev.Run(Work(kind="G") as work):
                for group in self.groups[peer]:
                    parts = [gradient(self.stage_of[peer], m, group.n_elements) for m in self.items[peer]]
                    self.vectors[peer, group.stage] = [sum(column) for column in zip(*parts, strict=True)]
                self.tell(peer, ev.Ran(work, 0.0, 0.0))
            case ev.Sum(key, members):
                own = self.vectors[peer, key.round.stage][key.lo : key.hi]
                parts = [own if m == peer else self.slices[peer, replace(key, src=m)] for m in members]
                total = [sum(column) for column in zip(*parts, strict=True)]
                self.slices[peer, key] = total
                digest = zlib.crc32(repr(total).encode())
                self.tell(peer, ev.Summed(key, digest, float(sum(x * x for x in total))))
            case _:
                self.internal.append((peer, action))

    def tensor(self, peer, key):
        return self.slices[peer, key] if key.src is None else self.vectors[peer, key.round.stage][key.lo : key.hi]

    def deliver(self, index=0, **changes):
        """Let the message at `index` arrive, with some of its fields changed."""
        dst, src, body, tensor = self.waiting.pop(index)
        self.slices[dst, body.key] = tensor
        self.tell(dst, ev.Received(ev.Header("r", 0, 1, src), replace(body, **changes)))

    def deliver_all(self, choose=lambda n: 0):
        while self.waiting:
            self.deliver(choose(len(self.waiting)))

    def result(self, peer, group):
        keys = sorted(k for p, k in self.slices if p == peer and k.src is None and k.round.stage == group)
        return [x for key in keys for x in self.slices[peer, key]]

    def prepared(self):
        return {peer: body for peer, body in self.said if isinstance(body, ev.Prepared)}

    def expected(self, group):
        parts = [gradient(s, m, group.n_elements) for s in group.stages for m in range(self.n_microbatches)]
        return [sum(column) for column in zip(*parts, strict=True)]


def replicas(n, n_elements=7, n_microbatches=4, **options):
    """n replicas of one stage."""
    group = Group(0, (0,), n_elements)
    return Wire(dict.fromkeys(range(n), 0), (group,), n_microbatches, **options), group


def record(wire, *groups, verdict="apply", sq_norm=16.0, n_samples=4):
    rounds = tuple(RoundId(RoundKind.GRADIENT, group.stage, STEP, view=1) for group in groups)
    return ev.Record(STEP, rounds, sq_norm, n_samples, verdict)


# ----------------------------------------------------------------------------------------------------------- exchange


@given(
    st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=1, max_size=6))),
    st.integers(1, 9),
    st.integers(4, 40),
    st.data(),
)
def test_any_shares_and_any_order_of_arrival_give_all_members_the_whole_sum(who, n_elements, slice_bytes, data):
    """Microbatch m sits with member holder_of[m] and has m + 1 samples; the first n sit with one member each, since a
    plan gives everybody some. Members come to their end at any time between arrivals."""
    n, holder_of = who
    holder_of = [*range(n), *holder_of]
    wire, group = replicas(n, n_elements, len(holder_of), slice_bytes=slice_bytes)
    ready = list(range(n))
    while ready or wire.waiting:
        index = data.draw(st.integers(0, len(ready) + len(wire.waiting) - 1))
        if index < len(ready):
            peer = ready.pop(index)
            stage = wire.stage_of[peer]
            for m in [m for m in range(len(holder_of)) if holder_of[m] == peer]:
                wire.items[peer].append(m)
                wire.tell(peer, ev.Accumulated(STEP, stage, m, m + 1, None))
            wire.tell(peer, ev.Drained(STEP))
        else:
            wire.deliver(index - len(ready))
    total = wire.expected(group)
    prepared = wire.prepared()
    assert set(prepared) == set(range(n)) and len(wire.said) == n
    assert len({body.results for body in prepared.values()}) == 1
    result = prepared[0].results[0]
    assert result.n_samples == sum(m + 1 for m in range(len(holder_of)))
    assert result.sq_norm == sum(x * x for x in total)
    assert all(wire.result(peer, 0) == total for peer in range(n))


def test_every_member_owns_one_shard_and_sends_only_what_others_own():
    wire, _ = replicas(2, n_elements=7, slice_bytes=8)
    wire.compute(0, [0, 1])
    assert [(dst, body.key.lo, body.key.hi) for dst, _, body, _ in wire.waiting] == [(1, 3, 5), (1, 5, 7)]
    assert all(body.items == ((0, 0), (0, 1)) and body.n_samples == 2 for _, _, body, _ in wire.waiting)


def test_shards_go_to_all_owners_in_turn():
    wire, _ = replicas(3, n_elements=12, slice_bytes=8)
    wire.compute(0, [0])
    assert [dst for dst, *_ in wire.waiting] == [1, 2, 1, 2]


def test_a_single_member_is_prepared_at_once_and_sends_nothing():
    wire, group = replicas(1)
    wire.compute(0, [0, 1, 2, 3], n_samples=3, loss=2.0)
    assert not wire.waiting
    (prepared,) = wire.prepared().values()
    assert (prepared.results[0].tally, prepared.results[0].n_samples) == (ev.Tally(8.0, 12), 12)
    assert wire.result(0, 0) == wire.expected(group)


def test_more_members_than_numbers():
    wire, group = replicas(3, n_elements=2, n_microbatches=3)
    for peer in range(3):
        wire.compute(peer, [peer])
    wire.deliver_all()
    assert set(wire.prepared()) == {0, 1, 2}
    assert wire.result(2, 0) == wire.expected(group)


def test_nothing_is_added_up_before_the_own_set_is_final():
    wire, _ = replicas(2)
    wire.compute(0, [0, 1])
    wire.tell(1, ev.Accumulated(STEP, 0, 2, 1, None))
    wire.deliver_all()
    assert not wire.said and (1, ev.SliceKey(ROUND, 3, 5)) not in wire.slices
    wire.compute(1, [3])
    wire.items[1].insert(0, 2)
    wire.deliver_all()
    assert set(wire.prepared()) == {0, 1}


def test_losses_travel_with_prepared_and_are_forgotten_with_the_step():
    wire, _ = replicas(1, n_microbatches=2)
    wire.compute(0, [0, 1], n_samples=2, loss=1.5)
    (prepared,) = wire.prepared().values()
    assert prepared.results[0].tally == ev.Tally(3.0, 4)


def test_prepared_names_the_admission_of_the_view():
    wire, _ = replicas(1, n_microbatches=1)
    view = replace(wire.view, number=2, members=(ev.Member(0, 0, 6),))
    wire.tell(0, ev.ViewChanged(view))
    wire.compute(0, [0])
    assert wire.prepared()[0].admission == 6


# -------------------------------------------------------------------------------------------------------------- cover


def suspected(wire):
    return [body.reason for _, body in wire.said if isinstance(body, ev.Suspect)]


def test_an_overlap_is_reported_and_never_summed():
    wire, _ = replicas(2)
    wire.compute(0, [0, 1, 2])
    wire.compute(1, [2, 3])
    wire.deliver_all()
    assert not wire.prepared()
    assert suspected(wire) and all("(0, 2) is in the sets of members 0 and 1" in reason for reason in suspected(wire))


def test_a_hole_is_reported_and_never_summed():
    wire, _ = replicas(2)
    wire.compute(0, [0, 1])
    wire.compute(1, [3])
    wire.deliver_all()
    assert not wire.prepared()
    assert suspected(wire) and all("1 items are missing, first (0, 2)" in reason for reason in suspected(wire))


def test_a_foreign_item_is_reported():
    wire, _ = replicas(2)
    wire.compute(0, [0, 1])
    wire.compute(1, [2, 3])
    wire.deliver(0, items=((0, 0), (0, 1), (5, 5)))
    assert any("(5, 5) does not belong to the round" in reason for reason in suspected(wire))


@pytest.mark.parametrize(
    "cover",
    [
        ((0, 1), (((0, 0), (0, 1)), ((0, 1), (0, 2), (0, 3)))),
        ((0, 1), (((0, 0), (0, 1)), ((0, 3),))),
        ((0,), (((0, 0), (0, 1)),)),
        ((), ()),
        ((0,), (((0, 0), (0, 1)), ((0, 2), (0, 3)))),
    ],
    ids=["overlap", "hole", "member missing", "empty", "unnamed"],
)
def test_a_sum_with_a_wrong_cover_is_not_accepted(cover):
    wire, _ = replicas(2, slice_bytes=400)
    wire.compute(0, [0, 1])
    wire.compute(1, [2, 3])
    while not isinstance(wire.waiting[0][2], ev.Reduced):
        wire.deliver()
    dst = wire.waiting[0][0]
    wire.deliver(0, cover=cover)
    assert len(suspected(wire)) == 1
    wire.deliver_all()
    assert dst not in wire.prepared()


@pytest.mark.parametrize(
    "change",
    [
        {"round": RoundId(RoundKind.GRADIENT, 0, STEP, view=2)},
        {"round": RoundId(RoundKind.GRADIENT, 0, STEP, view=1, attempt=1)},
        {"round": RoundId(RoundKind.GRADIENT, 0, STEP + 2, view=1)},
        {"round": RoundId(RoundKind.GRADIENT, 9, STEP, view=1)},
        {"lo": 1},
        {"hi": 999},
    ],
    ids=str,
)
def test_slices_of_another_round_or_cut_are_ignored(change):
    wire, _ = replicas(2, slice_bytes=400)
    wire.compute(0, [0, 1])
    wire.compute(1, [2, 3])
    for _, _, body, _ in list(wire.waiting):
        wrong = replace(body, key=replace(body.key, **change))
        for receiver, sender in ((0, 1), (1, 0)):
            wire.tell(receiver, ev.Received(ev.Header("r", 0, 1, sender), wrong))
    assert not wire.said
    wire.deliver_all()
    assert set(wire.prepared()) == {0, 1}


def test_a_sum_counts_only_from_its_owner():
    wire, _ = replicas(3, n_elements=3, n_microbatches=3)
    for peer in range(3):
        wire.compute(peer, [peer])
    cover = ((0, 1, 2), (((0, 0),), ((0, 1),), ((0, 2),)))
    forged = ev.Reduced(ev.SliceKey(ROUND, 1, 2), cover, 99, 0, 0.0)
    wire.tell(0, ev.Received(ev.Header("r", 0, 1, 2), forged))
    wire.deliver_all()
    assert wire.prepared()[0] == wire.prepared()[1] == wire.prepared()[2]


def test_a_repeated_sum_changes_nothing():
    wire, _ = replicas(2)
    wire.compute(0, [0, 1])
    wire.compute(1, [2, 3])
    while wire.waiting:
        dst, src, body, _ = wire.waiting[0]
        wire.deliver()
        if isinstance(body, ev.Reduced):
            wire.tell(dst, ev.Received(ev.Header("r", 0, 1, src), body))
    assert sorted(peer for peer, _ in wire.said) == [0, 1]


def test_shards_of_the_next_step_may_come_early():
    """A neighbour that has applied step 0 is ahead by one step until the record is here too."""
    wire, group = replicas(2, slice_bytes=400, n_microbatches=2)
    wire.compute(0, [0])
    wire.compute(1, [1])
    wire.deliver_all()
    key = ev.SliceKey(RoundId(RoundKind.GRADIENT, 0, STEP + 1, view=1), 0, 3, 1)
    wire.slices[0, key] = [1, 2, 3]
    wire.tell(0, ev.Received(ev.Header("r", 0, 1, 1), ev.Shard(key, ((0, 1),), 1)))
    wire.tell(0, ev.Received(ev.Header("r", 0, 1, ev.COORDINATOR), ev.Committed(record(wire, group))))
    wire.tell(0, ev.Ran(Work(0, "U", None, 0, STEP), 0.0, 0.0))
    wire.tell(0, ev.Accumulated(STEP + 1, 0, 0, 1, None))
    wire.tell(0, ev.Drained(STEP + 1))
    assert [body.key.round.number for _, _, body, _ in wire.waiting] == [1, 1]
    assert [type(body) for _, _, body, _ in wire.waiting] == [ev.Shard, ev.Reduced]


# ---------------------------------------------------------------------------------------------------------- tied head


TIED = (Group(0, (0,), 5), Group(1, (1,), 3), Group(SHARED_TABLE, (0, 1), 4))


def tied_wire():
    """Two pipelines of two stages; peers 0 and 2 are stage 0, 1 and 3 stage 1. Three microbatches, two samples each."""
    wire = Wire({0: 0, 1: 1, 2: 0, 3: 1}, TIED, 3)
    for peer in wire.stage_of:
        wire.compute(peer, [0, 1] if peer < 2 else [2], n_samples=2)
    return wire


@given(st.randoms(use_true_random=False))
def test_a_tied_table_is_summed_over_both_ends(dice):
    wire = tied_wire()
    wire.deliver_all(choose=dice.randrange)
    prepared = wire.prepared()
    assert set(prepared) == {0, 1, 2, 3}
    for peer, stage in wire.stage_of.items():
        for group in (TIED[stage], TIED[2]):
            assert wire.result(peer, group.stage) == wire.expected(group)
    assert {result.n_samples for body in prepared.values() for result in body.results} == {6}


def test_a_tied_table_counts_once_in_the_norm():
    wire = tied_wire()
    wire.deliver_all()
    terms = CoordinatorConfig("r", "f", wire.stage_of, 2, 0, 0, 5, SeqLengths(8), "stop", 1.0, 4.0)
    coordinator = Coordinator(terms, TwoPhaseCommit(terms))
    for peer, stage in wire.stage_of.items():
        coordinator.handle(0.0, ev.Received(ev.Header("r", 0, 0, peer), ev.Hello(peer, stage, "f", "")))
        coordinator.handle(0.0, ev.Received(ev.Header("r", 0, 0, peer), ev.Profiled({}, 0)))
    coordinator.handle(0.0, ev.Persisted("view"))
    actions = []
    for peer, prepared in wire.prepared().items():
        actions = coordinator.handle(0.0, ev.Received(ev.Header("r", 0, 1, peer), prepared))
    (persist,) = actions
    assert persist.value[0]["record"]["sq_norm"] == sum(x * x for group in TIED for x in wire.expected(group))
    assert persist.value[0]["record"]["n_samples"] == 6


# ------------------------------------------------------------------------------------------------------------- commit


def prepared_pair():
    wire, group = replicas(2)
    wire.compute(0, [0, 1])
    wire.compute(1, [2, 3])
    wire.deliver_all()
    assert set(wire.prepared()) == {0, 1}
    return wire, group


def commit(wire, peer, value):
    wire.tell(peer, ev.Received(ev.Header("r", 0, 1, ev.COORDINATOR), ev.Committed(value)))


def test_nothing_is_applied_without_a_record():
    wire, group = prepared_pair()
    assert not wire.internal
    commit(wire, 0, record(wire, group))
    assert wire.internal == [(0, ev.Run(Work(0, "U", None, 0, STEP), 0.25, (ROUND,)))]


def test_the_step_ends_when_the_update_ran():
    wire, group = prepared_pair()
    commit(wire, 0, record(wire, group))
    wire.tell(0, ev.Ran(Work(0, "U", None, 0, STEP), 0.0, 1.0))
    assert wire.internal[1:] == [(0, ev.Free(STEP, (ROUND,))), (0, ev.Updated(0, 1))]


def test_what_is_fetched_after_a_return_outlives_the_update_that_ran_meanwhile():
    """A peer is evicted while it applies step 0, and is back before that is done. The round of step 1 was under way
    when it left, and may be the one whose result it fetches now."""
    wire, group = prepared_pair()
    commit(wire, 0, record(wire, group))
    key = ev.SliceKey(RoundId(RoundKind.GRADIENT, 0, 1, view=1), 0, 1, 1)
    wire.tell(0, ev.Received(ev.Header("r", 0, 1, 1), ev.Shard(key, (), 0)))
    without = replace(wire.view, number=2, members=wire.view.members[1:], n_committed=1)
    wire.tell(0, ev.Evicted(without))
    back = replace(without, number=3, members=wire.view.members, joining=(0,))
    wire.tell(0, ev.ViewChanged(back))
    wire.internal.clear()
    wire.tell(0, ev.Ran(Work(0, "U", None, 0, STEP), 0.0, 1.0))
    assert wire.internal == [(0, ev.Free(STEP, (ROUND,)))]


def test_a_skipped_step_advances_without_an_update():
    wire, group = prepared_pair()
    commit(wire, 1, record(wire, group, verdict="skip", sq_norm=math.inf))
    work = Work(0, "U", None, 1, STEP)
    assert wire.internal == [(1, ev.Run(work, 0.0, ()))]
    wire.tell(1, ev.Ran(work, 0.0, 1.0))
    assert wire.internal[1:] == [(1, ev.Free(STEP, (ROUND,))), (1, ev.Updated(0, 1))]


@pytest.mark.parametrize("step", [STEP - 1, STEP + 1])
def test_a_record_of_another_step_is_ignored(step):
    wire, group = prepared_pair()
    commit(wire, 0, replace(record(wire, group), step=step))
    assert not wire.internal


def test_a_record_is_repeated_in_vain_after_the_update():
    wire, group = prepared_pair()
    commit(wire, 0, record(wire, group))
    wire.tell(0, ev.Ran(Work(0, "U", None, 0, STEP), 0.0, 1.0))
    before = list(wire.internal)
    commit(wire, 0, record(wire, group))
    assert wire.internal == before


@pytest.mark.parametrize(
    ("sq_norm", "n_samples", "clip_norm", "scale"),
    [
        (16.0, 4, 0.0, 0.25),  # no clipping: the mean
        (16.0, 4, 2.0, 0.25),  # the mean gradient has norm 1: below
        (16.0, 4, 1.0, 0.25),
        (16.0, 4, 0.5, 0.125),  # above: half of the mean
        (0.0, 4, 0.5, 0.25),
        (math.inf, 4, 0.5, 0.0),
    ],
)
def test_update_scale_is_the_mean_clipped_by_the_norm_of_the_mean(sq_norm, n_samples, clip_norm, scale):
    assert update_scale(sq_norm, n_samples, clip_norm) == scale


def test_a_record_that_comes_twice_is_applied_once():
    wire, group = prepared_pair()
    commit(wire, 0, record(wire, group))
    commit(wire, 0, record(wire, group))
    assert wire.internal == [(0, ev.Run(Work(0, "U", None, 0, STEP), 0.25, (ROUND,)))]


def test_a_record_of_another_round_is_reported_and_not_applied():
    wire, group = prepared_pair()
    value = record(wire, group)
    commit(wire, 0, replace(value, rounds=tuple(replace(round_, attempt=1) for round_ in value.rounds)))
    assert not wire.internal
    assert suspected(wire)


def test_a_coordinator_that_was_started_again_hears_the_held_out_losses_of_each_version_that_may_be_awaited():
    """With a delay the rows of the last two steps may wait at once: no further step is committed behind them."""
    machine = AllReduce(0, 0, (), 1, 8, delay=Delay(1))
    view = ev.View(1, 1, 0, (ev.Member(0, 0, 1),), (1,), STEP)
    machine.handle(0.0, ev.ViewChanged(view))
    for step in (5, 7, 8):
        machine.handle(0.0, ev.Evaluated(step, 0, 2, float(step)))
    again = [send.body for send in machine.handle(0.0, ev.LinkChanged(ev.COORDINATOR, True))]
    assert again[:-2] == [ev.HeldOutMeasured(6, ((0, 2, 7.0),)), ev.HeldOutMeasured(7, ((0, 2, 8.0),))]
