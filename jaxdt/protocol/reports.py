"""Reports: the messages of a machine to people. A class for each kind, with its own sentence; all of them are actions.

Drivers hand them on: to the trace and a peer's log, and the coordinator's to its metrics, summary and live table.
`kind` names the schema in a trace, `fields` holds the values there, as plain data.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any, ClassVar

from jaxdt.protocol.kinds import COORDINATOR, Action

_MERGED = {"merged": True}  # a mapping whose entries stand among the report's own fields


SCHEMAS: dict[str, type["Report"]] = {}  # by kind


class Report(Action):
    """The base of every report. `kind` follows from the name of the class.
    `sentence`: the line that people read, with the fields in braces; '' if the kind and all fields are that line."""

    __slots__ = ()
    kind: ClassVar[str]
    sentence: ClassVar[str] = ""

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls.kind = re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Report")).lower()
        SCHEMAS[cls.kind] = cls

    @property
    def fields(self) -> dict[str, Any]:
        """The report as plain data. A field that is None is left out."""
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
        if self.sentence:
            return self.sentence.format_map({one.name: getattr(self, one.name) for one in dataclasses.fields(self)})
        return f"{self.kind}: " + ", ".join(f"{name} {value}" for name, value in self.fields.items())


# ---------------------------------------------------------------------------------- from the coordinator: steps


class StepReport(Report):
    """A committed step. `loss` is a mean over samples, NaN where none was measured; `gradient_norm` is the norm of the
    mean gradient; `verdict` is that of its Record. `eval_loss`: the held-out loss of the parameters after this step,
    where it was measured; `eval_losses`: those of its microbatches, by number. A coordinator that was started again
    reports the last steps of the one before once more, with a `step_s` of NaN; that of the first step that it commits
    is NaN, too, since that one began before. `tokens_per_s` is NaN where `step_s` is NaN or 0.

    Where replicas may differ this is a row: as many steps of pipelines as there are pipelines, in the order in which
    they were done, or where all replicas average together, one step of all pipelines. Rows of which the coordinator
    hears in one moment, or in the seconds after a pause of its own, were done while it was away, so their `step_s` is
    NaN. `group_size`: the mean of the groups that formed since the row before, `suspended_frac`: the share of them that
    were suspended; None if none formed."""

    step: int
    loss: float
    step_s: float
    tokens_per_s: float
    gradient_norm: float
    verdict: str
    eval_loss: float | None = None
    eval_losses: tuple[tuple[int, float], ...] | None = None
    group_size: float | None = None
    suspended_frac: float | None = None


class GroupReport(Report):
    """Group `k` of a fragment of a stage has formed in `view`: its members, and how many local steps each had done.
    `cause`, `enforced` and `suspended` are those of jaxdt.sync.matching.base.AveragingGroup."""

    stage: int
    k: int
    members: list[int]
    steps: list[int]
    cause: str
    enforced: bool
    suspended: bool
    fragment: int = 0
    view: int = 0


class StateMeanReport(Report):
    """The members of a stage hold the mean of their states for the checkpoint of `version`; averaging was begun in
    `view`. `steps`: how many local steps each member had done. With servers: the stage's server takes a snapshot for
    that checkpoint; it includes the pushes of so many local steps of each worker."""

    stage: int
    version: int
    members: list[int]
    steps: list[int]
    view: int = 0


class HeldOutMeanReport(Report):
    """The mean of the parameters of these members, after so many local steps each, is that with which the held-out loss
    of `version` rows is measured. It was begun in `view`. With servers: the parameters with their pushes of so many."""

    stage: int
    version: int
    members: list[int]
    steps: list[int]
    view: int = 0


class PipelineEndReport(Report):
    """A pipeline has done its last local step, `n_steps` in all."""

    pipeline: int
    n_steps: int
    sentence = "pipeline {pipeline} has done its last step, {n_steps} in all"


class PipelineJoinReport(Report):
    """A pipeline has come back, and continues from the states of pipeline `donor` after `n_steps` local steps.
    `admission`: of its peers. A coordinator that is started again reports the last return of each pipeline again."""

    pipeline: int
    donor: int
    n_steps: int
    admission: int
    sentence = "pipeline {pipeline} is back, with the states of pipeline {donor} after {n_steps} local steps"


class PushReport(Report):
    """A server adds the change of local step `step` - 1 of `worker`. The order of a server's reports of pushes and
    pulls is that in which it adds them and answers."""

    stage: int
    worker: int
    step: int


class PullReport(Report):
    """A server gives its parameters to `worker`, which has done `step` local steps. `clock`: the worker's, `clock_min`:
    that of the slowest worker of the stage."""

    stage: int
    worker: int
    step: int
    clock: int
    clock_min: int


class SnapshotReport(Report):
    """A server takes a snapshot of its parameters, for a held-out loss or a checkpoint of `version`, at this place of
    its log. It also adds later pushes to the snapshot: of each pipeline those up to its local step in `cut`."""

    stage: int
    version: int
    is_checkpoint: bool
    cut: list[int]


class KeptReport(Report):
    """A worker has the parameters of a checkpoint of `version` from its server, beside its own optimizer's state after
    `step` local steps."""

    stage: int
    version: int
    worker: int
    step: int


class UnequalBitsReport(Report):
    """The parameters of a replica are not bit for bit those of `reference`, but within the tolerance, as on hardware
    that rounds differently. `difference`: estimated norm of the difference over the norm. Told once for each peer."""

    version: int
    stage: int
    peer: int
    reference: int
    difference: float
    sentence = (
        "peer {peer}: after {version} steps stage {stage} is not bit for bit that of peer {reference} (relative "
        "difference {difference:.1e}), which is tolerated"
    )


class RepairReport(Report):
    """The parameters of a replica differ from those of `donor` beyond the tolerance: it takes over the donor's state of
    `version`, and the step continues then."""

    version: int
    stage: int
    peer: int
    donor: int
    difference: float
    sentence = (
        "peer {peer}: after {version} steps stage {stage} is not that of peer {donor} (relative difference "
        "{difference:.1e}), whose state it takes over"
    )


class CheckpointReport(Report):
    """The checkpoint of `version` is complete, with each part on `copies` disks or more; saving it kept a member from
    its work for up to `save_s`."""

    version: int
    save_s: float
    copies: int


class PartMissingReport(Report):
    """The disk of `peer` does not hold the part of a checkpoint, or cannot take it."""

    peer: int
    digest: str
    reason: str
    sentence = "peer {peer}: cannot give part {digest:.12} of a checkpoint: {reason}"


class NoHolderReport(Report):
    """A stage is vacant, and no connected peer holds the parts of these stages of the checkpoint of `version`: the
    run waits for a host that does."""

    version: int
    stages: list[int]

    @property
    def line(self) -> str:
        parts = f"the parts of stage {', '.join(map(str, self.stages))} of the checkpoint of {self.version} steps"
        return f"no connected peer has {parts}; the run waits"


class RollbackReport(Report):
    """The run goes from `step` back to the checkpoint of `to` steps; the steps `again` are done again."""

    step: int
    to: int
    generation: int
    again: list[int]


class DoneReport(Report):
    """A member has applied all steps. `bytes_to`: payload sent to each peer; `totals`: its counters; `bytes_from`:
    payload that a pool's server received from each worker."""

    peer: int
    bytes_to: Mapping[str, int]
    totals: Mapping[str, float] = field(metadata=_MERGED)
    bytes_from: Mapping[str, int] | None = None


class EndedReport(Report):
    """The run is over, with this exit code."""

    code: int
    reason: str


# ---------------------------------------------------------------------------------- from the coordinator: members


class ViewReport(Report):
    """A view is durable. `members`: peer -> stage; `joining`: those that lack their stage's state."""

    view: int
    members: Mapping[int, int]
    joining: list[int]


class ConnectedReport(Report):
    """A peer has said hello."""

    peer: int
    stage: int
    sentence = "peer {peer} (stage {stage}): is here, and gets ready"


class JoinRequestReport(Report):
    """A newcomer has asked to join, and got this peer id and stage."""

    peer: int
    stage: int
    sentence = "peer {peer}: asks to join, and gets stage {stage}"


class CandidateReport(Report):
    """A peer that is not a member is ready to compute, on `device`. `has_no_place`: it can only wait for the end."""

    peer: int
    device: str = ""
    has_no_place: bool = False

    @property
    def line(self) -> str:
        idle = "stays idle until the end: this run admits no new peers"
        then = idle if self.has_no_place else "joins as soon as it can"
        return f"peer {self.peer}: is ready on {self.device}, and {then}"


class WaitingReport(Report):
    """The first view waits for these peers of the plan."""

    missing: list[int]

    @property
    def line(self) -> str:
        return f"waiting for {names(self.missing)} to get ready"


class StillWaitingReport(Report):
    """The run has waited for `waited_s`.

    - `missing`: peers of the plan that are not ready; `absent`: those among them that are not connected.
    - `stages`: have no peer.
    - `refusal`: who was refused last meanwhile, and why; '' for none."""

    missing: list[int]
    absent: list[int]
    stages: list[int]
    refusal: str
    waited_s: float


class LostReport(Report):
    """A member is taken for lost."""

    peer: int
    reason: str


class FailedReport(Report):
    """A peer that is no member cannot continue: its process has ended, and the run continues without it."""

    peer: int
    reason: str


class OverdueReport(Report):
    """A Work takes far longer than its like. If it `blocks` the run, the run continues without the peer, provided that
    its stage has another."""

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


class SaveFailedReport(Report):
    """A member could not write its part of the checkpoint of `version`, for the `n_in_a_row`th time in a row."""

    peer: int
    version: int
    reason: str
    n_in_a_row: int
    sentence = (
        "peer {peer}: could not write its part of the checkpoint of {version} steps ({n_in_a_row} in a row have "
        "failed): {reason}"
    )


class ReturnedReport(Report):
    """The last replica of a stage was silent, and is heard again."""

    peer: int
    sentence = "peer {peer}: is heard again"


class VacantReport(Report):
    """A stage has no replica that is there. The run waits for the silent peers `waits_for`, which may hold its state,
    for at most `waits_s`. If they do not come back, it waits for a newcomer, goes back to `checkpoint` and does the
    steps `at_stake` again."""

    stage: int
    reason: str
    checkpoint: int
    at_stake: list[int]
    waits_for: list[int]
    waits_s: float


class LeavingReport(Report):
    """A member wants to leave; it stays for the time being if it is the last replica of its stage."""

    peer: int
    last_of_its_stage: bool


class MoveReport(Report):
    """A member will leave `stage` between two steps and come back for `to_stage`."""

    peer: int
    stage: int
    to_stage: int
    sentence = "peer {peer}: moves from stage {stage} to stage {to_stage}, which needs it more"


class RestartedReport(Report):
    """A coordinator continues where an earlier one has died, which may not have reported its last view."""

    coordinator_term: int
    view: int
    step: int
    members: list[int]
    sentence = "a coordinator was started again: the run continues at step {step} with the members of view {view}"


class PredictionReport(Report):
    """The predicted seconds of a step, with the codecs of the run's plan and without them; or why there are none."""

    step_s: float | None = None
    step_s_uncompressed: float | None = None
    problem: str | None = None

    @property
    def line(self) -> str:
        return Report.line.__get__(self) if self.problem is None else f"no prediction of the step time: {self.problem}"


class OperatorReport(Report):
    """An operator has asked for something, and it is being done."""

    command: str
    answer: str
    peer: int | None = None


class SteppedDownReport(Report):
    """This coordinator ends, and the run continues without it."""

    reason: str
    sentence = "{reason}"


class PausedReport(Report):
    """This coordinator did not run for `paused_s`. It judges no peer until it has read what came meanwhile: for
    `patience_s`."""

    paused_s: float
    patience_s: float
    sentence = "this process stood still for {paused_s} s, so no peer counts as lost for {patience_s:.0f} s"


class HeartbeatReport(Report):
    """A peer's heartbeat; `status`: its counters; `bytes_to`: payload sent to each peer, None in most heartbeats;
    `bytes_from`: payload that a pool's server received from each worker; `worker_cpu_s`: the processor time of each
    of its workers, in seconds."""

    peer: int
    status: Mapping[str, float] = field(metadata=_MERGED)
    bytes_to: Mapping[str, int] | None = None
    bytes_from: Mapping[str, int] | None = None
    worker_cpu_s: Mapping[int, float] | None = None


# ------------------------------------------------------------------------------------------------- from a peer


class AsksToLeaveReport(Report):
    """This peer is in the run, was asked to leave it, and asks the coordinator when it may go."""

    sentence = (
        "asks to leave between two steps; a second interrupt ends it at once, and may cost the run the steps "
        "since its last checkpoint"
    )


class PreparingReport(Report):
    """The task of this process before it can compute, for people."""

    what: str
    sentence = "{what}"


class ReadyReport(Report):
    """This process is ready to compute, on `device`: platform, number and kind."""

    device: str
    sentence = "is ready on {device}; waits until the run takes it in"


class AdoptedReport(Report):
    """This peer has adopted a view. `back_to`: the steps of the checkpoint to which the run goes back with it."""

    view: int
    members: list[int]
    back_to: int | None = None

    @property
    def line(self) -> str:
        back = "" if self.back_to is None else f"; goes back to the checkpoint of {self.back_to} steps"
        return f"is in view {self.view}, with {names(self.members)}{back}"


class NoteReport(Report):
    """The coordinator's note to this peer: the reason why the run does not continue; '' once it continues."""

    text: str

    @property
    def line(self) -> str:
        return self.text or "the run continues"


class EvictedReport(Report):
    """The run continues without this peer since `view`."""

    view: int
    sentence = "is not in view {view}: the run continues without it"


class MovingReport(Report):
    """This peer becomes a newcomer to another stage."""

    to_stage: int
    sentence = "moves to stage {to_stage}"


class StillReadyReport(Report):
    """This peer has been ready for `waited_s`, and the run has not taken it in yet. `is_heard`: the coordinator is
    there."""

    waited_s: float
    is_heard: bool = True
    sentence = "has waited {waited_s:.0f} s until the run takes it in; the coordinator says for whom the run waits"


class UnreachedReport(Report):
    """This process has not reached the coordinator yet, and keeps trying for `left_s` seconds."""

    left_s: float


class OutageReport(Report):
    """The coordinator is silent; this peer waits for it up to `waits_s`."""

    coordinator_silent_s: float
    waits_s: float
    sentence = (
        "the coordinator has been silent for {coordinator_silent_s:.1f} s; waits for it for up to {waits_s:.0f} s"
    )


class DownloadReport(Report):
    """A newcomer has got the state of its stage from its donors."""

    version: int
    bytes: int
    seconds: float
    donors: list[int]

    @property
    def line(self) -> str:
        size = f"{self.bytes / 1e6:.1f} MB in {self.seconds:.2f} s"
        return f"has the state of step {self.version} from {names(self.donors)}: {size}"


class UsageReport(Report):
    """The processor seconds that this process has used when it has applied the update of `step`."""

    step: int
    cpu_s: float


class WorkerBeginsReport(Report):
    """A pool's worker begins its first Work for this server, of `stage`."""

    server: int
    stage: int
    sentence = "computes for peer {server}, stage {stage}"


class WorkerProgressReport(Report):
    """A pool's worker has the parameters of `version`. Since it came it has handed in the gradients of `n_handed_in`
    microbatches, of `n_of_stage` that all of its stage have computed in those steps."""

    version: int
    stage: int
    n_handed_in: int
    n_of_stage: int


# -------------------------------------------------------------------------------------------------- from either


class WriteFailedReport(Report):
    """A file that is for people only, such as a trace, could not be written; the process continues without it."""

    reason: str
    sentence = "could not be written, and the run continues without it: {reason}"


class RefusedReport(Report):
    """A connection, a peer or a request was refused."""

    reason: str
    sentence = "refused: {reason}"


class WorkerPlacedReport(Report):
    """The coordinator has told a pool's worker to compute for `server`, of `stage`."""

    worker: int
    stage: int
    server: int
    sentence = "worker {worker}: comes to compute for peer {server} (stage {stage}), and gets ready"


class WorkerHereReport(Report):
    """The coordinator hears that a server has let a pool's worker in; `is_back`: after the worker was lost."""

    worker: int
    server: int
    is_back: bool

    @property
    def line(self) -> str:
        return f"worker {self.worker}: {'is back, and ' if self.is_back else ''}computes for peer {self.server}"


class WorkerGoneReport(Report):
    """The coordinator hears that a server has lost a pool's worker, or has put it out; `n_redone` microbatches are
    computed again."""

    worker: int
    server: int
    reason: str
    n_redone: int

    @property
    def line(self) -> str:
        again = f"; {self.n_redone} microbatches that it had not handed in are computed again" if self.n_redone else ""
        return f"worker {self.worker}: is lost to peer {self.server} ({self.reason}){again}"


class WorkerJoinedReport(Report):
    """A server of `stage` has let a pool's worker in, while its parameters had seen `version` updates."""

    stage: int
    worker: int
    version: int
    sentence = "lets worker {worker} compute for it, with the parameters of {version} steps"


class WorkerLostReport(Report):
    """Work that a pool's worker has not contributed does not count any more: `n_redone` microbatches are computed
    again. With `begins_anew` the worker stays, under another admission."""

    stage: int
    worker: int
    reason: str
    n_redone: int
    begins_anew: bool = False

    @property
    def line(self) -> str:
        what = "starts again" if self.begins_anew else "is lost"
        return f"worker {self.worker} {what} ({self.reason}); {self.n_redone} microbatches are computed again"


class TasksStolenReport(Report):
    """A pool's server, whose clients had little left to do, takes so many microbatches of another server of its
    stage, `src`."""

    step: int
    stage: int
    src: int
    n_microbatches: int


class ReroutedReport(Report):
    """A router has another replica do a forward too, which waits at peer `src` in or behind Work that is overdue."""

    step: int
    stage: int
    microbatch: int
    src: int
    dst: int

    @property
    def line(self) -> str:
        where = f"peer {self.src} for stage {self.stage}: peer {self.dst} computes it, too"
        return f"microbatch {self.microbatch} of step {self.step + 1} waits too long at {where}"


class LateResultReport(Report):
    """Two peers of `stage` have done the same forward, and that of `peer` came second: it is not used."""

    step: int
    stage: int
    microbatch: int
    peer: int

    @property
    def line(self) -> str:
        what = f"microbatch {self.microbatch} of step {self.step + 1}, stage {self.stage}"
        return f"{what}: the result of peer {self.peer} came second and is not used"


class DroppedReport(Report):
    """A message was dropped: at a peer one of this kind, `view` and `coordinator_term`, at the coordinator one of
    another run or peer."""

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


def names(peers: Collection[int]) -> str:
    """Peers, for people."""
    ordered = [str(peer) for peer in sorted(peers)]
    together = " and ".join(filter(None, [", ".join(ordered[:-1]), ordered[-1]]))
    return f"peer {together}" if len(ordered) == 1 else f"peers {together}"
