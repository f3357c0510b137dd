import pytest

from jaxdt.protocol.deadline import SPREADS, WINDOW, Deadline


def after(*arrivals_s, floor_s=1.0):
    deadline = Deadline(floor_s)
    for now_s in arrivals_s:
        deadline.arrived(now_s)
    return deadline


def test_before_the_first_arrival_nothing_is_late():
    deadline = after()
    assert deadline.silence_s(1e9) == 0.0
    assert not deadline.passed(1e9)


def test_the_floor_holds_for_few_and_for_regular_arrivals():
    assert after(5.0).timeout_s == 1.0
    assert after(*(0.1 * i for i in range(20))).timeout_s == 1.0


def test_slow_arrivals_raise_it_above_the_floor():
    assert after(0, 10, 20, 30).timeout_s == pytest.approx(10.0)


def test_median_and_median_absolute_deviation():
    """Intervals 4, 5, 9: median 5, deviations 1, 0, 4, of which the median is 1."""
    assert after(0, 4, 9, 18).timeout_s == pytest.approx(5 + SPREADS * 1)


def test_one_outlier_hardly_moves_it():
    assert after(0, 2, 4, 6, 106, 108, 110).timeout_s == pytest.approx(2.0)


def test_passed_needs_more_than_the_timeout():
    deadline = after(0, 2, 4)
    assert not deadline.passed(6.0)
    assert deadline.passed(6.01)
    assert deadline.silence_s(6.5) == 2.5
    deadline.arrived(6.5)
    assert not deadline.passed(6.6)


def test_it_forgets_what_is_long_ago():
    slow = [100.0 * i for i in range(10)]
    fast = [slow[-1] + 2.0 * i for i in range(1, WINDOW + 1)]
    assert after(*slow, *fast).timeout_s == pytest.approx(2.0)
