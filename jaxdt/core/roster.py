"""Who is in the run: the members of the view, those who want in or out, and those who are missing.

Kept by the coordinator. A change needs a view: `next_view` makes it when there is one to make. Who is lost leaves at
once, if its stage has another member; who wants to leave and who wants to join waits for the end of a step, where that
costs nothing. The last member of a stage is never put out on mere silence (step protocol, Sec. 6.1): the run waits for
it, or for a newcomer to its stage, with whom everybody goes back to the last complete checkpoint.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from jaxdt.core.events import Member, Record, View

IDS_PER_REIGN = 1000
FORGIVEN_STEPS = 128  # after so many without another eviction a peer is like any other
BACKOFF_STEPS_MAX = 64


class Roster:
    """`stage_of` is the plan's; newcomers are added to it."""

    def __init__(self, stage_of: Mapping[int, int], n_stages: int, reign: int):
        self.stage_of = dict(stage_of)
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
        self._coming: set[int] = set()
        self._asked: dict[int, int] = {}  # passing name -> peer
        self._evicted: dict[int, tuple[int, int]] = {}  # how often of late, and the step in which it was the last time
        self._n_stages = n_stages
        self._planned = sorted(stage_of)
        self._next_id = max(stage_of) + 1 + (reign - 1) * IDS_PER_REIGN

    @property
    def members(self) -> set[int]:
        return set(self.admissions)

    def known(self, peer: int) -> list[int]:
        """The peer has come under its own name; the passing ones that it asked under."""
        passing = [name for name, asked in self._asked.items() if asked == peer]
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

    def live(self, stage: int) -> set[int]:
        """The members that hold their stage's state and are there."""
        absent = self.lost | self.missing | self._joining
        return {peer for peer in self.view.stage_peers(stage) if peer not in absent}

    @property
    def vacant(self) -> list[int]:
        """Stages without anyone who is there and holds their state."""
        return [stage for stage in range(self._n_stages) if not self.live(stage)]

    def newcomer(self, passing: int) -> tuple[int, int]:
        """A peer id that nobody had, for who asks under a passing name, and the stage that needs a peer most."""
        if passing in self._asked:
            return self._asked[passing], self.stage_of[self._asked[passing]]
        peer, self._next_id = self._next_id, self._next_id + 1
        there = (self.members - self.lost - self.missing) | self._coming
        counts = [sum(self.stage_of[one] == stage for one in there) for stage in range(self._n_stages)]
        self.stage_of[peer] = counts.index(min(counts))
        self._coming.add(peer)
        self._asked[passing] = peer
        return peer, self.stage_of[peer]

    def lose(self, peer: int) -> bool:
        """A peer is gone; False if it was the last of its stage, and stays a member for want of another."""
        self.candidates.discard(peer)
        self._coming.discard(peer)
        if peer not in self.members or peer in self._joining or self.live(self.stage_of[peer]) - {peer}:
            self.lost |= {peer} & self.members
            return True
        self.missing.add(peer)
        return False

    def committed(self) -> None:
        """A step is committed: whoever was joining has taken part in it."""
        self._joining.clear()

    def first_view(self, reign: int, lineage: int, n_committed: int) -> View:
        """All peers of the plan."""
        members = tuple(self._member(peer, 1) for peer in self._planned)
        return View(1, reign, lineage, members, (1,) * self._n_stages, n_committed)

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
            for peer in sorted(self.leaving & self.members):
                out |= {peer} if self.live(self.stage_of[peer]) - out - {peer} else set()
        may = between_steps and not vacant
        new = {peer for peer in self.candidates if may and self._has_waited(peer, n_committed)}
        if not out and not new:
            return None
        number = self.view.number + 1
        changed = {self.stage_of[peer] for peer in out - self._joining}
        return replace(
            self.view,
            number=number,
            members=self._members_with(new, out, number),
            stage_views=tuple(number if s in changed else v for s, v in enumerate(self.view.stage_views)),
            n_committed=n_committed,
            records=tuple(records),
            rolled_back=False,
            results=(),
            joining=tuple(sorted((self._joining - out) | new)),
        )

    def roll_back(self, checkpoint: int) -> View:
        """A new lineage, at the last complete checkpoint, of everyone who is there."""
        number = self.view.number + 1
        return replace(
            self.view,
            number=number,
            lineage=self.view.lineage + 1,
            members=self._members_with(self.candidates, self.lost | self.missing, number),
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

    def adopt(self, view: View) -> set[int]:
        """The view is durable; those who have left with it."""
        before = self.admissions
        self._note_evictions(view)
        self.view, self.admissions = view, {member.peer: member.admission for member in view.members}
        self._seated = {member.peer: member.process for member in view.members}
        self._joining = set(view.joining)
        self.candidates -= self.members
        self._coming -= self.members
        left = self.leaving - self.members - self.lost
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

    def _members_with(self, new: Iterable[int], out: set[int], number: int) -> tuple[Member, ...]:
        kept = [member for member in self.view.members if member.peer not in out]
        return tuple(sorted([*kept, *(self._member(peer, number) for peer in new)], key=lambda member: member.peer))

    def _member(self, peer: int, admission: int) -> Member:
        return Member(peer, self.stage_of[peer], admission, self.addresses.get(peer, ""), self.processes.get(peer, 0))
