"""Workers of a pool as processes: they are killed, come and pause, and the training is that of one process."""

import os
import re
import signal

import pytest
from fleets import ENDLESS, QUICK, assert_equal

from jaxdt.protocol import trace
from jaxdt.run.work import WorkKind, parse_work

pytestmark = pytest.mark.slow

POOL = ("--config.wiring.kind=pool", "--config.plan.pipelines=1", "--config.plan.workers=1", "--emulate_forward_s=0.02")


def log_of(fleet, peer) -> str:
    return (fleet.run_dir / "logs" / f"peer_{peer}.log").read_text()


def newcomer_of(fleet) -> set[str]:
    """The worker that nobody planned, once a server has let it in."""
    return set(re.findall(r"lets worker (\d+) compute", log_of(fleet, 0) + log_of(fleet, 1))) - {"2", "3"}


def test_workers_that_come_and_go_cost_no_view_and_change_nothing(churning, alone):
    """kill -9 of a worker, a worker that nobody planned, which measures its links first, and SIGSTOP of another one for
    some steps."""
    fleet = churning(*ENDLESS, *QUICK, *POOL, "--config.wiring.join_rule=bandwidth")
    fleet.wait_for_step(3)
    fleet.wait_for(lambda: "lets worker 2" in log_of(fleet, 0), "worker 2")  # else no server knows that it is lost
    workers = fleet.workers()
    assert sorted(workers) == [2, 3]
    os.kill(workers[2], signal.SIGKILL)
    fleet.wait_for(lambda: "worker 2 is lost" in log_of(fleet, 0), "the loss of worker 2")
    fleet.ask_to_join("--as=worker")
    fleet.wait_for(lambda: newcomer_of(fleet), "a new worker", timeout_s=200)
    measured = re.findall(r"measured its links to the servers: 0: \S+ Gb/s, 1: \S+ Gb/s", fleet.log.read_text())
    assert len(measured) == 1, fleet.log.read_text()
    os.kill(workers[3], signal.SIGSTOP)
    try:
        fleet.wait_for_step(len(fleet.losses()) + 5)
    finally:
        os.kill(workers[3], signal.SIGCONT)  # else it would outlive the test
    fleet.wait_for_step(len(fleet.losses()) + 5)
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended() == 130, fleet.output
    assert fleet.newcomer.wait(timeout=60) == 130, fleet.log.read_text()
    assert fleet.views(0) == fleet.views(1) == 1
    for worker in {"3"} | newcomer_of(fleet):
        records = trace.read((fleet.run_dir / "trace" / f"peer_{worker}.jsonl").read_text().splitlines(), worker)
        done = [parse_work(record["work"]) for record in records if record["what"] == "run"]
        assert {work.kind for work in done} >= {WorkKind.BACKWARD, WorkKind.GATHER}
    assert_equal(fleet, alone)
