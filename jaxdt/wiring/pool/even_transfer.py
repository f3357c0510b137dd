"""Evenly segmented transfer (hybrid parameter servers): the microbatches of a step, cut evenly among the
peers of each stage, and who sends which of them to whom.

Part i of n holds the indices floor(i * length / n) .. floor((i + 1) * length / n) - 1. All cuts are by index, so a
gradient goes back over the same pairs that its activation came over, and stages of m and n peers exchange over at most
m + n - 1 pairs.
"""

from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan


def part(length: int, n_parts: int, index: int) -> range:
    """The indices of a part of an even cut."""
    return range(index * length // n_parts, (index + 1) * length // n_parts)


def part_of(length: int, n_parts: int, index: int) -> int:
    """The part that holds an index."""
    return ((index + 1) * n_parts - 1) // length


def server_of(plan: Plan, worker: int) -> int:
    """The server that a worker of the plan computes for: the workers of a stage in turn, its servers in turn."""
    for workers, servers in zip(plan.roles.workers, plan.placement, strict=bool(plan.roles.workers)):
        if worker in workers:
            return servers[workers.index(worker) % len(servers)]
    raise BadInput(f"worker: got {worker}, expected one of the plan's workers {sorted(plan.workers)}")
