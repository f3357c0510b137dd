"""The live table is drawn now and then, however many heartbeats come, and only on a terminal that nobody shares."""

import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jaxdt.protocol.reports import HeartbeatReport, StepReport
from jaxdt.run.plan import Plan
from jaxdt.runtime.reporting import display as display_module
from jaxdt.runtime.reporting.display import TABLE_EVERY_S, Display

ROOT = Path(__file__).resolve().parents[2]
PLAN = Plan(1, ((0, 1),), ((0,),), (1,))


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
    display = Display(PLAN, 10, live=False, heartbeat_s=0.5)
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

    display = Display(PLAN, 10, live=False, heartbeat_s=0.5)
    display._live = Gone()
    display._table = lambda: ""
    display.heartbeat(HeartbeatReport(0, {"step": 1.0}))
    display.close()
    assert display._live is None


def cells(display, name):
    """A column of the table, by peer."""
    columns = display._table().renderables[0].columns
    [wanted] = [column for column in columns if column.header == name]
    return dict(zip(columns[0].cells, wanted.cells, strict=True))


def test_the_table_says_what_each_peer_does():
    display = Display(PLAN, 10, live=False, heartbeat_s=0.5)

    def states():
        return cells(display, "state")

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
    display.step(StepReport(1, 5.0, 1.0, 10.0, 0.0, "apply"))
    assert cells(display, "step") == {"0": "1", "4": "0"}
    display.ended()
    assert states() == {"0": "ended", "4": "ended"}
    assert cells(display, "step") == {"0": "2", "4": "0"}, "the last heartbeat was before the last step"


def test_a_silent_peer_has_no_rates_and_one_that_is_back_counts_from_zero(clock):
    display = Display(PLAN, 10, live=False, heartbeat_s=0.5)
    display.members({0: 0, 1: 0})
    display.step(StepReport(0, 5.0, 1.0, 10.0, 0.0, "apply"))
    for second in range(3):
        clock[0] = 100.0 + second
        for peer in (0, 1):
            display.heartbeat(HeartbeatReport(peer, {"busy_s": 0.5 * second, "bytes_out": 4e6 * second}))
    assert cells(display, "out MB/s") == {"0": "4.00", "1": "4.00"}
    for second in range(3, 9):
        clock[0] = 100.0 + second
        display.heartbeat(HeartbeatReport(0, {"busy_s": 0.5 * second, "bytes_out": 4e6 * second}))
    assert cells(display, "state") == {"0": "training", "1": "silent 6 s"}
    assert cells(display, "out MB/s") == {"0": "4.00", "1": ""} and cells(display, "waiting")["1"] == ""
    for second in range(9, 12):
        clock[0] = 100.0 + second
        display.heartbeat(HeartbeatReport(1, {"busy_s": 0.2 * (second - 9), "bytes_out": 1e6 * (second - 9)}))
        assert cells(display, "out MB/s")["1"] in ("", "1.00")
    assert cells(display, "out MB/s")["1"] == "1.00" and cells(display, "waiting")["1"] == "80%"


def test_while_the_run_stands_still_nobody_trains(clock):
    display = Display(PLAN, 10, live=False, heartbeat_s=0.5)
    display.members({0: 0})
    display.heartbeat(HeartbeatReport(0, {}))
    display.step(StepReport(0, 5.0, 1.0, 10.0, 0.0, "apply"))
    for word in ("paused", "waiting"):
        display.standstill(word)
        assert cells(display, "state") == {"0": word}
    display.step(StepReport(1, 5.0, 1.0, 10.0, 0.0, "apply"))
    assert cells(display, "state") == {"0": "training"}


def test_a_pool_worker_that_gets_ready_is_shown_for_a_while_and_who_never_came_is_not_at_the_end(clock):
    display = Display(PLAN, 10, live=False, heartbeat_s=0.5)
    display.members({0: 0})
    display.arriving(7, 0, "worker, compiling", for_s=120.0)
    display.arriving(8, 0, "compiling")
    assert {"7": "worker, compiling", "8": "compiling"}.items() <= cells(display, "state").items()
    clock[0] += 121.0
    assert "7" not in cells(display, "state") and "8" in cells(display, "state")
    display.ended()
    assert set(cells(display, "state")) == {"0"}


def test_the_last_table_has_the_workers_that_a_server_had_in_its_last_step(clock):
    display = Display(PLAN, 10, live=False, heartbeat_s=0.5)
    display.members({0: 0})
    counts = {"workers": 2, "leases": 1, "by_workers": 8, "microbatches": 9, "redone": 0, "contribution_bytes": 0}
    counts |= {"aggregation_s": 0.0, "steps_s": 0.0}
    for step, n_workers in ((9, 2), (10, 1), (10, 0)):
        display.heartbeat(HeartbeatReport(0, {**counts, "step": step, "workers": n_workers}))
    [server] = [table for table in display._table().renderables[1:2]]
    assert list(server.columns[1].cells) == ["2"]


@pytest.mark.parametrize("step_s", [math.nan, 0.0])
def test_a_step_without_a_known_time_shows_no_rate(step_s, capsys):
    Display(PLAN, 20, live=False, heartbeat_s=0.5).step(StepReport(0, 5.0, step_s, math.nan, 0.0, "apply"))
    assert capsys.readouterr().out == "step     1/20  loss 5.0000  in an unknown time\n"


def test_the_tables_of_a_pool_fit_eighty_columns(clock):
    display = Display(PLAN, 10, live=False, heartbeat_s=0.5)
    display.members({200001: 10})
    counts = {"workers": 12, "leases": 34, "by_workers": 4567, "microbatches": 8901, "redone": 123}
    counts |= {"contribution_bytes": 7890.1e6, "aggregation_s": 1.0, "steps_s": 5.0}
    for second in range(3):
        clock[0] = 100.0 + second
        rates = {"busy_s": 0.5 * second, "bytes_out": 123.45e6 * second, "bytes_in": 123.45e6 * second}
        display.heartbeat(HeartbeatReport(200001, {"step": 123456.0} | rates | counts))
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(display._table())
    text = console.file.getvalue()
    assert "…" not in text and "done by them" in text and "7890.1 MB" in text and "123.45" in text


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


MODES = """
import termios
from jaxdt.runtime.reporting.console import no_echo_of_interrupts

def shows():
    return bool(termios.tcgetattr(1)[3] & termios.ECHOCTL)

before = shows()
try:
    with no_echo_of_interrupts():
        during = shows()
        raise KeyError
except KeyError:
    print(before, during, shows())
"""


def test_a_terminal_shows_no_interrupt_within_the_table_and_does_afterwards():
    ours, theirs = os.openpty()
    try:
        subprocess.run([sys.executable, "-c", MODES], stdin=theirs, stdout=theirs, check=True, cwd=ROOT)
        assert os.read(ours, 100).split() == [b"True", b"False", b"True"]
    finally:
        os.close(ours)
        os.close(theirs)
    done = subprocess.run([sys.executable, "-c", NO_TERMINAL], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "goes on\n"


NO_TERMINAL = """
from jaxdt.runtime.reporting.console import no_echo_of_interrupts

with no_echo_of_interrupts():
    print("goes on")
"""
