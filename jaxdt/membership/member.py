"""A peer's side of membership: hello, heartbeats, views, suspicion, and when to write checkpoints and report done.

Owns the peer's view, run and generation, and with them the decision whether a message may be read now (`admit`). Knows
nothing of microbatches or gradients. A peer that finds itself outside of a view, because it was paused or cut off, says
hello again and is admitted again. A peer whose coordinator is silent continues, and waits for it.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxdt.membership.reminder import Reminder
from jaxdt.membership.work_watch import WorkWatch
from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import FIRST_CONTACT_S, RECONNECT_S, Deadline
from jaxdt.protocol.reports import (
    AdoptedReport,
    AsksToLeaveReport,
    EvictedReport,
    MovingReport,
    NoteReport,
    OutageReport,
    ReadyReport,
    RefusedReport,
    StillReadyReport,
)
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.work import Work

SAVE_AGAIN_S = 5.0  # after the last checkpoint could not be written
KEPT_RECORDS = 2  # with a delay of one step a member may have missed two
KEPT_HEARTBEATS = 100  # whose round trip may still be measured
COUNTED_HEARTBEATS = 4  # the bytes of all links take too much of the coordinator's time to stand in every heartbeat
ACCEPT, HOLD, DROP = "accept", "hold", "drop"
PASS_ON = "pass on"  # to the machines that read it, which decide whether its tensor is kept
AT_ANY_TIME = frozenset({ev.View, ev.HeartbeatAck, ev.Ended, ev.Reassign, ev.Drain, ev.Revoked})
OF_GROUPS = frozenset(
    {ev.GroupFormed, ev.GroupClosed, ev.Continue, ev.EndOfSteps, ev.EvaluateMean, ev.StepsCounted, ev.AskReplicaState}
)
FROM_COORDINATOR = AT_ANY_TIME | {ev.CheckpointComplete, ev.CopyPart, ev.Repair} | OF_GROUPS  # anybody repeats a record
# A message that names its round, its version or what a part holds outlives the views that do not touch it.
OUTLIVES_VIEWS = frozenset({ev.Shard, ev.Reduced, ev.FetchResult, ev.Committed, ev.Fetch, ev.State, ev.PartMissing})


@dataclass(frozen=True)
class PeerIdentity:
    """The identity of this peer in its run, and its duties. The member of a stage with the least id saves the stage's
    part of checkpoints. `outage_s`: how long the peer waits for a silent coordinator, beyond the deadline.
    `outlives_views`: messages that count also in a view after the one in which they were sent; `from_workers`: messages
    that a pool's worker, which is in no view, may send to a server. `begins_anew`: a peer that was evicted continues
    with new machines, in its own stage; versions of states are local steps then. `owes`: a codec loses a part of what
    the peer contributes, which belongs to a checkpoint too."""

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
    outlives_views: frozenset[type] = OUTLIVES_VIEWS
    from_workers: frozenset[type] = frozenset()
    begins_anew: bool = False
    owes: bool = False


def _is_replaced(member: ev.Member, members: Mapping[int, ev.Member]) -> bool:
    """Whether these members have not the process of this member among them."""
    return member.peer not in members or members[member.peer].process != member.process


class Membership:
    """See the module text. `view` is None until the coordinator has sent the first one, and while this peer is outside.
    `header` stands on this peer's messages."""

    READS = frozenset(
        {ev.Started, ev.Woke, ev.Status, ev.Ready, ev.View, ev.HeartbeatAck, ev.CheckpointComplete, ev.Ended}
        | {
            ev.Refused,
            ev.Interrupted,
            ev.LinkChanged,
            ev.NoWay,
            ev.Updated,
            ev.Holds,
            ev.CheckpointFailed,
            ev.Committed,
        }
        | {ev.WroteCheckpoint, ev.Installed, ev.Fetching, ev.Leave, ev.ServerCounts, ev.Reassign, ev.Suspect, ev.Ran}
        | {ev.Drain, ev.Revoked, ev.HoldsPart, ev.StepBlocked, ev.MeanKept}
    )

    def __init__(self, identity: PeerIdentity):
        self.identity = identity
        self.view: ev.View | None = None
        self.generation: int = identity.start_generation
        self.header = ev.Header(identity.run, 0, 0, identity.peer)
        self._last_view_number: int = 0  # also of views without this peer
        self._last_view_term = 0  # of the coordinator that sent it
        self._void_admission = 0  # under which this peer has given up what it had
        self._members: Mapping[int, ev.Member] = {}
        self._started = ev.Started()
        self._started_s = 0.0
        self._profile: dict[str, float] | None = None
        self._device = ""
        self._version = identity.start_version
        self._state: ev.StateName | None = (
            None  # which the coordinator may build on while this peer is outside or joins
        )
        self._knows_state = True
        self._is_leaving = False
        self._next_stage: int | None = None  # where the coordinator wants this peer
        self._saves_first_version = False
        self._writing: set[int] = set()
        self._asked_checkpoint: int | None = None  # the version that an operator wants
        self._kept_version: int | None = None  # of the last snapshot, where replicas may differ
        self._unconfirmed: dict[
            object, ev.Message
        ] = {}  # a coordinator that is started again has to be told these again
        self._down_since_s: dict[int, float] = {}
        self._status = ev.Status({})
        self._running: Work | None = None
        self._work_watch = WorkWatch(identity.deadline_floor_s, identity.heartbeat_s)
        self._fetching: dict[str, float] = {}  # for the heartbeats of a newcomer
        self._server_counts = ev.ServerCounts({})  # for those of a pool's server
        self._known_workers: set[str] = set()
        self._n_heartbeats = 0
        self._sent_s: dict[int, float] = {}  # number of a heartbeat -> when it was sent
        self._coordinator = Deadline(identity.deadline_floor_s)
        self._outage_reported = False
        self._reminder = Reminder()
        self._records: tuple[ev.Record, ...] = ()  # the last that were heard
        self._last_words = ""  # with which this peer ends, once its state is written
        self._best_rtt_s = float("inf")
        self._clock_offset_s = 0.0
        self._note = ""  # the coordinator's, see HeartbeatAck

    def admit(self, header: ev.Header, body: ev.Message) -> str:
        """ACCEPT, HOLD (until its view is adopted) or DROP a message (step protocol, Sec. 2). One of a pool's worker is
        to be passed on: the wiring knows the workers of its server."""
        own, src = self.header, header.src
        if header.run != own.run:
            return DROP
        if src == ev.COORDINATOR:
            if header.coordinator_term != own.coordinator_term and not self._obeys(header.coordinator_term):
                return DROP
            if type(body) in AT_ANY_TIME:
                return ACCEPT
        elif type(body) in FROM_COORDINATOR:
            return DROP
        if header.view > own.view:
            return HOLD
        if src != ev.COORDINATOR and src not in self._members:
            is_of_now = header.generation == own.generation or isinstance(body, ev.Enlist | ev.ProbeLink)
            return PASS_ON if type(body) in self.identity.from_workers and is_of_now else DROP
        fits = header.view == own.view or self._outlives(header, body)
        return ACCEPT if fits and header.generation == own.generation else DROP

    def _outlives(self, header: ev.Header, body: ev.Message) -> bool:
        """Whether a message counts though it was sent in an earlier view. A peer that starts again has no part in
        what was sent to it, or by it, before it was admitted."""
        if type(body) not in self.identity.outlives_views:
            return False
        if not self.identity.begins_anew:
            return True
        ends = {header.src, self.identity.peer} - {ev.COORDINATOR}
        return header.view >= max(self._members[peer].admission for peer in ends)

    def _obeys(self, coordinator_term: int) -> bool:
        """Whether a coordinator of this term is obeyed: one of a lower term than another has been taken for dead, and
        does not know it."""
        if coordinator_term < self.header.coordinator_term:
            return False
        self.header = replace(self.header, coordinator_term=coordinator_term)
        return True

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Received(_, body):
                return self._received(now_s, body)
            case ev.Started():
                self._started, self._started_s = event, now_s
                return [self._hello(), *self._heartbeat(now_s)]
            case ev.Woke("heartbeat"):
                return self._heartbeat(now_s) + self._watch(now_s) + self._watch_work(now_s) + self._remind(now_s)
            case ev.Woke("links"):
                return self._watch(now_s)
            case ev.Woke("save"):
                return self._save_again()
            case ev.Status(_, _, running):
                self._status, self._running = event, running
            case ev.Ran(work, _, seconds):
                return self._ran(work, seconds)
            case ev.Ready(seconds, _, device):
                self._profile, self._device = seconds, device
                self._work_watch.on_profiled(seconds)
                return [ReadyReport(device), self._profiled()]
            case ev.Refused(peer, reason):
                if peer == ev.COORDINATOR and self.view is None and self._last_view_number == 0:
                    return [ev.Stop(ExitCode.BAD_INPUT, f"coordinator: {reason}")]
                return [RefusedReport(reason)]
            case ev.Interrupted(ExitCode.BAD_INPUT as code, reason):
                return [ev.Send(ev.COORDINATOR, ev.Failed(reason)), ev.Stop(code, reason)]
            case ev.Interrupted(code, reason):
                return [ev.Stop(code, reason)]
            case ev.Leave():
                return self._leave()
            case ev.NoWay(peer, reason) if peer in self._members:
                return [ev.Send(ev.COORDINATOR, ev.CannotReach(peer, reason))]
            case ev.LinkChanged(peer, up):
                return self._on_link(now_s, peer, up)
            case ev.Fetching(here_bytes, asked_bytes, of_bytes):
                self._fetching = dict(zip(ev.FETCHED, (here_bytes, asked_bytes, of_bytes), strict=True))
            case ev.ServerCounts(_, workers):
                self._server_counts = event
                self._known_workers |= {str(status.worker) for status in workers}
            case ev.Installed(version) if not self.identity.begins_anew:
                self._version = version
            case ev.Holds(state):
                self._state, self._knows_state = state, True
                return [] if self._is_leaving else self._offer()
            case ev.StepBlocked() if overdue := self._work_watch.blocked():
                return [ev.Send(ev.COORDINATOR, overdue)]
            case ev.HoldsPart(part):
                return [self._confirmed(ev.Saved(part.version, part.stage, 0.0, part.digest, part.n_words))]
            case ev.MeanKept(version):
                self._asked_checkpoint = self._kept_version = version
            case ev.Updated(_, version):
                return self._updated(version)
            case ev.CheckpointFailed(version, reason) if self._last_words:
                return [
                    ev.Stop(
                        ExitCode.LOST,
                        f"{self._last_words}; the state after {version} steps cannot be written: {reason}",
                    )
                ]
            case ev.CheckpointFailed(version, reason):
                return self._save_failed(now_s, version, reason)
            case ev.WroteCheckpoint():
                return self._wrote(event)
        return []

    def _received(self, now_s: float, body: ev.Message) -> ev.Actions:
        match body:
            case ev.View():
                return self._adopt(body)
            case ev.HeartbeatAck(count, coordinator_s, note):
                self._acknowledged(now_s, count, coordinator_s)
                before, self._note = self._note, note
                return [NoteReport(note)] if note != before else []
            case ev.Committed(record):
                self._note_checkpoint(record)
                self._records = (*self._records, record)[-KEPT_RECORDS:]
            case ev.Drain():
                return self._leave()
            case ev.Revoked(peers):
                return [ev.Revoke(peers)]
            case ev.Reassign(stage) if self.view is None and stage != self.identity.stage:
                self._next_stage = stage
                return self._leave_if_free()
            case ev.CheckpointComplete(checkpoint):
                return self._on_complete(checkpoint)
            case ev.Ended(0, reason) if self.view is None and not self._void_admission:
                return [
                    ev.Stop(
                        ExitCode.NOT_JOINED, f"peer {self.identity.peer}: the run ended before it joined ({reason})"
                    )
                ]
            case ev.Ended(code, reason):
                return [ev.Stop(code, reason)]
            case ev.Suspect(peer, reason) if self.view and peer == self.identity.peer and peer in self.view.joining:
                return [ev.Stop(ExitCode.BAD_INPUT, f"peer {peer}: {reason}")]
        return []

    def _note_checkpoint(self, record: ev.Record) -> None:
        if record.checkpoint:
            self._asked_checkpoint = record.step + 1

    def _leave(self) -> ev.Actions:
        self._is_leaving = True
        if self.view:
            return [AsksToLeaveReport(), self._confirmed(ev.Leaving())]
        return [ev.Send(ev.COORDINATOR, ev.Leaving()), ev.Stop(ExitCode.DONE, "left before it was admitted")]

    # --------------------------------------------------------------------------------------------- the coordinator

    def _hello(self) -> ev.Send:
        identity, started = self.identity, self._started
        about = (identity.peer, identity.stage, identity.fingerprint)
        return ev.Send(ev.COORDINATOR, ev.Hello(*about, started.address, started.process, started.disk))

    def _profiled(self) -> ev.Send:
        assert self._profile is not None
        profile, process = self._profile, self._started.process
        return ev.Send(ev.COORDINATOR, ev.Profiled(profile, self._version, process, self._device, self._state))

    @property
    def _is_candidate(self) -> bool:
        """Whether the coordinator has to know that this peer is ready, and what it holds. A peer whose device is still
        busy with overdue Work is not ready, also if it does not know yet that it was evicted for that."""
        if self._profile is None or not self._knows_state or self._work_watch.is_overdue:
            return False
        if self.view is None:
            return True
        return self.identity.peer in self.view.joining and self._state is not None

    def _confirmed(self, body: ev.Message) -> ev.Send:
        """A message that must not be lost with the coordinator."""
        about = (ev.Saved, body.version, body.stage) if isinstance(body, ev.Saved) else type(body)
        self._unconfirmed[about] = body
        return ev.Send(ev.COORDINATOR, body)

    def _on_link(self, now_s: float, peer: int, up: bool) -> ev.Actions:
        if not up and peer != ev.COORDINATOR and peer not in self._members:
            return [ev.Disconnect(peer)]  # nothing is kept of a peer that is no member
        if not up:
            self._down_since_s.setdefault(peer, now_s)
            return [] if peer == ev.COORDINATOR else [ev.WakeAt(now_s + RECONNECT_S, "links")]
        if self._down_since_s.pop(peer, None) is None or peer != ev.COORDINATOR:
            return []
        return [self._hello(), *self._offer(), *(ev.Send(ev.COORDINATOR, body) for body in self._unconfirmed.values())]

    def _heartbeat(self, now_s: float) -> ev.Actions:
        self._n_heartbeats += 1
        self._sent_s[self._n_heartbeats] = now_s
        self._sent_s.pop(self._n_heartbeats - KEPT_HEARTBEATS, None)
        is_counted = self._n_heartbeats % COUNTED_HEARTBEATS == 1
        bytes_to, bytes_from = (self._status.bytes_to, self._bytes_from_workers()) if is_counted else (None, {})
        status = self._status.values | self._server_counts.values | self._fetching
        heartbeat = ev.Heartbeat(self._n_heartbeats, status, bytes_to, bytes_from, self._server_counts.workers)
        return [ev.Send(ev.COORDINATOR, heartbeat), ev.WakeAt(now_s + self.identity.heartbeat_s, "heartbeat")]

    def _bytes_from_workers(self) -> dict[str, int]:
        """Members report themselves what they send; a pool's workers do not speak with the coordinator."""
        return {peer: n for peer, n in self._status.bytes_from.items() if peer in self._known_workers}

    def _acknowledged(self, now_s: float, count: int, coordinator_s: float) -> None:
        """The coordinator has answered a heartbeat. The answer with the shortest round trip tells its clock's offset
        best."""
        self._coordinator.arrived(now_s)
        self._outage_reported = False
        rtt_s = now_s - self._sent_s.get(count, -float("inf"))
        if rtt_s < self._best_rtt_s:
            self._best_rtt_s = rtt_s
            self._clock_offset_s = coordinator_s + rtt_s / 2 - now_s

    def _watch(self, now_s: float) -> ev.Actions:
        """Look for a coordinator or neighbours that have been silent or out of reach for too long."""
        if self._best_rtt_s == float("inf"):
            waited_s = now_s - self._started_s
            if waited_s > FIRST_CONTACT_S:
                return [ev.Stop(ExitCode.LOST, f"coordinator: not reached within {waited_s:.0f} s")]
        elif self._coordinator.passed(now_s):
            return self._coordinator_silent(self._coordinator.silence_s(now_s))
        actions: ev.Actions = []
        for peer, since_s in sorted(self._down_since_s.items()):
            if peer != ev.COORDINATOR and since_s + RECONNECT_S <= now_s:
                self._down_since_s[peer] = now_s  # reported again after as long, if the link is still down
                actions.append(ev.Send(ev.COORDINATOR, ev.Suspect(peer, f"no link for {now_s - since_s:.1f} s")))
        return actions

    def _remind(self, now_s: float) -> ev.Actions:
        """Say now and then that this peer is ready and still outside."""
        if self.view is not None or self._profile is None:
            self._reminder.ends()
            return []
        waited_s = self._reminder.due(now_s)
        is_heard = self._best_rtt_s < float("inf") and not self._coordinator.passed(now_s)
        return [] if waited_s is None else [StillReadyReport(waited_s, is_heard)]

    def _coordinator_silent(self, silence_s: float) -> ev.Actions:
        outage_s = self.identity.outage_s
        if silence_s > self._coordinator.timeout_s + outage_s:
            return self._give_up(f"coordinator: lost, silent for {silence_s:.1f} s")
        if self._outage_reported:
            return []
        self._outage_reported = True
        return [OutageReport(round(silence_s, 1), outage_s), *self._repeat_records()]

    def _repeat_records(self) -> ev.Actions:
        """The coordinator may have ended before all others heard of the last steps. A record is a fact, so anybody may
        repeat it (step protocol, Sec. 5.5), and then all members come to one version."""
        if self.view is None:
            return []
        others = [member.peer for member in self.view.members if member.peer != self.identity.peer]
        records = [record for record in self._records if record.generation == self.generation]
        return [ev.Send(peer, ev.Committed(record)) for record in records for peer in others]

    def _give_up(self, reason: str) -> ev.Actions:
        """End, but first write the state that this peer holds where a resume finds it."""
        if self._last_words:
            return []
        holds_state = self.view is not None and self.identity.peer not in self.view.joining
        if not holds_state or self._version == self.identity.start_version:
            return [ev.Stop(ExitCode.LOST, reason)]
        self._last_words = reason
        return [] if self._is_replaced_now else self._write(self._version)

    def _watch_work(self, now_s: float) -> ev.Actions:
        overdue = self._work_watch.tick(now_s, self._running)
        if not self.view or not self._work_watch.is_overdue:
            return []
        return [*([ev.Send(ev.COORDINATOR, overdue)] if overdue else []), ev.WorkOverdue()]

    def _ran(self, work: Work, seconds: float) -> ev.Actions:
        if work == self._running:
            self._running = None
        was_overdue = self._work_watch.is_overdue
        self._work_watch.on_done(work, seconds)
        is_free_again = was_overdue and not self._work_watch.is_overdue
        return self._offer() if is_free_again and not self._is_leaving else []

    # ------------------------------------------------------------------------------------------------------- views

    def _adopt(self, view: ev.View) -> ev.Actions:
        own, before = self.identity.peer, self.view
        if view.number <= self._last_view_number:
            is_unknown = view.number < self._last_view_number and view.coordinator_term > self._last_view_term
            return self._put_out(view) if before and is_unknown else []
        members = view.by_peer
        old_members: Mapping[int, ev.Member] = before.by_peer if before else {}
        # The connections of a process whose place another one has taken are ended too.
        gone = sorted(peer for peer, member in old_members.items() if peer != own and _is_replaced(member, members))
        actions: ev.Actions = [ev.Disconnect(peer) for peer in gone]
        if own not in members or members[own].process != self._started.process:
            return actions + self._evicted(view) if before else []
        if members[own].admission <= self._void_admission:
            return []  # the coordinator has not heard yet that this peer has nothing more of the step
        if before and members[own].admission == old_members[own].admission and not view.continues(before.number):
            return actions + self._put_out(view)
        if before and members[own].admission != old_members[own].admission and self.identity.begins_anew:
            return actions + self._evicted(view)
        if before and members[own].admission != old_members[own].admission:
            actions.append(ev.Evicted(view))  # evicted and admitted again at once: what is under way here is void
            before = None
        saved_before = before is not None and self._saves(self._version)
        # The view of a rollback may not have reached this peer. A joining peer gets the state from others instead.
        missed_rollback = view.generation != self.generation and own not in view.joining
        view = replace(view, rolled_back=view.rolled_back or missed_rollback)
        for record in view.records:
            self._note_checkpoint(record)
        self._saves_first_version = before is not None and self._still_saves(before, view)
        self.view = view
        self._state = None
        self._knows_state = True
        self.generation = view.generation
        self.header = replace(self.header, generation=view.generation, view=view.number)
        self._last_view_number = view.number
        self._last_view_term = view.coordinator_term
        self._members = members
        if view.rolled_back:  # what this peer has done and saved since that checkpoint is void
            kept = [
                (about, body) for about, body in self._unconfirmed.items() if not isinstance(body, ev.Done | ev.Saved)
            ]
            self._unconfirmed = dict(kept)
        stay = {p for p, old in old_members.items() if p in members and members[p].admission == old.admission}
        self._down_since_s = {p: s for p, s in self._down_since_s.items() if p in stay or p == ev.COORDINATOR}
        back_to = view.n_committed if view.rolled_back else None
        actions += [AdoptedReport(view.number, list(members), back_to), ev.Meet(view.members), ev.ViewChanged(view)]
        is_due = self._is_awaited(self._version) and self._is_saver(view, self._version)
        if is_due and not saved_before and view.number > 1 and not self._is_replaced_now:
            actions += self._write(self._version)  # the member that should have written it is gone
        return actions

    def _put_out(self, view: ev.View) -> ev.Actions:
        """This peer is in a view of a superseded coordinator, and the successor, which made `view`, does not know the
        former view. This peer's work since then differs from the work of the others, so it is void. The header still
        names the former view: that tells the coordinator that this peer has to be admitted again."""
        header = self.header
        actions = self._evicted(view)
        self.header = replace(self.header, view=header.view)
        return actions

    def _evicted(self, view: ev.View) -> ev.Actions:
        """The run continues without this peer: become a candidate again, as soon as it is known what this peer holds,
        or leave if that is what it asked for."""
        assert self.view is not None
        self._void_admission = self.view.by_peer[self.identity.peer].admission
        self.header = replace(self.header, view=view.number)
        self.view = self._state = None
        self._knows_state = False  # an update may still run
        self._members = {}  # what they still send is dropped
        self._last_view_number = view.number
        self._last_view_term = view.coordinator_term
        self._unconfirmed.clear()
        self._fetching.clear()
        self._down_since_s = {p: since_s for p, since_s in self._down_since_s.items() if p == ev.COORDINATOR}
        actions: ev.Actions = [ev.Disconnect(member.peer) for member in view.members]
        actions += [EvictedReport(view.number), ev.Evicted(view)]
        if self.identity.begins_anew:
            self._next_stage = self.identity.stage
            return actions + self._leave_if_free()
        return actions + (self._leave_if_free() if self._is_leaving else [self._hello()])

    def _offer(self) -> ev.Actions:
        """Say again that this peer is ready, and what it holds."""
        return [self._profiled()] if self._is_candidate else []

    def _leave_if_free(self) -> ev.Actions:
        """A peer that wants to leave, or that is wanted at another stage, goes once it is outside of the view and its
        part of a checkpoint is written."""
        if self.view is not None or self._writing:
            return []
        if self._is_leaving:
            return [ev.Stop(ExitCode.DONE, f"peer {self.identity.peer}: left the run")]
        if self._next_stage is None:
            return []
        is_other = self._next_stage != self.identity.stage
        return [*([MovingReport(self._next_stage)] if is_other else []), ev.MoveTo(self._next_stage, self._version)]

    # ------------------------------------------------------------------------------------------------- checkpoints

    def _saves(self, version: int) -> bool:
        """Whether this peer writes its stage's part of a checkpoint."""
        if self.view is None:
            return False
        is_first = version == self.view.n_committed and version != self._kept_version
        return self._saves_first_version if is_first else self._is_saver(self.view, version)

    def _still_saves(self, before: ev.View, view: ev.View) -> bool:
        """Whether this peer saves the version with which a view begins. The member that saved it before saves it still,
        also if it leaves: else two would write at the same time. If that member is gone, the version is left out, but
        for one that the end of the run waits for, which the next member saves: one that has joined meanwhile if all
        that worked before are gone, or have been admitted again and have to get the state."""
        stage, version = self.identity.stage, view.n_committed
        saving = before.working(stage, version)
        if self._is_awaited(version):
            admissions = {member.peer: member.admission for member in view.members}
            stayed = tuple(peer for peer in saving if admissions.get(peer) == before.by_peer[peer].admission)
            saving = stayed or view.working(stage, version)
        return saving[:1] == (self.identity.peer,)

    def _is_awaited(self, version: int) -> bool:
        """Whether the run may not end without a checkpoint of this version: the last one, or what an operator wants."""
        return version in (self.identity.n_steps, self._asked_checkpoint)

    @property
    def _is_replaced_now(self) -> bool:
        """Whether an update is under way, or about to be, so that the state of this version cannot be written."""
        return any(r.step >= self._version and r.generation == self.generation for r in self._records)

    def _is_saver(self, view: ev.View, version: int) -> bool:
        return view.working(self.identity.stage, version)[:1] == (self.identity.peer,)

    def _write(self, version: int) -> ev.Actions:
        self._writing.add(version)
        assert self.view is not None, "only a member saves"
        return [ev.WriteCheckpoint(version, self.generation, self.view.n_reseeds), *self._write_owed(version)]

    def _write_owed(self, version: int) -> ev.Actions:
        """Each member owes something else, so each writes that, whoever writes the state."""
        return [ev.WriteOwed(version, self.generation)] if self.identity.owes else []

    def _wrote(self, wrote: ev.WroteCheckpoint) -> ev.Actions:
        version = wrote.version
        self._writing.discard(version)
        if self._last_words and version == self._version:
            return [
                ev.Stop(ExitCode.LOST, f"{self._last_words}; the state after {version} steps is written, for --resume")
            ]
        if wrote.generation != self.generation:
            return self._leave_if_free()  # the run has gone back meanwhile
        saved = ev.Saved(version, self.identity.stage, wrote.blocked_s, wrote.digest, wrote.n_words)
        more = self._done() if version == self.identity.n_steps else self._leave_if_free()
        return [self._confirmed(saved), *more]

    def _on_complete(self, checkpoint: ev.Checkpoint) -> ev.Actions:
        """The coordinator need not be told again about older parts. Every host that holds a part marks its folder."""
        if self._asked_checkpoint is not None and checkpoint.version >= self._asked_checkpoint:
            self._asked_checkpoint = None
        for key, body in list(self._unconfirmed.items()):
            if isinstance(body, ev.Saved) and body.version < checkpoint.version:
                del self._unconfirmed[key]
        return [ev.MarkCheckpoint(checkpoint)]

    def _save_failed(self, now_s: float, version: int, reason: str) -> ev.Actions:
        """The next checkpoint is the next attempt. The end of the run may wait for this one: then it is tried again."""
        self._writing.discard(version)
        actions: ev.Actions = [ev.Send(ev.COORDINATOR, ev.SaveFailed(version, reason))]
        if self._is_awaited(version):
            actions.append(ev.WakeAt(now_s + SAVE_AGAIN_S, "save"))
        return actions + self._leave_if_free()

    def _save_again(self) -> ev.Actions:
        owes = self.view is not None and self._is_awaited(self._version) and self._version not in self._writing
        return self._write(self._version) if owes and not self._is_replaced_now else []

    def _updated(self, version: int) -> ev.Actions:
        self._fetching.clear()  # the state is here, so the heartbeats say no more of it
        is_known = version <= self._version  # the run begins at this version, or was rolled back to it
        self._version = version
        if self._last_words:
            return self._write(version)
        every = self.identity.checkpoint_every_steps
        is_last = version == self.identity.n_steps
        is_wanted = self._is_awaited(version) or (every and version % every == 0)
        if self._saves(version) and not is_known and is_wanted:
            return self._write(version)
        owed = self._write_owed(version) if self.view and not is_known and is_wanted else []
        return [*owed, *(self._done() if is_last and self.view else [])]

    def _done(self) -> ev.Actions:
        totals = self._status.values | self._server_counts.values | {"clock_offset_s": self._clock_offset_s}
        return [self._confirmed(ev.Done(self._version, totals, self._status.bytes_to, self._bytes_from_workers()))]
