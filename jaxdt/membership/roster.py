"""Who is in the run: the members of the view, those who want in or out, and those who are missing.

Kept by the coordinator. A change needs a view: `next_view` makes it when there is one to make. Who is lost leaves at
once, if its stage has another member; who wants to leave and who wants to join waits for the end of a step, where that
costs nothing. Who moves to another stage leaves like that and comes back as a newcomer to it, under its own id. The
last member of a stage is never put out on mere silence (step protocol, Sec. 6.1): the run waits for
it, or for a newcomer to its stage, with whom everybody goes back to the last complete checkpoint.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from jaxdt.membership.rebalance_api import Balance, ByNumber
from jaxdt.protocol.events import Connect, Hello, Member, Record, Report, View

IDS_PER_TERM = 100_000
FORGIVEN_STEPS = 128  # after so many without another eviction a peer is like any other
BACKOFF_STEPS_MAX = 64
ASKED_S = 120.0  # after so long without a greeting somebody who has asked is not expected any more
GONE_MAX = 256  # newcomers that are gone and would be known if they came back


class Roster:
    """`stage_of` is the plan's; newcomers are added to it. With `delay_steps` as many steps more are under way.
    `balance` says which stage needs a peer; moving[p] is the stage for which member p will leave its own."""

    def __init__(
        self,
        stage_of: Mapping[int, int],
        n_stages: int,
        coordinator_term: int,
        delay_steps: int = 0,
        balance: Balance | None = None,
    ):
        self.stage_of, self._delay_steps = dict(stage_of), delay_steps
        self.balance = balance or ByNumber()
        self.moving: dict[int, int] = {}
        self.addresses: dict[int, str] = {}
        self.processes: dict[int, int] = {}  # by the last hello
        self.view: View | None = None
        self.admissions: dict[int, int] = {}  # of the members
        self.candidates: set[int] = set()
        self.leaving: set[int] = set()
        self.lost: set[int] = set()
        self.missing: set[int] = set()
        self._seated: dict[int, int] = {}
        self._joining: set[int] = set()
        self.coming: set[int] = set()  # newcomers, and members that change stages
        self._sent: set[int] = set()  # those of them who were sent to another stage than the one they were for
        self._asked: dict[int, tuple[int, float]] = {}  # passing name -> peer, and when
        self._gone: dict[int, None] = {}  # newcomers of before, in the order in which they went
        self._evicted: dict[int, tuple[int, int]] = {}  # how often of late, and the step in which it was the last time
        self._n_stages = n_stages
        self._planned = sorted(stage_of)
        self._next_id = max(stage_of) + 1 + (coordinator_term - 1) * IDS_PER_TERM

    @property
    def members(self) -> set[int]:
        return set(self.admissions)

    def known(self, peer: int) -> list[int]:
        """The peer has come under its own name; the passing ones that it asked under."""
        passing = [name for name, (asked, _) in self._asked.items() if asked == peer]
        for name in passing:
            del self._asked[name]
        return passing

    def recall(self, view: View, steps_since: bool) -> None:
        """Who was there for a coordinator that has died; `steps_since`: a step was committed in its last view."""
        self.stage_of |= {member.peer: member.stage for member in view.members}
        self.addresses |= {member.peer: member.address for member in view.members}
        self.processes |= {member.peer: member.process for member in view.members}
        self.adopt(view)
        if steps_since:
            self.committed()

    def hello(self, peer: int, address: str, process: int) -> bool:
        """A peer is there; whether it is a member whose process is another one than the one that was admitted."""
        if self.processes.get(peer) != process:
            self.candidates.discard(peer)  # its process of before was ready, this one is not
        self.addresses[peer], self.processes[peer] = address, process
        return self._seated.get(peer, process) != process

    def reach(self, peer: int) -> Connect:
        """A peer whose connections were ended is reached again where it said that it listens."""
        return Connect(peer, self.addresses.get(peer, ""))

    @property
    def joining(self) -> set[int]:
        """Members whose state may still be on its way: the step waits for it."""
        return set(self._joining)

    def live(self, stage: int) -> set[int]:
        """The members that hold their stage's state and are there."""
        absent = self.lost | self.missing | self._joining
        return {peer for peer in self.view.stage_peers(stage) if peer not in absent}

    @property
    def vacant(self) -> list[int]:
        """Stages without anyone who is there and holds their state."""
        return [stage for stage in range(self._n_stages) if not self.live(stage)]

    @property
    def stages(self) -> list[set[int]]:
        """The peers of each stage that are there or on their way to it."""
        there = (self.members - self.lost - self.missing - self.leaving) | self.coming
        goes_to = {peer: self.moving.get(peer, self.stage_of[peer]) for peer in there}
        return [{peer for peer in there if goes_to[peer] == stage} for stage in range(self._n_stages)]

    def move_due(self, now_s: float) -> list[Report]:
        """Peers begin to move now: they will leave their stages between two steps."""
        if self.view is None or self.vacant:
            return []
        live = [self.live(stage) - self.leaving - set(self.moving) for stage in range(self._n_stages)]
        at_work = {peer for peers in live if len(peers) > 1 for peer in peers}
        found = self.balance.moves(now_s, self.stages, at_work)
        self.moving |= {move.peer: move.dst for move in found}
        return [Report("move", {"peer": move.peer, "stage": move.src, "to_stage": move.dst}) for move in found]

    def leaves(self, peer: int) -> dict:
        """A member wants to leave; a line for people."""
        self.leaving.add(peer)
        return {"peer": peer, "last_of_its_stage": not self.live(self.stage_of[peer]) - {peer}}

    def reassign(self) -> list[tuple[int, int]]:
        """Newcomers that are ready but had better be for another stage, and which. Who was sent somewhere already is
        sent on only to a stage that has nobody: what is measured changes while it prepares, and back again."""
        found = []
        for peer in sorted(self.candidates & self.coming):
            to = self.balance.better(self.stages, peer)
            if to is not None and (peer not in self._sent or not self.stages[to]):
                self._sent_to(peer, to)
                found.append((peer, to))
        return found

    def _sent_to(self, peer: int, stage: int) -> None:
        self.stage_of[peer] = stage
        self.coming.add(peer)
        self._sent.add(peer)
        self.candidates.discard(peer)
        self.processes.pop(peer, None)

    def misplaced(self, hello: Hello) -> bool:
        """Whether a peer greets us from a stage that it is not for any more; what it says of itself does not count."""
        if self.stage_of[hello.peer] == hello.stage:
            return False
        self.candidates.discard(hello.peer)
        self.processes.pop(hello.peer, None)
        return True

    def newcomer(self, now_s: float, passing: int) -> tuple[int, int]:
        """A peer id that nobody had, for who asks under a passing name, and the stage that needs a peer most."""
        if passing in self._asked:
            peer, _ = self._asked[passing]
            return peer, self.stage_of[peer]
        peer, self._next_id = self._next_id, self._next_id + 1
        self.stage_of[peer] = self.balance.stage_for(self.stages)
        self.coming.add(peer)
        self._asked[passing] = (peer, now_s)
        return peer, self.stage_of[peer]

    def let_go(self, now_s: float, here: Container[int]) -> None:
        """Expect nobody any longer who asked and did not come, and forget newcomers that are neither in the run nor
        `here`: all but the last to go. Whoever was put out may come back, and is known by its stage and address then;
        who comes back when that is forgotten has to ask again. Peers of the plan are always known."""
        for passing in [passing for passing, (_, at_s) in self._asked.items() if now_s - at_s > ASKED_S]:
            self.coming.discard(self._asked.pop(passing)[0])
        known = self.members | self.coming | set(self._planned)
        gone = [peer for peer in self.stage_of if peer not in known and peer not in here]
        self._gone = {peer: None for peer in self._gone if peer in gone} | dict.fromkeys(gone)
        for peer in list(self._gone)[:-GONE_MAX]:
            for kept in (self._gone, self.stage_of, self.addresses, self.processes, self._evicted):
                kept.pop(peer, None)
            for kept in (self._sent, self.leaving):
                kept.discard(peer)

    def lose(self, peer: int, next_view: View | None = None) -> bool:
        """A peer is gone; False if it was the last of its stage, and stays a member for want of another. `next_view` is
        being made durable: who leaves with it cannot stand in."""
        self.candidates.discard(peer)
        self.coming.discard(peer)
        stay = (next_view or self.view).by_peer.keys()
        if peer not in self.members or peer in self._joining or self.live(self.stage_of[peer]) & stay - {peer}:
            self.lost |= {peer} & self.members
            return True
        self.missing.add(peer)
        return False

    def committed(self) -> None:
        """A step is committed: whoever was joining has taken part in it."""
        self._joining.clear()

    def first_view(self, coordinator_term: int, generation: int, n_committed: int) -> View:
        """All peers of the plan."""
        members = tuple(self._member(peer, 1, 0) for peer in self._planned)
        return View(1, coordinator_term, generation, members, (1,) * self._n_stages, n_committed)

    def next_view(
        self, between_steps: bool, n_committed: int, records: Iterable[Record], checkpoint: int
    ) -> View | None:
        """The view that the changes so far ask for now, if any; its `results` are still to be filled in. `checkpoint`:
        version of the last complete one."""
        vacant = self.vacant
        if vacant and set(vacant) <= {self.stage_of[peer] for peer in self.candidates}:
            return self.roll_back(checkpoint)
        out = set(self.lost)
        if between_steps:
            for peer in sorted(self.members & (self.leaving | set(self.moving))):
                out |= {peer} if self.live(self.stage_of[peer]) - out - {peer} else set()
            self.moving = {peer: stage for peer, stage in self.moving.items() if peer in out}
        may = between_steps and not vacant
        new = {peer for peer in self.candidates if may and self._has_waited(peer, n_committed)}
        if not out and not new:
            return None
        number = self.view.number + 1
        changed = {self.stage_of[peer] for peer in out - self._joining}
        return replace(
            self.view,
            number=number,
            members=self._members_with(new, out, number, n_committed, changed),
            stage_views=tuple(number if s in changed else v for s, v in enumerate(self.view.stage_views)),
            n_committed=n_committed,
            records=tuple(records),
            rolled_back=False,
            results=(),
            joining=tuple(sorted((self._joining - out) | new)),
        )

    def roll_back(self, checkpoint: int) -> View:
        """A new generation, at the last complete checkpoint, of everyone who is there."""
        number = self.view.number + 1
        everyone = self._members_with(self.candidates, self.lost | self.missing, number, checkpoint, set())
        return replace(
            self.view,
            number=number,
            generation=self.view.generation + 1,
            members=tuple(replace(member, first_step=0) for member in everyone),
            stage_views=(number,) * self._n_stages,
            n_committed=checkpoint,
            records=(),
            rolled_back=True,
            results=(),
            joining=(),
        )

    def name(self, peer: int) -> str:
        """For people."""
        return f"peer {peer} (stage {self.stage_of.get(peer, '?')})"

    def told(self) -> dict:
        """The view; for people."""
        members = {member.peer: member.stage for member in self.view.members}
        return {"view": self.view.number, "members": members, "joining": list(self.view.joining)}

    def adopt(self, view: View) -> set[int]:
        """The view is durable; those who have left with it."""
        before = self.admissions
        self._note_evictions(view)
        self.view, self.admissions = view, {member.peer: member.admission for member in view.members}
        self._seated = {member.peer: member.process for member in view.members}
        self._joining = set(view.joining)
        self.candidates -= self.members
        self.coming -= self.members
        self._sent -= self.members
        left = (self.leaving | set(self.moving)) - self.members - self.lost
        for peer in left & set(self.moving) - self.leaving:
            self._sent_to(peer, self.moving[peer])
        self.moving = {peer: stage for peer, stage in self.moving.items() if peer in self.members}
        for peer in before:
            if self.admissions.get(peer) != before[peer]:  # gone, or here again
                self.lost.discard(peer)
                self.missing.discard(peer)
                self.leaving.discard(peer)
        return left

    def _note_evictions(self, view: View) -> None:
        step = view.n_committed
        known = {} if view.rolled_back else self._evicted
        self._evicted = {peer: (n, at) for peer, (n, at) in known.items() if step - at < FORGIVEN_STEPS}
        for peer in self.lost - {member.peer for member in view.members}:
            self._evicted[peer] = (self._evicted.get(peer, (0, 0))[0] + 1, step)

    def _has_waited(self, peer: int, n_committed: int) -> bool:
        """Who was put out once may come back at once; who is put out again and again, because its link or its machine
        comes and goes, after 2, 4, 8, ... steps: each time it costs the others a deadline."""
        n, at = self._evicted.get(peer, (0, 0))
        return n < 2 or n_committed - at >= min(2 ** (n - 1), BACKOFF_STEPS_MAX)

    def _members_with(
        self, new: Iterable[int], out: set[int], number: int, n_committed: int, changed: set[int]
    ) -> tuple[Member, ...]:
        """Who comes computes from the first step on that is not under way yet. In stages where rounds begin anew
        everyone takes part who has the state."""
        kept = [member for member in self.view.members if member.peer not in out]
        kept = [
            replace(member, first_step=min(member.first_step, n_committed))
            if member.stage in changed and member.peer not in self._joining
            else member
            for member in kept
        ]
        come = [self._member(peer, number, n_committed + 1 + self._delay_steps) for peer in new]
        return tuple(sorted([*kept, *come], key=lambda member: member.peer))

    def _member(self, peer: int, admission: int, first_step: int) -> Member:
        address, process = self.addresses.get(peer, ""), self.processes.get(peer, 0)
        return Member(peer, self.stage_of[peer], admission, address, process, first_step)
