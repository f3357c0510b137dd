"""Bytes of a stage: residuals to the byte as jax would return them, the parts that add up, and what grows with what."""

from dataclasses import replace

import jax
import pytest

from jaxdt.build import memory_options, worker_vectors
from jaxdt.model.batches import Batch
from jaxdt.model.optim import optimizer
from jaxdt.model.stage import StageOptions, build_stage
from jaxdt.run.config import default_plan, parse
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.memory import (
    MemoryOptions,
    ReplicaCopies,
    StageMemory,
    residual_bytes,
    stage_memory,
    state_bytes,
    update_bytes,
    working_bytes,
)
from jaxdt.run.model_facts import MicrobatchShape, Moments
from jaxdt.run.optim import OptimConfig

SHAPE = dict(n_layers=5, d_model=32, n_heads=2, max_len=16, vocab_size=64)
ONE, SIXTEEN = MicrobatchShape(1, 16), MicrobatchShape(16, 16)


@pytest.mark.parametrize("remat", ["recompute", "dots"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["gelu", "geglu"])
@pytest.mark.parametrize(("lo", "hi"), [(1, 4), (2, 3)])
@pytest.mark.parametrize("adapter", ["", "lora:4"])
def test_a_residual_is_what_the_stage_function_returns(adapter, lo, hi, activation, dtype, remat):
    model = GPTConfig.of("small", activation=activation, adapter=adapter, **SHAPE)
    stage = build_stage(model, lo, hi, optimizer(OptimConfig()), StageOptions(2, remat, dtype))
    params = jax.eval_shape(lambda: stage.init(0))
    _, residual = jax.eval_shape(
        stage.forward, params, jax.ShapeDtypeStruct((2, 16, 32), stage.boundary_dtype), Batch()
    )
    n_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residual))
    assert residual_bytes(model, lo, hi, MicrobatchShape(2, 16), dtype, remat) == n_bytes


def test_bytes_of_a_parameter():
    """16 with Adam in fp32, 18 with bf16 copies; 16 more at the update."""
    model = GPTConfig.of("small", **SHAPE)
    n_params = model.facts.stage_params(1, 3)
    assert state_bytes(model, 1, 3) == 16 * n_params
    assert state_bytes(model, 1, 3, "bfloat16") == 18 * n_params
    assert state_bytes(model, 1, 3, moments=Moments(1, 1)) == 12 * n_params
    assert update_bytes(model, 1, 3) == 16 * n_params


def test_a_frozen_matrix_is_held_in_the_dtype_of_the_computation():
    """4 or 2 bytes; a scale or a bias is in fp32, with a copy in bf16. Those of adapters take 16 or 18 with Adam."""
    model = GPTConfig.of("small", adapter="lora:2", **SHAPE)
    n_trained = model.facts.stage_trained(1, 3)
    assert n_trained == 2 * 2 * sum((32 + 96, 32 + 32, 32 + 128, 128 + 32)), "of each matrix of two blocks, both"
    n_matrices = 2 * 32 * (96 + 32 + 128 + 128)
    n_vectors = model.facts.stage_params(1, 3) - n_trained - n_matrices
    assert state_bytes(model, 1, 3) == 16 * n_trained + 4 * (n_matrices + n_vectors)
    assert state_bytes(model, 1, 3, "bfloat16") == 18 * n_trained + 2 * n_matrices + 6 * n_vectors


def test_the_last_stage_holds_logits_and_no_dots():
    model = GPTConfig.of("small", **(SHAPE | {"vocab_size": 50000}))
    assert working_bytes(model, 3, 5, ONE, "float32") - working_bytes(model, 2, 4, ONE, "float32") == 8 * 16 * 50000
    assert residual_bytes(model, 3, 5, ONE, "float32", "dots") == residual_bytes(
        model, 3, 5, ONE, "float32", "recompute"
    )


def test_memory_grows_with_what_is_held():
    """With 16 samples computing needs more than the update."""
    model = GPTConfig.of("small", **SHAPE)
    plain, dots, delayed = MemoryOptions(), MemoryOptions(remat="dots"), MemoryOptions(delay=1)
    boundary_numbers = model.facts.boundary_numbers(SIXTEEN.n_tokens)
    one = stage_memory(model, 1, 3, SIXTEEN, 1, plain).total
    assert stage_memory(model, 1, 3, SIXTEEN, 4, plain).total - one == 3 * 3 * boundary_numbers * 4
    assert stage_memory(model, 1, 3, SIXTEEN, 1, plain, retained=5).total - one == 5 * 2 * boundary_numbers * 4
    # Parameters of the version before, and a second accumulator:
    assert stage_memory(model, 1, 3, SIXTEEN, 1, delayed).total > one + 2 * 4 * model.facts.stage_params(1, 3)
    assert stage_memory(model, 1, 4, SIXTEEN, 1, plain).total > one
    assert stage_memory(model, 1, 3, MicrobatchShape(17, 16), 1, plain).total > one
    assert stage_memory(model, 1, 3, SIXTEEN, 8, dots).total > stage_memory(model, 1, 3, SIXTEEN, 8, plain).total


@pytest.mark.parametrize(("delay", "n_vectors"), [(0, 2), (1, 4)])
def test_what_a_codec_loses_is_held_on_the_host(delay, n_vectors):
    """Before each step that is under way counts, and after."""
    config = parse({"model": dict(preset="small", **SHAPE), "sync": dict(codec="int8", delay=delay)})
    options = memory_options(config, "1f1b", 1, 3)
    owes = stage_memory(config.model, 1, 3, ONE, 1, options)
    exact = stage_memory(config.model, 1, 3, ONE, 1, replace(options, owes=False))
    assert owes.on_host - exact.on_host == n_vectors * 4 * config.model.facts.stage_trained(1, 3)
    assert owes.on_device == exact.on_device


def test_with_few_samples_the_update_needs_most():
    model = GPTConfig.of("small", **SHAPE)
    n_bytes = stage_memory(model, 1, 3, ONE, 1, MemoryOptions()).total
    assert n_bytes == state_bytes(model, 1, 3) + update_bytes(model, 1, 3)


def test_an_accelerator_holds_copies_for_an_exchange_on_its_host():
    """24 bytes of a parameter at the update, in place of 32; the kinds of number add up to the whole."""
    model = GPTConfig.of("small", **SHAPE)
    n_params = model.facts.stage_params(1, 3)
    memory = stage_memory(model, 1, 3, ONE, 1, MemoryOptions(), retained=3, on_accelerator=True)
    boundary_bytes = 2 * model.facts.boundary_numbers(ONE.n_tokens) * 4
    assert memory == StageMemory(8 * n_params, 8 * n_params, 8 * n_params, 0, 8 * n_params + 3 * boundary_bytes)
    assert memory.on_device == 24 * n_params
    copies = ReplicaCopies(kept=10, exchanging=40, on_host=35)
    groups = stage_memory(model, 1, 3, ONE, 1, MemoryOptions(copies=copies), on_accelerator=True)
    assert (groups.on_device, groups.on_host) == (24 * n_params + 15, 35)


def test_versions_of_stashed_parameters_are_counted():
    """One for each microbatch in flight but the newest."""
    model = GPTConfig.of("small", **SHAPE)

    def bytes_of(n_in_flight, stashes):
        options = MemoryOptions(copies=ReplicaCopies(8, 16), stashes=stashes)
        return stage_memory(model, 1, 3, ONE, n_in_flight, options).total

    assert bytes_of(1, True) == bytes_of(1, False)
    assert bytes_of(3, True) - bytes_of(3, False) == 2 * 4 * model.facts.stage_params(1, 3)
    assert bytes_of(1, False) == state_bytes(model, 1, 3) + 24 + 8 * model.facts.stage_params(1, 3)


def test_the_vectors_of_its_workers_are_counted_at_a_server():
    """A gradient of each worker of a pool; of HetPipe's workers a push of each, and two copies that are kept aside."""
    shape = dict(preset="small", tied_head=False, **SHAPE)
    pool = parse(
        {"model": shape, "plan": dict(stages=1, pipelines=2, workers=3, microbatches=4), "wiring": {"kind": "pool"}}
    )
    hetpipe = parse(
        {
            "model": shape,
            "plan": dict(stages=1, pipelines=3, servers=1, microbatches=3),
            "sync": {"kind": "server"},
        }
    )
    held = lambda config: [worker_vectors(config, default_plan(config), p) for p in default_plan(config).peers]  # noqa: E731
    assert held(pool) == [2, 1] and held(hetpipe) == [0, 0, 0, 5]
    bytes_of = lambda n: stage_memory(hetpipe.model, 0, 5, ONE, 1, MemoryOptions(n_vectors=n)).total  # noqa: E731
    assert bytes_of(5) - bytes_of(0) == 5 * 4 * hetpipe.model.facts.stage_params(0, 5)
