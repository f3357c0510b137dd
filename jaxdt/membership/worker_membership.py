"""A pool worker's side of being known: it is in no view, and one server of its stage knows it.

The worker says that it is here, as often as members send heartbeats, and the server answers with the worker's admission
and the version of the parameters. When a version begins the server says so without being asked. A worker that the
server has lost gets another admission: what it has done under the old one counts no more, and it begins anew. Nobody
waits for a worker, so it may end at any moment; it waits for a silent server, and ends when that lasts too long.

One process at a time is a worker. While the connection of one stands, the server refuses those of another that says it
is the same worker. That other one waits, since it may have been started in place of a process whose connection is not
known to be broken yet, and ends when it is refused for too long.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from dataclasses import dataclass, replace

from jaxdt.membership.member import ACCEPT, DROP
from jaxdt.protocol.deadline import FIRST_CONTACT_S
from jaxdt.protocol.events import (
    CPU_S,
    Action,
    Admitted,
    Ended,
    Enlist,
    Enlisted,
    Event,
    Header,
    Interrupted,
    Leave,
    LinkChanged,
    Message,
    Paused,
    Ready,
    Received,
    Refused,
    Send,
    Started,
    Status,
    Stop,
    WakeAt,
    Woke,
)
from jaxdt.protocol.reports import ReadyReport, RefusedReport

NO_VIEW = 0
BAD_INPUT = 2  # exit code: the server refuses this process
NO_SERVER = -1  # no exit code: the server is silent, and the process asks for another one
REFUSED_S = 30.0  # for so long at most a process is refused; a connection that is broken is seen long before


@dataclass(frozen=True)
class WorkerIdentity:
    """The identity of this worker, and its server. `outage_s`: how long the worker waits for a silent server."""

    run: str
    fingerprint: str
    peer: int
    server: int
    n_steps: int
    heartbeat_s: float
    outage_s: float


class WorkerMembership:
    """See the module text. `header` stands on this worker's messages."""

    READS = frozenset({Started, Woke, Status, Ready, Enlisted, Ended, LinkChanged, Refused, Interrupted, Leave, Paused})

    def __init__(self, identity: WorkerIdentity):
        self.identity = identity
        self.header = Header(identity.run, 0, NO_VIEW, identity.peer)
        self.view = None
        self._process = 0
        self._cpu_s = 0.0
        self._is_ready = False
        self._heard_s = 0.0
        self._admitted: Admitted | None = None
        self._refused: tuple[float, str] | None = None  # since when the server refuses connections, and why

    def admit(self, header: Header, body: Message) -> str:
        """ACCEPT or DROP: a worker hears its server only. An answer to Enlist may be of a later generation."""
        if (header.run, header.src) != (self.identity.run, self.identity.server):
            return DROP
        generation = self.header.generation
        is_answer = isinstance(body, Enlisted | Ended)
        fits = header.generation >= generation if is_answer else header.generation == generation
        return ACCEPT if fits else DROP

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:
            case Received(_, Enlisted() | Ended() as body) if body.process not in (None, self._process):
                return []  # said to another process of this worker
            case Received(header, Enlisted() as body):
                self._heard_s = now_s
                return self._enlisted(header.generation, body)
            case Received(_, Ended(code, reason)):
                return [Stop(code, reason)]
            case Started(process=process):
                self._process = process
            case Ready(device=device):
                self._is_ready, self._heard_s = True, now_s
                return [ReadyReport(device), *self._heartbeat(now_s)]
            case Status(values):
                self._cpu_s = values.get(CPU_S, 0.0)
            case Woke("heartbeat"):
                return self._heartbeat(now_s)
            case Paused():
                self._heard_s = now_s  # what the server said meanwhile is still on its way through the sockets
            case LinkChanged(peer, True) if peer == self.identity.server:
                self._refused = None
                return [self._enlist()] if self._is_ready else []
            case Refused(peer, reason) if peer == self.identity.server:
                self._refused = (now_s, reason)
                return [RefusedReport(reason)]
            case Interrupted(code, reason):
                return [Stop(code, reason)]
            case Leave():
                return [Stop(0, f"worker {self.identity.peer}: left the run")]
        return []

    def _enlist(self) -> Send:
        return Send(self.identity.server, Enlist(self._process, self.identity.fingerprint, self._cpu_s))

    def _heartbeat(self, now_s: float) -> list[Action | Event]:
        identity = self.identity
        silent_s = now_s - self._heard_s
        if self._refused and not self._admitted and now_s - self._refused[0] > REFUSED_S:
            refusal = f"server {identity.server} has refused it for {REFUSED_S:.0f} s: {self._refused[1]}"
            return [Stop(BAD_INPUT, f"worker {identity.peer}: {refusal}")]
        # A server answers only once the run has begun.
        patience_s = identity.outage_s if self._admitted else max(identity.outage_s, FIRST_CONTACT_S)
        if silent_s > patience_s:
            return [
                Stop(NO_SERVER, f"worker {identity.peer}: server {identity.server} was silent for {silent_s:.0f} s")
            ]
        return [self._enlist(), WakeAt(now_s + identity.heartbeat_s, "heartbeat")]

    def _enlisted(self, generation: int, body: Enlisted) -> list[Action | Event]:
        """Answers may overtake one another, so an older one changes nothing."""
        if body.version >= self.identity.n_steps:
            return [Stop(0, f"worker {self.identity.peer}: all {body.version} steps are done")]
        known, admitted = self._admitted, Admitted(body.admission, generation, body.version, body.n_reseeds)
        if known and _order(admitted) <= _order(known):
            return []
        self._admitted = admitted
        self.header = replace(self.header, generation=generation)
        return [admitted]


def _order(admitted: Admitted) -> tuple[int, int, int]:
    return admitted.generation, admitted.admission, admitted.version
