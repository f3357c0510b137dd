"""A pool's worker that has no server, or has lost it, asks the coordinator until there is one."""

from dataclasses import replace

import pytest

from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.runtime import worker_process
from jaxdt.runtime.coordinator_client import CoordinatorAway
from jaxdt.runtime.worker_process import _with_server, _without_server

FOUND = ev.Welcome("r", 4, 1, "f", {}, 3, server=2, server_address="h:1")
NONE_YET = _without_server(FOUND)


class Requests:
    """Nobody has asked this process to end, until somebody does."""

    first = None


@pytest.fixture
def clock(monkeypatch):
    """Time passes only while the worker sleeps."""
    now_s = [0.0]
    monkeypatch.setattr(worker_process.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(worker_process.time, "sleep", lambda seconds: now_s.__setitem__(0, now_s[0] + seconds))
    return now_s


def asking(*answers):
    """A worker whose coordinator answers so, in order."""
    left = list(answers)

    def ask():
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def test_it_asks_until_there_is_a_server_and_says_once_for_what_it_waits(clock, capsys):
    away = CoordinatorAway("nobody listens there")
    answers = asking(NONE_YET, NONE_YET, away, away, NONE_YET, replace(FOUND, server=3))
    assert _with_server(NONE_YET, answers, Requests(), 100.0) == replace(FOUND, server=3)
    assert capsys.readouterr().out.splitlines() == [
        "worker 4: waits for a server of stage 1",
        "worker 4: waits for the coordinator: nobody listens there",
        "worker 4: waits for a server of stage 1",
    ]
    assert _with_server(FOUND, asking(), Requests(), 100.0) == FOUND


def test_it_ends_when_the_coordinator_is_away_for_too_long_or_when_it_is_asked_to(clock):
    away = CoordinatorAway("nobody listens there")
    stop = _with_server(NONE_YET, asking(*[away] * 4), Requests(), 3.0)
    assert isinstance(stop, ev.Stop) and stop.code == 3 and stop.reason == "worker 4: nobody listens there"
    asked = Requests()
    asked.first = ev.Leave()
    assert _with_server(NONE_YET, asking(), asked, 3.0) == ev.Stop(0, "worker 4: left the run")
    asked.first = ev.Interrupted(130, "interrupted")
    assert _with_server(NONE_YET, asking(), asked, 3.0) == ev.Stop(130, "interrupted")


def test_a_server_that_does_not_listen_is_named(clock):
    with pytest.raises(BadInput, match="--as: server 2 has no address that a worker can dial, expected one that"):
        _with_server(replace(FOUND, server_address=""), asking(), Requests(), 3.0)
