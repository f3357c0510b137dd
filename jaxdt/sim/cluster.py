"""The simulator driver: the same machines as the runtime's, under a virtual clock.

A heap of callbacks in virtual time; links and hosts as models; tensors by a `Tensors` object per peer: `NoTensors` for
timing alone, the runtime's store for real arithmetic under virtual time. Equal inputs give equal traces, byte for byte.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxdt.core.events import (
    COORDINATOR,
    Action,
    Event,
    Free,
    Message,
    Persist,
    Persisted,
    Ran,
    Ready,
    Received,
    Report,
    Restore,
    Restored,
    Run,
    Send,
    SliceKey,
    Started,
    Stop,
    Sum,
    Summed,
    WakeAt,
    Woke,
    Work,
    WriteCheckpoint,
    WroteCheckpoint,
)
from jaxdt.core.message import tensor_key
from jaxdt.core.network import Link
from jaxdt.core.peer import Machine
from jaxdt.core.trace import Trace
from jaxdt.sim.hosts import SimulatedHost
from jaxdt.sim.links import SimulatedLink


class Tensors(Protocol):
    """What a driver keeps for one peer."""

    def run(self, work: Work, scale: float) -> dict[str, float]:
        """Do the Work; the values of its Ran."""

    def take(self, body: Message) -> Any:
        """The tensor that a message to be sent names."""

    def put(self, body: Message, src: int, tensor: Any) -> None:
        """Keep the tensor that came with a message."""

    def sum(self, key: SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        """Add up a slice; its digest and squared norm."""

    def free(self, step: int) -> None:
        """Forget what is kept for a step."""

    def write_checkpoint(self, version: int) -> None:
        """Write this peer's part."""

    def restore(self, version: int, lineage: int) -> None:
        """Go back to a checkpoint."""


class NoTensors:
    """Timing alone: no arithmetic, losses of zero."""

    def __init__(self, n_samples: int):
        self._n_samples = n_samples

    def run(self, work: Work, scale: float) -> dict[str, float]:
        return {"n_samples": self._n_samples, "loss_sum": 0.0} if work.kind in "BE" else {}

    def take(self, body: Message) -> None:
        return None

    def put(self, body: Message, src: int, tensor: Any) -> None:
        return None

    def sum(self, key: SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        return 0, 0.0

    def free(self, step: int) -> None:
        return None

    def write_checkpoint(self, version: int) -> None:
        return None

    def restore(self, version: int, lineage: int) -> None:
        return None


@dataclass(frozen=True)
class Seating:
    """Where a simulated peer sits and how fast it is: `seconds` per kind of Work on a core of its own."""

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


class Simulation:
    """Runs peers and their coordinator until all have stopped or `until_s` has come."""

    def __init__(
        self,
        coordinator: Machine,
        seats: Mapping[int, Seating],
        link: Callable[[int, int], Link],
        cores: Mapping[str, float],
        persist_s: float = 0.0,
        trace: Trace | None = None,
    ):
        self._machines: dict[int, Machine] = {COORDINATOR: coordinator, **{p: s.machine for p, s in seats.items()}}
        self._seats, self._link, self._persist_s, self._trace = seats, link, persist_s, trace
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._links: dict[tuple[int, int], SimulatedLink] = {}
        self._hosts = {name: SimulatedHost(n, self._at) for name, n in cores.items()}
        self.outcome = Outcome()

    def run(self, until_s: float = float("inf")) -> Outcome:
        """The outcome; raises RuntimeError if nothing can happen any more although somebody still runs."""
        for peer in self._machines:
            self._event(peer, Started())
        for peer, seat in self._seats.items():
            self._event(peer, Ready(dict(seat.seconds)))
        while len(self.outcome.stopped) < len(self._machines):
            if not self._heap:
                raise RuntimeError(f"simulation: nothing left to happen at {self.outcome.now_s} s")
            now_s, _, happen = heapq.heappop(self._heap)
            if now_s > until_s:
                break
            self.outcome.now_s = now_s
            happen()
        return self.outcome

    def _at(self, when_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when_s, next(self._order), happen))

    def _event(self, peer: int, event: Event) -> None:
        if peer not in self.outcome.stopped:
            for action in self._machines[peer].handle(self.outcome.now_s, event):
                self._act(peer, action)

    def _act(self, peer: int, action: Action) -> None:
        now_s = self.outcome.now_s
        match action:
            case Send():
                self._send(peer, action)
            case Run(work, scale):
                self._run(peer, work, scale)
            case Sum(key, members):
                self._event(peer, Summed(key, *self._seats[peer].tensors.sum(key, members)))
            case Free(step):
                self._seats[peer].tensors.free(step)
            case WakeAt(at_s, tag):
                self._at(at_s, lambda: self._event(peer, Woke(tag)))
            case Persist(name):
                self._at(now_s + self._persist_s, lambda: self._event(peer, Persisted(name)))
            case WriteCheckpoint(version):
                self._seats[peer].tensors.write_checkpoint(version)
                self._event(peer, WroteCheckpoint(version))
            case Restore(version, lineage):
                self._seats[peer].tensors.restore(version, lineage)
                self._at(now_s, lambda: self._event(peer, Restored(version)))
            case Report():
                self.outcome.reports.append((now_s, peer, action))
                if self._trace and action.kind != "heartbeat":
                    self._trace.report(peer, now_s, action)
            case Stop():
                self.outcome.stopped[peer] = action

    def _send(self, src: int, send: Send) -> None:
        dst, key = send.dst, tensor_key(send.body)
        tensor = self._seats[src].tensors.take(send.body) if key else None
        if self._trace and key:
            self._trace.send(src, self.outcome.now_s, dst, key, send.n_bytes)

        def deliver():
            if dst in self.outcome.stopped:
                return
            if key:
                self._seats[dst].tensors.put(send.body, src, tensor)
                if self._trace:
                    self._trace.recv(dst, self.outcome.now_s, src, key)
            self._event(dst, Received(send.header, send.body))

        if (src, dst) not in self._links:
            self._links[src, dst] = SimulatedLink(self._link(src, dst), self._at)
        self._links[src, dst].offer(self.outcome.now_s, send.n_bytes, send.priority, deliver)

    def _run(self, peer: int, work: Work, scale: float) -> None:
        seat, start_s = self._seats[peer], self.outcome.now_s
        values = seat.tensors.run(work, scale)

        def finished(now_s: float):
            if self._trace:
                self._trace.run(peer, start_s, now_s - start_s, work)
            self._event(peer, Ran(work, start_s, now_s - start_s, values))

        self._hosts[seat.host].start(start_s, peer, seat.seconds[work.kind], finished)
