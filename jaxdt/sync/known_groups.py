"""The averaging groups that a replica knows, for a coordinator that was started again.

A replica remembers a group's attempts until the group is over, and for each name the last group that is over. The next
coordinator continues counting behind that group, and forms none of these groups again. A part of a sync's machine.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, Series


class KnownGroups:
    """One replica's. It waits for at most one group of which it was not told yet."""

    def __init__(self):
        self._attempts: dict[RoundId, ev.KnownGroup] = {}  # of groups that are not over
        self._over: dict[Series, ev.KnownGroup] = {}  # the last of each series
        self._held_results: dict[RoundId, ev.ResultHeld] = {}
        self._unanswered_wish: ev.WantsGroup | None = None
        self._answered_term = 0  # of the last coordinator that has asked

    def answer(self, coordinator_term: int, n_steps: int | None, unanswered: ev.Actions) -> ev.Actions:
        """A coordinator was started again, and asks once for the groups that this replica knows, and for the messages
        that were not answered: about groups, and the others, `unanswered`. Messages of an earlier coordinator do not
        count after this answer. `n_steps`: local steps in all, if that is known."""
        if coordinator_term <= self._answered_term:
            return []
        self._answered_term = coordinator_term
        wanted = [self._unanswered_wish] if self._unanswered_wish else []
        own = [ev.Send(ev.COORDINATOR, body) for body in (*self._held_results.values(), *wanted)]
        groups = (*self._attempts.values(), *self._over.values())
        return [
            ev.Send(ev.COORDINATOR, ev.ReplicaState(groups, n_steps, len(own) + len(unanswered))),
            *own,
            *unanswered,
        ]

    def wants(self, wanted: ev.WantsGroup) -> ev.Send:
        self._unanswered_wish = wanted
        return ev.Send(ev.COORDINATOR, wanted)

    def on_formed(self, formed: ev.GroupFormed, was_wanted: bool) -> None:
        """Told of an attempt of a group, which was wanted or is a snapshot."""
        round = formed.round
        if was_wanted and self._is_new(round):
            self._unanswered_wish = None
        self._attempts.setdefault(round, ev.KnownGroup(round, formed.members, formed.steps, is_over=False))

    def _is_new(self, round: RoundId) -> bool:
        """Whether no attempt of a group is known."""
        last = self._over.get(round.series)
        is_known = any(other.place == round.place for other in self._attempts)
        return not is_known and (last is None or round.number > last.round.number)

    def on_held(self, held: ev.ResultHeld, members: Sequence[int]) -> ev.ResultHeld:
        self._held_results[held.round] = held
        self._attempts[held.round] = ev.KnownGroup(held.round, tuple(members), held.steps, is_over=False)
        return held

    def on_over(self, round: RoundId) -> None:
        """A group is over: no attempt of it matters any more but this one, which counted."""
        attempts = [other for other in self._attempts if other.place == round.place]
        for other in attempts:
            known = self._attempts.pop(other)
            self._held_results.pop(other, None)
            if other == round:
                self._over[round.series] = replace(known, is_over=True)
