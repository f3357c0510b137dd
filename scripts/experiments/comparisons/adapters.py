"""What an adapter costs in loss: 20 steps of a fine-tune of SmolLM2-135M with LoRA, and of all its parameters.

All runs begin with the same weights and see the same tokens, 512 a step, in one process and with the arithmetic of a
run. scripts/smollm2.sh leaves the weights and the text in runs/smollm2. Six runs, about 20 minutes of one core, 5 GB of
memory. A line has the held-out loss before, after half of the steps, and after all, in nats per token.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from comparison import Comparison, Given, Line
from one_process import Batches, inputs_of, whole_model
from page import ROOT

from jaxdt.model.chain import Chain
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.runtime.run_job import RunInputs
from jaxdt.runtime.storage.entries import initial_params

CONFIG = "configs/baseline.py"
HERE = ROOT / "runs/smollm2"
MODEL, TEXT = HERE / "model", HERE / "text.tok"
ALL = "all parameters"
RATES = {ALL: (3e-5, 1e-4, 3e-4), "lora:8": (1e-3, 3e-3, 1e-2)}
FIELDS = {
    "data.path": str(TEXT),
    "plan.stages": 1,
    "plan.pipelines": 1,
    "plan.microbatches": 2,
    "train.microbatch_size": 4,
    "train.eval_microbatches": 16,
    "optim.warmup_steps": 2,
    "optim.weight_decay": 0.0,
}


def cases(given: Given) -> list[Line]:
    return [dict(trained=name, lr=lr, seed=seed) for seed in given.seeds for name in RATES for lr in RATES[name]]


def made(left: Sequence[Line], given: Given, folder: Path) -> Iterator[Line]:
    for path in (MODEL, TEXT):
        if not path.exists():
            raise BadInput(f"{path}: missing, expected what ./scripts/smollm2.sh leaves")
    for line in left:
        adapter = "" if line["trained"] == ALL else line["trained"]
        changes = {"model.adapter": adapter, "optim.lr": line["lr"], "train.seed": line["seed"]}
        steps = {"train.steps": given.steps, "optim.decay_steps": given.steps}
        inputs = inputs_of(CONFIG, FIELDS | changes | steps, MODEL)
        losses = [round(loss, 4) for loss in held_out_losses(inputs)]
        yield line | dict(held_out=losses, steps=given.steps, n_trained=inputs.config.model.facts.n_trained)


def held_out_losses(inputs: RunInputs) -> list[float]:
    config, batches = inputs.config, Batches(inputs.config, inputs.data)
    chain, held_out = Chain([whole_model(config)], initial(config), config.optim.clip_norm), batches.held_out()
    losses = [chain.evaluate(held_out)]
    for step in range(config.train.steps):
        chain.step(batches.of_step(step))
        if step + 1 in (config.train.steps // 2, config.train.steps):
            losses.append(chain.evaluate(held_out))
    return losses


def initial(config: RunConfig) -> list[Any]:
    """The parameters with which the run begins, of one stage."""
    names = [entry.name for entry in config.model.facts.entries]
    return [{name: jax.tree.map(jnp.asarray, tree) for name, tree in initial_params(config, names)}]


def values(folder: Path, out: Path) -> dict[str, Any] | None:
    lines = COMPARISON.read(folder)[1]
    rows = [
        [line["trained"], line["n_trained"], f"{line['lr']:g}", *(f"{loss:.3f}" for loss in line["held_out"])]
        for name in RATES
        for line in sorted((one for one in lines if one["trained"] == name), key=lambda one: one["lr"])
    ]
    best = {name: min(line["held_out"][-1] for line in lines if line["trained"] == name) for name in RATES if rows}
    if len(lines) < sum(map(len, RATES.values())):
        return None
    return dict(rows=rows, best=best, steps=lines[0]["steps"])


COMPARISON = Comparison(
    page=ROOT / "configs/adapters",
    cases=cases,
    made=made,
    values=values,
    n_seeds=1,
    steps=20,
    fields=("trained", "lr", "seed", "held_out", "steps", "n_trained"),
)
