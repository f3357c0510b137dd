"""The rule by which peers change stages, from one table; its invariants in numbers of peers; the stage of a joiner."""

import json
import math
import statistics
from pathlib import Path

import pytest
from experiments.reproduce.counts import RANDOM, SMALLEST, Rules, queues, rebalanced, replay
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxdt.membership.rebalance_api import ByNumber, Move
from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.sim.availability import load
from jaxdt.wiring.rebalance import Rebalancer, decide

COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=12)
LOADS = st.builds(ev.Load, st.floats(0, 50), st.floats(0, 1))
TABLES = st.lists(st.dictionaries(st.integers(0, 1000), LOADS, max_size=5), min_size=1, max_size=5).map(
    lambda rows: [{1001 * stage + peer: one for peer, one in row.items()} for stage, row in enumerate(rows)]
)
TRACES = sorted((Path(__file__).resolve().parents[2] / "configs/reproduce/traces").glob("*.json"))


def balance(counts):
    return math.ceil(sum(abs(n - sum(counts) / len(counts)) for n in counts) / 2)


# ----------------------------------------------------------------------------------------------------------- the rule


@example([{0: ev.Load(0.0, 1.0)}, {1001: ev.Load(0.0, 0.0), 1002: ev.Load(0.0, 0.0)}, {2002: ev.Load(1.0, 0.5)}], 2)
@given(TABLES, st.integers(1, 4))
def test_at_most_so_many_moves_each_of_another_peer_and_never_the_last_one(table, n_moves):
    moves = decide(table, n_moves)
    assert len(moves) <= n_moves and len({move.peer for move in moves}) == len(moves)
    assert all(move.peer in table[move.src] and move.src != move.dst for move in moves)
    for stage, own in enumerate(table):
        assert not own or sum(move.src == stage for move in moves) < len(own)


@given(TABLES, st.integers(1, 4))
def test_the_slowest_stage_is_never_slower_after_the_moves(table, n_moves):
    def least_rate(moves):
        rates = []
        for stage, own in enumerate(table):
            n = len(own) + sum(m.dst == stage for m in moves) - sum(m.src == stage for m in moves)
            busy = sum(one.busy for one in own.values())
            rates.append(n / busy if busy and n else math.inf if n else 0.0)
        return min(rates)

    assert least_rate(decide(table, n_moves)) >= least_rate([])


def test_the_idlest_peer_of_the_stage_that_can_best_do_without_it_goes_where_work_waits():
    idle = {3: ev.Load(1.0, 0.4), 4: ev.Load(0.9, 0.4), 5: ev.Load(0.9, 0.2)}
    table = [{0: ev.Load(9.0, 1.0)}, {1: ev.Load(1.0, 0.5), 2: ev.Load(0.5, 0.5)}, idle]
    assert decide(table) == [Move(4, 2, 0)]
    assert decide(table, before=[Move(9, 0, 2)]) == [], "it would undo what was decided a period ago"


def test_nothing_moves_for_small_differences_or_where_it_would_only_swap_who_is_slowest():
    assert decide([{0: ev.Load(1.4, 1.0)}, {1: ev.Load(0.3, 0.3), 2: ev.Load(0.3, 0.3)}]) == []
    assert decide(queues([3, 2])) == []
    assert decide(queues([4, 2])) == [Move(0, 0, 1)]


def test_idle_time_that_all_stages_share_changes_nothing():
    """Half of every step is averaging, in which nobody has a queue."""
    table = [{peer: ev.Load(one.queue / 2, one.busy / 2) for peer, one in own.items()} for own in queues([3, 2])]
    assert decide(table) == []


# --------------------------------------------------------------------------------------------------- numbers of peers


@given(COUNTS, st.integers(1, 4))
def test_numbers_of_peers_even_out_in_time_and_then_nothing_moves(counts, n_moves):
    periods = balance(counts)
    for _ in range(periods):
        after = rebalanced(counts, n_moves)
        assert sum(after) == sum(counts)
        assert min(after) >= min(counts)
        assert sum(abs(a - b) for a, b in zip(after, counts, strict=True)) <= 2 * n_moves
        counts = after
    assert max(counts) - min(counts) <= 1
    assert rebalanced(counts, n_moves) == counts


@given(COUNTS)
def test_enough_moves_a_period_do_it_in_one(counts):
    many = rebalanced(counts, 1000)
    assert max(many) - min(many) <= 1


@given(st.lists(st.integers(0, 6), min_size=2, max_size=6).filter(lambda counts: sum(counts) >= len(counts)))
def test_a_stage_without_peers_gets_one_first(counts):
    periods = 0
    while min(counts) == 0:
        after = rebalanced(counts)
        assert sum(n == 0 for n in after) == sum(n == 0 for n in counts) - 1
        counts, periods = after, periods + 1
    assert periods <= balance(counts) + len(counts)


# -------------------------------------------------------------------------------------------------------- the machine


def stages_of(counts):
    numbers = iter(range(sum(counts)))
    return [[next(numbers) for _ in range(n)] for n in counts]


def told(counts, now_s, rebalancer):
    for own in queues(counts):
        for peer, one in own.items():
            rebalancer.report(now_s, peer, one)


def test_a_decision_every_period_of_fresh_reports():
    rebalancer, counts = Rebalancer(60.0), [4, 1]
    stages = stages_of(counts)
    told(counts, 0.0, rebalancer)
    assert rebalancer.moves(0.0, stages, range(5)) == [], "the period begins"
    assert rebalancer.moves(59.0, stages, range(5)) == []
    assert rebalancer.moves(60.5, stages, range(5)) == [], "reports that are more than a period old"
    told(counts, 110.0, rebalancer)
    assert rebalancer.moves(120.0, stages, range(5)) == []
    assert rebalancer.moves(120.5, stages, range(5)) == [Move(0, 0, 1)]
    told(counts, 170.0, rebalancer)
    assert rebalancer.moves(181.0, stages, [1, 2, 4]) == [Move(1, 0, 1)], "peer 0 is not at work"


def test_who_is_on_its_way_will_share_the_load_and_does_not_move():
    stages = [[0, 1, 2, 3], [4, 5]]
    for said, moves in (((0, 1, 2, 3), [Move(0, 0, 1)]), ((2, 3), [Move(2, 0, 1)])):
        rebalancer = Rebalancer(60.0)
        rebalancer.moves(0.0, stages, range(5))
        rebalancer.report(60.0, 4, ev.Load(20.0, 1.0))
        for peer in said:
            rebalancer.report(60.0, peer, ev.Load(0.25, 0.25))
        assert rebalancer.moves(60.0, stages, range(5)) == moves
    rebalancer.report(60.0, 5, ev.Load(0.0, 0.0))
    assert rebalancer.stage_for([[0, 1, 2, 3], [4, 5]]) == 1


def test_who_joins_is_not_misled_by_queues_of_stages_that_keep_pace():
    """Peer 3 has been killed. Its stage has one peer for the other's two, and all reports are from before that."""
    rebalancer = Rebalancer(60.0)
    for peer, queue in ((0, 3.0), (2, 3.0), (1, 2.0)):
        rebalancer.report(1.0, peer, ev.Load(queue, 0.4))
    assert rebalancer.stage_for([[0, 2], [1]]) == 1
    assert rebalancer.better([[0, 2], [1, 4]], 4) is None
    assert rebalancer.better([[0, 2, 4], [1]], 4) == 1
    assert rebalancer.stage_for([[0, 2], [1, 4]]) == 0, "now the queues decide"


def test_joiners_that_come_at_once_are_for_different_stages():
    rebalancer = Rebalancer(60.0)
    for peer in range(4):
        rebalancer.report(1.0, peer, ev.Load(5.0, 0.9))
    assert rebalancer.stage_for([[0, 1], [2, 3]]) == 0
    assert rebalancer.stage_for([[0, 1, 4], [2, 3]]) == 1


@pytest.mark.parametrize("balance", [ByNumber(), Rebalancer(60.0)], ids=["by number", "no reports"])
def test_without_reports_who_joins_is_for_a_vacant_or_the_smallest_stage(balance):
    assert balance.stage_for(stages_of([3, 2, 2])) == 1
    assert balance.stage_for(stages_of([3, 2, 0])) == 2
    assert balance.better(stages_of([3, 2]), 0) is None, "without it both would have 2"
    assert balance.better(stages_of([4, 2]), 0) == 1
    assert balance.better(stages_of([2, 0]), 0) == 1
    assert balance.better(stages_of([1, 0]), 0) is None, "its own stage would have nobody then"
    assert balance.moves(1000.0, stages_of([9, 1]), range(10)) == []


def test_who_joins_is_for_the_most_loaded_stage():
    rebalancer, stages = Rebalancer(60.0), stages_of([2, 2, 3])
    for peer in (0, 1, 2, 3):
        rebalancer.report(0.0, peer, ev.Load(0.5, 0.5))
    for peer in (4, 5):  # the largest stage has most to do; peer 6 is on its way to it
        rebalancer.report(0.0, peer, ev.Load(5.0, 1.0))
    assert rebalancer.stage_for(stages) == 2
    assert rebalancer.stage_for([*stages[:2], []]) == 2
    assert rebalancer.better(stages, 6) is None
    assert rebalancer.better([stages[0], stages[1] + [6], [4, 5]], 6) == 2


# ------------------------------------------------------------------------------------------------------------- traces


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_on_recorded_traces_a_shorter_period_is_better_and_none_is_worst(path):
    """SWARM Table 5's order, in the mean over seeds; and within 3 % of the optimum."""
    trace, end_s = load(path), json.loads(path.read_text())["duration_s"]

    def mean(period_s, join):
        return statistics.fmean(replay(trace, end_s, 1, Rules(4, period_s, join), seed).share() for seed in range(10))

    for join in (RANDOM, SMALLEST):
        none, slow, fast = (mean(period_s, join) for period_s in (0.0, 300.0, 60.0))
        assert none <= slow <= fast <= 1.0 and fast >= 0.97


def test_three_traces_are_here():
    assert len(TRACES) == 3


def test_a_trace_with_too_few_nodes_is_refused():
    with pytest.raises(BadInput, match="never has the 16 nodes that 4 stages begin with"):
        replay([(0.0, 15)], 10.0, 1, Rules(4, 0.0, RANDOM), 0)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(0, 100))
def test_nobody_does_better_than_the_optimum(nodes, seed):
    trace = [(100.0 * k, n) for k, n in enumerate([20, *nodes])]
    one = replay(trace, 5000.0, 1, Rules(4, 60.0, RANDOM), seed)
    assert all(got <= best for got, best in zip(one.throughput, one.best, strict=True))
    assert list(one.t_s) == sorted(one.t_s) and one.t_s[-1] <= one.end_s
