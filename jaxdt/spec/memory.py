"""What a stage's peer holds in memory at its worst moment, in bytes.

Two moments count. While it computes: parameters, optimizer moments and the accumulator, for every microbatch between
its forward and its backward a residual and the boundary tensors beside it, and what one backward needs while it runs.
While it updates: beside the same state the own gradient as one vector, the slices of the sum, the sum joined, and the
new parameters, since the old ones are not donated; the exchange before it holds less. Per parameter that is 16 bytes
while computing with Adam, and 32 at the update (fp32). With an accelerator the own vector and the slices are in the
host's memory; here they count as if there were one. What a peer sent is kept until the step is committed, within a
budget. While a place of the plan is open (`fixed` wiring), who stands in for it computes more microbatches than are
counted here, and holds more of them. A residual is what the backward reads besides the weights: the input under
`recompute`; under `dots` also the results of the weight products. `eval_shape` of the stage functions confirms
residuals to the byte, and what a store holds in a run confirms the rest within 5 %. The working memory of a backward
was read off XLA's own figures for fp32 on CPU; it is an estimate, good to a third.
"""

from jaxdt.spec.model import GPTConfig
from jaxdt.spec.sizes import DTYPE_BYTES

FLOAT_BYTES = 4
MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1}
TOKEN_BYTES = 4
WORKING_WIDTHS, WORKING_UPS, WORKING_SCORES = 10, 2, 4 / 3  # of a layer's backward: per D, per up-projection, per H T


def up_width(model: GPTConfig) -> int:
    """Columns of a layer's up-projection."""
    return model.d_ff * (2 if model.activation == "geglu" else 1)


def state_bytes(model: GPTConfig, lo: int, hi: int, dtype: str = "float32", optimizer: str = "adamw") -> int:
    """Parameters, moments and accumulator of layers lo..hi-1, and the weights cast for one Work in another dtype."""
    cast_bytes = 0 if dtype == "float32" else DTYPE_BYTES[dtype]
    return model.stage_params(lo, hi) * (FLOAT_BYTES * (2 + MOMENTS[optimizer]) + cast_bytes)


def update_bytes(model: GPTConfig, lo: int, hi: int) -> int:
    """What the update adds to the state: own vector, slices of the sum, joined sum, new parameters; all of it also
    without replicas."""
    return 4 * FLOAT_BYTES * model.stage_params(lo, hi)


def residual_bytes(model: GPTConfig, lo: int, hi: int, microbatch_size: int, dtype: str, remat: str) -> int:
    """Of one microbatch, between its forward and its backward. The last stage runs both as one program."""
    if hi == model.n_layers or remat == "recompute":
        return input_bytes(model, lo, microbatch_size, dtype)
    n_layers = hi - lo
    kept = n_layers * (4 * model.d_model + up_width(model)) + (n_layers - 1) * model.d_model
    kept_bytes = microbatch_size * model.seq_len * kept * DTYPE_BYTES[dtype]
    return kept_bytes + input_bytes(model, lo, microbatch_size, dtype)


def input_bytes(model: GPTConfig, lo: int, microbatch_size: int, dtype: str) -> int:
    """A stage's input: tokens on the first stage, else a boundary tensor."""
    if lo == 0:
        return microbatch_size * (model.seq_len + 1) * TOKEN_BYTES
    return model.boundary_numbers(microbatch_size) * DTYPE_BYTES[dtype]


def working_bytes(model: GPTConfig, lo: int, hi: int, microbatch_size: int, dtype: str) -> int:
    """What one backward needs while it runs: values of all its layers at once; on the last stage also the logits in
    fp32, once as logits and once as their gradient."""
    a_token = WORKING_WIDTHS * model.d_model + WORKING_UPS * up_width(model)
    a_token += WORKING_SCORES * model.n_heads * model.seq_len
    numbers = microbatch_size * model.seq_len * a_token * (hi - lo)
    logits = 2 * microbatch_size * model.seq_len * model.vocab_size if hi == model.n_layers else 0
    return round(numbers * DTYPE_BYTES[dtype]) + logits * FLOAT_BYTES


def stage_memory_bytes(
    model: GPTConfig,
    lo: int,
    hi: int,
    microbatch_size: int,
    in_flight: int,
    dtype: str = "float32",
    remat: str = "recompute",
    optimizer: str = "adamw",
    retained: int = 0,
    delay: int = 0,
) -> int:
    """The larger of both moments, for layers lo..hi-1 with `in_flight` microbatches between forward and backward, each
    with one boundary tensor on its way in and one on its way out. `retained`: microbatches whose output and input
    gradient are kept until the commit, counted without a codec. With a `delay` both moments fall together, two steps
    are kept, and there are the parameters of the version before and a second accumulator."""
    n_boundaries = (lo > 0) + (hi < model.n_layers)
    boundary_bytes = n_boundaries * model.boundary_numbers(microbatch_size) * DTYPE_BYTES[dtype]
    kept = retained * boundary_bytes
    held = in_flight * (residual_bytes(model, lo, hi, microbatch_size, dtype, remat) + boundary_bytes)
    computing = held + working_bytes(model, lo, hi, microbatch_size, dtype)
    state, updating = state_bytes(model, lo, hi, dtype, optimizer), update_bytes(model, lo, hi)
    if delay:
        return state + 2 * FLOAT_BYTES * model.stage_params(lo, hi) + 2 * kept + computing + updating
    return state + kept + max(computing, updating)
