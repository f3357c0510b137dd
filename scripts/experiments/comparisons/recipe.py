"""What of the quickstart's settings lowers its held-out loss: the same training with one of them changed.

Each run trains the whole model of configs/quickstart.py in one process, as its peers do, and sees as many tokens. The
quickstart itself runs with each seed, the others with the first one. Thirteen runs in all, about 17 CPU minutes.
A line has the held-out loss after the last update, in nats per byte.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from comparison import Comparison, Given, Line
from one_process import inputs_of, whole_model
from page import ROOT

from comparisons.delay import trained

CONFIG = "configs/quickstart.py"
AS_IT_IS = "as it is"
EVALUATED = {"train.eval_microbatches": 64}  # 32,768 tokens in all runs
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
    "32 samples a step, 300 steps": {"train.microbatch_size": 4, "train.steps": 300, "optim.decay_steps": 300}
    | {"train.eval_microbatches": 128},
    "32 samples of 128 tokens a step": {"train.microbatch_size": 4, "data.seq_len": 128},
}


def cases(given: Given) -> list[Line]:
    first, *others = given.seeds
    return [dict(change=name, seed=first) for name in CHANGES] + [dict(change=AS_IT_IS, seed=seed) for seed in others]


def made(left: Sequence[Line], given: Given, folder: Path) -> Iterator[Line]:
    for line in left:
        inputs = inputs_of(CONFIG, EVALUATED | CHANGES[line["change"]] | {"train.seed": line["seed"]})
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
