"""A peer's side of membership: hello, heartbeats, views, suspicion, and when to write checkpoints and say done.

Owns the peer's view, run and lineage, and with them the decision whether a message may be read now (`admit`).
Knows nothing of microbatches or gradients. Membership is the plan here: a peer that is lost ends the run.
"""

from dataclasses import dataclass

from jaxdt.core.deadline import Deadline
from jaxdt.core.events import (
    COORDINATOR,
    Action,
    CheckpointComplete,
    CheckpointFailed,
    Committed,
    Connect,
    Done,
    Ended,
    Event,
    Failed,
    Header,
    Heartbeat,
    Hello,
    Interrupted,
    LinkChanged,
    MarkCheckpoint,
    Message,
    Profiled,
    Pulse,
    Ready,
    Received,
    Reduced,
    Refused,
    Report,
    Saved,
    Send,
    Shard,
    Started,
    Status,
    Stop,
    Suspect,
    Take,
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
TAKE, HOLD, DROP = "take", "hold", "drop"
AT_ANY_TIME = frozenset({View, Pulse, Ended})
NAMES_ITS_ROUND = frozenset({Shard, Reduced, Take, Committed})  # which outlives the views that do not touch it


@dataclass(frozen=True)
class Seat:
    """Who a peer is in its run, and what it owes. The member of a stage with the least id saves its part of
    checkpoints."""

    run: str
    fingerprint: str
    peer: int
    stage: int
    start_version: int
    n_steps: int
    checkpoint_every_steps: int
    heartbeat_s: float
    deadline_floor_s: float


class Membership:
    """See the module text. `view` is None until the coordinator has sent the first one."""

    READS = frozenset(
        {Started, Woke, Status, Ready, View, Pulse, CheckpointComplete, Ended, Refused, Interrupted, LinkChanged}
        | {Updated, CheckpointFailed, WroteCheckpoint}
    )

    def __init__(self, seat: Seat):
        self.seat = seat
        self.view: View | None = None
        self.lineage = 0
        self._count = 0
        self._sent_s: dict[int, float] = {}
        self._coordinator = Deadline(seat.deadline_floor_s)
        self._started_s: float | None = None
        self._down_since_s: dict[int, float] = {}
        self._status = Status({})
        self._clock = (float("inf"), 0.0)
        self._version = seat.start_version
        self.header = Header(seat.run, 0, 0, seat.peer)  # what this peer's messages say now

    def admit(self, header: Header, body: Message) -> str:
        """TAKE, HOLD (until its view is adopted) or DROP a message (step protocol, Sec. 2)."""
        mine = self.header
        if header.run != mine.run:
            return DROP
        if header.src == COORDINATOR and type(body) in AT_ANY_TIME:
            return TAKE
        if header.view > mine.view:
            return HOLD
        fits = header.view == mine.view or type(body) in NAMES_ITS_ROUND
        return TAKE if fits and header.lineage == mine.lineage else DROP

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:
            case Started(address):
                self._started_s = now_s
                seat = self.seat
                return [Send(COORDINATOR, Hello(seat.peer, seat.stage, seat.fingerprint, address)), *self._beat(now_s)]
            case Woke("heartbeat"):
                return self._beat(now_s) + self._watch(now_s)
            case Status():
                self._status = event
            case Ready(seconds):
                return [Send(COORDINATOR, Profiled(seconds, self._version))]
            case Received(_, View() as view):
                return self._adopt(view)
            case Received(_, Pulse(count, coordinator_s)):
                self._heard(now_s, count, coordinator_s)
            case Received(_, CheckpointComplete(version)) if self._saves:
                return [MarkCheckpoint(version, self.lineage)]
            case Received(_, Ended(code, reason)):
                return [Stop(code, reason)]
            case Refused(peer, reason):
                if peer == COORDINATOR and self.view is None:
                    return [Stop(2, f"coordinator: {reason}")]
                return [Report("refused", {"reason": reason})]
            case Interrupted(code, reason):
                return [*([Send(COORDINATOR, Failed(reason))] if code == BAD_INPUT else []), Stop(code, reason)]
            case LinkChanged(peer, up):
                if up:
                    self._down_since_s.pop(peer, None)
                else:
                    self._down_since_s.setdefault(peer, now_s)
            case Updated(_, version):
                return self._updated(version)
            case CheckpointFailed(version, reason):
                return [Send(COORDINATOR, Failed(f"checkpoint of {version} steps: {reason}"))]
            case WroteCheckpoint(version, blocked_s):
                saved = Send(COORDINATOR, Saved(version, self.seat.stage, blocked_s))
                return [saved, *self._done()] if version == self.seat.n_steps else [saved]
        return []

    def _beat(self, now_s: float) -> list[Action]:
        self._count += 1
        self._sent_s[self._count] = now_s
        self._sent_s.pop(self._count - 100, None)
        beat = Heartbeat(self._count, self._status.values)
        return [Send(COORDINATOR, beat), WakeAt(now_s + self.seat.heartbeat_s, "heartbeat")]

    def _heard(self, now_s: float, count: int, coordinator_s: float) -> None:
        """The offset of the coordinator's clock is taken from the pulse with the shortest round trip."""
        self._coordinator.arrived(now_s)
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
            return [Stop(3, f"coordinator: lost, silent for {self._coordinator.silence_s(now_s):.1f} s")]
        actions: list[Action] = []
        for peer, since_s in sorted(self._down_since_s.items()):
            if peer != COORDINATOR and now_s - since_s > self.seat.deadline_floor_s:
                del self._down_since_s[peer]
                actions.append(Send(COORDINATOR, Suspect(peer, f"no link for {now_s - since_s:.1f} s")))
        return actions

    def _adopt(self, view: View) -> list[Action | Event]:
        if self.view and view.number <= self.view.number:
            return []
        if self.seat.peer not in {member.peer for member in view.members}:
            return [Stop(3, f"peer {self.seat.peer}: the run went on without it, it was taken for lost")]
        saved_before = self.view is not None and self._saves
        self.view, self.lineage = view, view.lineage
        self.header = Header(self.seat.run, view.lineage, view.number, self.seat.peer)
        here = {COORDINATOR, *(member.peer for member in view.members)}
        self._down_since_s = {peer: since_s for peer, since_s in self._down_since_s.items() if peer in here}
        report = Report("view", {"view": view.number, "members": [m.peer for m in view.members]})
        links = [Connect(m.peer, m.address) for m in view.members if m.peer != self.seat.peer]
        told = [report, *links, ViewChanged(view)]
        if self._version == self.seat.n_steps and self._saves and not saved_before and view.number > 1:
            told.append(WriteCheckpoint(self._version))  # the one who should have written it is gone
        return told

    @property
    def _saves(self) -> bool:
        return self.view.stage_peers(self.seat.stage)[0] == self.seat.peer

    def _updated(self, version: int) -> list[Action]:
        known, self._version = version <= self._version, version  # known: the run begins or has been rolled back there
        every, last = self.seat.checkpoint_every_steps, version == self.seat.n_steps
        if self._saves and not known and (last or (every and version % every == 0)):
            return [WriteCheckpoint(version)]
        return self._done() if last else []

    def _done(self) -> list[Action]:
        totals = self._status.values | {"clock_offset_s": self._clock[1]}
        return [Send(COORDINATOR, Done(self._version, totals, self._status.bytes_to))]
