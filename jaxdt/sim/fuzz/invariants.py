"""What must hold at every event of a simulation, whatever befalls it (step protocol, Sec. 11).

  (1) each result counts every microbatch once, computed with the version of its step
  (2) what a member has applied is a prefix of the durable records
  (3) every member of the view can apply every durable record that it has not applied
  (4) within a generation records only grow
  (5) nothing is rolled back, and the run does not end, while each stage keeps a peer that no fault took; before the
      first view the run needs everybody; where peers change stages, each stage of the last view counts, and no view
      leaves a stage without members
  (6) no microbatch is in the accumulators of two live members of one view
  (7) the run gets to its end within a stated time after the last fault is over

Seen from outside: from what is made durable, from what is applied, and from what the tensors hold (contents.py); the
machines are not asked what they believe, but for the view that they have adopted. `SymbolicTensors` also says when a
machine wants a tensor that is not there, under (1).
"""

from collections.abc import Mapping

from jaxdt.membership.peer import Peer
from jaxdt.protocol.events import (
    COORDINATOR,
    Action,
    Committed,
    Event,
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
from jaxdt.sim.faults import ENDS, Fault
from jaxdt.sim.fuzz.symbolic_tensors import SymbolicTensors, counted_twice
from jaxdt.spec import serialize
from jaxdt.spec.work import BACKWARD

COVER, PREFIX, APPLICABLE, GROWS, SPARED, DISJOINT, PROGRESS = range(1, 8)
LEFT = "left"  # in the reason of a peer's Stop
DURABLE = {"view": View, "records": tuple[Record, ...], "coordinator_term": int}


class InvariantBroken(Exception):
    """One line: when, which invariant, who, what."""


class Invariants:
    """The observer of one simulation. `contents` is filled before it runs; `must_last`: the faults leave each stage of
    the plan a peer; with `taken`, the peers that faults take, the stages of the last view count instead. What an event
    did to the tensors is looked at when the next one comes, since an observer hears of it before it is done."""

    def __init__(self, peers: Mapping[int, Peer], must_last: bool, taken: frozenset[int] | None = None):
        self.contents: dict[int, SymbolicTensors] = {}
        self.now_s = 0.0
        self.n_checked = 0
        self._peers, self._may_end = dict(peers), False
        self._planned, self._taken = must_last, taken
        self._of_plan, self._alive = set(peers), set(peers)
        self._changed: tuple[int, bool] | None = None
        self._pending: dict[str, View | Record] = {}
        self._view: View | None = None
        self._generation = self._n_durable = 0
        self._records: dict[tuple[int, int], Record] = {}
        self.checkpoint = 0  # version of the newest complete one

    def __call__(self, now_s: float, who: int, what: Event | Fault, actions: list[Action]) -> None:
        if self._changed:
            self._look_at(*self._changed)
        self._changed = None
        self.now_s = now_s
        self.n_checked += 1
        if isinstance(what, Fault):
            self._alive -= {who} if what.kind in ENDS else set()
            if who == COORDINATOR and what.kind in ENDS:
                self._pending.clear()
        elif who == COORDINATOR:
            self._coordinator(what, actions)
        else:
            self._peer(who, what, actions)

    def comes(self, peer: int, machine: Peer, contents: SymbolicTensors) -> None:
        """A process that was not there before: a newcomer's, or one of a peer that crashed."""
        self._peers[peer], self.contents[peer] = machine, contents
        self._alive.add(peer)

    def may_end(self) -> None:
        """From now on the run may end or be rolled back: a gradient is not finite."""
        self._may_end = True

    @property
    def _must_last(self) -> bool:
        if self._may_end or self._taken is None or self._view is None:
            return self._planned and not self._may_end
        stages = range(len(self._view.stage_views))
        return all(set(self._view.working(stage, self._view.n_committed)) - self._taken for stage in stages)

    def broken(self, which: int, who: int, what: str) -> None:
        name = "coordinator" if who == COORDINATOR else f"peer {who}"
        raise InvariantBroken(f"{self.now_s:.3f} s: ({which}) {name}: {what}")

    def ended(self, stopped: Mapping[int, Stop], steps: list[int], n_steps: int) -> None:
        """What must hold at the end: (5) and (7)."""
        stop = stopped.get(COORDINATOR)
        if stop is None and self._view is None and not self._of_plan <= self._alive:
            return  # it waits for who is gone: before the first view the run needs everybody
        if stop is None:
            self.broken(PROGRESS, COORDINATOR, f"the run is not over, with {self._n_durable} steps of {n_steps}")
        if stop.code:
            return  # which _coordinator has judged
        if self._n_durable != n_steps or sorted(set(steps)) != list(range(n_steps)):
            self.broken(PROGRESS, COORDINATOR, f"the run is over with steps {steps} of {n_steps}")
        for peer in sorted(self._alive & set(stopped)):
            if stopped[peer].code == 0 and LEFT not in stopped[peer].reason and self.contents[peer].version != n_steps:
                self.broken(PREFIX, peer, f"is done with version {self.contents[peer].version} of {n_steps}")

    # ---------------------------------------------------------------------------------------------------- coordinator

    def _coordinator(self, event: Event, actions: list[Action]) -> None:
        if isinstance(event, Persisted):
            self._durable(self._pending.pop(event.name))
        for action in actions:
            if isinstance(action, Persist):
                value = serialize.read(DURABLE[action.name], action.value, action.name)
                self._pending[action.name] = value[-1] if isinstance(value, tuple) else value
            elif isinstance(action, Send):
                self._announced(action.body)
            elif isinstance(action, MarkCheckpoint):
                self.checkpoint = action.version
            elif isinstance(action, Stop) and action.code and self._must_last and self._view:
                self.broken(SPARED, COORDINATOR, f"the run ends: {action.reason}")

    def _announced(self, body: object) -> None:
        """Nothing may be known that a restart of the coordinator would forget."""
        if isinstance(body, Committed) and self._records.get((self._generation, body.record.step)) != body.record:
            self.broken(PREFIX, COORDINATOR, f"announces step {body.record.step} before its record is durable")
        if isinstance(body, View) and (self._view is None or body.number > self._view.number):
            self.broken(PREFIX, COORDINATOR, f"announces view {body.number} before it is durable")

    def _durable(self, value: View | Record | int) -> None:
        if isinstance(value, View):
            self._on_view(value)
        if not isinstance(value, Record):
            return
        step = value.step
        if step != self._n_durable:
            self.broken(GROWS, COORDINATOR, f"record of step {step} after {self._n_durable} steps")
        self._records[self._generation, step] = value
        self._n_durable = step + 1
        for member in self._view.members:
            self._can_apply(member.peer)

    def _on_view(self, view: View) -> None:
        if self._taken is not None and {member.stage for member in view.members} != set(range(len(view.stage_views))):
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

    def _peer(self, peer: int, event: Event, actions: list[Action]) -> None:
        kinds = {type(action) for action in actions}
        sent_to = [action.dst for action in actions if isinstance(action, Send)]
        sent_to += [dst for action in actions if isinstance(action, Post) for dst, _, _ in action.letters]
        if peer in sent_to:
            self.broken(PROGRESS, peer, "sends something to itself, and waits for it")
        if Stop in kinds:
            self._alive.discard(peer)
        if Free in kinds and Restore not in kinds:
            self._freed(peer, [action.step for action in actions if isinstance(action, Free)])
        counts = any(isinstance(action, Run) and action.work.kind == BACKWARD for action in actions)
        adopts = isinstance(event, Received) and isinstance(event.body, View)
        self._changed = (peer, counts or adopts)

    def _look_at(self, peer: int, counted: bool) -> None:
        self._can_apply(peer)
        if counted:
            self._disjoint(peer)

    def _can_apply(self, peer: int) -> None:
        """(3) for one member: it holds the results that the records name which it has not applied."""
        contents = self.contents[peer]
        owed = range(contents.version, self._n_durable)
        if not owed or peer not in self._alive or self._peers[peer].membership.view is None:
            return
        if peer not in {member.peer for member in self._view.members}:
            return
        begins = self._view.n_committed
        lacks = contents.generation != self._generation or contents.version < begins
        if peer in self._view.joining and lacks:
            if self._n_durable > begins:
                self.broken(APPLICABLE, peer, f"has not got the state with which step {begins} began")
            return
        if contents.generation != self._generation:
            return
        for round in (round for step in owed for round in self._records[self._generation, step].rounds):
            if contents.concerns(round) and not contents.holds(round):
                self.broken(APPLICABLE, peer, f"cannot apply step {round.step}: it does not hold the result of {round}")

    def _disjoint(self, peer: int) -> None:
        """(6) for one member and the replicas that have adopted the same view."""
        view = self._peers[peer].membership.view
        if view is None:
            return
        here = {
            replica: self.contents[replica]
            for replica in view.stage_peers(self.contents[peer].stage)
            if replica in self._alive and self._peers[replica].membership.view == view
        }
        for step in sorted(self.contents[peer].accumulators):
            found = counted_twice(here, step)
            if found:
                both = f"peers {found[1]} of view {view.number} both count {found[0]}"
                self.broken(DISJOINT, peer, f"step {step}: {both}")

    def _freed(self, peer: int, steps: list[int]) -> None:
        """Nobody lets go of a step without having applied it."""
        if self.contents[peer].version in steps:
            self.broken(PREFIX, peer, f"lets go of step {self.contents[peer].version} without having applied it")

    def applied(self, peer: int, step: int, rounds: frozenset[Round]) -> None:
        """A peer begins the update of a step with the results of `rounds`."""
        contents = self.contents[peer]
        record = self._records.get((contents.generation, step))
        if record is None:
            self.broken(PREFIX, peer, f"applies step {step}, of which no record is durable")
        if step != contents.version:
            self.broken(PREFIX, peer, f"applies step {step} to version {contents.version}")
        if not rounds and record.verdict != "skip":
            self.broken(PREFIX, peer, f"skips step {step}, the record says {record.verdict}")
        if not rounds <= set(record.rounds):
            self.broken(PREFIX, peer, f"applies {sorted(rounds)}, the record names {sorted(record.rounds)}")
