"""One run's configuration: frozen dataclasses, read from plain data and checked field by field.

An error names the field, its value and what was expected. Config files (configs/*.py) and --config.* flags fill the
same names. Which kinds of wiring and sync exist, and which options make sense with each, is checked in jaxdt.build.
"""

import hashlib
import itertools
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxdt.run import codec as codecs
from jaxdt.run import serialize
from jaxdt.run.delay import Delay
from jaxdt.run.errors import BadInput, nearest, require_at_least, require_one_of
from jaxdt.run.model import options_of, renamed
from jaxdt.run.model_facts import MicrobatchShape, ModelSpec
from jaxdt.run.optim import OptimConfig
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
CONNECTIVITY_WINDOWS = ("sliding", "tumbling")
PLATFORMS = ("any", "cpu", "gpu", "tpu")
# Fields that the config has no more -> the value with which an old one is read all the same, and the way now.
REMOVED: dict[str, tuple[Any, str]] = {
    "wiring.replan": ("off", "`python -m planner replan --run_dir=DIR` plans for the members of a run"),
    "net.queue_bytes": (64 << 20, "no new Work starts while more than 64 MiB wait to be sent to one peer"),
}


@dataclass(frozen=True)
class PlanConfig:
    """How to cut and place the model when no plan.json is given. `layers`: layers per stage such as "3,2,3", empty for
    an even split. `microbatches`: the microbatches of one step, over all pipelines. `in_flight`: forwards in flight
    per stage such as "4,2", empty for n_stages - stage. `servers`: peers of each stage that hold its parameters and
    compute nothing (sync.kind "server"). `workers`: peers of each stage that compute for those who hold its parameters,
    and are no members of the run (wiring.kind "pool")."""

    stages: int = 1
    pipelines: int = 1
    layers: str = ""
    schedule: str = "1f1b"
    microbatches: int = 1
    in_flight: str = ""
    servers: int = 0
    workers: int = 0


@dataclass(frozen=True)
class DataConfig:
    """`path`: a token file of prepare_data.py; empty means the committed corpus in bytes. `seq_len`: tokens of a sample
    (0: model.max_len). Samples begin with `seq_start` tokens and grow to that length over the first `seq_growth_steps`
    steps (jaxdt.run.seq_lengths). With 0 and 0 all samples have the full length."""

    path: str = ""
    seq_len: int = 0
    seq_start: int = 0
    seq_growth_steps: int = 0


@dataclass(frozen=True)
class InitConfig:
    """`path`: the model folder with whose parameters the run begins; empty: they are drawn from train.seed. `digest`:
    that of the model in it, which launch.py --init_from=DIR sets beside the path."""

    path: str = ""
    digest: str = ""


@dataclass(frozen=True)
class TrainConfig:
    """`microbatch_size` is in samples. The held-out loss of the parameters after every `eval_every_steps` (0: never)
    steps, and after the last, is measured over `eval_microbatches`. A checkpoint is written every
    `checkpoint_every_steps` (0: at the end only); the newest `keep_checkpoints` stay. A checkpoint is complete when
    each stage's part is on `checkpoint_copies` disks, or on all that the run has: peers without a common disk send the
    parts to one another. With `checkpoint_on_stop` the first Ctrl-C at the launcher or the coordinator ends the run
    after a checkpoint, else at once, as a second one does. `on_nonfinite` says what happens when the gradient of a step
    is not finite: stop the run, skip the update, or roll back to the last complete checkpoint and draw other samples
    from there on."""

    steps: int = 100
    seed: int = 0
    microbatch_size: int = 1
    eval_every_steps: int = 0
    eval_microbatches: int = 4
    checkpoint_every_steps: int = 0
    keep_checkpoints: int = 2
    checkpoint_copies: int = 2
    checkpoint_on_stop: bool = True
    on_nonfinite: str = "stop"


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

    kind: str = "fixed"
    routers: int = 1
    window: int = 0
    on_stage_lost: str = "wait"
    stage_grace_s: float = 300.0
    retain_bytes: int = 1 << 30
    rebalance_s: float = 0.0
    rebalance_moves: int = 1
    rebalance_rule: str = "bottleneck"
    join_rule: str = "balanced"


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

    match: str = "all"
    every_steps: int = 1
    window_frac: float = 0.0
    window_s: float = 0.0
    group_size_max: int = 0
    connectivity_groups: int = -1
    connectivity_window: str = "sliding"
    seed: int = 0
    outer: str = "none"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    lag_steps: int = 0
    mix_frac: float = 0.0
    weights: str = EQUAL
    clip: str = PIPELINE
    average_moments: bool = False

    def weight(self, n_microbatches: int) -> int:
        """How much a replica with such a share of a step's microbatches counts in a group."""
        return n_microbatches if self.weights == SAMPLES else 1

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

    staleness: int = 0
    wave: int = 1


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
    `codec`: how replicas that may differ send one another what a group averages, or a server what they push, and how a
    pool's workers send their gradients. With bf16 each contribution is rounded once, they are added in fp32, and the
    sum is rounded once; all members go on from the same bits. A server's parameters, and means for held-out losses,
    checkpoints and the result of the run, stay in fp32, and so does what a pool's servers average."""

    kind: str = "allreduce"
    delay: int = 0
    delay_after_steps: int = 0
    slice_bytes: int = 1 << 22
    check_every_steps: int = 50
    codec: str = codecs.NONE
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True)
class NetConfig:
    """When a peer counts as lost. A deadline is the median of the durations observed so far plus their spread, and
    never below `deadline_floor_s`. `outage_s`: how long peers wait for a coordinator that is gone, by default a
    night: to wait costs idle machines, to end costs the state in their memory. Before a peer ends it writes that state
    as a part of a checkpoint. `copies_gbps`: how fast a peer fetches copies of other peers' parts of checkpoints, in
    1e9 bit/s (0: as fast as the links allow); parts and states that a step waits for have no limit."""

    heartbeat_s: float = 0.5
    deadline_floor_s: float = 4.0
    outage_s: float = 8 * 3600.0
    copies_gbps: float = 0.0


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
    codec: str = "none"
    error_feedback: bool = False
    dtype: str = "float32"
    remat: str = "recompute"
    platform: str = "any"

    def __post_init__(self) -> None:
        self._check_plan()
        self._check_lengths()
        if bool(self.init.path) != bool(self.init.digest):
            raise BadInput(
                f"init.digest: got {self.init.digest!r} with init.path {self.init.path!r}, expected both or neither; "
                "launch.py --init_from=DIR sets both"
            )
        self._check_train()
        self._check_wiring()
        self._check_sync()
        codecs.parse(self.codec)
        require_one_of("dtype", self.dtype, DTYPES)
        require_one_of("remat", self.remat, REMATS)
        require_one_of("platform", self.platform, PLATFORMS)
        self._check_net()

    def _check_plan(self) -> None:
        require_at_least("plan.stages", self.plan.stages, 1)
        require_at_least("plan.pipelines", self.plan.pipelines, 1)
        require_at_least("plan.microbatches", self.plan.microbatches, self.plan.pipelines)
        require_at_least("plan.servers", self.plan.servers, 0)
        require_at_least("plan.workers", self.plan.workers, 0)
        require_one_of("plan.schedule", self.plan.schedule, SCHEDULES)

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

    def _check_train(self) -> None:
        for name in ("steps", "microbatch_size", "eval_microbatches", "keep_checkpoints", "checkpoint_copies"):
            require_at_least(f"train.{name}", getattr(self.train, name), 1)
        for name in ("seed", "eval_every_steps", "checkpoint_every_steps"):
            require_at_least(f"train.{name}", getattr(self.train, name), 0)
        require_one_of("train.on_nonfinite", self.train.on_nonfinite, ON_NONFINITE)

    def _check_wiring(self) -> None:
        wiring = self.wiring
        require_one_of("wiring.on_stage_lost", wiring.on_stage_lost, ON_STAGE_LOST)
        require_one_of("wiring.join_rule", wiring.join_rule, JOIN_RULES)
        require_one_of("wiring.rebalance_rule", wiring.rebalance_rule, REBALANCE_RULES)
        require_at_least("wiring.routers", wiring.routers, 1)
        require_at_least("wiring.window", wiring.window, 0)
        require_at_least("wiring.retain_bytes", wiring.retain_bytes, 0)
        require_at_least("wiring.rebalance_moves", wiring.rebalance_moves, 1)
        for name in ("rebalance_s", "stage_grace_s"):
            if not 0 <= getattr(wiring, name) < math.inf:
                raise BadInput(f"wiring.{name}: got {getattr(wiring, name)}, expected a finite number >= 0")

    def _check_sync(self) -> None:
        require_one_of("sync.delay", self.sync.delay, (0, 1))
        require_at_least("sync.delay_after_steps", self.sync.delay_after_steps, 0)
        require_at_least("sync.slice_bytes", self.sync.slice_bytes, 4)
        require_at_least("sync.check_every_steps", self.sync.check_every_steps, 0)
        require_one_of("sync.codec", self.sync.codec, tuple(codecs.EXCHANGED_BYTES))
        require_at_least("sync.server.staleness", self.sync.server.staleness, 0)
        require_at_least("sync.server.wave", self.sync.server.wave, 1)
        groups = self.sync.groups
        require_at_least("sync.groups.every_steps", groups.every_steps, 1)
        require_at_least("sync.groups.group_size_max", groups.group_size_max, 0)
        require_at_least("sync.groups.connectivity_groups", groups.connectivity_groups, -1)
        require_one_of("sync.groups.connectivity_window", groups.connectivity_window, CONNECTIVITY_WINDOWS)
        require_one_of("sync.groups.outer", groups.outer, OUTERS)
        require_one_of("sync.groups.weights", groups.weights, WEIGHTS)
        require_one_of("sync.groups.clip", groups.clip, CLIPS)
        if type(groups.average_moments) is not bool:
            raise BadInput(f"sync.groups.average_moments: got {groups.average_moments!r}, expected true or false")
        if not 0 < groups.outer_lr < math.inf:
            raise BadInput(f"sync.groups.outer_lr: got {groups.outer_lr}, expected a finite number > 0")
        if not 0 <= groups.outer_momentum < 1:
            raise BadInput(f"sync.groups.outer_momentum: got {groups.outer_momentum}, expected a number in [0, 1)")
        for name in ("window_frac", "window_s"):
            if not getattr(groups, name) >= 0:
                raise BadInput(f"sync.groups.{name}: got {getattr(groups, name)}, expected a number >= 0")
        self._check_fragments()

    def _check_fragments(self) -> None:
        groups = self.sync.groups
        require_at_least("sync.groups.fragments", groups.fragments, 1)
        require_at_least("sync.groups.lag_steps", groups.lag_steps, 0)
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
        if not 0 <= groups.mix_frac < 1:
            raise BadInput(f"sync.groups.mix_frac: got {groups.mix_frac}, expected a number in [0, 1)")

    def _check_net(self) -> None:
        heartbeat_s = self.net.heartbeat_s
        floor_s = self.net.deadline_floor_s
        if not 0 < heartbeat_s < math.inf:
            raise BadInput(f"net.heartbeat_s: got {heartbeat_s}, expected a finite number > 0")
        if not 2 * heartbeat_s <= floor_s < math.inf:
            raise BadInput(
                f"net.deadline_floor_s: got {floor_s}, expected at least two heartbeats, {2 * heartbeat_s}, and finite"
            )
        if not self.net.outage_s > 0:
            raise BadInput(f"net.outage_s: got {self.net.outage_s}, expected a number > 0")
        if not 0 <= self.net.copies_gbps < math.inf:
            raise BadInput(f"net.copies_gbps: got {self.net.copies_gbps}, expected a finite number >= 0")

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
