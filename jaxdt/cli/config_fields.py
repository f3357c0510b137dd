"""The fields of a run's config as people read about them: meaning, type, default, and what is accepted.

`launch.py --help` and the page docs/reference/config.md are made from this list. Names and defaults come from the
dataclasses. The accepted values of a field come from the table whose entries it names, else from the error message that
the config gives for a value that no field accepts. Needs no jax.
"""

import dataclasses
import json
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from absl import flags

from jaxdt.run import config as configs
from jaxdt.run.errors import BadInput
from jaxdt.run.model import option_classes
from jaxdt.run.model_facts import ModelSpec
from jaxdt.sync.base import SYNCS
from jaxdt.sync.matching.base import MATCHERS
from jaxdt.wiring.base import WIRINGS

TOP = ""  # the section of the fields that stand in none
MEANINGS = {
    "codec": "how tensors travel between stages, where no plan says otherwise",
    "error_feedback": "add a codec's rounding error to the next tensor",
    "dtype": "numbers that stages compute with; parameters are float32",
    "remat": "what a backward reads of its forward: its input alone (least memory), or the products of matrices too",
    "platform": "what every peer has to compute on",
    "plan.stages": "into how many stages the layers are cut",
    "plan.pipelines": "replicas of each stage",
    "plan.layers": 'layers of each stage, such as "3,2,3"; empty: an even split',
    "plan.schedule": "order of forwards and backwards inside a stage",
    "plan.microbatches": "microbatches of a step, over all pipelines",
    "plan.in_flight": 'forwards in flight per stage, such as "4,2"; empty: n_stages - stage',
    "plan.servers": "peers of each stage that hold its parameters and compute nothing (sync.kind server)",
    "plan.workers": "peers of each stage that compute for its servers, and are no members (wiring.kind pool)",
    "data.path": "a token file of prepare_data.py; empty: the committed corpus in bytes",
    "data.seq_len": "tokens of a sample; 0: model.max_len",
    "data.seq_start": "tokens of a sample at the first step; 0: always the full length",
    "data.seq_growth_steps": "steps until a sample has the full length",
    "init.path": "model folder with which the run begins (launch.py --init_from=DIR); empty: fresh parameters",
    "init.digest": "the model in it, set beside the path",
    "train.steps": "updates of the whole run",
    "train.seed": "of the initial parameters and of the order of the samples",
    "train.microbatch_size": "samples of a microbatch",
    "train.eval_every_steps": "steps from one held-out loss to the next; 0: never measured",
    "train.eval_microbatches": "microbatches of one held-out loss",
    "train.checkpoint_every_steps": "steps from one checkpoint to the next; 0: one at the end",
    "train.keep_checkpoints": "how many of the newest checkpoints stay",
    "train.checkpoint_copies": "disks that hold each part of a checkpoint before it counts",
    "train.checkpoint_on_stop": "the first Ctrl-C writes a checkpoint before the run ends",
    "train.on_nonfinite": "what follows when a gradient is not finite",
    "optim.name": "update rule",
    "optim.lr": "learning rate after the warm-up",
    "optim.b1": "decay of the mean of gradients (adamw, lamb)",
    "optim.b2": "decay of the mean of squared gradients (adamw, lamb)",
    "optim.eps": "added to the root of that mean (adamw, lamb)",
    "optim.gradient_frac": "share of an update that is the newest gradient by itself (adamw)",
    "optim.second_moment": "with groups: own (one pipeline's variance), or corrected or legacy (that of all)",
    "optim.weight_decay": "weight decay of matrices, multiplied by the learning rate",
    "optim.momentum": "momentum (sgd)",
    "optim.warmup_steps": "updates over which the learning rate climbs to lr",
    "optim.decay_steps": "update at which the decay ends, the warm-up counted",
    "optim.lr_schedule": "learning rate after the warm-up",
    "optim.final_lr_frac": "share of lr that is left at decay_steps",
    "optim.clip_norm": "largest norm of the whole model's gradient; 0: no clipping",
    "wiring.kind": "which peer computes a microbatch",
    "wiring.routers": "peers that choose routes (swarm)",
    "wiring.window": "microbatches under way at most (swarm); 0: four per peer",
    "wiring.on_stage_lost": "when all peers of a stage are lost: wait for another one, or stop",
    "wiring.stage_grace_s": "seconds before the silent last peer of a stage counts as lost",
    "wiring.retain_bytes": "boundary tensors that a peer keeps for others to recover from",
    "wiring.rebalance_s": "seconds from one move of peers between stages to the next; 0: never",
    "wiring.rebalance_moves": "peers that may change stages each time",
    "wiring.rebalance_rule": "which peers those are: one that its stage can spare, or as SWARM's Algorithm 2 lists it",
    "wiring.join_rule": "which stage a pool's worker joins that the plan does not name",
    "sync.kind": "how the replicas of a stage agree on an update",
    "sync.delay": "1: a step is averaged while the next one computes",
    "sync.delay_after_steps": "first steps that compute without that delay",
    "sync.slice_bytes": "unit of the exchange of gradients",
    "sync.check_every_steps": "steps from one comparison of the replicas' states to the next; 0: never",
    "sync.codec": "how replicas that may differ, and a pool's workers, send what is averaged or pushed",
    "sync.groups.match": "rule by which the replicas that average together are chosen (sync.kind groups)",
    "sync.groups.every_steps": "local steps from one average to the next",
    "sync.groups.window_frac": "part of a step for which a window stays open (window); 0: one in as many as replicas",
    "sync.groups.window_s": "the same in seconds (window); 0: window_frac counts",
    "sync.groups.group_size_max": "members at which a group closes (window); 0: no limit",
    "sync.groups.connectivity_groups": "groups in a row that connect all replicas; 0: any, -1: four for each replica",
    "sync.groups.connectivity_window": "how those groups are counted",
    "sync.groups.outer": "optimizer of the mean change of the replicas; none: they go on from the mean",
    "sync.groups.outer_lr": "its learning rate",
    "sync.groups.outer_momentum": "its momentum",
    "sync.groups.fragments": "parts of a stage's layers that average one after the other (streaming DiLoCo)",
    "sync.groups.lag_steps": "local steps that a replica does between the freeze of its numbers and their mean",
    "sync.groups.mix_frac": "share of a replica's own parameters in those that it has after an average",
    "sync.groups.weights": "how much each member of a group counts: the same, or as its samples",
    "sync.groups.clip": "over what optim.clip_norm takes the norm of a local step: the pipeline, or each stage alone",
    "sync.groups.average_moments": "whether the moments of the replicas' optimizers are averaged too",
    "sync.groups.seed": "of the rule that draws pairs (pairs)",
    "sync.server.staleness": "how far a replica's clock may be ahead of the slowest one's (sync.kind server)",
    "sync.server.wave": "local steps after which a replica's clock grows by 1, and it gets the server's parameters",
    "net.heartbeat_s": "seconds from one sign of life to the next",
    "net.deadline_floor_s": "no deadline is shorter, in seconds",
    "net.outage_s": "seconds that peers wait for a coordinator that is gone",
    "net.copies_gbps": "rate at which a peer fetches copies of checkpoints, in 1e9 bit/s; 0: no limit",
    "model.n_layers": "transformer layers",
    "model.d_model": "width",
    "model.n_heads": "attention heads",
    "model.d_ff": "width inside the feed-forward part of a layer",
    "model.max_len": "most tokens that a sample may have, and positions that are learned; unset: data.seq_len",
    "model.vocab_size": "tokens of the vocabulary; unset: that of the token file",
    "model.options": "what the function gets beside max_len and vocab_size, as JSON",
    "model.n_kv_heads": "heads of keys and values, each for as many heads of queries",
    "model.d_head": "width of an attention head; 0: d_model / n_heads",
    "model.rope_theta": "base of the frequencies of rotary positions",
    "model.rope_scaling": "Llama 3's (factor, low_freq_factor, high_freq_factor, original_len); empty: none",
    "model.norm_eps": "added to the mean square in an RMSNorm",
    "model.qkv_bias": "biases in the projections to queries, keys and values",
    "model.o_bias": "a bias in the projection behind the attention",
    "model.qk_norm": "each head of queries and keys is normalised",
    "model.window": "tokens that a token sees, itself included; 0: all before it",
    "model.n_experts": "experts of a layer",
    "model.n_experts_per_token": "experts that compute a token",
    "model.norm_topk": "the weights of a token's experts add up to 1",
    "model.router_aux_coef": "weight of the loss that spreads tokens over the experts",
    "model.positions": "how positions enter",
    "model.activation": "nonlinearity of the feed-forward part",
    "model.tied_head": "the head uses the table of the embedding",
    "model.n_shared_blocks": "blocks that the layers share, as in ALBERT; 0: each layer has its own",
    "model.compression": "a pair of layers that narrows a boundary",
    "model.compression_after": "layers behind which such a pair stands",
}
# Fields that name an entry of a table.
TABLES = {"wiring.kind": WIRINGS, "sync.kind": SYNCS, "sync.groups.match": MATCHERS}
NO_VALUE = {str: "?", int: -1, float: -1.0}  # values that no restricted field accepts
# A size of the config that was tried.
SIZE = re.compile(r"((?:model\.|data\.)?(?:n_layers|d_model|max_len|seq_len)) \d+")


WIDTH = 120
FLAG_COLUMNS, FIELD_COLUMNS = 24, 44  # of a flag, or of a field as a flag; its text begins behind them
FIELDS = """The fields of the config, as flags with their defaults

The defaults of the model are those of its preset, --config.model.preset, and of its family, --config.model.family (by
default the one that has the preset). A config file may set any of them, and a flag has the last word; --print_config
shows what comes of it. More words on each field: docs/reference/config.md"""


@dataclass(frozen=True)
class ConfigField:
    """One field. `name`: such as train.steps. `default`: as JSON, None where the model preset has it. `accepts`: the
    config's own words, "" where nothing but the type is checked."""

    name: str
    type_name: str
    default: str | None
    accepts: str
    meaning: str


def sections() -> dict[str, type]:
    """The dataclass of each section by its dotted name, in order: the top level first, the model last, once for each
    family, whose name stands behind it in parentheses."""
    models = {f"model ({family})": options for family, options in option_classes().items()}
    return dict(_sections(configs.RunConfig, TOP)) | models


def prefix_of(section: str) -> str:
    """What stands before the dot in the names of a section's fields."""
    return section.partition(" ")[0]


def _sections(kind: type, name: str) -> Iterator[tuple[str, type]]:
    yield name, kind
    for field, field_kind in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(field_kind) and isinstance(field_kind, type):
            yield from _sections(field_kind, f"{name}.{field}" if name else field)


def fields_of(kind: type, section: str) -> list[ConfigField]:
    """The fields of a section that are no sections themselves."""
    kinds = typing.get_type_hints(kind)
    found: list[ConfigField] = []
    for field in dataclasses.fields(kind):
        is_section = dataclasses.is_dataclass(kinds[field.name]) or kinds[field.name] is ModelSpec
        if is_section or (issubclass(kind, ModelSpec) and field.name not in kind.field_names()):
            continue
        name = f"{prefix_of(section)}.{field.name}" if section else field.name
        found.append(
            ConfigField(
                name=name,
                type_name=_type_name(kinds[field.name]),
                default=_default(field),
                accepts=_accepts(kind, section, field.name, kinds),
                meaning=MEANINGS.get(name, ""),
            )
        )
    return found


def _type_name(kind: typing.Any) -> str:
    """The name of a type as people write it: int, or tuple[int, ...]."""
    return kind.__name__ if isinstance(kind, type) and not typing.get_origin(kind) else str(kind)


def _default(field: dataclasses.Field[typing.Any]) -> str | None:
    if field.default is not dataclasses.MISSING:
        return json.dumps(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return json.dumps(field.default_factory())
    return None


def _accepts(kind: type, section: str, name: str, kinds: dict[str, typing.Any]) -> str:
    """The values that the config accepts for a field, as text; '' where only the type is checked."""
    if f"{section}.{name}" in TABLES:
        return f"one of {', '.join(TABLES[f'{section}.{name}'])}"
    value = NO_VALUE.get(kinds[name])
    if value is None or section not in sections():
        return ""
    data: dict[str, typing.Any] = {"model": {"preset": "debug"}}
    if issubclass(kind, ModelSpec):
        if kind.has_own_sources:
            return ""
        data["model"]["family"] = kind.family
    inner = data
    for part in prefix_of(section).split(".") if section else ():
        inner = inner.setdefault(part, {})
    inner[name] = value
    try:
        configs.parse(data)
    except BadInput as error:
        return SIZE.sub(r"\1", str(error).partition("expected ")[2])
    return ""


# ------------------------------------------------------------------------------------------------------------ --help


def help_text(about: str, subjects: Mapping[str, Sequence[str]]) -> str:
    """The help of a script: what it is `about`, the flags of each subject, and the fields of the config."""
    parts = [about.strip()]
    for subject, names in subjects.items():
        parts.append("\n".join([subject, *(_flag_entry(flags.FLAGS[name]) for name in names)]))
    parts.append(FIELDS)
    for section, kind in sections().items():
        entries = [_field_entry(field) for field in fields_of(kind, section)]
        parts.append("\n".join([section or "top level", *entries]))
    return "\n\n".join(parts)


def _flag_entry(flag: flags.Flag) -> str:
    if flag.name == "config":
        usage = "--config=FILE"
    elif flag.boolean:
        usage = f"--{flag.name}" if not flag.default else f"--{flag.name}=true"
    else:
        usage = f"--{flag.name}={'...' if flag.default in (None, '', []) else flag.default}"
    return _entry(usage, flag.help, FLAG_COLUMNS)


def _field_entry(field: ConfigField) -> str:
    value = "..." if field.default is None else field.default.strip('"')
    meaning = field.meaning or field.type_name
    text = f"{meaning} ({field.accepts})" if field.accepts else meaning
    return _entry(f"--config.{field.name}={value}", text, FIELD_COLUMNS)


def _entry(usage: str, text: str, columns: int) -> str:
    """The usage, and the text beside it, or below it where the usage is long."""
    usage = f"  {usage}"
    lines = textwrap.wrap(" ".join(text.split()), WIDTH - columns)
    if len(usage) < columns - 1:
        usage = f"{usage:{columns}}{lines.pop(0)}"
    return "\n".join([usage, *(" " * columns + line for line in lines)])
