"""Requests to stop reach the loop that runs, or what stands in for it while there is none."""

import os
import signal

import pytest

from jaxdt.protocol import events as ev
from jaxdt.runtime.process import StopRequests, requested_stop


class Loop:
    def __init__(self):
        self.post = (posted := []).append
        self.posted = posted


@pytest.fixture
def requests():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield StopRequests(ev.Leave(), ev.Leave(), stop_with_parent=False)
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_without_a_loop_a_request_calls_what_was_given_for_that_time(requests):
    first, second, called = Loop(), Loop(), []
    requests.deliver_to(first)
    requests.end_by(called.append)
    assert not called
    interrupt()
    assert (first.posted, called) == ([], [ev.Leave()])
    requests.deliver_to(second)
    interrupt()
    assert (second.posted, called) == ([ev.Leave(), ev.Interrupted()], [ev.Leave()])


def test_a_request_that_came_earlier_counts_at_once(requests):
    requests.deliver_to(Loop())
    interrupt()
    called = []
    requests.end_by(called.append)
    assert called == [ev.Leave()]


def test_a_process_that_takes_no_part_ends_as_it_is_asked_to():
    assert requested_stop(ev.Leave(), "left") == ev.Stop(0, "left")
    assert requested_stop(ev.Interrupted(5, "the launcher ends"), "left") == ev.Stop(5, "the launcher ends")
