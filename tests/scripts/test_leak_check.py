"""The measure of growth finds what grows, and does not take more members for it."""

import random

import pytest
from leak_check import growth

PERIOD_S = 20.0


def samples(rss=lambda s: 0, fds=lambda s: 0, threads=lambda s: 0, members=lambda s: 3):
    """Samples of 15 minutes: 250 MB, 4 descriptors and 2 threads for each member; now and then a connection that is
    open for a moment. The arguments give the amounts that are added after so many seconds."""
    chance, found = random.Random(1), []
    for seconds in range(2, 900, 2):
        n, moment = members(seconds), chance.random() < 0.3
        found.append((float(seconds), int(250e6 + rss(seconds)), 11 + 4 * n + 2 * moment + int(fds(seconds)),
                      5 + 2 * n + moment + int(threads(seconds)), n))  # fmt: skip
    return found


def come_and_go(seconds):
    """More members in the second half than in the first."""
    return 2 + (seconds // 70) % 2 + (seconds > 450)


@pytest.mark.parametrize("members", [lambda seconds: 3, come_and_go])
def test_what_is_flat_at_an_equal_number_of_members_is_flat(members):
    assert growth(samples(members=members), PERIOD_S) == pytest.approx({"rss": 0, "fds": 0, "threads": 0}, abs=0.02)


@pytest.mark.parametrize("members", [lambda seconds: 3, come_and_go])
def test_what_grows_is_found(members):
    """A descriptor every 100 s, a thread every 200 s and 30 kB a second, with newcomers or without."""
    seen = growth(samples(lambda s: 3e4 * s, lambda s: s // 100, lambda s: s // 200, members), PERIOD_S)
    assert all(by > 0.05 for by in seen.values()), seen
    assert seen["rss"] == pytest.approx(3e4 * 675 / 267e6, rel=0.1)


def test_what_the_warm_up_brings_does_not_count():
    assert growth(samples(rss=lambda s: 5e7 * (s > 200)), PERIOD_S)["rss"] == pytest.approx(0, abs=1e-6)


def test_where_no_number_of_members_was_seen_twice_nothing_is_shown():
    assert growth(samples(members=lambda s: s // 10), PERIOD_S)["fds"] == float("inf")


def test_memory_that_follows_the_members_counts():
    grown = samples(rss=lambda s: 1e7 * come_and_go(s), members=come_and_go)
    assert growth(grown, PERIOD_S)["rss"] > 0.03
