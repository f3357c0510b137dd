"""Reports: the messages of a machine to people. A frozen dataclass for each kind, with its own sentence; all of them
are actions.

Drivers hand them on: to the trace and a peer's log, and the coordinator's to its metrics, summary and live table.
`kind` names the schema in a trace, `fields` holds the values there, as plain data.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxdt.protocol.kinds import COORDINATOR, Action

DIGITS = 12  # digits that are printed of a part's digest
_MERGED = {"merged": True}  # a mapping whose entries stand among the report's own fields


@dataclass(frozen=True)
class Report(Action):
    """The base of every report. A field that is None is left out."""

    kind: ClassVar[str]

    @property
    def fields(self) -> dict[str, Any]:
        """The report as plain data."""
        found: dict[str, Any] = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if "merged" in one.metadata:
                found |= value
            elif value is not None:
                found[one.name] = value
        return found

    @property
    def line(self) -> str:
        """The line that a process prints, if it does not show the report in another way."""
        return f"{self.kind}: " + ", ".join(f"{name} {value}" for name, value in self.fields.items())


# ---------------------------------------------------------------------------------- from the coordinator: steps


@dataclass(frozen=True)
class StepReport(Report):
    """A committed step. `loss` is a mean over samples, NaN where none was measured; `gradient_norm` is the norm of the
    mean gradient; `verdict` is that of its Record. `eval_loss`: the held-out loss of the parameters after
    this step, where it was measured. A coordinator that was started again reports the last steps of the one before once
    more, with a `step_s` of NaN; that of the first step that it commits is NaN, too, since that one began before.
    `tokens_per_s` is NaN where `step_s` is NaN or 0.

    Where replicas may differ this is a row: as many steps of pipelines as there are pipelines, in the order in which
    they were done, or where all replicas average together, one step of all pipelines. Rows of which the coordinator
    hears in one moment, or in the seconds after a pause of its own, were done while it was away, so their `step_s` is
    NaN. `group_size`: the mean of the groups that formed since the row before, `suspended_frac`: the share of them that
    were suspended; None if none formed."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    step_s: float
    tokens_per_s: float
    gradient_norm: float
    verdict: str
    eval_loss: float | None = None
    group_size: float | None = None
    suspended_frac: float | None = None


@dataclass(frozen=True)
class GroupReport(Report):
    """Group `k` of a fragment of a stage has formed in `view`: its members, and how many local steps each had done.
    `cause`, `enforced` and `suspended` are those of jaxdt.sync.matching.base.AveragingGroup."""

    kind: ClassVar[str] = "group"
    stage: int
    k: int
    members: list[int]
    steps: list[int]
    cause: str
    enforced: bool
    suspended: bool
    fragment: int = 0
    view: int = 0


@dataclass(frozen=True)
class StateMeanReport(Report):
    """The members of a stage hold the mean of their states for the checkpoint of `version`; averaging was begun in
    `view`. `steps`: how many local steps each member had done. With servers: the stage's server takes a snapshot for
    that checkpoint; it includes the pushes of so many local steps of each worker."""

    kind: ClassVar[str] = "state_mean"
    stage: int
    version: int
    members: list[int]
    steps: list[int]
    view: int = 0


@dataclass(frozen=True)
class HeldOutMeanReport(Report):
    """The mean of the parameters of these members, after so many local steps each, is that with which the held-out loss
    of `version` rows is measured. It was begun in `view`. With servers: the parameters with their pushes of so many."""

    kind: ClassVar[str] = "held_out_mean"
    stage: int
    version: int
    members: list[int]
    steps: list[int]
    view: int = 0


@dataclass(frozen=True)
class PipelineEndReport(Report):
    """A pipeline has done its last local step, `n_steps` in all."""

    kind: ClassVar[str] = "pipeline_end"
    pipeline: int
    n_steps: int

    @property
    def line(self) -> str:
        return f"pipeline {self.pipeline} has done its last step, {self.n_steps} in all"


@dataclass(frozen=True)
class PipelineJoinReport(Report):
    """A pipeline has come back, and continues from the states of pipeline `donor` after `n_steps` local steps.
    `admission`: of its peers. A coordinator that is started again reports the last return of each pipeline again."""

    kind: ClassVar[str] = "pipeline_join"
    pipeline: int
    donor: int
    n_steps: int
    admission: int

    @property
    def line(self) -> str:
        states = f"the states of pipeline {self.donor} after {self.n_steps} local steps"
        return f"pipeline {self.pipeline} is back, with {states}"


@dataclass(frozen=True)
class PushReport(Report):
    """A server adds the change of local step `step` - 1 of `worker`. The order of a server's reports of pushes and
    pulls is that in which it adds them and answers."""

    kind: ClassVar[str] = "push"
    stage: int
    worker: int
    step: int


@dataclass(frozen=True)
class PullReport(Report):
    """A server gives its parameters to `worker`, which has done `step` local steps. `clock`: the worker's, `clock_min`:
    that of the slowest worker of the stage."""

    kind: ClassVar[str] = "pull"
    stage: int
    worker: int
    step: int
    clock: int
    clock_min: int


@dataclass(frozen=True)
class SnapshotReport(Report):
    """A server takes a snapshot of its parameters, for a held-out loss or a checkpoint of `version`, at this place of
    its log. It also adds later pushes to the snapshot: of each pipeline those up to its local step in `cut`."""

    kind: ClassVar[str] = "snapshot"
    stage: int
    version: int
    is_checkpoint: bool
    cut: list[int]


@dataclass(frozen=True)
class KeptReport(Report):
    """A worker has the parameters of a checkpoint of `version` from its server, beside its own optimizer's state after
    `step` local steps."""

    kind: ClassVar[str] = "kept"
    stage: int
    version: int
    worker: int
    step: int


@dataclass(frozen=True)
class UnequalBitsReport(Report):
    """The parameters of a replica are not bit for bit those of `reference`, but within the tolerance, as on hardware
    that rounds differently. `difference`: estimated norm of the difference over the norm. Told once for each peer."""

    kind: ClassVar[str] = "unequal_bits"
    version: int
    stage: int
    peer: int
    reference: int
    difference: float

    @property
    def line(self) -> str:
        where = f"after {self.version} steps stage {self.stage} is not bit for bit that of peer {self.reference}"
        return f"peer {self.peer}: {where} (relative difference {self.difference:.1e}), which is tolerated"


@dataclass(frozen=True)
class RepairReport(Report):
    """The parameters of a replica differ from those of `donor` beyond the tolerance: it takes over the donor's state of
    `version`, and the step continues then."""

    kind: ClassVar[str] = "repair"
    version: int
    stage: int
    peer: int
    donor: int
    difference: float

    @property
    def line(self) -> str:
        where = f"after {self.version} steps stage {self.stage} is not that of peer {self.donor}"
        return f"peer {self.peer}: {where} (relative difference {self.difference:.1e}), whose state it takes over"


@dataclass(frozen=True)
class CheckpointReport(Report):
    """The checkpoint of `version` is complete, with each part on `copies` disks or more; saving it kept a member from
    its work for up to `save_s`."""

    kind: ClassVar[str] = "checkpoint"
    version: int
    save_s: float
    copies: int


@dataclass(frozen=True)
class PartMissingReport(Report):
    """The disk of `peer` does not hold the part of a checkpoint, or cannot take it."""

    kind: ClassVar[str] = "part_missing"
    peer: int
    digest: str
    reason: str

    @property
    def line(self) -> str:
        return f"peer {self.peer}: cannot give part {self.digest[:DIGITS]} of a checkpoint: {self.reason}"


@dataclass(frozen=True)
class NoHolderReport(Report):
    """A stage is vacant, and no connected peer holds the parts of these stages of the checkpoint of `version`: the
    run waits for a host that does."""

    kind: ClassVar[str] = "no_holder"
    version: int
    stages: list[int]

    @property
    def line(self) -> str:
        parts = f"the parts of stage {', '.join(map(str, self.stages))} of the checkpoint of {self.version} steps"
        return f"no connected peer has {parts}; the run waits"


@dataclass(frozen=True)
class RollbackReport(Report):
    """The run goes from `step` back to the checkpoint of `to` steps; the steps `again` are done again."""

    kind: ClassVar[str] = "rollback"
    step: int
    to: int
    generation: int
    again: list[int]


@dataclass(frozen=True)
class DoneReport(Report):
    """A member has applied all steps. `bytes_to`: payload sent to each peer; `totals`: its counters; `bytes_from`:
    payload that a pool's server received from each worker."""

    kind: ClassVar[str] = "done"
    peer: int
    bytes_to: Mapping[str, int]
    totals: Mapping[str, float] = field(metadata=_MERGED)
    bytes_from: Mapping[str, int] | None = None


@dataclass(frozen=True)
class EndedReport(Report):
    """The run is over, with this exit code."""

    kind: ClassVar[str] = "ended"
    code: int
    reason: str


# ---------------------------------------------------------------------------------- from the coordinator: members


@dataclass(frozen=True)
class ViewReport(Report):
    """A view is durable. `members`: peer -> stage; `joining`: those that lack their stage's state."""

    kind: ClassVar[str] = "view"
    view: int
    members: Mapping[int, int]
    joining: list[int]


@dataclass(frozen=True)
class ConnectedReport(Report):
    """A peer has said hello."""

    kind: ClassVar[str] = "connected"
    peer: int
    stage: int

    @property
    def line(self) -> str:
        return f"peer {self.peer} (stage {self.stage}): is here, and gets ready"


@dataclass(frozen=True)
class JoinRequestReport(Report):
    """A newcomer has asked to join, and got this peer id and stage."""

    kind: ClassVar[str] = "join_request"
    peer: int
    stage: int

    @property
    def line(self) -> str:
        return f"peer {self.peer}: asks to join, and gets stage {self.stage}"


@dataclass(frozen=True)
class CandidateReport(Report):
    """A peer that is not a member is ready to compute, on `device`. `has_no_place`: it can only wait for the end."""

    kind: ClassVar[str] = "candidate"
    peer: int
    device: str = ""
    has_no_place: bool = False

    @property
    def line(self) -> str:
        idle = "stays idle until the end: this run admits no new peers"
        then = idle if self.has_no_place else "joins as soon as it can"
        return f"peer {self.peer}: is ready on {self.device}, and {then}"


@dataclass(frozen=True)
class WaitingReport(Report):
    """The first view waits for these peers of the plan."""

    kind: ClassVar[str] = "waiting"
    missing: list[int]

    @property
    def line(self) -> str:
        return f"waiting for {names(self.missing)} to get ready"


@dataclass(frozen=True)
class StillWaitingReport(Report):
    """The run has waited for `waited_s`.

    - `missing`: peers of the plan that are not ready; `absent`: those among them that are not connected.
    - `stages`: have no peer.
    - `refusal`: who was refused last meanwhile, and why; '' for none."""

    kind: ClassVar[str] = "still_waiting"
    missing: list[int]
    absent: list[int]
    stages: list[int]
    refusal: str
    waited_s: float


@dataclass(frozen=True)
class LostReport(Report):
    """A member is taken for lost."""

    kind: ClassVar[str] = "lost"
    peer: int
    reason: str


@dataclass(frozen=True)
class FailedReport(Report):
    """A peer that is no member cannot continue: its process has ended, and the run continues without it."""

    kind: ClassVar[str] = "failed"
    peer: int
    reason: str


@dataclass(frozen=True)
class OverdueReport(Report):
    """A Work takes far longer than its like. If it `blocks` the run, the run continues without the peer, provided that
    its stage has another."""

    kind: ClassVar[str] = "overdue"
    peer: int
    work: str
    seconds: float
    deadline_s: float
    blocks: bool = False

    @property
    def line(self) -> str:
        times = f"{self.seconds:.1f} s, expected {self.deadline_s:.1f} s"
        waiting = ", and the run waits for it" if self.blocks else ""
        return f"peer {self.peer}: one computation ({self.work}) takes {times}{waiting}"


@dataclass(frozen=True)
class SaveFailedReport(Report):
    """A member could not write its part of the checkpoint of `version`, for the `n_in_a_row`th time in a row."""

    kind: ClassVar[str] = "save_failed"
    peer: int
    version: int
    reason: str
    n_in_a_row: int

    @property
    def line(self) -> str:
        part = f"its part of the checkpoint of {self.version} steps"
        return f"peer {self.peer}: could not write {part} ({self.n_in_a_row} in a row have failed): {self.reason}"


@dataclass(frozen=True)
class ReturnedReport(Report):
    """The last replica of a stage was silent, and is heard again."""

    kind: ClassVar[str] = "returned"
    peer: int

    @property
    def line(self) -> str:
        return f"peer {self.peer}: is heard again"


@dataclass(frozen=True)
class VacantReport(Report):
    """A stage has no replica that is there. The run waits for the silent peers `waits_for`, which may hold its state,
    for at most `waits_s`. If they do not come back, it waits for a newcomer, goes back to `checkpoint` and does the
    steps `at_stake` again."""

    kind: ClassVar[str] = "vacant"
    stage: int
    reason: str
    checkpoint: int
    at_stake: list[int]
    waits_for: list[int]
    waits_s: float


@dataclass(frozen=True)
class LeavingReport(Report):
    """A member wants to leave; it stays for the time being if it is the last replica of its stage."""

    kind: ClassVar[str] = "leaving"
    peer: int
    last_of_its_stage: bool


@dataclass(frozen=True)
class MoveReport(Report):
    """A member will leave `stage` between two steps and come back for `to_stage`."""

    kind: ClassVar[str] = "move"
    peer: int
    stage: int
    to_stage: int

    @property
    def line(self) -> str:
        return f"peer {self.peer}: moves from stage {self.stage} to stage {self.to_stage}, which needs it more"


@dataclass(frozen=True)
class RestartedReport(Report):
    """A coordinator continues where an earlier one has died, which may not have reported its last view."""

    kind: ClassVar[str] = "restarted"
    coordinator_term: int
    view: int
    step: int
    members: list[int]

    @property
    def line(self) -> str:
        members = f"the members of view {self.view}"
        return f"a coordinator was started again: the run continues at step {self.step} with {members}"


@dataclass(frozen=True)
class PredictionReport(Report):
    """The predicted seconds of a step, with the codecs of the run's plan and without them; or why there are none."""

    kind: ClassVar[str] = "prediction"
    step_s: float | None = None
    step_s_uncompressed: float | None = None
    problem: str | None = None

    @property
    def line(self) -> str:
        return super().line if self.problem is None else f"no prediction of the step time: {self.problem}"


@dataclass(frozen=True)
class OperatorReport(Report):
    """An operator has asked for something, and it is being done."""

    kind: ClassVar[str] = "operator"
    command: str
    answer: str
    peer: int | None = None


@dataclass(frozen=True)
class SteppedDownReport(Report):
    """This coordinator ends, and the run continues without it."""

    kind: ClassVar[str] = "stepped_down"
    reason: str

    @property
    def line(self) -> str:
        return self.reason


@dataclass(frozen=True)
class PausedReport(Report):
    """This coordinator did not run for `paused_s`. It judges no peer until it has read what came meanwhile: for
    `patience_s`."""

    kind: ClassVar[str] = "paused"
    paused_s: float
    patience_s: float

    @property
    def line(self) -> str:
        still = f"this process stood still for {self.paused_s} s"
        return f"{still}, so no peer counts as lost for {self.patience_s:.0f} s"


@dataclass(frozen=True)
class HeartbeatReport(Report):
    """A peer's heartbeat; `status`: its counters; `bytes_to`: payload sent to each peer, None in most heartbeats;
    `bytes_from`: payload that a pool's server received from each worker; `worker_cpu_s`: the processor time of each
    of its workers, in seconds."""

    kind: ClassVar[str] = "heartbeat"
    peer: int
    status: Mapping[str, float] = field(metadata=_MERGED)
    bytes_to: Mapping[str, int] | None = None
    bytes_from: Mapping[str, int] | None = None
    worker_cpu_s: Mapping[int, float] | None = None


# ------------------------------------------------------------------------------------------------- from a peer


@dataclass(frozen=True)
class AsksToLeaveReport(Report):
    """This peer is in the run, was asked to leave it, and asks the coordinator when it may go."""

    kind: ClassVar[str] = "asks_to_leave"

    @property
    def line(self) -> str:
        rest = "at once, and may cost the run the steps since its last checkpoint"
        return f"asks to leave between two steps; a second interrupt ends it {rest}"


@dataclass(frozen=True)
class PreparingReport(Report):
    """The task of this process before it can compute, for people."""

    kind: ClassVar[str] = "preparing"
    what: str

    @property
    def line(self) -> str:
        return self.what


@dataclass(frozen=True)
class ReadyReport(Report):
    """This process is ready to compute, on `device`: platform, number and kind."""

    kind: ClassVar[str] = "ready"
    device: str

    @property
    def line(self) -> str:
        return f"is ready on {self.device}; waits until the run takes it in"


@dataclass(frozen=True)
class AdoptedReport(Report):
    """This peer has adopted a view. `back_to`: the steps of the checkpoint to which the run goes back with it."""

    kind: ClassVar[str] = "adopted"
    view: int
    members: list[int]
    back_to: int | None = None

    @property
    def line(self) -> str:
        back = "" if self.back_to is None else f"; goes back to the checkpoint of {self.back_to} steps"
        return f"is in view {self.view}, with {names(self.members)}{back}"


@dataclass(frozen=True)
class NoteReport(Report):
    """The coordinator's note to this peer: the reason why the run does not continue; '' once it continues."""

    kind: ClassVar[str] = "note"
    text: str

    @property
    def line(self) -> str:
        return self.text or "the run continues"


@dataclass(frozen=True)
class EvictedReport(Report):
    """The run continues without this peer since `view`."""

    kind: ClassVar[str] = "evicted"
    view: int

    @property
    def line(self) -> str:
        return f"is not in view {self.view}: the run continues without it"


@dataclass(frozen=True)
class MovingReport(Report):
    """This peer becomes a newcomer to another stage."""

    kind: ClassVar[str] = "moving"
    to_stage: int

    @property
    def line(self) -> str:
        return f"moves to stage {self.to_stage}"


@dataclass(frozen=True)
class StillReadyReport(Report):
    """This peer has been ready for `waited_s`, and the run has not taken it in yet. `is_heard`: the coordinator is
    there."""

    kind: ClassVar[str] = "still_ready"
    waited_s: float
    is_heard: bool = True

    @property
    def line(self) -> str:
        waited = f"has waited {self.waited_s:.0f} s until the run takes it in"
        return f"{waited}; the coordinator says for whom the run waits"


@dataclass(frozen=True)
class UnreachedReport(Report):
    """This process has not reached the coordinator yet, and keeps trying for `left_s` seconds."""

    kind: ClassVar[str] = "unreached"
    left_s: float


@dataclass(frozen=True)
class OutageReport(Report):
    """The coordinator is silent; this peer waits for it up to `waits_s`."""

    kind: ClassVar[str] = "outage"
    coordinator_silent_s: float
    waits_s: float

    @property
    def line(self) -> str:
        silent = f"the coordinator has been silent for {self.coordinator_silent_s:.1f} s"
        return f"{silent}; waits for it for up to {self.waits_s:.0f} s"


@dataclass(frozen=True)
class DownloadReport(Report):
    """A newcomer has got the state of its stage from its donors."""

    kind: ClassVar[str] = "download"
    version: int
    bytes: int
    seconds: float
    donors: list[int]

    @property
    def line(self) -> str:
        size = f"{self.bytes / 1e6:.1f} MB in {self.seconds:.2f} s"
        return f"has the state of step {self.version} from {names(self.donors)}: {size}"


@dataclass(frozen=True)
class UsageReport(Report):
    """The processor seconds that this process has used when it has applied the update of `step`."""

    kind: ClassVar[str] = "usage"
    step: int
    cpu_s: float


@dataclass(frozen=True)
class WorkerBeginsReport(Report):
    """A pool's worker begins its first Work for this server, of `stage`."""

    kind: ClassVar[str] = "worker_begins"
    server: int
    stage: int

    @property
    def line(self) -> str:
        return f"computes for peer {self.server}, stage {self.stage}"


@dataclass(frozen=True)
class WorkerProgressReport(Report):
    """A pool's worker has the parameters of `version`. Since it came it has handed in the gradients of `n_handed_in`
    microbatches, of `n_of_stage` that all of its stage have computed in those steps."""

    kind: ClassVar[str] = "worker_progress"
    version: int
    stage: int
    n_handed_in: int
    n_of_stage: int


# -------------------------------------------------------------------------------------------------- from either


@dataclass(frozen=True)
class WriteFailedReport(Report):
    """A file that is for people only, such as a trace, could not be written; the process continues without it."""

    kind: ClassVar[str] = "write_failed"
    reason: str

    @property
    def line(self) -> str:
        return f"could not be written, and the run continues without it: {self.reason}"


@dataclass(frozen=True)
class RefusedReport(Report):
    """A connection, a peer or a request was refused."""

    kind: ClassVar[str] = "refused"
    reason: str

    @property
    def line(self) -> str:
        return f"refused: {self.reason}"


@dataclass(frozen=True)
class WorkerPlacedReport(Report):
    """The coordinator has told a pool's worker to compute for `server`, of `stage`."""

    kind: ClassVar[str] = "worker_placed"
    worker: int
    stage: int
    server: int

    @property
    def line(self) -> str:
        return f"worker {self.worker}: comes to compute for peer {self.server} (stage {self.stage}), and gets ready"


@dataclass(frozen=True)
class WorkerHereReport(Report):
    """The coordinator hears that a server has let a pool's worker in; `is_back`: after the worker was lost."""

    kind: ClassVar[str] = "worker_here"
    worker: int
    server: int
    is_back: bool

    @property
    def line(self) -> str:
        return f"worker {self.worker}: {'is back, and ' if self.is_back else ''}computes for peer {self.server}"


@dataclass(frozen=True)
class WorkerGoneReport(Report):
    """The coordinator hears that a server has lost a pool's worker, or has put it out; `n_redone` microbatches are
    computed again."""

    kind: ClassVar[str] = "worker_gone"
    worker: int
    server: int
    reason: str
    n_redone: int

    @property
    def line(self) -> str:
        again = f"; {self.n_redone} microbatches that it had not handed in are computed again" if self.n_redone else ""
        return f"worker {self.worker}: is lost to peer {self.server} ({self.reason}){again}"


@dataclass(frozen=True)
class WorkerJoinedReport(Report):
    """A server of `stage` has let a pool's worker in, while its parameters had seen `version` updates."""

    kind: ClassVar[str] = "worker_joined"
    stage: int
    worker: int
    version: int

    @property
    def line(self) -> str:
        return f"lets worker {self.worker} compute for it, with the parameters of {self.version} steps"


@dataclass(frozen=True)
class WorkerLostReport(Report):
    """Work that a pool's worker has not contributed does not count any more: `n_redone` microbatches are computed
    again. With `begins_anew` the worker stays, under another admission."""

    kind: ClassVar[str] = "worker_lost"
    stage: int
    worker: int
    reason: str
    n_redone: int
    begins_anew: bool = False

    @property
    def line(self) -> str:
        what = "starts again" if self.begins_anew else "is lost"
        return f"worker {self.worker} {what} ({self.reason}); {self.n_redone} microbatches are computed again"


@dataclass(frozen=True)
class TasksStolenReport(Report):
    """A pool's server, whose clients had little left to do, takes so many microbatches of another server of its
    stage, `src`."""

    kind: ClassVar[str] = "tasks_stolen"
    step: int
    stage: int
    src: int
    n_microbatches: int


@dataclass(frozen=True)
class ReroutedReport(Report):
    """A router has another replica do a forward too, which waits at peer `src` in or behind Work that is overdue."""

    kind: ClassVar[str] = "rerouted"
    step: int
    stage: int
    microbatch: int
    src: int
    dst: int

    @property
    def line(self) -> str:
        where = f"peer {self.src} for stage {self.stage}: peer {self.dst} computes it, too"
        return f"microbatch {self.microbatch} of step {self.step + 1} waits too long at {where}"


@dataclass(frozen=True)
class LateResultReport(Report):
    """Two peers of `stage` have done the same forward, and that of `peer` came second: it is not used."""

    kind: ClassVar[str] = "late_result"
    step: int
    stage: int
    microbatch: int
    peer: int

    @property
    def line(self) -> str:
        what = f"microbatch {self.microbatch} of step {self.step + 1}, stage {self.stage}"
        return f"{what}: the result of peer {self.peer} came second and is not used"


@dataclass(frozen=True)
class DroppedReport(Report):
    """A message was dropped: at a peer one of this kind, `view` and `coordinator_term`, at the coordinator one of
    another run or peer."""

    kind: ClassVar[str] = "dropped"
    src: int
    run: str | None = None
    message: str | None = None
    view: int | None = None
    coordinator_term: int | None = None

    @property
    def line(self) -> str:
        sender = "the coordinator" if self.src == COORDINATOR else f"peer {self.src}"
        late = f"{self.message} of view {self.view}, which is over" if self.message else f"it is of run {self.run}"
        return f"ignores a late message from {sender}: {late}"


SCHEMAS: dict[str, type[Report]] = {schema.kind: schema for schema in Report.__subclasses__()}


def names(peers: Collection[int]) -> str:
    """Peers, for people."""
    ordered = [str(peer) for peer in sorted(peers)]
    together = " and ".join(filter(None, [", ".join(ordered[:-1]), ordered[-1]]))
    return f"peer {together}" if len(ordered) == 1 else f"peers {together}"
