"""Numbers modulo a prime for what a replica holds: each contribution to them changes them, and means stay exact.

A local step adds numbers that depend on the microbatches of the step and on all parameters with which its forwards and
backwards have computed. Laying out, sums and means are linear, and a mean multiplies by the inverse of a count. So a
contribution that is wrong, missing, or there twice changes the numbers for good: two histories that differ end alike
with a probability of about 2^-61. A replica has one number of each kind for each fragment of its parameters; a token
table that two stages share is the first fragment of the first stage. Rounding to what a codec sends is not linear, so a
number that is rounded elsewhere, or not at all, is another one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from jaxdt.run.codec import NONE
from jaxdt.run.config import RunConfig
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import shared_table_elements

PRIME = (1 << 61) - 1
ROUNDED_TO = 1 << 20  # multiples of this are what a codec sends
COUNT_MAX = 1000  # of contributions to a mean
# What a number is mixed for:
FRESH, ACTIVATION, GRADIENT, CONTRIBUTION, MOMENT, NORM, HELD_OUT, LOSS, TABLE = range(1, 10)
OUTER_LR, OUTER_MOMENTUM = 3, 5  # whole numbers do as well as those of a config

Vector = tuple[int, ...]


class State(NamedTuple):
    """The state of a replica: parameters and moments, and with an outer optimizer its anchor and momentum (else ()),
    each with one number for each fragment."""

    params: Vector
    moments: Vector
    anchor: Vector
    momentum: Vector

    def flat(self) -> Vector:
        """The state as it is laid out for a mean of states."""
        return (*self.params, *self.moments, *self.anchor, *self.momentum)

    def unflat(self, vector: Vector) -> "State":
        """A state of the same sizes from such a vector."""
        numbers = iter(vector)
        return State(*(tuple(next(numbers) for _ in part) for part in self))


def mixed(*numbers: int) -> int:
    """A number that depends on all of these and on their order, equal within one process."""
    return hash(numbers) % PRIME


def scaled(vector: Vector, scale: float) -> Vector:
    """The vector times a factor that is a fraction of small whole numbers, exactly."""
    fraction = Fraction(scale).limit_denominator(COUNT_MAX)
    factor = fraction.numerator * pow(fraction.denominator, -1, PRIME)
    return tuple(number * factor % PRIME for number in vector)


def total(vectors: Sequence[Vector]) -> Vector:
    return tuple(sum(numbers) % PRIME for numbers in zip(*vectors, strict=True))


def difference(left: Vector, right: Vector) -> Vector:
    return tuple((a - b) % PRIME for a, b in zip(left, right, strict=True))


# ------------------------------------------------------------------------------------------------- Work, and its state


def tokens(step: int, microbatch: int) -> int:
    return mixed(step, microbatch)


def held_out_tokens(microbatch: int) -> int:
    return mixed(HELD_OUT, microbatch)


def forward(params: Vector, x: int) -> int:
    """The activation that continues to the next stage. It also stands for what is kept for the backward."""
    return mixed(ACTIVATION, *params, x)


def backward(params: Vector, x: int, gy: int) -> tuple[int, int]:
    """(the gradient for the stage before, the contribution to the accumulator). At the last stage `x` is the input and
    `gy` 0, elsewhere `x` is what the forward kept."""
    return mixed(GRADIENT, *params, x, gy), mixed(CONTRIBUTION, *params, x, gy)


def with_table(params: Vector, of_first_stage: Vector) -> Vector:
    """The numbers with which the last stage computes, if it shares the first stage's table."""
    return (*params, of_first_stage[0])


def table_gradient(accumulated: int) -> int:
    """The gradient of a shared table at the last stage, where this has been accumulated."""
    return mixed(TABLE, accumulated)


def loss(params: Vector, x: int) -> float:
    """The loss of the last stage: a whole number, so that sums of losses are exact."""
    return float(mixed(LOSS, *params, x) % 9973)


def sq_norm(accumulated: int) -> float:
    """The squared norm of the gradient: small, so that clipping matters in some steps."""
    return float(mixed(NORM, accumulated) % 97)


def local_step(state: State, accumulated: int) -> State:
    """The state after an update by the replica's own gradient. Anchor and momentum stay."""
    params = tuple((p + mixed(fragment, accumulated)) % PRIME for fragment, p in enumerate(state.params))
    moments = tuple((m + mixed(MOMENT, fragment, accumulated)) % PRIME for fragment, m in enumerate(state.moments))
    return state._replace(params=params, moments=moments)


def _mix(mix_frac: float, own: int, outcome: int) -> int:
    """The share that a replica keeps of its own number, and the rest of the outcome of an average."""
    return total((scaled((own,), mix_frac), scaled((outcome,), 1 - mix_frac)))[0]


def _with(vector: Vector, fragment: int, number: int) -> Vector:
    return (*vector[:fragment], number, *vector[fragment + 1 :])


OUTER_DIRECTIONS: dict[str, Callable[[int, int], int]] = {
    "sgd": lambda momentum, change: momentum,
    "nesterov": lambda momentum, change: change + OUTER_MOMENTUM * momentum,
}


@dataclass(frozen=True)
class Residues:
    """The arithmetic of a run with one sample a microbatch, for a replay (jaxdt.testing.replay.Arithmetic).
    `nonfinite`: the stage, pipeline and local step whose gradient is not finite, if there is one."""

    config: RunConfig
    plan: Plan
    nonfinite: tuple[int, int, int] | None = None
    n_samples: int = 1

    @property
    def has_shared_table(self) -> bool:
        """Whether the last stage computes with the table of the first."""
        return shared_table_elements(self.config, self.plan) > 0

    @property
    def has_outer(self) -> bool:
        return self.config.sync.groups.outer in OUTER_DIRECTIONS

    def fresh_state(self, stage: int) -> State:
        params = tuple(mixed(FRESH, stage, fragment) for fragment in range(self.config.sync.groups.fragments))
        zeros = (0,) * len(params)
        return State(params, zeros, params, zeros) if self.has_outer else State(params, zeros, (), ())

    def params(self, state: State) -> Vector:
        return state.params

    vector = params

    def kept(self, state: State) -> State:
        return state

    def placed(self, stage: int, kept: State) -> State:
        return kept

    def gradient(self, pipeline: int, step: int, params_of: Sequence[Vector]) -> tuple[list[int], list[float], float]:
        params_of = self._computed_with(params_of)
        accumulated = [0] * len(params_of)
        for microbatch in self.plan.microbatches(pipeline):
            inputs = [tokens(step, microbatch)]
            for params in params_of[:-1]:
                inputs.append(forward(params, inputs[-1]))
            g, contribution = backward(params_of[-1], inputs[-1], 0)
            accumulated[-1] += contribution
            for stage in reversed(range(len(params_of) - 1)):
                g, contribution = backward(params_of[stage], inputs[stage + 1], g)
                accumulated[stage] += contribution
        if self.has_shared_table:
            accumulated[0] += table_gradient(accumulated[-1] % PRIME)
        sums = [number % PRIME for number in accumulated]
        is_nan = [self.is_nonfinite(stage, pipeline, step) for stage in range(len(sums))]
        return sums, [math.nan if nan else sq_norm(a) for nan, a in zip(is_nan, sums, strict=True)], 1.0

    def _computed_with(self, params_of: Sequence[Vector]) -> list[Vector]:
        """The numbers with which the stages compute, if these are their parameters."""
        *others, last = params_of
        return [*others, with_table(last, params_of[0]) if self.has_shared_table else last]

    def is_nonfinite(self, stage: int, pipeline: int, step: int) -> bool:
        return (stage, pipeline, step) == self.nonfinite

    def local_step(self, stage: int, state: State, gradient: int, scale: float) -> State:
        return local_step(state, gradient)

    def laid_out(
        self, stage: int, state: State, fragment: int, weight: int, owed: Vector | None
    ) -> tuple[Vector, Vector | None]:
        return self.sent_to_group(self.exchanged(state, fragment, weight), owed)

    def exchanged(self, state: State, fragment: int, weight: int) -> Vector:
        """The parameters of a fragment, or with an outer optimizer their change since the last average, and the
        moments, if they are averaged; times the weight."""
        params, moments = state.params[fragment], state.moments[fragment]
        number = state.anchor[fragment] - params if state.anchor else params
        vector = (number % PRIME, *([moments] if self.config.sync.groups.average_moments else []))
        return tuple(number * weight % PRIME for number in vector)

    def sent_to_group(self, vector: Vector, owed: Vector | None) -> tuple[Vector, Vector | None]:
        """(a vector of a group and what is owed, as they go over a link; what is lost, if that is made up for)."""
        whole = total((vector, owed)) if owed else vector
        sent = self.as_sent(whole)
        return sent, difference(whole, sent) if self.config.sync.groups.feeds_back else None

    def as_sent(self, vector: Vector) -> Vector:
        """A vector of a group or a push as it goes over a link, rounded once to the numbers of the codec."""
        is_rounded = self.config.sync.codec != NONE
        return tuple(number - number % ROUNDED_TO for number in vector) if is_rounded else vector

    def mean(self, contributions: Sequence[Vector], weight: int) -> tuple[Vector, Vector | None]:
        sent, lost = self.sent_to_group(total(contributions), None)
        return scaled(sent, 1 / weight), lost

    def owes(self, lost: Vector, of_sum: Vector, shard: tuple[int, int]) -> Vector:
        """Each slice of a sum stands for all of it, so the first one's owner owes what is lost."""
        lo, hi = shard
        return total((lost, of_sum)) if lo == 0 < hi else lost

    def averaged(self, stage: int, state: State, fragment: int, mean: Vector) -> State:
        groups, (outcome, *moments) = self.config.sync.groups, mean
        if state.anchor:
            momentum = (OUTER_MOMENTUM * state.momentum[fragment] + outcome) % PRIME
            direction = OUTER_DIRECTIONS[groups.outer](momentum, outcome)
            outcome = (state.anchor[fragment] - OUTER_LR * direction) % PRIME
            state = state._replace(
                anchor=_with(state.anchor, fragment, outcome), momentum=_with(state.momentum, fragment, momentum)
            )
        params = _mix(groups.mix_frac, state.params[fragment], outcome)
        state = state._replace(params=_with(state.params, fragment, params))
        for moment in moments:
            own = state.moments[fragment]
            state = state._replace(moments=_with(state.moments, fragment, _mix(groups.mix_frac, own, moment)))
        return state

    def mean_state(self, states: Sequence[State]) -> State:
        return states[0].unflat(scaled(total([state.flat() for state in states]), 1 / len(states)))

    def change(self, vector: Vector, base: Vector, owed: Vector | None) -> tuple[Vector, Vector | None]:
        own = difference(vector, base)
        whole = total((own, owed)) if owed else own
        sent = self.as_sent(whole)
        return sent, difference(whole, sent)

    def added(self, vector: Vector, change: Vector) -> Vector:
        return total((vector, change))

    def with_vector(self, stage: int, state: State, vector: Vector) -> State:
        return state._replace(params=vector)

    def held_out_loss(self, params_of: Sequence[Vector]) -> float:
        """The mean over all held-out microbatches, with these parameters of the stages."""
        params_of = self._computed_with(params_of)
        n = self.config.train.eval_microbatches
        losses: list[float] = []
        for microbatch in range(n):
            x = held_out_tokens(microbatch)
            for params in params_of[:-1]:
                x = forward(params, x)
            losses.append(loss(params_of[-1], x))
        return sum(losses) / n
