"""Tensors of a simulation that hold no numbers, but what they are made of: which microbatches, and with which version.

So a run without arithmetic still shows whether an update counts each microbatch once: the accumulator is a count of
microbatches, a slice too, a sum adds the counts, and an update looks at them. Tensors come and go as in the runtime's
store; to want one that is not there is an error, as it is there.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Mapping

from jaxdt.protocol.events import Boundary, Key, Message, Round, SliceKey, State, StateKey
from jaxdt.protocol.message import tensor_key
from jaxdt.spec.delay import NO_DELAY, Delay
from jaxdt.spec.sizes import Group
from jaxdt.spec.work import BACKWARD, EVALUATE, FORWARD, GATHER, REGENERATE, Work

EXACT_COVER = 1
N_WORDS = 1000  # of a state: a few slices
NO_STATE = -1  # the version of a newcomer

Broken = Callable[[int, int, str], None]
Applied = Callable[[int, int, frozenset[Round]], None]


class SymbolicTensors:
    """What one peer of `stage` holds. `groups` are those of its stage; `broken(which, peer, what)` is called when an
    invariant does not hold, `applied(peer, step, rounds)` with every update. `spoilt(generation, step)` says whether
    the gradient of a step is not finite; `version` is the one it starts with."""

    def __init__(
        self,
        peer: int,
        stage: int,
        n_stages: int,
        n_microbatches: int,
        groups: tuple[Group, ...],
        broken: Broken,
        applied: Applied,
        spoilt: Callable[[int, int], bool] = lambda generation, step: False,
        version: int = 0,
        delay: Delay = NO_DELAY,
    ):
        self._delay = delay
        self.peer, self.stage, self._last = peer, stage, stage == n_stages - 1
        self.version, self.generation = version, 0
        self.n_words = N_WORDS
        self.accumulators: dict[int, Counter] = {}
        self._groups = {group.name: group for group in groups}
        self._n_microbatches = n_microbatches
        self._broken, self._applied, self._spoilt = broken, applied, spoilt
        self._boundaries: dict[Key, int] = {}  # the generation in which they were computed
        self._residuals: dict[Key, int] = {}
        self._own: dict[Round, Counter] = {}
        self._slices: dict[SliceKey, Counter] = {}
        self._void: set[Round] = set()
        self._fetched: dict[int, int] = {}  # word -> version

    # ------------------------------------------------------------------------------------------------------- compute

    def run(self, work: Work, scale: float, rounds: tuple[Round, ...] = ()) -> dict[str, float]:
        """Do the Work; the values of its Ran, one sample of loss 1 for each microbatch."""
        step = work.step
        held = range(self.version - self._delay.steps, self.version + 1)
        if work.kind in (FORWARD, BACKWARD, REGENERATE, EVALUATE) and self.version_for(step) not in held:
            self._broken(EXACT_COVER, self.peer, f"{work} is computed with one of the versions {list(held)}")
        if work.kind == GATHER:
            self._own |= dict.fromkeys(rounds, Counter(self.accumulators.get(step, ())))
        elif work.kind == FORWARD:
            self._forward(work)
        elif work.kind == EVALUATE:
            self._evaluate(work)
        elif work.kind in (BACKWARD, REGENERATE):
            self._backward(work)
        else:
            self._update(step, rounds)
        counts = work.kind in (BACKWARD, EVALUATE)
        return ({"n_samples": 1} | ({"loss_sum": 1.0} if self._last else {})) if counts else {}

    def version_for(self, step: int) -> int:
        """The version that a step is computed with."""
        return self._delay.version_of(step)

    def _forward(self, work: Work) -> None:
        if not self._last:
            self._take_input("act", work)
            self._residuals[_key("act", work)] = self._boundaries[_key("act", work, 1)] = self.generation

    def _evaluate(self, work: Work) -> None:
        self._take_input("eval", work)
        self._boundaries[_key("eval", work, 1)] = self.generation

    def _backward(self, work: Work) -> None:
        if self._last:
            self._take_input("act", work)
        else:
            self._use(self._boundaries, _key("grad", work, 1), work)
            self._use(self._residuals, _key("act", work), work)
        if work.kind == BACKWARD:
            item = (self.generation, self.version_for(work.step), self.stage, work.microbatch)
            self.accumulators.setdefault(work.step, Counter())[item] += 1
        self._boundaries[_key("grad", work)] = self.generation

    def _take_input(self, kind: str, work: Work) -> None:
        if self.stage > 0:
            self._use(self._boundaries, _key(kind, work), work)

    def _use(self, kept: dict[Key, int], key: Key, work: Work) -> None:
        if key not in kept:
            self._missing(f"{key} for {work}")
        generation = kept.pop(key)
        if generation != self.generation:
            self._broken(
                EXACT_COVER, self.peer, f"{work} in generation {self.generation} uses {key} of generation {generation}"
            )

    def _update(self, step: int, rounds: tuple[Round, ...]) -> None:
        """What each slice of the sums holds was looked at when it was added up. None: the record says skip."""
        if rounds and {(step, name) for name in self._groups} != {(round.step, round.group) for round in rounds}:
            self._broken(EXACT_COVER, self.peer, f"updates with {rounds}, has the groups {sorted(self._groups)}")
        for round in rounds:
            if not self.holds(round):
                self._missing(f"the whole sum of {round}")
        self._applied(self.peer, step, frozenset(rounds))
        self.version = step + 1

    def holds(self, round: Round) -> bool:
        """Whether the whole result of a round is here."""
        held = sum(key.hi - key.lo for key in self._slices if key.src is None and key.round == round)
        return held == self._groups[round.group].n_elements

    def concerns(self, round: Round) -> bool:
        """Whether the round is one of this peer's groups."""
        return round.group in self._groups

    # ------------------------------------------------------------------------------------------------------- tensors

    def take(self, body: Message) -> Counter | int:
        key = tensor_key(body)
        if isinstance(key, StateKey):
            if key.version != self.version:
                self._missing(f"{key}, having version {self.version}")
            return key.version
        if isinstance(key, Key):
            if key not in self._boundaries:
                self._missing(f"{key} to send it")
            return self._boundaries[key]
        if key.src is not None:
            return self._own_part(key)
        if key not in self._slices:
            self._missing(f"the sum {key} to send it")
        return self._slices[key]

    def put(self, body: Message, src: int, tensor: Counter | int) -> None:
        if isinstance(body, Boundary):
            self._boundaries[body.key] = tensor
        elif isinstance(body, State):
            self._fetched.update({word: tensor for word in range(body.key.lo, body.key.hi)})
        elif body.key.round not in self._void:
            self._slices[body.key] = tensor

    def sum(self, key: SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        """The sum must hold every microbatch of every stage of the group once, computed with the step's version."""
        total = Counter()
        for member in members:
            total.update(self._own_part(key) if member == self.peer else self._part(key, member))
        stages = self._groups[key.round.group].stages
        mark = (self.generation, self._delay.version_of(key.round.step))
        expected = {(*mark, stage, m): 1 for stage in stages for m in range(self._n_microbatches)}
        if total != expected:
            wrong = {item: n for item, n in total.items() if n != expected.get(item, 0)}
            self._broken(EXACT_COVER, self.peer, f"{key.round} counts {wrong} and lacks {set(expected) - set(total)}")
        self._slices[key] = total
        norm = float("nan") if self._spoilt(self.generation, key.round.step) else 1.0
        return zlib.crc32(repr(sorted(total.items())).encode()), norm

    def forget(self, round: Round) -> None:
        self._void.add(round)
        self._own.pop(round, None)
        for key in [key for key in self._slices if key.round == round]:
            del self._slices[key]

    def discard(self, key: Key) -> None:
        self._boundaries.pop(key, None)

    def free(self, step: int, rounds: tuple[Round, ...]) -> None:
        for old in [kept for kept in self.accumulators if kept <= step]:
            del self.accumulators[old]
        for kept in (self._residuals, self._boundaries):
            for key in [key for key in kept if key.step <= step]:
                del kept[key]
        for last in rounds:
            for round in {key.round for key in self._slices} | self._own.keys():
                if round.group == last.group and round <= last:
                    self.forget(round)
            self._void.add(last)

    def write_checkpoint(self, version: int) -> None:
        """Nothing of it is read but the version."""

    def restore(self, version: int, generation: int) -> None:
        self.version, self.generation = version, generation
        self.accumulators.clear()
        self._residuals.clear()

    def install(self, version: int, generation: int) -> None:
        """The fetched words must be all of them, of that version."""
        versions = set(self._fetched.values())
        if len(self._fetched) != self.n_words or versions != {version}:
            self._missing(f"a whole state, has {len(self._fetched)} words of versions {sorted(versions)}")
        self.restore(version, generation)
        self._fetched.clear()

    def _own_part(self, key: SliceKey) -> Counter:
        if key.round not in self._own:
            self._missing(f"its own part of {key}")
        return self._own[key.round]

    def _part(self, key: SliceKey, member: int) -> Counter:
        part = SliceKey(key.round, key.lo, key.hi, member)
        if part not in self._slices:
            self._missing(f"{part} to add it up")
        return self._slices.pop(part)

    def _missing(self, what: str) -> None:
        self._broken(EXACT_COVER, self.peer, f"wants a tensor that it does not hold: {what}")


def _key(kind: str, work: Work, offset: int = 0) -> Key:
    return Key(kind, work.step, work.stage + offset, work.microbatch)


def counted_twice(holders: Mapping[int, SymbolicTensors], step: int) -> tuple[tuple, tuple[int, ...]] | None:
    """A microbatch that several of `holders` have in their accumulators, and who they are."""
    found: dict[tuple, int] = {}
    for peer, contents in sorted(holders.items()):
        for item in contents.accumulators.get(step, ()):
            if item in found:
                return item, (found[item], peer)
            found[item] = peer
    return None
