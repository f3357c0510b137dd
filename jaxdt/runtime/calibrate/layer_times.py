"""Measures how long each layer of a model takes on this device, from differences between small stages.

Four stages are compiled: the first, a middle one with one layer, a middle one with three layers, and the last. The two
middle stages differ by two layers, which gives the time of a layer. The first stage and a middle one differ by the
embedding, and so on. The stages are timed in turn, several times, so that a slow phase of the machine affects all.

These stages are of a model of layers that are all alike. A layer of the run's model that is not like them is timed as a
stage of its own.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxdt.model.data import TokenFile
from jaxdt.run import codec
from jaxdt.run.config import RunConfig
from jaxdt.run.model_facts import LayerFacts, ModelFacts
from jaxdt.run.plan import Plan
from jaxdt.run.profile import CodecTimes, DeviceKind, PartTimes
from jaxdt.run.sizes import sync_groups
from jaxdt.run.work import WorkKind
from jaxdt.runtime.calibrate.stage_times import time_codec, time_stage
from jaxdt.runtime.storage.store import Store, stage_functions

STAGES = ((0, 1), (1, 2), (2, 5), (5, 6))
FIRST, MIDDLE, LONG, LAST = range(4)  # indices of STAGES
EXTRA_LAYERS = 2
Seconds = dict[str, float]  # kind of Work -> seconds


def measure_kind(config: RunConfig, data: TokenFile, codecs: list[str], n_rounds: int) -> DeviceKind:
    """Time the config's model on this process's device: medians of `n_rounds` rounds."""
    whole = replace(config, train=replace(config.train, eval_every_steps=1))
    config = replace(whole, model=config.model.with_equal_layers(STAGES[-1][1]))
    model = config.model
    rounds = _rounds(config, data, STAGES, range(len(STAGES)), n_rounds)
    stages = [_medians([seconds[stage] for seconds in rounds]) for stage in range(len(STAGES))]
    passes_s = sorted(seconds[LONG][WorkKind.FORWARD] + seconds[LONG][WorkKind.BACKWARD] for seconds in rounds)
    shape = (*config.microbatch_shape, model.facts.in_width)
    times = {name: time_codec(codec.parse(name), shape, config.dtype) for name in codecs}
    kind = kind_of(stages, times, _spread(passes_s))
    others: dict[str, PartTimes] = {}
    for layer in unlike_layers(whole.model.facts, model.facts.layers[1], by_program=model.has_own_sources):
        ranges = ((0, layer), (layer, layer + 1), (layer + 1, whole.model.facts.n_layers))
        rounds = _rounds(whole, data, ranges, (1,), n_rounds)
        seconds = _medians([seconds for (seconds,) in rounds])
        for work in (WorkKind.FORWARD, WorkKind.BACKWARD):
            seconds[work] -= kind.work_s
        others[str(whole.model.facts.layers[layer].like)] = _part(seconds)
    return replace(kind, accelerator=jax.default_backend() != "cpu", other_layers=others)


def unlike_layers(facts: ModelFacts, layer: LayerFacts, *, by_program: bool = False) -> list[int]:
    """One of each kind of layers that take another time than `layer`, as far as such a layer can be a stage of its own
    that has neither embedding nor head. `by_program`: layers of equal facts may compute something else."""
    found: dict[int, int] = {}
    for i in range(1, facts.n_layers - 1):
        is_unlike = replace(facts.layers[i], cut=layer.cut, like=layer.like) != layer
        is_unlike = is_unlike or (by_program and facts.layers[i].like != 0)
        if is_unlike and {i, i + 1} <= set(facts.cuts):
            found.setdefault(facts.layers[i].like, i)
    return list(found.values())


def _rounds(
    config: RunConfig, data: TokenFile, ranges: tuple[tuple[int, int], ...], timed: Sequence[int], n_rounds: int
) -> list[list[Seconds]]:
    """The seconds of these stages of a plan, in each round."""
    plan = Plan(config.model.facts.n_layers, ranges, tuple((peer,) for peer in range(len(ranges))), (1,))
    functions = {stage: stage_functions(config, plan, stage, vocab_size=data.vocab_size) for stage in timed}
    stores = [Store(config, plan, stage, data, functions[stage]) for stage in timed]
    groups, step = sync_groups(config, plan), config.data.seq_growth_steps
    return [
        [
            time_stage(store, stage, stage, groups, evaluates=True, step=step)
            for stage, store in zip(timed, stores, strict=True)
        ]
        for _ in range(n_rounds)
    ]


def kind_of(stages: list[Seconds], codecs: dict[str, CodecTimes], spread_frac: float) -> DeviceKind:
    """The times of layer, embedding and head that explain the seconds of the four stages. Noise cannot make them
    negative."""
    layer = _part({kind: (stages[LONG][kind] - s) / EXTRA_LAYERS for kind, s in stages[MIDDLE].items()})
    work_s = max(0.0, stages[MIDDLE][WorkKind.FORWARD] - layer.forward_s)
    embedding = _part({kind: stages[FIRST][kind] - s for kind, s in stages[MIDDLE].items()})
    last = stages[LAST]
    middle = stages[MIDDLE]
    # The last stage's backward Work contains its forward, and has the overhead of one Work.
    both_s = last[WorkKind.BACKWARD] - (middle[WorkKind.FORWARD] + middle[WorkKind.BACKWARD] - work_s)
    forward_s = max(0.0, last[WorkKind.EVALUATE] - middle[WorkKind.EVALUATE])
    backward_s = max(0.0, both_s - forward_s)
    head = PartTimes(
        forward_s, backward_s, *(max(0.0, last[kind] - middle[kind]) for kind in (WorkKind.GATHER, WorkKind.UPDATE))
    )
    return DeviceKind(layer, embedding, head, work_s, codecs, spread_frac)


def _part(seconds: Seconds) -> PartTimes:
    return PartTimes(
        *(max(0.0, seconds[kind]) for kind in (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.GATHER, WorkKind.UPDATE))
    )


def _medians(rounds: list[Seconds]) -> Seconds:
    return {kind: statistics.median(seconds[kind] for seconds in rounds) for kind in rounds[0]}


def _spread(values: list[float]) -> float:
    """The width of the middle half of sorted values, divided by their median."""
    quarter = len(values) // 4
    return (values[-1 - quarter] - values[quarter]) / statistics.median(values)
