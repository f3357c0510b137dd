"""Measures a profile's parts on this device: differences between small stages of the same model.

Four stages are compiled: the first, two in the middle with one layer and with three, and the last. What two more layers
cost is a layer; what a first stage costs more than a middle one is the embedding; and so on. All are timed in turn,
several times over, so that a slow phase of the machine falls on all of them.
"""

import statistics
from dataclasses import replace

from jaxdt.model.data import TokenFile
from jaxdt.runtime.calibrate.stage_times import time_codec, time_stage
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.spec import codec
from jaxdt.spec.config import RunConfig
from jaxdt.spec.plan import Plan
from jaxdt.spec.profile import CodecTimes, DeviceKind, PartTimes
from jaxdt.spec.sizes import sync_groups
from jaxdt.spec.work import BACKWARD, EVALUATE, FORWARD, GATHER, UPDATE

STAGES = ((0, 1), (1, 2), (2, 5), (5, 6))
FIRST, MIDDLE, LONG, LAST = range(4)
EXTRA_LAYERS = 2
Seconds = dict[str, float]


def measure_kind(config: RunConfig, data: TokenFile, codecs: list[str], n_rounds: int) -> DeviceKind:
    """Seconds of the config's model on this process's device, medians of `n_rounds` rounds."""
    model = replace(config.model, n_layers=STAGES[-1][1], n_shared_blocks=0, compression="none", compression_after=())
    config = replace(config, model=model, train=replace(config.train, eval_every_steps=1))
    plan = Plan(model.n_layers, STAGES, tuple((peer,) for peer in range(len(STAGES))), (1,))
    groups = [{g.name: g.n_elements for g in sync_groups(config, plan) if s in g.stages} for s in range(len(STAGES))]
    stores = [Store(config, plan, peer, data, stage_functions(config, plan, peer)) for peer in range(len(STAGES))]
    full_step = config.data.seq_growth_steps
    rounds = [
        [time_stage(store, stage, stage, groups[stage], True, full_step) for stage, store in enumerate(stores)]
        for _ in range(n_rounds)
    ]
    stages = [_medians([one[stage] for one in rounds]) for stage in range(len(STAGES))]
    passes = sorted(one[LONG][FORWARD] + one[LONG][BACKWARD] for one in rounds)
    shape = (config.train.microbatch_size, model.seq_len, model.d_model)
    times = {name: time_codec(codec.parse(name), shape, config.dtype) for name in codecs}
    return kind_of(stages, times, _spread(passes))


def kind_of(stages: list[Seconds], codecs: dict[str, CodecTimes], spread_frac: float) -> DeviceKind:
    """The parts that explain the seconds of the four stages; no part is below zero, whatever the noise."""
    layer = _part({kind: (stages[LONG][kind] - s) / EXTRA_LAYERS for kind, s in stages[MIDDLE].items()})
    work_s = max(0.0, stages[MIDDLE][FORWARD] - layer.forward_s)
    embedding = _part({kind: stages[FIRST][kind] - s for kind, s in stages[MIDDLE].items()})
    last, middle = stages[LAST], stages[MIDDLE]
    # The last stage's backward Work is forward and backward in one, with one Work's overhead.
    both = last[BACKWARD] - (middle[FORWARD] + middle[BACKWARD] - work_s)
    forward_s = max(0.0, last[EVALUATE] - middle[EVALUATE])
    backward_s = max(0.0, both - forward_s)
    head = PartTimes(forward_s, backward_s, *(max(0.0, last[kind] - middle[kind]) for kind in (GATHER, UPDATE)))
    return DeviceKind(layer, embedding, head, work_s, codecs, spread_frac)


def _part(seconds: Seconds) -> PartTimes:
    return PartTimes(*(max(0.0, seconds[kind]) for kind in (FORWARD, BACKWARD, GATHER, UPDATE)))


def _medians(rounds: list[Seconds]) -> Seconds:
    return {kind: statistics.median(one[kind] for one in rounds) for kind in rounds[0]}


def _spread(values: list[float]) -> float:
    """The middle half over the median."""
    quarter = len(values) // 4
    return (values[-1 - quarter] - values[quarter]) / statistics.median(values)
