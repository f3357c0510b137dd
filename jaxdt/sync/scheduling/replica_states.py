"""The members' answers to a coordinator that was started again, where replicas differ. They come before it decides.

The coordinator asks each member once, when the member says hello. A member answers with the groups that it knows, and
sends again the messages that the coordinator before has not answered. From its answer on the member obeys no
coordinator of a lower term, so the new one knows of every later change. Messages that come before a member's answer do
not count, since they come again; messages after it wait until all members have answered, or are lost.
"""

from collections.abc import Collection, Iterable

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import GroupReport
from jaxdt.protocol.round_id import Place, RoundId, Series
from jaxdt.sync.scheduling.open_groups import OpenGroup

Said = tuple[int, ev.Message]  # sender, and message
CAUSE = "restart"  # of a group that an earlier coordinator has formed, when it is reported again


class ReplicaStates:
    """`is_asking`: not all members have answered yet. `said`: the messages of members that have, in order."""

    def __init__(self):
        self.answers: dict[int, ev.ReplicaState] = {}
        self.said: list[Said] = []
        self._awaited: set[int] = set()
        self._n_left: dict[int, int] = {}  # member -> messages that it still has to say again

    @property
    def is_asking(self) -> bool:
        return bool(self._awaited)

    def ask(self, members: Iterable[int]) -> None:
        self._awaited = set(members)

    def missed(self) -> list[ev.Message]:
        """The question to a member that says hello."""
        return [ev.AskReplicaState()] if self.is_asking else []

    def hear(self, src: int, message: ev.Message) -> None:
        """A member says something while not all have answered."""
        if isinstance(message, ev.ReplicaState):
            self.answers[src] = message
            self._n_left[src] = message.n_said
        elif src in self.answers:
            self.said.append((src, message))
            self._n_left[src] -= 1
        if self._n_left.get(src) == 0:
            self._awaited.discard(src)

    def lose(self, lost: Collection[int]) -> None:
        """These members are lost. Their messages do not count, except for the steps that they did."""
        self._awaited.difference_update(lost)
        self.answers = {peer: answer for peer, answer in self.answers.items() if peer not in lost}
        self.said = [(src, said) for src, said in self.said if src not in lost or isinstance(said, ev.StepDone)]

    # ----------------------------------------------------------------------------------------- what the answers say

    @property
    def _known_groups(self) -> list[tuple[int, ev.KnownGroup]]:
        return [(peer, group) for peer, answer in sorted(self.answers.items()) for group in answer.groups]

    @property
    def rounds(self) -> set[RoundId]:
        """The rounds that some member knows."""
        return {group.round for _, group in self._known_groups}

    @property
    def last(self) -> dict[Series, int]:
        """The greatest number with which a round of each series was formed, as far as is known."""
        found: dict[Series, int] = {}
        for round in self.rounds:
            found[round.series] = max(round.number, found.get(round.series, -1))
        return found

    @property
    def over(self) -> dict[RoundId, ev.KnownGroup]:
        """Groups that are over for some member: all of their members have held the result."""
        return {group.round: group for _, group in self._known_groups if group.is_over}

    def open_groups(self) -> list[OpenGroup]:
        """The groups that are not over for some members. Those that were not told of one, though they are in it, are
        waited for; those for whom it is over have held its result."""
        found: list[OpenGroup] = []
        places = {group.round.place for _, group in self._not_over()}
        for place in sorted(places):
            known = [(peer, group) for peer, group in self._not_over() if group.round.place == place]
            attempts = {group.round: group.members for _, group in known}
            steps = {m: step for _, group in known for m, step in zip(group.members, group.steps, strict=False)}
            members = {member for of_attempt in attempts.values() for member in of_attempt}
            waited_for = {member for member in members if not self._is_over_for(member, place, known)}
            found.append(OpenGroup(max(attempts), attempts, waited_for, None, steps))
        return found

    def _not_over(self) -> list[tuple[int, ev.KnownGroup]]:
        return [(peer, group) for peer, group in self._known_groups if not group.is_over]

    def _is_over_for(self, member: int, place: Place, known: list[tuple[int, ev.KnownGroup]]) -> bool:
        """Whether a member has let go of a group: it knows one that is as late, and not this one."""
        round = known[0][1].round
        answer = self.answers.get(member)
        if answer is None or any(peer == member for peer, _ in known):
            return False
        return any(g.round.series == round.series and g.round.number >= round.number for g in answer.groups)

    def take_wanted(self, group: OpenGroup, fragment: int) -> None:
        """Members of a group that were not told of it yet want no other one."""
        wanted = {(peer, step) for peer, step in group.steps.items() if peer in group.waited_for}
        self.said = [
            (src, message)
            for src, message in self.said
            if not (
                isinstance(message, ev.WantsGroup) and message.fragment == fragment and (src, message.step) in wanted
            )
        ]

    def take(self, kind: type[ev.ResultHeld]) -> list[tuple[int, ev.ResultHeld]]:
        """The results that members hold."""
        taken = [(src, message) for src, message in self.said if isinstance(message, kind)]
        self.said = [(src, message) for src, message in self.said if not isinstance(message, kind)]
        return taken


def restored_report(group: OpenGroup, stage: int, fragment: int) -> GroupReport:
    """The log may not have a group that is open: the host of the coordinator that formed it may have died."""
    steps = [group.steps[member] for member in group.members]
    k, view = group.round.number, group.round.view
    return GroupReport(stage, k, list(group.members), steps, CAUSE, False, False, fragment, view)
