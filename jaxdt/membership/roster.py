"""The roster of a run: the members of the view, the peers that want in or out, and the members that are missing.

The coordinator keeps the roster. A change needs a view, and `next_view` makes one when there is a change to make. A
lost member leaves at once if its stage has another replica. Peers that want to leave or to join wait for the end of a
step, where that costs nothing. A member that moves to another stage leaves like that and comes back as a newcomer,
under its own id.

The last replica of a stage is never evicted on mere silence (step protocol, Sec. 6.1): the run waits for it. A peer
outside of the view that holds the committed version of a stage without a live replica takes its place at once, and
nothing is lost (Sec. 6.2). All members go back to the last complete checkpoint, with a newcomer in the stage, only if
no peer is left that may hold that version.
"""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from jaxdt.membership.agreement import NO_INTAKE, Intake
from jaxdt.membership.checkpoint_progress import Holder
from jaxdt.membership.liveness.absences import Absences
from jaxdt.membership.liveness.eviction_history import EvictionHistory
from jaxdt.membership.newcomers import IDS_PER_TERM, Newcomers
from jaxdt.membership.rebalance_api import Balance, ByNumber
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import MoveReport


class Roster:
    """`stage_of` is the plan's; newcomers are added to it. `delay_steps`: how many steps are under way beside the first
    that is not committed. `balance` says which stage needs a peer; `moving[p]` is the stage for which member p will
    leave its own. `absences`: the silent peers that the run waits for. `workers`: of a pool, None without
    one; no newcomer may get their ids."""

    def __init__(
        self,
        stage_of: Mapping[int, int],
        n_stages: int,
        coordinator_term: int,
        delay_steps: int = 0,
        balance: Balance | None = None,
        stage_grace_s: float = 0.0,
        workers: Collection[int] | None = None,
    ):
        self.stage_of = dict(stage_of)
        self.balance = balance or ByNumber()
        self.moving: dict[int, int] = {}
        self.addresses: dict[int, str] = {}
        self.processes: dict[int, int] = {}  # of the last hello
        self.disks: dict[int, str] = {}  # on which each peer keeps its parts of checkpoints
        self.view: ev.View | None = None
        self.admissions: dict[int, int] = {}  # of the members
        self.candidates: set[int] = set()
        self.leaving: set[int] = set()
        self.lost: set[int] = set()
        self.missing: set[int] = set()
        self.absences = Absences(stage_grace_s)
        self._states: dict[int, ev.StateName] = {}  # what candidates and joining members hold
        self._delay_steps = delay_steps
        self._member_processes: dict[int, int] = {}
        self._joining: set[int] = set()
        self._aside: set[int] = set()  # living members that leave with the next view, since others do
        self._admits_in_mid_step = False
        self._is_pool = workers is not None
        self._newcomers = Newcomers(max([*stage_of, *(workers or ())]) + 1 + (coordinator_term - 1) * IDS_PER_TERM)
        self._evictions = EvictionHistory()
        self._n_stages = n_stages
        self._coordinator_term = coordinator_term
        self._planned = sorted(stage_of)

    # ------------------------------------------------------------------------------------------------- who is there

    @property
    def current_view(self) -> ev.View:
        """The view, for what is only asked once there is one."""
        assert self.view is not None
        return self.view

    @property
    def members(self) -> set[int]:
        return set(self.admissions)

    @property
    def coming(self) -> set[int]:
        """Newcomers that were told a stage, and members on their way to another one."""
        return self._newcomers.coming

    @property
    def present(self) -> set[int]:
        """The members that are there."""
        return self.members - self.lost - self.missing

    @property
    def joining(self) -> set[int]:
        """Members whose state may still be on its way: the step waits for it."""
        return set(self._joining)

    def live(self, stage: int) -> set[int]:
        """The members that hold their stage's state and are there."""
        absent = self.lost | self.missing | self._joining
        return {peer for peer in self.current_view.stage_peers(stage) if peer not in absent}

    @property
    def holders(self) -> list[Holder]:
        """The members that are there, with their disks."""
        present = sorted(self.members - self.lost - self.missing)
        return [Holder(peer, self.stage_of[peer], self.disks.get(peer, "")) for peer in present]

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
        present = (self.members - self.lost - self.missing - self.leaving) | self.coming
        stage_of = {peer: self.moving.get(peer, self.stage_of[peer]) for peer in present}
        return [{peer for peer in present if stage_of[peer] == stage} for stage in range(self._n_stages)]

    def name(self, peer: int) -> str:
        """A peer, for people."""
        return f"peer {peer} (stage {self.stage_of.get(peer, '?')})"

    # --------------------------------------------------------------------------------------------------- who comes

    def recall(self, view: ev.View, steps_since: bool) -> None:
        """The last view of a coordinator that has died; `steps_since`: a step was committed in that view."""
        self.stage_of |= {member.peer: member.stage for member in view.members}
        self.addresses |= {member.peer: member.address for member in view.members}
        self.processes |= {member.peer: member.process for member in view.members}
        self.disks |= {member.peer: member.disk for member in view.members}
        self.adopt(view)
        if steps_since:
            self._joining.clear()

    def hello(self, peer: int, hello: ev.Hello) -> bool:
        """A peer has said hello. True if it is a member, but another process than the one that was admitted."""
        process = hello.process
        if self.processes.get(peer) != process:
            self.candidates.discard(peer)  # its earlier process was ready, this one is not
            self._states.pop(peer, None)
            self.absences.end(peer)
        self.addresses[peer] = hello.address
        self.processes[peer] = process
        self.disks[peer] = hello.disk
        return self._member_processes.get(peer, process) != process

    def reach(self, peer: int) -> ev.Connect:
        """Connect again to a peer whose connections were ended, at the address that it gave."""
        return ev.Connect(peer, self.addresses.get(peer, ""))

    def ready(self, peer: int, state: ev.StateName | None) -> None:
        """A peer outside of the view is ready to compute, or a joining member has its state. `state`: what it holds of
        the run, if it holds something. A lost member is as good as outside, also one that was joining."""
        self.absences.end(peer)
        if peer not in self._joining - self.lost:
            self.candidates.add(peer)
        if state is not None:
            self._states[peer] = state

    def returned(self, peer: int) -> None:
        """The last replica of a stage was silent, and is there again."""
        self.missing.discard(peer)
        self.absences.end(peer)

    @property
    def servers(self) -> list[set[int]]:
        """The peers of each stage that a pool's workers may compute for: before the first view, those that have said
        hello."""
        if self.view:
            return [self.live(stage) for stage in range(self._n_stages)]
        return [{p for p in self.addresses if self.stage_of.get(p) == stage} for stage in range(self._n_stages)]

    def new_id(self) -> int:
        """An unused peer id."""
        return self._newcomers.new_id()

    @property
    def first_newcomer(self) -> int:
        """The least peer id that a newcomer may get in this term."""
        return self._newcomers.first_id

    def newcomer(self, now_s: float, temporary_id: int, certified: int | None) -> tuple[int, int]:
        """A newcomer's peer id, and the stage that needs a peer most. `certified`: the id in its certificate."""
        known = self._newcomers.known_as(temporary_id)
        if known is not None:
            return known, self.stage_of[known]
        stage = self.balance.stage_for(self.stages)
        peer = self._newcomers.admit(now_s, temporary_id, certified)
        self.stage_of[peer] = stage
        return peer, stage

    def arrived(self, peer: int) -> list[int]:
        """A peer has come under its own id; the temporary ids that it asked under."""
        return self._newcomers.arrived(peer)

    def misplaced(self, hello: ev.Hello) -> bool:
        """Whether a peer says hello for a stage that it is not meant for any more; its state then does not count."""
        if self.stage_of[hello.peer] == hello.stage:
            return False
        self.absences.end(hello.peer)
        self._states.pop(hello.peer, None)
        self.candidates.discard(hello.peer)
        self.processes.pop(hello.peer, None)
        return True

    def reassign(self) -> list[tuple[int, int]]:
        """Newcomers that are ready but are needed more at another stage, and that stage. One that was sent to another
        stage before is sent on only to a stage without any peer: loads change while it prepares, and back again."""
        found: list[tuple[int, int]] = []
        for peer in sorted(self.candidates & self.coming):
            stage = self.balance.better(self.stages, peer)
            if stage is not None and (peer not in self._newcomers.sent or not self.stages[stage]):
                self._send_to(peer, stage)
                found.append((peer, stage))
        return found

    def _send_to(self, peer: int, stage: int) -> None:
        self.stage_of[peer] = stage
        self._newcomers.coming.add(peer)
        self._newcomers.sent.add(peer)
        self._states.pop(peer, None)
        self.candidates.discard(peer)
        self.processes.pop(peer, None)

    def admit_in_mid_step(self) -> None:
        """The step cannot continue because of the last replica of a stage. Newcomers do not wait for the end of the
        step: one that has got the state of that stage can continue without the replica."""
        self._admits_in_mid_step = True

    # ---------------------------------------------------------------------------------------------------- who goes

    def move_due(self, now_s: float) -> list[MoveReport]:
        """Members that begin to move now: they will leave their stages between two steps."""
        if self.view is None or self.vacant:
            return []
        live = [self.live(stage) - self.leaving - set(self.moving) for stage in range(self._n_stages)]
        may_move = {peer for peers in live if len(peers) > 1 for peer in peers}
        moves = self.balance.moves(now_s, self.stages, may_move)
        self.moving |= {move.peer: move.dst for move in moves}
        return [MoveReport(move.peer, move.src, move.dst) for move in moves]

    def leaves(self, peer: int) -> bool:
        """A member wants to leave. True if its stage has no other replica."""
        self.leaving.add(peer)
        return self.is_last_of_stage(peer)

    def is_last_of_stage(self, peer: int) -> bool:
        """Whether no other replica of a member's stage is there."""
        return not self.live(self.stage_of[peer]) - {peer}

    def lose(self, now_s: float, peer: int, is_dead: bool, next_view: ev.View | None = None) -> bool:
        """A peer is gone; `is_dead`: its process has ended. False if it was the last replica of its stage: then it
        stays a member, and is missing. `next_view` is being made durable: a peer that leaves with it does not count as
        a replica."""
        state = self._states.pop(peer, None)
        if is_dead:
            self.absences.end(peer)
        elif state or peer in self.members - self._joining or peer in self.absences:
            self.absences.add(now_s, peer, self.stage_of[peer], state.version if state else None)
        self.dismiss(peer)
        staying = (next_view or self.current_view).by_peer.keys()
        if peer not in self.members or peer in self._joining or self.live(self.stage_of[peer]) & staying - {peer}:
            self.lost |= {peer} & self.members
            return True
        self.missing.add(peer)
        return False

    def put_aside(self, peers: Collection[int]) -> None:
        """Members that are there leave with the next view: a stage of theirs continues without them. They are not
        disconnected, and may be candidates afterwards."""
        self._aside |= self.present.intersection(peers)
        self.lost |= self._aside

    def dismiss(self, peer: int) -> None:
        """A peer that is no member is gone."""
        self.candidates.discard(peer)
        self._newcomers.coming.discard(peer)

    def let_go(self, now_s: float, reachable: Container[int]) -> None:
        """Stop to expect newcomers that asked and did not come, and forget the longest gone of those that are neither
        in the run nor reachable. A peer that was evicted is known by its stage and address if it comes back; once it is
        forgotten it has to ask again. Peers of the plan are always known."""
        self._newcomers.expire(now_s)
        known = self.members | self.coming | set(self._planned) | {p for p in self.stage_of if p in self.absences}
        for peer in self._newcomers.forget(list(self.stage_of), known, reachable):
            for entries in (self.stage_of, self.addresses, self.processes, self.disks):
                entries.pop(peer, None)
            self._evictions.forget(peer)
            self.leaving.discard(peer)

    # ------------------------------------------------------------------------------------------------------- views

    def committed(self, n_committed: int) -> None:
        """A step is committed, so every member that was joining has taken part in it."""
        for peer in self._joining:
            self._states.pop(peer, None)
        self._joining.clear()
        self._admits_in_mid_step = False
        self.absences.committed(n_committed)

    def first_view(self, coordinator_term: int, start: ev.Checkpoint) -> ev.View:
        """All peers of the plan, with the state of the checkpoint `start`."""
        members = tuple(self._member(peer, 1, 0) for peer in self._planned)
        view = ev.View(1, coordinator_term, start.generation, members, (1,) * self._n_stages, start.version)
        return replace(view, parts=start.parts, n_reseeds=start.n_reseeds)

    def returning(self, n_committed: int) -> set[int]:
        """Candidates that need not wait since they come and go too often."""
        return {peer for peer in self.candidates if self._evictions.may_return(peer, n_committed)}

    @property
    def joining_states(self) -> dict[int, ev.StateName]:
        """The states that joining members hold."""
        return {peer: state for peer, state in self._states.items() if peer in self._joining - self.lost}

    def next_view(
        self,
        between_steps: bool,
        n_committed: int,
        records: Iterable[ev.Record],
        checkpoint: ev.Checkpoint | None,
        intake: Intake = NO_INTAKE,
    ) -> ev.View | None:
        """The view that the changes so far ask for now, if any; its `results` are still to be filled in. `checkpoint`:
        the last complete one, to which the run may go back; None if it cannot."""
        records = tuple(records)
        stand_ins = self._stand_ins(n_committed, records)
        filled = {self.stage_of[peer] for peer in stand_ins}
        vacant = set(self.vacant) - filled
        orphans = self._orphans(vacant)
        if checkpoint and not stand_ins and not orphans and self._must_roll_back(vacant):
            return self.roll_back(checkpoint)
        leaving = self._leaving_now(between_steps, filled) | orphans
        admits = (between_steps or self._admits_in_mid_step) and not vacant
        joining = self.returning(n_committed) - stand_ins if admits else set[int]()
        if not leaving and not joining and not stand_ins and not intake.joining and not intake.joined:
            return None
        number, continued = self.current_view.next_number(self._coordinator_term)
        changed = {self.stage_of[peer] for peer in leaving - self._joining} | filled
        staying = self._staying(leaving | stand_ins, n_committed, changed)
        first_step = n_committed + 1 + self._delay_steps  # the first that is not under way yet
        new = [self._member(peer, number, n_committed) for peer in stand_ins]
        new += [self._member(peer, number, first_step) for peer in joining]
        new += [self._member(peer, number, intake.first_step) for peer in intake.joining]
        joining |= intake.joining
        joined = intake.joined - leaving
        staying = [replace(m, first_step=first_step) if m.peer in joined else m for m in staying]
        # The servers of a pool share the rest of a step again, also with one that has sent what it had: its part has to
        # be sent in another round, whatever its stage. A step may be under way even if the view comes between two:
        # the members begin the next one while the view is made durable.
        anew = set(range(self._n_stages)) if self._is_pool else changed
        return replace(
            self.current_view,
            number=number,
            continued=continued,
            members=_in_order([*staying, *new]),
            stage_views=tuple(number if s in anew else v for s, v in enumerate(self.current_view.stage_views)),
            n_committed=n_committed,
            records=records,
            rolled_back=False,
            results=(),
            joining=tuple(sorted((self._joining - leaving - stand_ins - joined) | joining)),
            joins=self.current_view.joins if intake.joins is None else intake.joins,
        )

    def _standing_by(self, n_committed: int, records: Sequence[ev.Record]) -> set[int]:
        """Peers that hold the committed version of their stage and have no part in its steps yet: candidates, and
        members that have just joined."""
        if self.view is None:
            return set()
        rounds = records[-1].rounds if records and records[-1].step == n_committed - 1 else ()
        committed = ev.StateName(self.view.generation, n_committed, rounds)
        return {peer for peer in self.candidates | (self._joining - self.lost) if self._states.get(peer) == committed}

    def _stand_ins(self, n_committed: int, records: Sequence[ev.Record]) -> set[int]:
        """The given peers whose stage is vacant."""
        vacant = self.vacant
        return {peer for peer in self._standing_by(n_committed, records) if self.stage_of[peer] in vacant}

    def replaceable(self, n_committed: int, records: Sequence[ev.Record]) -> set[int]:
        """Stages that can continue without any of their replicas, since somebody stands by who holds their state."""
        return {self.stage_of[peer] for peer in self._standing_by(n_committed, records)}

    def _orphans(self, vacant: Collection[int]) -> set[int]:
        """Joining members that nobody is left to give a state to. They are evicted, and say whether they have it."""
        lost = {stage for stage in vacant if not self.absences.of_stage(stage)}
        return {peer for peer in self._joining - self.lost if self.stage_of[peer] in lost}

    def _must_roll_back(self, vacant: Collection[int]) -> bool:
        """Whether no peer is left that may hold a stage's committed version, and all vacant stages have newcomers."""
        is_lost = any(not self.absences.of_stage(stage) for stage in vacant)
        return is_lost and set(vacant) <= {self.stage_of[peer] for peer in self.candidates}

    @property
    def deserted(self) -> list[int]:
        """Vacant stages that no peer may fill: no silent peer is awaited, and no candidate or joining member is
        there."""
        coming = {self.stage_of[peer] for peer in self.candidates | (self._joining - self.lost)}
        return [stage for stage in self.vacant if stage not in coming and not self.absences.of_stage(stage)]

    def lost_stage(self, n_committed: int, records: Sequence[ev.Record]) -> int | None:
        """A vacant stage whose committed version is lost, as far as is known."""
        filled = {self.stage_of[peer] for peer in self._stand_ins(n_committed, records)}
        lost = [stage for stage in self.vacant if stage not in filled and not self.absences.of_stage(stage)]
        return lost[0] if lost else None

    def _leaving_now(self, between_steps: bool, filled: Collection[int]) -> set[int]:
        """Lost members, missing ones whose stage has a replica again or is one of `filled`, and between two steps those
        that want to go and leave another replica behind."""
        leaving = set(self.lost)
        leaving |= {p for p in self.missing if self.stage_of[p] in filled or self.live(self.stage_of[p])}
        if between_steps:
            for peer in sorted(self.members & (self.leaving | set(self.moving))):
                if self.live(self.stage_of[peer]) - leaving - {peer}:
                    leaving.add(peer)
            self.moving = {peer: stage for peer, stage in self.moving.items() if peer in leaving}
        return leaving

    def _staying(self, leaving: set[int], n_committed: int, changed: set[int]) -> list[ev.Member]:
        """The members that stay. In `changed` stages rounds start again, and every member with the state takes part."""
        staying: list[ev.Member] = []
        for member in self.current_view.members:
            if member.peer in leaving:
                continue
            if member.stage in changed and member.peer not in self._joining:
                member = replace(member, first_step=min(member.first_step, n_committed))
            staying.append(member)
        return staying

    def roll_back(self, checkpoint: ev.Checkpoint) -> ev.View:
        """A new generation, at the last complete checkpoint, of all peers that are there. A missing member stays if its
        stage would be empty without it."""
        number, continued = self.current_view.next_number(self._coordinator_term)
        present = [peer for peer in self.members - self.lost - self.missing] + list(self.candidates)
        has_others = {self.stage_of[peer] for peer in present}
        missing = {peer for peer in self.missing if self.stage_of[peer] in has_others}
        staying = self._staying(self.lost | missing, checkpoint.version, set())
        joining = [self._member(peer, number, 0) for peer in self.candidates]
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
        address, process = self.addresses.get(peer, ""), self.processes.get(peer, 0)
        disk = self.disks.get(peer, "")
        return ev.Member(peer, self.stage_of[peer], admission, address, process, first_step, disk)

    def adopt(self, view: ev.View, now_s: float = 0.0) -> set[int]:
        """The view is durable; the peers that wanted to go and have left with it."""
        before = self.admissions
        for peer in self._joining - view.by_peer.keys() - self.lost - self.leaving - set(self.moving):
            self.absences.add(now_s, peer, self.stage_of[peer])
        if view.rolled_back:
            self._admits_in_mid_step = False
            self._evictions.clear()
            self._states.clear()
            self.absences.rolled_back(view.by_peer.keys())
        evicted = (self.lost | self.missing) - view.by_peer.keys() - self._aside
        self._evictions.add(evicted, view.n_committed)
        self.absences.evicted(self.members - view.by_peer.keys(), view.n_committed)
        staying = {member.peer for member in view.members if self._member_processes.get(member.peer) == member.process}
        self.view = view
        self.admissions = {member.peer: member.admission for member in view.members}
        self._member_processes = {member.peer: member.process for member in view.members}
        self._joining = set(view.joining)
        self._newcomers.became_members(self.members)
        left = (self.leaving | set(self.moving)) - self.members - evicted
        for peer in left & set(self.moving) - self.leaving:
            self._send_to(peer, self.moving[peer])
        self.moving = {peer: stage for peer, stage in self.moving.items() if peer in self.members}
        self._aside &= self.members
        for peer in before:
            if self.admissions.get(peer) != before[peer]:  # gone, or admitted again
                self.lost.discard(peer)
                self.missing.discard(peer)
                self.leaving -= {peer} - staying  # a stand-in still wants to leave
        full_members = self.members - self.lost - self.missing  # others may have said already that they are ready
        self.candidates -= full_members
        self._states = {p: s for p, s in self._states.items() if p in self._joining or p not in full_members}
        return left


def _in_order(members: Iterable[ev.Member]) -> tuple[ev.Member, ...]:
    return tuple(sorted(members, key=lambda member: member.peer))
