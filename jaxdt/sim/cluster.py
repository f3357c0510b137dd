"""The simulator driver: the same machines as the runtime's, under a virtual clock.

A heap of callbacks in virtual time; links and hosts as models; tensors by a `Tensors` object per peer: `NoTensors` for
timing alone, the runtime's store for real arithmetic under virtual time. Equal inputs give equal traces, byte for byte.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxdt.membership.peer import Machine
from jaxdt.protocol.events import (
    BULK,
    COORDINATOR,
    TEMPORARY_IDS,
    URGENT,
    Action,
    Connect,
    Discard,
    Disconnect,
    Event,
    Forget,
    Free,
    Header,
    Install,
    Installed,
    Join,
    Leave,
    LinkChanged,
    MarkCheckpoint,
    Meet,
    Member,
    MoveTo,
    Persist,
    Persisted,
    Post,
    Ran,
    Ready,
    Received,
    Report,
    Restore,
    Restored,
    Run,
    Send,
    Started,
    Stop,
    Sum,
    Summed,
    WakeAt,
    Welcome,
    Woke,
    WriteCheckpoint,
    WroteCheckpoint,
)
from jaxdt.protocol.reports import SCHEMAS, HeartbeatReport
from jaxdt.protocol.trace import Trace
from jaxdt.sim.active_faults import ActiveFaults
from jaxdt.sim.delivery import Delivery
from jaxdt.sim.event_queue import EventQueue
from jaxdt.sim.faults import COMES, CRASH, CRASH_SEEN_S, DEAD_LINK_S, ENDS, JOIN, LEAVE, PAUSE, Fault
from jaxdt.sim.hosts import host_of
from jaxdt.sim.link_table import LinkOptions, LinkTable
from jaxdt.sim.sim_peer import CRASHED, Outcome, SimPeer
from jaxdt.spec.network import Link
from jaxdt.spec.work import BACKWARD, MESSAGE, REGENERATE, Work

Observer = Callable[[float, int, Event | Fault, list[Action]], None]

LANES = {"transfer": URGENT, "sync": BULK}


class Simulation:
    """Runs peers and their coordinator until all have stopped or `until_s` has come. Tensors of the lanes in `free`
    (boundary tensors are "transfer", gradients "sync") arrive at once. `observer(now_s, who, what, actions)` hears what
    each event makes a machine do, before any of it is done, and of each fault when it begins. `seat_of(peer, stage)`
    makes a newcomer, or with None for the stage a peer of the plan that starts once more; `coordinator_of(disk)` a
    coordinator from what an earlier one made durable."""

    def __init__(
        self,
        coordinator: Machine,
        seats: Mapping[int, SimPeer],
        link: Callable[[int, int], Link],
        cores: Mapping[str, float],
        persist_s: float = 0.0,
        trace: Trace | None = None,
        options: LinkOptions | None = None,
        free: frozenset[str] = frozenset(),
        faults: Sequence[Fault] = (),
        observer: Observer | None = None,
        seat_of: Callable[[int, int | None], SimPeer] | None = None,
        coordinator_of: Callable[[Mapping[str, Any]], Machine] | None = None,
    ):
        self._seat_of, self._coordinator_of = seat_of, coordinator_of
        self._disk: dict[str, Any] = {}
        self._processes: Counter[int] = Counter()
        self._stage_of: dict[int, int] = {}
        self._came: dict[int, int] = {}  # who came under which passing name
        self._machines: dict[int, Machine] = {COORDINATOR: coordinator, **{p: s.machine for p, s in seats.items()}}
        self._seats, self._persist_s, self._trace = dict(seats), persist_s, trace
        self._calendar = EventQueue()
        self._lines = LinkTable(
            link, self._calendar.at, {p: s.host for p, s in seats.items()}, options or LinkOptions()
        )
        self._message_s = max(seat.seconds.get(MESSAGE, 0.0) for seat in seats.values())
        handles = self._message_s > 0
        n_on = Counter(seat.host for seat in seats.values())
        at_once = 2 if handles else 1  # a peer computes, and handles a message
        self._hosts = {name: host_of(n, at_once * n_on[name], self._calendar.at) for name, n in cores.items()}
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            Connect: self._connect,
            Disconnect: self._disconnect,
            Meet: lambda peer, meet: [self._connect(peer, other) for other in meet.members if other.peer != peer],
            MarkCheckpoint: lambda peer, mark: None,
            Send: self._send,
            Post: self._post,
            Run: self._run,
            Sum: self._sum,
            Free: lambda peer, free: self._seats[peer].tensors.free(free.step, free.rounds),
            Discard: lambda peer, discard: self._seats[peer].tensors.discard(discard.key),
            Forget: lambda peer, forget: self._seats[peer].tensors.forget(forget.round),
            WakeAt: self._wake_at,
            Persist: self._persist,
            WriteCheckpoint: self._write_checkpoint,
            Restore: self._restore,
            Install: self._install,
            **dict.fromkeys(SCHEMAS.values(), self._report),
            MoveTo: self._move_to,
            Stop: lambda peer, stop: self.outcome.stopped.__setitem__(peer, stop),
        }
        self.outcome = Outcome()
        self._paused: dict[int, list[Event]] = {}
        self._working, self._then = Counter(), {}  # Work under way, and what waits for its end
        self._observer = observer
        self._disturbance = ActiveFaults(self._calendar.at, self._event, self._lines) if faults else None
        mailing = self._calendar.at, self._lines, self._seats, self.outcome, self._event
        lanes = {LANES[name] for name in free}
        self._mail = Delivery(*mailing, trace, lanes, self._disturbance, self._handle_message if handles else None)
        for fault in faults:
            self._calendar.at(fault.at_s, self._fault, (fault,))

    def run(self, until_s: float = float("inf")) -> Outcome:
        """The outcome; raises RuntimeError if nothing can happen any more although somebody still runs."""
        for peer in self._machines:
            self._event(peer, Started())
        for peer in self._seats:
            self._ready(peer)
        while len(self.outcome.stopped) < len(self._machines):
            if not self._calendar:
                raise RuntimeError(f"simulation: nothing left to happen at {self.outcome.now_s} s")
            now_s = self._calendar.next_s()
            if now_s > until_s:
                break
            self.outcome.now_s = now_s
            self._calendar.happen()
        return self.outcome

    def _ready(self, peer: int) -> None:
        seat = self._seats[peer]
        self._event(peer, Ready(dict(seat.seconds), seat.tensors.n_words))

    def forget(self) -> None:
        """Let go of everything but the outcome: without cycles, reference counts free a million objects at once."""
        del self._mail
        self._handlers.clear()
        self._calendar.clear()

    def _fault(self, fault: Fault) -> None:
        if fault.kind in COMES:
            self._come(fault)
            return
        peer, now_s = self._came.get(fault.peer, fault.peer), self.outcome.now_s
        if peer >= TEMPORARY_IDS or peer in self.outcome.stopped:
            return
        fault = replace(fault, peer=peer)
        if self._observer:
            self._observer(now_s, peer, fault, [])
        if fault.kind == PAUSE:
            self._paused.setdefault(peer, [])
            self._calendar.at(fault.until_s, self._resume, (peer,))
            return
        if fault.kind == LEAVE:
            self._event(peer, Leave())
            return
        self._disturbance.begin(now_s, fault)
        if fault.kind in ENDS:
            self.outcome.stopped[peer] = Stop(CRASHED, "crashed")
            self._paused.pop(peer, None)
            seen_s = now_s + (CRASH_SEEN_S if fault.kind == CRASH else DEAD_LINK_S)
            for other in self._machines:
                self._calendar.at(seen_s, self._event, (other, LinkChanged(peer, False, "crashed")))

    def _come(self, fault: Fault) -> None:
        """A newcomer asks the coordinator who to be; the process of a peer, or of the coordinator, starts once more."""
        peer, now_s = fault.peer, self.outcome.now_s
        if COORDINATOR in self.outcome.stopped and peer != COORDINATOR:
            return
        if self._observer:
            self._observer(now_s, peer, fault, [])
        if fault.kind == JOIN:
            self._event(COORDINATOR, Received(Header("", 0, 0, TEMPORARY_IDS + peer), Join()))
        elif self.outcome.stopped.get(peer) == Stop(CRASHED, "crashed"):
            del self.outcome.stopped[peer]
            self._disturbance.revive(peer)
            if peer == COORDINATOR:
                self._machines[peer] = self._coordinator_of(dict(self._disk))
                self._event(peer, Started())
                links = [(other, COORDINATOR) for other in self._seats]
            else:
                self._start(peer, self._stage_of.get(peer))
                links = [(COORDINATOR, peer)]
            for one, other in links:
                self._event(one, LinkChanged(other, True, "started again"))

    def _move_to(self, peer: int, move: MoveTo) -> None:
        """The process begins another machine for another stage."""
        self._stage_of[peer] = move.stage
        self._start(peer, move.stage)

    def _start(self, peer: int, stage: int | None) -> None:
        seat = self._seat_of(peer, stage)
        self._seats[peer], self._machines[peer] = seat, seat.machine
        self._lines.seat(peer, seat.host)
        if seat.host not in self._hosts:
            self._hosts[seat.host] = host_of(1, 1, self._calendar.at)
        self._processes[peer] += 1
        self._event(peer, Started(process=self._processes[peer]))
        self._ready(peer)

    def _resume(self, peer: int) -> None:
        """What has come in goes before what has become due, as in the runtime."""
        for event in sorted(self._paused.pop(peer, ()), key=lambda event: type(event) is Woke):
            self._event(peer, event)

    def _event(self, peer: int, event: Event) -> None:
        if peer in self._paused:
            self._paused[peer].append(event)
        elif peer not in self.outcome.stopped:
            actions = self._machines[peer].handle(self.outcome.now_s, event)
            if self._observer:
                self._observer(self.outcome.now_s, peer, event, actions)
            for action in actions:
                self._handlers[type(action)](peer, action)

    def _sum(self, peer: int, action: Sum) -> None:
        self._event(peer, Summed(action.key, *self._seats[peer].tensors.sum(action.key, action.members)))

    def _wake_at(self, peer: int, wake: WakeAt) -> None:
        self._calendar.at(wake.at_s, self._own, (peer, self._machines[peer], Woke(wake.tag)))

    def _persist(self, peer: int, persist: Persist) -> None:
        durable_s = self.outcome.now_s + self._persist_s
        self._calendar.at(durable_s, self._persisted, (peer, persist, self._machines[peer]))

    def _persisted(self, peer: int, persist: Persist, machine: Machine) -> None:
        """Durable, unless the process died before."""
        if machine is self._machines[peer] and peer not in self.outcome.stopped:
            self._disk[persist.name] = persist.value
            self._event(peer, Persisted(persist.name))

    def _own(self, peer: int, machine: Machine, event: Event) -> None:
        """An event of a process's own, which nobody hears of when it has been started anew."""
        if machine is self._machines[peer]:
            self._event(peer, event)

    def _write_checkpoint(self, peer: int, write: WriteCheckpoint) -> None:
        self._seats[peer].tensors.write_checkpoint(write.version)
        self._event(peer, WroteCheckpoint(write.version))

    def _restore(self, peer: int, restore: Restore) -> None:
        self._seats[peer].tensors.restore(restore.version, restore.generation)
        self._after_work(peer, Restored(restore.version))

    def _install(self, peer: int, install: Install) -> None:
        self._seats[peer].tensors.install(install.version, install.generation)
        self._after_work(peer, Installed(install.version))

    def _after_work(self, peer: int, event: Event) -> None:
        """As in the runtime, where one thread does all of it in order."""
        own = (peer, self._machines[peer], event)
        if self._working[peer]:
            self._then.setdefault(peer, []).append(own)
        else:
            self._calendar.at(self.outcome.now_s, self._own, own)

    def _report(self, peer: int, report: Report) -> None:
        if not isinstance(report, HeartbeatReport):
            self.outcome.reports.append((self.outcome.now_s, peer, report))
            if self._trace:
                self._trace.report(peer, self.outcome.now_s, report)

    def _connect(self, peer: int, connect: Connect | Member) -> None:
        if self._disturbance:
            self._disturbance.dial(self.outcome.now_s, peer, connect.peer)

    def _disconnect(self, peer: int, disconnect: Disconnect) -> None:
        if self._disturbance and disconnect.peer in self._machines:
            self._disturbance.hang_up(self.outcome.now_s, peer, disconnect.peer)

    def _send(self, src: int, send: Send) -> None:
        dst, body = send.dst, send.body
        if dst < TEMPORARY_IDS:
            self._mail.post(src, ((dst, body, send.n_bytes),), send.priority, send.header)
        elif isinstance(body, Welcome):
            self._stage_of[body.peer], self._came[dst] = body.stage, body.peer
            self._start(body.peer, body.stage)

    def _post(self, src: int, post: Post) -> None:
        self._mail.post(src, post.letters, post.priority, post.header)

    def _run(self, peer: int, run: Run) -> None:
        seat, work, now_s = self._seats[peer], run.work, self.outcome.now_s
        values = seat.tensors.run(work, run.scale, run.rounds)
        seconds = seat.seconds[BACKWARD if work.kind == REGENERATE else work.kind]
        if self._disturbance:
            seconds *= self._disturbance.slowness(peer)
        self._working[peer] += 1
        self._hosts[seat.host].start(now_s, peer, seconds, self._finished, (seat, peer, work, now_s, values))

    def _handle_message(self, peer: int, then: Callable[..., None], args: tuple) -> None:
        if peer in self._seats:
            seat = self._seats[peer]
            self._hosts[seat.host].start(self.outcome.now_s, peer, seat.seconds.get(MESSAGE, 0.0), then, args)
        else:  # the coordinator, which never computes
            self._calendar.at(self.outcome.now_s + self._message_s, then, args)

    def _finished(self, seat: SimPeer, peer: int, work: Work, start_s: float, values: dict[str, float]) -> None:
        seconds = self.outcome.now_s - start_s
        if self._trace:
            self._trace.run(peer, start_s, seconds, work)
        if seat.machine is self._machines[peer]:
            self._event(peer, Ran(work, start_s, seconds, values))
        self._working[peer] -= 1
        for own in self._then.pop(peer, ()) if not self._working[peer] else ():
            self._own(*own)
