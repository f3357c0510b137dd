"""What must hold at every event of a simulation, under any faults (step protocol, Sec. 11).

  (1) each result counts every microbatch once, computed with the version of its step
  (2) what a member has applied is a prefix of the durable records
  (3) every member of the view can apply every durable record that it has not applied
  (4) within a generation records only grow
  (5) nothing is rolled back, and the run does not end, while each stage keeps a peer that no fault may lose; before
      the first view the run needs all peers; where peers change stages, the stages of the last view count, and no
      view leaves a stage without members
  (6) no microbatch is in the accumulators of two live members of one view
  (7) the run ends within a stated time after the last fault is over
  (8) no peer of the plan is taken for lost that no fault may lose: neither for a pause of the coordinator, nor for
      another coordinator, nor for another process of that peer
  (9) when a checkpoint is announced as complete, each disk that it names holds the part, and each part is on as many
      disks of members as were asked for, or on those of all members that no fault has touched yet

The invariants are checked from outside: on what is made durable, on what is applied, and on what the tensors hold
(symbolic_tensors.py). Of the machines' own state only the view that they have adopted is read. `SymbolicTensors` also
reports under (1) when a machine wants a tensor that is not there.
"""

from collections.abc import Mapping
from typing import NoReturn

from jaxdt.membership.peer import Peer
from jaxdt.protocol.events import (
    COORDINATOR,
    Action,
    Checkpoint,
    Committed,
    Event,
    FindPart,
    Free,
    MarkCheckpoint,
    Persist,
    Persisted,
    Post,
    Received,
    Record,
    Restore,
    Round,
    Run,
    Send,
    Stop,
    View,
)
from jaxdt.protocol.reports import LostReport
from jaxdt.sim.disks import Disks
from jaxdt.sim.faults import ENDS, Fault
from jaxdt.sim.fuzz.symbolic_tensors import SymbolicTensors, counted_twice
from jaxdt.spec import serialize
from jaxdt.spec.work import BACKWARD

COVER, PREFIX, APPLICABLE, GROWS, SPARED, DISJOINT, PROGRESS, LIVING, COPIES = range(1, 10)
LEFT = "left"  # in the reason of a peer's Stop
DURABLE = {"view": View, "records": tuple[Record, ...], "coordinator_term": int, "checkpoint": Checkpoint}


class InvariantBroken(Exception):
    """One line: time, number of the invariant, machine, and what is wrong."""


class Invariants:
    """The observer of one simulation. `tensors[peer]` is filled before it runs. `plan_survives`: whether the faults
    leave each stage of the plan a peer; with `may_be_lost`, the peers that faults may lose, the stages of the last view
    count instead. With `expendable`, all peers that faults may lose, (8) is checked. An observer is called before an
    event's actions are done, so the tensors that an event changed are checked when the next event comes."""

    def __init__(
        self,
        peers: Mapping[int, Peer],
        plan_survives: bool,
        may_be_lost: frozenset[int] | None = None,
        expendable: frozenset[int] | None = None,
    ):
        self.tensors: dict[int, SymbolicTensors] = {}
        self.now_s = 0.0
        self.n_checked = 0
        self._peers = dict(peers)
        self._planned = set(peers)
        self._alive = set(peers)
        self._plan_survives = plan_survives
        self._may_be_lost = may_be_lost
        self._expendable = self._planned if expendable is None else expendable
        self._may_end = False
        self._to_check: tuple[int, bool] | None = None  # (peer, whether its accumulators may have changed)
        self._pending: dict[
            str, View | Record | Checkpoint | int
        ] = {}  # values on their way to the coordinator's disk, by name
        self._view: View | None = None
        self._generation = 0
        self._n_durable = 0
        self._records: dict[tuple[int, int], Record] = {}  # by (generation, step)
        self._disks: Disks | None = None
        self._n_copies = 1
        self._touched: set[int] = set()  # peers that a fault has begun for

    def watch_disks(self, disks: Disks, n_copies: int) -> None:
        """From now on check (9): each part of a checkpoint must be on so many disks."""
        self._disks, self._n_copies = disks, n_copies

    def __call__(self, now_s: float, peer: int, event: Event | Fault, actions: list[Action]) -> None:
        if self._to_check:
            self._check_tensors(*self._to_check)
        self._to_check = None
        self.now_s = now_s
        self.n_checked += 1
        if isinstance(event, Fault):
            self._on_fault(peer, event)
        elif peer == COORDINATOR:
            self._on_coordinator_event(event, actions)
        else:
            self._on_peer_event(peer, event, actions)

    def add_process(self, peer: int, machine: Peer, tensors: SymbolicTensors) -> None:
        """A process that was not there before: that of a newcomer, or of a crashed peer that starts again."""
        self._peers[peer] = machine
        self.tensors[peer] = tensors
        self._alive.add(peer)

    def allow_end(self) -> None:
        """From now on the run may end or be rolled back, since a gradient is not finite."""
        self._may_end = True

    @property
    def _must_last(self) -> bool:
        if self._may_end:
            return False
        if self._may_be_lost is None or self._view is None:
            return self._plan_survives
        stages = range(len(self._view.stage_views))
        return all(set(self._view.working(stage, self._view.n_committed)) - self._may_be_lost for stage in stages)

    def broken(self, invariant: int, peer: int, problem: str) -> NoReturn:
        name = "coordinator" if peer == COORDINATOR else f"peer {peer}"
        raise InvariantBroken(f"{self.now_s:.3f} s: ({invariant}) {name}: {problem}")

    def _on_fault(self, peer: int, fault: Fault) -> None:
        self._touched |= {peer, *fault.others}
        if fault.kind in ENDS:
            self._alive.discard(peer)
            if peer == COORDINATOR:
                self._pending.clear()

    def ended(self, stopped: Mapping[int, Stop], steps: list[int], n_steps: int) -> None:
        """What must hold at the end: (5) and (7)."""
        stop = stopped.get(COORDINATOR)
        if stop is None and self._view is None and not self._planned <= self._alive:
            return  # it waits for a peer that is gone: before the first view the run needs all peers
        if stop is None:
            self.broken(PROGRESS, COORDINATOR, f"the run is not over, with {self._n_durable} steps of {n_steps}")
        if stop.code:
            return  # _on_coordinator_event has checked whether the run may end
        if self._n_durable != n_steps or sorted(set(steps)) != list(range(n_steps)):
            self.broken(PROGRESS, COORDINATOR, f"the run is over with steps {steps} of {n_steps}")
        for peer in sorted(self._alive & set(stopped)):
            version = self.tensors[peer].version
            if stopped[peer].code == 0 and LEFT not in stopped[peer].reason and version != n_steps:
                self.broken(PREFIX, peer, f"is done with version {version} of {n_steps}")

    # ---------------------------------------------------------------------------------------------------- coordinator

    def _on_coordinator_event(self, event: Event, actions: list[Action]) -> None:
        if isinstance(event, Persisted):
            self._on_durable(self._pending.pop(event.name))
        for action in actions:
            if isinstance(action, Persist):
                value = serialize.read(DURABLE[action.name], action.value, action.name)
                self._pending[action.name] = value[-1] if isinstance(value, tuple) else value
            elif isinstance(action, Send):
                self._check_announced(action.body)
            elif isinstance(action, MarkCheckpoint):
                self._check_copies(action.checkpoint)
            elif isinstance(action, LostReport) and action.peer in self._planned - self._expendable:
                self.broken(LIVING, COORDINATOR, f"takes a living peer for lost: {action.reason}")
            elif isinstance(action, Stop) and action.code and self._must_last and self._view:
                self.broken(SPARED, COORDINATOR, f"the run ends: {action.reason}")

    def _check_copies(self, checkpoint: Checkpoint) -> None:
        """(9) for a checkpoint that is complete."""
        assert self._view is not None and self._disks is not None  # checkpoints are of members
        untouched = {member.disk for member in self._view.members if member.peer not in self._touched}
        of_members = {member.disk for member in self._view.members}
        for part in checkpoint.parts:
            for disk in part.disks:
                if not self._disks.holds(disk, part.digest):
                    self.broken(COPIES, COORDINATOR, f"says that {disk or 'the disk'} holds {part}")
            if len(of_members & set(part.disks)) < min(self._n_copies, len(untouched)):
                self.broken(COPIES, COORDINATOR, f"calls version {part.version} complete with {part}")

    def _check_announced(self, body: object) -> None:
        """The coordinator may not announce anything that it would forget by a restart."""
        if isinstance(body, Committed) and self._records.get((self._generation, body.record.step)) != body.record:
            self.broken(PREFIX, COORDINATOR, f"announces step {body.record.step} before its record is durable")
        if isinstance(body, View) and (self._view is None or body.number > self._view.number):
            self.broken(PREFIX, COORDINATOR, f"announces view {body.number} before it is durable")

    def _on_durable(self, value: View | Record | Checkpoint | int) -> None:
        if isinstance(value, View):
            self._on_view(value)
        if not isinstance(value, Record):
            return
        step = value.step
        if step != self._n_durable:
            self.broken(GROWS, COORDINATOR, f"record of step {step} after {self._n_durable} steps")
        self._records[self._generation, step] = value
        self._n_durable = step + 1
        assert self._view is not None  # a view is durable before any step begins
        for member in self._view.members:
            self._check_applicable(member.peer)

    def _on_view(self, view: View) -> None:
        stages = {member.stage for member in view.members}
        if self._may_be_lost is not None and stages != set(range(len(view.stage_views))):
            self.broken(SPARED, COORDINATOR, f"view {view.number} leaves a stage without members: {view.members}")
        if view.generation != self._generation:
            if self._must_last:
                self.broken(SPARED, COORDINATOR, f"rolls back to {view.n_committed} steps")
            for step in range(view.n_committed):
                self._records[view.generation, step] = self._records[self._generation, step]
            self._generation, self._n_durable = view.generation, view.n_committed
        elif view.n_committed != self._n_durable:
            self.broken(
                GROWS, COORDINATOR, f"view {view.number} says {view.n_committed}, durable are {self._n_durable}"
            )
        self._view = view

    # ----------------------------------------------------------------------------------------------------------- peers

    def _on_peer_event(self, peer: int, event: Event, actions: list[Action]) -> None:
        kinds = {type(action) for action in actions}
        sent_to = [action.dst for action in actions if isinstance(action, Send)]
        sent_to += [dst for action in actions if isinstance(action, Post) for dst, _, _ in action.letters]
        if peer in sent_to:
            self.broken(PROGRESS, peer, "sends something to itself, and waits for it")
        if Stop in kinds:
            self._alive.discard(peer)
        if Free in kinds and not kinds & {Restore, FindPart}:  # which a rollback begins with
            self._check_freed(peer, [action.step for action in actions if isinstance(action, Free)])
        counts = any(isinstance(action, Run) and action.work.kind == BACKWARD for action in actions)
        adopts = isinstance(event, Received) and isinstance(event.body, View)
        self._to_check = (peer, counts or adopts)

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
                self.broken(APPLICABLE, peer, f"cannot apply step {round.step}: it does not hold the result of {round}")

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

    def applied(self, peer: int, step: int, rounds: frozenset[Round]) -> None:
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
