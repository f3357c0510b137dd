"""Recovery from a view in mid-step: what each member has counted and still keeps, and what has to be done again.

Every wiring owns one Recovery and records in it what its peer counts of a step. A view in mid-step makes all routes of
the step void. Then each member tells the others its inventory: the microbatches in its accumulator, and those whose
tensors it keeps (step protocol, Sec. 4.6). Once all inventories are here, `missing_tasks` follow from them, the same at
every member. A microbatch that a live member counted is never done again; one that a lost member counted left with that
member's accumulator.

With its output and its input gradient at hand, doing a microbatch again costs a neighbour's Work alone. So each peer
keeps these until the step is committed, within a budget: beyond it the oldest tensors are let go, but never the newest.
With a budget of 0 nothing is kept once it is sent. A missing tensor is made again from the nearest copy upstream or
downstream (step protocol, Sec. 9).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxdt.protocol import events as ev
from jaxdt.run.work import Work, WorkKind
from jaxdt.wiring.base import StepShape

Counted = tuple[str, int]  # kind of Work and microbatch


@dataclass(frozen=True)
class Task:
    """A microbatch (kind FORWARD) or held-out microbatch (EVALUATE) through the stages lo..hi. Stages in `regenerate`
    counted it already and only make lost tensors again."""

    kind: WorkKind
    microbatch: int
    lo: int
    hi: int
    regenerate: tuple[int, ...] = ()


def task_kind(work_kind: WorkKind) -> str:
    """The kind of the task that a Work belongs to."""
    return WorkKind.EVALUATE if work_kind == WorkKind.EVALUATE else WorkKind.FORWARD


def redo(microbatch: int, missing: Collection[int], keepers: Mapping[int, int], n_stages: int) -> Task:
    """The task that gets a microbatch counted at the stages where it is missing. keepers[s] is the live member that
    counted it at stage s and keeps its output and input gradient. The range grows over neighbours whose tensors no peer
    keeps, and fills gaps between missing stages: there the tensors are made again, and nothing is counted twice."""
    lo, hi = min(missing), max(missing)
    while lo > 0 and lo - 1 not in keepers:
        lo -= 1
    while hi < n_stages - 1 and hi + 1 not in keepers:
        hi += 1
    return Task(WorkKind.FORWARD, microbatch, lo, hi, tuple(s for s in range(lo, hi + 1) if s not in missing))


def whole_step(n_stages: int, n_microbatches: int, n_held_out: int) -> list[Task]:
    """All tasks of a step, held-out microbatches first."""
    held_out = [Task(WorkKind.EVALUATE, m, 0, n_stages - 1) for m in range(n_held_out)]
    return held_out + [Task(WorkKind.FORWARD, m, 0, n_stages - 1) for m in range(n_microbatches)]


class Recovery:
    """One peer's side. `is_active` from a view in mid-step until the step is over; `owes_inventory` until this peer has
    told its inventory."""

    def __init__(self, shape: StepShape):
        self._stage, self._n_stages = shape.stage, shape.n_stages
        self._budget_bytes = shape.retain_bytes
        activation_bytes, gradient_bytes = shape.sent_bytes_max
        self._bytes = {
            WorkKind.FORWARD: 0 if shape.is_last_stage else activation_bytes,
            WorkKind.BACKWARD: gradient_bytes if shape.stage > 0 else 0,
            WorkKind.REGENERATE: gradient_bytes if shape.stage > 0 else 0,
        }
        self._kept: dict[int, int] = {}  # microbatch -> bytes of output and input gradient, oldest first
        self._outputs: dict[int, int] = {}  # bytes of the outputs whose backward is still to come
        self._kept_bytes = 0  # of both
        self._keeps_all = False  # since this peer has told what it keeps
        self._counted: set[Counted] = set()
        self._view: ev.View | None = None
        self._members: tuple[int, ...] = ()
        self._inventories: dict[int, tuple[frozenset[Counted], frozenset[int]]] = {}  # counted, and kept microbatches
        self.owes_inventory = False

    # ------------------------------------------------------------------------------------------ the peer's own step

    def begin_step(self) -> None:
        """A step begins: nothing of it is counted, and nothing is kept of the one before."""
        self._counted.clear()
        self._kept.clear()
        self._outputs.clear()
        self._kept_bytes = 0
        self._keeps_all = False

    def made(self, work: Work) -> list[ev.Discard]:
        """A Work of the step is done and its result is kept. Returns the tensors that are let go for it."""
        if work.kind not in self._bytes or not self._budget_bytes:
            return []
        step, m = work.place
        n_bytes = self._bytes[work.kind]
        if work.kind == WorkKind.FORWARD:
            self._kept_bytes += n_bytes - self._outputs.get(m, 0)
            self._outputs[m] = n_bytes
            return []
        self._kept_bytes += n_bytes - self._kept.get(m, 0)
        self._kept[m] = self._outputs.pop(m, 0) + n_bytes
        discards: list[ev.Discard] = []
        while self._kept_bytes > self._budget_bytes and not self._keeps_all and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self._kept_bytes -= self._kept.pop(oldest)
            discards.append(ev.Discard(ev.Key("act", step, self._stage + 1, oldest)))
            discards.append(ev.Discard(ev.Key("grad", step, self._stage, oldest)))
        return discards

    def keeps_output(self, microbatch: int) -> bool:
        """Whether this peer can send its output for the microbatch of this step again."""
        return microbatch in self._outputs or microbatch in self._kept

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

    def start(self, view: ev.View, members: tuple[int, ...]) -> None:
        """A view in which those `members` compute the step under way, this peer among them."""
        self._view, self._members = view, members
        self._inventories.clear()
        self.owes_inventory = True

    def stop(self) -> None:
        """The step is over: what the view asked for was of that step."""
        self._view = None
        self._inventories.clear()

    def forget(self) -> None:
        """This peer has no part in a step under way."""
        self.stop()
        self.owes_inventory = False
        self._counted.clear()

    def inventory(self, step: int) -> ev.Inventory:
        """The inventory that this peer sends to the others. From now on it announces all that it counts, and keeps the
        tensors that it keeps."""
        self.owes_inventory = False
        self._keeps_all = True
        return ev.Inventory(step, tuple(sorted(self._counted)), tuple(sorted(self._kept)))

    def add(self, src: int, inventory: ev.Inventory) -> None:
        """A member's inventory, or this peer's own."""
        self._inventories[src] = frozenset(inventory.counted), frozenset(inventory.kept)

    def has_inventories_of(self, members: Collection[int]) -> bool:
        return set(members) <= set(self._inventories)

    @property
    def is_complete(self) -> bool:
        return self.has_inventories_of(self._members)

    def missing_tasks(self, n_microbatches: int, n_held_out: int) -> list[Task]:
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
