"""Cutting a model into stages: the split whose slowest stage is fastest, within every stage's memory."""

import math

from jaxdt.core.errors import BadInput
from jaxdt.core.gpt import GPTConfig

STATE_BYTES = 16  # per parameter: fp32 weight, gradient, two optimizer moments

Ranges = tuple[tuple[int, int], ...]


def check_count(n_layers: int, n_stages: int):
    if n_layers < n_stages:
        raise BadInput(f"--stages: got {n_stages} stages for {n_layers} layers, expected at least one layer a stage")


def load(model: GPTConfig, lo: int, hi: int) -> float:
    """Multiplications of layers lo..hi-1 per token, in parameters used: the last stage also computes the head, while
    looking up an embedding costs next to nothing."""
    head = model.token_table_params if hi == model.n_layers else 0
    return (hi - lo) * model.block_params + head


def split(model: GPTConfig, n_stages: int, memory_bytes: list[float] | None = None) -> Ranges:
    """Ranges that minimise the largest load, then their sum of squares; memory_bytes[s] is what stage s may hold (its
    smallest device). Dynamic programming over (stages done, layers done), O(S L^2)."""
    n_layers = model.n_layers
    check_count(n_layers, n_stages)
    room = memory_bytes or [math.inf] * n_stages
    best: dict[int, tuple[float, float, Ranges]] = {0: (0.0, 0.0, ())}
    for s in range(n_stages):
        extended: dict[int, tuple[float, float, Ranges]] = {}
        for lo, (slowest, squares, done) in best.items():
            for hi in range(lo + 1, n_layers - (n_stages - s - 1) + 1):
                if STATE_BYTES * model.stage_params(lo, hi) > room[s]:
                    continue
                here = load(model, lo, hi)
                found = (max(slowest, here), squares + here * here, (*done, (lo, hi)))
                if hi not in extended or found < extended[hi]:
                    extended[hi] = found
        best = extended
    if n_layers not in best:
        need = STATE_BYTES * model.n_params
        raise BadInput(
            f"memory_bytes: no split of {n_layers} layers fits stages of "
            f"{', '.join(f'{r / 1e9:.1f}' for r in room)} GB; expected {need / 1e9:.1f} GB in all, "
            f"{STATE_BYTES} bytes a parameter"
        )
    return best[n_layers][2]
