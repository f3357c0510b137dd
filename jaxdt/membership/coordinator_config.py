"""The settings with which the coordinator of a run starts, and the state that an earlier coordinator left behind."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxdt.membership.agreement import CommittedStep, CountedRows
from jaxdt.protocol import events as ev
from jaxdt.run import serialize
from jaxdt.run.seq_lengths import SeqLengths


@dataclass(frozen=True)
class CoordinatorConfig:
    """`stage_of` maps each peer of the plan to its stage; `job` is what a newcomer is told: config and plan as JSON.
    `waits`: a stage that has lost all its replicas waits for another one. `stage_grace_s`: how long a silent peer that
    may hold what such a stage needs is not taken for lost. `delay_steps`: how many steps are under way beside the first
    that is not committed. `last_term`: that of the last coordinator on this disk. `n_copies`: on how many disks each
    part of a checkpoint must be, if there are so many. `revoked`: peers that were evicted for good. `workers`: the
    stage and server of the plan's workers, which are no members; None if the wiring has none. `join_rule`: by which
    others get theirs."""

    run: str
    fingerprint: str
    stage_of: Mapping[int, int]
    n_stages: int
    start_version: int
    start_generation: int
    n_steps: int
    tokens_per_sample: SeqLengths
    on_nonfinite: str
    heartbeat_s: float
    deadline_floor_s: float
    waits: bool = False
    stage_grace_s: float = 0.0
    delay_steps: int = 0
    start_parts: tuple[ev.Part, ...] = ()
    start_reseeds: int = 0
    n_copies: int = 1
    last_term: int = 0
    job: Mapping[str, str] = field(default_factory=dict[str, str])
    revoked: tuple[int, ...] = ()
    workers: Mapping[int, tuple[int, int]] | None = None
    join_rule: str = ""

    @property
    def start(self) -> ev.Checkpoint:
        """The checkpoint with which the run begins."""
        return ev.Checkpoint(self.start_version, self.start_generation, self.start_parts, self.start_reseeds)

    def refusal(self, src: int, stage: int, hello: ev.Hello) -> str:
        """'' if the peer is the one that it should be and runs the same; else the reason, for people."""
        if (hello.peer, hello.stage, hello.fingerprint) == (src, stage, self.fingerprint):
            return ""
        return (
            f"peer {src}: refused, it runs stage {hello.stage} of {hello.fingerprint}, "
            f"expected stage {stage} of {self.fingerprint}"
        )

    def answer(self, peer: int, stage: int, n_committed: int) -> ev.Welcome:
        """Returns the facts that a newcomer needs before it joins."""
        return ev.Welcome(self.run, peer, stage, self.fingerprint, dict(self.job), n_committed)


@dataclass(frozen=True)
class WantedCheckpoint:
    """A checkpoint of this version that was promised; with `stop_code` the run ends with it, as `stopped_by` wants."""

    version: int
    stop_code: int | None = None
    stopped_by: str = ""


@dataclass(frozen=True)
class OperatorState:
    """The requests of operators that outlive a coordinator. `wanted`: where replicas may differ, the checkpoint that
    was promised last, also when it is complete."""

    paused: bool = False
    revoked: tuple[int, ...] = ()
    wanted: WantedCheckpoint | None = None


@dataclass(frozen=True)
class DurableState:
    """The state that an earlier coordinator of the run made durable: its term, its last view and steps, the newest
    complete checkpoint (None before the first of its run), the requests of operators, and, where replicas may differ,
    the last rows of the metrics (None before the first)."""

    coordinator_term: int
    view: ev.View
    steps: tuple[CommittedStep, ...]
    checkpoint: ev.Checkpoint | None = None
    operator: OperatorState = OperatorState()
    rows: CountedRows | None = None


@dataclass(frozen=True)
class LastView:
    """The fields of the run's last view that are read also where it is of an earlier protocol."""

    coordinator_term: int
    members: tuple[ev.Member, ...]


def load_operator_state(disk: Mapping[str, Any]) -> OperatorState:
    """Reads the value that was persisted under the name "operator"; BadInput for anything that no coordinator
    writes."""
    return serialize.read(OperatorState, disk.get("operator") or {}, "operator")


def load_durable_state(disk: Mapping[str, Any]) -> DurableState | None:
    """Reads the values that were persisted as plain data under the names "coordinator_term", "view", "steps", "rows",
    "checkpoint" and "operator". None if there was no view yet. A step of an earlier generation does not count any more.
    BadInput for anything that no coordinator writes."""
    if disk.get("view") is None:
        return None
    view = serialize.read(ev.View, disk["view"], "view")
    steps = serialize.read(tuple[CommittedStep, ...], disk.get("steps") or [], "steps")
    term = serialize.read(int, disk.get("coordinator_term"), "coordinator_term")
    kept = tuple(step for step in steps if step.record.generation == view.generation)
    stored = disk.get("checkpoint")
    checkpoint = None if stored is None else serialize.read(ev.Checkpoint, stored, "checkpoint")
    rows = None if disk.get("rows") is None else serialize.read(CountedRows, disk["rows"], "rows")
    return DurableState(term, view, kept, checkpoint, load_operator_state(disk), rows)
