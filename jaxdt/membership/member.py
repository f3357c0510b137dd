"""A peer's side of membership: hello, heartbeats, views, suspicion, and when to write checkpoints and say done.

Owns the peer's view, run and generation, and with them the decision whether a message may be read now (`admit`).
Knows nothing of microbatches or gradients. A peer that finds itself outside of a view, because it was paused or cut
off, says hello again and is admitted anew; and one whose coordinator is silent goes on and waits for it.
"""

from collections.abc import Container
from dataclasses import dataclass, replace

from jaxdt.protocol.deadline import RECONNECT_S, Deadline
from jaxdt.protocol.events import (
    COORDINATOR,
    FETCHED,
    Action,
    CheckpointComplete,
    CheckpointFailed,
    Committed,
    Disconnect,
    Done,
    Ended,
    Event,
    Evicted,
    Failed,
    Fetch,
    Fetching,
    FetchResult,
    Header,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Installed,
    Interrupted,
    Leave,
    Leaving,
    LinkChanged,
    MarkCheckpoint,
    Meet,
    Message,
    MoveTo,
    Profiled,
    Ready,
    Reassign,
    Received,
    Reduced,
    Refused,
    Report,
    Saved,
    Send,
    Shard,
    Started,
    State,
    Status,
    Stop,
    Suspect,
    Updated,
    View,
    ViewChanged,
    WakeAt,
    Woke,
    WriteCheckpoint,
    WroteCheckpoint,
)

FIRST_CONTACT_S = 120.0
BAD_INPUT = 2
ACCEPT, HOLD, DROP = "take", "hold", "drop"
AT_ANY_TIME = frozenset({View, HeartbeatAck, Ended, Reassign})
FROM_COORDINATOR = AT_ANY_TIME | {CheckpointComplete, Committed}
# What names its round or version outlives the views that do not touch it.
NAMES_ITS_ROUND = frozenset({Shard, Reduced, FetchResult, Committed, Fetch, State})


@dataclass(frozen=True)
class PeerIdentity:
    """Who a peer is in its run, and what it owes. The member of a stage with the least id saves its part of
    checkpoints. `outage_s`: how long it waits for a coordinator that is silent, beyond the deadline."""

    run: str
    fingerprint: str
    peer: int
    stage: int
    start_version: int
    start_generation: int
    n_steps: int
    checkpoint_every_steps: int
    heartbeat_s: float
    deadline_floor_s: float
    outage_s: float = 0.0


class Membership:
    """See the module text. `view` is None until the coordinator has sent the first one."""

    READS = frozenset(
        {Started, Woke, Status, Ready, View, HeartbeatAck, CheckpointComplete, Ended, Refused, Interrupted, LinkChanged}
        | {Updated, CheckpointFailed, WroteCheckpoint, Installed, Fetching, Leave, Reassign, Suspect}
    )

    def __init__(self, seat: PeerIdentity):
        self.seat = seat
        self.view: View | None = None
        self.generation = seat.start_generation
        self._count = 0
        self._sent_s: dict[int, float] = {}
        self._coordinator = Deadline(seat.deadline_floor_s)
        self._started = Started()
        self._started_s: float | None = None
        self._number = 0  # of the last view, ours or not
        self._profile: dict[str, float] | None = None
        self._leaving = self._saves_first = False
        self._seat: int | None = None  # the stage that the coordinator wants us for
        self._writing: set[int] = set()
        self._last_words: dict[type, Message] = {}  # what the coordinator may have to be told again
        self._missed = False
        self._down_since_s: dict[int, float] = {}
        self._status = Status({})
        self._fetching: dict[str, float] = {}  # for the heartbeats of a newcomer
        self._clock = (float("inf"), 0.0)
        self._speakers: Container[int] = ()  # the members of our view
        self._version = seat.start_version
        self.header = Header(seat.run, 0, 0, seat.peer)  # what this peer's messages say now

    def admit(self, header: Header, body: Message) -> str:
        """ACCEPT, HOLD (until its view is adopted) or DROP a message (step protocol, Sec. 2)."""
        mine, src = self.header, header.src
        if header.run != mine.run:
            return DROP
        if src == COORDINATOR:
            if type(body) in AT_ANY_TIME:
                return ACCEPT
        elif type(body) in FROM_COORDINATOR:
            return DROP
        if header.view > mine.view:
            return HOLD
        if src != COORDINATOR and src not in self._speakers:
            return DROP
        fits = header.view == mine.view or type(body) in NAMES_ITS_ROUND
        return ACCEPT if fits and header.generation == mine.generation else DROP

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:
            case Started():
                self._started, self._started_s = event, now_s
                return [self._hello(), *self._beat(now_s)]
            case Woke("heartbeat"):
                return self._beat(now_s) + self._watch(now_s)
            case Woke("links"):
                return self._watch(now_s)
            case Status():
                self._status = event
            case Ready(seconds):
                self._profile = seconds
                return [self._profiled()]
            case Received(_, View() as view):
                return self._adopt(view)
            case Received(_, HeartbeatAck(count, coordinator_s)):
                self._heard(now_s, count, coordinator_s)
            case Received(_, Reassign(stage)) if self.view is None and stage != self.seat.stage:
                self._seat = stage
                return self._go()
            case Received(_, CheckpointComplete(version)) if self._saves(version):
                return [MarkCheckpoint(version, self.generation)]
            case Received(_, Ended(code, reason)):
                return [Stop(code, reason)]
            case Refused(peer, reason):
                if peer == COORDINATOR and self.view is None and self._number == 0:
                    return [Stop(2, f"coordinator: {reason}")]
                return [Report("refused", {"reason": reason})]
            case Interrupted(code, reason):
                return [*([Send(COORDINATOR, Failed(reason))] if code == BAD_INPUT else []), Stop(code, reason)]
            case Leave():
                self._leaving = True
                return [self._tell(Leaving())] if self.view else [Stop(0, "left before it was let in")]
            case LinkChanged(peer, up):
                return self._link(now_s, peer, up)
            case Received(_, Suspect(peer, reason)) if peer == self.seat.peer and peer in self.view.joining:
                return [Stop(BAD_INPUT, f"peer {peer}: {reason}")]
            case Fetching(here, asked, of):
                self._fetching = dict(zip(FETCHED, (here, asked, of), strict=True))
            case Installed(version):
                self._version = version
            case Updated(_, version):
                return self._updated(version)
            case CheckpointFailed(version, reason):
                return [Send(COORDINATOR, Failed(f"checkpoint of {version} steps: {reason}"))]
            case WroteCheckpoint(version, blocked_s):
                self._writing.discard(version)
                saved = self._tell(Saved(version, self.seat.stage, blocked_s))
                return [saved, *(self._done() if version == self.seat.n_steps else self._go())]
        return []

    def _hello(self) -> Send:
        seat = self.seat
        address, process = self._started.address, self._started.process
        return Send(COORDINATOR, Hello(seat.peer, seat.stage, seat.fingerprint, address, process))

    def _profiled(self) -> Send:
        return Send(COORDINATOR, Profiled(self._profile, self._version, self._started.process))

    def _tell(self, body: Message) -> Send:
        """Say something that must not be lost with the coordinator."""
        self._last_words[type(body)] = body
        return Send(COORDINATOR, body)

    def _link(self, now_s: float, peer: int, up: bool) -> list[Action]:
        if not up and peer != COORDINATOR and peer not in self._speakers:
            return [Disconnect(peer)]  # nothing of it is kept
        if not up:
            self._down_since_s.setdefault(peer, now_s)
            return [] if peer == COORDINATOR else [WakeAt(now_s + RECONNECT_S, "links")]
        if self._down_since_s.pop(peer, None) is None or peer != COORDINATOR:
            return []
        candidate = [self._profiled()] if self.view is None and self._profile is not None else []
        return [self._hello(), *candidate, *(Send(COORDINATOR, body) for body in self._last_words.values())]

    def _beat(self, now_s: float) -> list[Action]:
        self._count += 1
        self._sent_s[self._count] = now_s
        self._sent_s.pop(self._count - 100, None)
        beat = Heartbeat(self._count, self._status.values | self._fetching)
        return [Send(COORDINATOR, beat), WakeAt(now_s + self.seat.heartbeat_s, "heartbeat")]

    def _heard(self, now_s: float, count: int, coordinator_s: float) -> None:
        """The offset of the coordinator's clock is taken from the pulse with the shortest round trip."""
        self._coordinator.arrived(now_s)
        self._missed = False
        rtt_s = now_s - self._sent_s.get(count, -float("inf"))
        if rtt_s < self._clock[0]:
            self._clock = (rtt_s, coordinator_s + rtt_s / 2 - now_s)

    def _watch(self, now_s: float) -> list[Action]:
        """Look for a coordinator or neighbours that have been silent or out of reach for too long."""
        if self._clock[0] == float("inf"):
            waited_s = now_s - self._started_s
            if waited_s > FIRST_CONTACT_S:
                return [Stop(3, f"coordinator: not reached within {waited_s:.0f} s")]
        elif self._coordinator.passed(now_s):
            silence_s = self._coordinator.silence_s(now_s)
            if silence_s > self._coordinator.timeout_s + self.seat.outage_s:
                return [Stop(3, f"coordinator: lost, silent for {silence_s:.1f} s")]
            if not self._missed:
                self._missed = True
                return [Report("outage", {"coordinator_silent_s": round(silence_s, 1), "waits_s": self.seat.outage_s})]
            return []
        actions: list[Action] = []
        for peer, since_s in sorted(self._down_since_s.items()):
            if peer != COORDINATOR and since_s + RECONNECT_S <= now_s:
                self._down_since_s[peer] = now_s  # to be said again, if it still holds
                actions.append(Send(COORDINATOR, Suspect(peer, f"no link for {now_s - since_s:.1f} s")))
        return actions

    def _adopt(self, view: View) -> list[Action | Event]:
        if view.number <= self._number:
            return []
        here, old = view.by_peer, self.view.by_peer if self.view else {}
        ends: list[Action | Event] = [Disconnect(peer) for peer in sorted(old.keys() - here.keys() - {self.seat.peer})]
        me = here.get(self.seat.peer)
        if me is None or me.process != self._started.process:
            return ends + self._outside(view) if self.view else []
        new = self.view is None
        saved_before = not new and self._saves(self._version)
        # A rollback whose view did not reach us is one all the same; who joins gets the state from the others instead.
        unheard = view.generation != self.generation and self.seat.peer not in view.joining
        view = replace(view, rolled_back=view.rolled_back or unheard)
        # The version that a view begins with is saved by who did so before it: else two would write at the same time.
        self._saves_first = not new and self._least(self.view, view.n_committed)
        self.view, self.generation, self._number = view, view.generation, view.number
        self.header = Header(self.seat.run, view.generation, view.number, self.seat.peer)
        self._speakers = here
        if view.rolled_back:
            self._last_words.pop(Done, None)
        self._down_since_s = {p: s for p, s in self._down_since_s.items() if p in here or p == COORDINATOR}
        report = Report("view", {"view": view.number, "members": list(here)})
        told = [*ends, report, Meet(view.members), ViewChanged(view)]
        last = self._version == self.seat.n_steps and self._least(view, self._version)
        if last and not saved_before and view.number > 1:
            told.append(self._write(self._version))  # the one who should have written it is gone
        return told

    def _outside(self, view: View) -> list[Action | Event]:
        """The run goes on without us: begin anew as a candidate, or go if that is what we asked for."""
        others = [Disconnect(m.peer) for m in view.members]
        self.view, self._number = None, view.number
        self._last_words.clear()
        self._fetching.clear()
        self._down_since_s = {p: since_s for p, since_s in self._down_since_s.items() if p == COORDINATOR}
        told: list[Action | Event] = [*others, Report("outside", {"view": view.number}), Evicted(view)]
        return told + (self._go() if self._leaving else [self._hello(), self._profiled()])

    def _go(self) -> list[Action]:
        """Who wants to leave, or is wanted elsewhere, goes when it is out and its part of a checkpoint is written."""
        if self.view is not None or self._writing:
            return []
        if self._leaving:
            return [Stop(0, f"peer {self.seat.peer}: left the run")]
        return [] if self._seat is None else [Report("moves", {"to_stage": self._seat}), MoveTo(self._seat)]

    def _saves(self, version: int) -> bool:
        if self.view is None:
            return False
        return self._saves_first if version == self.view.n_committed else self._least(self.view, version)

    def _least(self, view: View, version: int) -> bool:
        return view.working(self.seat.stage, version)[:1] == (self.seat.peer,)

    def _write(self, version: int) -> Action:
        self._writing.add(version)
        return WriteCheckpoint(version)

    def _updated(self, version: int) -> list[Action]:
        self._fetching.clear()  # what it has to say of the state is said
        known, self._version = version <= self._version, version  # known: the run begins or has been rolled back there
        every, last = self.seat.checkpoint_every_steps, version == self.seat.n_steps
        if self._saves(version) and not known and (last or (every and version % every == 0)):
            return [self._write(version)]
        return self._done() if last and self.view else []

    def _done(self) -> list[Action]:
        totals = self._status.values | {"clock_offset_s": self._clock[1]}
        return [self._tell(Done(self._version, totals, self._status.bytes_to))]
