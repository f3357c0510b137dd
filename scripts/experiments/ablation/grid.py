"""The models and codecs that the ablation compares, and their boundaries. Standard library only.

A Case is one training run. S stages of L layers have their boundaries behind layer L/S * k, k = 1..S-1 (SWARM App. J).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxdt.run import codec as codecs
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.plan import Plan, even_shares, ranges
from jaxdt.run.sizes import boundary_bytes

BASELINE = "none"
LAYERS = ("bottleneck", "maxout")
EIGHT_BIT = (codecs.INT8, codecs.DYNAMIC)
METHODS = (BASELINE, *EIGHT_BIT, *LAYERS)
# Compared with 16-bit boundaries, as the paper counts; compared with fp32 the ratio is 4.
EIGHT_BIT_RATIO = 2


@dataclass(frozen=True)
class AblationConfig:
    """The fields of `config.ablation`.

    methods, stages, ratios: the grid. Each method is trained with every number of stages; compression layers also with
        every ratio.
    seeds: runs of each case, with seeds 0, 1, ...
    target_frac: a run reaches its target at the loss that its seed's baseline has after this part of the steps.
    measurements: times that the parts of a step are measured, from which the times' spread comes.
    gbps: step times are simulated for links of each of these bandwidths (inf: unlimited).
    workers: processes that train, with one CPU each if there are several.
    """

    methods: tuple[str, ...] = METHODS
    stages: tuple[int, ...] = (2, 4)
    ratios: tuple[int, ...] = (2, 4)
    seeds: int = 3
    measurements: int = 5
    target_frac: float = 0.75
    gbps: tuple[float, ...] = (0.1, 0.5, float("inf"))
    workers: int = 2

    def __post_init__(self):
        for method in self.methods:
            if method not in METHODS:
                raise BadInput(f"ablation.methods: got {method!r}, expected some of {', '.join(METHODS)}")
        if BASELINE not in self.methods:
            raise BadInput(f"ablation.methods: expected {BASELINE!r} among them, which the others are compared with")
        for name in ("stages", "ratios", "gbps"):
            if not getattr(self, name):
                raise BadInput(f"ablation.{name}: got none, expected at least one")
        for name in ("seeds", "measurements", "workers"):
            if getattr(self, name) < 1:
                raise BadInput(f"ablation.{name}: got {getattr(self, name)}, expected an integer >= 1")
        if not 0 < self.target_frac <= 1:
            raise BadInput(f"ablation.target_frac: got {self.target_frac}, expected a number in (0, 1]")
        if min(self.stages) < 2 or min(self.gbps) <= 0:
            raise BadInput("ablation.stages and ablation.gbps: expected numbers of stages >= 2 and rates > 0")


@dataclass(frozen=True)
class Case:
    """One training run. The baseline has `stages` 1 and `ratio` 1: the number of stages does not change its model."""

    method: str
    stages: int
    ratio: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.method} {self.ratio}x, {self.stages} stages, seed {self.seed}"


def kinds(ablation: AblationConfig) -> Iterator[Case]:
    """Every case with seed 0."""
    for method in ablation.methods:
        if method == BASELINE:
            yield Case(method, 1, 1)
            continue
        ratios = ablation.ratios if method in LAYERS else (EIGHT_BIT_RATIO,)
        yield from (Case(method, stages, ratio) for ratio in ratios for stages in ablation.stages)


def cases(ablation: AblationConfig) -> list[Case]:
    """All training runs, ordered by seed."""
    return [replace(case, seed=seed) for seed in range(ablation.seeds) for case in kinds(ablation)]


def model_of(config: RunConfig, case: Case) -> ModelSpec:
    """The config's model with the case's layers."""
    if case.method not in LAYERS:
        return config.model
    after = tuple(lo for lo, _ in cut(config.model, case.stages) if lo)
    return config.model.with_compression(f"{case.method}{case.ratio}", after)


def codec_of(case: Case) -> codecs.CodecSpec:
    return codecs.parse(case.method if case.method in EIGHT_BIT else codecs.NONE)


def cut(model: ModelSpec, n_stages: int) -> tuple[tuple[int, int], ...]:
    """The even split into layer ranges."""
    if n_stages > model.facts.n_layers:
        raise BadInput(f"ablation.stages: got {n_stages}, expected at most n_layers {model.facts.n_layers}")
    return ranges(even_shares(model.facts.n_layers, n_stages))


def run_of(config: RunConfig, case: Case) -> tuple[RunConfig, Plan]:
    """Config and plan of the same training with peers: the case's model, and one pipeline of its stages."""
    stages = cut(config.model, case.stages)
    plan = Plan(
        n_layers=config.model.facts.n_layers,
        stages=stages,
        placement=tuple((stage,) for stage in range(case.stages)),
        shares=(config.plan.microbatches,),
        schedule=config.plan.schedule,
        codec=(str(codec_of(case)),) * (case.stages - 1),
    )
    return replace(config, model=model_of(config, case), train=replace(config.train, seed=case.seed)), plan


def bytes_per_step(config: RunConfig, case: Case) -> int:
    """Payload of a step over all boundaries, in both directions. With one pipeline there is nothing to average."""
    config, plan = run_of(config, case)
    total = 0
    for boundary in range(case.stages - 1):
        for forward in (True, False):
            total += plan.n_microbatches * boundary_bytes(config, plan, boundary, 0, forward)
    return total
