"""The table of optimizers, as optax transformations.

An update depends on no other leaf, so that the split into stages cannot change the result. Clipping by the norm of the
whole gradient would; the caller applies it, as the `scale` of a stage's update.

A new optimizer is a function of OptimConfig, an entry in OPTIMIZERS, and one of the same name in jaxdt.run.optim,
which has the number of its moments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxdt.model.base import entry_and_path
from jaxdt.run.model_facts import MATRIX, TABLE, VECTOR, ModelFacts
from jaxdt.run.optim import OptimConfig

Roles = Callable[[Any], Any]
Numbers = Float[Array, "..."]
# The root mean square of AdamW's updates, before the learning rate, that was seen in practice (Liu et al. 2025).
ADAMW_RMS = 0.2

Reduced = Callable[[Numbers, Numbers, Float[Array, ""], float], Numbers]
LrSchedule = Callable[[Int[ArrayLike, ""]], Float[Array, ""]]


def by_axes(params: Any) -> Any:
    """The roles of leaves where no model says what they are: those with two axes or more are matrices."""
    return jax.tree.map(lambda leaf: MATRIX if leaf.ndim >= 2 else VECTOR, params)


def by_facts(facts: ModelFacts) -> Roles:
    """The roles of a stage's parameters; the head's matrix, which has a column for each token, counts as a table."""
    roles = {
        (entry.name, leaf.path): TABLE if leaf.role == MATRIX and not entry.has_matrices else leaf.role
        for entry in facts.entries
        for leaf in entry.leaves
    }

    def role(keys: Any, leaf: Any) -> str:
        del leaf
        return roles[entry_and_path(keys)]

    return lambda params: jax.tree_util.tree_map_with_path(role, params)


def optimizer(config: OptimConfig, n_pipelines: int = 1, roles: Roles = by_axes) -> optax.GradientTransformation:
    """The optimizer that the config names. Its state counts the updates, so a restored state continues the schedule of
    learning rates. `n_pipelines`: those whose replicas average their parameters, for optim.second_moment. `roles`:
    parameters -> a tree of their roles, the same for gradients. Weight decay acts on all but vectors."""
    rule = OPTIMIZERS[config.name](config, n_pipelines, roles)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # optax mixes dtypes in its bias correction, so strict promotion ends here.
        with jax.numpy_dtype_promotion("standard"):
            return rule.update(updates, state, params)

    return optax.GradientTransformation(rule.init, update)


def _decays(roles: Roles) -> Callable[[Any], Any]:
    return lambda params: jax.tree.map(lambda role: role != VECTOR, roles(params))


def _adamw(config: OptimConfig, n_pipelines: int, roles: Roles) -> optax.GradientTransformation:
    scale = optax.scale_by_adam(config.b1, config.b2, config.eps)
    if config.gradient_frac:
        scale = _scale_by_quasi_hyperbolic_adam(config)
    if reduced := REDUCED_SECOND_MOMENTS.get(config.second_moment):
        scale = _scale_by_reduced_adam(config, n_pipelines, reduced)
    return optax.chain(
        scale,
        optax.add_decayed_weights(weight_decay=config.weight_decay, mask=_decays(roles)),
        optax.scale_by_learning_rate(lr_schedule(config)),
    )


def _lamb(config: OptimConfig, n_pipelines: int, roles: Roles) -> optax.GradientTransformation:
    lr = lr_schedule(config)
    return optax.lamb(
        lr, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=_decays(roles)
    )


def _sgd(config: OptimConfig, n_pipelines: int, roles: Roles) -> optax.GradientTransformation:
    """SGD with momentum."""
    return optax.chain(
        optax.add_decayed_weights(weight_decay=config.weight_decay, mask=_decays(roles)),
        optax.trace(decay=config.momentum),
        optax.scale_by_learning_rate(lr_schedule(config)),
    )


def _muon(config: OptimConfig, n_pipelines: int, roles: Roles) -> optax.GradientTransformation:
    """Muon for matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): the momentum, made orthogonal,
    and as long as an update of AdamW (Liu et al. 2025, "Muon is Scalable for LLM Training", Sec. 2.2), so that one
    learning rate and weight decay serve all leaves. The others, and the head, have AdamW's rule. A leaf with more than
    two axes is a row of matrices, such as those of experts."""

    def axes(params: Any) -> Any:
        return jax.tree.map(lambda _: MuonDimensionNumbers(reduction_axis=-2, output_axis=-1), params)

    def as_long(updates: Any, params: Any) -> Any:
        """Singular values of about 1 give a mean square of 1 over the longer axis."""
        del params
        return jax.tree.map(lambda update: update * (ADAMW_RMS * max(update.shape[-2:]) ** 0.5), updates)

    muon = scale_by_muon(beta=config.momentum, weight_dimension_numbers=axes)

    def exact(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Replicas on unlike devices compare their parameters, so no accelerator rounds these products."""
        with jax.default_matmul_precision("highest"):
            return muon.update(updates, state, params)

    orthogonal = optax.chain(optax.GradientTransformation(muon.init, exact), optax.stateless(as_long))
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    return optax.chain(
        optax.partition({MATRIX: orthogonal, TABLE: adam, VECTOR: adam}, roles),
        optax.add_decayed_weights(weight_decay=config.weight_decay, mask=_decays(roles)),
        optax.scale_by_learning_rate(lr_schedule(config)),
    )


OPTIMIZERS: dict[str, Callable[[OptimConfig, int, Roles], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "lamb": _lamb,
    "muon": _muon,
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


class ReducedAdamState(NamedTuple):
    """Adam's state, and the mean of the gradients with the memory of its second moment."""

    adam: Any
    mean: Any


def _scale_by_reduced_adam(config: OptimConfig, n_pipelines: int, reduced: Reduced) -> optax.GradientTransformation:
    """Adam whose second moment is reduced to that of a mean over n_pipelines gradients (SDPipe, Sec. 4): as
    E[g^2] = E[g]^2 + Var, only the variance is divided. With one pipeline this is Adam, bit for bit."""
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    less_frac = 1 - 1 / n_pipelines

    def init(params: Any) -> ReducedAdamState:
        return ReducedAdamState(adam.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        adam_state: Any = adam.update(updates, state.adam, params)[1]
        mean = jax.tree.map(lambda g, q: (1 - config.b2) * g + config.b2 * q, updates, state.mean)
        seen_frac_1 = 1 - config.b1**adam_state.count
        seen_frac_2 = 1 - config.b2**adam_state.count

        def scaled(m: Numbers, v: Numbers, q: Numbers) -> Numbers:
            return m / seen_frac_1 / (jnp.sqrt(reduced(v, q, seen_frac_2, less_frac)) + config.eps)

        return jax.tree.map(scaled, adam_state.mu, adam_state.nu, mean), ReducedAdamState(adam_state, mean)

    return optax.GradientTransformation(init, update)


def _corrected(v: Numbers, q: Numbers, seen_frac: Float[Array, ""], less_frac: float) -> Numbers:
    """Rounding may make a variance of nothing negative."""
    unbiased, mean = v / seen_frac, q / seen_frac
    return unbiased - less_frac * jnp.maximum(unbiased - mean**2, 0.0)


def _legacy(v: Numbers, q: Numbers, seen_frac: Float[Array, ""], less_frac: float) -> Numbers:
    """As the paper's public code: q is too small in the first updates, which are up to sqrt(n_pipelines) too long."""
    return (v - less_frac * (v - q**2)) / seen_frac


# Name -> (second moment, mean, share of the weights that these averages have so far, part of the variance to take off)
# -> the unbiased second moment without that part. Averages have the memory b2.
REDUCED_SECOND_MOMENTS: dict[str, Reduced] = {"corrected": _corrected, "legacy": _legacy}


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
