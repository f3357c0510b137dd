"""Tensors of a simulation that hold no numbers: each names the microbatches and the version that it is made of.

So a run without arithmetic still shows whether an update counts each microbatch once. An accumulator and a slice are
counts of microbatches, and a sum adds and checks the counts. A boundary tensor and a residual are the generation in
which they were computed. What a codec loses of a contribution is a `Lost`, which another one may hold beside its
microbatches.
"""

import functools
import operator
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.codec import FLOAT32_BYTES, loses
from jaxdt.run.delay import NO_DELAY, Delay
from jaxdt.run.sizes import Group
from jaxdt.run.work import Work, WorkKind
from jaxdt.sync.error_feedback import ErrorFeedback
from jaxdt.testing.held_tensors import HELD_OUT, HeldTensors, key_of

N_WORDS = 1000  # 4-byte words of a state: a few slices
NO_STATE = -1  # the version of a newcomer


@dataclass(frozen=True)
class StageLayout:
    """The stage of a peer: its index, the number of stages and of microbatches of a step, the groups that it syncs
    with, and the delay of its updates. `worker_words`: words of the parameters, if the peer is a pool's worker, which
    has no other state; else 0."""

    stage: int
    n_stages: int
    n_microbatches: int
    groups: tuple[Group, ...]
    delay: Delay = NO_DELAY
    worker_words: int = 0


class Lost(NamedTuple):
    """What the codec has lost of a peer's contribution to a round, and of the sums that the peer has added up in it."""

    generation: int
    peer: int
    round: RoundId


@dataclass(frozen=True)
class Checks:
    """`broken(peer, problem)` raises; it is called when a microbatch is not counted once, or a tensor is not there.
    `applied(peer, step, rounds)` is called at every update. `is_nonfinite(generation, step)`: whether the gradient of a
    step is not finite. `contributed(rounds)`: a worker's contribution is added. `gives_back(peer, lost, round)`: a
    round that is applied makes up for this."""

    broken: Callable[[int, str], NoReturn]
    applied: Callable[[int, int, frozenset[RoundId]], None]
    is_nonfinite: Callable[[int, int], bool] = lambda generation, step: False
    contributed: Callable[[Iterable[RoundId]], None] = lambda rounds: None
    gives_back: Callable[[int, Lost, RoundId], None] = lambda peer, lost, round: None


class StepFreed(Exception):
    """The step of a Work was given up after the Work was requested."""


class SymbolicTensors(HeldTensors):
    """The tensors of one peer, which starts with `version`."""

    def __init__(self, peer: int, layout: StageLayout, checks: Checks, version: int = 0):
        super().__init__(peer, (layout.stage, layout.n_stages), layout.worker_words or N_WORDS, checks.broken)
        self.version = version
        self.generation = 0
        self.drift = 0.0  # of the parameters from those that all replicas should have, over their norm
        self.digested: tuple[int, int, float] | None = None  # the generation, version and drift of the last digest
        self.is_worker = layout.worker_words > 0
        self._freed_step = -1
        self._keeps_before = False  # a worker may lack the version before its own
        self._delay = layout.delay
        self._groups = {group.stage: group for group in layout.groups}
        self._feedback = ErrorFeedback[Lost](1 + layout.delay.steps)
        self._n_microbatches = layout.n_microbatches
        self._checks = checks
        self._work = {
            WorkKind.FORWARD: self._forward,
            WorkKind.BACKWARD: self._backward,
            WorkKind.REGENERATE: self._regenerate,
            WorkKind.EVALUATE: self._evaluate,
            WorkKind.GATHER: self._gather,
            WorkKind.CONTRIBUTE: self._contribute,
            WorkKind.UPDATE: self._update,
        }

    # ------------------------------------------------------------------------------------------------------- compute

    def run(self, work: Work, scale: float, rounds: tuple[RoundId, ...] = ()) -> dict[str, float]:
        step = _step(work)
        names_its_input = bool(rounds) or work.kind in (WorkKind.GATHER, WorkKind.UPDATE)
        if step < self.version and not names_its_input:
            return {}  # its step has ended since the Work was requested, as in the runtime's store
        keeps_before = self._keeps_before if self.is_worker else self._delay.steps
        held = range(self.version - keeps_before, self.version + 1)
        if (
            work.kind in (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.REGENERATE, WorkKind.EVALUATE)
            and self.version_for(step) not in held
        ):
            self.broken(f"{work} is computed with one of the versions {list(held)}")
        try:
            return super().run(work, scale, rounds)
        except StepFreed:
            return {}

    def version_for(self, step: int) -> int:
        """The version that a step is computed with."""
        return self._delay.version_of(step)

    def _gather(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        """Lay the accumulator out; that of a worker starts again."""
        step = _step(work)
        for round in rounds:
            held = self.accumulators.get(step, Counter())
            self._own[round] = _microbatches(held) + Counter(
                lost for lost in _lost(held) if lost.round.stage == round.stage
            )
            if loses(self._groups[round.stage].codec, FLOAT32_BYTES):
                owed = self._feedback.owed(round)
                self._own[round].update([] if owed is None else [owed])
                self._feedback.lose(round, Lost(self.generation, self.peer, round))
        if any(round.kind == RoundKind.CONTRIBUTION for round in rounds):
            self.accumulators.pop(step, None)
        return {}

    def _contribute(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        """All slices of a worker's contribution are here, and hold the same, unless it is void by now."""
        step = _step(work)
        if any(round in self._forgotten for round in rounds):
            raise StepFreed
        slices = [part for key, part in self._slices.items() if key.src is None and key.round in rounds]
        if not slices or any(_microbatches(part) != _microbatches(slices[0]) for part in slices):
            self.broken(f"adds {rounds}, whose slices hold {slices}")
        self.accumulators.setdefault(step, Counter()).update(functools.reduce(operator.or_, slices))
        twice = [item for item, n in self.accumulators[step].items() if n > 1]
        if twice:
            self.broken(f"{rounds[0]} brings {twice}, which the accumulator holds already")
        self._checks.contributed(rounds)
        return {}

    def _evaluate(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        self._input(HELD_OUT, work)
        self._boundaries[key_of(HELD_OUT, work, 1)] = self.generation
        return {"n_samples": 1, "loss_sum": 1.0} if self._is_last else {"n_samples": 1}

    def _tokens(self, kind: str, work: Work) -> int:
        return self.generation

    def _forwarded(self, work: Work, x: int) -> int:
        return self.generation

    def _backwarded(self, work: Work, x: int, gy: int | None) -> int:
        if work.kind == WorkKind.BACKWARD:
            step = _step(work)
            item = (self.generation, self.version_for(step), self.stage, work.microbatch)
            self.accumulators.setdefault(step, Counter())[item] += 1
        return self.generation

    def _regenerate(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        self._backward(work, scale, rounds)
        return {}

    def _take(self, held: dict[ev.Key, int], key: ev.Key, work: Work) -> int:
        if key not in held and key.step <= self._freed_step:
            raise StepFreed
        # As in the runtime's store, a worker holds what it has received until the step has ended: its lease may be
        # given to it again, with the same tensor, before the first Work has begun.
        stays = self.is_worker and held is self._boundaries and key in held
        generation = held[key] if stays else super()._take(held, key, work)
        if generation != self.generation:
            self.broken(f"{work} in generation {self.generation} uses {key} of generation {generation}")
        return generation

    def _update(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        """`sum` has checked what each slice holds. Without rounds the record says to skip the step."""
        step = _step(work)
        if rounds and {(step, stage) for stage in self._groups} != {(round.number, round.stage) for round in rounds}:
            self.broken(f"updates with {rounds}, has the groups {sorted(self._groups)}")
        for round in rounds:
            if not self.holds(round):
                self._missing(f"the whole sum of {round}")
        self._checks.applied(self.peer, step, frozenset(rounds))
        for key, total in self._slices.items():
            for lost in _lost(total) if key.round in rounds else []:
                self._checks.gives_back(self.peer, lost, key.round)
        self._feedback.commit(rounds)
        self.version = step + 1
        return {}

    def holds(self, round: RoundId) -> bool:
        """Whether this peer holds the whole result of a round."""
        return self._n_held(round) == self._groups[round.stage].n_elements

    def concerns(self, round: RoundId) -> bool:
        """Whether the round is one of this peer's groups."""
        return round.stage in self._groups

    # ------------------------------------------------------------------------------------------------------- tensors

    def tensor_to_send(self, body: ev.Message) -> Counter | int | tuple[int, float] | None:
        """A boundary tensor is kept until its step is over; a worker gives its output up."""
        tensor = super().tensor_to_send(body)
        if isinstance(body, ev.TaskOutput):
            self.discard(body.key)
        return tensor

    def _given(self, key: ev.StateKey) -> tuple[int, float]:
        """The version of the state, and its drift."""
        if key.version != self.version:
            self._missing(f"{key}, having version {self.version}")
        return self.version, self.drift

    def offer(self, round: RoundId, step: int) -> None:
        raise AssertionError(f"{round} of step {step}: replicas that are equal keep no vector for later")

    def _added(self, key: ev.SliceKey, parts: Sequence[Counter]) -> tuple[Counter, int, float]:
        """The sum must hold every microbatch of every stage of the group once, computed with the step's version."""
        total = Counter()
        for part in parts:
            total.update(part)
        checksum, norm = zlib.crc32(repr(sorted(total.items(), key=repr)).encode()), 1.0
        if key.round.kind == RoundKind.CONTRIBUTION:
            return total, checksum, norm
        stages = self._groups[key.round.stage].stages
        provenance = (self.generation, self._delay.version_of(key.round.number))
        expected = {(*provenance, stage, m): 1 for stage in stages for m in range(self._n_microbatches)}
        expected |= dict.fromkeys(_lost(total), 1)
        if total != expected:
            wrong = {item: n for item, n in total.items() if n != expected.get(item, 0)}
            self.broken(f"{key.round} counts {wrong} and lacks {set(expected) - set(total)}")
        return total, checksum, float("nan") if self._checks.is_nonfinite(self.generation, key.round.number) else norm

    def forget(self, round: RoundId) -> None:
        super().forget(round)
        self._feedback.forget(lambda other: other == round)

    def free(self, step: int, rounds: tuple[RoundId, ...]) -> None:
        super().free(step, rounds)
        self._freed_step = step
        for by_key in (self._residuals, self._boundaries):
            for key in [key for key in by_key if key.step <= step]:
                del by_key[key]
        last = {round.series: round for round in sorted(rounds)}
        is_over = lambda round: round.series in last and round <= last[round.series]  # noqa: E731
        self._forgotten = {round for round in self._forgotten if not is_over(round)}
        self._feedback.forget(is_over)
        self._own = {round: own for round, own in self._own.items() if not is_over(round)}
        self._slices = {key: part for key, part in self._slices.items() if not is_over(key.round)}

    def write_checkpoint(self, version: int) -> None:
        """What is written is the present state, whatever its version."""
        if version != self.version:
            self._missing(f"the state of version {version} to write it, having version {self.version}")

    def restore(self, restore: ev.Restore) -> None:
        version, generation = restore.version, restore.generation
        if restore.in_place and (version, generation) != (self.version, self.generation):
            self._missing(f"the state of version {version} and generation {generation} in place")
        if not restore.in_place:
            self.drift = 0.0
        self._begin(version, generation)

    def _begin(self, version: int, generation: int) -> None:
        is_other = generation != self.generation
        self.version, self.generation = version, generation
        self._freed_step = -1
        if not self.is_worker:
            self._feedback.reset()
        self.accumulators.clear()
        self._residuals.clear()
        last = max(self._delay.open(version)) if is_other else float("inf")
        self._boundaries = {key: at for key, at in self._boundaries.items() if version <= key.step <= last}

    def install(self, install: ev.Install) -> ev.Installed:
        """All words of the state must have been fetched, and all of that version. One of the same version repairs the
        state, and nothing else changes."""
        states = self._fetched_state(install)
        versions = {version for version, _ in states}
        if versions != {install.version}:
            self._missing(f"a state for {install}, has versions {sorted(versions)}")
        if (install.version, install.generation) != (self.version, self.generation) and not install.beside_work:
            self._begin(install.version, install.generation)
        self.version = install.version
        self._keeps_before = install.beside_work
        self.drift = max((drift for _, drift in states), key=abs)
        return ev.Installed(install.version)

    def perturb(self, factor: float) -> None:
        self.drift += factor

    def digest(self) -> tuple[int, float, tuple[float, ...]]:
        self.digested = (self.generation, self.version, self.drift)
        return zlib.crc32(repr(self.digested).encode()), 1.0, (self.drift,)


def _lost(part: Counter) -> list[Lost]:
    return [item for item in part if isinstance(item, Lost)]


def _microbatches(part: Counter) -> Counter:
    return Counter({item: n for item, n in part.items() if not isinstance(item, Lost)})


def _step(work: Work) -> int:
    assert work.step is not None  # all Work that runs belongs to a step
    return work.step


def counted_twice(holders: Mapping[int, SymbolicTensors], step: int) -> tuple[tuple, tuple[int, ...]] | None:
    """A microbatch that two of `holders` have in their accumulators, and these two peers; None if there is none."""
    found: dict[tuple, int] = {}
    for peer, tensors in sorted(holders.items()):
        for item in tensors.accumulators.get(step, ()):
            if item in found:
                return item, (found[item], peer)
            found[item] = peer
    return None
