"""Measure throughput after a stage loses two of its peers, with and without rebalancing, and of the best static layout.

    python scripts/bench/bench_rebalance.py [--period_s=20] [--moves=1] [--rule=algorithm2] [--forward_s=0.1]
    python scripts/bench/bench_rebalance.py --real --run_dir=DIR [...]

The run begins with three stages of two peers. Two newcomers join, then a stage loses two of its three peers. For the
six peers that are left the best layout is two a stage, with which the same run began. The run is simulated in virtual
time. With --real it is made of processes of this machine whose forwards sleep for --forward_s, so that two cores are
enough for eight peers. Prints one JSON object: seconds of a step in each phase, and the throughput 1, 2 and 3 periods
after the loss, divided by that of the best layout.
"""

import json
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

from absl import flags

from jaxdt.build import RunStart, build_coordinator, build_newcomer, build_peers
from jaxdt.cli import local_run, script_main
from jaxdt.protocol.reports import MoveReport, StepReport
from jaxdt.run import config as configs
from jaxdt.run.config import REBALANCE_RULES
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Link
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.faults import CRASH, JOIN, Fault
from jaxdt.sim.sim_peer import Environment, Outcome, ProcessFactory, SimPeer
from jaxdt.sim.tensors import NoTensors

PERIOD_S = flags.DEFINE_float("period_s", 20.0, "wiring.rebalance_s.", 0.1)
MOVES = flags.DEFINE_integer("moves", 1, "wiring.rebalance_moves.", 1)
RULE = flags.DEFINE_enum("rule", "bottleneck", REBALANCE_RULES, "wiring.rebalance_rule.")
FORWARD_S = flags.DEFINE_float("forward_s", 0.1, "Seconds of a forward; a backward takes twice that.", 1e-3)
MICROBATCHES = flags.DEFINE_integer("microbatches", 24, "Microbatches of a step.", 1)
REAL = flags.DEFINE_bool("real", False, "Run processes of this machine instead of a simulation.")
RUN_DIR = flags.DEFINE_string("run_dir", None, "With --real: an empty folder for the run.")

STAGES, PAIRS, NEWCOMERS = 3, 2, 2
PERIODS = 3  # after the loss
POLL_S = 0.05
CALM_S = 3.0  # from the beginning of a phase until its steps are counted
# The model that the processes train. The simulator needs its seconds only.
MODEL = dict(n_layers=STAGES, d_model=32, n_heads=2, d_ff=64, max_len=16)


def main() -> int:
    if REAL.value and not RUN_DIR.value:
        raise BadInput("--run_dir: missing, expected a folder for the processes' run")
    phases = real(Path(RUN_DIR.value)) if REAL.value else simulated()
    print(json.dumps(phases))
    return 0


def fields(rebalance_s: float) -> dict:
    """Fields of the config, by group."""
    return {
        "plan": dict(stages=STAGES, pipelines=PAIRS, microbatches=MICROBATCHES.value),
        "train": dict(steps=1_000_000, microbatch_size=1),
        "net": dict(heartbeat_s=0.5, deadline_floor_s=600.0),  # a killed peer is noticed by its broken connections
        "wiring": dict(
            kind="swarm",
            rebalance_s=rebalance_s,
            rebalance_moves=MOVES.value,
            rebalance_rule=RULE.value if rebalance_s else "bottleneck",
        ),
    }


def summary(steps: list[tuple[float, float]], eight_s: float, loss_s: float, period_s: float) -> dict:
    """The figures of a run. `steps`: (end, duration) of every step. `eight_s`, `loss_s`: the moments from which there
    were eight peers, and six."""

    def median_between(lo_s: float, hi_s: float) -> float | None:
        """Median duration of the steps that began and ended between two moments."""
        durations_s = [step_s for end_s, step_s in steps if lo_s <= end_s - step_s and end_s <= hi_s]
        return statistics.median(durations_s) if durations_s else None

    best_s = median_between(CALM_S, eight_s - CALM_S)
    after = [median_between(loss_s + n * period_s, loss_s + (n + 1) * period_s) for n in range(PERIODS + 1)]
    return {
        "period_s": period_s,
        "step_s_two_a_stage": best_s,
        "step_s_eight": median_between(eight_s + CALM_S, loss_s),
        "step_s_after_the_loss": after[0],
        "throughput_over_best_after_periods": {
            n: round(best_s / after[n], 3) for n in range(1, PERIODS + 1) if after[n]
        },
    }


# ------------------------------------------------------------------------------------------------------- virtual time


def simulated() -> dict:
    """The figures of a simulated run with rebalancing and of one without."""
    period_s = PERIOD_S.value
    calm_s = 3 * period_s
    figures = {}
    for name, rebalance_s in (("rebalancing", period_s), ("none", 0.0)):
        outcome, loss_s = simulated_run(rebalance_s, calm_s, period_s)
        steps = [(now_s, report.step_s) for now_s, _, report in outcome.reports if isinstance(report, StepReport)]
        figures[name] = summary(steps, calm_s, loss_s, period_s)
        figures[name]["moves"] = len(outcome.of(MoveReport))
    return figures


def simulated_run(rebalance_s: float, calm_s: float, period_s: float) -> tuple[Outcome, float]:
    """The outcome of a run, and the moment of the loss. Newcomers join after calm_s. After as long again the stage that
    then has three peers loses two."""
    model = dict(preset="debug", **MODEL)
    config = configs.parse(dict(model=model, **fields(rebalance_s)))
    plan = configs.default_plan(config)
    loss_s = 2 * calm_s
    faults = [Fault(calm_s, JOIN, n) for n in range(NEWCOMERS)]
    faults += [Fault(loss_s, CRASH, peer) for peer in plan.placement[0]]  # the first newcomer has joined stage 0
    seconds = {peer: work_seconds(plan.seat(peer)[0]) for peer in plan.peers}
    tensors = NoTensors(1, 1000)
    peers = {
        peer: SimPeer(machine, tensors, f"h{peer}", seconds[peer])
        for peer, machine in build_peers(config, plan, RunStart("bench")).items()
    }

    def make_peer(peer: int, stage: int | None) -> SimPeer:
        return SimPeer(
            build_newcomer(config, plan, peer, stage, RunStart("bench")), tensors, f"h{peer}", work_seconds(stage)
        )

    simulation = Simulation(
        build_coordinator(config, plan, RunStart("bench")),
        peers,
        Environment(lambda src, dst: Link(0.001, 1.0), cores={peer.host: 1.0 for peer in peers.values()}),
        faults,
        processes=ProcessFactory(make_peer),
    )
    return simulation.run(loss_s + (PERIODS + 1) * period_s), loss_s


def work_seconds(stage: int) -> dict[str, float]:
    """Seconds of each kind of Work. The last stage's backward contains its forward."""
    forward_s = FORWARD_S.value
    seconds = {"F": forward_s, "B": 2 * forward_s, "E": forward_s, "G": 0.001, "U": 0.001}
    return seconds | {"F": 0.0, "B": 3 * forward_s} if stage == STAGES - 1 else seconds


# ---------------------------------------------------------------------------------------------------------- processes


def real(run_dir: Path) -> dict:
    """The figures of a run of processes with rebalancing."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = run_dir / "bench_config.py"
    local_run.write_config(config, dict(model=MODEL, **fields(PERIOD_S.value)))
    device = f"--emulate_forward_s={FORWARD_S.value}"
    run = run_dir / "run"
    log = run_dir / "launch.log"
    fleet = local_run.start(log, "launch.py", [f"--config={config}", f"--run_dir={run}", "--report=false", device])
    newcomers: list[subprocess.Popen] = []
    try:
        steps = Steps(run, fleet)
        steps.wait_for_steps(3)
        steps.watch(3 * PERIOD_S.value)
        newcomers += [local_run.join(run, run_dir / f"newcomer_{n}.log", [device]) for n in range(NEWCOMERS)]
        steps.wait_for_newcomers(log, NEWCOMERS)
        eight_s = time.monotonic()
        steps.watch(2 * PERIOD_S.value)
        pids = local_run.children(fleet.pid)
        for peer in (0, STAGES):  # those of stage 0 in the plan
            os.kill(pids[f"peer {peer}"], signal.SIGKILL)
        loss_s = time.monotonic()
        steps.watch((PERIODS + 1) * PERIOD_S.value)
    finally:
        fleet.send_signal(signal.SIGINT)
        for process in (fleet, *newcomers):
            process.wait(timeout=60)
    n_moves = log.read_text().count(": moves from stage ")
    return {"rebalancing": summary(steps.ended, eight_s, loss_s, PERIOD_S.value) | {"moves": n_moves}}


class Steps:
    """Watches the steps of a running fleet. `ended`: (moment at which its end was seen, duration) of each step."""

    def __init__(self, run_dir: Path, fleet: subprocess.Popen):
        self._run_dir = run_dir
        self._fleet = fleet
        self.ended: list[tuple[float, float]] = []

    def wait_for_steps(self, n: int) -> None:
        while len(self.ended) < n:
            self._poll()

    def watch(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._poll()

    def wait_for_newcomers(self, log: Path, n: int) -> None:
        """Wait until the launcher's log says that n newcomers have joined."""
        while log.read_text().count(" joins") < n:
            self._poll()

    def _poll(self) -> None:
        if self._fleet.poll() is not None:
            raise BadInput(f"the run ended with code {self._fleet.returncode}; see launch.log")
        now_s = time.monotonic()
        self.ended += [(now_s, step["step_s"]) for step in local_run.metrics(self._run_dir)[len(self.ended) :]]
        time.sleep(POLL_S)


if __name__ == "__main__":
    script_main.run(main)
