"""The jitted functions of one stage: layers lo..hi-1, with the embedding on the first stage, head and loss on the last.

Loss convention: a sample's loss is the sum of the cross-entropy of its targets by their weights (1 / T, or those of the
batch: jaxdt.model.batches); `loss_sum` adds the samples of a microbatch; an accumulator holds the gradient of
everything summed so far. Dividing by the number of samples at the update then gives the mean over the targets of the
step that count, however the microbatches were shared out.

An auxiliary loss of a layer (jaxdt.model.base) is a sum over the same samples. The backward of the layer's own stage
adds its gradient, so it costs no message; no loss here contains it. The accumulator counts it, beside the gradient.

B microbatch samples, T tokens, V vocabulary, W boundary width, n numbers of a sync group."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32

from jaxdt.model import kernels
from jaxdt.model.base import Auxiliary, Boundary, Logits, Params, apply_stage, init_stage, stage_outputs
from jaxdt.model.batches import Batch
from jaxdt.model.residual import put_weights_back, take_weights_out
from jaxdt.model.vectors import gradient_tree, gradient_vectors, group_sizes, own_params, trained, with_trained
from jaxdt.protocol.events import EXPERTS
from jaxdt.run.config import REMATS
from jaxdt.run.errors import BadInput, require_one_of
from jaxdt.run.model_spec import ModelSpec

DTYPES = {"float32": jnp.dtype(jnp.float32), "bfloat16": jnp.dtype(jnp.bfloat16)}
OptState = Any
Residual = Any
Scalar = Float32[Array, ""]
Vectors = dict[str, Float32[Array, " n"]]
Outputs = tuple[Any, tuple[Auxiliary, ...]]
# The key of an accumulator under which, beside the gradients of the entries, stand the sums of what the layers gave
# beside their outputs, and the number of samples. An accumulator of layers that give nothing lacks it.
AUXILIARY = "auxiliary"


@dataclass(frozen=True)
class StageOptions:
    """The options of a stage's computation. `remat`: "recompute" saves a microbatch's input between forward and
    backward; "dots" saves the results of the weight products too, which takes less work and more memory (the last stage
    runs both in one program and uses neither). `dtype` is that of activations. With several local `devices` the batch
    axis is split over them and the parameters are on each. `is_table_shared`: a table that the first and the last of
    several stages use is a parameter of the first alone; the last computes with that one, and does not update it.
    `seq_len`: tokens of a sample of full length, 0 for as many as the model takes. `vocab_size`: the vocabulary of the
    text; logits of further tokens, with which that of the model is padded, do not count in the loss. 0 for all of the
    model's."""

    microbatch_size: int
    remat: str = "recompute"
    dtype: str = "float32"
    devices: int = 1
    is_table_shared: bool = False
    seq_len: int = 0
    vocab_size: int = 0

    def check(self) -> None:
        """BadInput for options that this host cannot compute with."""
        require_one_of("remat", self.remat, REMATS)
        require_one_of("dtype", self.dtype, tuple(DTYPES))
        n_local = jax.local_device_count()
        if not 1 <= self.devices <= n_local:
            raise BadInput(f"devices: got {self.devices}, expected 1 to {n_local}, as many as this host has")
        if self.microbatch_size < 1 or self.microbatch_size % self.devices:
            raise BadInput(
                f"microbatch_size: got {self.microbatch_size}, expected a positive multiple of devices {self.devices}"
            )


@dataclass(frozen=True)
class StageFunctions:
    """Everything that a peer computes. Parameters, their gradients and accumulators are fp32 trees of one structure
    (jaxdt.model.base); gradients and accumulators lack the leaves that are not trained (jaxdt.model.vectors),
    and an accumulator of experts has an entry AUXILIARY beside. x is
    None on the first stage, which reads the tokens of the batch, else an activation of `in_shape`, as is gx; y and gy
    have `out_shape`, all in `boundary_dtype`. Inputs may be numpy arrays. All of them may have a smaller T in place of
    seq_len; each T is compiled once, with each set of fields that a batch has.

    With a shared table the last stage's `init`, `init_optimizer` and `update` know its own parameters only, all others
    know the table too.

    Backward, loss_backward and add_vectors donate `acc`, update donates `opt_state`: these must not be read after the
    call. Parameters are never donated: an older version may still be serving its microbatches. A residual does not hold
    the weights: its backward needs the very parameters of its forward."""

    config: ModelSpec
    lo: int
    hi: int
    microbatch_size: int
    in_shape: tuple[int, int, int]  # [B,T,W], with W the width of the boundary before the stage
    out_shape: tuple[int, int, int]  # [B,T,W], with W the width of the boundary behind it
    boundary_dtype: jnp.dtype
    group_sizes: dict[str, int]  # sync group -> how many numbers its vector has

    init: Callable[[int], Params]  # (seed) -> params
    place: Callable[[Any], Any]  # (tree) -> the same tree on this stage's devices; for state from a file or a peer
    init_optimizer: Callable[[Params], OptState]
    zeros: Callable[[], Params]  # () -> acc
    # (params, x, batch) -> (y, residual); None on the last stage, and so is backward
    forward: Callable[[Params, Any, Batch], tuple[Boundary, Residual]] | None
    # (params, residual, gy, acc) -> (gx, acc); gx is None on the first stage
    backward: Callable[[Params, Residual, Any, Params], tuple[Boundary | None, Params]] | None
    # (params, x, batch, acc) -> (loss_sum, gx, acc); on the last stage only
    loss_backward: Callable[[Params, Any, Batch, Params], tuple[Scalar, Boundary | None, Params]] | None
    # (params, x, batch) -> y, on the last stage logits [B,T,V] fp32
    evaluate: Callable[[Params, Any, Batch], Boundary | Logits]
    # (params, x, batch) -> loss_sum, fp32; on the last stage only
    eval_loss: Callable[[Params, Any, Batch], Scalar] | None
    gradient_vectors: Callable[[Params], Vectors]  # (acc) -> {sync group: [n] fp32}
    add_vectors: Callable[[Params, Any], Params]  # (acc, some vectors of another gradient) -> acc; donates acc
    # (params, opt_state, vectors, scale) -> (params, opt_state), by the gradient vectors * scale of these params
    update: Callable[[Params, OptState, Any, Any], tuple[Params, OptState]]
    # () -> None; compiles `update` beside frozen parameters, before there are any: that of the many small matrices of
    # an adapter takes the compiler more memory than the stage
    compile_update: Callable[[], None]

    @property
    def first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.lo == 0

    @property
    def last(self) -> bool:
        """Whether the stage has the head and computes the loss."""
        return self.hi == self.config.facts.n_layers


def build_stage(
    config: ModelSpec, lo: int, hi: int, optimizer: optax.GradientTransformation, options: StageOptions
) -> StageFunctions:
    """The functions of layers lo..hi-1, each compiled at its first call. Raises BadInput."""
    facts = config.facts
    facts.check_range(lo, hi)
    options.check()
    first = lo == 0
    last = hi == facts.n_layers
    dtype = DTYPES[options.dtype]
    size, seq_len = options.microbatch_size, options.seq_len or config.max_len
    devices = _Devices(options.devices)
    jit, whole, batch = devices.jit, devices.whole, devices.batch

    def init(seed: int) -> Params:
        params = init_stage(config, lo, hi, seed)
        return own_params(config, lo, hi, params) if options.is_table_shared else params

    def entering(x: Boundary | None, batch: Batch) -> Any:
        return batch.tokens[:, :-1] if first else x

    def run(params: Params, x: Boundary | None, batch: Batch) -> Outputs:
        return stage_outputs(config, lo, hi, dtype, params, entering(x, batch), batch.begins)

    def evaluate(params: Params, x: Boundary | None, batch: Batch) -> Boundary | Logits:
        return apply_stage(config, lo, hi, dtype, params, entering(x, batch), batch.begins)

    def losses(params: Params, x: Boundary | None, batch: Batch) -> Outputs:
        logits_BTV, beside = run(params, x, batch)
        return sum_sample_losses(logits_BTV[..., : options.vocab_size or None], batch), beside

    def loss_sum(params: Params, x: Boundary | None, batch: Batch) -> Scalar:
        return losses(params, x, batch)[0]

    def init_optimizer(params: Params) -> OptState:
        return optimizer.init(trained(config, params))

    def zeros() -> Params:
        shapes = trained(config, jax.eval_shape(lambda: init_stage(config, lo, hi, 0)))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes) | _no_auxiliary(config, lo, hi)

    def update(params: Params, opt_state: OptState, vectors: Vectors, scale: Scalar) -> tuple[Params, OptState]:
        gradient = gradient_tree(config, lo, hi, params, vectors, scale)
        change, opt_state = optimizer.update(gradient, opt_state, params)
        updated: Any = optax.apply_updates(params, change)
        return updated, opt_state

    update_trained = jit(update, (whole, whole, whole, whole), (whole, whole), donate=1)

    def update_beside_frozen(params: Params, opt_state: OptState, vectors: Any, scale: Any) -> tuple[Params, OptState]:
        updated, opt_state = update_trained(trained(config, params), opt_state, vectors, scale)
        return with_trained(params, updated), opt_state  # the others are no copies

    def compile_update() -> None:
        if facts.frozen:
            params = jax.eval_shape(init, 0)
            part, opt_state = trained(config, params), jax.eval_shape(init_optimizer, params)
            vectors = jax.eval_shape(lambda: gradient_vectors(config, lo, hi, part))
            _ = update_trained.lower(part, opt_state, vectors, jax.ShapeDtypeStruct((), jnp.float32)).compile()

    def add_vectors(acc: Params, vectors: Vectors) -> Params:
        added = gradient_tree(config, lo, hi, acc, vectors, 1.0)
        return acc | jax.tree.map(jnp.add, {name: acc[name] for name in added}, added)

    def accumulate(
        pullback: Callable, gy: Any, beside: tuple[Auxiliary, ...], acc: Params, n_samples: int
    ) -> tuple[Boundary | None, Params]:
        """The gradient of the loss, whose cotangent here is gy, and of the auxiliary losses."""
        weights = tuple(Auxiliary(jnp.ones_like(one.loss), jnp.zeros_like(one.load)) for one in beside)
        gradient, *gx = pullback((gy, weights))
        gradient = trained(config, gradient)
        if beside:
            gradient = gradient | {AUXILIARY: {"layers": beside, "n_samples": jnp.float32(n_samples)}}
        return (gx[0] if gx else None), jax.tree.map(jnp.add, acc, gradient)

    forward, backward = _forward_and_backward(run, options.remat, first, accumulate)
    fused = _loss_and_backward(losses, first, accumulate)
    return StageFunctions(
        config=config,
        lo=lo,
        hi=hi,
        microbatch_size=size,
        in_shape=(size, seq_len, facts.boundary_width(lo)),
        out_shape=(size, seq_len, facts.boundary_width(hi)),
        boundary_dtype=dtype,
        group_sizes=group_sizes(config, lo, hi),
        init=lambda seed: devices.place(init(seed)),
        place=devices.place,
        init_optimizer=jit(init_optimizer, (whole,), whole),
        zeros=jit(zeros, (), whole),
        forward=None if last else jit(forward, (whole, batch, batch), (batch, None)),
        backward=None if last else jit(backward, (whole, None, batch, whole), (batch, whole), donate=3),
        loss_backward=jit(fused, (whole, batch, batch, whole), (whole, batch, whole), donate=3) if last else None,
        evaluate=jit(evaluate, (whole, batch, batch), batch),
        eval_loss=jit(loss_sum, (whole, batch, batch), whole) if last else None,
        gradient_vectors=jit(lambda acc: gradient_vectors(config, lo, hi, acc), (whole,), whole),
        add_vectors=jit(add_vectors, (whole, whole), whole, donate=0),
        update=update_beside_frozen if facts.frozen else update_trained,
        compile_update=compile_update,
    )


def sum_sample_losses(logits_BTV: Float32[Array, "B T V"], batch: Batch) -> Scalar:
    """Sum over samples of the cross-entropy (nats) of their targets, by their weights; without them of its mean."""
    losses_BT = optax.losses.softmax_cross_entropy_with_integer_labels(logits_BTV, batch.tokens[:, 1:])
    return jnp.sum(jnp.mean(losses_BT, axis=-1) if batch.weights is None else losses_BT * batch.weights)


def _tokens(batch: Batch) -> Any:
    assert batch.tokens is not None, "only a stage between the first and the last does without"
    return batch.tokens


def auxiliary_figures(acc: Params) -> dict[str, float]:
    """The values EXPERTS of a gradient: the mean over samples of what the layers of the stage add to the loss, and the
    load of the busiest expert of a layer, by the mean of that layer's experts. Nothing without samples, of layers
    without experts, or of a gradient that is not finite."""
    if AUXILIARY not in acc or not acc[AUXILIARY]["n_samples"]:
        return {}
    layers: tuple[Auxiliary, ...] = acc[AUXILIARY]["layers"]
    loss = sum(float(layer.loss) for layer in layers) / float(acc[AUXILIARY]["n_samples"])
    load_max = max(float(np.max(layer.load) / np.mean(layer.load)) for layer in layers)
    return dict(zip(EXPERTS, (loss, load_max), strict=True)) if math.isfinite(loss + load_max) else {}


def _no_auxiliary(config: ModelSpec, lo: int, hi: int) -> dict[str, Any]:
    """The entry of an accumulator before the first sample."""
    numbers = [layer.n_experts for layer in config.facts.layers[lo:hi] if layer.n_experts]
    layers = tuple(Auxiliary(jnp.zeros(()), jnp.zeros(n_experts)) for n_experts in numbers)
    return {AUXILIARY: {"layers": layers, "n_samples": jnp.zeros(())}} if layers else {}


def _forward_and_backward(run: Callable, remat: str, first: bool, accumulate: Callable) -> tuple[Callable, Callable]:
    """The forward and the backward of a stage that is not the last, as two programs joined by the residual."""

    def forward_recompute(params, x, batch):
        return run(params, x, batch)[0], (x, batch)

    def backward_recompute(params, residual, gy_BTW, acc):
        x, batch = residual
        (_, beside), pullback = _pullback(run, params, x, batch, first)
        return accumulate(pullback, gy_BTW, beside, acc, len(gy_BTW))

    # The recomputed part runs in another program than the original, so nothing has to keep the two apart.
    saving_dots = jax.checkpoint(run, policy=_is_weight_product, prevent_cse=False)

    def forward_dots(params, x, batch):
        (y_BTW, beside), pullback = _pullback(saving_dots, params, x, batch, first)
        return y_BTW, (take_weights_out(pullback, params), beside)

    def backward_dots(params, residual, gy_BTW, acc):
        pulled, beside = residual
        return accumulate(put_weights_back(pulled, params), gy_BTW, beside, acc, len(gy_BTW))

    return (forward_recompute, backward_recompute) if remat == "recompute" else (forward_dots, backward_dots)


def _is_weight_product(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Whether remat "dots" saves the result of an operation."""
    of_one_matrix = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **params)
    return of_one_matrix or primitive in (kernels.frozen_product_p, kernels.grouped_product_p)


def _loss_and_backward(losses: Callable, first: bool, accumulate: Callable) -> Callable:
    """Forward, loss and backward of the last stage in one program, in which XLA chooses what to save."""

    def loss_backward(params, x, batch, acc):
        (loss, beside), pullback = _pullback(losses, params, x, batch, first)
        gx_BTW, acc = accumulate(pullback, jnp.ones_like(loss), beside, acc, len(batch.tokens))
        return loss, gx_BTW, acc

    return loss_backward


def _pullback(function: Callable, params: Params, x: Any, batch: Batch, first: bool) -> tuple[Any, Callable]:
    """(value, its pullback). The pullback gives the cotangent of params, and of x on other stages than the first."""
    if first:
        return jax.vjp(lambda params: function(params, None, batch), params)
    return jax.vjp(lambda params, x: function(params, x, batch), params, x)


def computes_on(n_devices: int | None = None) -> str:
    """The platform and the devices on which jax computes here, all or the first n, such as "gpu: 2 x NVIDIA H100"."""
    devices = jax.local_devices()[:n_devices]
    kinds = sorted({device.device_kind for device in devices})
    return f"{jax.default_backend()}: {len(devices)} x {', '.join(kinds)}"


class _Devices:
    """The local devices of a stage, and where arrays live on them: `whole` arrays on every device, `batch` arrays cut
    along their first axis. On one device both are None, and jit is plain."""

    def __init__(self, n_devices: int):
        self.mesh = Mesh(np.array(jax.local_devices()[:n_devices]), ("batch",)) if n_devices > 1 else None
        self.whole = NamedSharding(self.mesh, PartitionSpec()) if self.mesh else None
        self.batch = NamedSharding(self.mesh, PartitionSpec("batch")) if self.mesh else None

    def jit(self, function: Callable, ins: tuple, outs: Any, donate: int | tuple[int, ...] = ()) -> Callable:
        """The compiled function. ins and outs: a placement per argument and per result; None follows the data."""
        if self.mesh is None:
            return jax.jit(function, donate_argnums=donate)
        return jax.jit(function, in_shardings=ins, out_shardings=outs, donate_argnums=donate)

    def place(self, tree: Any) -> Any:
        """The same tree with every array whole on each device."""
        return jax.device_put(tree, self.whole)
