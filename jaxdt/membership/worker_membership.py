"""A pool worker's side of being known: it is in no view, and one server of its stage knows it.

The worker says that it is here, as often as members send heartbeats, and the server answers with the worker's admission
and the version of the parameters. When a version begins the server says so without being asked. A worker that the
server has lost gets another admission: what it has done under the old one counts no more, and it begins anew. Nobody
waits for a worker, so it may end at any moment; it waits for a silent server, and ends when that lasts too long.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from dataclasses import dataclass, replace

from jaxdt.membership.member import ACCEPT, DROP
from jaxdt.protocol.deadline import FIRST_CONTACT_S
from jaxdt.protocol.events import (
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
    Send,
    Started,
    Stop,
    WakeAt,
    Woke,
)
from jaxdt.protocol.reports import ReadyReport

NO_VIEW = 0
LOST = 3  # exit code: the server is gone


@dataclass(frozen=True)
class WorkerIdentity:
    """Which worker of which server this is. `outage_s`: how long it waits for a silent server."""

    run: str
    fingerprint: str
    peer: int
    server: int
    n_steps: int
    heartbeat_s: float
    outage_s: float


class WorkerMembership:
    """See the module text. `header` stands on this worker's messages."""

    READS = frozenset({Started, Woke, Ready, Enlisted, Ended, LinkChanged, Interrupted, Leave, Paused})

    def __init__(self, identity: WorkerIdentity):
        self.identity = identity
        self.header = Header(identity.run, 0, NO_VIEW, identity.peer)
        self.view = None
        self._process = 0
        self._is_ready = False
        self._heard_s = 0.0
        self._admitted: Admitted | None = None

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
            case Woke("heartbeat"):
                return self._heartbeat(now_s)
            case Paused():
                self._heard_s = now_s  # what the server said meanwhile is still on its way through the sockets
            case LinkChanged(peer, True) if peer == self.identity.server and self._is_ready:
                return [self._enlist()]
            case Interrupted(code, reason):
                return [Stop(code, reason)]
            case Leave():
                return [Stop(0, f"worker {self.identity.peer}: left the run")]
        return []

    def _enlist(self) -> Send:
        return Send(self.identity.server, Enlist(self._process, self.identity.fingerprint))

    def _heartbeat(self, now_s: float) -> list[Action | Event]:
        identity = self.identity
        silent_s = now_s - self._heard_s
        # A server answers only once the run has begun.
        patience_s = identity.outage_s if self._admitted else max(identity.outage_s, FIRST_CONTACT_S)
        if silent_s > patience_s:
            return [Stop(LOST, f"worker {identity.peer}: server {identity.server} was silent for {silent_s:.0f} s")]
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
