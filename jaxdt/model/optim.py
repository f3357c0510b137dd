"""Optimizers as optax transformations. A parameter's update depends on no other parameter, so that the split into
stages cannot change the result. Clipping by the global norm would; it is the caller's, by `scale` of a stage's
update."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxdt.spec.optim import OptimConfig


def optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """AdamW, LAMB or SGD with momentum. Its state counts the updates, so a restored state goes on in the schedule."""
    rule = _rule(config)

    def update(gradient, state, params=None):
        # optax mixes dtypes in its bias correction, so strict promotion ends here.
        with jax.numpy_dtype_promotion("standard"):
            return rule.update(gradient, state, params)

    return optax.GradientTransformation(rule.init, update)


def _rule(config: OptimConfig) -> optax.GradientTransformation:
    lr, decay = lr_schedule(config), dict(weight_decay=config.weight_decay, mask=is_matrix)
    if config.name == "sgd":
        return optax.chain(
            optax.add_decayed_weights(**decay),
            optax.trace(decay=config.momentum),
            optax.scale_by_learning_rate(lr),
        )
    if config.gradient_frac:
        return optax.chain(
            _scale_by_quasi_hyperbolic_adam(config),
            optax.add_decayed_weights(**decay),
            optax.scale_by_learning_rate(lr),
        )
    make = {"adamw": optax.adamw, "lamb": optax.lamb}[config.name]
    return make(lr, b1=config.b1, b2=config.b2, eps=config.eps, **decay)


def _scale_by_quasi_hyperbolic_adam(config: OptimConfig) -> optax.GradientTransformation:
    """QHAdam with nu_1 = 1 - gradient_frac and nu_2 = 1 (Ma and Yarats 2019, "Quasi-hyperbolic momentum and Adam for
    deep learning", Sec. 4): ((1 - f) m + f g) / (sqrt(v) + eps). The state is Adam's; f = 1 - b1 is near Nesterov's.

    Why delayed updates want it: on a quadratic of curvature L (in units of the preconditioner) they are stable up to
    lr L = 1 with f = 0, whatever b1; as b1 nears 1, with f = 2 (1 - b1), up to 1 / (4 (1 - b1))."""
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    frac = config.gradient_frac

    def update(gradient, state, params=None):
        mean, state = adam.update(gradient, state, params)
        seen_frac = 1.0 - config.b2**state.count

        def mixed(m, g, v):
            return (1.0 - frac) * m + frac * g / (jnp.sqrt(v / seen_frac) + config.eps)

        return jax.tree.map(mixed, mean, gradient, state.nu), state

    return optax.GradientTransformation(adam.init, update)


def is_matrix(params):
    """A tree of bools: weight decay acts on matrices and tables, not on biases or LayerNorm scales."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def lr_schedule(config: OptimConfig) -> Callable[[jax.Array], jax.Array]:
    """count (int32 scalar, updates done) -> learning rate (fp32 scalar) of the next update; the first one is > 0."""

    def rate(count):
        step = jnp.asarray(count, jnp.float32)
        warm_frac = jnp.minimum(1.0, (step + 1.0) / max(1, config.warmup_steps))
        return config.lr * warm_frac * _decay(config, step)

    return rate


def _decay(config: OptimConfig, step):
    """The factor in [final_lr_frac, 1] at update `step`: 1 until warm-up ends, final_lr_frac from decay_steps on."""
    if config.lr_schedule == "constant":
        return 1.0
    done_frac = jnp.clip((step - config.warmup_steps) / (config.decay_steps - config.warmup_steps), 0.0, 1.0)
    left_frac = 0.5 * (1.0 + jnp.cos(jnp.pi * done_frac)) if config.lr_schedule == "cosine" else 1.0 - done_frac
    return config.final_lr_frac + (1.0 - config.final_lr_frac) * left_frac
