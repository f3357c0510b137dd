"""The seconds of a pool's step by Eq. 1 and 2 of the hybrid parameter server paper, straight from a network and the
stages of a plan, in plain Python. This module shares no code with the search.

As printed, Eq. 1 uses k for stages and for owners; it is read as follows. A worker i with n units of a mini-batch takes

    alpha(f, i) + t n / beta(f, i) + alpha(i, b) + t n / beta(i, b) + n h / c

for its pass: from the owner f of the activations, through itself, to the owner b of the gradients, each the one nearest
to it. A server takes the transfer between both owners and n h / c, whichever of the two it is; in the paper only the
front servers compute, but the power of all counts. Forward and backward are a pass each, the backward in the other
direction. A stage takes as long as its slowest device in each pass, and Eq. 2 adds the exchange with the next stage,
the mean over pairs of its owners; the last stage has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxdt.run.network import Network
from planner.cost.reference import one_way_s, pair_s
from planner.model.pool import PoolStage


@dataclass(frozen=True)
class PoolStep:
    """The values that Eq. 1 and 2 need beside the stages of a step: bytes of a unit at a boundary, units of a
    mini-batch, mini-batches, and the seconds of a unit's forward and backward on each device for the layers of its
    stage."""

    unit_bytes: float
    minibatch_units: int
    n_minibatches: int
    unit_s: Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class PassCost:
    """One pass of a mini-batch through a stage: its slowest device, the seconds in which that device sends and
    receives, and the seconds in which it computes."""

    device: int
    transfer_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        return self.transfer_s + self.compute_s


@dataclass(frozen=True)
class StageCost:
    """Seconds of a mini-batch at a stage: both passes (Eq. 1), and the exchange with the next stage."""

    forward: PassCost
    backward: PassCost
    hop_s: float

    @property
    def total_s(self) -> float:
        return self.forward.total_s + self.backward.total_s + self.hop_s


@dataclass(frozen=True)
class PoolCost:
    """Seconds of a step by Eq. 2, and of a mini-batch at each stage."""

    total_s: float
    stages: tuple[StageCost, ...]

    @property
    def slowest_stage(self) -> int:
        return max(range(len(self.stages)), key=lambda k: self.stages[k].total_s)


def pool_cost(network: Network, stages: Sequence[PoolStage], step: PoolStep) -> PoolCost:
    """Eq. 2 in full. Infinite where a device has no link to an owner that it needs."""
    costs: list[StageCost] = []
    for k, stage in enumerate(stages):
        after = stages[k + 1].front if k + 1 < len(stages) else ()
        forward, backward = (_pass(network, stage, step, direction) for direction in (0, 1))
        costs.append(StageCost(forward, backward, _hop_s(network, stage.back, after, step)))
    total_s = step.n_minibatches * max(cost.total_s for cost in costs)
    return PoolCost(total_s, tuple(costs))


def _pass(network: Network, stage: PoolStage, step: PoolStep, direction: int) -> PassCost:
    """The slowest device of a stage; direction 0 is forward, from the front owners to the back ones."""
    sources, sinks = (stage.front, stage.back) if direction == 0 else (stage.back, stage.front)
    passes: list[PassCost] = []
    for device, n in stage.units.items():
        n_bytes = n * step.unit_bytes
        if n == 0:
            continue
        if device in stage.workers:
            source, sink = (_nearest(network, device, owners, step.unit_bytes) for owners in (sources, sinks))
            transfer_s = one_way_s(network, source, device, n_bytes) + one_way_s(network, device, sink, n_bytes)
        else:
            pairs = [(a, b) for a in sources for b in sinks if device in (a, b)]
            transfer_s = max(one_way_s(network, a, b, n_bytes) for a, b in pairs)
        passes.append(PassCost(device, transfer_s, n * step.unit_s[device][direction]))
    return max(passes, key=lambda one: one.total_s)


def _nearest(network: Network, device: int, owners: Sequence[int], unit_bytes: float) -> int:
    """The owner with which a worker exchanges a unit soonest."""
    return min(owners, key=lambda owner: pair_s(network, device, owner, unit_bytes))


def _hop_s(network: Network, before: Sequence[int], after: Sequence[int], step: PoolStep) -> float:
    """Mean over the pairs of owners of a mini-batch's activations one way and its gradients back."""
    n_bytes = step.minibatch_units * step.unit_bytes
    pairs = [(a, b) for a in before for b in after]
    return sum(pair_s(network, a, b, n_bytes) for a, b in pairs) / len(pairs) if pairs else 0.0
