import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdt.model.optim import lr_schedule, optimizer
from jaxdt.spec.errors import BadInput
from jaxdt.spec.optim import OptimConfig

PARAMS = {"kernel": np.array([[1.0, -2.0], [0.5, 4.0]], np.float32), "bias": np.array([1.0, -3.0], np.float32)}
GRADIENT = {"kernel": np.array([[0.1, -0.2], [0.3, 2.0]], np.float32), "bias": np.array([0.5, -0.5], np.float32)}


def updated(config, n_steps=1, state=None, params=PARAMS):
    """(params, state) after n_steps updates by GRADIENT."""
    tx = optimizer(config)
    params = jax.tree.map(jnp.asarray, params)
    state = tx.init(params) if state is None else state
    step = jax.jit(tx.update)
    for _ in range(n_steps):
        change, state = step(GRADIENT, state, params)
        params = optax.apply_updates(params, change)
    return params, state


@pytest.mark.parametrize(
    "field, value",
    [
        ("name", "adam"),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", "fast"),
        ("eps", 0),
        ("b1", 1.0),
        ("b2", -0.1),
        ("momentum", 1),
        ("gradient_frac", 1.0),
        ("weight_decay", -1e-3),
        ("clip_norm", -1),
        ("final_lr_frac", 1.5),
        ("warmup_steps", 1.0),
        ("decay_steps", -1),
        ("lr_schedule", "cosin"),
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(BadInput, match=rf"^optim.{field}: got "):
        OptimConfig(**{field: value})


@pytest.mark.parametrize("lr_schedule", ["cosine", "linear"])
def test_a_decay_needs_an_end_after_warm_up(lr_schedule):
    with pytest.raises(BadInput, match=r"^optim.decay_steps: got 5, .*optim.warmup_steps, 5"):
        OptimConfig(lr_schedule=lr_schedule, warmup_steps=5, decay_steps=5)


@pytest.mark.parametrize(
    "options, rates",
    [
        (dict(), [1, 1, 1, 1, 1]),
        (dict(warmup_steps=4), [0.25, 0.5, 0.75, 1, 1]),
        (dict(lr_schedule="linear", decay_steps=4, final_lr_frac=0.2), [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (dict(lr_schedule="linear", warmup_steps=2, decay_steps=4, final_lr_frac=0.0), [0.5, 1, 1, 0.5, 0]),
        (dict(lr_schedule="cosine", decay_steps=4, final_lr_frac=0.0), [1, 0.853553, 0.5, 0.146447, 0, 0]),
    ],
)
def test_learning_rate_by_update(options, rates):
    rate = lr_schedule(OptimConfig(lr=2.0, **options))
    got = [float(rate(jnp.int32(count))) for count in range(len(rates))]
    np.testing.assert_allclose(got, 2.0 * np.array(rates), atol=1e-6)


def test_first_adamw_update_by_hand():
    params, _ = updated(OptimConfig(lr=0.1, weight_decay=0.5))
    step = {name: np.sign(g) for name, g in GRADIENT.items()}  # m / sqrt(v) after one update, with the bias corrected
    np.testing.assert_allclose(params["bias"], PARAMS["bias"] - 0.1 * step["bias"], rtol=1e-5)
    kernel = PARAMS["kernel"]
    np.testing.assert_allclose(params["kernel"], kernel - 0.1 * (step["kernel"] + 0.5 * kernel), rtol=1e-5)


def test_the_newest_gradient_has_a_share_of_its_own():
    """Two updates by hand, the second with another gradient: g1 = 1, g2 = -1, so that m2 = b1 (1 - b1) - (1 - b1)."""
    config = OptimConfig(lr=0.1, b1=0.5, b2=0.5, gradient_frac=0.25)
    tx, params = optimizer(config), {"bias": jnp.zeros(1)}
    first, state = tx.update({"bias": jnp.ones(1)}, tx.init(params), params)
    second, _ = tx.update({"bias": -jnp.ones(1)}, state, params)
    np.testing.assert_allclose(first["bias"], [-0.1], rtol=1e-5)
    mean = (0.5 * 0.5 - 0.5) / (1 - 0.5**2)  # of the gradients, over sqrt(v) = 1
    np.testing.assert_allclose(second["bias"], [-0.1 * (0.75 * mean - 0.25)], rtol=1e-5)


@pytest.mark.parametrize("name", ["lamb", "sgd"])
def test_only_adamw_has_a_share_for_the_newest_gradient(name):
    with pytest.raises(BadInput, match=r"^optim.gradient_frac: got 0.1, expected 0 with optim.name"):
        OptimConfig(name=name, gradient_frac=0.1)


@pytest.mark.parametrize(("frac", "shrinks"), [(0.0, False), (0.06, True)])
def test_its_share_steadies_delayed_updates(frac, shrinks):
    """A parabola whose lr times curvature, 2, is above the limit of a delayed mean alone, 1. With so large an eps the
    update is linear in the gradients."""
    tx = optimizer(OptimConfig(lr=2.0, b1=0.97, eps=1.0, gradient_frac=frac))
    update = jax.jit(tx.update)
    before = now = jnp.full(1, 1e-6)
    state = tx.init(now)
    for _ in range(400):
        change, state = update(before, state, now)  # the parabola's gradient, at the parameters of the version before
        before, now = now, now + change
    assert (abs(float(now[0])) < 1e-6) == shrinks


def test_lamb_moves_each_leaf_by_lr_times_its_norm():
    params, _ = updated(OptimConfig(name="lamb", lr=0.01))
    for name, before in PARAMS.items():
        assert np.linalg.norm(params[name] - before) == pytest.approx(0.01 * np.linalg.norm(before), rel=1e-4)


def test_sgd_sums_gradients_with_momentum():
    params, _ = updated(OptimConfig(name="sgd", lr=0.1, momentum=0.5), n_steps=2)
    jax.tree.map(
        lambda got, before, g: np.testing.assert_allclose(got, before - 0.1 * (1 + 1.5) * g, rtol=1e-5),
        params,
        PARAMS,
        GRADIENT,
    )


@pytest.mark.parametrize("name", ["lamb", "sgd"])
def test_weight_decay_spares_vectors(name):
    with_decay, _ = updated(OptimConfig(name=name, weight_decay=0.5))
    without, _ = updated(OptimConfig(name=name))
    np.testing.assert_array_equal(with_decay["bias"], without["bias"])
    assert not np.allclose(with_decay["kernel"], without["kernel"])


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
def test_a_stored_state_goes_on_in_the_schedule(name):
    config = OptimConfig(name=name, warmup_steps=2, lr_schedule="cosine", decay_steps=4)
    halfway, state = updated(config, n_steps=2)
    stored = jax.tree.map(np.asarray, (halfway, state))
    resumed, _ = updated(config, n_steps=2, state=stored[1], params=stored[0])
    jax.tree.map(np.testing.assert_array_equal, resumed, updated(config, n_steps=4)[0])
