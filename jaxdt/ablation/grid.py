"""Which models and codecs the ablation compares, and where their boundaries are. Standard library only.

A Case is one training run. Boundaries are those of an even cut: behind layer L/S * k, k = 1..S-1 (SWARM App. J)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxdt.spec import codec as codecs
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput
from jaxdt.spec.model import GPTConfig
from jaxdt.spec.plan import Plan, even_shares, ranges
from jaxdt.spec.sizes import boundary_bytes

BASELINE = "none"
LAYERS = ("bottleneck", "maxout")
EIGHT_BIT = (codecs.INT8, codecs.DYNAMIC)
METHODS = (BASELINE, *EIGHT_BIT, *LAYERS)
# 8 bits are a ratio of 2 against 16-bit boundaries, which is how the paper counts; against fp32 they are 4.
EIGHT_BIT_RATIO = 2


@dataclass(frozen=True)
class AblationConfig:
    """`methods` at every number of `stages` and, for the layers, every ratio; `seeds` runs of each, seed 0 first.
    A run reaches its goal at the perplexity of its seed's baseline after `target_frac` of the steps. Step times are
    simulated for links of each of `gbps` (inf: unlimited). `workers`: processes that train, with a CPU each if there
    are several."""

    methods: tuple[str, ...] = METHODS
    stages: tuple[int, ...] = (2, 4)
    ratios: tuple[int, ...] = (2, 4)
    seeds: int = 3
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
        for name in ("seeds", "workers"):
            if getattr(self, name) < 1:
                raise BadInput(f"ablation.{name}: got {getattr(self, name)}, expected an integer >= 1")
        if not 0 < self.target_frac <= 1:
            raise BadInput(f"ablation.target_frac: got {self.target_frac}, expected a number in (0, 1]")
        if min(self.stages) < 2 or min(self.gbps) <= 0:
            raise BadInput("ablation.stages and ablation.gbps: expected numbers of stages >= 2 and rates > 0")


@dataclass(frozen=True)
class Case:
    """One training run. The baseline has `stages` 1 and `ratio` 1: its model is the same however it is cut."""

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
    """All training runs, all of one seed before the next seed."""
    return [replace(case, seed=seed) for seed in range(ablation.seeds) for case in kinds(ablation)]


def model_of(config: RunConfig, case: Case) -> GPTConfig:
    """The config's model with the case's layers."""
    if case.method not in LAYERS:
        return config.model
    after = tuple(lo for lo, _ in cut(config.model, case.stages) if lo)
    return replace(config.model, compression=f"{case.method}{case.ratio}", compression_after=after)


def codec_of(case: Case) -> codecs.CodecSpec:
    """How the case's boundary tensors travel."""
    return codecs.parse(case.method if case.method in EIGHT_BIT else codecs.NONE)


def cut(model: GPTConfig, n_stages: int) -> tuple[tuple[int, int], ...]:
    """The even split into layer ranges."""
    if n_stages > model.n_layers:
        raise BadInput(f"ablation.stages: got {n_stages}, expected at most n_layers {model.n_layers}")
    return ranges(even_shares(model.n_layers, n_stages))


def run_of(config: RunConfig, case: Case) -> tuple[RunConfig, Plan]:
    """The same run on peers: the case's model, and one pipeline of its stages."""
    stages = cut(config.model, case.stages)
    plan = Plan(
        n_layers=config.model.n_layers,
        stages=stages,
        placement=tuple((stage,) for stage in range(case.stages)),
        shares=(config.plan.microbatches,),
        schedule=config.plan.schedule,
        codec=(str(codec_of(case)),) * (case.stages - 1),
    )
    return replace(config, model=model_of(config, case), train=replace(config.train, seed=case.seed)), plan


def bytes_per_step(config: RunConfig, case: Case) -> int:
    """Payload of a step over all boundaries, both ways; averaging has none with one pipeline."""
    config, plan = run_of(config, case)
    ways = [(boundary, forward) for boundary in range(case.stages - 1) for forward in (True, False)]
    return plan.n_microbatches * sum(boundary_bytes(config, plan, boundary, 0, way) for boundary, way in ways)
