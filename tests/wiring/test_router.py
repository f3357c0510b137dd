"""Stochastic wiring's choice of peers as property tests. The bound on a share follows from the queue: while a peer is
chosen c times the least priority moves by at least (c - 1) of its seconds, so every other peer is chosen at least once
for each of its own seconds in that, less one: c <= n w + 1 + K w with K peers and w the peer's share of the speed."""

import random

from hypothesis import given
from hypothesis import strategies as st

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import NO_PEER
from jaxdt.wiring.compute_slot import ServiceTime
from jaxdt.wiring.dispatcher import Dispatcher
from jaxdt.wiring.measured_routes import BANNED, Ema, MeasuredRoutes, StageQueue
from jaxdt.wiring.recovery import Task

costs = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=8)


def queue_of(service_s, seed=0):
    """A stage whose peers' speeds are known."""
    queue = StageQueue(random.Random(seed))
    for peer, seconds in enumerate(service_s):
        queue.add(peer)
        queue.measured(peer, "F", seconds)
    return queue


def priorities(queue):
    return dict(queue._priority)


def weights(service_s):
    total = sum(1 / c for c in service_s)
    return [1 / c / total for c in service_s]


@given(costs, st.integers(1, 400), st.integers(0, 5))
def test_shares_go_with_speed(service_s, n, seed):
    queue = queue_of(service_s, seed)
    chosen = [queue.choose() for _ in range(n)]
    for peer, w in enumerate(weights(service_s)):
        assert abs(chosen.count(peer) - n * w) <= 1.0 + len(service_s) * w


@given(costs, st.lists(st.integers(0, 7), max_size=60))
def test_priorities_of_live_peers_never_fall_and_banned_ones_are_never_chosen(service_s, bans):
    queue = queue_of(service_s)
    banned = set()
    for peer in bans:
        before = priorities(queue)
        if peer < len(service_s) and peer not in banned:
            queue.ban(peer)
            banned.add(peer)
        chosen = queue.choose()
        assert chosen not in banned
        assert (chosen is None) == (len(banned) == len(service_s))
        after = priorities(queue)
        assert all(after[p] >= before[p] for p in after if p not in banned)


@given(costs, st.floats(0.05, 20.0), st.integers(0, 200), st.integers(1, 200))
def test_a_newcomer_is_not_flooded(service_s, own_s, n_before, n):
    queue = queue_of(service_s)
    for _ in range(n_before):
        queue.choose()
    newcomer = len(service_s)
    queue.add(newcomer)
    queue.measured(newcomer, "F", own_s)
    chosen = [queue.choose() for _ in range(n)]
    w = weights([*service_s, own_s])[newcomer]
    assert chosen.count(newcomer) <= n * w + 1.0 + (len(service_s) + 1) * w


def test_a_banned_peer_comes_back_at_the_minimum():
    queue = queue_of([1.0, 2.0])
    for _ in range(10):
        queue.choose()
    queue.ban(0)
    assert priorities(queue)[0] == BANNED
    least = priorities(queue)[1]
    queue.add(0)
    assert priorities(queue)[0] == least


def test_one_who_was_never_measured_is_charged_the_mean_of_its_stage():
    queue = queue_of([1.0, 3.0])
    queue.add(2)
    before = priorities(queue)[2]
    while queue.choose() != 2:
        pass
    assert priorities(queue)[2] - before == 2.0


def test_the_average_is_corrected_for_its_start():
    ema = Ema()
    for _ in range(3):
        ema.add(5.0)
    assert abs(ema.value - 5.0) < 1e-12


class Recorded:
    """Routes through one stage of one peer that keep what was measured."""

    in_flight_limit = 4

    def __init__(self):
        self.seconds = []

    def priority(self, kind, microbatch):
        return ()

    def routes(self, kind, microbatches, lo, hi):
        return [(7,) for _ in microbatches]

    def measured(self, stage, peer, kind, seconds):
        self.seconds.append(seconds)

    def reroute(self, stage, peer):
        return 8


def test_a_queue_at_the_peer_is_counted_once_whoever_filled_it():
    """A peer that takes 1 s for a backward gets one from us, one from another router and two from us, all at once: each
    of ours took 1 s, not 1, 3 and 4; nor does the time count in which it had nothing to do before."""
    routes, service_time = Recorded(), ServiceTime()
    service_time.gap_s(2.0)
    dispatcher = Dispatcher(routes)
    dispatcher.begin([Task("F", m, 0, 0) for m in range(3)])
    assert len(dispatcher.next(10.0)) == 3
    for ended_s, m in ((11.0, 0), (12.0, None), (13.0, 1), (14.0, 2)):
        gap_s = service_time.gap_s(ended_s)
        if m is not None:
            dispatcher.progress(ended_s, 7, ev.Progress(0, "B", 0, m, gap_s))
    assert routes.seconds == [1.0, 1.0, 1.0]


def test_a_stuck_forward_gets_another_peer_once_and_both_are_measured_by_their_own_time():
    routes = Recorded()
    routes.routes = lambda kind, microbatches, lo, hi: [(7, 9)]
    dispatcher = Dispatcher(routes)
    dispatcher.begin([Task("F", 0, 0, 1)])
    dispatcher.next(10.0)
    assert dispatcher.reroute(20.0, 0, 1, 9) is None  # nobody chooses between two results of the last stage
    assert dispatcher.reroute(20.0, 0, 0, 7) == (Task("F", 0, 0, 1), 8)
    assert dispatcher.reroute(20.0, 0, 0, 7) is None
    dispatcher.progress(21.0, 8, ev.Progress(0, "F", 0, 0, 30.0))
    dispatcher.progress(40.0, 7, ev.Progress(0, "F", 0, 0, 30.0))
    assert routes.seconds == [1.0, 30.0]


def test_a_stuck_peer_is_chosen_again_once_it_has_done_a_work_or_if_there_is_no_other():
    queue = queue_of([1.0, 1.0, 1.0])
    assert {queue.choose_other(0) for _ in range(4)} == {1, 2}
    assert 0 not in {queue.choose() for _ in range(4)}
    assert queue.choose_other(1) == 2 and queue.choose_other(2) is None
    assert {queue.choose() for _ in range(9)} == {0, 1, 2}
    queue.measured(0, "F", 1.0)
    assert {queue.choose() for _ in range(4)} == {0}


class Router(MeasuredRoutes):
    """One whose microbatches all begin together."""

    def __init__(self, n_stages, seed):
        super().__init__(n_stages, 1, 64, 64, seed)
        self._turn = 64

    def routes_of(self, lo, hi, n):
        return self.routes("F", range(n), lo, hi)


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4))
def test_equal_seeds_and_events_give_equal_routes(seed, n_stages, n_peers):
    def routes():
        router = Router(n_stages, str(seed))
        for s in range(n_stages):
            for p in range(n_peers):
                router.stages[s].add(s * n_peers + p)
        return [route for n in (1, 3, 7) for route in router.routes_of(0, n_stages - 1, n)]

    assert routes() == routes()
    assert all(peer // n_peers == s for route in routes() for s, peer in enumerate(route))


def test_no_route_while_a_stage_has_nobody_and_nothing_is_charged():
    router = Router(2, "0")
    router.stages[0].add(0)
    assert router.routes_of(0, 1, 3) == []
    assert priorities(router.stages[0]) == {0: 0.0}
    router.stages[1].add(1)
    assert router.routes_of(0, 1, 2) == [(0, 1), (0, 1)]


def test_a_route_of_some_stages_charges_only_them():
    router = Router(3, "0")
    for stage in (0, 1, 2):
        router.stages[stage].add(10 + stage)
    assert router.routes_of(1, 1, 1) == [(NO_PEER, 11, NO_PEER)]
    assert [list(priorities(stage).values()) for stage in router.stages] == [[0.0], [1.0], [0.0]]


def test_routes_that_begin_together_are_the_same_pipelines_whoever_steers():
    """Else two peers may send to one at the same moment, and none to another."""
    for seed in range(5):
        router = Router(3, str(seed))
        for peer in range(12):
            router.stages[peer % 3].add(peer)
        assert router.routes_of(0, 2, 4) == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]


def fleet(*n_replicas, n_routers, window=64, n_microbatches):
    """Routers of a view with so many peers at each stage, all equally fast, as n_microbatches see them."""
    stages = [stage for stage, n in enumerate(n_replicas) for _ in range(n)]
    members = tuple(ev.Member(peer, stage, 1) for peer, stage in enumerate(stages))
    view = ev.View(1, 0, 0, members, (1,) * len(n_replicas), 0)
    all_routes = [MeasuredRoutes(len(n_replicas), n_routers, window, n_microbatches, str(k)) for k in range(n_routers)]
    for routes in all_routes:
        routes.adopt(view, [member.peer for member in members])
        routes.begin_step(view)
    return all_routes, stages


replicas = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(replicas, st.integers(1, 5), st.integers(1, 40), st.integers(1, 4))
def test_together_routers_give_equal_peers_what_one_would(n_replicas, n_routers, n_microbatches, n_steps):
    """In every step: nobody gets more than the microbatches of its stage over its peers, rounded up."""
    all_routes, stages = fleet(*n_replicas, n_routers=n_routers, n_microbatches=n_microbatches)
    for _ in range(n_steps):
        got = dict.fromkeys(range(len(stages)), 0)
        for who, routes in enumerate(all_routes):
            mine = [m for m in range(n_microbatches) if routes.owning_router("F", m) == who]
            while mine:
                begun = routes.routes("F", mine, 0, len(n_replicas) - 1)
                mine = mine[len(begun) :]
                for peer in (peer for route in begun for peer in route):
                    got[peer] += 1
        assert all(n <= -(-n_microbatches // n_replicas[stages[peer]]) for peer, n in got.items())


def test_few_microbatches_are_steered_by_few_and_the_window_is_theirs():
    for n_microbatches, n_steer in ((4, 1), (5, 2), (12, 3), (13, 4), (100, 4)):
        (routes, *_), _ = fleet(4, 4, n_routers=4, window=32, n_microbatches=n_microbatches)
        assert {routes.owning_router("F", m) for m in range(n_microbatches)} == set(range(n_steer))
        assert routes.in_flight_limit == 32 // n_steer // 4 * 4
