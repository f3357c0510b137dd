"""Whom the run continues without: members that are silent, cut off, stuck, that fail, or that leave.

- The stage of a lost member may have no other replica. Then the run waits for it, goes back, or ends (step protocol,
  Sec. 6.1, 6.2); the roster knows which. A silent peer's connections have been ended. It is dialled all the same while
  the run waits for it: if its process has ended, its host says so, and the run need not wait for the grace period.
- Two members may lose each other, while both reach the coordinator (see LinkSuspicion).
- A peer that fails is that peer's trouble: the run continues without it, or waits for another. The run ends with it
  only where waiting is in vain: no peer is left, or one peer after another fails at the same stage for the same reason.

Each method answers with the actions that follow, the next view among them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass

from jaxdt.membership.admission import HEARD_HEARTBEATS
from jaxdt.membership.roster import Roster
from jaxdt.membership.run_state import RunState
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import (
    FailedReport,
    LeavingReport,
    LostReport,
    OverdueReport,
    ReturnedReport,
    SaveFailedReport,
    VacantReport,
)

LEFT_EARLY = "left before it was admitted"
NOT_BEGUN = "the run has not begun, and needs all peers of its plan to begin"
NO_WAY_HINT = "forward a port to one of them and give it --advertise=HOST:PORT, or use a VPN"
SAID_BY = "said by peer"  # in the reason of an eviction that another member has asked for
SAVE_FAILURES_MAX = 3  # checkpoints in a row that a peer may fail to write
OVERDUE_MAX = 3  # times within FORGIVEN_STEPS that the Work of a peer may be overdue
SAME_FAILURES_MAX = 3  # peers in a row that may fail for the same reason at a stage without any other


class LinkSuspicion:
    """Links that one of their ends has reported as broken, and which end leaves.

    Each end accuses the other. An accusation waits for `patience_s`, in which other members report their links; one of
    a peer against itself, and one that concerns a joining member, does not wait. Then we evict the peer whose stage
    keeps another replica, or is one of the `replaceable` ones, which continue without any. If both do, we evict the one
    with more broken links, since that mends more. If both have as many, we evict the one that was admitted last (of two
    first members the one with the higher number). So a peer that comes and goes cannot drive out those that stay."""

    def __init__(self, patience_s: float):
        self._patience_s = patience_s
        self._broken: dict[tuple[int, int], tuple[float, str]] = {}  # the two ends -> since when, and why

    def accuse(self, now_s: float, src: int, peer: int, reason: str) -> float:
        """`src` cannot continue with `peer`, which may be itself. Returns when this can be judged at the latest."""
        ends = (min(src, peer), max(src, peer))
        self._broken.setdefault(ends, (now_s, f"{reason} ({SAID_BY} {src} of peer {peer})"))
        return now_s + self._patience_s

    def on_admitted(self, peers: Collection[int]) -> None:
        """A view admits these peers, whose links are new: what was said of them before does not count."""
        self._broken = {ends: since for ends, since in self._broken.items() if not set(ends) & set(peers)}

    def judged(self, now_s: float, roster: Roster, replaceable: Container[int] = ()) -> tuple[int, str] | None:
        """One member that has to leave now, and why."""
        present = roster.present
        self._broken = {ends: since for ends, since in self._broken.items() if set(ends) <= present}
        joining: set[int] = set(roster.view.joining) if roster.view else set()
        for ends, (since_s, reason) in self._broken.items():
            if since_s + self._patience_s <= now_s or ends[0] == ends[1] or joining & set(ends):
                del self._broken[ends]
                return self.preferred(ends, roster, replaceable), reason
        return None

    def preferred(self, ends: tuple[int, int], roster: Roster, replaceable: Container[int]) -> int:
        """Which of two members leaves, if one has to."""
        ordered = (min(ends), max(ends))
        n_broken = Counter(end for pair in (ordered, *self._broken) for end in pair)

        def preference(peer: int) -> tuple[bool, int, int, int]:
            stage = roster.peers[peer].stage
            has_replica = bool(roster.live(stage) - {peer}) or peer in roster.current_view.joining
            return stage in replaceable or has_replica, n_broken[peer], roster.admissions[peer], peer

        return max(ordered, key=preference)


@dataclass
class _StageLosses:
    """How the last replica of a stage was lost; while it is vacant, the silent peers that the run waits for, as
    reported; the last reason for which a peer of it failed, and how often in a row."""

    reason: str
    awaited: list[int] | None = None
    failure: str = ""
    n_failures: int = 0


class Evictions:
    """Time comes in as an argument. `change_view` makes the next view if there is one to make. `patient_until_s`: until
    then no peer is evicted for its silence."""

    def __init__(self, run: RunState, change_view: Callable[[], list[ev.Action]]):
        self.patient_until_s = 0.0
        self._stages = [_StageLosses(f"stage {stage}: has no replica") for stage in range(run.config.n_stages)]
        self._dialled: set[int] = set()  # silent peers for which the run waits
        self._run = run
        self._change_view = change_view
        self._config = run.config
        self._roster = run.roster
        self._agreement = run.agreement
        self._checkpoints = run.checkpoints
        self._link_suspicion = LinkSuspicion(run.config.heartbeat_s)

    def on_view(self, view: ev.View) -> None:
        """A view is durable: what was said before of the links of those whom it admits does not count."""
        self._link_suspicion.on_admitted([member.peer for member in view.members if member.admission == view.number])

    def judge(self, now_s: float) -> list[ev.Action]:
        """Evict a member whose time is over, or begin a move that is due."""
        self._roster.forget_the_gone(now_s)
        actions = self._change_view() if self._roster.end_waits(now_s) else []
        if self._run.has_ended:
            return actions
        # We evict no peer while a view is being written: until it is durable, a leaving peer still counts as a replica.
        may_evict = now_s >= self.patient_until_s and self._run.next_view is None
        if may_evict and (evictions := self._evict(now_s)):
            return [*actions, *evictions, *self._change_view()]
        return [*actions, *self._watch_vacancies(now_s), *self._roster.begin_moves(now_s)]

    def _evict(self, now_s: float) -> list[ev.Action]:
        """Give up all members whose connections are broken, with one view; else one that is silent for too long."""
        actions: list[ev.Action] = []
        for peer, lease in self._roster.broken_leases(now_s):
            reason = "its connection broke and did not come back"
            actions += self._lose_without_view(now_s, peer, reason, lease.is_gone)
        if actions:
            return actions
        over = self._roster.overdue(now_s)
        if over is None:
            over = self._link_suspicion.judged(now_s, self._roster, self._replaceable)
            if over and not self._can_spare(over[0]):
                self._admit_in_mid_step()
        if over is None:
            return []
        peer, reason = over
        lease = self._roster.peers[peer].lease
        return self._lose_without_view(now_s, peer, reason, lease is not None and lease.is_gone)

    def on_suspect(self, now_s: float, header: ev.Header, suspect: ev.Suspect) -> list[ev.Action]:
        """It counts if the view of the message has its sender and the suspect in it as they were admitted last."""
        admissions, src = self._roster.admissions, header.src
        if header.view < max(admissions.get(src, header.view + 1), admissions.get(suspect.peer, 0)):
            return []
        due_s = self._link_suspicion.accuse(now_s, src, suspect.peer, suspect.reason)
        return [ev.WakeAt(due_s, "suspicion")]

    def on_cannot_reach(self, now_s: float, header: ev.Header, broken: ev.CannotReach) -> list[ev.Action]:
        """Two members have no way to each other: one of them is evicted, and told so when it speaks again. While the
        other one is silent here, too, its lease decides: it may be paused, or cut off for a while."""
        src, peer = header.src, broken.peer
        if header.view < self._roster.admissions.get(src, header.view + 1) or peer not in self._roster.present:
            return []
        silent_s = now_s - self._roster.heard_s(peer, now_s)
        if now_s < self.patient_until_s or silent_s > HEARD_HEARTBEATS * self._config.heartbeat_s:
            return []  # it is said again
        out = self._link_suspicion.preferred((src, peer), self._roster, self._replaceable)
        reason = f"peer {src} and peer {peer} have no way to each other: {broken.reason}; {NO_WAY_HINT}"
        self._roster.refuse(out, ev.Ended(2, reason))
        return self.lose(now_s, out, reason, is_dead=False)

    def on_overdue(self, now_s: float, header: ev.Header, overdue: ev.Overdue) -> list[ev.Action]:
        """Go on without a peer for whose Work the run waits, or that is stuck again and again. The last one of a stage
        is awaited, until another peer has its state."""
        src = header.src
        if src not in self._roster.admissions:
            return []
        report = OverdueReport(src, overdue.work, overdue.seconds, overdue.deadline_s, overdue.blocks)
        if not self._can_spare(src):
            if overdue.blocks:
                self._admit_in_mid_step()
            return [report, *self._change_view()]
        reason = f"{overdue.work} has run for {overdue.seconds:.1f} s, expected at most {overdue.deadline_s:.1f} s"
        n_times = self._roster.peers[src].on_overdue(self._run.n_committed, overdue.work)
        if n_times >= OVERDUE_MAX:
            reason = f"{reason}; its Work was overdue {n_times} times of late"
            return [report, *self._evict_for_good(now_s, src, reason)]
        return [report, *(self.lose(now_s, src, reason, is_dead=False) if overdue.blocks else [])]

    def on_save_failed(self, now_s: float, header: ev.Header, failed: ev.SaveFailed) -> list[ev.Action]:
        """After one checkpoint that fails the next one is tried. A peer that fails again and again is evicted, and
        another of its stage writes the checkpoints. Without another the run ends: nothing would be durable any more."""
        src, version = header.src, failed.version
        self._roster.peers[src].n_saves_failed += 1
        n_in_a_row = self._roster.peers[src].n_saves_failed
        report = SaveFailedReport(src, version, failed.reason, n_in_a_row)
        if n_in_a_row < SAVE_FAILURES_MAX:
            return [report]
        reason = f"{n_in_a_row} checkpoints in a row could not be written, the last of {version} steps: {failed.reason}"
        if not self._roster.live(self._roster.peers[src].stage) - {src}:
            return [report, *self._run.end(2, f"{self._roster.name(src)}: {reason}")]
        return [report, *self._evict_for_good(now_s, src, reason)]

    def on_failed(self, now_s: float, header: ev.Header, failed: ev.Failed) -> list[ev.Action]:
        """A peer's process ends for a reason that a person has to mend. The run ends only if no peer is left to
        continue, or if a person has to mend the same for every peer that tries."""
        src, reason = header.src, failed.reason
        line = f"{self._roster.name(src)}: {reason}"
        if self._roster.view is None and src in self._config.stage_of:
            return self._run.end(2, line)  # the run has not begun, and needs all peers of the plan to begin
        stage = self._roster.peers[src].stage
        self._roster.peers[src].has_failed = True
        losses = self._stages[stage]
        losses.n_failures = losses.n_failures + 1 if reason == losses.failure else 1
        losses.failure = reason
        if self._roster.view is None or src not in self._roster.members:
            actions = self._dismiss(src, line)
        else:
            actions = self._lose_without_view(now_s, src, reason, is_dead=True)
            if self.lost_stage is not None:
                return [*actions, *self._run.end(2, f"{losses.reason}; it was the last of its stage")]
            actions += self._change_view()
        is_deserted = self._roster.view is not None and stage in self._roster.deserted
        left = self._roster.members | self._roster.candidates | self._roster.coming
        is_in_vain = is_deserted and losses.n_failures >= SAME_FAILURES_MAX
        is_final = is_in_vain or all(self._roster.peers[peer].has_failed for peer in left)
        return actions + (self._run.end(2, line) if is_final else [])

    def on_leaving_early(self, now_s: float, header: ev.Header, leaving: ev.Leaving) -> list[ev.Action]:
        line = f"{self._roster.name(header.src)}: {LEFT_EARLY}"
        if header.src not in self._config.stage_of:
            return self._dismiss(header.src, line)
        return self._run.end(3, f"{line}; {NOT_BEGUN}")

    def on_leaving(self, now_s: float, header: ev.Header, leaving: ev.Leaving) -> list[ev.Action]:
        src = header.src
        if src not in self._roster.admissions:
            return self._dismiss(src, f"{self._roster.name(src)}: {LEFT_EARLY}")
        if problem := self._agreement.cannot_lose(src, self._roster.present):
            return self._run.end(3, f"{self._roster.name(src)}: leaves; {problem}")
        if self._roster.peers[src].is_leaving:
            return []
        report = LeavingReport(src, self._roster.on_leaving(src))
        self._roster.withdraw(self._agreement.leave_with(src))
        return [report, *self._change_view()]

    def _dismiss(self, src: int, line: str) -> list[ev.Action]:
        """A peer that was no member yet does not come."""
        self._roster.peers[src].lease = None
        self._roster.dismiss(src)
        return [FailedReport(src, line), ev.Disconnect(src)]

    def _evict_for_good(self, now_s: float, peer: int, reason: str) -> list[ev.Action]:
        """Go on without a member of a stage that has another, and have its process end."""
        self._roster.peers[peer].n_saves_failed = 0
        self._roster.refuse(peer, ev.Ended(2, f"{self._roster.name(peer)}: {reason}"))
        return self.lose(now_s, peer, reason, is_dead=True)

    def lose(self, now_s: float, peer: int, reason: str, is_dead: bool) -> list[ev.Action]:
        """Go on without a peer, wait for it, or end. `is_dead`: its process has ended, so waiting is in vain."""
        actions = self._lose_without_view(now_s, peer, reason, is_dead)
        return [*actions, *self._change_view()] if actions else []

    def _lose_without_view(self, now_s: float, peer: int, reason: str, is_dead: bool) -> list[ev.Action]:
        """Do all that `lose` does, but do not change the view."""
        reason = f"{self._roster.name(peer)}: lost, {reason}"
        if self._run.has_ended:
            return []
        if self._roster.peers[peer].is_given_up:
            return self.on_dead(now_s, peer) if is_dead else []
        if self._roster.view is None:
            return self._run.end(3, f"{reason}; {NOT_BEGUN}")
        if problem := self._agreement.cannot_lose(peer, self._roster.present):
            return self._run.end(3, f"{reason}; {problem}")
        self._roster.peers[peer].lease = None
        actions: list[ev.Action] = [LostReport(peer, reason), ev.Disconnect(peer)]
        has_others = self._roster.lose(now_s, peer, is_dead, self._run.next_view)
        self._roster.withdraw(self._agreement.leave_with(peer))
        self._dialled.discard(peer)  # its connections are ended
        if not has_others:
            losses = self._stages[self._roster.peers[peer].stage]
            losses.reason, losses.awaited = reason, None
        self._roster.end_waits(now_s)
        return actions + self._watch_vacancies(now_s)

    def on_dead(self, now_s: float, peer: int) -> list[ev.Action]:
        """A silent peer's process has ended: the run no longer waits for it."""
        self._roster.peers[peer].end_wait()
        return self._watch_vacancies(now_s) + self._change_view()

    def on_returned(self, now_s: float, src: int) -> list[ev.Action]:
        """The last replica of a stage was silent, and is not dead. Other stages may have waited for it."""
        self._roster.on_returned(src)
        self._roster.on_message(src, now_s)
        return [ReturnedReport(src), self._roster.reach(src), *self._change_view()]

    def on_committed(self) -> None:
        """A step is committed: every stage has a peer that works."""
        for losses in self._stages:
            losses.failure, losses.n_failures = "", 0

    @property
    def waiting_stages(self) -> list[int]:
        """The vacant stages, for which the run waits."""
        return [stage for stage, losses in enumerate(self._stages) if losses.awaited is not None]

    def dials(self, peer: int) -> bool:
        """Whether the run waits for this silent peer and dials it."""
        return peer in self._dialled

    def how_lost(self, stage: int) -> str:
        """How the last replica of a stage was lost."""
        return self._stages[stage].reason

    def _watch_vacancies(self, now_s: float) -> list[ev.Action]:
        """Report stages for which the run waits for other peers than before, and dial those peers."""
        roster, checkpoint = self._roster, self._checkpoints.checkpoint.version
        vacant = roster.vacant if roster.view else []
        actions: list[ev.Action] = []
        silent: set[int] = set()
        for stage, losses in enumerate(self._stages):
            awaited = roster.awaited(stage) if stage in vacant else None
            if awaited is not None and awaited != losses.awaited:
                at_stake, waits_s = range(checkpoint, self._run.n_committed), round(roster.wait_s(now_s, awaited), 1)
                actions.append(VacantReport(stage, losses.reason, checkpoint, list(at_stake), awaited, waits_s))
            losses.awaited = awaited
            silent.update(peer for peer in awaited or () if not roster.has_lease(peer))
        dial = sorted(silent - self._dialled)
        actions += [roster.reach(peer) for peer in dial]
        actions += [ev.Disconnect(peer) for peer in sorted(self._dialled - silent) if not roster.has_lease(peer)]
        self._dialled = silent
        # A transport dials only when it has something to send, and whether a process lives shows in the dialling.
        return [*actions, *(ev.Send(peer, roster.current_view) for peer in dial)]

    def _can_spare(self, peer: int) -> bool:
        """Whether the stage of a member can continue without it."""
        stage = self._roster.peers[peer].stage
        staying = self._run.next_view or self._roster.current_view
        others = (self._roster.live(stage) & staying.by_peer.keys()) - {peer}
        return bool(others) or stage in self._replaceable

    @property
    def _replaceable(self) -> set[int]:
        return self._roster.replaceable(self._run.n_committed, self._agreement.records)

    def _admit_in_mid_step(self) -> None:
        """Candidates need not wait for the end of the step, in a run where they can take a place."""
        if not self._agreement.REPLICAS_MAY_DIFFER:
            self._roster.admit_in_mid_step()

    @property
    def lost_stage(self) -> int | None:
        """A stage that no peer can fill, in a run that does not wait for a newcomer."""
        lost = [] if self._config.waits else self._roster.lost_stages(self._run.n_committed, self._agreement.records)
        return lost[0] if lost else None
