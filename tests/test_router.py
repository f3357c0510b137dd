"""Stochastic wiring's choice of peers as property tests. The bound on a share follows from the queue: while a peer is
chosen c times the least priority moves by at least (c - 1) of its seconds, so every other peer is chosen at least once
for each of its own seconds in that, less one: c <= n w + 1 + K w with K peers and w the peer's share of the speed."""

import random

from hypothesis import given
from hypothesis import strategies as st

from jaxdt.core.events import NOBODY
from jaxdt.wiring.router import BANNED, Ema, Measured, Router, StageQueue

costs = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=8)


def queue_of(service_s, seed=0):
    """A stage whose peers' speeds are known."""
    queue = StageQueue(random.Random(seed))
    for peer, seconds in enumerate(service_s):
        queue.add(peer)
        queue.measured(peer, "F", 0.0, seconds)
    return queue


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
        before = queue.priorities
        if peer < len(service_s) and peer not in banned:
            queue.ban(peer)
            banned.add(peer)
        chosen = queue.choose()
        assert chosen not in banned
        assert (chosen is None) == (len(banned) == len(service_s))
        after = queue.priorities
        assert all(after[p] >= before[p] for p in after if p not in banned)


@given(costs, st.floats(0.05, 20.0), st.integers(0, 200), st.integers(1, 200))
def test_a_newcomer_is_not_flooded(service_s, own_s, n_before, n):
    queue = queue_of(service_s)
    for _ in range(n_before):
        queue.choose()
    newcomer = len(service_s)
    queue.add(newcomer)
    queue.measured(newcomer, "F", 0.0, own_s)
    chosen = [queue.choose() for _ in range(n)]
    w = weights([*service_s, own_s])[newcomer]
    assert chosen.count(newcomer) <= n * w + 1.0 + (len(service_s) + 1) * w


def test_a_banned_peer_comes_back_at_the_minimum():
    queue = queue_of([1.0, 2.0])
    for _ in range(10):
        queue.choose()
    queue.ban(0)
    assert queue.priorities[0] == BANNED
    least = queue.priorities[1]
    queue.add(0)
    assert queue.priorities[0] == least


def test_one_who_was_never_measured_is_charged_the_mean_of_its_stage():
    queue = queue_of([1.0, 3.0])
    queue.add(2)
    before = queue.priorities[2]
    while queue.choose() != 2:
        pass
    assert queue.priorities[2] - before == 2.0


def test_the_average_is_corrected_for_its_start():
    ema = Ema()
    for _ in range(3):
        ema.add(5.0)
    assert abs(ema.value - 5.0) < 1e-12


def test_a_queue_at_the_peer_is_counted_once():
    """Four forwards handed over at once to a peer that takes 1 s each: each took 1 s, not 1, 2, 3 and 4."""
    one = Measured()
    for k in range(4):
        one.add("F", 0.0, 1.0 + k)
    assert abs(one.charge_s - 1.0) < 1e-12


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4))
def test_equal_seeds_and_events_give_equal_routes(seed, n_stages, n_peers):
    def routes():
        router = Router(n_stages, str(seed))
        for s in range(n_stages):
            for p in range(n_peers):
                router.stages[s].add(s * n_peers + p)
        return [router.route(0, n_stages - 1) for _ in range(20)]

    assert routes() == routes()
    assert all(peer // n_peers == s for route in routes() for s, peer in enumerate(route))


def test_no_route_while_a_stage_has_nobody_and_nothing_is_charged():
    router = Router(2, "0")
    router.stages[0].add(0)
    assert router.route(0, 1) is None
    assert router.stages[0].priorities == {0: 0.0}
    router.stages[1].add(1)
    assert router.route(0, 1) == (0, 1)


def test_a_route_of_some_stages_charges_only_them():
    router = Router(3, "0")
    for stage in (0, 1, 2):
        router.stages[stage].add(10 + stage)
    assert router.route(1, 1) == (NOBODY, 11, NOBODY)
    assert [list(stage.priorities.values()) for stage in router.stages] == [[0.0], [1.0], [0.0]]
