"""The comparison `delay` with a small config: its losses are those of a process that delays by hand."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from jaxdt.model.base import apply_stage, init_stage
from jaxdt.model.batches import Batch
from jaxdt.model.data import open_data, write_tokens
from jaxdt.model.optim import optimizer
from jaxdt.model.stage import sum_sample_losses
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.optim import OptimConfig

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "experiments" / "compare.py"
MODEL = dict(n_layers=1, d_model=16, n_heads=2, d_ff=32, max_len=8, vocab_size=64)
GPT = GPTConfig.of("debug", **MODEL)
OPTIM = dict(lr=1e-2, b1=0.98, gradient_frac=0.08, clip_norm=0.5)
STEPS, AFTER, SIZE, MICROBATCHES, SEEDS = 8, 3, 2, 3, (4, 5)
CONFIG = '''"""A small run."""

from jaxdt.config_file import base_config


def get_config():
    config = base_config("debug")
    config.update_from_flattened_dict({fields})
    return config
'''


@pytest.fixture
def run(tmp_path):
    """(tokens, what the script printed)."""
    rng = np.random.default_rng(0)
    text = np.cumsum(rng.integers(1, 3, 3000)) % 64
    write_tokens(tmp_path / "t.tok", tokenizer="bytes", vocab_size=64, train=text[:2500], held_out=text[2500:])
    fields = {f"model.{name}": value for name, value in MODEL.items()}
    fields |= {f"optim.{name}": value for name, value in OPTIM.items()}
    fields |= {"train.steps": STEPS, "train.microbatch_size": SIZE, "plan.microbatches": MICROBATCHES}
    fields |= {"sync.delay_after_steps": AFTER, "data.path": str(tmp_path / "t.tok")}
    (tmp_path / "c.py").write_text(CONFIG.format(fields=fields))
    command = [
        sys.executable,
        str(SCRIPT),
        "delay",
        f"--config={tmp_path / 'c.py'}",
        f"--seeds={','.join(map(str, SEEDS))}",
    ]
    command.append(f"--run_dir={tmp_path / 'out'}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return open_data(tmp_path / "t.tok"), done.stdout.splitlines()


@jax.jit
def mean_loss(params, tokens_BT):
    logits_BTV = apply_stage(GPT, 0, 1, np.float32, params, tokens_BT[:, :-1])
    return sum_sample_losses(logits_BTV, Batch(tokens_BT)) / len(tokens_BT)


GRADIENT_OF = jax.jit(jax.value_and_grad(mean_loss))


def by_hand(data, seed, delay):
    """(held-out loss, mean training loss) of the recurrence, with the whole batch at once."""
    rule, clip = optimizer(OptimConfig(**OPTIM)), optax.clip_by_global_norm(OPTIM["clip_norm"])
    update = jax.jit(rule.update)
    before = params = init_stage(GPT, 0, 1, seed)
    state, losses = rule.init(params), []
    for step in range(STEPS):
        batch = [data.train_batch(seed, step, m, SIZE, 8, MICROBATCHES) for m in range(MICROBATCHES)]
        late = delay and step >= AFTER
        loss, gradient = GRADIENT_OF(before if late else params, np.concatenate(batch))
        change, state = update(clip.update(gradient, clip.init(params))[0], state, params)
        before, params = params, optax.apply_updates(params, change)
        losses.append(float(loss))
    held_out = np.concatenate([data.eval_batch(index, SIZE, 8) for index in range(4)])
    return float(mean_loss(params, held_out)), statistics.mean(losses)


def test_both_arms_and_what_they_come_to(run, tmp_path):
    data, lines = run
    found = json.loads(lines[-1])["0.01, 0.98, 0.08"]
    for delay, arm in enumerate(("delay 0", "delay 1")):
        right = [by_hand(data, seed, delay) for seed in SEEDS]
        got = list(zip(found["held_out"][arm], found["training"][arm], strict=True))
        np.testing.assert_allclose(got, right, rtol=1e-4)
    head, *kept = [json.loads(line) for line in (tmp_path / "out/losses.jsonl").read_text().splitlines()]
    assert head["about"]["cores"] > 0 and head["about"]["commit"]
    assert [(line["seed"], line["delay"]) for line in kept] == [(seed, delay) for seed in SEEDS for delay in (0, 1)]
    assert all(line["config"].endswith("c.py") and line["lr"] == OPTIM["lr"] for line in kept)
    first = [round(found["held_out"][arm][0], 5) for arm in ("delay 0", "delay 1")]
    assert [line["held_out"] for line in kept[:2]] == first
    assert "| 0.01, 0.98, 0.08 | 4, 5 |" in (tmp_path / "out/README.md").read_text()
    for measure in ("held_out", "training"):
        one = found[measure]
        plain, delayed = one["delay 0"], one["delay 1"]
        assert one["spread"] == pytest.approx(abs(plain[0] - plain[1]))
        assert one["deviation"] == pytest.approx(one["spread"] / 2**0.5)
        assert one["gap"] == pytest.approx((sum(delayed) - sum(plain)) / 2)
        assert one["within"] == (one["gap"] <= one["spread"])
