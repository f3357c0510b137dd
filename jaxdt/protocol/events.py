"""The vocabulary of the machines: tensor keys, messages between peers, events in, actions out. All frozen.

A machine is driven by `handle(now_s, event) -> list of actions`. It names tensors by key and never holds one: the
driver (runtime or simulator) keeps them, moves them beside the messages that name them and runs the Work.

  messages  travel between peers, each under a Header; a message that carries a tensor names its key
  events    go into a machine: from the driver (Received, Ran) or from another machine of the same peer (Updated)
  actions   come out: for the driver (Send, Run, ...); an event among them goes to the peer's other machines
"""

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxdt.protocol.kinds import COORDINATOR as COORDINATOR
from jaxdt.protocol.kinds import Action, Event, InternalEvent, Message
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.frozen_dataclass import frozen_dataclass
from jaxdt.run.work import Work, WorkKind

TEMPORARY_IDS = 1 << 40  # from here on: ids under which newcomers ask to join
PEER_IDS = 1 << 32  # peer ids are below; a temporary id modulo this is the id of the peer that asks, if it has one
VIEWS_PER_TERM = 1_000_000  # the views of each coordinator have numbers of their own, so many apart
OPERATOR_IDS = 1 << 60  # from here on: ids under which operators ask for something

# What a machine answers to an event; an event among them goes to the peer's other machines.
Actions: TypeAlias = list[Action | Event]

# Priorities on a link: lower goes first, and overtakes between two chunks.
URGENT, BULK = 0, 1


# ---------------------------------------------------------------------------------------------------- work and keys


@frozen_dataclass(order=True)
class Key:
    """A boundary tensor: what enters `stage` for one microbatch. kind "act": its input activation; "grad": the gradient
    of that input; "eval": the input of a held-out microbatch."""

    kind: str
    step: int
    stage: int
    microbatch: int


@frozen_dataclass(order=True)
class SliceKey:
    """Elements lo..hi-1 of the vector of a round. `src` is the member whose contribution it is, None the sum."""

    round: RoundId
    lo: int
    hi: int
    src: int | None = None

    def __str__(self) -> str:
        return f"{self.round}[{self.lo}:{self.hi}]{'' if self.src is None else f' of p{self.src}'}"


@frozen_dataclass(order=True)
class StateKey:
    """Words lo..hi-1 of a stage's parameters and optimizer state at `version`, as one vector of 4-byte words. With
    `part`: words lo..hi-1 of the checkpoint part of this digest, as one stream."""

    version: int
    lo: int
    hi: int
    part: str = ""


# ----------------------------------------------------------------------------------------------------- checkpoints


@frozen_dataclass
class Part:
    """The state of `stage` after `version` updates, as it stands on disks: the digest of its content, its length in
    4-byte words, and the ids of the disks that hold it."""

    version: int
    stage: int
    digest: str
    n_words: int
    disks: tuple[str, ...] = ()


@frozen_dataclass
class Checkpoint:
    """A complete checkpoint: the parts of all stages, in their order, after `version` updates in `generation`.
    `n_reseeds`: how often the run continued with other samples. Without parts it is version 0, the initial state,
    which every peer can draw. `mean_of`: where replicas may differ, of which replicas each stage's part is the mean, as
    (peer, its local steps)."""

    version: int = 0
    generation: int = 0
    parts: tuple[Part, ...] = ()
    n_reseeds: int = 0
    mean_of: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def n_copies(self) -> int:
        """The least number of disks on which a part is."""
        return min((len(part.disks) for part in self.parts), default=0)


# -------------------------------------------------------------------------------------------------------- messages


@frozen_dataclass
class Header:
    """Stands on every message. A message of another run, another generation or an old view is dropped and counted; one
    of a newer view is held. `coordinator_term`: the coordinator's own, or the highest that a peer has heard of; peers
    drop what a coordinator of a lower term says."""

    run: str
    generation: int
    view: int
    src: int
    coordinator_term: int = 0


@frozen_dataclass
class Member:
    """One member of a view: `admission` grows each time the coordinator admits this peer_id, and `process` is the one
    of its processes that was admitted. `address` is host:port. It computes and averages from `first_step` on. Members
    with an equal `disk` see one another's files."""

    peer: int
    stage: int
    admission: int
    address: str = ""
    process: int = 0
    first_step: int = 0
    disk: str = ""


@frozen_dataclass
class StateName:
    """Names parameters and optimizer state: their generation, how many updates they have seen, and the rounds of the
    last update (none where the generation begins). Equal names mean equal states (step protocol, Sec. 6.2). `donor`:
    where replicas may differ, the replica whose state it was after `version` local steps."""

    generation: int
    version: int
    rounds: tuple[RoundId, ...] = ()
    donor: int | None = None


@frozen_dataclass
class Record:
    """A committed step of a generation. `sq_norm`: squared norm of the summed gradient over all groups. `verdict`:
    "apply", or "skip" if that norm is not finite. `checkpoint`: an operator wants a checkpoint after this step."""

    step: int
    rounds: tuple[RoundId, ...]
    sq_norm: float
    n_samples: int
    verdict: str
    generation: int = 0
    checkpoint: bool = False


@frozen_dataclass
class PipelineJoin:
    """Where replicas may differ: a pipeline has come back, and continues from the states that pipeline `donor` had
    after `step` local steps. `admission`: of its peers; `n_rows`: rows that were done when it was whole."""

    pipeline: int
    donor: int
    step: int
    admission: int
    n_rows: int


@dataclass(frozen=True)
class View(Message):
    """Numbered membership.

    stage_views  stage_views[s] is the view in which stage s last changed; in a pool all change with each view
    n_committed  steps that are committed
    records      the last committed ones
    rolled_back  a generation begins with this view: every member goes back to the checkpoint of n_committed first
    results      rounds of steps under way whose whole result some members hold, with those members. These rounds stay;
                 all other rounds of groups that changed start again
    joining      members that lack the state of n_committed. They get it, and the results of steps under way, from the
                 other members of their stage; where replicas may differ, that of one pipeline
    parts        of the checkpoint with which this generation began
    n_reseeds    how often the run continued with other samples, since a gradient was not finite
    continued    the last view of each earlier coordinator that this one follows, where it made one. A coordinator
                 that was superseded may have made more, of which its successor knows nothing
    joins        where replicas may differ, the last return of each pipeline that has come back
    """

    __slots__ = ("__dict__",)  # for what is looked up in it

    number: int
    coordinator_term: int
    generation: int
    members: tuple[Member, ...]
    stage_views: tuple[int, ...]
    n_committed: int
    records: tuple[Record, ...] = ()
    rolled_back: bool = False
    results: tuple[tuple[RoundId, tuple[int, ...]], ...] = ()
    joining: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    n_reseeds: int = 0
    continued: tuple[int, ...] = ()
    joins: tuple[PipelineJoin, ...] = ()

    def continues(self, number: int) -> bool:
        """Whether the view of this number is among those that this one continues from."""
        lasts = (*self.continued, self.number)
        return any(number <= last and _term_of(number) == _term_of(last) for last in lasts)

    def next_number(self, coordinator_term: int) -> tuple[int, tuple[int, ...]]:
        """The number of the next view, made in this term, and what it says that it continues. Numbers of different
        coordinators are different, also if one of them was superseded and does not know it."""
        first = (coordinator_term - 1) * VIEWS_PER_TERM + 1
        if self.number >= first:
            return self.number + 1, self.continued
        return first, (*self.continued, self.number)

    @functools.cached_property
    def by_peer(self) -> Mapping[int, Member]:
        """The members, in their order."""
        return {member.peer: member for member in self.members}

    @functools.cached_property
    def _by_stage(self) -> Mapping[int, list[Member]]:
        """Looked up in every step, while views are few."""
        found: defaultdict[int, list[Member]] = defaultdict(list)
        for member in self.members:
            found[member.stage].append(member)
        return found

    def rounds_of(self, step: int) -> tuple[RoundId, ...]:
        """The rounds of a committed step, if its record is among `records`."""
        return next((record.rounds for record in self.records if record.step == step), ())

    def stage_peers(self, stage: int) -> tuple[int, ...]:
        return tuple([member.peer for member in self._by_stage[stage]])

    def working(self, stage: int, step: int) -> tuple[int, ...]:
        """The members of a stage that compute and average in this step: those that still join do not."""
        return tuple([member.peer for member in self._by_stage[stage] if member.first_step <= step])


def _term_of(view_number: int) -> int:
    return (view_number - 1) // VIEWS_PER_TERM


class Hello(Message):
    """A peer is here, listens at `address`, and runs the config and plan of this fingerprint. `process` tells two
    processes of one peer apart. `disk`: the id of the disk on which it keeps its parts of checkpoints."""

    peer: int
    stage: int
    fingerprint: str
    address: str
    process: int = 0
    disk: str = ""


class Join(Message):
    """A process, under a temporary id -> coordinator: a newcomer asks for a stage, and for a peer id if it has none
    from a certificate; one that was started as `peer` asks whether it may be that peer. `where` it runs, for people.
    `is_new`: it does not know the run, and is told its config and plan. `is_worker`: it wants to be a pool's worker,
    and asks for a server. `gbps`: servers, and what it has measured of its links to them (1e9 bit/s), if it was asked
    to."""

    peer: int | None = None
    where: str = ""
    is_new: bool = False
    is_worker: bool = False
    gbps: tuple[tuple[int, float], ...] | None = None


class Welcome(Message):
    """Coordinator -> process, the answer to Join: the run, its peer id and stage, and for a newcomer `job`: the run's
    `config` and `plan` as JSON, and how many steps are committed. Ended is the other answer. `server`: for whom a
    pool's worker computes, at `server_address`; None while its stage has no server that is here. `servers`: the
    ids and addresses of those to which the worker is to measure its link, and then to ask again; it has no stage
    before."""

    run: str
    peer: int
    stage: int
    fingerprint: str
    job: dict[str, str]
    n_committed: int = 0
    server: int | None = None
    server_address: str = ""
    servers: tuple[tuple[int, str], ...] = ()


class Profiled(Message):
    """Peer -> coordinator: this process is ready to compute. `seconds` of its stage functions per kind of Work, the
    version of its parameters, and on what it computes, for people. `state`: the state that it holds of the run, if it
    has been a member; a joining member says it as soon as it has fetched the state."""

    seconds: dict[str, float]
    version: int
    process: int = 0
    device: str = ""
    state: StateName | None = None


class Reassign(Message):
    """Coordinator -> peer that is no member: come back as a newcomer to this stage."""

    stage: int


@frozen_dataclass
class WorkerStatus:
    """The facts that a pool's server knows about one of its workers: for how many microbatches the worker's gradient
    was counted, for how long the server has heard nothing from the worker, and the processor time of its process."""

    worker: int
    n_counted: int
    silent_s: float
    cpu_s: float = 0.0


class Heartbeat(Message):
    """Peer -> coordinator, on the control channel. `status` is for people, but for FETCHED. `bytes_to`: payload sent to
    each peer since the link was made; None in most heartbeats. A pool's server adds its `workers`, and the payload that
    it received from each worker that it ever had (`bytes_from`), since only it counts these bytes."""

    count: int
    status: dict[str, float]
    bytes_to: dict[str, int] | None = None
    bytes_from: dict[str, int] = field(default_factory=dict[str, int])
    workers: tuple[WorkerStatus, ...] = ()


class HeartbeatAck(Message):
    """Coordinator -> peer, the answer to a heartbeat; now_s is the coordinator's clock. `note`: why the run does not go
    on, or this peer does not leave, for people who look at its log; '' if there is no reason."""

    count: int
    now_s: float
    note: str = ""


class Grant(Message):
    """Router -> first peer of a route: begin `microbatch`, with a forward or an evaluation (kind). route[s] is the peer
    of stage s; it is chosen beforehand, so that no hop waits for a choice. NO_PEER stands where nothing has to be done
    (again). The stages in `regenerate` make lost tensors again, and count nothing."""

    step: int
    kind: WorkKind
    microbatch: int
    route: tuple[int, ...]
    regenerate: tuple[int, ...] = ()


class Resend(Message):
    """Router -> holder of a boundary tensor: send it again, to the peer of the route."""

    key: Key
    route: tuple[int, ...]
    regenerate: tuple[int, ...] = ()


class Reroute(Message):
    """Peer -> the microbatch's router: its forward waits here, in or behind Work that is overdue. Have another replica
    of `stage` do it too; the result that comes first is used. The input came along `route`."""

    step: int
    stage: int
    microbatch: int
    route: tuple[int, ...]


class Inventory(Message):
    """Member -> all, after a view in mid-step: what it counted of the step (kind and microbatch), and the microbatches
    whose output and input gradient it still keeps."""

    step: int
    counted: tuple[tuple[str, int], ...]
    kept: tuple[int, ...]


class FetchResult(Message):
    """Member -> holder of a round's whole result: asks for it."""

    round: RoundId


class Progress(Message):
    """Peer -> the microbatch's router, and to the replicas of its stage if the Work counts there: the Work is done,
    `gap_s` after the Work before it at this peer."""

    step: int
    kind: WorkKind
    stage: int
    microbatch: int
    gap_s: float


class Fetch(Message):
    """Joining member -> another member of its stage: asks for a slice of its state. Any member -> a member whose disk
    holds a part of a checkpoint: asks for a slice of that part."""

    key: StateKey


class State(Message):
    """The answer to Fetch, with the words and their CRC-32 as one more word."""

    key: StateKey


class Load(Message):
    """Member -> coordinator, every few steps. `queue`: the mean length of its queue over whole steps, Work that runs
    included; `busy`: the share of that time in which Work ran."""

    queue: float
    busy: float


class Leaving(Message):
    """Peer -> coordinator: asks to leave between two steps; from one that is no member yet: it has left."""


class Boundary(Message):
    """Peer -> peer of a neighbouring stage: carries the tensor `key`. `route` and `regenerate` are as in Grant; both
    are empty where the plan gives the route."""

    key: Key
    route: tuple[int, ...] = ()
    regenerate: tuple[int, ...] = ()


@frozen_dataclass
class Tally:
    """The sum of losses and the number of samples of training microbatches."""

    loss_sum: float = 0.0
    n_losses: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.loss_sum + other.loss_sum, self.n_losses + other.n_losses)


class Shard(Message):
    """Member -> owner: the member's part of slice `key`, with the contributions that its vector holds and their
    losses."""

    key: SliceKey
    items: tuple[tuple[int, int], ...]
    n_samples: int
    tally: Tally = Tally()


class Reduced(Message):
    """Owner -> members, or holder -> one who takes a result: the sum of slice `key`, its cover (the members, and the
    contributions of each), their losses, its digest and squared norm."""

    key: SliceKey
    cover: tuple[tuple[int, ...], tuple[tuple[tuple[int, int], ...], ...]]
    n_samples: int
    digest: int
    sq_norm: float
    tally: Tally = Tally()


@frozen_dataclass
class GroupResult:
    """One group's whole result as a member holds it."""

    round: RoundId
    digest: int
    sq_norm: float
    n_samples: int
    tally: Tally = Tally()


@frozen_dataclass
class StateDigest:
    """The numbers that show whether two replicas of `stage` hold equal parameters and optimizer state at `version`: a
    digest of the whole state, the norm of the parameters, and sums of them (jaxdt.membership.state_check)."""

    stage: int
    version: int
    digest: int
    norm: float
    sums: tuple[float, ...]


class Prepared(Message):
    """Member -> coordinator: I hold the whole result of each of my groups. `state`: that of version `step`, where
    replicas compare it."""

    step: int
    admission: int
    results: tuple[GroupResult, ...]
    state: StateDigest | None = None


class Repair(Message):
    """Coordinator -> member: your state of `version`, with this digest, is not that of replica `donor`: take over
    the donor's, and then say `Prepared` again. The donor itself only makes its digest again."""

    version: int
    digest: int
    donor: int


class Committed(Message):
    """Coordinator -> all: the record is durable, apply it."""

    record: Record


# Where replicas may differ. A local step is the update of one replica by its own gradient; a pipeline's step is that of
# its replicas.


class StepDone(Message):
    """Last stage's member -> coordinator: its pipeline has done local step `step`. `sq_norm`: squared norm of the
    summed gradient over all stages, None where it is not known."""

    step: int
    n_samples: int
    tally: Tally
    sq_norm: float | None = None


class NotFinite(Message):
    """Member -> coordinator: the gradient of local step `step` is not finite, so there was no update."""

    step: int


class StepNorm(Message):
    """Member -> members of its pipeline: squared norm of its summed gradient of local step `step`."""

    step: int
    sq_norm: float


class WantsGroup(Message):
    """Member -> coordinator: it has done `step` local steps, and wants a group to average this fragment of its
    parameters with."""

    step: int
    fragment: int = 0


class GroupFormed(Message):
    """Coordinator -> members of an averaging group: average with one another. round.number counts the groups of the
    stage's fragment; a round of kind STATE averages the whole state, for a checkpoint or as the result. When some
    members are lost, the rest average in another attempt; or, if some of them hold the result of an earlier one,
    these are the `holders` from whom the others fetch it. `steps`: after how many local steps each member wanted
    the group; () for a snapshot, to which each member contributes when it can.

    Coordinator -> server: take a snapshot of the parameters, for a held-out loss or a checkpoint; the server is the
    only member. Coordinator -> worker: fetch it from that holder, for a checkpoint."""

    round: RoundId
    members: tuple[int, ...]
    holders: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


class WantsParameters(Message):
    """Worker -> server of its stage: the worker has pushed the changes of `step` local steps, and waits for the
    server's parameters, in `round`. `is_last`: it does no further step, and waits for the pushes of all others."""

    round: RoundId
    step: int
    is_last: bool


class SnapshotCut(Message):
    """Server of the first stage -> server of another one: the snapshot `round` includes the pushes of each pipeline up
    to this local step of it."""

    round: RoundId
    steps: tuple[int, ...]


class CutTaken(Message):
    """The answer to SnapshotCut: the server adds no later push to the snapshot `round`."""

    round: RoundId


class ResultHeld(Message):
    """Member -> coordinator: the whole result of the round is here, with this digest. `steps`: after how many local
    steps each of its members contributed to it; from a server, after how many each of its workers did."""

    round: RoundId
    digest: int
    steps: tuple[int, ...]


class GroupClosed(Message):
    """Coordinator -> members of a group: all of them hold the result and no longer need to fetch it."""

    round: RoundId


class EvaluateMean(Message):
    """coordinator -> members of a pipeline: measure the held-out loss with the mean that is the result of `round`, a
    sum over `n_members` replicas, or with the servers' snapshot in it."""

    round: RoundId
    n_members: int


class MeanEvaluated(Message):
    """last stage -> coordinator: the losses of all held-out microbatches with the mean of `version`, as an EvaluateMean
    has asked for. They are written as in HeldOutMeasured."""

    version: int
    losses: tuple[tuple[int, int, float], ...]


class HeldOutMeasured(Message):
    """last stage -> coordinator, where replicas are equal: microbatch, samples and sum of losses of held-out
    microbatches that this member has measured with the parameters of `version`. It is said again in every view."""

    version: int
    losses: tuple[tuple[int, int, float], ...]


class ShareDone(Message):
    """First stage's member -> coordinator: its pipeline has done its share of the run's steps, `step` local steps, and
    could begin another one."""

    step: int


class Continue(Message):
    """Coordinator -> first stage's member, an answer to ShareDone: other pipelines are slower, so continue up to
    `until` local steps."""

    until: int


class EndOfSteps(Message):
    """Coordinator -> first stage's member: begin no further step."""


class LastStep(Message):
    """First stage's member -> members of its pipeline: the pipeline does `n_steps` local steps in all."""

    n_steps: int


class DonorWaits(Message):
    """First stage's member of a pipeline -> peers of a pipeline that comes back: this pipeline has done `version` local
    steps at its first stage, and begins no further step before those peers have the states of its stages."""

    version: int


class Finished(Message):
    """Member -> coordinator: it has done the last of its local steps, `n_steps` in all, and averaged after it."""

    n_steps: int


class StepsCounted(Message):
    """Coordinator -> all: rows of the metrics are durable. `n_steps`: the local steps of each pipeline in all rows so
    far. A member need not repeat its messages about these steps."""

    n_steps: tuple[int, ...]


class AskReplicaState(Message):
    """Restarted coordinator -> member: say which groups you know, and send each unanswered message again."""


@frozen_dataclass
class KnownGroup:
    """A group that a member was told of: the attempt, its members, and after how many local steps each contributes (()
    where the steps are not known). `is_over`: the member holds nothing of the group any more."""

    round: RoundId
    members: tuple[int, ...]
    steps: tuple[int, ...]
    is_over: bool


class ReplicaState(Message):
    """Member -> coordinator, the answer to AskReplicaState; `n_said` messages follow, which the member sends again.
    `groups`: all attempts of the groups that are not over, and for each name the last group that is over. `n_steps`:
    the member's local steps in all, None if that number is not known."""

    groups: tuple[KnownGroup, ...]
    n_steps: int | None
    n_said: int


# Messages of a pool. A worker is outside of the views; a server of its stage knows it by its peer id and admission.


class ProbeLink(Message):
    """A process that will be a pool worker, under a temporary id -> server: how fast is the link? It wants an answer
    with `n_bytes` of padding; its own is there for its size, too."""

    number: int
    n_bytes: int
    padding: str = ""


class LinkProbed(Message):
    """Server -> that process: the answer to the probe of this number."""

    number: int
    padding: str = ""


class Enlist(Message):
    """Pool worker -> server, every heartbeat: it is here, and runs the config and plan of this fingerprint. `process`
    tells two processes of one worker apart; `cpu_s`: the processor time that it has used, in seconds."""

    process: int
    fingerprint: str
    cpu_s: float = 0.0


class Enlisted(Message):
    """Server -> pool worker, the answer to Enlist, and again with each version: the parameters have seen `version`
    updates, and samples are drawn for `n_reseeds`. The admission grows each time that the server admits the worker;
    work that the worker has done under another admission, and not contributed, is void. `process`: the process that is
    admitted, since an answer to the worker's earlier process may come late."""

    admission: int
    version: int
    n_reseeds: int
    process: int


class WorkerHere(Message):
    """Server -> coordinator, for people: a pool worker is admitted."""

    worker: int


class WorkerGone(Message):
    """Server -> coordinator, for people: a pool worker is lost or evicted, and `n_redone` microbatches, which it had
    done and not contributed, are computed again."""

    worker: int
    reason: str
    n_redone: int


class WantsTasks(Message):
    """Pool worker -> server: it holds the parameters of `version`, and takes up to `n_tasks` leases at a time."""

    admission: int
    version: int
    n_tasks: int


class TaskLease(Message):
    """Server -> pool worker: do Work of this kind of a microbatch. With `with_forward` the forward is done first, since
    this worker lacks its result. A tensor that the worker has not computed itself comes as Boundary, before or after
    the lease. The input gradient of a task `is_redo` is not needed."""

    admission: int
    number: int
    step: int
    kind: WorkKind
    microbatch: int
    with_forward: bool = False
    is_redo: bool = False


class TaskDone(Message):
    """Pool worker -> server: the task of lease `number` is done, and nothing has to be passed on. It took `work_s` to
    compute, and `held_s` from the time when all its inputs were there."""

    admission: int
    step: int
    number: int
    n_samples: int
    loss_sum: float | None
    work_s: float
    held_s: float


class TaskOutput(Message):
    """Pool worker -> server: the task of lease `number` is done; the tensor `key` is for a neighbour stage. The seconds
    are those of TaskDone."""

    key: Key
    admission: int
    number: int
    n_samples: int
    loss_sum: float | None
    work_s: float
    held_s: float


class StealRequest(Message):
    """Server -> another server of its stage: this one's clients have little left to do of `step`, and could do up to
    `n_max` of the other's microbatches. `clients`: for each of them, the seconds of work that it has yet to do and the
    seconds that it takes for a microbatch."""

    step: int
    n_max: int
    clients: tuple[tuple[float, float], ...]


class StealOffer(Message):
    """Server -> the server that asked: these tasks of `step`, each as kind of Work, microbatch and `is_redo` (no
    peer waits for its input gradient), are for the other to do. `clients`: of the sender, as in StealRequest, if the
    other takes them all."""

    step: int
    tasks: tuple[tuple[WorkKind, int, bool], ...]
    clients: tuple[tuple[float, float], ...]


class StealReply(Message):
    """The answer to a StealOffer: its sender takes the first `n_taken` tasks, whose tensors come as Boundary."""

    step: int
    n_taken: int


class ContributionWanted(Message):
    """Server -> pool worker: send what has been accumulated, as the vectors of these rounds, one for each sync
    group."""

    admission: int
    rounds: tuple[RoundId, ...]


class Saved(Message):
    """Member -> coordinator: the part of the checkpoint of `version` for `stage`, with this digest and length, is
    durable on the member's disk; for `blocked_s` the member did nothing else."""

    version: int
    stage: int
    blocked_s: float = 0.0
    digest: str = ""
    n_words: int = 0


class CopyPart(Message):
    """Coordinator -> member: fetch this part of a checkpoint from a member whose disk holds it, and keep it."""

    part: Part


class PartMissing(Message):
    """Member -> the member that asked for a part, and the coordinator: this member's disk does not hold the part, or
    cannot hold it."""

    digest: str
    reason: str


class Failed(Message):
    """Peer -> coordinator: this peer cannot continue, for something that a person has to mend, and its process ends."""

    reason: str


class SaveFailed(Message):
    """Member -> coordinator: this stage's part of the checkpoint of `version` could not be written. The member
    continues, and tries again with the next checkpoint."""

    version: int
    reason: str


class Overdue(Message):
    """Member -> coordinator: `work` has run on its device for `seconds`, and Work of its kind takes at most
    `deadline_s`. `blocks`: the run waits for this Work, or it has taken several deadlines."""

    work: str
    seconds: float
    deadline_s: float
    blocks: bool = False


class CheckpointComplete(Message):
    """Coordinator -> all: every stage's part of the checkpoint is durable on enough disks."""

    checkpoint: Checkpoint


class Done(Message):
    """Member -> coordinator: all steps are applied; totals for the summary. `bytes_from`: as in Heartbeat."""

    version: int
    totals: dict[str, float]
    bytes_to: dict[str, int]
    bytes_from: dict[str, int] = field(default_factory=dict[str, int])


class Suspect(Message):
    """Member -> coordinator: `peer` has been out of my reach for longer than its deadline. Donor -> coordinator and the
    newcomer `peer`: the newcomer asks for words that this stage's state does not have."""

    peer: int
    reason: str


class OperatorRequest(Message):
    """Operator -> coordinator: one of the commands in jaxdt.membership.operations, some of them for a peer."""

    command: str
    peer: int | None = None


class OperatorAnswer(Message):
    """Coordinator -> operator: the request is accepted or refused. `text`: one line for people, or JSON for
    "status"."""

    accepted: bool
    text: str


class Drain(Message):
    """Coordinator -> member: leave the run as if you had been asked on your host."""


class Revoked(Message):
    """Coordinator -> all: the certificates of these peers do not count any more."""

    peers: tuple[int, ...]


class CannotReach(Message):
    """Member -> coordinator: messages wait here for `peer`, and neither of the two can dial the other. Unlike a link
    that broke, this does not mend itself."""

    peer: int
    reason: str


class Ended(Message):
    """Coordinator -> all: the run is over, with this exit code and one line for people. Server -> pool worker: the
    same, or the server does not let this `process` in; None means any process that hears it."""

    code: int
    reason: str
    process: int | None = None


# ----------------------------------------------------------------------------------------------------------- events


class Received(Event):
    """A message from header.src arrived. `tensor` is the driver's: the tensor that came with the message, if it names
    one. No machine looks at it; a peer that accepts the message hands it back with StoreTensor."""

    header: Header
    body: Message
    tensor: Any = field(default=None, compare=False, repr=False)


class Ran(Event):
    """The Work of an earlier Run is done, which began at started_s. `values`: loss_sum, n_samples and EXPERTS where it
    has them."""

    work: Work
    started_s: float
    seconds: float
    values: dict[str, float] = field(default_factory=dict[str, float])


class Summed(Event):
    """The driver added up a slice as Sum asked."""

    key: SliceKey
    digest: int
    sq_norm: float


class Woke(Event):
    """The time of an earlier WakeAt came."""

    tag: str


class Persisted(Event):
    """The value of an earlier Persist is durable."""

    name: str


class WroteCheckpoint(Event):
    """This peer's part of the checkpoint of `version` in `generation` is durable, with this digest and so many 4-byte
    words; for `blocked_s` it did nothing else."""

    version: int
    blocked_s: float = 0.0
    digest: str = ""
    n_words: int = 0
    generation: int = 0


class CheckpointFailed(Event):
    """This peer's part of the checkpoint of `version` could not be written."""

    version: int
    reason: str


class FoundPart(Event):
    """The answer to FindPart. `n_words`: the length of the part if it is whole on this disk, else 0. `slices`: bounds
    of the slices that an earlier attempt to fetch the part has left here."""

    digest: str
    n_words: int
    slices: tuple[tuple[int, int], ...] = ()


class KeptPart(Event):
    """The answer to KeepPart: '' if the part is durable on this disk, else why it is not."""

    digest: str
    problem: str = ""


class LostPart(Event):
    """A part that was on this disk cannot be read any more, or the fetched slices of a part cannot be written."""

    digest: str
    reason: str


class Restored(Event):
    """Parameters and optimizer state are those of `version` again."""

    version: int


class Installed(Event):
    """Parameters and optimizer state are the fetched ones of `version`."""

    version: int


class NotInstalled(Event):
    """The fetched state of `version` is not what was sent, and the state that was here stays."""

    version: int
    reason: str


class Digested(Event):
    """The driver has made the digest that DigestState asked for; the fields are those of StateDigest."""

    version: int
    generation: int
    digest: int
    norm: float
    sums: tuple[float, ...]


class LinkChanged(Event):
    """The transport to `peer` came up or went down. `gone`: its host answers and no process listens at its address, so
    the one that did has ended."""

    peer: int
    up: bool
    reason: str = ""
    gone: bool = False


class NoWay(Event):
    """Messages wait for `peer`, and neither side can dial the other."""

    peer: int
    reason: str


class Started(Event):
    """The first event of every machine; `address` (host:port) is where this process listens, `process` a number that no
    other process of this peer has, `disk` the id of the disk on which it keeps its parts of checkpoints."""

    address: str = ""
    process: int = 0
    disk: str = ""


class Refused(Event):
    """`peer` refused a connection that this process opened, or sent something that had to be refused. `peer` is None if
    this process refused the connection, whatever peer the other side claimed to be."""

    peer: int | None
    reason: str


class Ready(Event):
    """The peer's own stage is compiled and timed: seconds per kind of Work and per MESSAGE, and where a device is
    emulated also per kind + ON_A_CORE (jaxdt.run.work). Its state has so many 4-byte words. `device`: on what it
    computes, for people."""

    seconds: dict[str, float]
    n_words: int = 0
    device: str = ""


class Status(Event):
    """The driver's own counters (bytes, busy seconds), for the next heartbeat and for the totals of Done; and the Work
    that runs on the device at this moment. `bytes_to`, `bytes_from`: payload sent to and received from each peer."""

    values: dict[str, float]
    bytes_to: dict[str, int] = field(default_factory=dict[str, int])
    running: Work | None = None
    bytes_from: dict[str, int] = field(default_factory=dict[str, int])


class Interrupted(Event):
    """A person, the system or the launcher asked this process to end."""

    code: int = 130
    reason: str = "interrupted"


class StopRequested(Event):
    """A person asked for the end of the run: it ends as soon as a checkpoint holds what has been learned."""


class Paused(Event):
    """This process did not run for so many seconds: its host or its own work held it. Messages that arrived meanwhile
    may not have been read yet, so a peer's silence during that time says nothing."""

    seconds: float


class Terminated(Event):
    """The system asks this coordinator to end. The run continues, and waits for another coordinator."""


class Leave(Event):
    """A person or the system asked this peer to leave the run, which continues."""


# Between the machines of one peer.


class ViewChanged(InternalEvent):
    """membership -> wiring, sync: a view was adopted."""

    view: View


class Evicted(InternalEvent):
    """membership -> wiring, sync: the run continues without this peer, as `view` says. Committed steps are applied; all
    other work that is under way is void."""

    view: View


class Accumulated(InternalEvent):
    """wiring -> sync: B(step, stage, microbatch) is in this peer's accumulator, n_samples of it. Only the last stage
    knows the loss."""

    step: int
    stage: int
    microbatch: int
    n_samples: int
    loss_sum: float | None


class Evaluated(InternalEvent):
    """wiring -> sync: a held-out microbatch's loss, measured with the parameters with which `step` is computed."""

    step: int
    microbatch: int
    n_samples: int
    loss_sum: float


class Drained(InternalEvent):
    """wiring -> sync: nothing more of `step` will be granted to this peer."""

    step: int


class Fetching(InternalEvent):
    """state transfer -> membership, for the heartbeats: how much of a newcomer's state is here, and how much it
    has asked for."""

    here_bytes: float
    asked_bytes: float
    of_bytes: float


class ServerCounts(InternalEvent):
    """wiring of a pool's server -> membership, for the heartbeats: what its workers do for it."""

    values: dict[str, float]
    workers: tuple[WorkerStatus, ...] = ()


class Joined(InternalEvent):
    """state transfer -> sync: the state of `version` is here, so this peer may count."""

    version: int


class Holds(InternalEvent):
    """sync -> membership: the state that is here, if there is one. A peer that was evicted says it once no update runs,
    and a joining one when it has joined."""

    state: StateName | None


class Repairing(InternalEvent):
    """sync -> state transfer: this peer's state of `version` has to be replaced by that of replica `donor`. Joined
    answers."""

    version: int
    donor: int


class WorkOverdue(InternalEvent):
    """membership -> wiring, sync, every heartbeat: the Work that runs on this peer's device takes far too long, and all
    other Work of this peer waits for it."""


class StepBlocked(InternalEvent):
    """wiring, sync -> membership, the answer to WorkOverdue: others can do nothing more for a step under way until this
    peer's device is free."""


class Updated(InternalEvent):
    """sync -> wiring, membership: the parameters of `stage` have seen `version` updates."""

    stage: int
    version: int


class Stepped(InternalEvent):
    """sync -> wiring, where replicas may differ: this peer has done `n_steps` local steps, and may begin the next."""

    stage: int
    n_steps: int


class Settled(InternalEvent):
    """sync -> state transfer, where replicas may differ: the state here is that after `n_steps` local steps, and the
    mean that was due then."""

    n_steps: int


class StepsEnd(InternalEvent):
    """sync -> wiring, where replicas may differ: the own pipeline does `n_steps` local steps, and no more."""

    n_steps: int


class Admitted(InternalEvent):
    """membership -> sync, wiring of a pool worker: its server has let it in, or continues with the next version. Work
    under way for steps before that version is void; after another admission all work under way is void."""

    admission: int
    generation: int
    version: int
    n_reseeds: int


class ContributionBegins(InternalEvent):
    """wiring -> sync of a server: a worker was asked for its contribution, in these rounds."""

    worker: int
    rounds: tuple[RoundId, ...]


class ContributionVoid(InternalEvent):
    """wiring -> sync of a server: contributions to these rounds do not count any more."""

    rounds: tuple[RoundId, ...]


class ContributionReceived(InternalEvent):
    """sync -> wiring of a server: all of a worker's contribution is here. `items`: (microbatch, lease) of each gradient
    in its vectors, as the worker says; `sq_norm`: the squared norm of the vectors."""

    worker: int
    rounds: tuple[RoundId, ...]
    items: tuple[tuple[int, int], ...]
    sq_norm: float


class ContributionGathered(InternalEvent):
    """wiring -> sync of a pool worker: its accumulator is laid out for these rounds, and starts again. `items`:
    (microbatch, lease) of each gradient that it held."""

    rounds: tuple[RoundId, ...]
    items: tuple[tuple[int, int], ...]


class MeanKept(InternalEvent):
    """sync -> membership, where replicas may differ: the mean of the replicas' states is here, for the checkpoint of
    `version`."""

    version: int


class GoBack(InternalEvent):
    """sync -> part transfer: all that was under way is void; get the checkpoint with which the view's generation began,
    and restore it."""

    view: View


class HoldsPart(InternalEvent):
    """part transfer -> membership: a part that was fetched is durable on this disk."""

    part: Part


WORKERS = "workers"  # in a heartbeat of a pool's server: how many compute for it
CPU_S = "cpu_s"  # in a heartbeat: the processor time of the process, in seconds
# In a heartbeat, of layers with experts at the latest step: see jaxdt.model.stage.auxiliary_figures.
EXPERTS = ("auxiliary_loss", "expert_load_max")
FETCHED = ("fetched_bytes", "asked_bytes", "state_bytes")  # in a heartbeat, what Fetching says


# ---------------------------------------------------------------------------------------------------------- actions


class Send(Action):
    """Send `body`, and the tensor that it names (n_bytes of payload), to peer `dst`. The peer fills in the header."""

    dst: int
    body: Message
    n_bytes: int = 0
    priority: int = URGENT
    header: Header | None = None


class Post(Action):
    """Many messages in one action, in this order: for each the peer, the body and n_bytes, as in Send. Equal bodies are
    one object, and are encoded once."""

    letters: tuple[tuple[int, Message, int], ...]
    priority: int = URGENT
    header: Header | None = None


class Connect(Action):
    """From now on `peer` is reached at `address` (host:port)."""

    peer: int
    address: str


class Meet(Action):
    """From now on these members are reached at their addresses; the peer itself may be among them."""

    members: tuple[Member, ...]


class Disconnect(Action):
    """`peer` is no member any more: end its connections and forget the messages that wait for it."""

    peer: int


class StoreTensor(Action):
    """Keep the tensor that came with a message: the message is accepted. A tensor of a message that is dropped is never
    stored, since keys name neither view nor generation, and it would take the place of one that is awaited."""

    src: int
    body: Message
    tensor: Any = field(default=None, compare=False, repr=False)


class HandleAgain(Action):
    """Hand this message to the machine again, once the actions before this one are done: it has waited for a view."""

    event: Received


class Revoke(Action):
    """End the connections of these peers, and refuse new ones for good."""

    peers: tuple[int, ...]


class Run(Action):
    """Do the Work on the compute thread; Ran answers. For a G or a P: the rounds that the vector is laid out for; a P
    without any keeps the vector of the fragment that is due after the Work's step, until Offer names its round. For a
    U, an A or a C: the rounds whose sums it reads, and but for a C the factor on them; for an L: the factor on the own
    gradient, 0 for no update."""

    work: Work
    scale: float = 0.0
    rounds: tuple[RoundId, ...] = ()


class Offer(Action):
    """The vector that was kept after `step` local steps is this peer's contribution to `round`."""

    round: RoundId
    step: int


class Sum(Action):
    """Add up the members' slices of `key` in the order of `members`; Summed answers."""

    key: SliceKey
    members: tuple[int, ...]


class Free(Action):
    """Forget the boundary tensors and accumulators of `step` and of older steps, and the vectors, slices and results of
    `rounds`, which are over. The rounds of a group end in order, so earlier ones of their groups are over too."""

    step: int
    rounds: tuple[RoundId, ...] = ()


class Discard(Action):
    """Forget a boundary tensor, if it is here. With a StateKey: a download of a state begins, so forget the slices of
    one that was given up."""

    key: Key | StateKey


class Forget(Action):
    """Forget the slices of a round that is void, those too that still come."""

    round: RoundId


class Reopen(Action):
    """Keep the slices of a round that come from now on, also if the round was void before. A coordinator that was
    superseded may have made it void for a member that its successor admits again, while others hold the result."""

    round: RoundId


class WakeAt(Action):
    """Answer with Woke(tag) at at_s."""

    at_s: float
    tag: str


class Persist(Action):
    """Make `value` (plain data) durable under `name`; Persisted answers."""

    name: str
    value: Any


class WriteCheckpoint(Action):
    """Write this peer's part of the checkpoint of `version` in `generation`; WroteCheckpoint answers."""

    version: int
    generation: int = 0
    n_reseeds: int = 0


class WriteOwed(Action):
    """Write what this peer owes with the state of `version` in `generation` (jaxdt.sync.error_feedback), for a
    checkpoint. Nothing answers: without it the checkpoint is complete all the same."""

    version: int
    generation: int


class FindPart(Action):
    """Look for the part of this digest, of a checkpoint of `version`, on this disk; FoundPart answers."""

    version: int
    digest: str


class KeepPart(Action):
    """All slices of a part have been fetched: make it durable on this disk, if it is what its digest says; KeptPart
    answers."""

    part: Part


class Restore(Action):
    """Go back to the checkpoint of `version`, of which these parts are on this disk (0: to the initial state). Samples
    are drawn for `n_reseeds` from now on. With `in_place` the state is here already and stays: only the results of
    earlier Work are dropped. Restored answers."""

    version: int
    generation: int
    n_reseeds: int = 0
    parts: tuple[Part, ...] = ()
    in_place: bool = False


class Install(Action):
    """Make the fetched slices of the state the parameters and optimizer state; samples are drawn for `n_reseeds`.
    Installed or NotInstalled answers. `beside_work`: a pool worker gets the next version; its results of later steps
    stay, and where updates are delayed the version before stays too."""

    version: int
    generation: int
    n_reseeds: int = 0
    beside_work: bool = False


class DigestState(Action):
    """Make a digest of the parameters and the optimizer state, which are those of `version`; Digested answers."""

    version: int
    generation: int


class MarkCheckpoint(Action):
    """The checkpoint is complete: make it count, and let go of the oldest."""

    checkpoint: Checkpoint


class MoveTo(Action):
    """This machine is over. Its process continues with the machine of a newcomer to `stage`, under the same peer id.
    Where replicas may differ that is its own stage, in which it starts again. `version`: the updates that its
    parameters have seen."""

    stage: int
    version: int = 0


class Stop(Action):
    """End this process, with this exit code (jaxdt.run.exit_codes)."""

    code: int
    reason: str
