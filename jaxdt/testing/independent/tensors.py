"""The tensors of one peer of independent pipelines: numbers in place of arrays, held as in the runtime's store.

It is an error to use a tensor that is not there, as it is in that store. The changes of the replica's state are kept in
a trail, which a replay of the run's log has to repeat.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxdt.protocol import events as ev
from jaxdt.protocol.message import tensor_key
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.codec import NONE
from jaxdt.run.config import GroupsConfig
from jaxdt.run.work import Work, WorkKind
from jaxdt.sync.download import FetchedStates
from jaxdt.testing.independent import residues
from jaxdt.testing.independent.residues import State, Vector
from jaxdt.testing.replay import ADOPTED, PUSHED, STEPPED, TAKEN_OVER, TrailEntry

N_WORDS = 600  # of a state: several slices where those are small
ROUNDED = (RoundKind.MEAN, RoundKind.PUSH)  # by the codec
HELD_OUT = "eval"  # the kind of the keys of its boundary tensors


@dataclass(frozen=True)
class ReplicaLayout:
    """The facts about a run that the tensors of a peer need. `n_elements`: numbers of its parameters;
    `fragment_elements`: numbers that it exchanges for each fragment; `n_steps`: after them a mean of states is the
    run's result; `weight`: the weight of the replica in its groups; `n_ahead`: steps whose forwards run before a step's
    backward."""

    stage: int
    n_stages: int
    n_elements: int
    fragment_elements: tuple[int, ...]
    n_steps: int
    groups: GroupsConfig
    codec: str
    weight: int
    n_ahead: int


@dataclass(frozen=True)
class Watcher:
    """Told of what matters beyond one peer. `broken(peer, problem)` raises. `scale(peer, step)`: the factor that the
    gradient of a step should have. `adopts(peer, round, vector)`: a whole result, times its scale. `serves(peer,
    round)`: a server lays its parameters out. `is_nonfinite(peer, step)`: of its gradient."""

    broken: Callable[[int, str], NoReturn]
    scale: Callable[[int, int], float]
    adopts: Callable[[int, RoundId, Vector], None]
    serves: Callable[[int, RoundId], None]
    is_nonfinite: Callable[[int, int], bool]


class ResidueTensors:
    """`n_steps`: local steps done. `means`: by version, the mean of states that was kept aside. `norms`: by step, of
    the own gradient."""

    def __init__(self, peer: int, layout: ReplicaLayout, watcher: Watcher):
        self.peer = peer
        self.layout = layout
        self.n_words = N_WORDS
        self.n_steps = 0
        self.state = residues.fresh_state(layout.stage, layout.groups)
        self.trail: list[TrailEntry] = []
        self.means: dict[int, State] = {}
        self.norms: dict[int, float] = {}
        self._watcher = watcher
        self._base: Vector | None = None  # the parameters that the server has of this worker
        self._accumulators: dict[int, int] = {}
        self._boundaries: dict[ev.Key, int] = {}
        self._residuals: dict[ev.Key, int] = {}
        self._stash: dict[int, Vector] = {}  # step -> the parameters of its forward, until its backward
        self._frozen: tuple[int, Vector] | None = None  # the local steps after which a vector was kept, and that
        self._own: dict[RoundId, Vector] = {}
        self._slices: dict[ev.SliceKey, Vector] = {}
        self._forgotten: set[RoundId] = set()
        self._fetched = FetchedStates(self.n_words)  # another replica's steps and state, in each slice
        self._work: Mapping[str, Callable[[Work, float, tuple[RoundId, ...]], dict[str, float]]] = {
            WorkKind.FORWARD: self._forward,
            WorkKind.BACKWARD: self._backward,
            WorkKind.EVALUATE: self._evaluate,
            WorkKind.NORM: self._norm,
            WorkKind.LOCAL_STEP: self._local_step,
            WorkKind.LAY_OUT: self._lay_out,
            WorkKind.ADOPT: self._adopt,
        }

    @property
    def rounds(self) -> set[RoundId]:
        """The rounds of which this peer holds any tensor."""
        return self._own.keys() | {key.round for key in self._slices}

    def broken(self, problem: str) -> NoReturn:
        self._watcher.broken(self.peer, problem)

    def _missing(self, what: object) -> NoReturn:
        self.broken(f"wants a tensor that it does not hold: {what}")

    # ------------------------------------------------------------------------------------------------------- compute

    def run(self, work: Work, scale: float, rounds: tuple[RoundId, ...] = ()) -> dict[str, float]:
        """Do the Work and return the values of its Ran: one sample of loss 1 for each microbatch."""
        if work.kind not in self._work:
            self.broken(f"{work} is not Work of replicas that may differ")
        return self._work[work.kind](work, scale, rounds)

    @property
    def _is_last(self) -> bool:
        return self.layout.stage == self.layout.n_stages - 1

    def _forward(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        step = self._forwarded_step(work)
        self._stash[step] = self.state.params
        if not self._is_last:
            y = residues.forward(self.state.params, self._input(work))
            self._residuals[_key("act", work)] = self._boundaries[_key("act", work, 1)] = y
        del scale, rounds
        return {}

    def _forwarded_step(self, work: Work) -> int:
        """The step of a forward. It computes with the parameters after as many local steps, less those that run ahead
        of a backward."""
        step, n_ahead = work.step, self.layout.n_ahead
        if step is None or self.n_steps != max(0, step - n_ahead):
            self.broken(f"{work} is run after {self.n_steps} local steps, forwards run {n_ahead} ahead")
        return step

    def _backward(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        step = self._checked_step(work)
        if self._is_last:
            x, gy = self._input(work), 0
        else:
            x, gy = self._take(self._residuals, _key("act", work)), self._take(self._boundaries, _key("grad", work, 1))
        gx, contribution = residues.backward(self._stash[step], x, gy)
        self._boundaries[_key("grad", work)] = gx
        self._accumulators[step] = (self._accumulators.get(step, 0) + contribution) % residues.PRIME
        del scale, rounds
        return {"n_samples": 1, "loss_sum": 1.0} if self._is_last else {"n_samples": 1}

    def _checked_step(self, work: Work) -> int:
        """The step of Work that has to be of the step under way."""
        if work.step != self.n_steps:
            self.broken(f"{work} is run after {self.n_steps} local steps")
        return self.n_steps

    def _evaluate(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        """A held-out microbatch, with the mean that is the sum of a round times `scale`."""
        (round,) = rounds
        if round.kind != RoundKind.HELD_OUT or work.step != round.number:
            self.broken(f"{work} computes with {round}, which is no mean for a held-out loss of these rows")
        params = residues.scaled(self._result(round), scale)
        x = self._input(work, HELD_OUT)
        if self._is_last:
            return {"n_samples": 1, "loss_sum": residues.held_out_loss(params, x)}
        self._boundaries[_key(HELD_OUT, work, 1)] = residues.forward(params, x)
        return {}

    def _input(self, work: Work, kind: str = "act") -> int:
        assert work.microbatch is not None and work.step is not None  # as in all forwards and backwards
        if self.layout.stage == 0:
            is_held_out = kind == HELD_OUT
            m = work.microbatch
            return residues.held_out_tokens(m) if is_held_out else residues.tokens(work.step, m)
        return self._take(self._boundaries, _key(kind, work))

    def _take(self, held: dict[ev.Key, int], key: ev.Key) -> int:
        if key not in held:
            self._missing(key)
        return held.pop(key)

    def _norm(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        step = self._checked_step(work)
        is_nonfinite = self._watcher.is_nonfinite(self.peer, step)
        self.norms[step] = float("nan") if is_nonfinite else residues.sq_norm(self._accumulators[step])
        del scale, rounds
        return {"sq_norm": self.norms[step]}

    def _local_step(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        step = self._checked_step(work)
        expected = self._watcher.scale(self.peer, step)
        if abs(scale - expected) > 1e-9 * expected:
            self.broken(f"local step {step} scales its gradient by {scale}, expected {expected}")
        if scale:
            self.state = residues.local_step(self.state, self._accumulators[step])
        self.n_steps += 1
        self.trail.append(TrailEntry(STEPPED, self.n_steps, self.state))
        del rounds
        return {}

    # --------------------------------------------------------------------------------------------- rounds of averaging

    def _lay_out(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        """Lay the vector out for rounds, or, without one, for the group of the fragment that is due now."""
        if not rounds:
            self._freeze(self._checked_step(work))
        for round in rounds:
            if round in self._forgotten:
                self.broken(f"lays out {round}, which it has forgotten")
            self._own[round] = residues.as_sent(self._codec_of(round), self._vector_of(round))
        del scale
        return {}

    def _freeze(self, step: int) -> None:
        fragment = self.layout.groups.fragment_due(step)
        if fragment is None:
            self.broken(f"keeps a vector after {step} local steps, when no fragment is due")
        self._frozen = (step, self._exchanged(fragment))

    def _exchanged(self, fragment: int) -> Vector:
        return residues.exchanged(self.layout.groups, self.state, fragment, self.layout.weight)

    def _codec_of(self, round: RoundId) -> str:
        """The codec of a round. Vectors of averaging groups and pushes are rounded; parameters and states are not."""
        return self.layout.codec if round.kind in ROUNDED else NONE

    def _vector_of(self, round: RoundId) -> Vector:
        if round.kind == RoundKind.PUSH:
            if self._base is None:
                self.broken(f"pushes in {round} before its first pull")
            base, self._base = self._base, self.state.params
            return residues.difference(self.state.params, base)
        if round.kind == RoundKind.PULL:
            self._watcher.serves(self.peer, round)
            return self.state.params
        if round.kind == RoundKind.MEAN:
            return self._exchanged(round.fragment)
        return self.state.flat() if round.kind == RoundKind.STATE else self.state.params

    def _adopt(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        """The first round's sum is adopted. The others are snapshots into which it goes, a push, too."""
        for adopted in rounds[:1]:
            vector = residues.scaled(self._result(adopted), scale)
            self._adopt_round(adopted, vector)
            self._watcher.adopts(self.peer, adopted, vector)
            for snapshot in rounds[1:]:
                if snapshot not in self._own:
                    self._missing(f"its part of {snapshot}, to add {adopted} to it")
                self._own[snapshot] = residues.total((self._own[snapshot], vector))
        del work
        return {}

    def _adopt_round(self, round: RoundId, vector: Vector) -> None:
        what, step, state = ADOPTED, self.n_steps, self.state
        if round.kind == RoundKind.PUSH:
            what, step = PUSHED, round.number
            self.state = state._replace(params=residues.total((state.params, vector)))
        elif round.kind == RoundKind.PULL:
            self._base = vector
            self.state = state._replace(params=vector)
        elif round.kind == RoundKind.CHECKPOINT:
            self.means[round.number] = state._replace(params=vector)
            return
        elif round.kind == RoundKind.STATE:
            mean = self.means[round.number] = state.unflat(vector)
            if round.number < self.layout.n_steps:
                return
            self.state = mean
        else:
            self.state = residues.averaged(self.layout.groups, state, round.fragment, vector)
        self.trail.append(TrailEntry(what, step, self.state))

    def _result(self, round: RoundId) -> Vector:
        """The whole sum, whose slices all have to be here and of the same vectors."""
        slices = {key: part for key, part in self._slices.items() if key.src is None and key.round == round}
        held, n_numbers = sum(key.hi - key.lo for key in slices), self._size(round)
        if held != n_numbers:
            self._missing(f"the whole sum of {round}, of which it has {held} of {n_numbers} numbers")
        if len(set(slices.values())) != 1:
            self.broken(f"slices of {round} hold different sums: {slices}")
        return next(iter(slices.values()))

    def _size(self, round: RoundId) -> int:
        if round.kind == RoundKind.STATE:
            return self.n_words
        is_mean = round.kind == RoundKind.MEAN
        return self.layout.fragment_elements[round.fragment] if is_mean else self.layout.n_elements

    # ------------------------------------------------------------------------------------------------------- tensors

    def tensor_to_send(self, body: ev.Message) -> Any:
        key = tensor_key(body)
        if isinstance(key, ev.Key):
            return self._take(self._boundaries, key)
        if isinstance(key, ev.StateKey) and not key.part:
            return self._given(key)
        if not isinstance(key, ev.SliceKey):
            return None  # a slice of a checkpoint's part
        if key.src is not None:
            return self._own_part(key)
        if key not in self._slices:
            self._missing(f"the sum {key} to send it")
        return self._slices[key]

    def _given(self, key: ev.StateKey) -> tuple[int, State]:
        """A slice of the own state, which has to be that after as many local steps as are asked for."""
        if key.version != self.n_steps:
            self.broken(f"gives its state after {self.n_steps} local steps, asked for is {key}")
        return self.n_steps, self.state

    def put(self, body: ev.Message, src: int, tensor: Any) -> None:
        key = tensor_key(body)
        if isinstance(key, ev.StateKey):
            self._fetched.put(key, tensor)
        if isinstance(body, ev.Boundary):
            self._boundaries[body.key] = tensor
        elif isinstance(key, ev.SliceKey) and key.round not in self._forgotten:
            self._slices[key] = tensor
        del src

    def offer(self, round: RoundId, step: int) -> None:
        if self._frozen is None or self._frozen[0] != step:
            self.broken(f"offers a vector of step {step} to {round}, and has kept {self._frozen}")
        if round in self._forgotten:
            self.broken(f"offers a vector to {round}, which it has forgotten")
        self._own[round] = residues.as_sent(self._codec_of(round), self._frozen[1])

    def sum(self, key: ev.SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        parts = [self._own_part(key) if member == self.peer else self._part(key, member) for member in members]
        self._slices[key] = residues.as_sent(self._codec_of(key.round), residues.total(parts))
        return residues.mixed(*self._slices[key]) & 0xFFFFFFFF, 1.0

    def _own_part(self, key: ev.SliceKey) -> Vector:
        if key.round not in self._own:
            self._missing(f"its own part of {key}")
        return self._own[key.round]

    def _part(self, key: ev.SliceKey, member: int) -> Vector:
        part = ev.SliceKey(key.round, key.lo, key.hi, member)
        if part not in self._slices:
            self._missing(f"{part} to add it up")
        return self._slices.pop(part)

    def forget(self, round: RoundId) -> None:
        self._forgotten.add(round)
        self._own.pop(round, None)
        for key in [key for key in self._slices if key.round == round]:
            del self._slices[key]

    def reopen(self, round: RoundId) -> None:
        self._forgotten.discard(round)

    def discard(self, key: ev.Key | ev.StateKey) -> None:
        if isinstance(key, ev.StateKey):
            self._fetched.begin()
        else:
            self._boundaries.pop(key, None)

    def free(self, step: int, rounds: tuple[RoundId, ...]) -> None:
        for freed in [other for other in self._accumulators if other <= step]:
            del self._accumulators[freed]
        self._stash.pop(step, None)
        for held in (self._residuals, self._boundaries):
            for key in [key for key in held if key.step <= step and key.kind != HELD_OUT]:
                del held[key]
        for round in rounds:
            self.forget(round)

    def write_checkpoint(self, version: int) -> None:
        """The state of `version` is this peer's own, or the mean that was kept aside last, which was for it."""
        kept = next(reversed(self.means), None)
        if version not in (self.layout.n_steps, kept):
            self.broken(f"writes a checkpoint of {version}, and has kept aside the mean of {kept}")

    def restore(self, restore: ev.Restore) -> None:
        self.broken(f"goes back to {restore}")

    def install(self, install: ev.Install) -> ev.Installed:
        """Take over another replica's state, all slices of which have to be of one moment."""
        fetched = self._fetched.take(install.version)
        held, found = sum(key.hi - key.lo for key, _ in fetched), {state for _, state in fetched}
        if held != self.n_words or len(found) != 1:
            self.broken(f"{install}: has {held} of {self.n_words} words, of the states {found}")
        self.n_steps, self.state = found.pop()
        if self.n_steps != install.version:
            self.broken(f"{install}: the state is that after {self.n_steps} local steps")
        if any(entry.what != TAKEN_OVER for entry in self.trail):
            self.broken(f"{install}: it has a state of its own already")
        self.trail = [TrailEntry(TAKEN_OVER, self.n_steps, self.state)]  # that of a donor before is void
        return ev.Installed(install.version)

    def digest(self) -> tuple[int, float, tuple[float, ...]]:
        return residues.mixed(*self.state.flat()) & 0xFFFFFFFF, 1.0, (0.0,)


def _key(kind: str, work: Work, offset: int = 0) -> ev.Key:
    assert work.step is not None and work.microbatch is not None  # as in all forwards and backwards
    return ev.Key(kind, work.step, work.stage + offset, work.microbatch)
