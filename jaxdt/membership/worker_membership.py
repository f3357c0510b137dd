"""A pool worker's side of being known: it is in no view, and one server of its stage knows it.

The worker says that it is here, as often as members send heartbeats, and the server answers with the worker's admission
and the version of the parameters. When a version begins the server says so without being asked. A worker that the
server has lost gets another admission: what it has done under the old one counts no more, and it starts again. A worker
may end at any moment, since no peer waits for it. It waits for a silent server, and ends when that lasts too long.

One process at a time is a worker. While the connection of one stands, the server refuses those of another that says it
is the same worker. That other one waits, since it may have been started in place of a process whose connection is not
known to be broken yet, and ends when it is refused for too long.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from dataclasses import dataclass, replace

from jaxdt.membership.member import ACCEPT, DROP
from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import FIRST_CONTACT_S
from jaxdt.protocol.reports import ReadyReport, RefusedReport
from jaxdt.run.exit_codes import ExitCode

NO_VIEW = 0
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

    READS = frozenset(
        {ev.Started, ev.Woke, ev.Status, ev.Ready, ev.Enlisted, ev.Ended, ev.LinkChanged, ev.Refused}
        | {ev.Interrupted, ev.Leave, ev.Paused}
    )

    def __init__(self, identity: WorkerIdentity):
        self.identity = identity
        self.header = ev.Header(identity.run, 0, NO_VIEW, identity.peer)
        self.view = None
        self._process = 0
        self._cpu_s = 0.0
        self._is_ready = False
        self._heard_s = 0.0
        self._admitted: ev.Admitted | None = None
        self._refused: tuple[float, str] | None = None  # since when the server refuses connections, and why

    def admit(self, header: ev.Header, body: ev.Message) -> str:
        """ACCEPT or DROP: a worker hears its server only. An answer to Enlist may be of a later generation."""
        if (header.run, header.src) != (self.identity.run, self.identity.server):
            return DROP
        generation = self.header.generation
        is_answer = isinstance(body, ev.Enlisted | ev.Ended)
        fits = header.generation >= generation if is_answer else header.generation == generation
        return ACCEPT if fits else DROP

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Received(_, ev.Enlisted() | ev.Ended() as body) if body.process not in (None, self._process):
                return []  # said to another process of this worker
            case ev.Received(header, ev.Enlisted() as body):
                self._heard_s = now_s
                return self._enlisted(header.generation, body)
            case ev.Received(_, ev.Ended(code, reason)):
                return [ev.Stop(code, reason)]
            case ev.Started(process=process):
                self._process = process
            case ev.Ready(device=device):
                self._is_ready, self._heard_s = True, now_s
                return [ReadyReport(device), *self._heartbeat(now_s)]
            case ev.Status(values):
                self._cpu_s = values.get(ev.CPU_S, 0.0)
            case ev.Woke("heartbeat"):
                return self._heartbeat(now_s)
            case ev.Paused():
                self._heard_s = now_s  # what the server said meanwhile is still on its way through the sockets
            case ev.LinkChanged(peer, True) if peer == self.identity.server:
                self._refused = None
                return [self._enlist()] if self._is_ready else []
            case ev.Refused(peer, reason) if peer == self.identity.server:
                self._refused = (now_s, reason)
                return [RefusedReport(reason)]
            case ev.Interrupted(code, reason):
                return [ev.Stop(code, reason)]
            case ev.Leave():
                return [ev.Stop(ExitCode.DONE, f"worker {self.identity.peer}: left the run")]
        return []

    def _enlist(self) -> ev.Send:
        return ev.Send(self.identity.server, ev.Enlist(self._process, self.identity.fingerprint, self._cpu_s))

    def _heartbeat(self, now_s: float) -> ev.Actions:
        identity = self.identity
        silent_s = now_s - self._heard_s
        if self._refused and not self._admitted and now_s - self._refused[0] > REFUSED_S:
            refusal = f"server {identity.server} has refused it for {REFUSED_S:.0f} s: {self._refused[1]}"
            return [ev.Stop(ExitCode.BAD_INPUT, f"worker {identity.peer}: {refusal}")]
        # A server answers only once the run has begun.
        patience_s = identity.outage_s if self._admitted else max(identity.outage_s, FIRST_CONTACT_S)
        if silent_s > patience_s:
            return [
                ev.Stop(NO_SERVER, f"worker {identity.peer}: server {identity.server} was silent for {silent_s:.0f} s")
            ]
        return [self._enlist(), ev.WakeAt(now_s + identity.heartbeat_s, "heartbeat")]

    def _enlisted(self, generation: int, body: ev.Enlisted) -> ev.Actions:
        """Answers may overtake one another, so an older one changes nothing."""
        if body.version >= self.identity.n_steps:
            return [ev.Stop(ExitCode.DONE, f"worker {self.identity.peer}: all {body.version} steps are done")]
        known, admitted = self._admitted, ev.Admitted(body.admission, generation, body.version, body.n_reseeds)
        if known and _order(admitted) <= _order(known):
            return []
        self._admitted = admitted
        self.header = replace(self.header, generation=generation)
        return [admitted]


def _order(admitted: ev.Admitted) -> tuple[int, int, int]:
    return admitted.generation, admitted.admission, admitted.version
