"""The page of predictions is what its raw data give; the errors of both predictors; hosts with links between them."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from comparison import PAGE
from comparisons import emulated, hosts
from prediction_error import network_hosts
from prediction_error.network_hosts import LinkState, NetworkHosts, WanLink
from prediction_error.page import EMULATED, HOSTS, by_cut, cases_of, median_interval

from jaxdt.run.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
COMMITTED, SCRIPT = ROOT / "configs/prediction", ROOT / "scripts/experiments/compare.py"
MTU = network_hosts.MTU


def write(path: Path, *lines: dict) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def line(case: str, predicted_s: float, measured_s: float) -> dict:
    return {"case": case, "predicted_s": predicted_s, "measured_s": measured_s}


def test_both_predictors_by_cut():
    """The constant is the median of measured seconds; a case's error is the median of its runs, not the runs' median
    seconds'."""
    runs = [line("near 2x1 1f1b", 1.1, 1.0), line("near 2x1 1f1b", 0.9, 1.0), line("near 2x1 1f1b", 1.3, 1.0)]
    whole = line("far 2x1 1f1b", 2.0, 2.0) | {"errors": [0.5, -0.02, 0.02]}
    first, second = by_cut(cases_of([*runs, whole, line("far 4x1 1f1b", 3.3, 3.0)]))
    assert (first.cut, first.n_cases, second.cut) == ("2x1", 2, "4x1")
    assert (first.ours, first.ours_max) == pytest.approx((0.06, 0.1))
    assert (first.constant_s, first.naive, first.naive_max) == pytest.approx((1.5, 0.375, 0.5))
    assert (second.ours, second.naive) == pytest.approx((0.1, 0.0))


def test_the_interval_of_a_median_is_that_of_the_sign_test():
    """The 6th and the 15th of 20 values bound the interval; of 5 values not even the outermost ones do."""
    assert median_interval([*range(20, 0, -1)]) == (6, 15)
    assert median_interval([5, 4, 3, 2, 1]) == (1, 5)


def page(folder: Path) -> str:
    emulated.COMPARISON.write(folder, folder)
    return (folder / PAGE).read_text()


def test_the_page_compares_the_systems_of_a_network_once_hosts_have_run(tmp_path):
    (tmp_path / EMULATED).write_text((COMMITTED / EMULATED).read_text())
    assert "No data yet" in page(tmp_path)
    seconds = {"4x1 1f1b": 1.0, "2x2 1f1b": 2.0, "2x2 swarm": 2.5}
    lines = [
        line(case, 1.1 * seconds[system], seconds[system]) | {"seed": 0, "load_before": 1.25}
        for case, (_, system) in hosts.CASES.items()
    ]
    write(tmp_path / HOSTS, *lines)
    text = page(tmp_path)
    assert "## 12 cases over real TCP" in text and text.count("1.250 on") == len(network_hosts.NETWORKS)
    assert "median: 1.2 (at most 1.2);" in text
    write(tmp_path / HOSTS, {"case": "near 2x1"})
    with pytest.raises(BadInput, match="line 1: got .*, expected case, predicted_s, measured_s"):
        page(tmp_path)


def state(link: WanLink) -> LinkState:
    return LinkState(link, random.Random("seed"))


def test_a_packet_takes_its_time_on_the_wire_and_the_latency_and_packets_wait_for_each_other():
    link = state(WanLink(0.02, 0.1))
    assert link.arrival_s(5.0, 12_500) == pytest.approx(5.021)
    assert link.arrival_s(5.0, 12_500) == pytest.approx(5.022)
    assert link.arrival_s(6.0, 12_500) == pytest.approx(6.021)


def test_a_full_queue_and_chance_lose_packets_and_both_are_counted():
    link = state(WanLink(0.05, 0.1))  # a round trip of 0.1 s, so 1.25 MB wait at the most
    arrived = [link.arrival_s(1.0, MTU) for _ in range(200)]
    n_waiting = round(0.1 * 0.1e9 / 8 / MTU)
    assert sum(when is not None for when in arrived) == pytest.approx(n_waiting, abs=1)
    assert link.counts["overflow"] == arrived.count(None) and not link.counts["lost"]
    lossy = state(WanLink(0.0, 100.0, drop_prob=0.2))
    arrived = [lossy.arrival_s(float(now), 100) for now in range(2000)]
    assert lossy.counts["lost"] == arrived.count(None) == pytest.approx(400, abs=60)


def test_jitter_is_between_zero_and_its_limit_and_packets_stay_in_order():
    link = state(WanLink(0.02, 1000.0, jitter_s=0.01))
    sent = [0.001 * n for n in range(3000)]
    arrived = [link.arrival_s(now, 100) for now in sent]
    delays = [when - now for when, now in zip(arrived, sent, strict=True)]
    assert arrived == sorted(arrived) and min(delays) < 0.021 and 0.029 < max(delays) < 0.0301


ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 5201))
print("listening", flush=True)
connection = server.accept()[0]
n = 0
while got := connection.recv(1 << 16):
    n += len(got)
    if n == int(sys.argv[2]):
        connection.sendall(b"x")
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5201), 30)
start_s = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.recv(1)
print(time.monotonic() - start_s)
"""


@pytest.mark.skipif(bool(network_hosts.missing()), reason=f"needs {network_hosts.missing()}")
def test_programs_in_hosts_meet_the_links():
    """A message there and one byte back take at least the wire's time and two latencies, however busy the machine is.
    No namespace is left."""
    n_bytes, link = 500_000, WanLink(0.03, 0.05)
    with NetworkHosts(2, lambda src, dst: link, seed=0) as hosts:
        arguments = [hosts.addresses[1], str(n_bytes)]
        pipes = dict(stdout=subprocess.PIPE, text=True)
        echo = hosts.start(1, [sys.executable, "-c", ECHO, *arguments], **pipes)
        assert echo.stdout.readline() == "listening\n"
        seconds = float(hosts.start(0, [sys.executable, "-c", SEND, *arguments], **pipes).communicate(timeout=60)[0])
        echo.communicate(timeout=60)
    assert seconds >= n_bytes * 8 / 0.05e9 + 2 * 0.03
    assert hosts.counted["forwarded"] > n_bytes / MTU
    known = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in hosts.names if name in known]


WITHOUT_ROOT = """
import os, runpy, sys
os.geteuid = lambda: 1000
sys.argv[1:] = ["hosts", "--only=four_cities", "--run_dir=RUN_DIR"]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_user_without_root_gets_one_line(tmp_path):
    code = WITHOUT_ROOT.replace("sys.argv[0]", repr(str(SCRIPT))).replace("RUN_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "skipped: hosts on this machine need root\n", "")
