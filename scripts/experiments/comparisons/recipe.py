"""What of the quickstart's settings lowers its held-out loss: the same training with one of them changed.

Each run trains the whole model of configs/quickstart.py in one process, as its peers do, and sees as many tokens. The
quickstart itself runs with each seed, the others with the first one. Thirteen runs in all, about 17 CPU minutes.
A line has the held-out loss after the last update, in nats per byte.
"""

import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from comparison import Comparison, Given, Line
from page import ROOT

from comparisons.delay import trained, whole_model
from jaxdt.cli import run_inputs

CONFIG = "configs/quickstart.py"
AS_IT_IS = "as it is"
CHANGES: dict[str, dict[str, Any]] = {
    AS_IT_IS: {},
    "AdamW, learning rate 1.5e-3": {"optim.name": "adamw", "optim.lr": 1.5e-3},
    "AdamW, learning rate 3e-3": {"optim.name": "adamw", "optim.lr": 3e-3},
    "AdamW, learning rate 6e-3": {"optim.name": "adamw", "optim.lr": 6e-3},
    "learning rate 0.01": {"optim.lr": 0.01},
    "learning rate 0.03": {"optim.lr": 0.03},
    "learned positions": {"model.positions": "learned"},
    "GeGLU": {"model.activation": "geglu"},
    "no weight decay": {"optim.weight_decay": 0.0},
    "32 samples a step, 300 steps": {"train.microbatch_size": 4, "train.steps": 300, "optim.decay_steps": 300},
    "32 samples of 128 tokens a step": {"train.microbatch_size": 4, "data.seq_len": 128},
}
EVAL_MICROBATCHES = 64  # of 8 samples of 64 tokens, in all runs as many tokens


def cases(given: Given) -> list[Line]:
    first, *others = given.seeds
    return [dict(change=name, seed=first) for name in CHANGES] + [dict(change=AS_IT_IS, seed=seed) for seed in others]


def made(left: Sequence[Line], given: Given, folder: Path) -> Iterator[Line]:
    for line in left:
        fields = runpy.run_path(str(ROOT / CONFIG))["get_config"]()
        fields.update_from_flattened_dict(CHANGES[line["change"]] | {"train.seed": line["seed"]})
        n_tokens = fields.train.microbatch_size * fields.data.seq_len
        fields.train.eval_microbatches = EVAL_MICROBATCHES * 8 * 64 // n_tokens
        inputs = run_inputs.check(fields.to_dict(), run_inputs.RunOptions(), CONFIG)
        held_out, _ = trained(inputs.config, whole_model(inputs.config), inputs.data)
        n_params = inputs.config.model.facts.n_trained
        yield line | dict(held_out=round(held_out, 5), steps=inputs.config.train.steps, n_params=n_params)


def values(folder: Path, out: Path) -> dict[str, Any] | None:
    lines = COMPARISON.read(folder)[1]
    of_config = [line["held_out"] for line in lines if line["change"] == AS_IT_IS]
    if {line["change"] for line in lines} != set(CHANGES) or len(of_config) < 2:
        return None
    first = {line["change"]: line for line in reversed(lines)}
    rows = [[name, first[name]["steps"], first[name]["n_params"], f"{first[name]['held_out']:.3f}"] for name in CHANGES]
    return dict(rows=rows, spread=max(of_config) - min(of_config), n_seeds=len(of_config))


COMPARISON = Comparison(
    page=ROOT / "configs/recipe",
    cases=cases,
    made=made,
    values=values,
    n_seeds=3,
    fields=("change", "seed", "held_out", "steps", "n_params"),
)
