"""The participants of a round of averaging, and the rules by which its contributions are right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxdt.protocol.ledger import Item, cover_problem

Cover = tuple[tuple[int, ...], tuple[tuple[Item, ...], ...]]  # contributors, and the contributions of each


@dataclass(frozen=True)
class Participants:
    """Contributors send a vector each, in this order. Each owner adds up its shard of the vectors. Receivers get the
    sums, in this order. A peer may be all three."""

    contributors: tuple[int, ...]
    owners: tuple[int, ...]
    receivers: tuple[int, ...]


class CoverRule(Protocol):
    """Tells which contributions make a sum right."""

    def problem(self, cover: Cover) -> str:
        """'' if the contributions are right, else one line for people about the fault."""
        ...


@dataclass(frozen=True)
class EachOnce:
    """One contribution of every one of these members, an item (member, its local steps)."""

    members: Sequence[int]

    def problem(self, cover: Cover) -> str:
        contributors, items = cover
        found = [[member for member, _ in own] for own in items]
        if tuple(contributors) == tuple(self.members) and found == [[member] for member in self.members]:
            return ""
        return f"contributions of {found}, expected one of each of {list(self.members)}"


@dataclass(frozen=True)
class ExactCover:
    """Every microbatch of every stage exactly once (step protocol, Sec. 4.3)."""

    stages: Sequence[int]
    n_microbatches: int

    def problem(self, cover: Cover) -> str:
        contributors, items = cover
        if len(contributors) != len(items):
            return f"{len(contributors)} members with {len(items)} sets"
        return cover_problem(dict(zip(contributors, items, strict=True)), self.stages, self.n_microbatches)
