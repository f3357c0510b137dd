"""One run's configuration: frozen dataclasses, read from plain data and checked field by field.

An error names the field, its value and what was expected. Config files (configs/*.py) and --config.* flags fill the
same names. Which kinds of wiring and sync exist, and which options make sense with each, is checked in jaxdt.build.
"""

import functools
import hashlib
import itertools
import json
import runpy
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxdt.run import codec as codecs
from jaxdt.run import serialize
from jaxdt.run.codec import CodecSpec
from jaxdt.run.delay import Delay
from jaxdt.run.errors import BadInput, nearest, require_at_least, unreadable
from jaxdt.run.model import options_of, renamed
from jaxdt.run.model_facts import MicrobatchShape
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.optim import OptimConfig
from jaxdt.run.options import (
    BELOW_ONE,
    GBPS_OR_NONE,
    MICROBATCHES_MAX,
    NOT_NEGATIVE_OR_ENDLESS,
    PEERS_MAX,
    POSITIVE,
    SAMPLES_MAX,
    SECONDS,
    SECONDS_MAX,
    SECONDS_OR_ENDLESS,
    SEED_MAX,
    at_least,
    in_context,
    in_range,
    one_of,
    option,
    require_accepted,
    seconds_from,
)
from jaxdt.run.plan import SCHEDULES, Plan, PlanRoles, even_shares, ranges
from jaxdt.run.seq_lengths import SeqLengths

DTYPES = ("float32", "bfloat16")
REMATS = ("recompute", "dots")
ON_NONFINITE = ("stop", "skip", "rollback")
ON_STAGE_LOST = ("wait", "stop")
JOIN_RULES = ("balanced", "bandwidth")
REBALANCE_RULES = ("bottleneck", "algorithm2")
OUTERS = ("none", "sgd", "nesterov")
EQUAL, SAMPLES = WEIGHTS = ("equal", "samples")
PIPELINE, STAGE = CLIPS = ("pipeline", "stage")
JOIN, MASK = BORDERS = ("join", "mask")
CONNECTIVITY_WINDOWS = ("sliding", "tumbling")
PLATFORMS = ("any", "cpu", "gpu", "tpu")
HEARTBEAT_S_MIN = 0.001  # with less a process has time for nothing else
BOTH_OR_NEITHER = in_context("both or neither; launch.py --init_from=DIR sets both")
# Fields that the config has no more -> the value with which an old one is read all the same, and the way now.
REMOVED: dict[str, tuple[Any, str]] = {
    "wiring.replan": ("off", "`python -m planner replan --run_dir=DIR` plans for the members of a run"),
    "net.queue_bytes": (64 << 20, "no new Work starts while more than 64 MiB wait to be sent to one peer"),
}


@dataclass(frozen=True)
class PlanConfig:
    """How to cut and place the model when no plan.json is given."""

    stages: int = option(1, "into how many stages the layers are cut", in_range(1, PEERS_MAX))
    pipelines: int = option(1, "replicas of each stage", in_range(1, PEERS_MAX))
    layers: str = option("", 'layers of each stage, such as "3,2,3"; empty: an even split')
    schedule: str = option("1f1b", "order of forwards and backwards inside a stage", one_of(SCHEDULES))
    microbatches: int = option(1, "microbatches of a step, over all pipelines", in_range(1, MICROBATCHES_MAX))
    in_flight: str = option("", 'forwards in flight per stage, such as "4,2"; empty: n_stages - stage')
    servers: int = option(
        0, "peers of each stage that hold its parameters and compute nothing (sync.kind server)", in_range(0, PEERS_MAX)
    )
    workers: int = option(
        0,
        "peers of each stage that compute for its servers, and are no members (wiring.kind pool)",
        in_range(0, PEERS_MAX),
    )


@dataclass(frozen=True)
class DataConfig:
    """What a run trains on. Samples may grow over its first steps (jaxdt.run.seq_lengths).

    `borders`: a sample may hold the end of a document and others behind it. With "join" a token sees all before it in
    its sample, the end of text included. With "mask" it sees its own document only, learned positions count from where
    that begins, and no document's first token is foreseen from another document: as if each stood alone."""

    path: str = option(
        "", "a token file of prepare_data.py, or a .json that mixes several; empty: the committed corpus in bytes"
    )
    seq_len: int = option(0, "tokens of a sample; 0: model.max_len", in_context("0 (model.max_len) to model.max_len"))
    seq_start: int = option(
        0,
        "tokens of a sample at the first step; 0: always the full length",
        in_context("0 (no growth) to data.seq_len"),
    )
    seq_growth_steps: int = option(0, "steps until a sample has the full length", in_context("0 with data.seq_start 0"))
    borders: str = option(JOIN, "whether the tokens of a sample see other documents in it", one_of(BORDERS))


@dataclass(frozen=True)
class InitConfig:
    """Which parameters a run begins with. Fresh ones are drawn from train.seed."""

    path: str = option(
        "",
        "model folder with which the run begins (launch.py --init_from=DIR); empty: fresh parameters",
        BOTH_OR_NEITHER,
    )
    digest: str = option("", "the model in it, set beside the path", BOTH_OR_NEITHER)


@dataclass(frozen=True)
class TrainConfig:
    """Steps, held-out losses and checkpoints.

    - The held-out loss is also that of the parameters after the last step.
    - A checkpoint is complete when each stage's part is on `checkpoint_copies` disks, or on all that the run has: peers
      without a common disk send the parts to one another.
    - Without `checkpoint_on_stop` the first Ctrl-C at the launcher or the coordinator ends the run at once, as a second
      one does.
    - `on_nonfinite`: stop the run, skip the update, or roll back to the last complete checkpoint and draw other samples
      from there on."""

    steps: int = option(100, "updates of the whole run", at_least(1))
    seed: int = option(0, "of the initial parameters and of the order of the samples", in_range(0, SEED_MAX))
    microbatch_size: int = option(1, "samples of a microbatch", in_range(1, SAMPLES_MAX))
    eval_every_steps: int = option(0, "steps from one held-out loss to the next; 0: never measured", at_least(0))
    eval_microbatches: int = option(4, "microbatches of one held-out loss", in_range(1, MICROBATCHES_MAX))
    checkpoint_every_steps: int = option(0, "steps from one checkpoint to the next; 0: one at the end", at_least(0))
    keep_checkpoints: int = option(2, "how many of the newest checkpoints stay", at_least(1))
    checkpoint_copies: int = option(2, "disks that hold each part of a checkpoint before it counts", at_least(1))
    checkpoint_on_stop: bool = option(True, "the first Ctrl-C writes a checkpoint before the run ends")
    on_nonfinite: str = option("stop", "what follows when a gradient is not finite", one_of(ON_NONFINITE))


def is_evaluated(version: int, every_steps: int, n_steps: int) -> bool:
    """Whether the held-out loss of the parameters after `version` of the run's steps is measured."""
    return every_steps > 0 and 0 < version <= n_steps and (version % every_steps == 0 or version == n_steps)


@dataclass(frozen=True)
class WiringConfig:
    """Which peer computes a microbatch. `kind` is one of these:

    - `fixed`: each pipeline of the plan computes its share. A pipeline that has lost a peer borrows replicas of the
      other pipelines until another peer takes the open place. Where replicas may differ (`sync.kind` groups or server)
      each pipeline trains by itself, and leaves when it loses a peer (docs/replicas.md).
    - `swarm`: `routers` peers choose a route for each microbatch, with at most `window` microbatches under way in all
      (0: four per peer). A router takes as many microbatches at a time as a stage has peers, so in a step of few
      microbatches fewer peers route.
    - `pool`: the peers of a stage are servers. Each owns a share of the microbatches, computes, and has workers compute
      for it, which are no members and may vanish at any moment (docs/pool.md).

    `retain_bytes`: boundary tensors of a step that a peer keeps in case another peer needs them again; tensors beyond
    that are computed again. 0 keeps none: that takes the least memory, and after a loss in mid-step the lost
    microbatches are computed again from their tokens on.
    `join_rule`: which stage a pool's worker joins that the plan does not name. "balanced": that of the server with the
    fewest workers. "bandwidth": the one to whose servers its links are fastest in the mean, as it measures them when it
    comes (hybrid parameter servers).
    `on_stage_lost`: what a run does when all peers of a stage are lost: wait for another and go back to the last
    complete checkpoint, or stop. A peer is lost when its process has ended (its host refuses the connection, or it was
    started again), or when a stage without any other peer has waited for it for `stage_grace_s`. Until then the run
    stands still and nothing is lost; afterwards the steps since the last complete checkpoint are.
    `rebalance_s`: how often a stage that can do without a peer may give one to the stage with most work waiting (0:
    never). A period of several steps is best, since queues are averaged over whole steps. `rebalance_moves`: how many
    peers may change stages each time. `rebalance_rule`: which one. "bottleneck": only a peer that its stage can spare,
    to a stage whose load is greater by some Work. "algorithm2": as SWARM's listing, each time, from the stage with the
    least load to that with the greatest, whatever the difference."""

    kind: str = option("fixed", "which peer computes a microbatch")
    routers: int = option(1, "peers that choose routes (swarm)", at_least(1))
    window: int = option(0, "microbatches under way at most (swarm); 0: four per peer", at_least(0))
    on_stage_lost: str = option(
        "wait", "when all peers of a stage are lost: wait for another one, or stop", one_of(ON_STAGE_LOST)
    )
    stage_grace_s: float = option(300.0, "seconds before the silent last peer of a stage counts as lost", SECONDS)
    retain_bytes: int = option(1 << 30, "boundary tensors that a peer keeps for others to recover from", at_least(0))
    rebalance_s: float = option(0.0, "seconds from one move of peers between stages to the next; 0: never", SECONDS)
    rebalance_moves: int = option(1, "peers that may change stages each time", at_least(1))
    rebalance_rule: str = option(
        "bottleneck",
        "which peers those are: one that its stage can spare, or as SWARM's Algorithm 2 lists it",
        one_of(REBALANCE_RULES),
    )
    join_rule: str = option(
        "balanced", "which stage a pool's worker joins that the plan does not name", one_of(JOIN_RULES)
    )


@dataclass(frozen=True)
class GroupsConfig:
    """How replicas that may differ average, with sync.kind "groups". `every_steps`: local steps between two averages.
    `match` is the rule by which groups form, one of these:

    - `all`: all replicas of a stage average together.
    - `pairs`: the number of the step and `seed` say who averages with whom.
    - `window`: those average together that are ready within one window (SDPipe). It stays open for `window_frac` of a
      measured step (0: one part in as many as there are replicas), or for `window_s` if that is not 0. A group closes
      at `group_size_max` members (0: no limit). Any `connectivity_groups` groups of a stage in a row connect all its
      replicas (0: not enforced; -1: four for each replica), counted by a `connectivity_window` that is sliding or
      tumbling.
    - `none`: no replica averages.

    `outer`: what is done with the mean. With "none" the replicas go on from it; with "sgd" and "nesterov" the mean of
    their changes since the last average is the gradient of an outer optimizer, with `outer_lr` and `outer_momentum`.
    `weights`: each member of a group counts the same, or as the samples of its local steps do; then a group does not
    preserve the mean of all replicas. `clip`: by which norm optim.clip_norm clips a local step's gradient: that over
    the pipeline, which its stages tell one another, or each stage by its own. `average_moments`: the moments of the
    replicas' optimizers are averaged as their parameters are; else each keeps its own.

    Streaming DiLoCo (Douillard et al. 2025, Alg. 2): the layers of a stage fall into `fragments`, each of which
    averages every `every_steps` local steps, at offsets of its own. Its numbers are frozen, the replica continues,
    and the mean is applied after `lag_steps` further local steps. The parameters then become `mix_frac` times the
    replica's own plus 1 - `mix_frac` times the outcome of the average (the paper's alpha: 0 drops the local steps
    since the freeze, as an average without a lag does)."""

    match: str = option("all", "rule by which the replicas that average together are chosen (sync.kind groups)")
    every_steps: int = option(1, "local steps from one average to the next", at_least(1))
    window_frac: float = option(
        0.0,
        "part of a step for which a window stays open (window); 0: one in as many as replicas",
        NOT_NEGATIVE_OR_ENDLESS,
    )
    window_s: float = option(0.0, "the same in seconds (window); 0: window_frac counts", SECONDS_OR_ENDLESS)
    group_size_max: int = option(0, "members at which a group closes (window); 0: no limit", at_least(0))
    connectivity_groups: int = option(
        -1, "groups in a row that connect all replicas; 0: any, -1: four for each replica", at_least(-1)
    )
    connectivity_window: str = option("sliding", "how those groups are counted", one_of(CONNECTIVITY_WINDOWS))
    seed: int = option(0, "of the rule that draws pairs (pairs)")
    outer: str = option(
        "none", "optimizer of the mean change of the replicas; none: they go on from the mean", one_of(OUTERS)
    )
    outer_lr: float = option(0.7, "its learning rate", POSITIVE)
    outer_momentum: float = option(0.9, "its momentum", BELOW_ONE)
    fragments: int = option(
        1, "parts of a stage's layers that average one after the other (streaming DiLoCo)", at_least(1)
    )
    lag_steps: int = option(
        0, "local steps that a replica does between the freeze of its numbers and their mean", at_least(0)
    )
    mix_frac: float = option(
        0.0, "share of a replica's own parameters in those that it has after an average", BELOW_ONE
    )
    weights: str = option(EQUAL, "how much each member of a group counts: the same, or as its samples", one_of(WEIGHTS))
    clip: str = option(
        PIPELINE,
        "over what optim.clip_norm takes the norm of a local step: the pipeline, or each stage alone",
        one_of(CLIPS),
    )
    average_moments: bool = option(False, "whether the moments of the replicas' optimizers are averaged too")

    def weight(self, n_microbatches: int) -> int:
        """How much a replica with such a share of a step's microbatches counts in a group."""
        return n_microbatches if self.weights == SAMPLES else 1

    @property
    def feeds_back(self) -> bool:
        """Whether what a codec loses of an average is made up for in the next one. A moment must not become negative;
        and a replica that keeps a share of its own parameters has not lost all that the average has."""
        return not self.average_moments and (self.outer != "none" or not self.mix_frac)

    def fragment_due(self, n_steps: int) -> int | None:
        """The fragment that averages after so many local steps, if one does. All are due in the course of
        `every_steps`, at least `every_steps // fragments` steps apart."""
        offsets = [fragment * self.every_steps // self.fragments for fragment in range(self.fragments)]
        place = n_steps % self.every_steps
        return offsets.index(place) if place in offsets else None


@dataclass(frozen=True)
class ServerConfig:
    """How replicas push to servers, with sync.kind "server" (HetPipe). After every `wave` local steps the clock of a
    replica grows by 1, and it waits for its stage's server until its clock is at most `staleness` ahead of the slowest
    replica's. Then it continues from the server's parameters."""

    staleness: int = option(
        0, "how far a replica's clock may be ahead of the slowest one's (sync.kind server)", at_least(0)
    )
    wave: int = option(
        1, "local steps after which a replica's clock grows by 1, and it gets the server's parameters", at_least(1)
    )


@dataclass(frozen=True)
class SyncConfig:
    """How the replicas of a stage agree. `kind` is one of these:

    - `allreduce`: each step is averaged over all replicas before anyone applies it, so they stay equal.
    - `groups`: replicas do local steps and average in groups (`sync.groups`), so they may differ.
    - `server`: replicas do local steps and push them to servers of their stage (`sync.server`), so they may differ.

    With `delay` 1 a step is averaged and applied while the next one computes, with parameters that lag by one update.
    The first `delay_after_steps` steps compute without delay. `slice_bytes`: the exchange of gradients is divided into
    slices of so many bytes, each of which one replica adds up.
    `check_every_steps`: how often the replicas of a stage compare checksums of their parameters and optimizer state (0:
    never), from the initial ones on.
    `codec`: how replicas send one another gradients, what a group averages, or what they push to a server, and how a
    pool's workers send their gradients. With bf16 and int8 each contribution is rounded once, they are added in fp32,
    and the sum is rounded once; all members go on from the same bits. What one exchange loses is made up for in the
    next one (error feedback), but for averages of moments, and with `mix_frac` and no outer optimizer: int8 is refused
    there. A server's parameters, and means for held-out losses, checkpoints and the result of the run, stay in fp32."""

    kind: str = option("allreduce", "how the replicas of a stage agree on an update")
    delay: int = option(0, "1: a step is averaged while the next one computes", one_of((0, 1)))
    delay_after_steps: int = option(0, "first steps that compute without that delay", at_least(0))
    slice_bytes: int = option(1 << 22, "unit of the exchange of gradients", at_least(4))
    check_every_steps: int = option(
        50, "steps from one comparison of the replicas' states to the next; 0: never", at_least(0)
    )
    codec: str = option(
        codecs.NONE,
        "how replicas and a pool's workers send what is averaged or pushed",
        one_of(codecs.EXCHANGED),
    )
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    @property
    def codec_spec(self) -> CodecSpec:
        return codecs.parse(self.codec, "sync.codec")


@dataclass(frozen=True)
class NetConfig:
    """When a peer counts as lost. A deadline is the median of the durations observed so far plus their spread, and
    never below `deadline_floor_s`. `outage_s`: how long peers wait for a coordinator that is gone, by default a
    night: to wait costs idle machines, to end costs the state in their memory. Before a peer ends it writes that state
    as a part of a checkpoint. `copies_gbps`: how fast a peer fetches copies of other peers' parts of checkpoints, in
    1e9 bit/s (0: as fast as the links allow); parts and states that a step waits for have no limit."""

    heartbeat_s: float = option(0.5, "seconds from one sign of life to the next", seconds_from(HEARTBEAT_S_MIN))
    deadline_floor_s: float = option(
        4.0, "no deadline is shorter, in seconds", in_context(f"at least two heartbeats, and at most {SECONDS_MAX:g}")
    )
    outage_s: float = option(
        8 * 3600.0, "seconds that peers wait for a coordinator that is gone", seconds_from(0.001, or_endless=True)
    )
    copies_gbps: float = option(
        0.0, "rate at which a peer fetches copies of checkpoints, in 1e9 bit/s; 0: no limit", GBPS_OR_NONE
    )


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run's result depends on; `fingerprint` of it is compared between peers.

    `codec`: how boundary tensors travel where no plan.json says otherwise (names: jaxdt.run.codec). In a config file
    it may also name compression layers, as in maxout2 or maxout2+int8: `parse` moves those into the model.
    `error_feedback`: the rounding error of a codec is added to the next tensor that crosses the same boundary.
    `platform`: what the peers of the run compute on; a peer that would compute on another platform is refused."""

    model: ModelSpec
    plan: PlanConfig = field(default_factory=PlanConfig)
    data: DataConfig = field(default_factory=DataConfig)
    init: InitConfig = field(default_factory=InitConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    wiring: WiringConfig = field(default_factory=WiringConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    net: NetConfig = field(default_factory=NetConfig)
    codec: str = option(
        "none", "how tensors travel between stages, where no plan says otherwise", in_context(codecs.ACCEPTED)
    )
    error_feedback: bool = option(False, "add a codec's rounding error to the next tensor")
    dtype: str = option("float32", "numbers that stages compute with; parameters are float32", one_of(DTYPES))
    remat: str = option(
        "recompute",
        "what a backward reads of its forward: its input alone (least memory), or the products of matrices too",
        one_of(REMATS),
    )
    platform: str = option("any", "what every peer has to compute on", one_of(PLATFORMS))

    def __post_init__(self) -> None:
        self._check_lengths()
        for section in ("plan", "train", "wiring", "sync", "sync.groups", "sync.server", "net"):
            require_accepted(functools.reduce(getattr, section.split("."), self), f"{section}.")
        require_accepted(self, "")
        require_at_least("plan.microbatches", self.plan.microbatches, self.plan.pipelines)
        if bool(self.init.path) != bool(self.init.digest):
            raise BadInput(
                f"init.digest: got {self.init.digest!r} with init.path {self.init.path!r}, expected "
                f"{BOTH_OR_NEITHER.text}"
            )
        codecs.parse(self.codec)
        self._check_fragments()
        floor_s, heartbeat_s = self.net.deadline_floor_s, self.net.heartbeat_s
        if not 2 * heartbeat_s <= floor_s <= SECONDS_MAX:
            raise BadInput(
                f"net.deadline_floor_s: got {floor_s}, expected at least two heartbeats, {2 * heartbeat_s}, and at "
                f"most {SECONDS_MAX:g}"
            )

    def _check_lengths(self) -> None:
        start, n_steps, most = self.data.seq_start, self.data.seq_growth_steps, self.model.max_len
        if not 0 <= self.data.seq_len <= most:
            raise BadInput(f"data.seq_len: got {self.data.seq_len}, expected 0 (model.max_len) to model.max_len {most}")
        full = self.seq_len
        if not 0 <= start <= full:
            raise BadInput(f"data.seq_start: got {start}, expected 0 (no growth) to data.seq_len {full}")
        if n_steps < 0 or (n_steps > 0) != (start > 0):
            wanted = "an integer >= 1" if start else "0"
            raise BadInput(f"data.seq_growth_steps: got {n_steps}, expected {wanted} with data.seq_start {start}")

    def _check_fragments(self) -> None:
        groups = self.sync.groups
        if groups.fragments > groups.every_steps:
            raise BadInput(
                f"sync.groups.fragments: got {groups.fragments}, expected at most sync.groups.every_steps "
                f"{groups.every_steps}, since one fragment averages at a time"
            )
        distance = groups.every_steps // groups.fragments
        if groups.lag_steps >= distance:
            raise BadInput(
                f"sync.groups.lag_steps: got {groups.lag_steps}, expected less than {distance}, the local steps from "
                "one fragment's average to the next (sync.groups.every_steps / sync.groups.fragments)"
            )

    @property
    def seq_len(self) -> int:
        """Tokens of a sample of full length."""
        return self.data.seq_len or self.model.max_len

    @property
    def microbatch_shape(self) -> MicrobatchShape:
        """The shape of a microbatch of samples of full length."""
        return MicrobatchShape(self.train.microbatch_size, self.seq_len)

    @property
    def seq_lengths(self) -> SeqLengths:
        """Tokens per sample, step by step."""
        return SeqLengths(self.seq_len, self.data.seq_start, self.data.seq_growth_steps)

    @property
    def delay(self) -> Delay:
        """Which version a step computes with."""
        return Delay(self.sync.delay, self.sync.delay_after_steps)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that agree between peers iff their configs do."""
        return hashlib.sha256(json.dumps(serialize.write(self), sort_keys=True).encode()).hexdigest()[:16]


def returned_by(path: str | Path) -> Any:
    """What get_config() of a configs/*.py file returns. BadInput if the file cannot be read or fails."""
    try:
        Path(path).open().close()  # runpy takes a folder for a package
        get_config = runpy.run_path(str(path)).get("get_config")
        if get_config is None:
            raise BadInput(f"{path}: has no function get_config(), expected one that returns a ConfigDict")
        return get_config()
    except BadInput:
        raise
    except OSError as error:
        raise unreadable(path, error) from None
    except SyntaxError as error:
        raise BadInput(f"{error.filename or path}:{error.lineno or 1}: {type(error).__name__}: {error.msg}") from None
    except Exception as error:  # a config file is a program, which may raise anything
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise BadInput(f"{at.filename}:{at.lineno}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def parse(data: Mapping[str, Any], vocab_size: int | None = None) -> RunConfig:
    """A RunConfig from plain data. `model` is a preset of a family, and the fields that differ. The vocabulary defaults
    to `vocab_size`, the token file's, and must not be smaller. Compression layers that `codec` names stand behind the
    stages of the default plan, unless model.compression_after says where."""
    fields = of_today(data)
    unknown = set(fields) - set(RunConfig.__dataclass_fields__)
    for name in sorted(unknown, key=str):
        raise BadInput(f"{name}: unknown field{nearest(str(name), RunConfig.__dataclass_fields__)}")
    if not isinstance(fields.get("codec", ""), str):
        raise BadInput(f"codec: got {fields['codec']!r}, expected a string")
    layers, fields["codec"] = codecs.split_compression(fields.get("codec", codecs.NONE))
    model = fields.get("model")
    if layers == codecs.NONE or not serialize.is_object(model):
        return _read(fields, model, vocab_size)
    uncompressed = dict(model)
    named = uncompressed.pop("compression", None)
    after: Any = uncompressed.pop("compression_after", None)
    if named not in (None, codecs.NONE, layers):
        raise BadInput(f"codec: names {layers}, but model.compression is {named!r}, expected one of the two")
    config = _read(fields, uncompressed, vocab_size)
    if not after:
        after = tuple(hi for _, hi in default_plan(config).stages[:-1])
    return replace(config, model=config.model.with_compression(layers, after))


def of_today(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the names of today, and without those of REMOVED, which an earlier program wrote; BadInput for
    one of these with another value. The old model.seq_len said both lengths, so data.seq_len gives way to it."""
    fields = dict(data)
    model, of_data = fields.get("model"), fields.get("data")
    if serialize.is_object(model) and model.get("seq_len") is not None:
        fields["model"] = renamed({name: value for name, value in model.items() if value is not None})
        if serialize.is_object(of_data):
            if of_data.get("seq_len"):
                warnings.warn(
                    f"data.seq_len {of_data['seq_len']} is not read: the old model.seq_len is given too",
                    FutureWarning,
                    stacklevel=2,
                )
            fields["data"] = {**of_data, "seq_len": 0}
    for name, (neutral, way_now) in REMOVED.items():
        section, field_name = name.split(".")
        inner = fields.get(section)
        if serialize.is_object(inner) and field_name in inner:
            if inner[field_name] != neutral:
                raise BadInput(
                    f"{name}: got {inner[field_name]!r}, expected no such field, or {neutral!r}; {way_now}; "
                    "a run of before is read once its config.json says so"
                )
            fields[section] = {key: value for key, value in inner.items() if key != field_name}
    return fields


def _read(fields: dict[str, Any], model: Any, vocab_size: int | None) -> RunConfig:
    data = fields.get("data")
    seq_len = data.get("seq_len") if serialize.is_object(data) else None
    return serialize.read(RunConfig, fields | {"model": _model(model, vocab_size, seq_len)}, "")


def default_plan(config: RunConfig) -> Plan:
    """The plan of a config without a plan.json: pipelines are consecutive peers, p * stages + s. Servers come after
    them, stage by stage, and then workers."""
    cut = config.plan
    first_server = cut.stages * cut.pipelines
    first_worker = first_server + cut.stages * cut.servers
    n_layers, cuts = config.model.facts.n_layers, config.model.facts.cuts
    if cut.layers:
        sizes = _integers("plan.layers", cut.layers, cut.stages)
        if sum(sizes) != n_layers:
            raise BadInput(f"plan.layers: {cut.layers} covers {sum(sizes)} layers, expected {n_layers}")
    else:
        name, most = config.model.depth_field, len(cuts) - 1
        if cut.stages > most:
            mend = f"--config.plan.stages={most} fits this model, --config.model.{name}={cut.stages} makes it deeper"
            raise BadInput(f"plan.stages: got {cut.stages}, expected at most {name} {most}; {mend}")
        ends = (cuts[last] for _, last in ranges(even_shares(most, cut.stages)))
        sizes = tuple(hi - lo for lo, hi in itertools.pairwise((0, *ends)))
    return Plan(
        n_layers=n_layers,
        stages=ranges(sizes),
        placement=tuple(tuple(p * cut.stages + s for p in range(cut.pipelines)) for s in range(cut.stages)),
        shares=even_shares(cut.microbatches, cut.pipelines),
        schedule=cut.schedule,
        in_flight=_integers("plan.in_flight", cut.in_flight, cut.stages) if cut.in_flight else None,
        codec=(config.codec,) * (cut.stages - 1),
        roles=PlanRoles(
            servers=_rows(cut.stages, first_server, cut.servers), workers=_rows(cut.stages, first_worker, cut.workers)
        ),
    )


def _rows(n_stages: int, first: int, n_each: int) -> tuple[tuple[int, ...], ...]:
    """So many consecutive peers for each stage; empty if there are none."""
    if not n_each:
        return ()
    return tuple(tuple(range(first + s * n_each, first + (s + 1) * n_each)) for s in range(n_stages))


def check_plan(config: RunConfig, plan: Plan) -> None:
    """Refuse a plan that was made for another model, or that names a codec which does not exist."""
    facts = config.model.facts
    if plan.n_layers != facts.n_layers:
        made = f"plan: made for {plan.n_layers} layers, the model has {facts.n_layers}"
        raise BadInput(f"{made}; python -m planner solve --config=FILE plans for the model of a config")
    for stage, (lo, _) in enumerate(plan.stages):
        if lo not in facts.cuts:
            first, last = max(cut for cut in facts.cuts if cut < lo), min(cut for cut in facts.cuts if cut > lo)
            n_layers = last - first
            raise BadInput(
                f"plan.stages[{stage}]: starts at layer {lo}, inside a run of {n_layers} layers with one block"
            )
    for stage, (lo, hi) in enumerate(plan.stages):
        if not facts.may_be_stage(lo, hi):
            raise BadInput(
                f"plan.stages[{stage}]: layers {lo}..{hi - 1} have nothing of their own that is trained, expected a "
                "cut in which each stage has a trained leaf"
            )
    for boundary in range(len(plan.codec)):
        for pipeline in range(plan.n_pipelines):
            for forward in (True, False):
                codecs.parse(plan.codec_of(boundary, pipeline, forward), f"plan.codec[{boundary}]")


def with_codec(config: RunConfig, plan: Plan) -> Plan:
    """The plan with the config's codec at every boundary, if it says none everywhere and leaves the choice open."""
    if config.codec in (codecs.NONE, codecs.AUTO) or any(entry != codecs.NONE for entry in plan.codec):
        return plan
    return replace(plan, codec=(config.codec,) * (plan.n_stages - 1))


def _model(data: Any, vocab_size: int | None, seq_len: Any) -> ModelSpec:
    """The model that a preset and changed fields describe. It takes samples of `seq_len` tokens at most, where that is
    given and model.max_len is not."""
    if not serialize.is_object(data):
        raise BadInput(f"model: got {data!r}, expected an object with a preset, or with all fields of a family")
    overrides = {name: value for name, value in data.items() if value is not None}
    requested = overrides.get("vocab_size")
    if vocab_size is not None:
        if isinstance(requested, int) and requested < vocab_size:
            raise BadInput(f"model.vocab_size: got {requested}, expected at least the token file's {vocab_size}")
        overrides.setdefault("vocab_size", vocab_size)
    if type(seq_len) is int and seq_len > 0:
        overrides.setdefault("max_len", seq_len)
    return options_of(**overrides)


def _integers(name: str, text: str, n: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise BadInput(f'{name}: got "{text}", expected integers separated by commas') from None
    if len(numbers) != n or min(numbers) < 1:
        raise BadInput(f'{name}: got "{text}", expected {n} integers >= 1, one per stage')
    return numbers
