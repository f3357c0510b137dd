"""c_dp and c_pp from a model, and how its layers are cut (specs: DT-FM Sec. 1)."""

from dataclasses import dataclass, replace

from jaxdt.core.errors import BadInput, nearest
from jaxdt.core.gpt import GPTConfig, gpt_config
from jaxdt.core.plan import even_shares, ranges
from planner import layers

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Workload:
    """What one step moves and computes. `model` is None when only byte counts were given."""

    n_layers: int
    stages: tuple[tuple[int, int], ...]
    c_dp_bytes: float
    c_pp_bytes: float
    shares: tuple[int, ...]
    model: GPTConfig | None = None


def from_bytes(n_stages: int, shares: tuple[int, ...], c_dp_bytes: float, c_pp_bytes: float, n_layers: int) -> Workload:
    """Byte counts as given; the layers are only cut evenly."""
    layers.check_count(n_layers, n_stages)
    return Workload(n_layers, ranges(even_shares(n_layers, n_stages)), c_dp_bytes, c_pp_bytes, shares)


def from_model(
    n_stages: int, n_pipelines: int, preset: str, global_batch: int, sequence: int, dtype: str, microbatch_size: int
) -> Workload:
    """c_dp: fp32 gradients of the largest stage. c_pp: what the pipeline with most samples sends over one boundary."""
    model = gpt_config(preset, **({"seq_len": sequence} if sequence else {}))
    if dtype not in NUMBER_BYTES:
        raise BadInput(
            f"--dtype: got {dtype!r}, expected one of {', '.join(NUMBER_BYTES)}{nearest(dtype, NUMBER_BYTES)}"
        )
    if microbatch_size < 1 or global_batch % microbatch_size:
        raise BadInput(f"--microbatch_size: got {microbatch_size}, expected a divisor of --global_batch {global_batch}")
    shares = microbatch_shares(global_batch // microbatch_size, n_pipelines)
    stages = layers.split(model, n_stages)
    c_dp_bytes = GRADIENT_BYTES * max(model.stage_params(lo, hi) for lo, hi in stages)
    c_pp_bytes = NUMBER_BYTES[dtype] * shares[0] * model.boundary_numbers(microbatch_size)
    return Workload(model.n_layers, stages, c_dp_bytes, c_pp_bytes, shares, model)


def microbatch_shares(n_microbatches: int, n_pipelines: int) -> tuple[int, ...]:
    """Microbatches of every pipeline, as even as they go."""
    if n_microbatches < n_pipelines:
        raise BadInput(f"microbatches: got {n_microbatches}, expected at least one for each of {n_pipelines} pipelines")
    return even_shares(n_microbatches, n_pipelines)


def recut(workload: Workload, stages: tuple[tuple[int, int], ...]) -> Workload:
    """The workload with other layer ranges; the largest stage sets c_dp."""
    c_dp_bytes = GRADIENT_BYTES * max(workload.model.stage_params(lo, hi) for lo, hi in stages)
    return replace(workload, stages=stages, c_dp_bytes=c_dp_bytes)
