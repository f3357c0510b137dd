"""The record of which microbatch's gradient is in whose accumulator, behind "exactly once" (step protocol, Sec. 3, 4).

An item is (stage, microbatch). A round's result is good if the sets of its members are disjoint and together hold every
item of every stage that the group covers.
"""

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping

from jaxdt.protocol import events as ev

Item = tuple[int, int]
NO_LOSSES = ev.Tally()


class Ledger:
    """One peer's own sets: what its accumulator of each step in flight holds, and the losses that it measured."""

    def __init__(self):
        self._samples: dict[int, dict[Item, int]] = {}
        self._tallies: dict[int, ev.Tally] = {}

    def add(self, step: int, item: Item, n_samples: int) -> None:
        """Count an item once; a second time is a bug of the wiring."""
        samples = self._samples.setdefault(step, {})
        if item in samples:
            raise RuntimeError(f"step {step}: the gradient of {item} was added twice")
        samples[_same(item)] = n_samples

    def items(self, step: int) -> tuple[Item, ...]:
        return tuple(sorted(self._samples.get(step, {})))

    def n_samples(self, step: int) -> int:
        return sum(self._samples.get(step, {}).values())

    def measured(self, step: int, tally: ev.Tally) -> None:
        """Losses of some samples more."""
        self._tallies[step] = self._tallies.get(step, NO_LOSSES) + tally

    def tally(self, step: int) -> ev.Tally:
        return self._tallies.get(step, NO_LOSSES)

    def free(self, steps: Iterable[int]) -> None:
        for step in steps:
            self._samples.pop(step, None)
            self._tallies.pop(step, None)


def cover_problem(sets: Mapping[int, Collection[Item]], stages: Iterable[int], n_microbatches: int) -> str:
    """'' if the members' sets are disjoint and cover every microbatch of every stage; else what is wrong."""
    stages = tuple(stages)
    if tuple(sets.values()) == _in_runs(stages, n_microbatches, tuple(map(len, sets.values()))):
        return ""  # pipelines take runs of microbatches, and comparing sets whole does not touch their items
    expected = _expected(stages, n_microbatches)
    if sorted(itertools.chain.from_iterable(sets.values())) == expected:
        return ""
    holder: dict[Item, int] = {}
    for member, items in sorted(sets.items()):
        for item in items:
            if item in holder:
                return f"{item} is in the sets of members {holder[item]} and {member}"
            holder[item] = member
    missing, extra = sorted(set(expected) - set(holder)), sorted(set(holder) - set(expected))
    if missing:
        return f"{len(missing)} items are missing, first {missing[0]}"
    return f"{extra[0]} does not belong to the round" if extra else ""


@functools.lru_cache(maxsize=64)
def _expected(stages: tuple[int, ...], n_microbatches: int) -> list[Item]:
    return sorted(_same((stage, m)) for stage in set(stages) for m in range(n_microbatches))


@functools.lru_cache(maxsize=64)
def _in_runs(stages: tuple[int, ...], n_microbatches: int, lengths: tuple[int, ...]) -> tuple[tuple[Item, ...], ...]:
    """The expected items, dealt out in order to sets of these lengths; each item left over is a set of its own."""
    items = iter(_expected(stages, n_microbatches))
    return (*(tuple(itertools.islice(items, n)) for n in lengths), *((item,) for item in items))


@functools.lru_cache(maxsize=1 << 16)
def _same(item: Item) -> Item:
    """One object for all equal items: comparing it with itself is quick, where one process holds many ledgers."""
    return item
