"""Estimate of the memory that a stage's peer holds at its worst moment, in bytes.

Two moments count. While a peer computes, it holds parameters, optimizer moments and the accumulator; for every
microbatch between its forward and its backward a residual and the boundary tensors beside it; and what one backward
needs while it runs. While a peer updates, it holds beside the same state its own gradient as one vector, the slices of
the sum, the joined sum, and the new parameters, since the old ones are not donated. The exchange before the update
holds less. Per trained parameter that is 16 bytes while computing with Adam, and 32 at the update (fp32); one that is
not trained takes 4. A frozen matrix or table takes 2 where the peer computes in bf16, and where all its numbers are
numbers of bf16: only who reads them knows the latter, so it is not counted here.

A peer on an accelerator holds a part of that in the host's memory: the own vector and the slices, vectors of others,
boundary tensors on their way and kept ones. These do not count against the device, on which the update takes 24 bytes
per parameter. A peer on a CPU has one memory for all.

Where replicas may differ (sync.kind "groups" and "server") the update needs the gradient as one vector and the new
parameters. An exchange needs memory beside all that, since a mean for a checkpoint may be asked for at any time while
local steps go on: the own vector, the slices, the joined sum, and the result. The kind of sync says how many numbers an
exchange takes, and how many it keeps between two exchanges. With plan.schedule "stash" each microbatch in flight but
the newest keeps a version of the parameters. The last stage has no moments of a table that it shares with the first
(jaxdt.sync.shared_table). A server also holds vectors of its workers: gradients that they
contribute, or changes that they push, and snapshots.

Where a codec loses a part of each gradient or average (sync.codec), a replica holds what it owes, twice: as it is
before a step or a mean counts, and after.

Tensors that a peer sent are kept until the step is committed, within a budget. While a place of the plan is open
(`fixed` wiring), the replicas that stand in compute more microbatches than are counted here, and hold more of them.

A residual is what the backward reads besides the weights: the input under `recompute`; under `dots` also the results
of the weight products. `eval_shape` of the stage functions confirms residuals to the byte, and what a store holds in a
run confirms the rest within 5 %. The working memory of a backward was read off XLA's own figures for fp32 on CPU; it is
an estimate, good to a third.
"""

from dataclasses import dataclass

from jaxdt.run.model_facts import NO_MOMENTS, TWO_MOMENTS, MicrobatchShape, Moments
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.sizes import DTYPE_BYTES

FLOAT_BYTES = 4
TOKEN_BYTES = 4
OWED_VECTORS = 2  # of a step: what is owed before it counts, and after


@dataclass(frozen=True)
class ReplicaCopies:
    """The bytes that a replica which may differ holds for some layers beside its state: `kept` all the time,
    `exchanging` while it averages, pushes or pulls. `on_host`: of both, what is not on an accelerator."""

    kept: int = 0
    exchanging: int = 0
    on_host: int = 0


@dataclass(frozen=True)
class StageMemory:
    """The bytes of a stage's peer at one moment, by kind of number. `parameters`: with those of other versions, and the
    weights cast for one Work; `moments`: with the anchor and the momentum of an outer optimizer; `gradients`:
    accumulators, and the mean that an update reads; `activations`: residuals, and the values of a backward while it
    runs; `on_host`: copies of gradients and of state for an exchange, and boundary tensors."""

    parameters: int
    moments: int
    gradients: int
    activations: int
    on_host: int

    @property
    def on_device(self) -> int:
        """The bytes of an accelerator's own memory."""
        return self.parameters + self.moments + self.gradients + self.activations

    @property
    def total(self) -> int:
        """The bytes of a peer with one memory for all."""
        return self.on_device + self.on_host


@dataclass(frozen=True)
class MemoryOptions:
    """The fields of a run's config that decide how much memory a peer takes. `delay`: the delay of the sync, in steps.
    `copies`: the copies that a replica holds for its layers where replicas may differ, else None. With `stashes` a
    microbatch keeps the parameters of its forward. `n_vectors`: vectors of one number a parameter that a server holds
    for its workers at most. `owes`: a codec loses a part of each gradient, which is owed to a later step
    (jaxdt.sync.error_feedback); without `copies`, which count it."""

    dtype: str = "float32"
    remat: str = "recompute"
    moments: Moments = TWO_MOMENTS
    delay: int = 0
    copies: ReplicaCopies | None = None
    stashes: bool = False
    n_vectors: int = 0
    owes: bool = False


def state_bytes(model: ModelSpec, lo: int, hi: int, dtype: str = "float32", moments: Moments = TWO_MOMENTS) -> int:
    """Parameters of layers lo..hi-1, moments and accumulator of those that are trained, and the weights cast for one
    Work in another dtype, which frozen ones are already, but for those of a module of one's own."""
    cast_bytes = 0 if dtype == "float32" else DTYPE_BYTES[dtype]
    of_trained = FLOAT_BYTES * model.facts.state_numbers(lo, hi, moments)
    n_narrow = model.facts.stage_narrow(lo, hi) if cast_bytes and not model.has_own_sources else 0
    n_wide = model.facts.stage_params(lo, hi) - n_narrow
    return n_wide * (FLOAT_BYTES + cast_bytes) + n_narrow * cast_bytes + of_trained


def update_bytes(model: ModelSpec, lo: int, hi: int) -> int:
    """Memory that the update takes beside the state: own vector, slices of the sum, joined sum, new parameters. A peer
    without replicas holds all of them too."""
    return 4 * FLOAT_BYTES * model.facts.stage_trained(lo, hi)


def residual_bytes(model: ModelSpec, lo: int, hi: int, shape: MicrobatchShape, dtype: str, remat: str) -> int:
    """Residual of one microbatch, between its forward and its backward. The last stage runs both as one program and
    keeps its input only."""
    if hi == model.facts.n_layers or remat == "recompute":
        return input_bytes(model, lo, shape, dtype)
    saved_bytes = shape.n_tokens * model.facts.saved(lo, hi) * DTYPE_BYTES[dtype]
    return saved_bytes + input_bytes(model, lo, shape, dtype)


def input_bytes(model: ModelSpec, lo: int, shape: MicrobatchShape, dtype: str) -> int:
    """A stage's input: tokens on the first stage, else a boundary tensor."""
    if lo == 0:
        return shape.size * (shape.seq_len + 1) * TOKEN_BYTES
    return model.facts.boundary_numbers(shape.n_tokens) * DTYPE_BYTES[dtype]


def working_bytes(model: ModelSpec, lo: int, hi: int, shape: MicrobatchShape, dtype: str) -> int:
    """Memory of one backward while it runs: values of all its layers at once; on the last stage also the logits in
    fp32, once as logits and once as their gradient."""
    numbers = shape.n_tokens * model.facts.working(lo, hi, shape.seq_len)
    logits = 2 * shape.n_tokens * model.facts.vocab_size if hi == model.facts.n_layers else 0
    return round(numbers * DTYPE_BYTES[dtype]) + logits * FLOAT_BYTES


def most_retained(model: ModelSpec, lo: int, hi: int, shape: MicrobatchShape, dtype: str, retain_bytes: int) -> int:
    """Microbatches whose output and input gradient fit into `wiring.retain_bytes`, for layers lo..hi-1."""
    n_boundaries = max(1, (lo > 0) + (hi < model.facts.n_layers))
    return retain_bytes // max(1, n_boundaries * model.facts.boundary_numbers(shape.n_tokens) * DTYPE_BYTES[dtype])


def stage_memory(
    model: ModelSpec,
    lo: int,
    hi: int,
    shape: MicrobatchShape,
    in_flight: int,
    options: MemoryOptions,
    retained: int = 0,
    *,
    on_accelerator: bool = False,
) -> StageMemory:
    """The larger of both moments, for layers lo..hi-1 with `in_flight` microbatches between forward and backward, each
    with one boundary tensor on its way in and one on its way out. `retained`: microbatches whose output and input
    gradient are kept until the commit, counted without a codec. With a delay both moments fall together, two steps
    are kept, and there are the parameters of the version before and a second accumulator. With `copies` an exchange
    falls together with either moment. `on_accelerator`: the larger is the one that takes more of the device's own
    memory."""
    dtype, copies = options.dtype, options.copies
    n_boundaries = (lo > 0) + (hi < model.facts.n_layers)
    boundary_bytes = n_boundaries * model.facts.boundary_numbers(shape.n_tokens) * DTYPE_BYTES[dtype]
    vector_bytes = FLOAT_BYTES * model.facts.stage_trained(lo, hi)
    n_moments = model.facts.moment_numbers(lo, hi, options.moments, owned=copies is not None)
    has_delay = bool(options.delay) and copies is None
    held = StageMemory(
        parameters=state_bytes(model, lo, hi, dtype, NO_MOMENTS) - vector_bytes + has_delay * vector_bytes,
        moments=FLOAT_BYTES * n_moments,
        gradients=(1 + has_delay) * vector_bytes,
        activations=0,
        on_host=options.n_vectors * vector_bytes
        + (1 + has_delay) * (retained * boundary_bytes + options.owes * OWED_VECTORS * vector_bytes),
    )
    computing = StageMemory(
        parameters=0,
        moments=0,
        gradients=0,
        activations=in_flight * residual_bytes(model, lo, hi, shape, dtype, options.remat)
        + working_bytes(model, lo, hi, shape, dtype),
        on_host=in_flight * boundary_bytes,
    )
    updating = StageMemory(vector_bytes, 0, vector_bytes, 0, 0 if copies else 2 * vector_bytes)
    if has_delay:
        return _sum(held, computing, updating)
    if copies:
        stashed_bytes = (in_flight - 1) * vector_bytes if options.stashes else 0
        on_device = copies.kept + copies.exchanging - copies.on_host
        held = _sum(held, StageMemory(stashed_bytes, on_device, 0, 0, copies.on_host))
    both = (_sum(held, computing), _sum(held, updating))
    return max(both, key=lambda one: one.on_device if on_accelerator else one.total)


def _sum(*parts: StageMemory) -> StageMemory:
    names = StageMemory.__dataclass_fields__
    return StageMemory(**{name: sum(getattr(part, name) for part in parts) for name in names})
