"""One number modulo a prime for what a replica holds: each contribution to it changes it, and means stay exact.

A local step adds a number that depends on the microbatches of the step and on all parameters with which its forwards
and backwards have computed. Laying out, sums and means are linear, and a mean multiplies by the inverse of a count. So
a contribution that is wrong, missing, or there twice changes the number for good: two histories that differ end alike
with a probability of about 2^-61.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

from jaxdt.spec.config import GroupsConfig

PRIME = (1 << 61) - 1
COUNT_MAX = 1000  # of contributions to a mean
FRESH, ACTIVATION, GRADIENT, CONTRIBUTION, MOMENT, NORM = range(1, 7)  # what a number is mixed for
OUTER_LR, OUTER_MOMENTUM = 3, 5  # whole numbers do as well as those of a config
N_PLAIN = 2  # numbers of a state without an outer optimizer

Vector = tuple[int, ...]


def mixed(*numbers: int) -> int:
    """A number that depends on all of these and on their order, equal within one process."""
    return hash(numbers) % PRIME


def scaled(vector: Vector, scale: float) -> Vector:
    """The vector times a factor that is one over a small whole number, exactly."""
    fraction = Fraction(scale).limit_denominator(COUNT_MAX)
    factor = fraction.numerator * pow(fraction.denominator, -1, PRIME)
    return tuple(number * factor % PRIME for number in vector)


def total(vectors: Sequence[Vector]) -> Vector:
    return tuple(sum(numbers) % PRIME for numbers in zip(*vectors, strict=True))


def difference(left: Vector, right: Vector) -> Vector:
    return tuple((a - b) % PRIME for a, b in zip(left, right, strict=True))


# ------------------------------------------------------------------------------------------------- Work, and its state


def fresh_state(stage: int, has_outer: bool) -> Vector:
    """Parameters and moments, and with an outer optimizer its anchor and momentum."""
    params = mixed(FRESH, stage)
    return (params, 0, params, 0) if has_outer else (params, 0)


def tokens(step: int, microbatch: int) -> int:
    return mixed(step, microbatch)


def forward(params: int, x: int) -> int:
    """The activation that goes on to the next stage. It also stands for what is kept for the backward."""
    return mixed(ACTIVATION, params, x)


def backward(params: int, x: int, gy: int) -> tuple[int, int]:
    """(the gradient for the stage before, the contribution to the accumulator). At the last stage `x` is the input and
    `gy` 0, elsewhere `x` is what the forward kept."""
    return mixed(GRADIENT, params, x, gy), mixed(CONTRIBUTION, params, x, gy)


def sq_norm(accumulated: int) -> float:
    """Of the gradient: small, so that clipping matters in some steps."""
    return float(mixed(NORM, accumulated) % 97)


def local_step(state: Vector, accumulated: int) -> Vector:
    """After an update by the own gradient. Anchor and momentum stay."""
    params, moments, *outer = state
    return ((params + accumulated) % PRIME, (moments + mixed(MOMENT, accumulated)) % PRIME, *outer)


def exchanged(state: Vector) -> Vector:
    """What a replica lays out for a group: its parameters, or with an outer optimizer what they have changed since the
    last average."""
    params, _, *outer = state
    return ((outer[0] - params) % PRIME,) if outer else (params,)


def averaged(state: Vector, mean: Vector, outer: str) -> Vector:
    """The state after a group's mean. `outer`: the outer optimizer of the config."""
    if len(state) == N_PLAIN:
        return (mean[0], state[1])
    _, moments, anchor, momentum = state
    momentum = (OUTER_MOMENTUM * momentum + mean[0]) % PRIME
    anchor = (anchor - OUTER_LR * OUTER_DIRECTIONS[outer](momentum, mean[0])) % PRIME
    return (anchor, moments, anchor, momentum)


OUTER_DIRECTIONS: dict[str, Callable[[int, int], int]] = {
    "sgd": lambda momentum, change: momentum,
    "nesterov": lambda momentum, change: change + OUTER_MOMENTUM * momentum,
}


def has_outer(groups: GroupsConfig) -> bool:
    return groups.outer in OUTER_DIRECTIONS
