"""configs/swarm_1b.py is counted, not run; configs/swarm.py is the same in small."""

import importlib.util
from pathlib import Path

import pytest

from jaxdt.build import check
from jaxdt.run.config import default_plan, parse
from jaxdt.run.memory import MemoryOptions, stage_memory, state_bytes
from jaxdt.run.sizes import SHARED_TABLE, boundary_bytes, sync_groups

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def load(name):
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return parse(module.get_config().to_dict(), vocab_size=256)


def test_the_large_model_has_the_papers_counts():
    """SWARM Sec. 4.3: 1.01B parameters and the compute of a 13B model, by the sums of its App. H."""
    config = load("swarm_1b")
    model, plan = config.model, default_plan(config)
    check(config, plan)
    weights, biases, norms = 4 * 4096**2 + 3 * 4 * 4096**2, 4 * 4096 + 2 * 16384 + 4096, 4 * 4096
    assert model.facts.layers[0].n_params == weights + biases + norms
    assert model.facts.n_params == 3 * model.facts.layers[0].n_params + 50257 * 4096 + 2 * 4096
    assert model.facts.n_params == pytest.approx(1.011e9, abs=0.5e6)
    assert model.n_layers * model.facts.layers[0].n_params == pytest.approx(12.9e9, abs=0.05e9)
    assert plan.stages == ((0, 16), (16, 32), (32, 48))
    assert config.train.microbatch_size * plan.n_microbatches == 16384
    assert config.seq_lengths.rounded == [256, 512, 1024, 2048] and config.seq_lengths.growth_steps == 12_000


def test_the_large_models_stages():
    """A stage holds one block however often it applies it; both ends hold the tied table, averaged over both."""
    config = load("swarm_1b")
    model, plan = config.model, default_plan(config)
    table, block = model.facts.n_logit_params, model.facts.layers[0].n_params
    assert [model.facts.stage_params(lo, hi) for lo, hi in plan.stages] == [
        block + table,
        block,
        block + table + 2 * 4096,
    ]
    assert {group.stage: group.n_elements for group in sync_groups(config, plan)} == {
        0: block,
        1: block,
        2: block + 2 * 4096,
        SHARED_TABLE: table,
    }
    n_numbers = 2048 * 4096
    assert boundary_bytes(config, plan, 0, 0, forward=True) == n_numbers + 4 * n_numbers // 256
    assert state_bytes(model, 16, 32, "bfloat16") == block * (4 * 4 + 2)
    options = MemoryOptions("bfloat16")
    needs = [stage_memory(model, lo, hi, config.microbatch_shape, 4, options).total for lo, hi in plan.stages]
    assert 17e9 < min(needs) < max(needs) < 23e9


def test_the_small_one_has_every_option():
    large, small = load("swarm_1b"), load("swarm")
    check(small, default_plan(small))
    for name in ("positions", "activation", "tied_head"):
        assert getattr(small.model, name) == getattr(large.model, name)
    assert small.model.n_shared_blocks == small.plan.stages and large.model.n_shared_blocks == large.plan.stages
    assert (small.optim.name, small.codec, small.wiring.kind) == (large.optim.name, large.codec, large.wiring.kind)
    assert small.data.seq_start and small.data.seq_growth_steps < small.train.steps
