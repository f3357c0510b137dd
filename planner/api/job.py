"""A job of the planner: one training step, and its numbers of stages and pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxdt.run import codec as codecs
from jaxdt.run.config import DTYPES, REMATS, DataConfig, PlanConfig, RunConfig, TrainConfig
from jaxdt.run.errors import BadInput, require_one_of
from jaxdt.run.model import options_of
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.network import Network
from jaxdt.run.plan import SCHEDULES, Plan
from jaxdt.run.profile import Profile, from_flops
from planner.model.devices import UTILISATION, catalogue_kind, profile_of_catalogue
from planner.model.pool import PoolOptions
from planner.model.prices import PriceRules

COMM_COST, STEP_TIME, COST_PER_STEP = "comm_cost", "step_time", "cost_per_step"
OBJECTIVES = (COMM_COST, STEP_TIME, COST_PER_STEP)
DEFAULT_LAYERS = 24
HORIZON_STEPS = 1000.0
MICROBATCHES_PER_PIPELINE = 8
DEFAULT_EFFICIENCY = UTILISATION


@dataclass(frozen=True)
class ByteSizes:
    """The bytes that one step moves, where no model is known: `c_dp_bytes` of gradients of one stage, and `c_pp_bytes`
    that one pipeline sends over one boundary (DT-FM, arXiv 2206.01288, Sec. 3). `n_layers` and `n_microbatches` of the
    step are cut evenly; None means 24 layers, or as many as stages if those are more, and 8 microbatches a pipeline."""

    c_dp_bytes: float
    c_pp_bytes: float
    n_layers: int | None = None
    n_microbatches: int | None = None


@dataclass(frozen=True)
class Job:
    """A step to plan. `work` is the config of a run, or sizes alone. With a `profile` (seconds of each kind of device)
    the plan is chosen by the simulated step time, without one by the communication cost of DT-FM's Eq. 1-4.

    price_rules: with a profile, whether the price of a step is minimised in place of its seconds, and what the devices
    may cost in all. Where prices decide, a plan may leave devices out.

    n_stages, n_pipelines: None lets the search choose, which only step times can decide. `unequal`: each stage may have
    replicas of its own number, under `swarm` wiring; there are no pipelines then, and prices do not count.

    pool: the devices with a `disconnect_prob` are the workers of a pool, and the others its servers (hybrid parameter
    servers). The microbatches are the units, the step is that of the paper's Eq. 1-2, and there are no pipelines."""

    work: RunConfig | ByteSizes
    n_stages: int | None
    n_pipelines: int | None
    profile: Profile | None = None
    price_rules: PriceRules = PriceRules()
    unequal: bool = False
    pool: PoolOptions | None = None

    def __post_init__(self) -> None:
        for name in ("n_stages", "n_pipelines"):
            count = getattr(self, name)
            flag = name.removeprefix("n_")
            if count is not None and (type(count) is not int or count < 1):
                raise BadInput(f"--{flag}: got {count}, expected an integer >= 1, or auto")
            if count is None and self.profile is None:
                raise BadInput(
                    f"--{flag}: got auto, expected a number: Eq. 1-4 do not compare shapes, step times do, for which a "
                    f"job needs a profile"
                )
        budget = self.price_rules.budget_per_hour
        if budget is not None and not 0 <= budget < float("inf"):
            raise BadInput(f"--budget_per_hour: got {budget}, expected a number >= 0")
        if self.profile is None and not self.price_rules.empty:
            name = "--objective" if self.price_rules.is_minimised else "--budget_per_hour"
            raise BadInput(
                f"{name}: got a job by communication cost, expected one with a profile: prices need step times"
            )
        if self.unequal and (self.profile is None or self.n_pipelines is not None or not self.price_rules.empty):
            raise BadInput(
                "--replicas: got unequal with a number of pipelines, with prices or without step_time, expected "
                "--pipelines auto and --objective step_time: any replica may get any microbatch"
            )
        if self.profile is not None:
            self._check_profile(self.profile)

    def _check_profile(self, profile: Profile) -> None:
        """BadInput where the run and its profile differ."""
        if not isinstance(self.work, RunConfig):
            raise BadInput(
                "--c_dp_bytes, --c_pp_bytes: step_time derives the sizes, expected --model or --profile instead"
            )
        if self.work.model != profile.model:
            raise BadInput("--model: differs from the profile's model, expected the profile's (or no --model)")
        pairs = {
            "microbatch_size": (self.work.train.microbatch_size, profile.microbatch_size),
            "data.seq_len": (self.work.seq_len, profile.microbatch_shape.seq_len),
            "dtype": (self.work.dtype, profile.dtype),
            "remat": (self.work.remat, profile.remat),
        }
        for name, (value, measured) in pairs.items():
            if value != measured:
                raise BadInput(f"--{name}: got {value}, expected the profile's {measured}")

    @property
    def objective(self) -> str:
        """COMM_COST, STEP_TIME or COST_PER_STEP."""
        if self.price_rules.is_minimised:
            return COST_PER_STEP
        return COMM_COST if self.profile is None else STEP_TIME


@dataclass(frozen=True)
class Start:
    """The plan that runs when a network changes, whose devices may be gone. The seconds of moving to another plan have
    to pay off over `horizon_steps`: a search minimises seconds of a step (or of communication, for a job without a
    profile) plus seconds of moving / horizon_steps."""

    plan: Plan
    horizon_steps: float = HORIZON_STEPS


@dataclass(frozen=True)
class StepOptions:
    """The options of a step where no run's config gives them: the fields of the same names of a config."""

    global_batch: int = 1024
    microbatch_size: int = 1
    dtype: str = "bfloat16"
    remat: str = "recompute"
    codec: str = codecs.NONE
    schedule: str = "1f1b"
    seq_len: int = 0


def run_of_model(model: str | ModelSpec, options: StepOptions | None = None) -> RunConfig:
    """The config of a run of a model (or the preset of that name), as far as plans depend on it."""
    options = options or StepOptions()
    for name, choices in (("dtype", DTYPES), ("remat", REMATS), ("schedule", SCHEDULES)):
        require_one_of(f"--{name}", getattr(options, name), choices)
    codecs.parse(options.codec, "--codec")
    size, batch = options.microbatch_size, options.global_batch
    if size < 1 or batch < 1 or batch % size:
        raise BadInput(f"--microbatch_size: got {size}, expected a divisor of --global_batch {batch}")
    return RunConfig(
        model=options_of(model) if isinstance(model, str) else model,
        plan=PlanConfig(microbatches=batch // size, schedule=options.schedule),
        data=DataConfig(seq_len=options.seq_len),
        train=TrainConfig(microbatch_size=size),
        codec=options.codec,
        dtype=options.dtype,
        remat=options.remat,
    )


def run_of_profile(profile: Profile, global_batch: int, codec: str = codecs.NONE, schedule: str = "1f1b") -> RunConfig:
    """The config of a run for which a profile was measured."""
    measured = {name: getattr(profile, name) for name in ("microbatch_size", "dtype", "remat", "seq_len")}
    return run_of_model(profile.model, StepOptions(global_batch, codec=codec, schedule=schedule, **measured))


def profile_of_flops(
    run: RunConfig, network: Network, flops: float | Mapping[str, float], efficiency: float = DEFAULT_EFFICIENCY
) -> Profile:
    """A profile without measurements: peak FLOP/s of all devices or by kind, of which the maths reaches a share."""
    kinds = sorted({device.kind for device in network.devices})
    speeds = flops if isinstance(flops, Mapping) else dict.fromkeys(kinds, flops)
    missing = [kind for kind in kinds if kind not in speeds]
    if missing:
        raise BadInput(f"--flops: no FLOP/s for the kind {missing[0]!r}, expected one for each of {', '.join(kinds)}")
    size, dtype, seq_len = run.train.microbatch_size, run.dtype, run.data.seq_len
    return from_flops(
        run.model, size, speeds, efficiency, dtype=dtype, remat=run.remat, seq_len=seq_len, optimizer=run.optim.name
    )


def profile_of_kinds(
    run: RunConfig, network: Network, measured: Profile | None = None, efficiency: float = DEFAULT_EFFICIENCY
) -> Profile:
    """The seconds of each kind of device of a network: as measured where `measured` has the kind, else from the
    catalogue (planner.model.devices), at a share `efficiency` of the peak rate. A device of the catalogue may have
    another of its names in the network than in `measured`. BadInput for a kind that is in neither."""
    kinds = {device.kind for device in network.devices}
    if measured is None:
        return profile_of_catalogue(run, kinds, efficiency)
    of_catalogue = {kind: known for kind in kinds - set(measured.kinds) if (known := catalogue_kind(kind))}
    if not of_catalogue:
        return measured
    seconds = {known: times for name, times in measured.kinds.items() if (known := catalogue_kind(name))}
    respelled = {kind: seconds[known] for kind, known in of_catalogue.items() if known in seconds}
    measured = replace(measured, kinds=measured.kinds | respelled)
    missing = set(of_catalogue) - set(respelled)
    if not missing:
        return measured
    derived = profile_of_catalogue(run, missing, efficiency)
    source = "; ".join(filter(None, (measured.source, derived.source)))
    return replace(measured, kinds=measured.kinds | derived.kinds, source=source)
