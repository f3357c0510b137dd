"""What it costs in loss to average gradients in few bytes (sync.codec): the same training with each codec.

Four replicas of the whole model of configs/baseline.py in one process: each rounds its gradient, owns a quarter of the
vector, and makes up in the next step for what rounding has lost, as the peers of a run do and with their code. All arms
see the same tokens. Nine runs of 500 steps, about 6 CPU minutes. The result has, by codec:

  held_out    losses by seed, after the last update
  bytes       that are exchanged, over those of fp32
  gap         mean less that of fp32
  within      whether the gap is at most the spread of the seeds with fp32, largest less smallest
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison import Comparison, Given, Line
from one_process import Batches, inputs_of, whole_model
from page import ROOT

from jaxdt.model.chain import Chain
from jaxdt.model.data import TokenFile
from jaxdt.model.stage import StageFunctions
from jaxdt.model.vectors import STAGE_GROUP
from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.codec import EXACT, EXCHANGED, NONE, exchanged_bytes
from jaxdt.run.config import RunConfig, default_plan
from jaxdt.runtime.storage.gradient_slices import GradientSlices
from jaxdt.sync.exchange import sharding, slice_elements, update_scale

CONFIG = "configs/baseline.py"
STEPS = 500
SEEDS = (0, 1, 2)
REPLICAS = 4


def cases(given: Given) -> list[Line]:
    return [dict(codec=codec, seed=seed) for seed, codec in itertools.product(given.seeds, EXCHANGED)]


def made(left: Sequence[Line], given: Given, folder: Path) -> Iterator[Line]:
    changes = {"plan.stages": 1, "plan.pipelines": REPLICAS, "plan.microbatches": REPLICAS, "train.microbatch_size": 2}
    inputs = inputs_of(CONFIG, changes | {"train.steps": STEPS, "optim.decay_steps": STEPS})
    config, functions = inputs.config, whole_model(inputs.config)
    for line in left:
        train = replace(config.train, seed=line["seed"])
        own = replace(config, train=train, sync=replace(config.sync, codec=line["codec"]))
        held_out, share = trained(own, functions, inputs.data)
        yield line | dict(held_out=round(held_out, 5), bytes=round(share, 5))


def trained(config: RunConfig, functions: StageFunctions, data: TokenFile) -> tuple[float, float]:
    """(held-out loss after all updates in nats per token, bytes that were exchanged over those of fp32)."""
    train, plan, spec = config.train, default_plan(config), config.sync.codec_spec
    batches, chain = Batches(config, data), Chain([functions], train.seed, config.optim.clip_norm)
    replicas = {peer: GradientSlices(peer, lambda round: spec) for peer in range(REPLICAS)}
    members, n = tuple(replicas), functions.group_sizes[STAGE_GROUP]
    slices = sharding(n, members, slice_elements(config.sync.slice_bytes), spec.block).in_turn
    for step in range(train.steps):
        microbatches = batches.of_step(step)
        round_ = RoundId(RoundKind.GRADIENT, 0, step)
        for peer, replica in replicas.items():
            accs = [functions.zeros()]
            for m in plan.microbatches(peer):
                _, accs = chain.accumulate(microbatches[m], accs)
            replica.offer(round_, functions.gradient_vectors(accs[0])[STAGE_GROUP])
        sq_norm = 0.0
        for (lo, hi), owner in slices:
            for peer in set(members) - {owner}:
                key = ev.SliceKey(round_, lo, hi, peer)
                replicas[owner].put(key, replicas[peer].part_to_send(key))
            key = ev.SliceKey(round_, lo, hi)
            sq_norm += replicas[owner].sum(key, members)[1]
            replicas[0].put(key, replicas[owner].part_to_send(key))
        vectors = {STAGE_GROUP: replicas[0].result(round_)}
        scale = update_scale(sq_norm, plan.n_microbatches * train.microbatch_size, config.optim.clip_norm)
        chain.params[0], chain.states[0] = functions.update(chain.params[0], chain.states[0], vectors, scale)
        for replica in replicas.values():
            replica.feedback.commit([round_])
            replica.free([round_])
    sent, exact = (sum(exchanged_bytes(one, hi - lo) for (lo, hi), _ in slices) for one in (spec, EXACT))
    return chain.evaluate(batches.held_out()), sent / exact


def result(lines: Sequence[Line]) -> dict[str, Any]:
    """By codec, what the runs come to; under `bad` the codecs that cost more than another seed does."""
    by_codec = {codec: [line for line in lines if line["codec"] == codec] for codec in EXCHANGED}
    losses = {codec: [line["held_out"] for line in of_codec] for codec, of_codec in by_codec.items() if of_codec}
    if len({len(of_codec) for of_codec in losses.values()}) != 1 or len(losses[NONE]) < len(SEEDS):
        return {}
    spread = max(losses[NONE]) - min(losses[NONE])
    found: dict[str, Any] = {}
    for codec, held_out in losses.items():
        gap = statistics.fmean(held_out) - statistics.fmean(losses[NONE])
        share = by_codec[codec][0]["bytes"]
        found[codec] = {"held_out": held_out, "bytes": share, "gap": gap, "within": gap <= spread}
    return found | {"spread": spread, "bad": [codec for codec in losses if not found[codec]["within"]]}


def values(folder: Path, out: Path) -> dict[str, Any] | None:
    found = result(COMPARISON.read(folder)[1])
    if not found:
        return None
    rows = [
        [
            f"`{codec}`",
            f"{row['bytes']:.3f}",
            ", ".join(f"{loss:.3f}" for loss in row["held_out"]),
            f"{row['gap']:+.4f}",
        ]
        for codec, row in found.items()
        if codec in EXCHANGED
    ]
    return dict(rows=rows, spread=found["spread"])


COMPARISON = Comparison(
    page=ROOT / "configs/averages",
    cases=cases,
    made=made,
    values=values,
    result=result,
    n_seeds=len(SEEDS),
    seeds_min=len(SEEDS),
    fields=("codec", "seed", "held_out", "bytes"),
)
