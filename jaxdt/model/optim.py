"""The table of optimizers, as optax transformations.

A parameter's update depends on no other parameter, so that the split into stages cannot change the result. Clipping by
the norm of the whole gradient would; the caller applies it, as the `scale` of a stage's update.

A new optimizer is a function of OptimConfig, an entry in OPTIMIZERS, and one of the same name in jaxdt.spec.optim,
which has the number of its moments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxdt.spec.optim import OptimConfig

LrSchedule = Callable[[Int[ArrayLike, ""]], Float[Array, ""]]


def optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """The optimizer that the config names. Its state counts the updates, so a restored state goes on in the schedule of
    learning rates."""
    rule = OPTIMIZERS[config.name](config)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # optax mixes dtypes in its bias correction, so strict promotion ends here.
        with jax.numpy_dtype_promotion("standard"):
            return rule.update(updates, state, params)

    return optax.GradientTransformation(rule.init, update)


def _adamw(config: OptimConfig) -> optax.GradientTransformation:
    lr = lr_schedule(config)
    decay = config.weight_decay
    if config.gradient_frac:
        return optax.chain(
            _scale_by_quasi_hyperbolic_adam(config),
            optax.add_decayed_weights(weight_decay=decay, mask=is_matrix),
            optax.scale_by_learning_rate(lr),
        )
    return optax.adamw(lr, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=decay, mask=is_matrix)


def _lamb(config: OptimConfig) -> optax.GradientTransformation:
    lr = lr_schedule(config)
    return optax.lamb(lr, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=is_matrix)


def _sgd(config: OptimConfig) -> optax.GradientTransformation:
    """SGD with momentum."""
    return optax.chain(
        optax.add_decayed_weights(weight_decay=config.weight_decay, mask=is_matrix),
        optax.trace(decay=config.momentum),
        optax.scale_by_learning_rate(lr_schedule(config)),
    )


OPTIMIZERS: dict[str, Callable[[OptimConfig], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "lamb": _lamb,
    "sgd": _sgd,
}


def _scale_by_quasi_hyperbolic_adam(config: OptimConfig) -> optax.GradientTransformation:
    """QHAdam with nu_1 = 1 - gradient_frac and nu_2 = 1 (Ma and Yarats 2019, "Quasi-hyperbolic momentum and Adam for
    deep learning", Sec. 4): ((1 - f) m + f g) / (sqrt(v) + eps). The state is Adam's; f = 1 - b1 is near Nesterov's.

    It steadies delayed updates. On a quadratic of curvature L (in units of the preconditioner) these are stable up to
    lr L = 1 with f = 0, whatever b1; as b1 nears 1, with f = 2 (1 - b1), up to 1 / (4 (1 - b1))."""
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    frac = config.gradient_frac

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mean, state = adam.update(updates, state, params)
        seen_frac = 1.0 - config.b2**state.count

        def mixed(m, g, v):
            return (1.0 - frac) * m + frac * g / (jnp.sqrt(v / seen_frac) + config.eps)

        return jax.tree.map(mixed, mean, updates, state.nu), state

    return optax.GradientTransformation(adam.init, update)


def is_matrix(params: Any) -> Any:
    """A tree of bools: weight decay acts on matrices and tables, not on biases or LayerNorm scales."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def lr_schedule(config: OptimConfig) -> LrSchedule:
    """count (int32 scalar, updates done) -> learning rate (fp32 scalar) of the next update; the first one is > 0."""

    def rate(count: Int[ArrayLike, ""]) -> Float[Array, ""]:
        step = jnp.asarray(count, jnp.float32)
        warm_frac = jnp.minimum(1.0, (step + 1.0) / max(1, config.warmup_steps))
        return config.lr * warm_frac * LR_SCHEDULES[config.lr_schedule](config, step)

    return rate


def _constant(config: OptimConfig, step: Float[Array, ""]) -> float:
    del config, step
    return 1.0


def _cosine(config: OptimConfig, step: Float[Array, ""]) -> Float[Array, ""]:
    return _falling(config, 0.5 * (1.0 + jnp.cos(jnp.pi * _done_frac(config, step))))


def _linear(config: OptimConfig, step: Float[Array, ""]) -> Float[Array, ""]:
    return _falling(config, 1.0 - _done_frac(config, step))


def _done_frac(config: OptimConfig, step: Float[Array, ""]) -> Float[Array, ""]:
    """The share of the decay that is done at update `step`: 0 until warm-up ends, 1 from decay_steps on."""
    return jnp.clip((step - config.warmup_steps) / (config.decay_steps - config.warmup_steps), 0.0, 1.0)


def _falling(config: OptimConfig, left_frac: Float[Array, ""]) -> Float[Array, ""]:
    return config.final_lr_frac + (1.0 - config.final_lr_frac) * left_frac


# Name -> (config, step) -> the factor in [final_lr_frac, 1] of the learning rate at update `step`.
LR_SCHEDULES: dict[str, Callable[[OptimConfig, Float[Array, ""]], float | Float[Array, ""]]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
}
