"""The tensors of one peer of independent pipelines: residues in place of arrays.

The changes of the replica's state are kept in a trail, which a replay of the run's log has to repeat.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.sizes import SHARED_TABLE, exchanged_elements, replica_elements, shared_table_elements
from jaxdt.run.work import Work, WorkKind
from jaxdt.sync.error_feedback import ErrorFeedback
from jaxdt.testing.held_tensors import HELD_OUT, HeldTensors, key_of
from jaxdt.testing.independent import residues
from jaxdt.testing.independent.residues import Residues, State, Vector
from jaxdt.testing.replay import ADOPTED, PUSHED, STEPPED, TAKEN_OVER, TrailEntry

N_WORDS = 600  # of a state: several slices where those are small
ROUNDED = (RoundKind.MEAN, RoundKind.PUSH)  # by the codec


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


class ResidueTensors(HeldTensors):
    """`n_steps`: local steps done. `means`: by version, the mean of states kept as a snapshot. `norms`: by step, of
    the own gradient."""

    def __init__(self, peer: int, arithmetic: Residues, watcher: Watcher):
        config, plan = arithmetic.config, arithmetic.plan
        stage, pipeline = plan.seat(peer)
        super().__init__(peer, (stage, plan.n_stages), N_WORDS, watcher.broken)
        self._arithmetic = arithmetic
        self._groups = config.sync.groups
        self._n_rows = config.train.steps
        self._n_ahead = plan.n_ahead(stage)
        self._weight = self._groups.weight(plan.shares[pipeline])
        self._n_elements = replica_elements(config, *plan.stages[stage])
        self._n_table = shared_table_elements(config, plan)
        fragments = range(self._groups.fragments)
        self._fragment_elements = [exchanged_elements(config, *plan.stages[stage], f) for f in fragments]
        self.n_steps = 0
        self.state = arithmetic.fresh_state(stage)
        self.trail: list[TrailEntry] = []
        self.means: dict[int, State] = {}
        self.norms: dict[int, float] = {}
        self._watcher = watcher
        self._owed: Vector | None = None  # what a codec has lost of the pushes
        self._feedback = ErrorFeedback[Vector](1)  # and of what averaging groups exchange
        self._base: Vector | None = None  # the parameters that the server has of this worker
        self._table: Vector | None = None  # the first stage's, with which the last computes
        self._stash: dict[int, Vector] = {}  # step -> the parameters of its forward, until its backward
        self._frozen: tuple[int, Vector] | None = None  # the local steps after which a vector was kept, and that
        self._work = {
            WorkKind.FORWARD: self._forward,
            WorkKind.BACKWARD: self._backward,
            WorkKind.EVALUATE: self._evaluate,
            WorkKind.NORM: self._norm,
            WorkKind.LOCAL_STEP: self._local_step,
            WorkKind.LAY_OUT: self._lay_out,
            WorkKind.ADOPT: self._adopt,
        }
        if self._n_table:
            ends = {0: WorkKind.CONTRIBUTE, plan.n_stages - 1: WorkKind.GATHER}
            moves = {WorkKind.CONTRIBUTE: self._add_table_gradient, WorkKind.GATHER: self._give_table_gradient}
            if kind := ends.get(stage):
                self._work = {**self._work, kind: moves[kind], WorkKind.TABLE: self._move_table}

    # ------------------------------------------------------------------------------------------------------- compute

    def _forward(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        """A forward computes with the parameters after as many local steps as its step says, less those that run ahead
        of a backward."""
        step, n_ahead = work.step, self._n_ahead
        if step is None or self.n_steps != max(0, step - n_ahead):
            self.broken(f"{work} is run after {self.n_steps} local steps, forwards run {n_ahead} ahead")
        self._stash[step] = self._with_table(self.state.params, self._table)
        return super()._forward(work, scale, rounds)

    def _backward(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        self._checked_step(work)
        return super()._backward(work, scale, rounds)

    def _tokens(self, kind: str, work: Work) -> int:
        step, m = work.place
        return residues.held_out_tokens(m) if kind == HELD_OUT else residues.tokens(step, m)

    def _forwarded(self, work: Work, x: int) -> int:
        return residues.forward(self.state.params, x)

    def _backwarded(self, work: Work, x: int, gy: int | None) -> int:
        step = self.n_steps
        gx, contribution = residues.backward(self._stash[step], x, gy or 0)
        self.accumulators[step] = (self.accumulators.get(step, 0) + contribution) % residues.PRIME
        return gx

    def _checked_step(self, work: Work) -> int:
        """The step of Work that has to be of the step under way."""
        if work.step != self.n_steps:
            self.broken(f"{work} is run after {self.n_steps} local steps")
        return self.n_steps

    def _evaluate(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        """A held-out microbatch, with the mean that is the sum of a round times `scale`."""
        round, *tables = rounds
        expected = [RoundKind.HELD_OUT, *([RoundKind.HELD_OUT_TABLE] if self._borrows_table else [])]
        if [one.kind for one in rounds] != expected or any(work.step != one.number for one in rounds):
            self.broken(f"{work} computes with {rounds}, which are no means for a held-out loss of these rows")
        params = residues.scaled(self._result(round), scale)
        params = self._with_table(params, self._result(tables[0]) if tables else None)
        x = self._input(HELD_OUT, work)
        if self._is_last:
            return {"n_samples": 1, "loss_sum": residues.loss(params, x)}
        self._boundaries[key_of(HELD_OUT, work, 1)] = residues.forward(params, x)
        return {}

    def _norm(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        step = self._checked_step(work)
        is_nonfinite = self._watcher.is_nonfinite(self.peer, step)
        self.norms[step] = float("nan") if is_nonfinite else residues.sq_norm(self.accumulators[step])
        return {"sq_norm": self.norms[step]}

    def _local_step(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        step = self._checked_step(work)
        expected = self._watcher.scale(self.peer, step)
        if abs(scale - expected) > 1e-9 * expected:
            self.broken(f"local step {step} scales its gradient by {scale}, expected {expected}")
        if scale:
            self.state = residues.local_step(self.state, self.accumulators[step])
        self.n_steps += 1
        self.trail.append(TrailEntry(STEPPED, self.n_steps, self.state))
        return {}

    # ------------------------------------------------------------------------------------------------- a shared table

    @property
    def _borrows_table(self) -> bool:
        """Whether this stage computes with the first one's table."""
        return self._n_table > 0 and self._is_last

    def _with_table(self, params: Vector, table: Vector | None) -> Vector:
        if not self._borrows_table:
            return params
        if table is None:
            self._missing("the first stage's table")
        return residues.with_table(params, table)

    def _give_table_gradient(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        step = self._checked_step(work)
        for round in rounds:
            self._own[round] = (residues.table_gradient(self.accumulators[step]),)
        return {}

    def _add_table_gradient(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        step = self._checked_step(work)
        for round in rounds:
            (number,) = self._result(round)
            self.accumulators[step] = (self.accumulators[step] + number) % residues.PRIME
        return {}

    def _move_table(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        (round,) = rounds
        if self._borrows_table:
            self._table = self._result(round)
            return {}
        params = self.state.params
        if round.kind == RoundKind.HELD_OUT_TABLE:
            mean = replace(round, kind=RoundKind.HELD_OUT, stage=self.stage)
            params = residues.scaled(self._result(mean), scale)
        self._own[round] = params[:1]
        return {}

    # --------------------------------------------------------------------------------------------- rounds of averaging

    def _lay_out(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        """Lay the vector out for rounds, or, without one, for the group of the fragment that is due now."""
        if not rounds:
            self._freeze(self._checked_step(work))
        for round in rounds:
            if round in self._forgotten:
                self.broken(f"lays out {round}, which it has forgotten")
            self._own[round] = self._push(round) if round.kind == RoundKind.PUSH else self._laid_out(round)
        return {}

    def _freeze(self, step: int) -> None:
        fragment = self._groups.fragment_due(step)
        if fragment is None:
            self.broken(f"keeps a vector after {step} local steps, when no fragment is due")
        self._frozen = (step, self._exchanged(fragment))

    def _exchanged(self, fragment: int) -> Vector:
        return self._arithmetic.exchanged(self.state, fragment, self._weight)

    def _push(self, round: RoundId) -> Vector:
        """The change since the last push, or pull, and what the codec has lost of the pushes before."""
        if self._base is None:
            self.broken(f"pushes in {round} before its first pull")
        params = self.state.params
        change, self._owed = self._arithmetic.change(params, self._base, self._owed)
        self._base = params
        return change

    def _laid_out(self, round: RoundId) -> Vector:
        vector = self._vector_of(round)
        return self._to_group(round, vector) if round.kind == RoundKind.MEAN else vector

    def _to_group(self, round: RoundId, vector: Vector) -> Vector:
        """A vector of an averaging group, rounded by the codec. Parameters and states are not."""
        sent, lost = self._arithmetic.sent_to_group(vector, self._feedback.owed(round))
        if lost is not None:
            self._feedback.lose(round, lost)
        return sent

    def _vector_of(self, round: RoundId) -> Vector:
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
            if round.number < self._n_rows:
                return
            self.state = mean
        else:
            self.state = self._arithmetic.averaged(self.stage, state, round.fragment, vector)
            self._feedback.commit((round,))
        self.trail.append(TrailEntry(what, step, self.state))

    def _result(self, round: RoundId) -> Vector:
        """The whole sum, whose slices all have to be here and of the same vectors."""
        held, n_numbers = self._n_held(round), self._size(round)
        if held != n_numbers:
            self._missing(f"the whole sum of {round}, of which it has {held} of {n_numbers} numbers")
        sums = {part for key, part in self._slices.items() if key.src is None and key.round == round}
        if len(sums) != 1:
            self.broken(f"slices of {round} hold different sums: {sums}")
        return sums.pop()

    def _size(self, round: RoundId) -> int:
        if round.stage == SHARED_TABLE:
            return self._n_table
        if round.kind == RoundKind.STATE:
            return self.n_words
        is_mean = round.kind == RoundKind.MEAN
        return self._fragment_elements[round.fragment] if is_mean else self._n_elements

    # ------------------------------------------------------------------------------------------------------- tensors

    def tensor_to_send(self, body: ev.Message) -> Any:
        """A boundary tensor is sent once."""
        tensor = super().tensor_to_send(body)
        if isinstance(body, ev.Boundary):
            self.discard(body.key)
        return tensor

    def _given(self, key: ev.StateKey) -> tuple[int, State]:
        """A slice of the own state, which has to be that after as many local steps as are asked for."""
        if key.version != self.n_steps:
            self.broken(f"gives its state after {self.n_steps} local steps, asked for is {key}")
        return self.n_steps, self.state

    def offer(self, round: RoundId, step: int) -> None:
        if self._frozen is None or self._frozen[0] != step:
            self.broken(f"offers a vector of step {step} to {round}, and has kept {self._frozen}")
        if round in self._forgotten:
            self.broken(f"offers a vector to {round}, which it has forgotten")
        self._own[round] = self._to_group(round, self._frozen[1])

    def forget(self, round: RoundId) -> None:
        super().forget(round)
        self._feedback.forget(lambda other: other == round)

    def _added(self, key: ev.SliceKey, parts: list[Vector]) -> tuple[Vector, int, float]:
        total = residues.total(parts)
        if key.round.kind == RoundKind.MEAN:
            total, of_sum = self._arithmetic.sent_to_group(total, None)
            lost = self._feedback.lost(key.round)
            if lost is not None and of_sum is not None:
                self._feedback.lose(key.round, self._arithmetic.owes(lost, of_sum, (key.lo, key.hi)))
        elif key.round.kind == RoundKind.PUSH:
            total = self._arithmetic.as_sent(total)
        return total, residues.mixed(*total), 1.0

    def free(self, step: int, rounds: tuple[RoundId, ...]) -> None:
        super().free(step, rounds)
        self._stash.pop(step, None)
        for held in (self._residuals, self._boundaries):
            for key in [key for key in held if key.step <= step and key.kind != HELD_OUT]:
                del held[key]
        for round in rounds:
            self.forget(round)

    def write_checkpoint(self, version: int) -> None:
        """The state of `version` is this peer's own, or the last snapshot, which was for it."""
        kept = next(reversed(self.means), None)
        if version not in (self._n_rows, kept):
            self.broken(f"writes a checkpoint of {version}, and its last snapshot is of {kept}")

    def restore(self, restore: ev.Restore) -> None:
        self.broken(f"goes back to {restore}")

    def install(self, install: ev.Install) -> ev.Installed:
        """Take over another replica's state, all slices of which have to be of one moment."""
        found = self._fetched_state(install)
        if len(found) != 1:
            self.broken(f"{install}: has slices of the states {found}")
        self.n_steps, self.state = found.pop()
        if self.n_steps != install.version:
            self.broken(f"{install}: the state is that after {self.n_steps} local steps")
        if any(entry.what != TAKEN_OVER for entry in self.trail):
            self.broken(f"{install}: it has a state of its own already")
        self.trail = [TrailEntry(TAKEN_OVER, self.n_steps, self.state)]  # that of a donor before is void
        return ev.Installed(install.version)

    def digest(self) -> tuple[int, float, tuple[float, ...]]:
        return residues.mixed(*self.state.flat()) & 0xFFFFFFFF, 1.0, (0.0,)
