"""The moves of state when a run goes from one plan to another: how many bytes, over which link, and for how long.

A replica needs state to go on: fp32 parameters and optimizer moments of its layers. A device fetches the layers that it
does not hold, each run of layers from the one of its holders that sends it soonest; links are independent. Layers that
no device holds any more come from the checkpoint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxdt.run.network import Network

CHECKPOINT = "checkpoint"
Ranges = tuple[tuple[int, int], ...]
StateBytes = Callable[[int, int], float]  # (lo, hi) -> bytes of state of layers lo..hi-1


@dataclass(frozen=True)
class Move:
    """The state that one device has to fetch before it can hold its new stage: the stages (from_stage None: none so
    far), the layers [lo, hi) that it does not hold yet, their bytes of state, the senders, and the seconds."""

    device: str
    from_stage: int | None
    to_stage: int
    layers: tuple[tuple[int, int], ...]
    n_bytes: float
    sources: tuple[str, ...]
    time_s: float


@dataclass(frozen=True, eq=False)
class Holders:
    """The devices that hold each stage before the change: `stages` and placement[stage], in indices of the network
    after the change. That network no longer has the devices that left."""

    network: Network
    stages: Ranges
    placement: Sequence[Sequence[int]]
    state_bytes: StateBytes

    def stage_of(self, device: int) -> int | None:
        """The stage that a device holds before the change."""
        return next((s for s, row in enumerate(self.placement) if device in row), None)

    def missing(self, device: int, lo: int, hi: int) -> list[tuple[int, int, int]]:
        """(old stage, lo, hi) of the layers of lo..hi-1 that a device does not hold, cut where old stages end."""
        own = self.stage_of(device)
        pieces = [(s, max(lo, a), min(hi, b)) for s, (a, b) in enumerate(self.stages) if s != own]
        return [piece for piece in pieces if piece[1] < piece[2]]

    def source(self, device: int, stage: int, n_bytes: float) -> tuple[int | None, float]:
        """(sender, seconds) for the state of an old stage from the device that sends it soonest. None stands for the
        checkpoint, which is assumed to send as fast as the fastest link of the device."""
        network = self.network
        holders = [d for d in self.placement[stage] if d != device and network.link(d, device).bandwidth_gbps > 0]
        senders = holders or [d for d in range(network.n_devices) if network.link(d, device).bandwidth_gbps > 0]
        times = [(network.link(d, device).transfer_s(round(n_bytes)), d) for d in senders if d != device]
        if not times:
            return None, 0.0
        time_s, sender = min(times)
        return (sender if holders else None), time_s

    def fetch_s(self, stages: Ranges) -> np.ndarray:
        """Seconds [N, S] in which every device could fetch the state that it lacks of every new stage."""
        return np.array(
            [[self.move(d, s, stages).time_s for s in range(len(stages))] for d in range(self.network.n_devices)]
        )

    def move(self, device: int, stage: int, stages: Ranges) -> Move:
        """The state that a device has to fetch for a new stage."""
        pieces = self.missing(device, *stages[stage])
        sizes = [self.state_bytes(lo, hi) for _, lo, hi in pieces]
        found = [self.source(device, s, n_bytes) for (s, _, _), n_bytes in zip(pieces, sizes, strict=True)]
        names = [CHECKPOINT if d is None else self.network.devices[d].name for d, _ in found]
        return Move(
            device=self.network.devices[device].name,
            from_stage=self.stage_of(device),
            to_stage=stage,
            layers=tuple((lo, hi) for _, lo, hi in pieces),
            n_bytes=sum(sizes),
            sources=tuple(dict.fromkeys(names)),
            time_s=sum(time_s for _, time_s in found),
        )

    def moves(self, stages: Ranges, placement: Sequence[Sequence[int]]) -> tuple[Move, ...]:
        """All that has to move for a new plan, the longest first."""
        every = [self.move(int(d), s, stages) for s, row in enumerate(placement) for d in row]
        return tuple(sorted((move for move in every if move.layers), key=lambda move: -move.time_s))


def longest_s(moves: Sequence[Move]) -> float:
    """Seconds until the last move is done."""
    return max((move.time_s for move in moves), default=0.0)
