"""How many leases a worker needs, and to whom the last tasks of a batch go."""

import random

import pytest

from jaxdt.run.work import WorkKind
from jaxdt.wiring.pool.task_times import LEASES_MAX, LEASES_MIN, TaskTimes, others_are_sooner, share_of

WORKER, OTHER = 1, 2


def times(work_s, travel_s):
    found = TaskTimes()
    for _ in range(3):
        found.computed(WORKER, WorkKind.FORWARD, work_s)
        found.travelled(WORKER, WorkKind.FORWARD, travel_s)
    return found


@pytest.mark.parametrize(
    ("work_s", "travel_s", "n_leases"),
    [(1.0, 0.01, 2), (1.0, 0.99, 2), (1.0, 2.5, 4), (0.05, 0.2, 5), (0.001, 10.0, LEASES_MAX), (0.0, 1.0, LEASES_MIN)],
)
def test_a_worker_computes_while_the_next_task_travels(work_s, travel_s, n_leases):
    assert times(work_s, travel_s).n_leases(WORKER, WorkKind.FORWARD) == n_leases


def test_a_task_that_waited_on_its_link_for_another_one_does_not_count():
    found = times(1.0, 5.0)
    found.travelled(WORKER, WorkKind.FORWARD, 1.5)
    assert found.n_leases(WORKER, WorkKind.FORWARD) == 3
    assert found.n_leases(OTHER, WorkKind.FORWARD) == LEASES_MIN


def test_what_is_not_known_of_a_client_is_as_with_the_others():
    found = times(1.0, 0.0)
    found.computed(WORKER, WorkKind.BACKWARD, 3.0)
    assert found.microbatch_s(WORKER) == found.microbatch_s(OTHER) == 4.0
    found.computed(OTHER, WorkKind.BACKWARD, 6.0)
    assert found.microbatch_s(OTHER) == 7.0
    found.forget(WORKER)
    assert found.microbatch_s(WORKER) == 6.0  # of backwards alone anything is known


def test_a_slow_client_leaves_the_last_tasks_to_fast_ones():
    seconds = {1: 1.0, 2: 4.0}
    assert others_are_sooner(2, {1: 1, 2: 0}, seconds, n_left=2)
    assert not others_are_sooner(2, {1: 1, 2: 0}, seconds, n_left=3)
    assert not others_are_sooner(1, {1: 1, 2: 0}, seconds, n_left=1)


def test_some_client_always_takes_the_next_task():
    """Else a batch would never end."""
    rng = random.Random("last tasks")
    for _ in range(500):
        clients = range(rng.randint(1, 6))
        held = {client: rng.randint(0, 9) for client in clients}
        seconds = {client: rng.choice((0.1, 0.3, 1.0, rng.uniform(0.1, 2.0))) for client in clients}
        first = min(clients, key=lambda client: (held[client] + 1) * seconds[client])
        assert not others_are_sooner(first, held, seconds, n_left=1)


def test_the_batch_ends_no_later_than_with_tasks_for_whoever_is_free():
    """Independent tasks one by one: against greedy clients that take a task whenever they have none."""
    rng = random.Random("makespan")
    ends = [(end_s(seconds, 12, True), end_s(seconds, 12, False)) for seconds in drawn(rng, 100)]
    assert all(chosen <= greedy + 1e-9 for chosen, greedy in ends)
    assert sum(chosen < greedy - 1e-9 for chosen, greedy in ends) > 20


def drawn(rng, n):
    return [{client: rng.uniform(0.2, 2.0) for client in range(4)} for _ in range(n)]


def end_s(seconds, n_left, looks_ahead):
    """When all tasks are done. free_s: when each client is done with what it has taken."""
    free_s, now_s = dict.fromkeys(seconds, 0.0), 0.0
    while n_left:
        for client in sorted(seconds):
            held = {other: int(free_s[other] > now_s) for other in seconds}
            refuses = looks_ahead and n_left and others_are_sooner(client, held, seconds, n_left)
            if n_left and not held[client] and not refuses:
                free_s[client] = now_s + seconds[client]
                n_left -= 1
        now_s = min((at_s for at_s in free_s.values() if at_s > now_s), default=now_s)
    return max(free_s.values())


def test_equal_clients_leave_each_other_their_tasks():
    for n_left in range(9):
        assert share_of([(n_left / 2, 1.0)] * 2, [(0.0, 1.0)] * 2, n_left) == 0


def test_stolen_tasks_let_a_step_end_sooner_and_never_later():
    """The end of greedy clients with and without the thief's share."""
    rng = random.Random("steals")
    n_sooner = 0
    for _ in range(500):
        own, thieves = ([(rng.uniform(0, 9), rng.uniform(0.2, 2.0)) for _ in range(rng.randint(1, 4))] for _ in "ab")
        n_left = rng.randint(0, 20)
        n_stolen = share_of(thieves, own, n_left)
        kept_s = greedy_end_s(own, n_left)
        shared_s = max(greedy_end_s(own, n_left - n_stolen), greedy_end_s(thieves, n_stolen))
        assert shared_s <= kept_s + 1e-9
        n_sooner += shared_s < kept_s - 1e-9
    assert n_sooner > 100


def greedy_end_s(clients, n):
    """When the last of n microbatches is done, each by whoever is done with it first; what else they do ends before."""
    busy = list(clients)
    last_s = 0.0
    for _ in range(n):
        first = min(range(len(busy)), key=lambda i: sum(busy[i]))
        last_s = sum(busy[first])
        busy[first] = (last_s, busy[first][1])
    return last_s
