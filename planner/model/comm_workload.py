"""The byte counts of Eq. 1-4 (c_dp and c_pp), given or derived from a model whose layers are cut into stages.

Source of the equations: DT-FM (arXiv 2206.01288), Sec. 3.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxdt.build import exchanges_per_step
from jaxdt.run import codec as codecs
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.memory import FLOAT_BYTES
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.plan import even_shares, ranges
from jaxdt.run.sizes import DTYPE_BYTES
from planner.model import layer_cuts


class CommBytes(NamedTuple):
    """The sizes of Eq. 1-4: gradients of the largest stage, and what the busiest pipeline sends over a boundary; and
    how often the replicas of a stage exchange their vector a step, in the mean."""

    c_dp_bytes: float
    c_pp_bytes: float
    exchanges_per_step: float = 1.0


@dataclass(frozen=True)
class CommWorkload:
    """The bytes that one step moves, with layers and microbatches cut. shares[p] are the microbatches of pipeline p.
    `model` is None when only bytes were given; `dtype` is then "", else the dtype of the tensors that cross boundaries,
    before a codec."""

    n_layers: int
    stages: layer_cuts.Ranges
    sizes: CommBytes
    shares: tuple[int, ...]
    model: ModelSpec | None = None
    dtype: str = ""


def from_bytes(
    n_stages: int, shares: tuple[int, ...], c_dp_bytes: float, c_pp_bytes: float, n_layers: int
) -> CommWorkload:
    """The workload of given byte counts, with layers cut evenly."""
    layer_cuts.check_count(n_layers, n_stages)
    return CommWorkload(n_layers, ranges(even_shares(n_layers, n_stages)), CommBytes(c_dp_bytes, c_pp_bytes), shares)


def from_run(n_stages: int, n_pipelines: int, run: RunConfig) -> CommWorkload:
    """The workload of a run: fp32 gradients, and boundaries in its dtype and codec."""
    model, n_tokens = run.model, run.microbatch_shape.n_tokens
    shares = microbatch_shares(run.plan.microbatches, n_pipelines)
    cuts = list(model.facts.cuts)
    layer_cuts.check_count(len(cuts) - 1, n_stages)
    stages = layer_cuts.split_trained(model.facts, n_stages)
    spec = codecs.parse(run.codec)
    c_pp_bytes = shares[0] * codecs.wire_bytes(spec, model.facts.boundary_numbers(n_tokens), DTYPE_BYTES[run.dtype])
    return CommWorkload(
        n_layers=model.facts.n_layers,
        stages=stages,
        sizes=CommBytes(largest_gradient_bytes(model, stages), c_pp_bytes, exchanges_per_step(run)),
        shares=shares,
        model=model,
        dtype=run.dtype,
    )


def largest_gradient_bytes(model: ModelSpec, stages: layer_cuts.Ranges) -> int:
    """c_dp: fp32 gradients of the largest stage."""
    return FLOAT_BYTES * max(model.facts.stage_trained(lo, hi) for lo, hi in stages)


def recut(workload: CommWorkload, stages: layer_cuts.Ranges) -> CommWorkload:
    """The workload with other layer ranges; the largest stage sets c_dp."""
    assert workload.model is not None  # only layers of a model have sizes
    sizes = workload.sizes._replace(c_dp_bytes=largest_gradient_bytes(workload.model, stages))
    return replace(workload, stages=stages, sizes=sizes)


def microbatch_shares(n_microbatches: int, n_pipelines: int) -> tuple[int, ...]:
    """Microbatches of every pipeline, as even as possible."""
    if n_microbatches < n_pipelines:
        raise BadInput(f"microbatches: got {n_microbatches}, expected at least one for each of {n_pipelines} pipelines")
    return even_shares(n_microbatches, n_pipelines)
