"""Samples of several documents, and targets that do not count: a run trains as if each document stood alone, and on the
mean over all targets of a step that count. The reference is plain: each piece of a document is a sample of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_models
from report_fields import report_fields
from test_equivalence import train_in_pieces

from jaxdt.model.base import init_stage
from jaxdt.model.batches import Samples
from jaxdt.model.chain import Chain
from jaxdt.model.data import Tokens, write_pieces
from jaxdt.run import config as run_config
from jaxdt.runtime.storage.store import stage_functions

pytestmark = pytest.mark.xdist_group("borders")

SEED, SIZE, SEQ_LEN, N_MICROBATCHES, N_STEPS = 3, 8, 16, 5, 3
VOCABULARY = 64
MODEL = dict(preset="debug", n_layers=3, d_model=16, n_heads=2, d_ff=32, max_len=SEQ_LEN, vocab_size=VOCABULARY)
MODELS = {
    "learned": MODEL,
    "rotary": MODEL | dict(positions="rotary"),
    "llama": MODEL | dict(family="llama", n_kv_heads=1, window=6),
    "moe": MODEL | dict(family="moe", n_kv_heads=1, n_experts=2, n_experts_per_token=1, router_aux_coef=0.0),
}


def make_config(model="learned", stages=2, pipelines=1, layers="1,2", sync=None, wiring=None, **plan):
    return run_config.parse(
        dict(
            model=MODELS[model],
            data=dict(borders="mask"),
            plan=dict(stages=stages, pipelines=pipelines, layers=layers, microbatches=N_MICROBATCHES, **plan),
            train=dict(steps=N_STEPS, seed=SEED, microbatch_size=SIZE, eval_every_steps=2, eval_microbatches=3),
            optim=dict(name="sgd", lr=0.1, momentum=0.0, clip_norm=0.0),
            sync=sync or {},
            wiring=wiring or {},
            net=dict(heartbeat_s=50.0, deadline_floor_s=1000.0),
        )
    )


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Documents of 1 to 40 tokens. Of the targets of the first step's microbatches 5 count, then about 120 each."""
    path = tmp_path_factory.mktemp("borders") / "documents.tok"
    first = written(path, lambda n_tokens: np.ones(n_tokens, bool))
    rare = first.train_places(SEED, 0, 0, SIZE, SEQ_LEN, N_MICROBATCHES)
    rng = np.random.default_rng(1)
    starts = set(map(int, first.documents[0]))
    within = [place + i for place in rare for i in range(1, SEQ_LEN + 1) if place + i not in starts]

    def counted(n_tokens):
        chosen = rng.random(n_tokens) < 0.95
        if n_tokens == first.n_train_tokens:
            for place in rare:
                chosen[place + 1 : place + 1 + SEQ_LEN] = False
            chosen[within[:5]] = True
        return chosen

    path.unlink()
    return written(path, counted)


def written(path, counted):
    rng = np.random.default_rng(0)

    def part(n_tokens):
        numbers = np.cumsum(rng.integers(0, 3, n_tokens)) % VOCABULARY
        starts = np.cumsum(np.concatenate([[0], rng.integers(1, 40, n_tokens)]))
        return [Tokens(numbers, starts[starts < n_tokens], counted(n_tokens))]

    return write_pieces(path, "x", VOCABULARY, part(SEQ_LEN * 160 + 1), part(SEQ_LEN * 32 + 1), "00" * 32)


def alone(file, places):
    """(tokens [n, T+1], whether a target counts [n, T]) of the documents in the samples at these places, a piece of a
    document a row, with zeros behind it."""
    train, held_out = file.documents
    starts = {int(start) for start in train} | {file.n_train_tokens + int(start) for start in held_out}
    bits = np.unpackbits(file.counted, bitorder="little")
    rows, counts = [], []
    for place in places:
        for i in range(SEQ_LEN + 1):
            token = file.tokens[place + i]
            if i == 0 or place + i in starts:
                rows.append([])
                counts.append([])
            else:
                counts[-1].append(bits[place + i])
            rows[-1].append(token)
    padded = [np.pad(np.array(row), (0, SEQ_LEN + 1 - len(row))) for row in rows]
    counts = [np.pad(np.array(count, int), (0, SEQ_LEN - len(count))) for count in counts]
    return np.stack(padded).astype(np.int32), np.stack(counts)


@functools.cache
def gradient_of(model):
    def loss(params, tokens, counts):
        logits = reference_models.logits(model, params, tokens[:, :-1])
        logp = jax.nn.log_softmax(logits, axis=-1)
        picked = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(picked * counts.astype(jnp.float32)) / jnp.sum(counts).astype(jnp.float32)

    return jax.value_and_grad(loss)


def train_places(file, step, microbatches):
    return [p for m in microbatches for p in file.train_places(SEED, step, m, SIZE, SEQ_LEN, N_MICROBATCHES)]


def reference(config, file, params, step, microbatches):
    """(loss, gradient) of the flat mean over the targets of these microbatches that count."""
    return gradient_of(config.model)(params, *alone(file, train_places(file, step, microbatches)))


def close(got, wanted, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=tolerance), got, dict(wanted))


@functools.cache
def functions_of(config, plan, stage):
    return stage_functions(config, plan, stage)


def test_the_first_steps_microbatches_count_5_and_120_targets(text):
    counts = [alone(text, train_places(text, 0, [m]))[1].sum() for m in range(N_MICROBATCHES)]
    assert counts[0] == 5 and min(counts[1:]) > 105


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("stages", "layers"), [(1, "3"), (3, "1,1,1")])
def test_packed_documents_have_the_loss_and_gradient_of_the_documents_alone(model, stages, layers, text):
    config = make_config(model, stages, layers=layers)
    plan = run_config.default_plan(config)
    chain = Chain([functions_of(config, plan, stage) for stage in range(stages)], SEED, 0.0)
    samples = Samples(text, config.train, N_MICROBATCHES, config.data.borders)
    accs, total, together = [stage.zeros() for stage in chain.stages], 0.0, range(N_MICROBATCHES)
    for m in together:
        loss, accs = chain.accumulate(samples.train(SEED, 0, m, SEQ_LEN, together), accs)
        total += float(loss)
    wanted, gradient = reference(config, text, init_stage(config.model, 0, 3, SEED), 0, together)
    n_samples = SIZE * N_MICROBATCHES
    assert total / n_samples == pytest.approx(float(wanted), rel=1e-5)
    for acc in accs:
        got = {name: acc[name] for name in acc if name in gradient}
        close(jax.tree.map(lambda leaf: leaf / n_samples, got), {name: gradient[name] for name in got})


# Of these each step is one of all-reduce, and all replicas are equal behind it.
EQUAL = {
    "one pipeline": dict(),
    "1f1b": dict(stages=3, layers="1,1,1", pipelines=2),
    "delay": dict(pipelines=2, sync=dict(delay=1)),
    "swarm": dict(pipelines=2, wiring=dict(kind="swarm", routers=2)),
    "pool": dict(workers=2, wiring=dict(kind="pool")),
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_run_trains_on_the_mean_over_the_targets_of_a_step(name, text):
    config = make_config(**EQUAL[name])
    losses, norms, params, outcome = train_in_pieces(config, functions_of, data=text)
    versions = [init_stage(config.model, 0, 3, SEED)]
    for step in range(N_STEPS):
        lag = config.sync.delay if step else 0
        loss, gradient = reference(config, text, versions[step - lag], step, range(N_MICROBATCHES))
        assert losses[step] == pytest.approx(float(loss), rel=1e-5)
        assert norms[step] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-4)
        versions.append(jax.tree.map(lambda leaf, change: leaf - 0.1 * change, versions[-1], gradient))
    close(params, versions[-1])
    held_out = {row["step"] + 1: row["eval_loss"] for row in report_fields(outcome, "step") if "eval_loss" in row}
    places = [place for m in range(3) for place in text.eval_places(m, SIZE, SEQ_LEN)]
    assert list(held_out) == [2, 3]
    for n, loss in held_out.items():
        wanted, _ = gradient_of(config.model)(versions[n], *alone(text, places))
        assert loss == pytest.approx(float(wanted), rel=1e-5)


DIFFERING = {
    "groups": dict(kind="groups", groups=dict(every_steps=1, outer="none")),
    "server": dict(kind="server", server=dict(wave=1)),
}


@pytest.mark.parametrize("kind", DIFFERING)
def test_a_pipeline_that_steps_by_itself_takes_the_mean_over_its_own_targets(kind, text):
    """Of two pipelines, the first has the microbatch of which 5 targets count."""
    config = make_config(pipelines=2, sync=DIFFERING[kind], servers=1 if kind == "server" else 0)
    plan = run_config.default_plan(config)
    losses, *_ = train_in_pieces(config, functions_of, data=text, are_equal=lambda *_: None)
    params = init_stage(config.model, 0, 3, SEED)
    found = [reference(config, text, params, 0, plan.microbatches(pipeline))[0] for pipeline in range(2)]
    wanted = sum(float(loss) * share for loss, share in zip(found, plan.shares, strict=True)) / N_MICROBATCHES
    assert losses[0] == pytest.approx(wanted, rel=1e-5)
