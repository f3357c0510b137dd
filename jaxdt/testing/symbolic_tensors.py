"""Tensors of a simulation that hold no numbers: each names the microbatches and the version that it is made of.

So a run without arithmetic still shows whether an update counts each microbatch once. An accumulator and a slice are
counts of microbatches, and a sum adds and checks the counts. Tensors come and go as in the runtime's store, and it is
an error to use one that is not there, as it is in that store.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxdt.protocol import events as ev
from jaxdt.protocol.message import tensor_key
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.delay import NO_DELAY, Delay
from jaxdt.run.sizes import Group
from jaxdt.run.work import Work, WorkKind
from jaxdt.sync.download import FetchedStates

EXACT_COVER = 1
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


@dataclass(frozen=True)
class Checks:
    """`broken(invariant, peer, problem)` raises; it is called when an invariant does not hold.
    `applied(peer, step, rounds)` is called at every update. `is_nonfinite(generation, step)`: whether the gradient of a
    step is not finite."""

    broken: Callable[[int, int, str], NoReturn]
    applied: Callable[[int, int, frozenset[RoundId]], None]
    is_nonfinite: Callable[[int, int], bool] = lambda generation, step: False


class StepFreed(Exception):
    """The step of a Work was given up after the Work was requested."""


class SymbolicTensors:
    """The tensors of one peer, which starts with `version`."""

    def __init__(self, peer: int, layout: StageLayout, checks: Checks, version: int = 0):
        self.peer = peer
        self.stage = layout.stage
        self.version = version
        self.generation = 0
        self.drift = 0.0  # of the parameters from those that all replicas should have, over their norm
        self.digested: tuple[int, int, float] | None = None  # the generation, version and drift of the last digest
        self.n_words = layout.worker_words or N_WORDS
        self.accumulators: dict[int, Counter] = {}  # by step
        self._is_worker = layout.worker_words > 0
        self._freed_step = -1
        self._keeps_before = False  # a worker may lack the version before its own
        self._is_last = layout.stage == layout.n_stages - 1
        self._delay = layout.delay
        self._groups = {group.stage: group for group in layout.groups}
        self._n_microbatches = layout.n_microbatches
        self._checks = checks
        self._boundaries: dict[ev.Key, int] = {}  # the generation in which they were computed
        self._residuals: dict[ev.Key, int] = {}  # likewise
        self._gathered: dict[RoundId, Counter] = {}  # the peer's own gradient
        self._slices: dict[ev.SliceKey, Counter] = {}
        self._void: set[RoundId] = set()
        self._fetched = FetchedStates(self.n_words)  # version and drift of each slice

    # ------------------------------------------------------------------------------------------------------- compute

    def run(self, work: Work, scale: float, rounds: tuple[RoundId, ...] = ()) -> dict[str, float]:
        """Do the Work and return the values of its Ran: one sample of loss 1 for each microbatch."""
        step = _step(work)
        names_its_input = bool(rounds) or work.kind in (WorkKind.GATHER, WorkKind.UPDATE)
        if step < self.version and not names_its_input:
            return {}  # its step has ended since the Work was requested, as in the runtime's store
        try:
            return self._compute(work, rounds)
        except StepFreed:
            return {}

    def _compute(self, work: Work, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        step = _step(work)
        keeps_before = self._keeps_before if self._is_worker else self._delay.steps
        held = range(self.version - keeps_before, self.version + 1)
        if (
            work.kind in (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.REGENERATE, WorkKind.EVALUATE)
            and self.version_for(step) not in held
        ):
            self._cover_broken(f"{work} is computed with one of the versions {list(held)}")
        if work.kind == WorkKind.GATHER:
            self._gather(step, rounds)
        elif work.kind == WorkKind.CONTRIBUTE:
            self._contribute(step, rounds)
        elif work.kind == WorkKind.FORWARD:
            self._forward(work)
        elif work.kind == WorkKind.EVALUATE:
            self._evaluate(work)
        elif work.kind in (WorkKind.BACKWARD, WorkKind.REGENERATE):
            self._backward(work)
        else:
            self._update(step, rounds)
        counts = work.kind in (WorkKind.BACKWARD, WorkKind.EVALUATE)
        if not counts:
            return {}
        return {"n_samples": 1, "loss_sum": 1.0} if self._is_last else {"n_samples": 1}

    def version_for(self, step: int) -> int:
        """The version that a step is computed with."""
        return self._delay.version_of(step)

    def _gather(self, step: int, rounds: tuple[RoundId, ...]) -> None:
        """Lay the accumulator out; that of a worker starts again."""
        own = Counter(self.accumulators.get(step, ()))
        self._gathered |= dict.fromkeys(rounds, own)
        if any(round.kind == RoundKind.CONTRIBUTION for round in rounds):
            self.accumulators.pop(step, None)

    def _contribute(self, step: int, rounds: tuple[RoundId, ...]) -> None:
        """All slices of a worker's contribution are here, and hold the same."""
        slices = [part for key, part in self._slices.items() if key.src is None and key.round in rounds]
        if not slices or any(part != slices[0] for part in slices):
            self._cover_broken(f"adds {rounds}, whose slices hold {slices}")
        self.accumulators.setdefault(step, Counter()).update(slices[0])
        twice = [item for item, n in self.accumulators[step].items() if n > 1]
        if twice:
            self._cover_broken(f"{rounds[0]} brings {twice}, which the accumulator holds already")

    def _forward(self, work: Work) -> None:
        if not self._is_last:
            self._take_input("act", work)
            self._residuals[_key("act", work)] = self._boundaries[_key("act", work, 1)] = self.generation

    def _evaluate(self, work: Work) -> None:
        self._take_input("eval", work)
        self._boundaries[_key("eval", work, 1)] = self.generation

    def _backward(self, work: Work) -> None:
        if self._is_last:
            self._take_input("act", work)
        else:
            self._use(self._boundaries, _key("grad", work, 1), work)
            self._use(self._residuals, _key("act", work), work)
        if work.kind == WorkKind.BACKWARD:
            step = _step(work)
            item = (self.generation, self.version_for(step), self.stage, work.microbatch)
            self.accumulators.setdefault(step, Counter())[item] += 1
        self._boundaries[_key("grad", work)] = self.generation

    def _take_input(self, kind: str, work: Work) -> None:
        if self.stage > 0:
            self._use(self._boundaries, _key(kind, work), work)

    def _use(self, stored: dict[ev.Key, int], key: ev.Key, work: Work) -> None:
        if key not in stored and key.step <= self._freed_step:
            raise StepFreed
        if key not in stored:
            self._missing(f"{key} for {work}")
        generation = stored.pop(key)
        if generation != self.generation:
            self._cover_broken(f"{work} in generation {self.generation} uses {key} of generation {generation}")

    def _update(self, step: int, rounds: tuple[RoundId, ...]) -> None:
        """`sum` has checked what each slice holds. Without rounds the record says to skip the step."""
        if rounds and {(step, stage) for stage in self._groups} != {(round.number, round.stage) for round in rounds}:
            self._cover_broken(f"updates with {rounds}, has the groups {sorted(self._groups)}")
        for round in rounds:
            if not self.holds(round):
                self._missing(f"the whole sum of {round}")
        self._checks.applied(self.peer, step, frozenset(rounds))
        self.version = step + 1

    def holds(self, round: RoundId) -> bool:
        """Whether this peer holds the whole result of a round."""
        held = sum(key.hi - key.lo for key in self._slices if key.src is None and key.round == round)
        return held == self._groups[round.stage].n_elements

    def concerns(self, round: RoundId) -> bool:
        """Whether the round is one of this peer's groups."""
        return round.stage in self._groups

    # ------------------------------------------------------------------------------------------------------- tensors

    def tensor_to_send(self, body: ev.Message) -> Counter | int | tuple[int, float]:
        key = tensor_key(body)
        assert key is not None  # only messages with a tensor come here
        if isinstance(key, ev.StateKey) and key.part:
            return 0  # the disk has been asked
        if isinstance(key, ev.StateKey):
            if key.version != self.version:
                self._missing(f"{key}, having version {self.version}")
            return key.version, self.drift
        if isinstance(key, ev.Key):
            if key not in self._boundaries:
                self._missing(f"{key} to send it")
            return self._boundaries.pop(key) if isinstance(body, ev.TaskOutput) else self._boundaries[key]
        if key.src is not None:
            return self._own_part(key)
        if key not in self._slices:
            self._missing(f"the sum {key} to send it")
        return self._slices[key]

    def put(self, body: ev.Message, src: int, tensor: Any) -> None:
        """`tensor` is what `tensor_to_send` returned: a generation, a version with its drift, or counts of
        microbatches."""
        if isinstance(body, ev.Boundary | ev.TaskOutput):
            self._boundaries[body.key] = tensor
        elif isinstance(body, ev.State):
            self._fetched.put(body.key, tensor)
        elif isinstance(body, ev.Shard | ev.Reduced) and body.key.round not in self._void:
            self._slices[body.key] = tensor

    def offer(self, round: RoundId, step: int) -> None:
        raise AssertionError(f"{round} of step {step}: replicas that are equal keep no vector for later")

    def sum(self, key: ev.SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        """The sum must hold every microbatch of every stage of the group once, computed with the step's version."""
        total = Counter()
        for member in members:
            total.update(self._own_part(key) if member == self.peer else self._part(key, member))
        if key.round.kind == RoundKind.CONTRIBUTION:
            self._slices[key] = total
            return zlib.crc32(repr(sorted(total.items())).encode()), 1.0
        stages = self._groups[key.round.stage].stages
        provenance = (self.generation, self._delay.version_of(key.round.number))
        expected = {(*provenance, stage, m): 1 for stage in stages for m in range(self._n_microbatches)}
        if total != expected:
            wrong = {item: n for item, n in total.items() if n != expected.get(item, 0)}
            self._cover_broken(f"{key.round} counts {wrong} and lacks {set(expected) - set(total)}")
        self._slices[key] = total
        norm = float("nan") if self._checks.is_nonfinite(self.generation, key.round.number) else 1.0
        return zlib.crc32(repr(sorted(total.items())).encode()), norm

    def forget(self, round: RoundId) -> None:
        self._void.add(round)
        self._gathered.pop(round, None)
        for key in [key for key in self._slices if key.round == round]:
            del self._slices[key]

    def reopen(self, round: RoundId) -> None:
        self._void.discard(round)

    def discard(self, key: ev.Key | ev.StateKey) -> None:
        if isinstance(key, ev.StateKey):
            self._fetched.begin()
        else:
            self._boundaries.pop(key, None)

    def free(self, step: int, rounds: tuple[RoundId, ...]) -> None:
        self._freed_step = step
        for freed in [other for other in self.accumulators if other <= step]:
            del self.accumulators[freed]
        for by_key in (self._residuals, self._boundaries):
            for key in [key for key in by_key if key.step <= step]:
                del by_key[key]
        last = {round.series: round for round in sorted(rounds)}
        is_over = lambda round: round.series in last and round <= last[round.series]  # noqa: E731
        self._void = {round for round in self._void if not is_over(round)}
        self._gathered = {round: own for round, own in self._gathered.items() if not is_over(round)}
        self._slices = {key: part for key, part in self._slices.items() if not is_over(key.round)}

    @property
    def boundary_keys(self) -> tuple[ev.Key, ...]:
        """The boundary tensors that are here."""
        return tuple(self._boundaries)

    @property
    def residual_keys(self) -> tuple[ev.Key, ...]:
        """The forwards whose residuals are here, by the keys of their inputs."""
        return tuple(self._residuals)

    @property
    def vector_rounds(self) -> set[RoundId]:
        """The rounds of which an own vector, or a slice, is here."""
        return self._gathered.keys() | {key.round for key in self._slices}

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
        self.version, self.generation = version, generation
        self._freed_step = -1
        self.accumulators.clear()
        self._residuals.clear()
        self._boundaries = {key: at for key, at in self._boundaries.items() if key.step >= version}

    def install(self, install: ev.Install) -> ev.Installed:
        """All words of the state must have been fetched, and all of that version. One of the same version repairs the
        state, and nothing else changes."""
        slices = self._fetched.take(install.version)
        n_words = sum(key.hi - key.lo for key, _ in slices)
        versions = {version for _, (version, _) in slices}
        if n_words != self.n_words or versions != {install.version}:
            self._missing(f"a whole state, has {n_words} words of versions {sorted(versions)}")
        if (install.version, install.generation) != (self.version, self.generation) and not install.beside_work:
            self._begin(install.version, install.generation)
        self.version = install.version
        self._keeps_before = install.beside_work
        self.drift = max((drift for _, (_, drift) in slices), key=abs)
        return ev.Installed(install.version)

    def perturb(self, factor: float) -> None:
        self.drift += factor

    def digest(self) -> tuple[int, float, tuple[float, ...]]:
        self.digested = (self.generation, self.version, self.drift)
        return zlib.crc32(repr(self.digested).encode()), 1.0, (self.drift,)

    def _own_part(self, key: ev.SliceKey) -> Counter:
        if key.round not in self._gathered:
            self._missing(f"its own part of {key}")
        return self._gathered[key.round]

    def _part(self, key: ev.SliceKey, member: int) -> Counter:
        part = ev.SliceKey(key.round, key.lo, key.hi, member)
        if part not in self._slices:
            self._missing(f"{part} to add it up")
        return self._slices.pop(part)

    def _missing(self, what: str) -> NoReturn:
        self._cover_broken(f"wants a tensor that it does not hold: {what}")

    def _cover_broken(self, problem: str) -> NoReturn:
        self._checks.broken(EXACT_COVER, self.peer, problem)


def _key(kind: str, work: Work, offset: int = 0) -> ev.Key:
    assert work.microbatch is not None
    return ev.Key(kind, _step(work), work.stage + offset, work.microbatch)


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
