"""The arithmetic of a run whose replicas may differ, with the jitted functions of its stages: for a replay of its log
(jaxdt.testing.replay.Arithmetic). A run and its replay compute with the same functions, so they come to the same bits.

n numbers of a stage's parameters."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jaxdt.model.averaging import ReplicaState, Vector, averaged, exchanged, fragment_entries
from jaxdt.model.base import Params
from jaxdt.model.batches import Samples, TokenSource
from jaxdt.model.chain import Chain
from jaxdt.model.float_vector import FloatVector
from jaxdt.model.stage import StageFunctions, Vectors
from jaxdt.model.vectors import TIED_GROUP, group_entries, trained, with_trained
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan

State = tuple[Params, Any]  # parameters and the optimizer's state, with anchor and momentum of an outer one


class VectorCodec(Protocol):
    """What arrives of vectors that replicas exchange (jaxdt.codec.vectors)."""

    def arrived(self, vector: Vector) -> Vector: ...

    def with_feedback(self, vector: Vector, owed: Vector | None) -> tuple[Vector, Vector | None]:
        """(what arrives of a vector and what is owed; what is owed then)."""
        ...


class StageArithmetic:
    """`functions`: of each stage; `codec`: that of the config's sync."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        functions: Sequence[StageFunctions],
        data: TokenSource,
        codec: VectorCodec,
    ):
        if any(codec != "none" for codec in plan.codec):
            raise BadInput(f"plan.codec: got {', '.join(plan.codec)}, a replay expects none")
        self.n_samples = config.train.microbatch_size
        self._config = config
        self._codec = codec
        self._groups = config.sync.groups
        self._plan = plan
        self._functions = functions
        self._samples = Samples(data, config.train, plan.n_microbatches, config.data.borders)
        self._chain = Chain(functions, config.train.seed, config.optim.clip_norm)
        self._fragments = [fragment_entries(config.model, lo, hi, self._groups.fragments) for lo, hi in plan.stages]

    def fresh_state(self, stage: int) -> State:
        functions = self._functions[stage]
        params = functions.init(self._config.train.seed)
        part = trained(self._config.model, params)
        outer = (part, jax.tree.map(jnp.zeros_like, part)) if self._groups.outer != "none" else ()
        return _joined(ReplicaState(params, outer, functions.init_optimizer(params)))

    def params(self, state: State) -> Params:
        return state[0]

    def kept(self, state: State) -> State:
        return jax.device_get(state)

    def placed(self, stage: int, kept: State) -> State:
        return self._functions[stage].place(kept)

    def gradient(
        self, pipeline: int, step: int, params_of: Sequence[Params]
    ) -> tuple[list[Vectors], list[float], float]:
        seed, seq_len = self._config.train.seed, self._config.seq_lengths.at(step)
        together = self._plan.microbatches(pipeline)
        params_of = with_shared_table(self._functions, params_of)
        accs = [functions.zeros() for functions in self._functions]
        losses: list[float] = []
        for m in together:
            batch = self._samples.train(seed, step, m, seq_len, together)
            loss, accs = self._chain.accumulate(batch, accs, params_of)
            losses.append(float(loss))
        vectors = [functions.gradient_vectors(acc) for functions, acc in zip(self._functions, accs, strict=True)]
        if len(vectors) > 1 and TIED_GROUP in vectors[0]:
            vectors[0][TIED_GROUP] += vectors[-1].pop(TIED_GROUP)
        sq_norms = [math.fsum(_sq_norm(np.asarray(v)) for v in of_stage.values()) for of_stage in vectors]
        return vectors, sq_norms, sum(losses) / (len(losses) * self.n_samples)

    def local_step(self, stage: int, state: State, gradient: Vectors, scale: float) -> State:
        replica = self._split(state)
        after = self._functions[stage].update(replica.params, replica.opt_state, gradient, np.float32(scale))
        return _joined(ReplicaState(after[0], replica.outer, after[1]))

    def laid_out(
        self, stage: int, state: State, fragment: int, weight: int, owed: Vector | None
    ) -> tuple[Vector, Vector | None]:
        names = self._fragments[stage][fragment]
        return self._sent(exchanged(self._groups, self._trained(state), names, weight), owed)

    def mean(self, contributions: Sequence[Vector], weight: int) -> tuple[Vector, Vector | None]:
        total = contributions[0].copy()
        for part in contributions[1:]:
            total += part
        sent, lost = self._sent(total, None) if len(contributions) > 1 else (total, np.zeros_like(total))
        return sent * np.float32(1.0 / weight), lost

    def owes(self, lost: Vector, of_sum: Vector, shard: tuple[int, int]) -> Vector:
        lo, hi = shard
        owed = lost.copy()
        owed[lo:hi] += of_sum[lo:hi]
        return owed

    def _sent(self, vector: Vector, owed: Vector | None) -> tuple[Vector, Vector | None]:
        """(what arrives of a vector of a group, what is lost of it if that is made up for)."""
        if not self._groups.feeds_back:
            return self._codec.arrived(vector), None
        return self._codec.with_feedback(vector, owed)

    def averaged(self, stage: int, state: State, fragment: int, mean: Vector) -> State:
        after = averaged(self._groups, self._trained(state), self._fragments[stage][fragment], mean)
        return self.placed(stage, _joined(after._replace(params=with_trained(state[0], after.params))))

    def mean_state(self, states: Sequence[State]) -> State:
        part, own = mean_tree([(trained(self._config.model, params), own) for params, own in states])
        return with_trained(states[0][0], part), own

    def vector(self, state: State) -> Float32[np.ndarray, " n"]:
        part = self._trained(state).params
        return FloatVector(part).of(part)

    def change(self, vector: Vector, base: Vector, owed: Vector | None) -> tuple[Vector, Vector | None]:
        return self._codec.with_feedback(vector - base, owed)

    def added(self, vector: Float32[np.ndarray, " n"], change: Float32[np.ndarray, " n"]) -> Float32[np.ndarray, " n"]:
        return vector + change

    def with_vector(self, stage: int, state: State, vector: Float32[np.ndarray, " n"]) -> State:
        part = FloatVector(self._trained(state).params).tree(vector, 1.0)
        return self._functions[stage].place(with_trained(state[0], part)), state[1]

    def _trained(self, state: State) -> ReplicaState:
        """What of a replica's state other replicas may change."""
        replica = self._split(state)
        return replica._replace(params=trained(self._config.model, replica.params))

    def _split(self, state: State) -> ReplicaState:
        params, own = state
        opt_state, *outer = own if self._groups.outer != "none" else (own,)
        return ReplicaState(params, tuple(outer), opt_state)


def _joined(replica: ReplicaState) -> State:
    return replica.params, (replica.opt_state, *replica.outer) if replica.outer else replica.opt_state


def with_shared_table(stages: Sequence[StageFunctions], params_of: Sequence[Params]) -> list[Params]:
    """The parameters with which stages compute: the last one's with the table that it shares with the first, if it
    does."""
    *others, last = params_of
    end = stages[-1]
    names = group_entries(end.config, end.lo, end.hi).get(TIED_GROUP, [])
    return [*others, last | {name: params_of[0][name] for name in names}]


def mean_tree(trees: Sequence[Any]) -> Any:
    """The mean of trees, added in their order."""
    layout = FloatVector(trees[0])
    total = layout.of(trees[0])
    for tree in trees[1:]:
        total = total + layout.of(tree)
    return layout.tree(total, 1.0 / len(trees))


def _sq_norm(vector: np.ndarray) -> float:
    return float(np.einsum("i,i", vector, vector))
