"""Recovery from a view in mid-step: what each member has counted and still keeps, and what has to be done again.

Every wiring owns one Recovery and records in it what its peer counts of a step. A view in mid-step makes all routes of
the step void. Then each member tells the others its inventory: the microbatches in its accumulator, and those whose
tensors it keeps (step protocol, Sec. 4.6). Once all inventories are here, `missing_tasks` follow from them, the same at
every member. A microbatch that a live member counted is never done again; one that a lost member counted left with that
member's accumulator.
"""

from collections.abc import Collection

from jaxdt.protocol import events as ev
from jaxdt.run.work import Work, WorkKind
from jaxdt.wiring.base import StepShape
from jaxdt.wiring.retention import Retention
from jaxdt.wiring.tasks import Task, redo

Counted = tuple[str, int]  # kind of Work and microbatch


class Recovery:
    """One peer's side. `is_active` from a view in mid-step until the step is over."""

    def __init__(self, shape: StepShape):
        self._n_stages = shape.n_stages
        self._retention = Retention(shape)
        self._counted: set[Counted] = set()
        self._view: ev.View | None = None
        self._members: tuple[int, ...] = ()
        self._inventories: dict[int, tuple[frozenset[Counted], frozenset[int]]] = {}  # counted, and kept microbatches
        self._owes_inventory = False

    # ------------------------------------------------------------------------------------------ the peer's own step

    def begin_step(self) -> None:
        """A step begins: nothing of it is counted, and nothing is kept of the one before."""
        self._counted.clear()
        self._retention.begin_step()

    def made(self, work: Work) -> list[ev.Discard]:
        """A Work of the step is done and its result is kept. Returns the tensors that are let go for it."""
        return self._retention.made(work)

    def keeps_output(self, microbatch: int) -> bool:
        """Whether this peer can send its output for the microbatch of this step again."""
        return self._retention.keeps_output(microbatch)

    def count(self, kind: str, microbatch: int) -> None:
        """A Work is counted at this peer: no other replica of its stage need do it."""
        self._counted.add((kind, microbatch))

    # ---------------------------------------------------------------------------------------- after a view in mid-step

    @property
    def is_active(self) -> bool:
        return self._view is not None

    @property
    def _current_view(self) -> ev.View:
        """The view that recovery follows from; there is one while recovery is active."""
        assert self._view is not None
        return self._view

    @property
    def owes_inventory(self) -> bool:
        """Whether this peer has yet to tell its inventory."""
        return self._owes_inventory

    def start(self, view: ev.View, members: tuple[int, ...]) -> None:
        """A view in which those `members` compute the step under way, this peer among them."""
        self._view, self._members = view, members
        self._inventories.clear()
        self._owes_inventory = True

    def stop(self) -> None:
        """The step is over: what the view asked for was of that step."""
        self._view = None
        self._inventories.clear()

    def forget(self) -> None:
        """This peer has no part in a step under way."""
        self.stop()
        self._owes_inventory = False
        self._counted.clear()

    def inventory(self, step: int) -> ev.Inventory:
        """The inventory that this peer sends to the others. From now on it announces all that it counts, and keeps the
        tensors that it keeps."""
        self._owes_inventory = False
        return ev.Inventory(step, tuple(sorted(self._counted)), self._retention.promise())

    def add(self, src: int, inventory: ev.Inventory) -> None:
        """A member's inventory, or this peer's own."""
        self._inventories[src] = frozenset(inventory.counted), frozenset(inventory.kept)

    def has_inventories_of(self, members: Collection[int]) -> bool:
        return set(members) <= set(self._inventories)

    @property
    def is_complete(self) -> bool:
        """Whether all members have told their inventory."""
        return self.has_inventories_of(self._members)

    def missing_tasks(self, n_microbatches: int, n_held_out: int) -> list[Task]:
        """The tasks of a step that have to be done again."""
        numbers = range(max(n_microbatches, n_held_out))
        return [task for m in numbers for task in self._missing(m, m < n_microbatches, m < n_held_out)]

    def keepers(self, microbatch: int) -> dict[int, int]:
        """Stage -> the live member that counted a microbatch there and still keeps the tensors that it made of it."""
        counted = self._holders(microbatch)
        return {stage: peer for stage, peer in counted.items() if microbatch in self._inventories[peer][1]}

    def _missing(self, microbatch: int, trains: bool, evaluates: bool) -> list[Task]:
        """The tasks that a microbatch still needs. A stage whose result of the step is there needs none."""
        done = {round.stage for round, _ in self._current_view.results}
        open_stages = [stage for stage in range(self._n_stages) if stage not in done]
        last = self._n_stages - 1
        tasks: list[Task] = []
        if evaluates and last in open_stages and self._holder(last, (WorkKind.EVALUATE, microbatch)) is None:
            tasks.append(Task(WorkKind.EVALUATE, microbatch, 0, last))
        if trains:
            holders = self._holders(microbatch)
            missing = [stage for stage in open_stages if stage not in holders]
            if missing:
                tasks.append(redo(microbatch, missing, self.keepers(microbatch), self._n_stages))
        return tasks

    def _holders(self, microbatch: int) -> dict[int, int]:
        """Stage -> the live member that counted a microbatch there."""
        found = ((stage, self._holder(stage, (WorkKind.BACKWARD, microbatch))) for stage in range(self._n_stages))
        return {stage: peer for stage, peer in found if peer is not None}

    def _holder(self, stage: int, counted: Counted) -> int | None:
        """The live member of a stage that counted this."""
        inventories = self._inventories
        peers = self._current_view.stage_peers(stage)
        return next((peer for peer in peers if peer in inventories and counted in inventories[peer][0]), None)
