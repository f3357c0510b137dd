"""From the flags of `solve` and `replan` to a job: byte counts, a model, a profile, or the config of a run."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from jaxdt.interop.hf_config import options_of_config, read_config
from jaxdt.run import config as configs
from jaxdt.run import profile as profiles
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.model import options_of
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.network import Network
from jaxdt.run.profile import Profile
from planner.api.job import (
    COMM_COST,
    COST_PER_STEP,
    STEP_TIME,
    ByteSizes,
    Job,
    StepOptions,
    profile_of_flops,
    profile_of_kinds,
    run_of_model,
    run_of_profile,
)
from planner.model.prices import PriceRules

# Flags for values that a run's config says as well.
OF_THE_CONFIG = (
    "model",
    "model_config",
    "global_batch",
    "sequence",
    "microbatch_size",
    "dtype",
    "remat",
    "codec",
    "schedule",
)
SEQUENCE_MAX = 2048  # of a model that people have, unless --sequence says more: many take 100 times as many tokens
BYTES = ("c_dp_bytes", "c_pp_bytes", "layers", "microbatches")


def job_of(flags: Namespace, network: Network) -> Job:
    """The job that the flags describe; BadInput where they contradict each other."""
    objective = _objective(flags)
    n_stages, n_pipelines = _shape(flags)
    unequal = getattr(flags, "replicas", None) == "unequal"  # replan has no such flag
    rules = PriceRules(objective == COST_PER_STEP, flags.budget_per_hour)
    if objective == COMM_COST and None in (n_stages, n_pipelines):
        raise BadInput("--objective: got comm_cost with auto, expected step_time: Eq. 1-4 do not compare shapes")
    if objective == COMM_COST:
        return Job(_cost_work(flags), n_stages, n_pipelines, price_rules=rules, unequal=unequal)
    work, profile = _step_work(flags, network)
    return Job(work, n_stages, n_pipelines, profile, rules, unequal)


def _objective(flags: Namespace) -> str:
    """The objective of the flags: by step time where the shape is to be chosen or the model is one that people have,
    unless the flags say otherwise."""
    chosen = "auto" in (flags.stages, flags.pipelines) or flags.model_config
    return flags.objective or (STEP_TIME if chosen else COMM_COST)


def _shape(flags: Namespace) -> tuple[int | None, int | None]:
    """(stages, pipelines) of the flags or the config; None is auto, the default with --model_config."""
    if flags.model_config and flags.objective != COMM_COST:
        return _number_or_auto(flags.stages), _number_or_auto(flags.pipelines)
    if flags.stages is None and flags.config:
        plan = run_of_file(flags.config).plan
        return plan.stages, plan.pipelines if flags.pipelines is None else _number_or_auto(flags.pipelines)
    for name in ("stages", "pipelines"):
        if getattr(flags, name) is None and (name == "stages" or flags.stages != "auto"):
            raise BadInput(f"--{name}: missing, expected a number or auto")
    return _number_or_auto(flags.stages), _number_or_auto(flags.pipelines)


def _number_or_auto(count: int | str | None) -> int | None:
    return None if count in (None, "auto") else int(count)


def _cost_work(flags: Namespace) -> RunConfig | ByteSizes:
    """The sizes of a step that Eq. 1-4 need."""
    has_bytes = flags.c_dp_bytes is not None, flags.c_pp_bytes is not None
    given = [name for name in ("model", "model_config", "config") if getattr(flags, name)]
    if any(has_bytes) and given:
        raise BadInput(f"--{given[0]}: got one and byte counts, expected one of them")
    if given:
        return _run(flags)
    if not all(has_bytes):
        raise BadInput("sizes: expected --c_dp_bytes and --c_pp_bytes, --model, --model_config, or --config")
    return ByteSizes(flags.c_dp_bytes, flags.c_pp_bytes, flags.layers, flags.microbatches)


def _step_work(flags: Namespace, network: Network) -> tuple[RunConfig, Profile]:
    """The run whose step is simulated, and the seconds of its devices."""
    if flags.c_dp_bytes is not None or flags.c_pp_bytes is not None:
        raise BadInput("--c_dp_bytes, --c_pp_bytes: step_time derives the sizes, expected --model or --profile instead")
    if flags.profile and flags.flops:
        raise BadInput("--flops: got a profile and FLOP/s, expected one of them")
    if flags.profile:
        profile = profiles.load(flags.profile)
        run = _run_of_profile(flags, profile)
        return run, profile_of_kinds(run, network, profile, flags.efficiency)
    if not (flags.model or flags.model_config or flags.config):
        raise BadInput("--model: missing, step_time needs it to know what a stage computes and holds")
    run = _run(flags)
    if not flags.flops:
        return run, profile_of_kinds(run, network, None, flags.efficiency)
    return run, profile_of_flops(run, network, profiles.parse_flops(flags.flops), flags.efficiency)


def _run_of_profile(flags: Namespace, profile: Profile) -> RunConfig:
    """The run of the config, or one with the profile's settings; BadInput where flags differ from those."""
    if flags.config:
        run = _run_of_config(flags)
        if run.model != profile.model:
            raise BadInput(f"--config: its model differs from that of {flags.profile}")
        return run
    if flags.model or flags.model_config:
        name = "model" if flags.model else "model_config"
        if not _is_measured(_model(flags), profile, flags):
            raise BadInput(
                f"--{name}: differs from the model of {flags.profile}, expected the profile's (or no --{name})"
            )
    measured_of = {name: getattr(profile, name) for name in ("microbatch_size", "dtype", "remat")}
    if flags.model_config:
        measured_of["sequence"] = profile.microbatch_shape.seq_len
    for name, measured in measured_of.items():
        value = getattr(flags, name)
        if value is not None and value != measured:
            raise BadInput(f"--{name}: got {value}, expected the {measured} of {flags.profile}")
    defaults = StepOptions()
    batch = flags.global_batch if flags.global_batch is not None else defaults.global_batch
    return run_of_profile(profile, batch, flags.codec or defaults.codec, flags.schedule or defaults.schedule)


def _is_measured(model: ModelSpec, profile: Profile, flags: Namespace) -> bool:
    """Whether a profile is of this model. One that people have may take longer samples than were measured."""
    if flags.model:
        return model == profile.model
    return (
        model.with_max_len(profile.model.max_len) == profile.model
        and model.facts.n_params == profile.model.facts.n_params
    )


def _run(flags: Namespace) -> RunConfig:
    """The run of --config, --model or --model_config."""
    if flags.config:
        return _run_of_config(flags)
    given = {name: getattr(flags, name, None) for name in StepOptions.__dataclass_fields__}
    model = _model(flags)
    if flags.model_config:
        given["seq_len"] = min(SEQUENCE_MAX, model.max_len) if flags.sequence is None else flags.sequence
        if not 0 < given["seq_len"] <= model.max_len:
            raise BadInput(
                f"--sequence: got {flags.sequence}, expected 1 to {model.max_len}, the most that the model takes"
            )
    return run_of_model(model, StepOptions(**{name: value for name, value in given.items() if value is not None}))


def _model(flags: Namespace) -> ModelSpec:
    """The model of --model, with samples of --sequence tokens, or of --model_config."""
    if flags.model_config and flags.model:
        raise BadInput(f"--model_config: got {flags.model_config} and --model {flags.model}, expected one of them")
    if flags.model_config:
        return options_of_config(read_config(Path(flags.model_config)), flags.model_config)
    return options_of(flags.model, **({"max_len": flags.sequence} if flags.sequence else {}))


# -------------------------------------------------------------------------------------------------------- config file


def _run_of_config(flags: Namespace) -> RunConfig:
    """The config of --config, which leaves no room for flags about the same."""
    for name in (*OF_THE_CONFIG, *BYTES):
        if getattr(flags, name) is not None:
            raise BadInput(f"--{name}: got {getattr(flags, name)} with --config, expected the config to say that")
    return run_of_file(flags.config)


def run_of_file(path: str) -> RunConfig:
    """The config that a configs/*.py file returns, checked as the run would."""
    fields = _fields_of_file(path)
    try:
        return configs.parse(fields, _vocab_size(fields))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _fields_of_file(path: str) -> dict[str, Any]:
    try:
        config = configs.returned_by(path)
    except BadInput as error:
        raise BadInput(f"--config: {error}") from None
    if not hasattr(config, "to_dict"):
        raise BadInput(f"--config: {path}: get_config() returned {config!r:.40}, expected a ConfigDict")
    return config.to_dict()


def _vocab_size(fields: dict[str, Any]) -> int | None:
    """The vocabulary of the run's tokens, where the config leaves it to them."""
    if fields.get("model", {}).get("vocab_size") is not None:
        return None
    from jaxdt.model.data import open_data
    from jaxdt.model.tokenizer import load_tokenizer

    path = fields.get("data", {}).get("path", "")
    return open_data(path).vocab_size if path else load_tokenizer("bytes").vocab_size
