"""Tasks: what a router has to get done in a step, whole or again after members were lost."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxdt.run.work import WorkKind


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
