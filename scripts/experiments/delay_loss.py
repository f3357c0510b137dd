"""Measure what delayed updates cost in loss: the same run with sync.delay 0 and 1 from several seeds, in one process.

    python scripts/experiments/delay_loss.py --config=configs/quickstart.py --config.sync.delay_after_steps=50
    [--seeds=0,1,2] [--out=configs/delay]

Both arms see the same tokens and apply the same number of updates. The config's stages and codec are not used: stages
do not change what is computed, and a codec would change it a little. Prints a line per seed and arm, then one JSON
object:

  held_out, training   losses by arm and seed: held-out after the last update, training over the last 20 steps
  spread, deviation    of the losses with delay 0: largest less smallest, and standard deviation
  gap                  mean with delay 1 less mean with delay 0
  within               whether the gap is at most the spread

--out receives each held-out loss as soon as it is there (losses.jsonl), and README.md made of all that stand there
(delay_costs/page.py).
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path

from absl import flags
from delay_costs import page
from ml_collections import config_flags

from jaxdt.cli import run_flags, script_main
from jaxdt.model.chain import Chain
from jaxdt.model.data import TokenFile
from jaxdt.model.optim import by_role, optimizer
from jaxdt.model.stage import StageFunctions, StageOptions, build_stage
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput

SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Two or more seeds.")
OUT = flags.DEFINE_string("out", None, "Folder with losses.jsonl and a page, to which the losses are added.")
LAST_STEPS = 20  # the training loss is a mean over them
ARMS = {"delay 0": 0, "delay 1": 1}


def main() -> int:
    run_flags.required("config")
    if len(SEEDS.value) < 2 or not all(seed.isdecimal() for seed in SEEDS.value):
        raise BadInput(f"--seeds: got {','.join(SEEDS.value)}, expected two or more integers >= 0")
    config, _, data = run_flags.config_and_plan()
    functions = whole_model(config)
    losses: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    print("seed  arm      held-out  training", flush=True)
    for seed in map(int, SEEDS.value):
        for arm, delay in ARMS.items():
            arm_config = replace(config, train=replace(config.train, seed=seed), sync=replace(config.sync, delay=delay))
            held_out, training = trained(arm_config, functions, data)
            losses[arm].append((held_out, training))
            print(f"{seed:4}  {arm}  {held_out:8.4f}  {training:8.4f}", flush=True)
            if OUT.value:
                record(Path(OUT.value), arm_config, held_out)
    print(json.dumps({"config_steps": config.train.steps, "seeds": SEEDS.value} | summary(losses)))
    return 0


def record(folder: Path, config: RunConfig, held_out: float) -> None:
    """Add a loss to the raw data of a folder and write its page again."""
    folder.mkdir(parents=True, exist_ok=True)
    optim = config.optim
    run = {
        "config": str(config_flags.get_config_filename(run_flags.FLAGS["config"])),
        "steps": config.train.steps,
        "lr": optim.lr,
        "b1": optim.b1,
        "gradient_frac": optim.gradient_frac,
        "seed": config.train.seed,
        "delay": config.sync.delay,
        "held_out": round(held_out, 5),
    }
    page.add(folder / page.FILE, run)
    (folder / "README.md").write_text(page.page(folder))


def summary(losses: dict[str, list[tuple[float, float]]]) -> dict[str, dict]:
    """The JSON object by measure. `losses`: (held-out, training) of each seed, by arm."""
    result = {}
    for column, measure in enumerate(("held_out", "training")):
        arms = {arm: [pair[column] for pair in losses[arm]] for arm in ARMS}
        result[measure] = arms | _compared(*arms.values())
    return result


def _compared(prompt: list[float], delayed: list[float]) -> dict[str, float | bool]:
    spread = max(prompt) - min(prompt)
    gap = statistics.mean(delayed) - statistics.mean(prompt)
    return {"spread": spread, "deviation": statistics.stdev(prompt), "gap": gap, "within": gap <= spread}


def whole_model(config: RunConfig) -> StageFunctions:
    """The functions of one stage with all layers."""
    options = StageOptions(config.train.microbatch_size, config.remat, config.dtype, seq_len=config.seq_len)
    facts = config.model.facts
    rule = optimizer(config.optim, decays=by_role(facts))
    return build_stage(config.model, 0, facts.n_layers, rule, options)


def trained(config: RunConfig, functions: StageFunctions, data: TokenFile) -> tuple[float, float]:
    """(held-out loss after all updates, training loss of the last steps), nats per token. The gradient of a step is
    that of the version that the delay prescribes; the update is applied to the newest version."""
    train, n_microbatches = config.train, config.plan.microbatches
    chain = Chain([functions], train.seed, config.optim.clip_norm)
    before, losses = list(chain.params), list[float]()
    for step in range(train.steps):
        params = list(chain.params)
        microbatches = [
            data.train_batch(train.seed, step, m, train.microbatch_size, config.seq_lengths.at(step), n_microbatches)
            for m in range(n_microbatches)
        ]
        losses.append(chain.step(microbatches, params if config.delay.version_of(step) == step else before))
        before = params
    size, seq_len = train.microbatch_size, config.seq_len
    n_batches = min(train.eval_microbatches, data.n_eval_batches(size, seq_len))
    held_out = chain.evaluate([data.eval_batch(index, size, seq_len) for index in range(n_batches)])
    return held_out, statistics.mean(losses[-LAST_STEPS:])


if __name__ == "__main__":
    script_main.run(main)
