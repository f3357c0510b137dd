"""Throughput after a stage loses two of its peers, with and without rebalancing, beside the best static layout.

    python scripts/bench/bench_rebalance.py [--period_s=20] [--moves=1] [--forward_s=0.1]
    python scripts/bench/bench_rebalance.py --real --run_dir=DIR [...]

Three stages of two peers begin; two newcomers make them eight; then a stage loses two of its three. The six that are
left do best as two a stage, as in the beginning of the same run. In virtual time, or with --real as processes of this
machine whose forwards take --forward_s (they sleep), so that two cores are enough for eight. Prints one JSON object:
seconds of a step in each phase, and the throughput 1, 2 and 3 periods after the loss over that of the best layout.
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
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.faults import CRASH, JOIN, Fault
from jaxdt.sim.sim_peer import Environment, Outcome, ProcessFactory, SimPeer
from jaxdt.sim.tensors import NoTensors
from jaxdt.spec import config as configs
from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Link

PERIOD_S = flags.DEFINE_float("period_s", 20.0, "wiring.rebalance_s.", 0.1)
MOVES = flags.DEFINE_integer("moves", 1, "wiring.rebalance_moves.", 1)
FORWARD_S = flags.DEFINE_float("forward_s", 0.1, "Seconds of a forward; a backward takes twice that.", 1e-3)
MICROBATCHES = flags.DEFINE_integer("microbatches", 24, "Of a step.", 1)
REAL = flags.DEFINE_bool("real", False, "As processes of this machine.")
RUN_DIR = flags.DEFINE_string("run_dir", None, "With --real: an empty folder for the run.")

STAGES, PAIRS, NEWCOMERS = 3, 2, 2
PERIODS = 3
CALM_S = 3.0  # after a phase begins, before its steps count
# What the processes train; the simulator takes the seconds alone.
MODEL = dict(n_layers=STAGES, d_model=32, n_heads=2, d_ff=64, seq_len=16)


def main() -> int:
    if REAL.value and not RUN_DIR.value:
        raise BadInput("--run_dir: missing, expected a folder for the processes' run")
    phases = real(Path(RUN_DIR.value)) if REAL.value else simulated()
    print(json.dumps(phases))
    return 0


def fields(rebalance_s: float) -> dict:
    """Of the config."""
    return {
        "plan": dict(stages=STAGES, pipelines=PAIRS, microbatches=MICROBATCHES.value),
        "train": dict(steps=1_000_000, microbatch_size=1),
        "net": dict(heartbeat_s=0.5, deadline_floor_s=600.0),  # who is killed is noticed by its connections
        "wiring": dict(kind="swarm", rebalance_s=rebalance_s, rebalance_moves=MOVES.value),
    }


def summary(steps: list[tuple[float, float]], eight_s: float, loss_s: float, period_s: float) -> dict:
    """From (end, seconds) of all steps and the moments when the eight were there and when two were lost."""
    between = lambda lo_s, hi_s: [s for end_s, s in steps if lo_s <= end_s - s and end_s <= hi_s]  # noqa: E731
    median = lambda seconds: statistics.median(seconds) if seconds else None  # noqa: E731
    best_s = median(between(CALM_S, eight_s - CALM_S))
    after = [median(between(loss_s + n * period_s, loss_s + (n + 1) * period_s)) for n in range(PERIODS + 1)]
    return {
        "period_s": period_s,
        "step_s_two_a_stage": best_s,
        "step_s_eight": median(between(eight_s + CALM_S, loss_s)),
        "step_s_after_the_loss": after[0],
        "throughput_over_best_after_periods": {
            n: round(best_s / after[n], 3) for n in range(1, PERIODS + 1) if after[n]
        },
    }


# ------------------------------------------------------------------------------------------------------- virtual time


def simulated() -> dict:
    period_s, calm_s = PERIOD_S.value, 3 * PERIOD_S.value
    found = {}
    for name, rebalance_s in (("rebalancing", period_s), ("none", 0.0)):
        outcome, loss_s = play(rebalance_s, calm_s, period_s)
        steps = [(now_s, report.fields["step_s"]) for now_s, _, report in outcome.reports if report.kind == "step"]
        found[name] = summary(steps, calm_s, loss_s, period_s)
        found[name]["moves"] = len([at_s for at_s, _, report in outcome.reports if report.kind == "move"])
    return found


def play(rebalance_s: float, calm_s: float, period_s: float) -> tuple[Outcome, float]:
    """The eight at calm_s, the loss as long afterwards, in the stage that then has three."""
    model = dict(preset="debug", **MODEL)
    config = configs.parse(dict(model=model, **fields(rebalance_s)))
    plan = configs.default_plan(config)
    loss_s = 2 * calm_s
    faults = [Fault(calm_s, JOIN, n) for n in range(NEWCOMERS)]
    faults += [Fault(loss_s, CRASH, peer) for peer in plan.placement[0]]  # the first newcomer is of stage 0 too
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
    """Per kind of Work; the last stage's backward has the forward in it."""
    forward_s = FORWARD_S.value
    own = (0.0, 3 * forward_s) if stage == STAGES - 1 else (forward_s, 2 * forward_s)
    return {"F": own[0], "B": own[1], "E": forward_s, "G": 0.001, "U": 0.001}


# ---------------------------------------------------------------------------------------------------------- processes


def real(run_dir: Path) -> dict:
    """The same by the clock of this machine."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = run_dir / "bench_config.py"
    local_run.write_config(config, dict(model=MODEL, **fields(PERIOD_S.value)))
    device = f"--emulate_forward_s={FORWARD_S.value}"
    run, log = run_dir / "run", run_dir / "launch.log"
    fleet = local_run.start(log, "launch.py", f"--config={config}", f"--run_dir={run}", "--report=false", device)
    newcomers = []
    try:
        steps = Steps(run / "metrics.jsonl", fleet)
        steps.until(3)
        steps.during(3 * PERIOD_S.value)
        newcomers += [local_run.join(run, run_dir / f"newcomer_{n}.log", device) for n in range(NEWCOMERS)]
        steps.joined(log, NEWCOMERS)
        eight_s = time.monotonic()
        steps.during(2 * PERIOD_S.value)
        pids = local_run.children(fleet.pid)
        for peer in (0, PAIRS and STAGES):
            os.kill(pids[f"peer {peer}"], signal.SIGKILL)
        loss_s = time.monotonic()
        steps.during((PERIODS + 1) * PERIOD_S.value)
    finally:
        fleet.send_signal(signal.SIGINT)
        for process in (fleet, *newcomers):
            process.wait(timeout=60)
    said = (run_dir / "launch.log").read_text()
    return {"rebalancing": summary(steps.ended, eight_s, loss_s, PERIOD_S.value) | {"moves": said.count("\nmove: ")}}


class Steps:
    """What the run writes down, and when we saw it: (moment, seconds) of each step from our first look on."""

    def __init__(self, path: Path, fleet: subprocess.Popen):
        self._path, self._fleet, self._n = path, fleet, 0
        self.ended: list[tuple[float, float]] = []

    def look(self) -> None:
        if self._fleet.poll() is not None:
            raise BadInput(f"the run ended with code {self._fleet.returncode}; see launch.log")
        now_s = time.monotonic()
        self.ended += [(now_s, step["step_s"]) for step in local_run.objects(self._path)[self._n :]]
        self._n = len(self.ended)

    def until(self, n: int) -> None:
        while self._n < n:
            self.look()
            time.sleep(0.05)

    def during(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.look()
            time.sleep(0.05)

    def joined(self, log: Path, n: int) -> None:
        """Until so many newcomers have joined."""
        while log.read_text().count(" joins") < n:
            self.look()
            time.sleep(0.05)


if __name__ == "__main__":
    script_main.run(main)
