"""A training in one process, with the arithmetic of a run and without its machines and sockets: what the comparisons of
losses and the ablation have in common."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxdt.api.config import load_config
from jaxdt.cli import run_inputs
from jaxdt.model.batches import Batch, Samples
from jaxdt.model.data import TokenFile
from jaxdt.model.optim import by_facts, optimizer
from jaxdt.model.stage import StageFunctions, StageOptions, build_stage
from jaxdt.run.config import RunConfig
from jaxdt.run.model_spec import ModelSpec
from jaxdt.runtime.run_job import RunInputs

ROOT = Path(__file__).resolve().parents[2]


def inputs_of(config: str, changes: Mapping[str, Any], model: Path | None = None) -> RunInputs:
    """The inputs of a run of a config file of this repository in which these fields are changed; one that begins with
    the model of a folder."""
    fields = load_config(ROOT / config)
    fields.update_from_flattened_dict(changes)
    return run_inputs.check(run_inputs.with_model(fields.to_dict(), model, False), run_inputs.RunOptions(), config)


def stages_of(config: RunConfig, model: ModelSpec, cut: Iterable[tuple[int, int]]) -> list[StageFunctions]:
    """The functions of the stages that have these layers of a model."""
    rule = optimizer(config.optim, roles=by_facts(model.facts))
    options = StageOptions(config.train.microbatch_size, config.remat, config.dtype, seq_len=config.seq_len)
    return [build_stage(model, lo, hi, rule, options) for lo, hi in cut]


def whole_model(config: RunConfig) -> StageFunctions:
    """The functions of one stage with all layers."""
    (stage,) = stages_of(config, config.model, [(0, config.model.facts.n_layers)])
    return stage


class Batches:
    """The microbatches of a run: those of each step with the config's seed, and those of its held-out loss."""

    def __init__(self, config: RunConfig, data: TokenFile):
        self._config = config
        self._samples = Samples(data, config.train, config.plan.microbatches, config.data.borders)

    def of_step(self, step: int) -> list[Batch]:
        config, together = self._config, range(self._config.plan.microbatches)
        seq_len = config.seq_lengths.at(step)
        return [self._samples.train(config.train.seed, step, m, seq_len, together) for m in together]

    def held_out(self) -> list[Batch]:
        """No batch comes twice."""
        seq_len = self._config.seq_len
        n_batches = min(self._config.train.eval_microbatches, self._samples.n_held_out(seq_len))
        return [self._samples.held_out(index, seq_len) for index in range(n_batches)]
