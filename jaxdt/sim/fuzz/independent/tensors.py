"""The tensors of one peer of independent pipelines: numbers in place of arrays, held as in the runtime's store.

It is an error to use a tensor that is not there, as it is in that store. What happens to the replica's state is kept in
a trail, which a replay of the run's log has to repeat.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxdt.protocol.events import Boundary, Install, Key, Message, Restore, Round, SliceKey
from jaxdt.protocol.message import tensor_key
from jaxdt.sim.fuzz.independent import residues
from jaxdt.sim.fuzz.independent.residues import Vector
from jaxdt.spec.sizes import is_pull, is_push, state_name
from jaxdt.spec.work import ADOPT, BACKWARD, FORWARD, LAY_OUT, LOCAL_STEP, NORM, Work

N_WORDS = 600  # of a state: several slices where those are small
STEPPED, ADOPTED, PUSHED = "step", "adopt", "push"  # what a trail has


@dataclass(frozen=True)
class ReplicaLayout:
    """What the tensors of a peer have to know of its run. `n_elements`: numbers of its parameters; `n_steps`: after
    them a mean of states is the run's result; `outer`: the outer optimizer."""

    stage: int
    n_stages: int
    n_elements: int
    n_steps: int
    outer: str


@dataclass(frozen=True)
class TrailEntry:
    """`what` has happened to the parameters of a replica after `step` local steps of its own, or, for a push that a
    server adds, of the worker."""

    what: str
    step: int
    params: int


@dataclass(frozen=True)
class Watcher:
    """Told of what matters beyond one peer. `broken(peer, problem)` raises. `scale(peer, step)`: the factor that the
    gradient of a step should have. `adopts(peer, round, vector, state)`: a whole result, times its scale, and the state
    after it. `serves(peer, round)`: a server lays its parameters out. `is_nonfinite(peer, step)`: of its gradient."""

    broken: Callable[[int, str], NoReturn]
    scale: Callable[[int, int], float]
    adopts: Callable[[int, Round, Vector, Vector], None]
    serves: Callable[[int, Round], None]
    is_nonfinite: Callable[[int, int], bool]


class ResidueTensors:
    """`state`: parameters, moments, and with an outer optimizer its anchor and momentum. `n_steps`: local steps done.
    `means`: by version, the mean of states that was kept aside. `norms`: by step, of the own gradient."""

    def __init__(self, peer: int, layout: ReplicaLayout, watcher: Watcher):
        self.peer = peer
        self.layout = layout
        self.n_words = N_WORDS
        self.n_steps = 0
        self.state = residues.fresh_state(layout.stage, bool(layout.outer))
        self.trail: list[TrailEntry] = []
        self.means: dict[int, Vector] = {}
        self.norms: dict[int, float] = {}
        self._watcher = watcher
        self._base: Vector | None = None  # the parameters that the server has of this worker
        self._accumulators: dict[int, int] = {}
        self._boundaries: dict[Key, int] = {}
        self._residuals: dict[Key, int] = {}
        self._own: dict[Round, Vector] = {}
        self._slices: dict[SliceKey, Vector] = {}
        self._forgotten: set[Round] = set()
        self._work: Mapping[str, Callable[[Work, float, tuple[Round, ...]], dict[str, float]]] = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            NORM: self._norm,
            LOCAL_STEP: self._local_step,
            LAY_OUT: self._lay_out,
            ADOPT: self._adopt,
        }

    @property
    def params(self) -> Vector:
        return self.state[:1]

    @property
    def rounds(self) -> set[Round]:
        """Those of which anything is held."""
        return self._own.keys() | {key.round for key in self._slices}

    def broken(self, problem: str) -> NoReturn:
        self._watcher.broken(self.peer, problem)

    def _missing(self, what: object) -> NoReturn:
        self.broken(f"wants a tensor that it does not hold: {what}")

    # ------------------------------------------------------------------------------------------------------- compute

    def run(self, work: Work, scale: float, rounds: tuple[Round, ...] = ()) -> dict[str, float]:
        """Do the Work and return the values of its Ran: one sample of loss 1 for each microbatch."""
        if work.kind not in self._work:
            self.broken(f"{work} is not Work of replicas that may differ")
        return self._work[work.kind](work, scale, rounds)

    @property
    def _is_last(self) -> bool:
        return self.layout.stage == self.layout.n_stages - 1

    def _forward(self, work: Work, scale: float, rounds: tuple[Round, ...]) -> dict[str, float]:
        step = self._checked_step(work)
        if not self._is_last:
            y = residues.forward(self.state[0], self._input(work))
            self._residuals[_key("act", work)] = self._boundaries[_key("act", work, 1)] = y
        del scale, rounds, step
        return {}

    def _backward(self, work: Work, scale: float, rounds: tuple[Round, ...]) -> dict[str, float]:
        step = self._checked_step(work)
        if self._is_last:
            x, gy = self._input(work), 0
        else:
            x, gy = self._take(self._residuals, _key("act", work)), self._take(self._boundaries, _key("grad", work, 1))
        gx, contribution = residues.backward(self.state[0], x, gy)
        self._boundaries[_key("grad", work)] = gx
        self._accumulators[step] = (self._accumulators.get(step, 0) + contribution) % residues.PRIME
        del scale, rounds
        return {"n_samples": 1, "loss_sum": 1.0} if self._is_last else {"n_samples": 1}

    def _checked_step(self, work: Work) -> int:
        """The step of Work that computes with the present parameters, and so has to be of the step under way."""
        if work.step != self.n_steps:
            self.broken(f"{work} is run after {self.n_steps} local steps")
        return self.n_steps

    def _input(self, work: Work) -> int:
        assert work.microbatch is not None  # as in all forwards and backwards
        if self.layout.stage == 0:
            return residues.tokens(self.n_steps, work.microbatch)
        return self._take(self._boundaries, _key("act", work))

    def _take(self, held: dict[Key, int], key: Key) -> int:
        if key not in held:
            self._missing(key)
        return held.pop(key)

    def _norm(self, work: Work, scale: float, rounds: tuple[Round, ...]) -> dict[str, float]:
        step = self._checked_step(work)
        is_nonfinite = self._watcher.is_nonfinite(self.peer, step)
        self.norms[step] = float("nan") if is_nonfinite else residues.sq_norm(self._accumulators[step])
        del scale, rounds
        return {"sq_norm": self.norms[step]}

    def _local_step(self, work: Work, scale: float, rounds: tuple[Round, ...]) -> dict[str, float]:
        step = self._checked_step(work)
        expected = self._watcher.scale(self.peer, step)
        if abs(scale - expected) > 1e-9 * expected:
            self.broken(f"local step {step} scales its gradient by {scale}, expected {expected}")
        if scale:
            self.state = residues.local_step(self.state, self._accumulators[step])
        self.n_steps += 1
        self.trail.append(TrailEntry(STEPPED, self.n_steps, self.state[0]))
        del rounds
        return {}

    # --------------------------------------------------------------------------------------------- rounds of averaging

    def _lay_out(self, work: Work, scale: float, rounds: tuple[Round, ...]) -> dict[str, float]:
        for round in rounds:
            if round in self._forgotten:
                self.broken(f"lays out {round}, which it has forgotten")
            self._own[round] = self._vector_of(round)
        del work, scale
        return {}

    def _vector_of(self, round: Round) -> Vector:
        if is_push(round.group):
            if self._base is None:
                self.broken(f"pushes in {round} before its first pull")
            base, self._base = self._base, self.params
            return residues.difference(self.params, base)
        if is_pull(round.group):
            self._watcher.serves(self.peer, round)
            return self.params
        return self.state if self.is_state(round) else residues.exchanged(self.state)

    def is_state(self, round: Round) -> bool:
        """Whether a round averages the whole state."""
        return round.group == state_name(self.layout.stage)

    def _adopt(self, work: Work, scale: float, rounds: tuple[Round, ...]) -> dict[str, float]:
        for round in rounds:
            self._adopt_round(round, residues.scaled(self._result(round), scale))
        del work
        return {}

    def _adopt_round(self, round: Round, vector: Vector) -> None:
        what, step = ADOPTED, self.n_steps
        if is_push(round.group):
            what, step = PUSHED, round.step
            self.state = (residues.total((self.params, vector))[0], *self.state[1:])
        elif is_pull(round.group):
            self._base = vector
            self.state = (*vector, *self.state[1:])
        elif self.is_state(round):
            self.means[round.step] = vector
            if round.step < self.layout.n_steps:
                self._watcher.adopts(self.peer, round, vector, self.state)
                return
            self.state = vector
        else:
            self.state = residues.averaged(self.state, vector, self.layout.outer)
        self.trail.append(TrailEntry(what, step, self.state[0]))
        self._watcher.adopts(self.peer, round, vector, self.state)

    def _result(self, round: Round) -> Vector:
        """The whole sum, whose slices all have to be here and of the same vectors."""
        slices = {key: part for key, part in self._slices.items() if key.src is None and key.round == round}
        held, n_numbers = sum(key.hi - key.lo for key in slices), self._size(round)
        if held != n_numbers:
            self._missing(f"the whole sum of {round}, of which it has {held} of {n_numbers} numbers")
        if len(set(slices.values())) != 1:
            self.broken(f"slices of {round} hold different sums: {slices}")
        return next(iter(slices.values()))

    def _size(self, round: Round) -> int:
        return self.n_words if self.is_state(round) else self.layout.n_elements

    # ------------------------------------------------------------------------------------------------------- tensors

    def tensor_to_send(self, body: Message) -> Any:
        key = tensor_key(body)
        if isinstance(key, Key):
            return self._take(self._boundaries, key)
        if not isinstance(key, SliceKey):
            return None  # a slice of a state or of a checkpoint's part
        if key.src is not None:
            return self._own_part(key)
        if key not in self._slices:
            self._missing(f"the sum {key} to send it")
        return self._slices[key]

    def put(self, body: Message, src: int, tensor: Any) -> None:
        key = tensor_key(body)
        if isinstance(body, Boundary):
            self._boundaries[body.key] = tensor
        elif isinstance(key, SliceKey) and key.round not in self._forgotten:
            self._slices[key] = tensor
        del src

    def offer(self, round: Round, step: int) -> None:
        self.broken(f"offers a vector of step {step} to {round}, and has kept none")

    def sum(self, key: SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        parts = [self._own_part(key) if member == self.peer else self._part(key, member) for member in members]
        self._slices[key] = residues.total(parts)
        return residues.mixed(*self._slices[key]) & 0xFFFFFFFF, 1.0

    def _own_part(self, key: SliceKey) -> Vector:
        if key.round not in self._own:
            self._missing(f"its own part of {key}")
        return self._own[key.round]

    def _part(self, key: SliceKey, member: int) -> Vector:
        part = SliceKey(key.round, key.lo, key.hi, member)
        if part not in self._slices:
            self._missing(f"{part} to add it up")
        return self._slices.pop(part)

    def forget(self, round: Round) -> None:
        self._forgotten.add(round)
        self._own.pop(round, None)
        for key in [key for key in self._slices if key.round == round]:
            del self._slices[key]

    def discard(self, key: Key) -> None:
        self._boundaries.pop(key, None)

    def free(self, step: int, rounds: tuple[Round, ...]) -> None:
        for freed in [other for other in self._accumulators if other <= step]:
            del self._accumulators[freed]
        for held in (self._residuals, self._boundaries):
            for key in [key for key in held if key.step <= step]:
                del held[key]
        for round in rounds:
            self.forget(round)

    def write_checkpoint(self, version: int) -> None:
        """The state of `version` is this peer's own, or a mean that was kept aside for it."""
        if version != self.layout.n_steps and version not in self.means:
            self.broken(f"writes a checkpoint of {version} without the mean of the replicas")

    def restore(self, restore: Restore) -> None:
        self.broken(f"goes back to {restore}")

    def install(self, install: Install) -> None:
        self.broken(f"takes over a state: {install}")

    def digest(self) -> tuple[int, float, tuple[float, ...]]:
        return residues.mixed(*self.state) & 0xFFFFFFFF, 1.0, (0.0,)


def _key(kind: str, work: Work, offset: int = 0) -> Key:
    assert work.step is not None and work.microbatch is not None  # as in all forwards and backwards
    return Key(kind, work.step, work.stage + offset, work.microbatch)
