"""What the members of a view in mid-step have counted of the step, and what they still keep."""

from collections.abc import Collection

from jaxdt.protocol.events import Inventory, View
from jaxdt.spec.work import BACKWARD, EVALUATE
from jaxdt.wiring.dispatcher import Task, redo


class RecoveryState:
    """Filled by the members' Inventory messages; `view` says who is at which stage."""

    def __init__(self, view: View):
        self._view = view
        self._counted: dict[int, frozenset[tuple[str, int]]] = {}
        self._kept: dict[int, frozenset[int]] = {}

    def add(self, src: int, have: Inventory) -> None:
        self._counted[src], self._kept[src] = frozenset(have.counted), frozenset(have.kept)

    def has_all(self, members: Collection[int]) -> bool:
        """Whether all of them have said it."""
        return set(members) <= set(self._counted)

    def holder(self, stage: int, what: tuple[str, int]) -> int | None:
        """The live member of a stage that counted this (kind and microbatch)."""
        return next((p for p in self._view.stage_peers(stage) if what in self._counted.get(p, ())), None)

    def holders(self, m: int) -> dict[int, int]:
        """Stage -> the live member that counted a microbatch there."""
        found = ((stage, self.holder(stage, (BACKWARD, m))) for stage in range(len(self._view.stage_views)))
        return {stage: peer for stage, peer in found if peer is not None}

    def keepers(self, m: int) -> dict[int, int]:
        """Those of them who still have the tensors that they made of it."""
        return {stage: peer for stage, peer in self.holders(m).items() if m in self._kept[peer]}

    def missing(self, m: int, n_microbatches: int, n_evaluations: int) -> list[Task]:
        """What of one microbatch is to be done again; nothing at stages whose result is there."""
        held = {round.group for round, _ in self._view.results}
        n_stages = len(self._view.stage_views)
        open_stages = [s for s in range(n_stages) if f"stage{s}" not in held]
        top = n_stages - 1
        tasks, evaluates = [], m < n_evaluations and top in open_stages
        if evaluates and self.holder(top, (EVALUATE, m)) is None:
            tasks.append(Task(EVALUATE, m, 0, top))
        holders = self.holders(m)
        missing = [s for s in open_stages if s not in holders] if m < n_microbatches else []
        return tasks + ([redo(m, missing, self.keepers(m), n_stages)] if missing else [])
