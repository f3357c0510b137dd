"""Cutting a model into stages: the split whose slowest stage is fastest, within every stage's memory."""

from collections.abc import Callable

from jaxdt.spec.errors import BadInput
from jaxdt.spec.model import GPTConfig

Ranges = tuple[tuple[int, int], ...]
Load = Callable[[int, int, int], float]  # (stage, lo, hi) -> what the stage's slowest device needs for these layers
Fits = Callable[[int, int, int], bool]  # (stage, lo, hi) -> whether every device of the stage can hold them


def cut_points(model: GPTConfig) -> list[int]:
    """Where a model may be cut: anywhere, but with shared blocks only between their runs; both ends included."""
    return [layer for layer in range(model.n_layers) if model.block_of(layer) == layer] + [model.n_layers]


def check_count(n_layers: int, n_stages: int):
    if n_layers < n_stages:
        raise BadInput(f"--stages: got {n_stages} stages for {n_layers} layers, expected at least one layer a stage")


def parameter_load(model: GPTConfig) -> Load:
    """Multiplications per token, in parameters used, of equal devices: the last stage also computes the head, while
    looking up an embedding costs next to nothing."""

    def load(stage: int, lo: int, hi: int) -> float:
        head = model.token_table_params if hi == model.n_layers else 0
        return (hi - lo) * model.block_params + head

    return load


def split(cuts: list[int], n_stages: int, load: Load, fits: Fits) -> Ranges | None:
    """Ranges that minimise the largest load, then the sum of squares; None if nothing fits. Dynamic programming over
    (stages done, layers done), O(S L^2)."""
    best: dict[int, tuple[float, float, Ranges]] = {0: (0.0, 0.0, ())}
    for s in range(n_stages):
        extended: dict[int, tuple[float, float, Ranges]] = {}
        last = len(cuts) - (n_stages - s - 1)
        for lo, (slowest, squares, done) in best.items():
            for hi in cuts[cuts.index(lo) + 1 : last]:
                here = load(s, lo, hi)
                if (hi in extended and max(slowest, here) > extended[hi][0]) or not fits(s, lo, hi):
                    continue
                found = (max(slowest, here), squares + here * here, (*done, (lo, hi)))
                if hi not in extended or found < extended[hi]:
                    extended[hi] = found
        best = extended
    return best[cuts[-1]][2] if cuts[-1] in best else None
