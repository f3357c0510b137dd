"""Sizes that follow from config and plan: bytes of a boundary tensor, numbers of a sync group."""

from dataclasses import dataclass

from jaxdt.run import codec
from jaxdt.run.config import RunConfig
from jaxdt.run.plan import Plan

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
TIED = "tied"


@dataclass(frozen=True)
class Group:
    """Parameters that sync together: the group's name, the stages whose peers hold it, and how many numbers it has."""

    name: str
    stages: tuple[int, ...]
    n_elements: int


def group_name(stage: int) -> str:
    """The group of the parameters of a stage, but for a token table that another stage holds too."""
    return f"stage{stage}"


def fragment_name(stage: int, fragment: int, n_fragments: int) -> str:
    """The group of a fragment of the parameters of a stage; if there is only one, that of the parameters."""
    return group_name(stage) if n_fragments == 1 else f"{group_name(stage)}/fragment{fragment}"


def fragment_of_name(group: str) -> int:
    """Which fragment a group of `fragment_name` is."""
    return int(group.partition("/fragment")[2] or 0)


def exchanged_elements(config: RunConfig, lo: int, hi: int, fragment: int) -> int:
    """Numbers that a replica of layers lo..hi-1 exchanges in a group: of its parameters, and of its moments if these
    are averaged too."""
    groups = config.sync.groups
    n_trees = 1 + (config.optim.n_moments if groups.average_moments else 0)
    return n_trees * config.model.fragment_params(lo, hi, fragment, groups.fragments)


def push_name(stage: int, worker: int) -> str:
    """The group of what a worker has changed of the parameters of a stage, on the way to their server."""
    return f"{group_name(stage)}/push{worker}"


def pull_name(stage: int, worker: int) -> str:
    """The group of the parameters of a stage on the way from their server to a worker."""
    return f"{group_name(stage)}/pull{worker}"


def contribution_name(group: str, worker: int) -> str:
    """The group of a worker's gradient of `group`, on the way to its server."""
    return f"{group}/contribution{worker}"


def is_contribution(group: str) -> bool:
    return "/contribution" in group


def mean_name(stage: int) -> str:
    """The name of the group of a stage's mean parameters, which are kept aside for a held-out loss."""
    return f"{group_name(stage)}/mean"


def is_mean(group: str) -> bool:
    return group.endswith("/mean")


def kept_name(stage: int) -> str:
    """The group of a server's parameters that are kept aside for a checkpoint."""
    return f"{group_name(stage)}/kept"


def is_kept(group: str) -> bool:
    return group.endswith("/kept")


def at_stage(group: str, stage: int) -> str:
    """The group of `mean_name` or `kept_name` that is the same at this stage."""
    return f"{group_name(stage)}/{group.partition('/')[2]}"


def is_push(group: str) -> bool:
    return "/push" in group


def is_pull(group: str) -> bool:
    return "/pull" in group


def parameters_of(group: str) -> str:
    """The group whose parameters, or changes of them, a round of `group` carries."""
    return group.partition("/")[0]


def state_name(stage: int) -> str:
    """The group of the whole state of a stage, parameters and moments, where replicas may differ."""
    return f"state{stage}"


def boundary_bytes(config: RunConfig, plan: Plan, boundary: int, pipeline: int, forward: bool) -> int:
    """Payload of a tensor of a pipeline that crosses a boundary (between the stages `boundary` and boundary + 1) as an
    activation (forward) or as its gradient: [microbatch_size, seq_len, boundary width], encoded as the plan says.
    Steps of shorter samples send less."""
    spec = codec.parse(plan.codec_of(boundary, pipeline, forward), f"plan.codec[{boundary}]")
    _, layer = plan.stages[boundary]
    n_numbers = config.model.boundary_numbers(config.train.microbatch_size, layer)
    return codec.wire_bytes(spec, n_numbers, DTYPE_BYTES[config.dtype])


def sync_groups(config: RunConfig, plan: Plan) -> tuple[Group, ...]:
    """One group per stage; a tied head over several stages adds one for the token table on the first and the last."""
    model = config.model
    tied = model.tied_head and plan.n_stages > 1
    groups: list[Group] = []
    for stage, (lo, hi) in enumerate(plan.stages):
        shared = model.token_table_params if tied and (lo == 0 or hi == model.n_layers) else 0
        groups.append(Group(group_name(stage), (stage,), model.stage_params(lo, hi) - shared))
    if tied:
        groups.append(Group(TIED, (0, plan.n_stages - 1), model.token_table_params))
    return tuple(groups)
