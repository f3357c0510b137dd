"""The instance that the search of a pool's plan sees: links, power, memory and availability of devices, and a step."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxdt.run.network import Network
from planner.model.hosts import fair_gbps


class StageWork(Protocol):
    """The seconds and the memory that a stage of layers lo..hi-1 takes on a device."""

    def unit_s(self, device: int, lo: int, hi: int) -> tuple[float, float]:
        """Seconds of one unit's forward, and of its backward, recomputation included."""
        ...

    def server_bytes(self, lo: int, hi: int, n_in_flight: int) -> float:
        """Memory of a server that computes `n_in_flight` units at a time, without the tensors that it owns."""
        ...

    def worker_bytes(self, lo: int, hi: int) -> float:
        """Memory of a worker."""
        ...


@dataclass(frozen=True, eq=False)
class PoolProblem:
    """N devices in the order of their names, so that nothing depends on how a file numbers them.

    network        with its devices in that order
    index [N]      of each device in the network as it was given
    room_bytes     memory [N], infinite where nothing limits it
    cuts           layers before which the model may be cut, both ends included
    unit_bytes     of a unit's activations at a boundary, and of their gradients
    n_units        of a step, in n_minibatches equal parts

    Derived: reliable [N]; available [N], the expected part of a batch in which a device is there, if one that goes does
    so at any moment alike; delay_s [N, N], seconds of one unit there and back, infinite without a link; power [N],
    units of the whole model per second, forward and backward."""

    network: Network
    index: tuple[int, ...]
    room_bytes: tuple[float, ...]
    work: StageWork
    cuts: tuple[int, ...]
    unit_bytes: float
    n_units: int
    n_minibatches: int
    reliable: np.ndarray = field(init=False)
    available: np.ndarray = field(init=False)
    delay_s: np.ndarray = field(init=False)
    power: np.ndarray = field(init=False)

    def __post_init__(self):
        probs = [device.disconnect_prob for device in self.network.devices]
        seconds = [sum(self.work.unit_s(d, self.cuts[0], self.cuts[-1])) for d in range(len(probs))]
        self._derive("reliable", np.array([prob is None for prob in probs]))
        self._derive("available", np.array([1.0 if prob is None else 1 - prob / 2 for prob in probs]))
        self._derive("delay_s", self.exchange_s(self.unit_bytes))
        self._derive("power", 1 / np.array(seconds))

    def _derive(self, name: str, value: np.ndarray):
        object.__setattr__(self, name, value)

    @property
    def minibatch_units(self) -> int:
        return self.n_units // self.n_minibatches

    def exchange_s(self, n_bytes: float) -> np.ndarray:
        """Seconds [N, N] of n_bytes there and of as many back; infinite without a link, 0 on the diagonal."""
        bandwidth = fair_gbps(self.network) * 1e9 / 8
        s_per_byte = np.divide(1.0, bandwidth, out=np.full_like(bandwidth, np.inf), where=bandwidth > 0)
        one_way_s = np.array(self.network.latency_s) + n_bytes * s_per_byte
        np.fill_diagonal(one_way_s, 0.0)
        return one_way_s + one_way_s.T
