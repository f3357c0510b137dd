from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdt.model.base import init_stage
from jaxdt.model.optim import by_facts, lr_schedule, optimizer
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.model_facts import TWO_MOMENTS
from jaxdt.run.optim import OptimConfig

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
        ("second_moment", "correct"),
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


@pytest.mark.parametrize("name", ["lamb", "muon", "sgd"])
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


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (3, 6, 6)])
def test_muon_makes_the_change_of_a_matrix_orthogonal(shape):
    """The polar factor of its gradient by numpy's SVD, as long as an update of AdamW. Newton-Schulz leaves singular
    values between 0.7 and 1.2. A leaf with three axes is a row of matrices."""
    gradient = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    tx = optimizer(OptimConfig(name="muon", lr=0.5))
    params = {"kernel": jnp.zeros(shape)}
    change, _ = jax.jit(tx.update)({"kernel": 1e-3 * gradient}, tx.init(params), params)
    u, _, vt = np.linalg.svd(gradient, full_matrices=False)
    along = np.swapaxes(u, -1, -2) @ np.asarray(change["kernel"]) @ np.swapaxes(vt, -1, -2)
    along /= -0.5 * 0.2 * max(shape[-2:]) ** 0.5
    singular = np.diagonal(along, axis1=-2, axis2=-1)
    assert ((singular > 0.65) & (singular < 1.25)).all()
    assert np.abs(along - singular[..., None] * np.eye(along.shape[-1])).max() < 1e-4


def test_muon_has_adamws_rule_for_tables_the_head_and_vectors():
    """And its moments are as many as the facts of a model say."""
    config = OptimConfig(name="muon", lr=0.1, weight_decay=0.1)
    model = GPTConfig.of("small", n_layers=2, d_model=16, n_heads=2, d_ff=32, max_len=8, vocab_size=12)
    roles, params = by_facts(model.facts), init_stage(model, 0, 2, 0)
    gradient = jax.tree.map(lambda leaf: jnp.sin(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape), params)
    (muon, state), (adamw, _) = (
        (lambda tx: tx.update(gradient, tx.init(params), params))(optimizer(one, roles=roles))
        for one in (config, replace(config, name="adamw"))
    )
    same = jax.tree.map(lambda a, b: bool(np.allclose(a, b, rtol=1e-6)), muon, adamw)
    of_blocks = [name for name, tree in same.items() if not all(jax.tree.leaves(tree))]
    assert of_blocks == ["block_000", "block_001"] and same["block_000"]["qkv"] == {"bias": True, "kernel": False}
    constants = {(), (3,)}  # counters, and the coefficients of Newton-Schulz
    n_numbers = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.shape not in constants)
    assert n_numbers == model.facts.moment_numbers(0, 2, config.moments)
    assert n_numbers < model.facts.moment_numbers(0, 2, TWO_MOMENTS)


@pytest.mark.parametrize("name", ["lamb", "muon", "sgd"])
def test_weight_decay_spares_vectors(name):
    with_decay, _ = updated(OptimConfig(name=name, weight_decay=0.5))
    without, _ = updated(OptimConfig(name=name))
    np.testing.assert_array_equal(with_decay["bias"], without["bias"])
    assert not np.allclose(with_decay["kernel"], without["kernel"])


# ------------------------------------------------------------------------------------------- reduced second moments


def second_moments(reduction, gradients, n_pipelines, **options):
    """The denominators m / update, without eps, after these gradients (arrays of one shape) of one pipeline."""
    config = OptimConfig(lr=1.0, b1=0.0, eps=1e-30, second_moment=reduction, **options)
    tx = optimizer(config, n_pipelines)
    update = jax.jit(tx.update)
    params = {"x": jnp.zeros_like(gradients[0])}
    state = tx.init(params)
    for gradient in gradients:
        change, state = update({"x": gradient}, state, params)
    return np.square(np.asarray(gradients[-1]) / -np.asarray(change["x"]))


def noise(n_steps, n, mean=0.5, sigma=2.0):
    rng = np.random.default_rng(0)
    return [rng.normal(mean, sigma, n).astype(np.float32) for _ in range(n_steps)]


@pytest.mark.parametrize("reduction", ["corrected", "legacy"])
def test_with_one_pipeline_a_reduced_second_moment_is_adams_bit_for_bit(reduction):
    own, reduced = (OptimConfig(second_moment=name, weight_decay=0.1) for name in ("own", reduction))
    rng = np.random.default_rng(1)
    params, states = [jax.tree.map(jnp.asarray, PARAMS)] * 2, [optimizer(c).init(PARAMS) for c in (own, reduced)]
    updates = [jax.jit(optimizer(c).update) for c in (own, reduced)]
    for _ in range(20):
        gradient = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), PARAMS)
        for i in range(2):
            change, states[i] = updates[i](gradient, states[i], params[i])
            params[i] = optax.apply_updates(params[i], change)
    if reduction == "corrected":
        jax.tree.map(np.testing.assert_array_equal, *params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *params)


def test_without_noise_it_is_adams_with_any_number_of_pipelines():
    gradients = [np.full(3, 0.7, np.float32)] * 30
    np.testing.assert_allclose(second_moments("corrected", gradients, 16), 0.49, rtol=1e-5)


def test_the_variance_alone_is_divided():
    """E[v'] = mean^2 + sigma^2 / N, but for the noise that is left in the mean, whose square is counted whole: a share
    (1 - b2) / (1 + b2) of sigma^2."""
    found = np.mean(second_moments("corrected", noise(2000, 2000), 8, b2=0.99))
    left = 2.0**2 * (1 - 0.99) / (1 + 0.99) * (1 - 1 / 8)
    assert found == pytest.approx(0.5**2 + 2.0**2 / 8 + left, rel=0.02)
    own = np.mean(second_moments("own", noise(2000, 2000), 8, b2=0.99))
    assert own == pytest.approx(0.5**2 + 2.0**2, rel=0.02)


def test_the_public_codes_first_updates_are_too_long():
    """Its first second moment is g^2 / N, so the first update is sqrt(N) times as long; later the two agree."""
    gradients = noise(1, 50)
    first = second_moments("legacy", gradients, 16, b2=0.999)
    np.testing.assert_allclose(first, gradients[0] ** 2 / 16, rtol=0.02)
    np.testing.assert_allclose(second_moments("corrected", gradients, 16, b2=0.999), gradients[0] ** 2, rtol=1e-4)
    late = noise(3000, 50)
    corrected, legacy = (second_moments(name, late, 16, b2=0.99) for name in ("corrected", "legacy"))
    np.testing.assert_allclose(legacy, corrected, rtol=1e-3)


def test_its_state_has_one_moment_more():
    own, reduced = (OptimConfig(second_moment=name) for name in ("own", "corrected"))
    n_numbers = [
        sum(leaf.size for leaf in jax.tree.leaves(optimizer(c).init(PARAMS)) if leaf.ndim) for c in (own, reduced)
    ]
    n_params = sum(leaf.size for leaf in PARAMS.values())
    assert (
        n_numbers == [own.moments.others * n_params, reduced.moments.others * n_params] == [2 * n_params, 3 * n_params]
    )
    assert reduced.state_name == OptimConfig(second_moment="legacy").state_name != own.state_name == "adamw"


@pytest.mark.parametrize("other", [dict(name="sgd"), dict(name="muon"), dict(gradient_frac=0.1)])
def test_only_plain_adamw_has_a_reduced_second_moment(other):
    with pytest.raises(BadInput, match=r"^optim.second_moment: got corrected, expected own with optim\."):
        OptimConfig(second_moment="corrected", **other)


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "sgd"])
def test_a_stored_state_goes_on_in_the_schedule(name):
    config = OptimConfig(name=name, warmup_steps=2, lr_schedule="cosine", decay_steps=4)
    halfway, state = updated(config, n_steps=2)
    stored = jax.tree.map(np.asarray, (halfway, state))
    resumed, _ = updated(config, n_steps=2, state=stored[1], params=stored[0])
    jax.tree.map(np.testing.assert_array_equal, resumed, updated(config, n_steps=4)[0])
