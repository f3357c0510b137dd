"""The invariants of a run whose replicas stay equal, at every event of a simulation, under any faults.

The only state of the machines that is read is the view that they have adopted; all else is seen from outside: durable
values, applied records, and the contents of tensors (symbolic_tensors.py). `SymbolicTensors` reports COVER when a
machine wants a tensor that is not there. A number in brackets is that of a promise (promises.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxdt.membership.agreement import CommittedStep
from jaxdt.membership.coordinator import UNKNOWN_VIEW
from jaxdt.membership.coordinator_config import OperatorState, load_operator_state
from jaxdt.membership.evictions import SAID_BY
from jaxdt.membership.operations import STOPPED
from jaxdt.membership.peer import Peer
from jaxdt.membership.state_check import TOLERANCE
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import LostReport, MoveReport, OperatorReport, OverdueReport, StepReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run import serialize
from jaxdt.run.config import TrainConfig, is_evaluated
from jaxdt.run.work import WorkKind
from jaxdt.sim.disks import Disks
from jaxdt.sim.faults import CLOG, CUT, ENDS, LEAVE, NEVER_DONE, PAUSE, SLOW, Fault
from jaxdt.testing.promises import (
    APPLICABLE,
    COPIES,
    COVER,
    DISJOINT,
    EQUAL,
    GIVEN_BACK,
    GROWS,
    LIVING,
    PAUSED,
    PREFIX,
    PROGRESS,
    SPARED,
    Promise,
)
from jaxdt.testing.symbolic_tensors import Lost, SymbolicTensors, counted_twice

BACK_S = 10.0  # after a silence a peer may take so long to be heard
LEFT = "left"  # in the reason of a peer's Stop
Durable = ev.View | ev.Record | OperatorState | ev.Checkpoint | int
DURABLE = {
    "view": ev.View,
    "steps": tuple[CommittedStep, ...],
    "coordinator_term": int,
    "operator": OperatorState,
    "checkpoint": ev.Checkpoint,
}


class InvariantBroken(Exception):
    """One line: time, number of the invariant, machine, and what is wrong."""


class Invariants:
    """The observer of one simulation under `faults`. `tensors[peer]` is filled before it runs. `grace_s`: how long a
    silent peer that may hold a stage's state is awaited; `waits`: a run that has lost a stage waits for a newcomer.
    An observer is called before an event's actions are done, so the tensors that an event changed are checked when the
    next event comes."""

    def __init__(
        self, peers: Mapping[int, Peer], faults: Sequence[Fault] = (), grace_s: float = 0.0, waits: bool = False
    ):
        self.tensors: dict[int, SymbolicTensors] = {}
        self.now_s = 0.0
        self._peers = dict(peers)
        self._planned = set(peers)
        self._alive = set(peers)
        self._expendable = {peer for fault in faults for peer in fault.may_lose}
        self._silences = [fault for fault in faults if _is_silence(fault)]
        self._standstills = [fault for fault in faults if fault.kind == CLOG and not fault.factor]
        self._hangs = [fault for fault in faults if fault.kind == SLOW and fault.factor >= NEVER_DONE]
        self._hung: set[int] = set()  # peers that have begun Work that never ends
        self._blocking: set[int] = set()  # peers of which the coordinator has reported that the run waits for them
        self._grace_s = grace_s
        self._waits = waits
        self._served: set[int] = set()  # peers that hold what is committed, or did when they were evicted
        self._processes: dict[int, int] = {}  # peer -> its process that began last
        self._evicted_at: dict[int, int] = {}  # peer -> steps committed in the view that went on without it
        self._outgoing: set[int] = set()  # peers that were asked to leave or to move
        self._coordinator_term = 0  # of the last coordinator that has begun
        self._terms_heard: dict[int, int] = {}  # peer -> the highest term of a coordinator that its process has heard
        self._may_end = False
        self._to_check: tuple[int, bool] | None = None  # (peer, whether its accumulators may have changed)
        self._pending: dict[str, Durable] = {}  # values on their way to the coordinator's disk, by name
        self._view: ev.View | None = None
        self._is_paused = False  # by an operator
        self._generation = 0
        self._n_durable = 0
        self._records: dict[tuple[int, int], ev.Record] = {}  # by (generation, step)
        self._checkpoint = ev.Checkpoint()
        self._disk_of: dict[int, str] = {}
        self._disks: Disks | None = None
        self._n_copies = 1
        self._touched: set[int] = set()  # peers that a fault has begun for
        self.contributions: set[RoundId] = set()  # of a pool's workers, that were added
        self._given_back: dict[Lost, RoundId] = {}

    def watch_disks(self, disks: Disks, n_copies: int) -> None:
        """From now on check (10): each part of a checkpoint must be on so many disks."""
        self._disks, self._n_copies = disks, n_copies

    def __call__(self, now_s: float, peer: int, event: ev.Event | Fault, actions: list[ev.Action]) -> None:
        if self._to_check:
            self._check_tensors(*self._to_check)
        self._to_check = None
        self.now_s = now_s
        if isinstance(event, Fault):
            self._on_fault(peer, event)
        elif peer == ev.COORDINATOR:
            self._on_coordinator_event(event, actions)
        else:
            self._on_peer_event(peer, event, actions)

    def add_process(self, peer: int, machine: Peer, tensors: SymbolicTensors) -> None:
        """A process that was not there before: that of a newcomer, or of a crashed peer that starts again."""
        self._served.discard(peer)
        self._outgoing.discard(peer)
        self._terms_heard.pop(peer, None)
        self._hung.discard(peer)
        self._blocking.discard(peer)
        self._peers[peer] = machine
        self.tensors[peer] = tensors
        self._alive.add(peer)

    def allow_end(self) -> None:
        """From now on the run may end or be rolled back, since a gradient is not finite."""
        self._may_end = True

    @property
    def _must_last(self) -> bool:
        """Whether the run may neither end nor be rolled back now."""
        if self._may_end or self._view is None:
            return False
        return all(self._holders(stage) for stage in range(len(self._view.stage_views)))

    def _holders(self, stage: int) -> list[int]:
        """Living peers that hold a stage's committed version, or the results that make it, as (5) counts them."""
        assert self._view is not None
        members = self._view.by_peer.keys()
        return [
            peer
            for peer in sorted(self._alive & self._served - (self._outgoing - members))
            if self.tensors[peer].stage == stage and self._holds_committed(peer) and not self._grace_is_over(peer)
        ]

    def _holds_committed(self, peer: int) -> bool:
        tensors = self.tensors[peer]
        if tensors.generation != self._generation or tensors.version < 0:
            return False
        assert self._view is not None
        if peer not in self._view.by_peer and tensors.version < self._n_durable != self._evicted_at.get(peer):
            return False  # it was not told of the records since then, and gives up its results when it is evicted
        owed = [self._records[self._generation, step] for step in range(tensors.version, self._n_durable)]
        rounds = (round for record in owed for round in record.rounds if tensors.concerns(round))
        return all(tensors.holds(round) for round in rounds)

    def _grace_is_over(self, peer: int) -> bool:
        return any(
            peer in (*fault.peers, *fault.others) and fault.at_s + self._grace_s <= self.now_s <= fault.until_s + BACK_S
            for fault in self._silences
        )

    def restart_coordinator(self, disk: Mapping[str, Any]) -> None:
        """A coordinator continues from `disk`. A value that its predecessor was writing when it ended may be there; on
        the disk of another host the last views may be missing."""
        pending = self._pending
        self._pending = {}
        for name, value in pending.items():
            if name in disk and self._durable_value(name, disk[name]) == value:
                self._on_durable(value)
        last = self._view
        self._view = serialize.read(ev.View, disk["view"], "view") if "view" in disk else None
        known = self._view.by_peer.keys() if self._view else set[int]()
        self._is_paused = load_operator_state(disk).paused
        self._expendable |= known - last.by_peer.keys() if last else set[int]()  # left already, unknown to this one
        self._served &= known

    def broken(self, promise: Promise, peer: int, problem: str) -> NoReturn:
        name = "coordinator" if peer == ev.COORDINATOR else f"peer {peer}"
        raise InvariantBroken(f"{self.now_s:.3f} s: ({promise}) {name}: {problem}")

    def cover_broken(self, peer: int, problem: str) -> NoReturn:
        """(1), as the tensors of a peer report it."""
        self.broken(COVER, peer, problem)

    def _on_fault(self, peer: int, fault: Fault) -> None:
        self._touched |= {peer, *fault.others}
        if fault.kind == LEAVE:
            self._outgoing.add(peer)
        if fault.kind in ENDS:
            self._alive.discard(peer)

    def ended(self, stopped: Mapping[int, ev.Stop], steps: list[int], n_steps: int) -> None:
        """Check the invariants that hold at the end: (5) and (7). `steps`: those whose rows were not rolled back."""
        stop = stopped.get(ev.COORDINATOR)
        if stop is None and self._view is None and not self._planned <= self._alive:
            return  # it waits for a peer that is gone: before the first view the run needs all peers
        if stop is None and self._waits and self._view and self._has_deserted_stage:
            return  # it waits for a newcomer that does not come
        if stop is None and self._waits and self._view and self._has_lost_part:
            return  # it waits for a host that does not come
        if stop is None and self._view and self._waits_for_hung_device:
            return  # no other peer holds the stage's state, and the run has said that it waits
        if stop is None:
            self.broken(PROGRESS, ev.COORDINATOR, f"the run is not over, with {self._n_durable} steps of {n_steps}")
        if stop.code:
            return  # _on_coordinator_event has checked whether the run may end
        if stop.reason.startswith(STOPPED):
            n_steps = self._n_durable
            if self._checkpoint.version != n_steps:
                self.broken(
                    PROGRESS,
                    ev.COORDINATOR,
                    f"stopped after {n_steps} steps, with a checkpoint of {self._checkpoint.version}",
                )
        if self._n_durable != n_steps or sorted(set(steps)) != list(range(n_steps)):
            self.broken(PROGRESS, ev.COORDINATOR, f"the run is over with steps {steps} of {n_steps}")
        assert self._view is not None  # steps are durable
        for peer in sorted(self._alive & set(stopped) & set(self._view.by_peer)):
            version = self.tensors[peer].version
            if stopped[peer].code == 0 and LEFT not in stopped[peer].reason and version != n_steps:
                self.broken(PREFIX, peer, f"is done with version {version} of {n_steps}")

    def check_held_out(self, rows: Sequence[StepReport], train: TrainConfig) -> None:
        """(7) of a run that is over: the last row has a held-out loss, and so has every row that is due unless a
        coordinator died before it told it."""
        due = {n for n in range(1, self._n_durable + 1) if is_evaluated(n, train.eval_every_steps, train.steps)}
        told = {row.step + 1 for row in rows if row.eval_loss is not None}
        if self._coordinator_term > 1:
            due &= {self._n_durable}
        if not due <= told:
            problem = f"rows have held-out losses after {sorted(told)} steps, due are {sorted(due)}"
            self.broken(PROGRESS, ev.COORDINATOR, problem)

    @property
    def _has_deserted_stage(self) -> bool:
        assert self._view is not None
        stages = {self.tensors[peer].stage for peer in self._alive if peer in self.tensors}
        return not set(range(len(self._view.stage_views))) <= stages

    @property
    def _has_lost_part(self) -> bool:
        """Whether a stage has to be restored, and no living peer holds a part of the checkpoint."""
        assert self._view is not None and self._disks is not None
        if all(self._holders(stage) for stage in range(len(self._view.stage_views))):
            return False
        disks, live = self._disks, {self._disk_of[peer] for peer in self._alive & self._disk_of.keys()}
        return any(not any(disks.holds(disk, part.digest) for disk in live) for part in self._checkpoint.parts)

    @property
    def _waits_for_hung_device(self) -> bool:
        """Whether all who hold the state of a stage do Work that never ends, and the coordinator has reported it."""
        assert self._view is not None
        holders = [set(self._holders(stage)) for stage in range(len(self._view.stage_views))]
        return any(peers and peers <= self._hung & self._blocking for peers in holders)

    # ---------------------------------------------------------------------------------------------------- coordinator

    def _on_coordinator_event(self, event: ev.Event, actions: list[ev.Action]) -> None:
        if isinstance(event, ev.Persisted):
            self._on_durable(self._pending.pop(event.name))
        if isinstance(event, ev.Received) and isinstance(event.body, ev.Profiled) and event.body.state:
            self._served.add(event.header.src)
        if isinstance(event, ev.Received) and isinstance(event.body, ev.Hello):
            self._disk_of[event.header.src] = event.body.disk
        for action in actions:
            if isinstance(action, ev.Persist):
                value = self._durable_value(action.name, action.value)
                self._pending[action.name] = value
                if isinstance(value, int):
                    self._coordinator_term = value
                if isinstance(value, OperatorState) and not value.paused:
                    self._is_paused = False
                if isinstance(value, ev.Record) and self._is_paused:
                    self.broken(PAUSED, ev.COORDINATOR, f"commits step {value.step} while the run is paused")
                if isinstance(value, ev.View) and value.generation != self._generation and self._must_last:
                    self.broken(SPARED, ev.COORDINATOR, f"rolls back to {value.n_committed} steps")
            elif isinstance(action, MoveReport | OperatorReport) and action.peer is not None:
                self._outgoing.add(action.peer)
            elif isinstance(action, OverdueReport) and action.blocks:
                self._blocking.add(action.peer)
            elif isinstance(action, ev.Send):
                self._check_announced(action.body)
            elif isinstance(action, ev.MarkCheckpoint):
                self._check_copies(action.checkpoint)
            elif isinstance(action, LostReport) and action.peer in self._planned - self._expendable:
                is_known = SAID_BY in action.reason or UNKNOWN_VIEW in action.reason
                if not is_known and not self._cannot_join(action.peer):
                    self.broken(LIVING, ev.COORDINATOR, f"takes a living peer for lost: {action.reason}")
            elif isinstance(action, ev.Stop) and action.code and self._must_last:
                self.broken(SPARED, ev.COORDINATOR, f"the run ends: {action.reason}")

    def _cannot_join(self, peer: int) -> bool:
        """Whether a member that joins does not hear the coordinator, and so does not know that it is a member, or
        whether the devices of all who could give it a state hang."""
        view = self._view
        if view is None or peer not in view.joining:
            return False
        unheard = (fault for fault in self._standstills if fault.peer == ev.COORDINATOR and peer in fault.others)
        donors = set(view.stage_peers(view.by_peer[peer].stage)) - set(view.joining)
        all_hang = bool(donors) and donors <= self._hung
        return all_hang or any(map(self._is_active, unheard))

    def _is_active(self, fault: Fault) -> bool:
        return fault.at_s <= self.now_s <= fault.until_s

    def _durable_value(self, name: str, plain: Any) -> Durable:
        """The value that a coordinator makes durable; for its steps the last record."""
        value = serialize.read(DURABLE[name], plain, name)
        return value[-1].record if isinstance(value, tuple) else value

    def _check_copies(self, checkpoint: ev.Checkpoint) -> None:
        """(10) for a checkpoint that is complete."""
        assert self._view is not None and self._disks is not None  # checkpoints are of members
        untouched = {member.disk for member in self._view.members if member.peer not in self._touched}
        of_members = {member.disk for member in self._view.members}
        for part in checkpoint.parts:
            for disk in part.disks:
                if not self._disks.holds(disk, part.digest):
                    self.broken(COPIES, ev.COORDINATOR, f"says that {disk or 'the disk'} holds {part}")
            if len(of_members & set(part.disks)) < min(self._n_copies, len(untouched)):
                self.broken(COPIES, ev.COORDINATOR, f"calls version {part.version} complete with {part}")

    def _check_announced(self, body: object) -> None:
        """The coordinator may not announce anything that it would forget by a restart."""
        if isinstance(body, ev.Committed) and self._records.get((self._generation, body.record.step)) != body.record:
            self.broken(PREFIX, ev.COORDINATOR, f"announces step {body.record.step} before its record is durable")
        if isinstance(body, ev.View) and (self._view is None or body.number > self._view.number):
            self.broken(PREFIX, ev.COORDINATOR, f"announces view {body.number} before it is durable")

    def _on_durable(self, value: Durable) -> None:
        if isinstance(value, ev.Checkpoint):
            self._checkpoint = value
        if isinstance(value, OperatorState):
            self._is_paused = value.paused
        if isinstance(value, ev.View):
            self._on_view(value)
        if not isinstance(value, ev.Record):
            return
        step = value.step
        if step != self._n_durable:
            self.broken(GROWS, ev.COORDINATOR, f"record of step {step} after {self._n_durable} steps")
        self._records[self._generation, step] = value
        self._n_durable = step + 1
        assert self._view is not None  # a view is durable before any step begins
        self._served |= self._present(self._view)
        for member in self._view.members:
            self._check_applicable(member.peer)
        for stage in range(len(self._view.stage_views)):
            self._check_equal(step, self._view.stage_peers(stage))

    def _check_equal(self, step: int, replicas: tuple[int, ...]) -> None:
        """(9) for one stage, by the digests that its members have made of the version with which the step began."""
        drifts: dict[int, float] = {}
        for peer in replicas:
            generation, version, drift = self.tensors[peer].digested or (-1, -1, 0.0)
            if (generation, version) == (self._generation, step):
                drifts[peer] = drift
        if drifts and max(drifts.values()) - min(drifts.values()) > (2 * TOLERANCE if step else 0.0):
            self.broken(EQUAL, ev.COORDINATOR, f"commits step {step} of replicas whose parameters differ: {drifts}")

    def _on_view(self, view: ev.View) -> None:
        stages = {member.stage for member in view.members}
        if view.members and stages != set(range(len(view.stage_views))):
            self.broken(SPARED, ev.COORDINATOR, f"view {view.number} leaves a stage without members: {view.members}")
        if view.generation != self._generation:
            for step in range(view.n_committed):
                self._records[view.generation, step] = self._records[self._generation, step]
            self._generation, self._n_durable = view.generation, view.n_committed
        elif view.n_committed != self._n_durable:
            self.broken(
                GROWS, ev.COORDINATOR, f"view {view.number} says {view.n_committed}, durable are {self._n_durable}"
            )
        before = self._view.by_peer.keys() if self._view else set[int]()
        self._evicted_at |= dict.fromkeys(before - view.by_peer.keys(), view.n_committed)
        self._view = view
        self._served |= self._present(view) - set(view.joining)
        self._served -= set(view.joining) - before

    def _present(self, view: ev.View) -> set[int]:
        """The members whose processes that were admitted still run. Another process of the peer began without the
        run's state, and a coordinator that has not heard of it yet takes it for the one before."""
        return {member.peer for member in view.members if self._processes.get(member.peer, 0) == member.process}

    # ----------------------------------------------------------------------------------------------------------- peers

    def _on_peer_event(self, peer: int, event: ev.Event, actions: list[ev.Action]) -> None:
        kinds = {type(action) for action in actions}
        sent_to = [action.dst for action in actions if isinstance(action, ev.Send)]
        sent_to += [dst for action in actions if isinstance(action, ev.Post) for dst, _, _ in action.letters]
        if peer in sent_to:
            self.broken(PROGRESS, peer, "sends something to itself, and waits for it")
        if isinstance(event, ev.Received) and event.header.src == ev.COORDINATOR:
            self._on_heard(peer, event, ev.Stop in kinds)
        if isinstance(event, ev.Started):
            self._processes[peer] = event.process
        if ev.Run in kinds and any(fault.peer == peer and self._is_active(fault) for fault in self._hangs):
            self._hung.add(peer)
        if ev.Stop in kinds:
            self._alive.discard(peer)
        if ev.Free in kinds and not kinds & {ev.Restore, ev.FindPart}:  # which a rollback begins with
            self._check_freed(peer, [action.step for action in actions if isinstance(action, ev.Free)])
        counts = any(isinstance(action, ev.Run) and action.work.kind == WorkKind.BACKWARD for action in actions)
        adopts = isinstance(event, ev.Received) and isinstance(event.body, ev.View)
        self._to_check = (peer, counts or adopts)

    def _on_heard(self, peer: int, event: ev.Received, stops: bool) -> None:
        """A peer hears a coordinator, perhaps one that was superseded and that it may still obey."""
        heard, term = self._terms_heard.get(peer, 0), event.header.coordinator_term
        if stops and isinstance(event.body, ev.Ended) and heard <= term < self._coordinator_term:
            self._expendable.add(peer)
        self._terms_heard[peer] = max(heard, term)

    def _check_tensors(self, peer: int, counted: bool) -> None:
        self._check_applicable(peer)
        if counted:
            self._check_disjoint(peer)

    def _check_applicable(self, peer: int) -> None:
        """(3) for one member: it holds the results that are named by the records which it has not applied."""
        tensors = self.tensors[peer]
        owed = range(tensors.version, self._n_durable)
        if not owed or peer not in self._alive or self._peers[peer].membership.view is None:
            return
        assert self._view is not None  # no peer adopts a view before it is durable
        if peer not in {member.peer for member in self._view.members}:
            return
        begins = self._view.n_committed
        lacks_state = tensors.generation != self._generation or tensors.version < begins
        if peer in self._view.joining and lacks_state:
            if self._n_durable > begins:
                self.broken(APPLICABLE, peer, f"has not got the state with which step {begins} began")
            return
        if tensors.generation != self._generation:
            return
        for round in (round for step in owed for round in self._records[self._generation, step].rounds):
            if tensors.concerns(round) and not tensors.holds(round):
                self.broken(
                    APPLICABLE, peer, f"cannot apply step {round.number}: it does not hold the result of {round}"
                )

    def _check_disjoint(self, peer: int) -> None:
        """(6) for one member and the replicas that have adopted the same view."""
        view = self._peers[peer].membership.view
        if view is None:
            return
        replicas = {
            replica: self.tensors[replica]
            for replica in view.stage_peers(self.tensors[peer].stage)
            if replica in self._alive and self._peers[replica].membership.view == view
        }
        for step in sorted(self.tensors[peer].accumulators):
            found = counted_twice(replicas, step)
            if found:
                microbatch, peers = found
                problem = f"peers {peers} of view {view.number} both count {microbatch}"
                self.broken(DISJOINT, peer, f"step {step}: {problem}")

    def _check_freed(self, peer: int, steps: list[int]) -> None:
        """No peer frees the tensors of a step that it has not applied."""
        if self.tensors[peer].version in steps:
            self.broken(PREFIX, peer, f"lets go of step {self.tensors[peer].version} without having applied it")

    def applied(self, peer: int, step: int, rounds: frozenset[RoundId]) -> None:
        """A peer begins the update of a step with the results of `rounds`."""
        tensors = self.tensors[peer]
        record = self._records.get((tensors.generation, step))
        if record is None:
            self.broken(PREFIX, peer, f"applies step {step}, of which no record is durable")
        if step != tensors.version:
            self.broken(PREFIX, peer, f"applies step {step} to version {tensors.version}")
        if not rounds and record.verdict != "skip":
            self.broken(PREFIX, peer, f"skips step {step}, the record says {record.verdict}")
        if not rounds <= set(record.rounds):
            self.broken(PREFIX, peer, f"applies {sorted(rounds)}, the record names {sorted(record.rounds)}")

    def gives_back(self, peer: int, lost: Lost, round: RoundId) -> None:
        """(26) A peer applies a round that makes up for what was lost in another one."""
        generation = self.tensors[peer].generation
        record = self._records.get((generation, lost.round.number))
        is_contribution = lost.round.kind == RoundKind.CONTRIBUTION
        counts = lost.round in self.contributions if is_contribution else record and lost.round in record.rounds
        if lost.generation != generation or not counts:
            self.broken(GIVEN_BACK, peer, f"{round} makes up for {lost}, which does not count")
        if (before := self._given_back.setdefault(lost, round)) != round:
            self.broken(GIVEN_BACK, peer, f"{round} makes up for {lost}, as {before} did")


def _is_silence(fault: Fault) -> bool:
    """Whether the coordinator may hear nothing of a peer because of this fault."""
    if fault.kind == PAUSE:
        return True
    stands_still = fault.kind == CUT or (fault.kind == CLOG and not fault.factor)
    return stands_still and ev.COORDINATOR in (*fault.peers, *fault.others)
