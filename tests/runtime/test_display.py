"""The live table is drawn now and then, however many heartbeats come, and only on a terminal that nobody shares."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdt.protocol.reports import HeartbeatReport, StepReport
from jaxdt.runtime.reporting import display as display_module
from jaxdt.runtime.reporting.display import TABLE_EVERY_S, Display
from jaxdt.spec.plan import Plan

ROOT = Path(__file__).resolve().parents[2]


class Terminal:
    """Stands in for the live table of rich."""

    def __init__(self):
        self.drawn = []

    def update(self, table):
        self.drawn.append(table)

    def stop(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now_s[0])
    return now_s


def test_the_table_is_drawn_at_most_four_times_a_second(clock, monkeypatch):
    display = Display(Plan(1, ((0, 1),), ((0,),), (1,)), 10, live=False)
    display._live = Terminal()
    display._table = lambda: clock[0]
    for tick in range(1000):  # of a millisecond each
        clock[0] = 100.0 + tick / 1000
        display.heartbeat(HeartbeatReport(tick % 256, {"step": 1.0}))
    drawn = display._live.drawn
    assert len(drawn) == 4
    assert all(later - earlier >= TABLE_EVERY_S for earlier, later in zip(drawn, drawn[1:], strict=False))


def test_a_terminal_that_is_gone_ends_nobody(clock):
    class Gone(Terminal):
        def update(self, table):
            raise OSError(5, "Input/output error")

    display = Display(Plan(1, ((0, 1),), ((0,),), (1,)), 10, live=False)
    display._live = Gone()
    display._table = lambda: ""
    display.heartbeat(HeartbeatReport(0, {"step": 1.0}))
    display.close()
    assert display._live is None


def test_the_table_says_what_each_peer_does():
    display = Display(Plan(1, ((0, 1),), ((0,),), (1,)), 10, live=False)

    def states():
        columns = display._table().renderables[0].columns
        return dict(zip(columns[0].cells, columns[2].cells, strict=True))

    display.arriving(0, 0, "compiling")
    assert states() == {"0": "compiling"}
    display.members({0: 0})
    display.heartbeat(HeartbeatReport(0, {"step": 1.0}))
    display.step(StepReport(0, 5.0, 1.0, 10.0, 0.0, "apply"))
    display.arriving(4, 0, "compiling")
    assert states() == {"0": "training", "4": "compiling"}
    display.ready(4)
    assert states()["4"] == "ready"
    display.members({0: 0, 4: 0}, fetching=[4])
    assert states()["4"] == "fetching state"
    display.arriving(5, 0, "compiling")
    display.gone(5)
    display.ended()
    assert states() == {"0": "ended", "4": "ended"}


PLACES = """
import os, sys
from jaxdt.runtime.reporting.console import has_own_terminal

def at(name, prepare):
    child = os.fork()
    if not child:
        prepare()
        with open(sys.argv[1], "a") as file:
            print(name, has_own_terminal(), file=file)
        os._exit(0)
    os.waitpid(child, 0)

os.open(os.ttyname(0), os.O_RDWR)  # from now on this is the terminal of this session
at("foreground", lambda: None)
at("background", lambda: os.setpgid(0, 0))
at("background, no job control", lambda: os.dup2(os.open(os.devnull, os.O_RDONLY), 0))
at("launched", os.setsid)
at("log", lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 1))
"""


def test_a_job_in_the_background_has_no_terminal_of_its_own(tmp_path):
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", PLACES, str(tmp_path / "found")]
    try:
        subprocess.run(command, stdin=theirs, stdout=theirs, start_new_session=True, check=True, cwd=ROOT)
    finally:
        os.close(ours)
        os.close(theirs)
    assert (tmp_path / "found").read_text().splitlines() == [
        "foreground True",
        "background False",
        "background, no job control False",
        "launched True",
        "log False",
    ]
