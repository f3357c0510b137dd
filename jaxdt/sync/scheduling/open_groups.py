"""Averaging groups whose members do not all hold the result yet, and what becomes of them when members are lost.

A group averages in attempts. An attempt needs the contributions of all its members, so one that has lost a member may
stand still. Then the coordinator decides:
- If a member that is left has said that it holds the result of an attempt, that attempt counts. The others fetch the
  result from those who hold it.
- Otherwise the members that are left average in another attempt.

At most one attempt is adopted among those that are left. A member that holds the result of an attempt does not
contribute to a later one, but says again what it holds. So a later attempt with that member in it is never complete,
and the coordinator points the others to the result that there is. A member that has contributed to a later attempt
gives up the earlier ones, unless the coordinator says that one of them counts.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import GroupReport
from jaxdt.protocol.round_id import Place, RoundId


class Disagreement(Exception):
    """One line: which member holds another result than the others."""


@dataclass
class OpenGroup:
    """`round`: the attempt that counts, as far as is known. `attempts`: the members of this attempt and of earlier
    ones. `waited_for`: the members that are left. `steps`: after how many local steps each member contributes, if the
    coordinator knows it beforehand. `report`: the group as it has formed; None for a snapshot."""

    round: RoundId
    attempts: dict[RoundId, tuple[int, ...]]
    waited_for: set[int]
    report: GroupReport | None
    steps: dict[int, int]
    held: dict[int, ev.ResultHeld] = field(default_factory=dict[int, ev.ResultHeld])  # by member

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the attempt that counts."""
        return self.attempts[self.round]

    @property
    def is_whole(self) -> bool:
        return bool(self.held) and self.waited_for <= self.held.keys()

    @property
    def member_steps(self) -> tuple[int, ...]:
        """The local steps after which each member contributed. The group must have a member that holds the result."""
        return next(iter(self.held.values())).steps

    def formed_messages(self) -> list[ev.Action]:
        """The messages to the members that do not hold the result."""
        steps = tuple(self.steps[member] for member in self.members) if self.steps else ()
        formed = ev.GroupFormed(self.round, self.members, tuple(sorted(self.held)), steps)
        return [ev.Send(member, formed) for member in sorted(self.waited_for - self.held.keys())]

    def new_report(self) -> list[ev.Action]:
        """The group as it averages now."""
        if self.report is None:
            return []
        steps = [self.steps[member] for member in self.members]
        return [replace(self.report, members=list(self.members), steps=steps)]

    def closed_messages(self) -> list[ev.Action]:
        """The messages that the round is over."""
        return [ev.Send(member, ev.GroupClosed(self.round)) for member in sorted(self.waited_for)]


class OpenGroups:
    """The open groups of all stages. Groups that are whole are handed out, and forgotten."""

    def __init__(self):
        self._open: dict[Place, OpenGroup] = {}

    def open(self, round: RoundId, members: tuple[int, ...], report: GroupReport | None = None) -> list[ev.Action]:
        steps = dict(zip(report.members, report.steps, strict=True)) if report else {}
        group = OpenGroup(round, {round: members}, set(members), report, steps)
        self._open[round.place] = group
        return [*group.new_report(), *group.formed_messages()]

    @property
    def rounds(self) -> list[RoundId]:
        return [group.round for group in self._open.values()]

    def restore(self, group: OpenGroup) -> None:
        """An earlier coordinator has formed this group."""
        self._open[group.round.place] = group

    def tell_again(self) -> list[ev.Action]:
        """The groups as they are, to members that may not have heard of them: what they have heard changes nothing."""
        return [action for group in self._open.values() for action in group.formed_messages()]

    def hear(self, src: int, held: ev.ResultHeld) -> tuple[list[ev.Action], OpenGroup | None]:
        """A member holds the result of an attempt. Returns the messages to members, and the group if it is whole.
        Raises Disagreement if another member holds another result."""
        round = held.round
        group = self._open.get(round.place)
        if group is None or src not in group.waited_for or round not in group.attempts:
            return [], None
        group.held[src] = held
        if len({(other.round, other.digest) for other in group.held.values()}) > 1:
            raise Disagreement(f"{round}: peer {src} holds another result than the others")
        if round == group.round:
            return [], self._take_if_whole(group)
        group.round = round  # an earlier attempt was whole after all, and the present one will never be
        return [*group.new_report(), *group.formed_messages()], self._take_if_whole(group)

    def _take_if_whole(self, group: OpenGroup) -> OpenGroup | None:
        return self._open.pop(group.round.place) if group.is_whole else None

    def lose(
        self, lost: Collection[int], admissions: Mapping[int, int] | None = None
    ) -> tuple[list[ev.Action], list[OpenGroup], list[RoundId]]:
        """Members are gone. Returns the messages to the others of their groups, the groups that are whole without them,
        and the rounds of groups that have no member left. With `admissions`, a member that was admitted after a group
        had formed is gone from that group too."""
        actions: list[ev.Action] = []
        whole: list[OpenGroup] = []
        deserted: list[RoundId] = []
        for place, group in list(self._open.items()):
            formed_in = group.round.view
            gone = {m for m in group.waited_for if m in lost or (admissions or {}).get(m, 0) > formed_in}
            if not gone:
                continue
            group.waited_for -= gone
            group.held = {member: held for member, held in group.held.items() if member in group.waited_for}
            if not group.waited_for:
                del self._open[place]
                deserted.append(group.round)
                continue
            if not group.held:
                attempt = max(round.attempt for round in group.attempts) + 1
                group.round = replace(group.round, attempt=attempt)
                group.attempts[group.round] = tuple(sorted(group.waited_for))
                actions += group.new_report()
            actions += group.formed_messages()
            whole += [group] if self._take_if_whole(group) else []
        return actions, whole, deserted
