"""Whether the replicas of a stage hold equal parameters, by the digests that go with their votes.

Replicas apply equal sums of gradients, so they stay equal where the same program makes the same bits. On devices of
different kinds it does not: vector units round differently, and after hundreds of updates most parameters differ by an
ulp or more. That is harmless, and told once for each peer. A difference beyond TOLERANCE has another cause (memory that
flips bits, a fault of a device or of this program), and every step adds gradients of a model that was not meant to
train. Then the other replicas take the state of the lowest-numbered one. Version 0 has no tolerance, so all replicas
begin with equal bits.

The check compares the norm of the difference, over the norm of the parameters, with TOLERANCE. Only the digests of two
states travel, not the states, so the norm is estimated from sums of the parameters, each with a random sign, over
residue classes of their positions: in expectation the squared differences of those sums add up to the squared norm of
the difference.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import RepairReport, Report, UnequalBitsReport

# Rounding that differs in each of 100,000 updates adds up to about 2e-5 as a random walk of steps of one ulp in fp32.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Deviation:
    """A replica whose state is not that of the lowest-numbered replica of its stage."""

    peer: int
    reference: int
    state: ev.StateDigest
    expected: ev.StateDigest  # that of the reference
    difference: float

    @property
    def is_tolerated(self) -> bool:
        """NaN is not."""
        return self.state.version > 0 and self.difference <= TOLERANCE

    @property
    def repairs(self) -> dict[int, ev.Repair]:
        """The messages to the replica and its reference. The reference makes its digest again: if its state has changed
        meanwhile, the replica that takes this state over would never have the expected digest."""
        version, donor = self.state.version, self.reference
        return {
            donor: ev.Repair(version, self.expected.digest, donor),
            self.peer: ev.Repair(version, self.state.digest, donor),
        }

    @property
    def repair_report(self) -> Report:
        return RepairReport(self.state.version, self.state.stage, self.peer, self.reference, self.difference)


def deviations(votes: Mapping[int, ev.Prepared]) -> list[Deviation]:
    """The replicas that differ, by peer id."""
    reference: dict[int, tuple[int, ev.StateDigest]] = {}  # by stage
    found: list[Deviation] = []
    for peer, prepared in sorted(votes.items()):
        state = prepared.state
        if state is None:
            continue
        first, expected = reference.setdefault(state.stage, (peer, state))
        if state.digest != expected.digest:
            found.append(Deviation(peer, first, state, expected, relative_difference(state, expected)))
    return found


def relative_difference(state: ev.StateDigest, expected: ev.StateDigest) -> float:
    """The estimated norm of the difference over the norm of the expected parameters; NaN if either is not finite."""
    if len(state.sums) != len(expected.sums):
        return math.nan
    distance = math.dist(state.sums, expected.sums)
    if not expected.norm:
        return 0.0 if distance == 0.0 else math.inf
    return distance / expected.norm


class UnequalBits:
    """The peers of which people know that their bits differ."""

    def __init__(self):
        self._known_peers: set[int] = set()

    def reports(self, votes: Mapping[int, ev.Prepared]) -> list[Report]:
        """One report for each that was not known, of the votes with which a step is committed."""
        found = deviations(votes)
        new = [deviation for deviation in found if deviation.peer not in self._known_peers]
        self._known_peers = {deviation.peer for deviation in found} | (self._known_peers & votes.keys())
        return [
            UnequalBitsReport(one.state.version, one.state.stage, one.peer, one.reference, one.difference)
            for one in new
        ]
