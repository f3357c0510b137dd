"""What delayed updates cost in loss: the same run with sync.delay 0 and 1 from several seeds, each in one process.

    python scripts/experiments/delay_loss.py --config=configs/quickstart.py --config.sync.delay_after_steps=50
    [--seeds=0,1,2]

Both arms see the same tokens and apply as many updates; stages and codec of the config are left out, since neither
changes what is computed (a codec would, a little). A line per seed and arm, then one of JSON:

  held_out, training   losses by arm and seed: held-out after the last update, training over the last 20 steps
  spread, deviation    largest less smallest of delay 0's, and their standard deviation
  gap                  mean of delay 1 less mean of delay 0
  within               is the gap at most the spread
"""

import json
import statistics
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jaxdt.cli import run_flags, script_main
from jaxdt.model.data import TokenFile
from jaxdt.model.optim import optimizer
from jaxdt.model.stage import StageFunctions, StageOptions, build_stage
from jaxdt.runtime.storage.parameter_versions import ParameterVersions
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput

SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "At least two seeds.")
LAST_STEPS = 20  # of the training loss
ARMS = {"delay 0": 0, "delay 1": 1}


def main() -> int:
    run_flags.required("config")
    if len(SEEDS.value) < 2 or not all(seed.isdecimal() for seed in SEEDS.value):
        raise BadInput(f"--seeds: got {','.join(SEEDS.value)}, expected two or more integers >= 0")
    config, _, data = run_flags.config_and_plan()
    functions = whole_model(config)
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    print("seed  arm      held-out  training", flush=True)
    for seed in map(int, SEEDS.value):
        for arm, delay in ARMS.items():
            own = replace(config, train=replace(config.train, seed=seed), sync=replace(config.sync, delay=delay))
            held_out, training = trained(own, functions, data)
            found[arm].append((held_out, training))
            print(f"{seed:4}  {arm}  {held_out:8.4f}  {training:8.4f}", flush=True)
    print(json.dumps({"config_steps": config.train.steps, "seeds": SEEDS.value} | summary(found)))
    return 0


def summary(found: dict[str, list[tuple[float, float]]]) -> dict[str, dict]:
    """By measure, from (held-out, training) losses by arm and seed."""
    columns = {
        measure: {arm: [losses[column] for losses in found[arm]] for arm in ARMS}
        for column, measure in enumerate(("held_out", "training"))
    }
    return {measure: arms | _compared(*arms.values()) for measure, arms in columns.items()}


def _compared(plain: list[float], delayed: list[float]) -> dict[str, float | bool]:
    spread, gap = max(plain) - min(plain), statistics.mean(delayed) - statistics.mean(plain)
    return {"spread": spread, "deviation": statistics.stdev(plain), "gap": gap, "within": gap <= spread}


def whole_model(config: RunConfig) -> StageFunctions:
    """The functions of one stage with all layers."""
    options = StageOptions(config.train.microbatch_size, config.remat, config.dtype)
    return build_stage(config.model, 0, config.model.n_layers, optimizer(config.optim), options)


def trained(config: RunConfig, functions: StageFunctions, data: TokenFile) -> tuple[float, float]:
    """(held-out loss after all updates, training loss of the last steps), nats per token."""
    versions = ParameterVersions(functions, config.delay, config.train.seed)
    losses = [_step(config, functions, versions, data, step) for step in range(config.train.steps)]
    return _held_out(config, functions, versions, data), statistics.mean(losses[-LAST_STEPS:])


def _step(
    config: RunConfig, functions: StageFunctions, versions: ParameterVersions, data: TokenFile, step: int
) -> float:
    """The step's mean loss; its gradient is one of the version that the delay says, its update the newest's."""
    train, n_microbatches, seq_len = config.train, config.plan.microbatches, config.seq_lengths.at(step)
    params, acc, total = versions.of(step), functions.zeros(), 0.0
    for microbatch in range(n_microbatches):
        tokens_BT = data.train_batch(train.seed, step, microbatch, train.microbatch_size, seq_len, n_microbatches)
        loss, _, acc = functions.loss_backward(params, tokens_BT[:, :-1], tokens_BT[:, 1:], acc)
        total += float(loss)
    n_samples = n_microbatches * train.microbatch_size
    vectors = functions.gradient_vectors(acc)
    norm, bound = float(_norm(vectors)) / n_samples, config.optim.clip_norm
    versions.update(vectors, (bound / norm if bound and norm > bound else 1.0) / n_samples)
    return total / n_samples


@jax.jit
def _norm(vectors: dict[str, jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(vector)) for vector in vectors.values()))


def _held_out(config: RunConfig, functions: StageFunctions, versions: ParameterVersions, data: TokenFile) -> float:
    """The mean loss of the newest version, over the windows that a run measures too."""
    sizes = config.train.microbatch_size, config.model.seq_len
    n_batches = min(config.train.eval_microbatches, data.n_eval_batches(*sizes))
    batches = [data.eval_batch(index, *sizes) for index in range(n_batches)]
    sums = [functions.eval_loss(versions.params, tokens[:, :-1], tokens[:, 1:]) for tokens in batches]
    return float(np.mean([float(loss) for loss in sums])) / config.train.microbatch_size


if __name__ == "__main__":
    script_main.run(main)
