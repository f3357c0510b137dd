"""Time one stage on this process's device, and compare the memory that it takes there with the estimate. Prints JSON.

    python scripts/bench/bench_stage.py --config=configs/small.py --stage=1 [--peak_tflops=989]

  forward_s, backward_s, gather_s, update_s  mean seconds of each kind of Work, as a peer times them before it joins
  work_flops   FLOP of one microbatch's forward and backward, 6 for each use of a parameter and token: what is
               recomputed, and attention scores, are not counted
  mfu          the share of --peak_tflops that these reach; null without --peak_tflops
  peak_bytes   the most that the device's allocator held; null on a CPU, which does not count it
  estimate_bytes, estimate  what jaxdt.run.memory says of a peer with one microbatch in flight, on its device; by kind

Quote the results from an otherwise idle machine only.
"""

import dataclasses
import json

import jax
from absl import flags

from jaxdt.build import memory_options, sync_groups
from jaxdt.cli import config_flag, environment, option_flags, script_main
from jaxdt.cli.run_inputs import RunOptions
from jaxdt.run.errors import BadInput
from jaxdt.run.memory import stage_memory
from jaxdt.run.work import WorkKind
from jaxdt.runtime.calibrate.stage_times import time_stage
from jaxdt.runtime.storage.store import Store, stage_functions

option_flags.define(RunOptions, "plan")
STAGE = flags.DEFINE_integer("stage", 0, "Index of the stage.", 0)
PEAK_TFLOPS = flags.DEFINE_float("peak_tflops", None, "What the device can do at most, in 1e12 FLOP/s.")
NAMES = {
    WorkKind.FORWARD: "forward_s",
    WorkKind.BACKWARD: "backward_s",
    WorkKind.GATHER: "gather_s",
    WorkKind.UPDATE: "update_s",
}


def main() -> None:
    inputs = config_flag.inputs(RunOptions(plan=flags.FLAGS.plan))
    config, plan, data = inputs.config, inputs.plan, inputs.data
    stage = STAGE.value
    if stage >= plan.n_stages:
        raise BadInput(f"--stage: got {stage}, the plan has the stages 0..{plan.n_stages - 1}")
    (lo, hi), peer = plan.stages[stage], plan.placement[stage][0]
    store = Store(config, plan, peer, data, stage_functions(config, plan, stage, vocab_size=data.vocab_size))
    step, groups = config.data.seq_growth_steps, sync_groups(config, plan)
    seconds = time_stage(store, peer, stage, groups, evaluates=False, step=step)
    shape, on_accelerator = config.microbatch_shape, jax.default_backend() != "cpu"
    options = memory_options(config, plan.schedule, lo, hi)
    memory = stage_memory(config.model, lo, hi, shape, 1, options, on_accelerator=on_accelerator)
    is_last = hi == config.model.facts.n_layers  # computes forward and backward as one Work
    used = config.model.facts.n_used_params(lo, hi)
    flops = 6.0 * shape.n_tokens * used
    work_s = seconds[WorkKind.BACKWARD] + (0.0 if is_last else seconds[WorkKind.FORWARD])
    device = jax.local_devices()[0]
    result = {
        "device": device.device_kind,
        "layers": [lo, hi],
        **{name: seconds[kind] for kind, name in NAMES.items()},
        "work_flops": flops,
        "mfu": flops / work_s / (1e12 * PEAK_TFLOPS.value) if PEAK_TFLOPS.value else None,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "estimate_bytes": memory.on_device if on_accelerator else memory.total,
        "estimate": dataclasses.asdict(memory),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    environment.restart_with_malloc_settings()
    script_main.run(main)
