"""The inputs of a simulation (peers and their environment) and its outcome."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from jaxdt.membership.peer import DrivenMachine
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import Report
from jaxdt.run.frozen_dataclass import frozen_dataclass
from jaxdt.run.network import Link
from jaxdt.run.work import Work
from jaxdt.sim.link_table import LinkOptions
from jaxdt.sim.stragglers.stalls import PeerStalls
from jaxdt.sim.tensors import Tensors

CRASHED = 137  # the exit code of a process that was killed


@frozen_dataclass
class SimPeer:
    """A simulated peer on its host. Peers with an equal `disk` see one another's parts of checkpoints. `seconds`: per
    kind of Work on one core; a kind + ON_A_CORE is what a core computes of it, if the rest is slept. It may also hold
    MESSAGE, the seconds of handling one message; if any peer of a simulation has that, each peer handles messages
    beside its Work. `stalls` holds some of its Work up. `busy_s()` draws for how long its compute thread does something
    else before the next thing that it has to do. One that `is_outside` is no member of the run, and the coordinator
    knows nothing of it."""

    machine: DrivenMachine
    tensors: Tensors
    host: str
    seconds: Mapping[str, float]
    disk: str = ""
    stalls: PeerStalls | None = None
    busy_s: Callable[[], float] | None = None
    is_outside: bool = False


ReportKind = TypeVar("ReportKind", bound=Report)


@dataclass(frozen=True)
class Environment:
    """The links and hosts that a simulation runs on. `link(src, dst)`: the directed link of two peers, or of a peer and
    the coordinator; `cores[host]`: cores of a host; `persist_s`: from a Persist until it is durable. Tensors named in
    `free` arrive at once: "transfer" (boundary tensors), "sync" (gradients)."""

    link: Callable[[int, int], Link]
    cores: Mapping[str, float]
    persist_s: float = 0.0
    link_options: LinkOptions = field(default_factory=LinkOptions)
    free: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ProcessFactory:
    """Makes the processes that begin while a simulation runs. `make_peer(peer, stage)`: a peer that joins or moves to
    `stage`; with None for the stage, a peer of the plan that is started again. `make_coordinator(disk)`: a coordinator
    that continues from the values that an earlier one made durable, by name."""

    make_peer: Callable[[int, int | None], SimPeer]
    make_coordinator: Callable[[Mapping[str, Any]], DrivenMachine] | None = None


class Recorder(Protocol):
    """A receiver of the Work, the messages with tensors and the reports of a simulation: a Trace, or a class that sums
    them. Times are instants in seconds, except for `seconds`, the duration of a Work."""

    def run(self, peer: int, start_s: float, seconds: float, work: Work) -> None: ...

    def send(
        self, peer: int, now_s: float, dst: int, key: ev.Key | ev.SliceKey | ev.StateKey, n_bytes: int
    ) -> None: ...

    def recv(self, peer: int, now_s: float, src: int, key: ev.Key | ev.SliceKey | ev.StateKey) -> None: ...

    def report(self, peer: int, now_s: float, report: Report) -> None: ...


@dataclass
class Outcome:
    """The result of a simulation. `stopped`: exit code and reason of each machine that has stopped, the coordinator
    included; `reports`: (time, peer, report)."""

    now_s: float = 0.0
    stopped: dict[int, ev.Stop] = field(default_factory=dict)
    reports: list[tuple[float, int, Report]] = field(default_factory=list)

    def of(self, kind: type[ReportKind]) -> list[ReportKind]:
        """The reports of one kind, in order of time."""
        return [report for _, _, report in self.reports if isinstance(report, kind)]
