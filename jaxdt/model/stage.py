"""The jitted functions of one stage: layers lo..hi-1, with the embedding on the first stage, head and loss on the last.

Loss convention: a sample's loss is the mean cross-entropy of its tokens; `loss_sum` adds the samples of a microbatch;
an accumulator holds the gradient of everything summed so far. Dividing by the number of samples at the update then
gives the batch mean, however the microbatches were shared out.

B microbatch samples, T tokens, D width, V vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdt.model.gpt import apply_stage, check_range, init_stage
from jaxdt.model.residual import put_weights_back, take_weights_out
from jaxdt.model.vectors import gradient_tree, gradient_vectors, group_sizes
from jaxdt.spec.errors import BadInput
from jaxdt.spec.model import GPTConfig

REMATS = ("recompute", "dots")
DTYPES = {"float32": jnp.dtype(jnp.float32), "bfloat16": jnp.dtype(jnp.bfloat16)}


@dataclass(frozen=True)
class StageFunctions:
    """Everything a peer computes. Parameters, their gradients and accumulators are fp32 trees of one structure (its
    entries: jaxdt.model.gpt). x is tokens [B,T] int32 on the first stage, else an activation of `in_shape`, as is gx; y
    and gy have `out_shape`, all in `boundary_dtype`; targets are [B,T] int32. Inputs may be numpy arrays. All of them
    may have a smaller T in place of seq_len; each T is compiled once.

    Donated, so not to be read after the call: `acc` of backward and loss_backward, `opt_state` of update. Parameters
    are never donated: an older version may still be serving its microbatches. A residual does not hold the weights:
    its backward needs the very parameters of its forward."""

    config: GPTConfig
    lo: int
    hi: int
    microbatch_size: int
    in_shape: tuple[int, int, int]  # [B,T,boundary width], what crosses the boundary before the stage
    out_shape: tuple[int, int, int]  # the same behind it; compression makes the two differ
    boundary_dtype: jnp.dtype
    group_sizes: dict[str, int]  # sync group -> how many numbers its vector has

    init: Callable  # (seed: int) -> params
    place: Callable  # (tree) -> the same tree on this stage's devices; for parameters or state from a file or a peer
    init_optimizer: Callable  # (params) -> opt_state
    zeros: Callable  # () -> acc
    forward: Callable | None  # (params, x) -> (y, residual); None on the last stage, and so is backward
    backward: Callable | None  # (params, residual, gy, acc) -> (gx, acc); gx is None on the first stage
    loss_backward: Callable | None  # (params, x, targets, acc) -> (loss_sum, gx, acc); on the last stage only
    evaluate: Callable  # (params, x) -> y, on the last stage logits [B,T,V] fp32
    eval_loss: Callable | None  # (params, x, targets) -> loss_sum, fp32; on the last stage only
    gradient_vectors: Callable  # (acc) -> {sync group: [n] fp32}
    update: (
        Callable  # (params, opt_state, vectors, scale: float) -> (params, opt_state), by the gradient vectors * scale
    )

    @property
    def first(self) -> bool:
        return self.lo == 0

    @property
    def last(self) -> bool:
        return self.hi == self.config.n_layers


def build_stage(
    config: GPTConfig,
    lo: int,
    hi: int,
    microbatch_size: int,
    remat: str,
    dtype: str,
    optimizer: optax.GradientTransformation,
    devices: int = 1,
) -> StageFunctions:
    """The functions of layers lo..hi-1, each compiled at its first call. remat: "recompute" keeps a microbatch's input
    between forward and backward; "dots" keeps the results of the weight products too: less work, more memory (the last
    stage runs both in one program and has no use for either). With several local `devices` the batch axis is split
    over them and the parameters are on each. Raises BadInput."""
    check_range(config, lo, hi)
    _check_options(microbatch_size, remat, dtype, devices)
    first, last = lo == 0, hi == config.n_layers
    home = _Placement(devices)
    jit, whole, batch = home.jit, home.whole, home.batch

    def run(params, x):
        return apply_stage(config, lo, hi, DTYPES[dtype], params, x)

    def loss_sum(params, x, targets_BT):
        return sum_sample_losses(run(params, x), targets_BT)

    def zeros():
        shape = jax.eval_shape(lambda: init_stage(config, lo, hi, 0))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)

    def update(params, opt_state, vectors, scale):
        gradient = gradient_tree(config, lo, hi, params, vectors, scale)
        change, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, change), opt_state

    forward, backward = _halves(run, remat, first)
    fused = _fused(loss_sum, first)
    return StageFunctions(
        config=config,
        lo=lo,
        hi=hi,
        microbatch_size=microbatch_size,
        in_shape=(microbatch_size, config.seq_len, config.boundary_width(lo)),
        out_shape=(microbatch_size, config.seq_len, config.boundary_width(hi)),
        boundary_dtype=DTYPES[dtype],
        group_sizes=group_sizes(config, lo, hi),
        init=lambda seed: home.place(init_stage(config, lo, hi, seed)),
        place=home.place,
        init_optimizer=jit(optimizer.init, (whole,), whole),
        zeros=jit(zeros, (), whole),
        forward=None if last else jit(forward, (whole, batch), (batch, None)),
        backward=None if last else jit(backward, (whole, None, batch, whole), (batch, whole), donate=3),
        loss_backward=jit(fused, (whole, batch, batch, whole), (whole, batch, whole), donate=3) if last else None,
        evaluate=jit(run, (whole, batch), batch),
        eval_loss=jit(loss_sum, (whole, batch, batch), whole) if last else None,
        gradient_vectors=jit(lambda acc: gradient_vectors(config, lo, hi, acc), (whole,), whole),
        update=jit(update, (whole, whole, whole, whole), (whole, whole), donate=1),
    )


def sum_sample_losses(logits_BTV, targets_BT):
    """Sum over samples of the mean cross-entropy (nats) over a sample's tokens; fp32 scalar."""
    losses_BT = optax.losses.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    return jnp.sum(jnp.mean(losses_BT, axis=-1))


def _halves(run: Callable, remat: str, first: bool) -> tuple[Callable, Callable]:
    """The forward and the backward of a stage that is not the last, as two programs joined by the residual."""

    def forward_recompute(params, x):
        return run(params, x), x

    def backward_recompute(params, x, gy_BTD, acc):
        return _accumulate(_pullback(run, params, x, first)[1], gy_BTD, acc)

    # The recomputed part runs in another program than the original, so nothing has to keep the two apart.
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    saving_dots = jax.checkpoint(run, policy=policy, prevent_cse=False)

    def forward_dots(params, x):
        y_BTD, pullback = _pullback(saving_dots, params, x, first)
        return y_BTD, take_weights_out(pullback, params)

    def backward_dots(params, residual, gy_BTD, acc):
        return _accumulate(put_weights_back(residual, params), gy_BTD, acc)

    return (forward_recompute, backward_recompute) if remat == "recompute" else (forward_dots, backward_dots)


def _fused(loss_sum: Callable, first: bool) -> Callable:
    """Forward, loss and backward of the last stage in one program, which then chooses itself what to keep."""

    def loss_backward(params, x, targets_BT, acc):
        loss, pullback = _pullback(lambda params, x: loss_sum(params, x, targets_BT), params, x, first)
        gx_BTD, acc = _accumulate(pullback, jnp.ones_like(loss), acc)
        return loss, gx_BTD, acc

    return loss_backward


def _pullback(function: Callable, params, x, first: bool):
    """(value, its pullback). The pullback gives the cotangent of params, and that of x unless x is tokens."""
    if first:
        return jax.vjp(lambda params: function(params, x), params)
    return jax.vjp(function, params, x)


def _accumulate(pullback: Callable, gy, acc):
    gradient, *gx = pullback(gy)
    return (gx[0] if gx else None), jax.tree.map(jnp.add, acc, gradient)


def _check_options(microbatch_size: int, remat: str, dtype: str, devices: int) -> None:
    if remat not in REMATS:
        raise BadInput(f"remat: got {remat!r}, expected one of {', '.join(REMATS)}")
    if dtype not in DTYPES:
        raise BadInput(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    n_local = jax.local_device_count()
    if not 1 <= devices <= n_local:
        raise BadInput(f"devices: got {devices}, expected 1 to {n_local}, what this host has")
    if microbatch_size < 1 or microbatch_size % devices:
        raise BadInput(f"microbatch_size: got {microbatch_size}, expected a positive multiple of devices {devices}")


class _Placement:
    """Where arrays live: `whole` ones on every device of the stage, `batch` ones cut along their first axis. On one
    device there is nothing to say, and jit is plain."""

    def __init__(self, devices: int):
        self.mesh = Mesh(np.array(jax.local_devices()[:devices]), ("batch",)) if devices > 1 else None
        self.whole = NamedSharding(self.mesh, PartitionSpec()) if self.mesh else None
        self.batch = NamedSharding(self.mesh, PartitionSpec("batch")) if self.mesh else None

    def jit(self, function: Callable, ins: tuple, outs, donate: int | tuple = ()) -> Callable:
        """ins and outs: a placement per argument and per result; None follows the data."""
        if self.mesh is None:
            return jax.jit(function, donate_argnums=donate)
        return jax.jit(function, in_shardings=ins, out_shardings=outs, donate_argnums=donate)

    def place(self, tree):
        return jax.device_put(tree, self.whole)
