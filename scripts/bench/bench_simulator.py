"""How fast the simulator is: simulated steps per second, as one JSON object.

    python scripts/bench/bench_simulator.py

64 peers as 8 stages x 8 pipelines with 64 microbatches a step, and 1,024 peers as 8 x 128 with 32 per pipeline: model
`small`, a layer a stage, 20 ms and 1 Gb/s between all pairs. `step_cpu_s` is one more step in a running
simulation, `total_s` a whole simulation of one step with everything that is built for it; both are CPU seconds.
"""

import json
import resource
import statistics
import time
from dataclasses import replace

from absl import flags

from jaxdt.cli import script_main
from jaxdt.run.config import PlanConfig, RunConfig, default_plan
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import uniform
from jaxdt.run.profile import from_flops
from jaxdt.sim.predict import simulate
from jaxdt.sim.scenario import Scenario

ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds to measure; the median is reported.", 1)
SMALL_STEPS, LARGE_STEPS = 21, 2


def make_scenario(pipelines: int, microbatches: int) -> Scenario:
    model = GPTConfig.of("small")
    config = RunConfig(model, plan=PlanConfig(stages=8, pipelines=pipelines, microbatches=microbatches))
    plan = default_plan(config)
    network = uniform(8 * pipelines, 0.02, 1.0)
    network = replace(network, devices=tuple(replace(device, host="") for device in network.devices))
    return Scenario(config, plan, from_flops(model, 1, {"": 1e12}, 0.4), network)


def cpu_s(scenario: Scenario, n_steps: int) -> float:
    """CPU seconds of a simulation of n_steps."""
    conditions = scenario.conditions()
    started_s = time.process_time()
    simulate(scenario.quiet(n_steps), scenario.plan, conditions)
    return time.process_time() - started_s


def measure(scenario: Scenario, n_steps: int) -> dict[str, float]:
    first_s = [cpu_s(scenario, 1) for _ in range(ROUNDS.value)]
    all_s = [cpu_s(scenario, n_steps) for _ in range(ROUNDS.value)]
    a_step_s = (statistics.median(all_s) - statistics.median(first_s)) / (n_steps - 1)
    return {"step_cpu_s": a_step_s, "steps_per_s": 1 / a_step_s, "total_s": statistics.median(first_s)}


def main() -> None:
    small = measure(make_scenario(8, 64), SMALL_STEPS)
    large = measure(make_scenario(128, 128 * 32), LARGE_STEPS)
    result = {f"peers_64_{name}": value for name, value in small.items()}
    result |= {f"peers_1024_{name}": value for name, value in large.items()}
    result["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    script_main.run(main)
