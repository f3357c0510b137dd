"""Estimate of the memory that a stage's peer holds at its worst moment, in bytes.

Two moments count. While a peer computes, it holds parameters, optimizer moments and the accumulator; for every
microbatch between its forward and its backward a residual and the boundary tensors beside it; and what one backward
needs while it runs. While a peer updates, it holds beside the same state its own gradient as one vector, the slices of
the sum, the joined sum, and the new parameters, since the old ones are not donated. The exchange before the update
holds less. Per parameter that is 16 bytes while computing with Adam, and 32 at the update (fp32). With an accelerator
the own vector and the slices are in the host's memory; here they count as if there were one memory.

Where replicas may differ (sync.kind "groups" and "server") the update needs the gradient as one vector and the new
parameters. An exchange needs memory beside all that, since a mean for a checkpoint may be asked for at any time while
local steps go on: the own vector, the slices, the joined sum, and the result. The kind of sync says how many numbers an
exchange takes, and how many it keeps between two exchanges. With plan.schedule "stash" each microbatch in flight but
the newest keeps a version of the parameters. A server also holds vectors of its workers: gradients that they
contribute, or changes that they push, and parameters that it keeps aside.

Tensors that a peer sent are kept until the step is committed, within a budget. While a place of the plan is open
(`fixed` wiring), the replicas that stand in compute more microbatches than are counted here, and hold more of them.

A residual is what the backward reads besides the weights: the input under `recompute`; under `dots` also the results
of the weight products. `eval_shape` of the stage functions confirms residuals to the byte, and what a store holds in a
run confirms the rest within 5 %. The working memory of a backward was read off XLA's own figures for fp32 on CPU; it is
an estimate, good to a third.
"""

from dataclasses import dataclass

from jaxdt.spec.model import ModelConfig
from jaxdt.spec.sizes import DTYPE_BYTES

FLOAT_BYTES = 4
TOKEN_BYTES = 4


@dataclass(frozen=True)
class ReplicaCopies:
    """The bytes that a replica which may differ holds for some layers beside its state: `kept` all the time,
    `exchanging` while it averages, pushes or pulls."""

    kept: int = 0
    exchanging: int = 0


@dataclass(frozen=True)
class MemoryOptions:
    """The fields of a run's config that decide how much memory a peer takes. `delay`: the delay of the sync, in steps.
    `copies`: the copies that a replica holds for its layers where replicas may differ, else None. With `stashes` a
    microbatch keeps the parameters of its forward. `n_vectors`: vectors of one number a parameter that a server holds
    for its workers at most."""

    dtype: str = "float32"
    remat: str = "recompute"
    n_moments: int = 2
    delay: int = 0
    copies: ReplicaCopies | None = None
    stashes: bool = False
    n_vectors: int = 0


def state_bytes(model: ModelConfig, lo: int, hi: int, dtype: str = "float32", n_moments: int = 2) -> int:
    """Parameters, moments and accumulator of layers lo..hi-1, and the weights cast for one Work in another dtype."""
    cast_bytes = 0 if dtype == "float32" else DTYPE_BYTES[dtype]
    return model.stage_params(lo, hi) * (FLOAT_BYTES * (2 + n_moments) + cast_bytes)


def update_bytes(model: ModelConfig, lo: int, hi: int) -> int:
    """Memory that the update takes beside the state: own vector, slices of the sum, joined sum, new parameters. A peer
    without replicas holds all of them too."""
    return 4 * FLOAT_BYTES * model.stage_params(lo, hi)


def local_update_bytes(model: ModelConfig, lo: int, hi: int) -> int:
    """Memory that a local step takes beside the state, where replicas may differ: the gradient as one vector, and the
    new parameters."""
    return 2 * FLOAT_BYTES * model.stage_params(lo, hi)


def residual_bytes(model: ModelConfig, lo: int, hi: int, microbatch_size: int, dtype: str, remat: str) -> int:
    """Residual of one microbatch, between its forward and its backward. The last stage runs both as one program and
    keeps its input only."""
    if hi == model.n_layers or remat == "recompute":
        return input_bytes(model, lo, microbatch_size, dtype)
    n_layers = hi - lo
    saved_width = n_layers * model.saved_width + (n_layers - 1) * model.d_model
    saved_bytes = microbatch_size * model.seq_len * saved_width * DTYPE_BYTES[dtype]
    return saved_bytes + input_bytes(model, lo, microbatch_size, dtype)


def input_bytes(model: ModelConfig, lo: int, microbatch_size: int, dtype: str) -> int:
    """A stage's input: tokens on the first stage, else a boundary tensor."""
    if lo == 0:
        return microbatch_size * (model.seq_len + 1) * TOKEN_BYTES
    return model.boundary_numbers(microbatch_size) * DTYPE_BYTES[dtype]


def working_bytes(model: ModelConfig, lo: int, hi: int, microbatch_size: int, dtype: str) -> int:
    """Memory of one backward while it runs: values of all its layers at once; on the last stage also the logits in
    fp32, once as logits and once as their gradient."""
    numbers = microbatch_size * model.seq_len * model.working_width * (hi - lo)
    logits = 2 * microbatch_size * model.seq_len * model.vocab_size if hi == model.n_layers else 0
    return round(numbers * DTYPE_BYTES[dtype]) + logits * FLOAT_BYTES


def most_retained(model: ModelConfig, lo: int, hi: int, microbatch_size: int, dtype: str, retain_bytes: int) -> int:
    """Microbatches whose output and input gradient fit into `wiring.retain_bytes`, for layers lo..hi-1."""
    n_boundaries = max(1, (lo > 0) + (hi < model.n_layers))
    return retain_bytes // max(1, n_boundaries * model.boundary_numbers(microbatch_size) * DTYPE_BYTES[dtype])


def stage_memory_bytes(
    model: ModelConfig,
    lo: int,
    hi: int,
    microbatch_size: int,
    in_flight: int,
    options: MemoryOptions,
    retained: int = 0,
) -> int:
    """The larger of both moments, for layers lo..hi-1 with `in_flight` microbatches between forward and backward, each
    with one boundary tensor on its way in and one on its way out. `retained`: microbatches whose output and input
    gradient are kept until the commit, counted without a codec. With a delay both moments fall together, two steps
    are kept, and there are the parameters of the version before and a second accumulator. With `copies` an exchange
    falls together with either moment."""
    dtype, remat = options.dtype, options.remat
    n_boundaries = (lo > 0) + (hi < model.n_layers)
    boundary_bytes = n_boundaries * model.boundary_numbers(microbatch_size) * DTYPE_BYTES[dtype]
    retained_bytes = retained * boundary_bytes
    in_flight_bytes = in_flight * (residual_bytes(model, lo, hi, microbatch_size, dtype, remat) + boundary_bytes)
    computing_bytes = in_flight_bytes + working_bytes(model, lo, hi, microbatch_size, dtype)
    n_bytes = state_bytes(model, lo, hi, dtype, options.n_moments)
    n_bytes += options.n_vectors * FLOAT_BYTES * model.stage_params(lo, hi)
    if options.copies:
        stashed_bytes = (in_flight - 1) * FLOAT_BYTES * model.stage_params(lo, hi) if options.stashes else 0
        beside_bytes = options.copies.kept + options.copies.exchanging + stashed_bytes + retained_bytes
        return n_bytes + beside_bytes + max(computing_bytes, local_update_bytes(model, lo, hi))
    updating_bytes = update_bytes(model, lo, hi)
    if not options.delay:
        return n_bytes + retained_bytes + max(computing_bytes, updating_bytes)
    older_bytes = 2 * FLOAT_BYTES * model.stage_params(lo, hi)
    return n_bytes + older_bytes + 2 * retained_bytes + computing_bytes + updating_bytes
