"""The roster of a run: what each peer is to it, and which view the changes so far ask for.

The coordinator keeps the roster. Each peer that it knows has one `Standing`. A change needs a view, and `next_view`
makes one when there is a change to make:

- A lost member leaves at once if its stage has another replica.
- Peers that want to leave or to join wait for the end of a step, where that costs nothing.
- A member that moves to another stage leaves like that and comes back as a newcomer, under its own id.
- The last replica of a stage is never evicted on mere silence (step protocol, Sec. 6.1): the run waits for it.
- A peer outside of the view that holds the committed version of a stage without a live replica takes its place at
  once, and nothing is lost (Sec. 6.2).
- Silence is no proof of death: a replica that was evicted holds the committed version until the next step is committed
  without it. The run waits for such a peer, too, until its process is known to have ended, or it is back and says what
  it holds, or it has been silent for the grace period.
- All members go back to the last complete checkpoint, with a newcomer in the stage, only if no peer is left that may
  hold that version.
- A peer that comes and goes waits before it is admitted again: each eviction costs the others a deadline.

Each peer that the coordinator hears has a lease. It runs out when the peer is silent, or out of reach, for too long.

The step waits for a joining member, so that also has to fetch its state, or leave. It is judged by progress, not by
time: before it asks for its state it has a floor. Once it has asked, and before the first bytes arrive, it has as long
as the slowest acceptable link needs. After that it has a multiple of the longest gap so far, and always several floors,
because donors answer when their update is done. So a large state on a slow link is given its time.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from jaxdt.membership.agreement import NO_RETURNING_MEMBERS, ReturningMembers
from jaxdt.membership.checkpoint_progress import Holder
from jaxdt.membership.newcomers import IDS_PER_TERM, NewcomerIds
from jaxdt.membership.rebalance_api import ByNumber
from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import RECONNECT_S, Deadline
from jaxdt.protocol.reports import MoveReport

FORGIVEN_STEPS = 128  # after so many steps without another eviction a peer is like any other
BACKOFF_STEPS_MAX = 64
JOINING_FLOORS = 2.0
SLOWEST_BYTES_PER_S = 12_500.0
WAITS_MAX = 4.0  # times the longest gap after which bytes came
ASKED_FLOORS = 5.0
OUT = -1  # the destination of a member that leaves the run


class Standing(Enum):
    """What a peer is to the run. The last four are those of the members of the view."""

    ABSENT = auto()  # it is expected nowhere; it may be a candidate all the same
    COMING = auto()  # a newcomer that was told a stage
    REDIRECTED = auto()  # like COMING, but sent to another stage than the one it was at or came for
    MEMBER = auto()
    MISSING = auto()  # silent, and the last replica of its stage: it stays a member, and the run waits for it
    LOST = auto()  # the next view leaves it out
    WITHDRAWN = auto()  # alive; the next view leaves it out since it leaves others out. It may be a candidate then


EXPECTED = (Standing.COMING, Standing.REDIRECTED)
LEFT_OUT = (Standing.LOST, Standing.WITHDRAWN)


@dataclass
class Lease:
    """`down_since_s`: when the connection to the peer broke, None while it is up. `is_gone`: its process is known to
    have ended."""

    silence: Deadline
    down_since_s: float | None = None
    is_gone: bool = False


@dataclass
class Download:
    """How far a joining member is with its state, as it says in its heartbeats. `since_s`: when bytes came last."""

    admission: int
    since_s: float
    last: ev.Fetching = ev.Fetching(0, 0, 1)
    longest_gap_s: float = 0.0

    def update(self, now_s: float, fetching: ev.Fetching) -> None:
        if fetching.here_bytes > self.last.here_bytes or fetching.asked_bytes and not self.last.asked_bytes:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.since_s)
            self.since_s = now_s
        self.last = fetching

    def timeout_s(self, floor_s: float) -> float:
        if self.last.here_bytes == self.last.of_bytes:
            return math.inf
        if not self.last.asked_bytes:
            return floor_s
        first_s = 0.0 if self.last.here_bytes else self.last.asked_bytes / SLOWEST_BYTES_PER_S
        return max(ASKED_FLOORS * floor_s + first_s, WAITS_MAX * self.longest_gap_s)


@dataclass
class KnownPeer:
    """What the roster knows of a peer. `address`, `process` and `disk` are those of its last hello, None before it (and
    `process` is None once that process was sent elsewhere).

    lease           None if the coordinator does not expect to hear it
    granted_until_s of a peer whose process was admitted and has yet to say hello

    is_candidate    its process is ready, and may be admitted; no peer whose standing is MEMBER is one
    state           what a candidate or a joining member holds of the run
    is_joining      of a member: no step was committed since its admission, and its state may still be on its way
    destination     of a member: the stage that it will leave its own for, OUT if it leaves the run, None if it stays
    silent_since_s  when it fell silent, if the run waits for it: it may hold its stage's committed version
    last_version    updates that the state of such a peer has seen; None for a member, whose state follows the steps
    n_evictions     of late; `evicted_at`: steps that were committed at the last of them
    download        of a joining member, while a donor is there
    has_failed      its process has ended for a reason that a person has to mend
    refusal         a process of it that may not come back, and the answer to whatever that says
    n_saves_failed  checkpoints in a row that it could not write
    overdue         its Work that was overdue of late, and in which step"""

    stage: int
    standing: Standing = Standing.ABSENT
    address: str | None = None
    process: int | None = None
    disk: str = ""
    is_candidate: bool = False
    state: ev.StateName | None = None
    is_joining: bool = False
    destination: int | None = None
    silent_since_s: float | None = None
    last_version: int | None = None
    n_evictions: int = 0
    evicted_at: int = 0
    lease: Lease | None = None
    granted_until_s: float | None = None
    download: Download | None = None
    has_failed: bool = False
    refusal: tuple[int, ev.Ended] | None = None
    n_saves_failed: int = 0
    overdue: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def is_leaving(self) -> bool:
        return self.destination == OUT

    @property
    def is_present(self) -> bool:
        return self.standing is Standing.MEMBER

    @property
    def is_given_up(self) -> bool:
        """Whether it is a member that is not there, or that leaves with the next view."""
        return self.standing in (Standing.MISSING, *LEFT_OUT)

    def forget_state(self) -> None:
        """Its process is another one than before, or is not ready: what that one held does not count."""
        self.is_candidate = False
        self.state = None

    @property
    def is_awaited(self) -> bool:
        return self.silent_since_s is not None

    def end_wait(self) -> None:
        """The run does not wait for it: it is here, its process has ended, or it is silent for too long."""
        self.silent_since_s = self.last_version = None

    def on_evicted(self, n_committed: int) -> None:
        self.n_evictions = self.n_evictions + 1 if n_committed - self.evicted_at < FORGIVEN_STEPS else 1
        self.evicted_at = n_committed

    def on_overdue(self, step: int, work: str) -> int:
        """How much of its Work was overdue of late, with this one in this step. The same Work counts once."""
        recent = {one: at for one, at in self.overdue.items() if step - FORGIVEN_STEPS < at <= step}
        self.overdue = recent | {work: step}
        return len(self.overdue)

    def may_return(self, n_committed: int) -> bool:
        """A peer that was evicted once may come back at once. After more evictions it waits 2, 4, 8, ... steps."""
        waits_steps = min(2 ** (self.n_evictions - 1), BACKOFF_STEPS_MAX) if self.n_evictions > 1 else 0
        return n_committed - self.evicted_at >= waits_steps

    def admit(self, is_joining: bool) -> None:
        """A view has it as a member that is there."""
        self.standing = Standing.MEMBER
        self.is_candidate = False
        self.state = self.state if is_joining else None


class Roster:
    """`stage_of` is the plan's; newcomers are added to `peers`. `delay_steps`: how many steps are under way beside the
    first that is not committed. `balance` says which stage needs a peer. `grace_s`: how long it waits for a
    silent peer. `lease_floor_s`: the least silence that ends a lease. `workers`: of a pool, None without one; no
    newcomer may get their ids. Time comes in as an argument."""

    def __init__(
        self,
        stage_of: Mapping[int, int],
        n_stages: int,
        coordinator_term: int,
        *,
        delay_steps: int = 0,
        balance: ByNumber | None = None,
        grace_s: float = 0.0,
        workers: Collection[int] | None = None,
        lease_floor_s: float = 0.0,
    ):
        self.peers = {peer: KnownPeer(stage) for peer, stage in stage_of.items()}
        self.balance = balance or ByNumber()
        self.view: ev.View | None = None
        self.admissions: Mapping[int, int] = {}  # of the members of the view
        self._grace_s = grace_s
        self._lease_floor_s = lease_floor_s
        self._delay_steps = delay_steps
        self._admits_in_mid_step = False
        self._is_pool = workers is not None
        self.ids = NewcomerIds(max([*stage_of, *(workers or ())]) + 1 + (coordinator_term - 1) * IDS_PER_TERM)
        self._n_stages = n_stages
        self._coordinator_term = coordinator_term
        self._planned = sorted(stage_of)

    # ------------------------------------------------------------------------------------------------- who is there

    @property
    def current_view(self) -> ev.View:
        """The view, for what is only asked once there is one."""
        assert self.view is not None
        return self.view

    def _with(self, *standings: Standing) -> set[int]:
        return {peer for peer, known in self.peers.items() if known.standing in standings}

    @property
    def members(self) -> set[int]:
        return set(self.admissions)

    @property
    def present(self) -> set[int]:
        return self._with(Standing.MEMBER)

    @property
    def missing(self) -> set[int]:
        return self._with(Standing.MISSING)

    @property
    def lost(self) -> set[int]:
        """The members that the next view leaves out, wherever they are."""
        return self._with(*LEFT_OUT)

    @property
    def joining(self) -> set[int]:
        """The members that are there and whose state may still be on its way: the step waits for it."""
        return {peer for peer in self.present if self.peers[peer].is_joining}

    @property
    def candidates(self) -> set[int]:
        """The peers that are ready to compute, and that a view may admit."""
        return {peer for peer, known in self.peers.items() if known.is_candidate}

    @property
    def coming(self) -> set[int]:
        """Newcomers that were told a stage, and members on their way to another one."""
        return self._with(*EXPECTED)

    def live(self, stage: int) -> set[int]:
        """The members that hold their stage's state and are there."""
        in_stage = ((peer, self.peers[peer]) for peer in self.current_view.stage_peers(stage))
        return {peer for peer, known in in_stage if known.is_present and not known.is_joining}

    @property
    def holders(self) -> list[Holder]:
        """The members that are there, with their disks."""
        return [Holder(peer, self.peers[peer].stage, self.peers[peer].disk) for peer in sorted(self.present)]

    @property
    def live_disks(self) -> set[str]:
        return {holder.disk for holder in self.holders}

    @property
    def vacant(self) -> list[int]:
        """Stages without anyone who is there and holds their state."""
        return [stage for stage in range(self._n_stages) if not self.live(stage)]

    @property
    def stages(self) -> list[set[int]]:
        """The peers of each stage that are there or on their way to it."""
        stages: list[set[int]] = [set() for _ in range(self._n_stages)]
        for peer in self.present | self.coming:
            known = self.peers[peer]
            if known.destination != OUT:
                stages[known.stage if known.destination is None else known.destination].add(peer)
        return stages

    def _stages_of(self, peers: Iterable[int]) -> set[int]:
        return {self.peers[peer].stage for peer in peers}

    def awaited(self, stage: int) -> list[int]:
        """The silent peers that the run waits for, since they may hold the stage's committed version."""
        return sorted(peer for peer, known in self.peers.items() if known.stage == stage and known.is_awaited)

    def wait_s(self, now_s: float, peers: Collection[int]) -> float:
        """The seconds from now on for which the run waits for these silent peers."""
        since_s = [self.peers[peer].silent_since_s or 0.0 for peer in peers]
        return max((at_s + self._grace_s - now_s for at_s in since_s), default=0.0)

    def end_waits(self, now_s: float) -> bool:
        """Stop to wait for peers that have been silent for the grace period; whether there were some."""
        awaited = [known for known in self.peers.values() if known.is_awaited]
        over = [known for known in awaited if now_s - (known.silent_since_s or 0.0) >= self._grace_s]
        for known in over:
            known.end_wait()
        return bool(over)

    def name(self, peer: int) -> str:
        """A peer, for people."""
        return f"peer {peer} (stage {self.peers[peer].stage if peer in self.peers else '?'})"

    def state_in_words(self, peer: int) -> str:
        """What a member is, for people."""
        known = self.peers[peer]
        if not known.is_present:
            return "missing" if known.standing is Standing.MISSING else "lost"
        if known.is_joining:
            return "joining"
        return {None: "live", OUT: "leaving"}.get(known.destination, "moving")

    # ------------------------------------------------------------------------------------------------------ leases

    def has_lease(self, peer: int) -> bool:
        return peer in self.peers and self.peers[peer].lease is not None

    @property
    def leases(self) -> Iterator[tuple[int, Lease]]:
        return ((peer, known.lease) for peer, known in sorted(self.peers.items()) if known.lease)

    def on_message(self, peer: int, now_s: float) -> None:
        """A message came from the peer; the first one gives it a lease."""
        known = self.peers[peer]
        known.lease = known.lease or Lease(Deadline(self._lease_floor_s))
        known.lease.silence.arrived(now_s)

    def on_heartbeat(self, now_s: float, peer: int, status: Mapping[str, float]) -> None:
        """A peer's heartbeat; that of a joining member says how far its download is."""
        download = self.peers[peer].download
        if download and all(name in status for name in ev.FETCHED):
            download.update(now_s, ev.Fetching(*(status[name] for name in ev.FETCHED)))

    def on_link(self, now_s: float, peer: int, up: bool, gone: bool) -> None:
        """The connection to a peer came up or went down; `gone`: its process has ended."""
        lease = self.peers[peer].lease if peer in self.peers else None
        if lease and up:
            lease.down_since_s, lease.is_gone = None, False
        elif lease:
            lease.down_since_s = now_s if lease.down_since_s is None else lease.down_since_s
            lease.is_gone = lease.is_gone or gone

    def heard_s(self, peer: int, now_s: float) -> float:
        """The time of the last message from a peer with a lease."""
        lease = self.peers[peer].lease
        assert lease is not None
        return now_s - lease.silence.silence_s(now_s)

    def silences(self, now_s: float) -> dict[int, float]:
        """The seconds, to a tenth, for which each peer with a lease has been silent."""
        return {peer: round(lease.silence.silence_s(now_s), 1) for peer, lease in self.leases}

    def broken_leases(self, now_s: float) -> list[tuple[int, Lease]]:
        """Those of the peers whose connections broke and did not come back in time."""
        down = [(peer, lease) for peer, lease in self.leases if lease.down_since_s is not None]
        return [(peer, lease) for peer, lease in down if (lease.down_since_s or 0.0) + RECONNECT_S <= now_s]

    def overdue(self, now_s: float) -> tuple[int, str] | None:
        """One peer that has been silent, or a joining member that has made no progress, for too long; and why. Before
        the first view no peer can be done without, and nothing is lost while the run waits: a peer that its host keeps
        too busy to speak, since all load and compile, has the grace period of the last replica of a stage."""
        for peer, lease in self.leases:
            silence_s = lease.silence.silence_s(now_s)
            if lease.silence.passed(now_s) and (self.view is not None or silence_s >= self._grace_s):
                return peer, f"silent for {silence_s:.1f} s"
        return self._stalled(now_s)

    def _stalled(self, now_s: float) -> tuple[int, str] | None:
        """No member is blamed while a stage has no replica to fetch from."""
        joining = set[int]() if self.view is None or self.vacant else self.joining
        for peer, known in self.peers.items():
            admission = self.admissions.get(peer, 0)
            if peer not in joining:
                known.download = None
            elif known.download is None or known.download.admission != admission:
                known.download = Download(admission, now_s)
        for peer in sorted(joining):
            download = self.peers[peer].download
            if download and now_s - download.since_s > download.timeout_s(JOINING_FLOORS * self._lease_floor_s):
                waited_s = now_s - download.since_s
                progress = f"{download.last.here_bytes:.0f} bytes are there, no more for {waited_s:.1f} s"
                return peer, f"joins and does not fetch its state: {progress}"
        return None

    # --------------------------------------------------------------------------------------------------- who comes

    def recall(self, view: ev.View, steps_since: bool) -> None:
        """The last view of a coordinator that has died; `steps_since`: a step was committed in that view."""
        for member in view.members:
            known = self.peers.setdefault(member.peer, KnownPeer(member.stage))
            known.stage, known.disk = member.stage, member.disk
            known.address, known.process = member.address, member.process
        self.adopt(view)
        if steps_since:
            self._end_joining()

    def on_hello(self, peer: int, hello: ev.Hello) -> bool:
        """A peer has said hello. True if it is a member, but another process than the one that was admitted."""
        known = self.peers[peer]
        if known.process != hello.process:
            known.forget_state()  # its earlier process may have been ready, this one is not
            known.end_wait()
        known.address, known.process, known.disk = hello.address, hello.process, hello.disk
        known.has_failed, known.granted_until_s = False, None
        member = self.view.by_peer.get(peer) if self.view else None
        return member is not None and member.process != hello.process

    def refuse(self, peer: int, answer: ev.Ended) -> None:
        """The process that a peer has now may not come back; another one may."""
        self.peers[peer].refusal = self.peers[peer].process or 0, answer

    def forget_process(self, peer: int) -> None:
        """A peer's process prepares for a stage that the peer is not meant for any more: its state does not count."""
        self.peers[peer].end_wait()
        self.peers[peer].forget_state()
        self.peers[peer].process = None

    def reach(self, peer: int) -> ev.Connect:
        """Connect again to a peer whose connections were ended, at the address that it gave."""
        return ev.Connect(peer, self.peers[peer].address or "")

    def on_ready(self, peer: int, state: ev.StateName | None) -> None:
        """A peer outside of the view is ready to compute, or a joining member has its state. `state`: what it holds of
        the run, if it holds something. A lost member is as good as outside, also one that was joining."""
        known = self.peers[peer]
        known.end_wait()
        known.is_candidate = not known.is_present
        if state is not None:
            known.state = state

    def on_returned(self, peer: int) -> None:
        """The last replica of a stage was silent, and is there again."""
        self.peers[peer].end_wait()
        if self.peers[peer].standing is Standing.MISSING:
            self.peers[peer].admit(is_joining=False)

    @property
    def servers(self) -> list[set[int]]:
        """The peers of each stage that a pool's workers may compute for: before the first view, those that have said
        hello."""
        if self.view:
            return [self.live(stage) for stage in range(self._n_stages)]
        here = {peer: known.stage for peer, known in self.peers.items() if known.address is not None}
        return [{peer for peer in here if here[peer] == stage} for stage in range(self._n_stages)]

    def newcomer(self, now_s: float, temporary_id: int, certified: int | None) -> tuple[int, int]:
        """A newcomer's peer id, and the stage that needs a peer most. `certified`: the id in its certificate."""
        peer = self.ids.known_as(temporary_id)
        if peer is None:
            stage = self.balance.stage_for(self.stages)
            peer = self.ids.grant(now_s, temporary_id, certified)
            self.peers[peer] = KnownPeer(stage, Standing.COMING)
        return peer, self.peers[peer].stage

    def redirect_newcomers(self) -> list[tuple[int, int]]:
        """Newcomers that are ready but are needed more at another stage, and that stage. One that was sent to another
        stage before is sent on only to a stage without any peer: loads change while it prepares, and back again."""
        found: list[tuple[int, int]] = []
        for peer in sorted(self.candidates & self.coming):
            stage = self.balance.better(self.stages, peer)
            if stage is not None and (self.peers[peer].standing is Standing.COMING or not self.stages[stage]):
                self._redirect(peer, stage)
                found.append((peer, stage))
        return found

    def _redirect(self, peer: int, stage: int) -> None:
        self.peers[peer].stage, self.peers[peer].standing = stage, Standing.REDIRECTED
        self.forget_process(peer)

    def admit_in_mid_step(self) -> None:
        """The step cannot continue because of the last replica of a stage. Newcomers do not wait for the end of the
        step: one that has got the state of that stage can continue without the replica."""
        self._admits_in_mid_step = True

    # ---------------------------------------------------------------------------------------------------- who goes

    def begin_moves(self, now_s: float) -> list[MoveReport]:
        """Members that begin to move now: they will leave their stages between two steps."""
        if self.view is None or self.vacant:
            return []
        staying = {peer for peer in self.present if self.peers[peer].destination is None}
        live = [self.live(stage) & staying for stage in range(self._n_stages)]
        may_move = {peer for peers in live if len(peers) > 1 for peer in peers}
        moves = self.balance.moves(now_s, self.stages, may_move)
        for move in moves:
            self.peers[move.peer].destination = move.dst
        return [MoveReport(move.peer, move.src, move.dst) for move in moves]

    def on_leaving(self, peer: int) -> bool:
        """A member wants to leave. True if its stage has no other replica."""
        self.peers[peer].destination = OUT
        return self.is_last_of_stage(peer)

    def is_last_of_stage(self, peer: int) -> bool:
        """Whether no other replica of a member's stage is there."""
        return not self.live(self.peers[peer].stage) - {peer}

    def lose(self, now_s: float, peer: int, is_dead: bool, next_view: ev.View | None = None) -> bool:
        """A peer is gone; `is_dead`: its process has ended. False if it was the last replica of its stage: then it
        stays a member, and is missing. `next_view` is being made durable: a peer that leaves with it does not count as
        a replica."""
        known = self.peers[peer]
        state, is_member = known.state, peer in self.admissions
        if is_dead:
            known.end_wait()
        elif state or is_member and not known.is_joining or known.is_awaited:
            known.silent_since_s, known.last_version = now_s, state.version if state else None
        self.dismiss(peer)
        known.state = None
        if not is_member:
            return True
        others = self.live(known.stage) & (next_view or self.current_view).by_peer.keys() - {peer}
        known.standing = Standing.LOST if known.is_joining or others else Standing.MISSING
        return known.standing is Standing.LOST

    def withdraw(self, peers: Collection[int]) -> None:
        """Members that are there leave with the next view: a stage of theirs continues without them. They are not
        disconnected, and may be candidates afterwards."""
        for peer in self.present.intersection(peers):
            self.peers[peer].standing = Standing.WITHDRAWN

    def dismiss(self, peer: int) -> None:
        """A peer is gone: it is no candidate, and is not expected. A newcomer's id may outlive what is known of it."""
        known = self.peers.get(peer)
        if known is None:
            return
        known.is_candidate = False
        if known.standing in EXPECTED:
            known.standing = Standing.ABSENT

    def forget_the_gone(self, now_s: float) -> None:
        """Stop to expect newcomers that asked and did not come, and forget the longest gone of those that are neither
        in the run nor heard. A peer that was evicted is known by its stage and address if it comes back; once it is
        forgotten it has to ask again. Peers of the plan are always known."""
        for peer in self.ids.expire(now_s):
            self.dismiss(peer)
        awaited = {peer for peer, known in self.peers.items() if known.is_awaited}
        kept = self.members | self.coming | set(self._planned) | awaited
        reachable = {peer for peer, _ in self.leases}
        for peer in self.ids.forget(list(self.peers), kept | reachable):
            del self.peers[peer]

    # ------------------------------------------------------------------------------------------------------- views

    def on_committed(self, n_committed: int) -> None:
        """A step is committed, so every member that was joining has taken part in it."""
        self._end_joining()
        self._admits_in_mid_step = False
        for known in self.peers.values():
            if known.last_version is not None and known.last_version < n_committed:
                known.end_wait()  # its state is outdated

    def _end_joining(self) -> None:
        for known in self.peers.values():
            if known.is_joining:
                known.is_joining, known.state = False, None

    def first_view(self, coordinator_term: int, start: ev.Checkpoint) -> ev.View:
        """All peers of the plan, with the state of the checkpoint `start`."""
        members = tuple(self._member(peer, 1, 0) for peer in self._planned)
        view = ev.View(1, coordinator_term, start.generation, members, (1,) * self._n_stages, start.version)
        return replace(view, parts=start.parts, n_reseeds=start.n_reseeds)

    def returning(self, n_committed: int) -> set[int]:
        """Candidates that need not wait since they come and go too often."""
        return {peer for peer in self.candidates if self.peers[peer].may_return(n_committed)}

    @property
    def joining_states(self) -> dict[int, ev.StateName]:
        """The states that joining members hold."""
        return {peer: state for peer in self.joining if (state := self.peers[peer].state)}

    def next_view(
        self,
        between_steps: bool,
        n_committed: int,
        records: Iterable[ev.Record],
        checkpoint: ev.Checkpoint | None,
        returning: ReturningMembers = NO_RETURNING_MEMBERS,
    ) -> ev.View | None:
        """The view that the changes so far ask for now, if any; its `results` are still to be filled in. `checkpoint`:
        the last complete one, to which the run may go back; None if it cannot."""
        records = tuple(records)
        replacements = self._replacements(n_committed, records)
        filled = self._stages_of(replacements)
        vacant = set(self.vacant) - filled
        lost = self.lost_stages(n_committed, records)
        orphans = {peer for peer in self.joining if self.peers[peer].stage in lost}  # no peer can give them a state
        if checkpoint and lost and not replacements and not orphans and vacant <= self._stages_of(self.candidates):
            return self.roll_back(checkpoint)
        leaving = self._leaving_now(between_steps, filled)
        if between_steps:
            self._call_off_moves(leaving)
        leaving |= orphans
        admits = (between_steps or self._admits_in_mid_step) and not vacant
        joining = self.returning(n_committed) - replacements if admits else set[int]()
        if not leaving and not joining and not replacements and not returning.joining and not returning.joined:
            return None
        number, continued = self.current_view.next_number(self._coordinator_term)
        changed = self._stages_of(peer for peer in leaving if not self.peers[peer].is_joining) | filled
        staying = self._staying(leaving | replacements, n_committed, changed)
        first_step = n_committed + 1 + self._delay_steps  # the first that is not under way yet
        new = [self._member(peer, number, n_committed) for peer in replacements]
        new += [self._member(peer, number, first_step) for peer in joining]
        new += [self._member(peer, number, returning.first_step) for peer in returning.joining]
        joining |= returning.joining
        joined = returning.joined - leaving
        staying = [replace(m, first_step=first_step) if m.peer in joined else m for m in staying]
        # The servers of a pool share the rest of a step again, also with one that has sent what it had: its part has to
        # be sent in another round, whatever its stage. A step may be under way even if the view comes between two:
        # the members begin the next one while the view is made durable.
        again = set(range(self._n_stages)) if self._is_pool else changed
        return replace(
            self.current_view,
            number=number,
            continued=continued,
            members=_in_order([*staying, *new]),
            stage_views=tuple(number if s in again else v for s, v in enumerate(self.current_view.stage_views)),
            n_committed=n_committed,
            records=records,
            rolled_back=False,
            results=(),
            joining=tuple(sorted((self.joining - leaving - replacements - joined) | joining)),
            joins=self.current_view.joins if returning.joins is None else returning.joins,
        )

    def _up_to_date(self, n_committed: int, records: Sequence[ev.Record]) -> set[int]:
        """Peers that hold the committed version of their stage and have no part in its steps yet: candidates, and
        members that have just joined."""
        if self.view is None:
            return set()
        rounds = records[-1].rounds if records and records[-1].step == n_committed - 1 else ()
        committed = ev.StateName(self.view.generation, n_committed, rounds)
        return {peer for peer in self.candidates | self.joining if self.peers[peer].state == committed}

    def _replacements(self, n_committed: int, records: Sequence[ev.Record]) -> set[int]:
        """The peers that fill a vacant stage."""
        vacant = self.vacant
        return {peer for peer in self._up_to_date(n_committed, records) if self.peers[peer].stage in vacant}

    def replaceable(self, n_committed: int, records: Sequence[ev.Record]) -> set[int]:
        """Stages that can continue without any of their replicas, since another peer holds their state."""
        return self._stages_of(self._up_to_date(n_committed, records))

    @property
    def deserted(self) -> list[int]:
        """Vacant stages that no peer may fill: no silent peer is awaited, and no candidate or joining member is
        there."""
        fillers = self._stages_of(self.candidates | self.joining)
        return [stage for stage in self.vacant if stage not in fillers and not self.awaited(stage)]

    def lost_stages(self, n_committed: int, records: Sequence[ev.Record]) -> list[int]:
        """Vacant stages whose committed version is lost, as far as is known: no peer that is there holds it, and no
        silent peer is awaited that may hold it."""
        filled = self._stages_of(self._replacements(n_committed, records))
        return [stage for stage in self.vacant if stage not in filled and not self.awaited(stage)]

    def _leaving_now(self, between_steps: bool, filled: Collection[int]) -> set[int]:
        """Lost members, missing ones whose stage has a replica again or is one of `filled`, and between two steps those
        that want to go and leave another replica behind."""
        leaving = self.lost
        for peer in self.missing:
            if self.peers[peer].stage in filled or self.live(self.peers[peer].stage):
                leaving.add(peer)
        for peer in sorted(self.members) if between_steps else ():
            known = self.peers[peer]
            if known.destination is not None and self.live(known.stage) - leaving - {peer}:
                leaving.add(peer)
        return leaving

    def _call_off_moves(self, leaving: Collection[int]) -> None:
        """Members that cannot move between these two steps, since their stage has no other replica, stay."""
        for peer in self.members.difference(leaving):
            if not self.peers[peer].is_leaving:
                self.peers[peer].destination = None

    def _staying(self, leaving: set[int], n_committed: int, changed: set[int]) -> list[ev.Member]:
        """The members that stay. In `changed` stages rounds start again, and every member with the state takes part."""
        staying: list[ev.Member] = []
        for member in self.current_view.members:
            if member.peer in leaving:
                continue
            if member.stage in changed and not self.peers[member.peer].is_joining:
                member = replace(member, first_step=min(member.first_step, n_committed))
            staying.append(member)
        return staying

    def roll_back(self, checkpoint: ev.Checkpoint) -> ev.View:
        """A new generation, at the last complete checkpoint, of all peers that are there. A missing member stays if its
        stage would be empty without it."""
        number, continued = self.current_view.next_number(self._coordinator_term)
        candidates = self.candidates
        has_others = self._stages_of(self.present | candidates)
        missing = {peer for peer in self.missing if self.peers[peer].stage in has_others}
        staying = self._staying(self.lost | missing, checkpoint.version, set())
        joining = [self._member(peer, number, 0) for peer in candidates]
        return replace(
            self.current_view,
            number=number,
            continued=continued,
            generation=self.current_view.generation + 1,
            members=tuple(replace(member, first_step=0) for member in _in_order([*staying, *joining])),
            stage_views=(number,) * self._n_stages,
            n_committed=checkpoint.version,
            records=(),
            rolled_back=True,
            results=(),
            joining=(),
            parts=checkpoint.parts,
        )

    def _member(self, peer: int, admission: int, first_step: int) -> ev.Member:
        known = self.peers[peer]
        return ev.Member(peer, known.stage, admission, known.address or "", known.process or 0, first_step, known.disk)

    def adopt(self, view: ev.View, now_s: float = 0.0) -> set[int]:
        """The view is durable; the peers that wanted to go and have left with it."""
        before, self.view = self.view, view
        left_out = self.members - view.by_peer.keys()
        evicted = {peer for peer in left_out if self.peers[peer].standing in (Standing.LOST, Standing.MISSING)}
        for peer in left_out & self.joining:
            if self.peers[peer].destination is None:
                self.peers[peer].silent_since_s = now_s
        if view.rolled_back:
            self._forget_generation(view)
        for peer in evicted:
            self.peers[peer].on_evicted(view.n_committed)
        for peer in left_out:
            if self.peers[peer].is_awaited:
                self.peers[peer].last_version = view.n_committed
        self.admissions = {member.peer: member.admission for member in view.members}
        for member in view.members:
            self._on_membership(member, before.by_peer.get(member.peer) if before else None)
        gone_by_choice = {peer for peer in left_out - evicted if self.peers[peer].destination is not None}
        for peer in left_out:
            self._on_left_out(peer, peer in gone_by_choice)
        return gone_by_choice

    def _forget_generation(self, view: ev.View) -> None:
        """The run goes back: what others than its members hold is void, and steps are counted from there."""
        self._admits_in_mid_step = False
        for peer, known in self.peers.items():
            known.state = None
            known.n_evictions = known.evicted_at = 0
            if peer not in view.by_peer:
                known.end_wait()

    def _on_membership(self, member: ev.Member, before: ev.Member | None) -> None:
        """A view has this member; `before`: as the last view had it."""
        known = self.peers[member.peer]
        known.is_joining = member.peer in self.current_view.joining
        if before is None or before.process != member.process:
            known.destination = None  # what a replacement that was a member wants stays
        is_admitted = before is None or before.admission != member.admission
        if is_admitted or known.is_present:
            known.admit(known.is_joining)

    def _on_left_out(self, peer: int, is_by_choice: bool) -> None:
        """The view leaves out this member."""
        known = self.peers[peer]
        destination, known.destination = known.destination, None
        known.standing, known.is_joining = Standing.ABSENT, False
        if is_by_choice and destination is not None and destination != OUT:
            self._redirect(peer, destination)


def _in_order(members: Iterable[ev.Member]) -> tuple[ev.Member, ...]:
    return tuple(sorted(members, key=lambda member: member.peer))
