"""c_dp and c_pp from a model, and how its layers are cut (specs: DT-FM Sec. 1)."""

from dataclasses import dataclass, replace

from jaxdt.spec.errors import BadInput, nearest
from jaxdt.spec.memory import FLOAT_BYTES
from jaxdt.spec.model import GPTConfig, gpt_config
from jaxdt.spec.plan import even_shares, ranges
from jaxdt.spec.sizes import DTYPE_BYTES
from planner.model import layers


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


def model_of(preset: str, sequence: int | None) -> GPTConfig:
    return gpt_config(preset, **({"seq_len": sequence} if sequence else {}))


def check_choice(name: str, value: str, choices: tuple[str, ...]):
    if value not in choices:
        raise BadInput(f"--{name}: got {value!r}, expected one of {', '.join(choices)}{nearest(value, choices)}")


def n_microbatches(global_batch: int, microbatch_size: int) -> int:
    """Of one step over all pipelines."""
    if microbatch_size < 1 or global_batch < 1 or global_batch % microbatch_size:
        raise BadInput(f"--microbatch_size: got {microbatch_size}, expected a divisor of --global_batch {global_batch}")
    return global_batch // microbatch_size


def from_model(
    n_stages: int, n_pipelines: int, model: GPTConfig, global_batch: int, dtype: str, microbatch_size: int
) -> Workload:
    """c_dp: fp32 gradients of the largest stage. c_pp: what the pipeline with most samples sends over one boundary."""
    check_choice("dtype", dtype, tuple(DTYPE_BYTES))
    shares = microbatch_shares(n_microbatches(global_batch, microbatch_size), n_pipelines)
    cuts = layers.cut_points(model)
    layers.check_count(len(cuts) - 1, n_stages)
    stages = layers.split(cuts, n_stages, layers.parameter_load(model), lambda stage, lo, hi: True)
    c_dp_bytes = FLOAT_BYTES * max(model.stage_params(lo, hi) for lo, hi in stages)
    c_pp_bytes = DTYPE_BYTES[dtype] * shares[0] * model.boundary_numbers(microbatch_size)
    return Workload(model.n_layers, stages, c_dp_bytes, c_pp_bytes, shares, model)


def microbatch_shares(n_microbatches: int, n_pipelines: int) -> tuple[int, ...]:
    """Microbatches of every pipeline, as even as they go."""
    if n_microbatches < n_pipelines:
        raise BadInput(f"microbatches: got {n_microbatches}, expected at least one for each of {n_pipelines} pipelines")
    return even_shares(n_microbatches, n_pipelines)


def recut(workload: Workload, stages: tuple[tuple[int, int], ...]) -> Workload:
    """The workload with other layer ranges; the largest stage sets c_dp."""
    c_dp_bytes = FLOAT_BYTES * max(workload.model.stage_params(lo, hi) for lo, hi in stages)
    return replace(workload, stages=stages, c_dp_bytes=c_dp_bytes)
