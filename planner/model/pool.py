"""The words of a pool's plan (hybrid parameter servers): what its search leaves open, and the stages that it makes of
devices of which only some are reliable.

A unit is one microbatch. A step of `n_units` is cut into mini-batches, and a stage's devices share the units of each.
Servers are reliable devices; workers are the others, which may leave without notice. A server owns the activations that
enter its stage (front), or the gradients that enter it (back); a lone server owns both. Nothing here needs numpy.
"""

from dataclasses import dataclass

from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from planner.model.change import part_of

EQ3 = ("paper", "consistent")
STOPS = ("first_rise", "scan")


@dataclass(frozen=True)
class PoolOptions:
    """Options for the points that the paper leaves open in its search.

    eq3            "paper": the seconds of a level's stages as printed, too low by the number of stages, which alone
                   drives the search to more of them; "consistent": without that factor, so that only memory and links
                   decide
    stop           "first_rise": the level before the first one that is slower; "scan": the best of all levels
    n_minibatches  mini-batches of a step; None: as many as leave each a unit for every device"""

    eq3: str = "paper"
    stop: str = "first_rise"
    n_minibatches: int | None = None


@dataclass(frozen=True)
class PoolStage:
    """One stage: its layers lo..hi-1, its servers in front and at the back, its workers, and the number of units of a
    mini-batch that each of its devices computes."""

    lo: int
    hi: int
    front: tuple[int, ...]
    back: tuple[int, ...]
    workers: tuple[int, ...]
    units: dict[int, int]

    @property
    def servers(self) -> tuple[int, ...]:
        return tuple(sorted({*self.front, *self.back}))


def by_name(network: Network) -> tuple[Network, tuple[int, ...]]:
    """(the network with its devices in the order of their names, the former index of each)."""
    index = tuple(sorted(range(network.n_devices), key=lambda d: network.devices[d].name))
    return part_of(network, index), index


def minibatches_of(options: PoolOptions, n_units: int, n_devices: int) -> int:
    """Mini-batches of a step; BadInput for a number that does not divide its units."""
    if n_units < n_devices:
        raise BadInput(f"--global_batch: got {n_units} microbatches, expected one for each of {n_devices} devices")
    n = options.n_minibatches
    if n is None:
        return next(count for count in range(n_units // n_devices, 0, -1) if n_units % count == 0)
    if n < 1 or n_units % n:
        raise BadInput(f"--minibatches: got {n}, expected a divisor of the {n_units} microbatches of a step")
    return n
