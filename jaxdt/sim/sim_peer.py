"""What goes into a simulation for each peer, and what comes out of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxdt.membership.peer import Machine
from jaxdt.protocol.events import Report, Stop
from jaxdt.sim.tensors import Tensors
from jaxdt.spec.frozen_dataclass import frozen_dataclass

CRASHED = 137  # the exit code of a process that was killed


@frozen_dataclass
class SimPeer:
    """Where a simulated peer sits and how fast it is: `seconds` per kind of Work, and per MESSAGE if any of a
    simulation's peers has that, on a core of its own."""

    machine: Machine
    tensors: Tensors
    host: str
    seconds: Mapping[str, float]


@dataclass
class Outcome:
    """What came of a simulation. `stopped`: exit code and reason per machine, the coordinator's among them."""

    now_s: float = 0.0
    stopped: dict[int, Stop] = field(default_factory=dict)
    reports: list[tuple[float, int, Report]] = field(default_factory=list)

    def fields(self, kind: str) -> list[dict]:
        """The fields of all reports of one kind, in order."""
        return [report.fields for _, _, report in self.reports if report.kind == kind]
