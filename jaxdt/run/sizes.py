"""Sizes that follow from config and plan: bytes of a boundary tensor, numbers of a sync group."""

from dataclasses import dataclass

from jaxdt.run.codec import EXACT, CodecSpec, parse, wire_bytes
from jaxdt.run.config import RunConfig
from jaxdt.run.plan import Plan

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
SHARED_TABLE = -1  # in the place of a stage


@dataclass(frozen=True)
class Group:
    """Trained parameters that sync together: those of a stage but for a token table that another stage holds too, or
    this table (`stage` SHARED_TABLE). `stages`: those whose peers hold them. `codec`: how their numbers travel."""

    stage: int
    stages: tuple[int, ...]
    n_elements: int
    codec: CodecSpec = EXACT


def replica_elements(config: RunConfig, lo: int, hi: int) -> int:
    """Numbers of the trained parameters of a replica of layers lo..hi-1, where replicas may differ: a table that two
    stages share belongs to the first (jaxdt.sync.shared_table)."""
    return config.model.facts.owned_trained(lo, hi)


def replica_moments(config: RunConfig, lo: int, hi: int) -> int:
    """Numbers of the optimizer's moments of these parameters."""
    return config.model.facts.moment_numbers(lo, hi, config.optim.moments, owned=True)


def shared_table_elements(config: RunConfig, plan: Plan) -> int:
    """Numbers of the token table that the first and the last stage share; 0 if they share none."""
    return config.model.facts.shared_trained(*plan.stages[0])


def moving_table_bytes(config: RunConfig, lo: int, hi: int) -> int:
    """Bytes that a replica of layers lo..hi-1 holds of a shared table, or of its gradient, on the way between the first
    and the last stage: the vector, and its slices."""
    return 2 * DTYPE_BYTES["float32"] * config.model.facts.shared_trained(lo, hi)


def exchanged_elements(config: RunConfig, lo: int, hi: int, fragment: int) -> int:
    """Numbers that a replica of layers lo..hi-1 exchanges in a group: of its parameters, and of its moments if these
    are averaged too."""
    groups = config.sync.groups
    entries = config.model.facts.fragments(lo, hi, groups.fragments)[fragment]
    n_moments = sum(entry.moment_numbers(config.optim.moments) for entry in entries) if groups.average_moments else 0
    return sum(entry.n_trained for entry in entries) + n_moments


def boundary_bytes(config: RunConfig, plan: Plan, boundary: int, pipeline: int, forward: bool) -> int:
    """Payload of a tensor of a pipeline that crosses a boundary (between the stages `boundary` and boundary + 1) as an
    activation (forward) or as its gradient: [microbatch_size, seq_len, boundary width], encoded as the plan says.
    Steps of shorter samples send less."""
    spec = parse(plan.codec_of(boundary, pipeline, forward), f"plan.codec[{boundary}]")
    _, layer = plan.stages[boundary]
    n_numbers = config.model.facts.boundary_numbers(config.microbatch_shape.n_tokens, layer)
    return wire_bytes(spec, n_numbers, DTYPE_BYTES[config.dtype])


def boundary_bytes_of_pipelines(config: RunConfig, plan: Plan, boundary: int, forward: bool) -> list[int]:
    """The same for each pipeline. A plan has many of them, and few codecs."""
    found: dict[str, int] = {}
    codecs = [plan.codec_of(boundary, pipeline, forward) for pipeline in range(plan.n_pipelines)]
    for pipeline, codec in enumerate(codecs):
        if codec not in found:
            found[codec] = boundary_bytes(config, plan, boundary, pipeline, forward)
    return [found[codec] for codec in codecs]


def sync_groups(config: RunConfig, plan: Plan) -> tuple[Group, ...]:
    """One group per stage; a table that the first and the last stage share adds one."""
    facts, table = config.model.facts, shared_table_elements(config, plan)
    spec = config.sync.codec_spec
    groups: list[Group] = []
    for stage, (lo, hi) in enumerate(plan.stages):
        n_elements = facts.stage_trained(lo, hi) - facts.shared_trained(lo, hi)
        groups.append(Group(stage, (stage,), n_elements, spec))
    if table:
        of_stages = tuple(stage for stage, (lo, hi) in enumerate(plan.stages) if facts.shared(lo, hi))
        groups.append(Group(SHARED_TABLE, of_stages, table, spec))
    return tuple(groups)
