"""Cutting a model into stages: the split whose slowest stage is fastest, within every stage's memory."""

from collections.abc import Callable

from jaxdt.run.errors import BadInput
from jaxdt.run.model_facts import ModelFacts

Ranges = tuple[tuple[int, int], ...]
Load = Callable[[int, int, int], float]  # (stage, lo, hi) -> what the stage's slowest device needs for these layers
Fits = Callable[[int, int, int], bool]  # (stage, lo, hi) -> whether every device of the stage can hold them


def check_count(n_layers: int, n_stages: int):
    if n_layers < n_stages:
        raise BadInput(f"--stages: got {n_stages} stages for {n_layers} layers, expected at least one layer a stage")


def parameter_load(facts: ModelFacts) -> Load:
    """The load of equal devices: multiplications per token, counted in parameters. The last stage also computes the
    head."""

    def load(stage: int, lo: int, hi: int) -> float:
        return facts.n_used_params(lo, hi)

    return load


def split(cuts: list[int], n_stages: int, load: Load, fits: Fits) -> Ranges | None:
    """Ranges that minimise the largest load, then the sum of squares; None if nothing fits. Dynamic programming over
    (stages done, layers done), O(S L^2)."""
    best: dict[int, tuple[float, float, Ranges]] = {0: (0.0, 0.0, ())}
    for stage in range(n_stages):
        extended: dict[int, tuple[float, float, Ranges]] = {}
        last = len(cuts) - (n_stages - stage - 1)
        for lo, (slowest, squares, ranges) in best.items():
            for hi in cuts[cuts.index(lo) + 1 : last]:
                stage_load = load(stage, lo, hi)
                largest = max(slowest, stage_load)
                if (hi in extended and largest > extended[hi][0]) or not fits(stage, lo, hi):
                    continue
                candidate = (largest, squares + stage_load * stage_load, (*ranges, (lo, hi)))
                if hi not in extended or candidate < extended[hi]:
                    extended[hi] = candidate
        best = extended
    return best[cuts[-1]][2] if cuts[-1] in best else None


def split_trained(facts: ModelFacts, n_stages: int) -> Ranges:
    """Ranges of about equal parameters, each with a trained leaf; BadInput where there are none."""
    found = split(list(facts.cuts), n_stages, parameter_load(facts), lambda stage, lo, hi: facts.may_be_stage(lo, hi))
    if found is None:
        raise BadInput(
            f"--stages: found no cut into {n_stages} stages in which each has a trained leaf, expected fewer stages"
        )
    return found
