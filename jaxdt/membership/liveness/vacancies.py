"""The coordinator's watch over stages without a live replica: whom the run waits for, and that they are dialled.

A silent peer's connections have been ended. It is dialled all the same while the run waits for it: if its process has
ended, its host says so, and the run need not wait for the grace period.
"""

from collections.abc import Container, Mapping, Sequence

from jaxdt.membership.roster import Roster
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import VacantReport


class Vacancies:
    """Time comes in as an argument."""

    def __init__(self):
        self._reasons: dict[int, str] = {}  # stage -> how its last replica was lost
        self._reported: dict[int, list[int]] = {}  # vacant stage -> whom it waits for
        self._dialled: set[int] = set()

    @property
    def stages(self) -> list[int]:
        """The stages for which the run waits."""
        return sorted(self._reported)

    def dials(self, peer: int) -> bool:
        """Whether the run waits for this silent peer and dials it."""
        return peer in self._dialled

    def on_lost(self, peer: int, stage: int, reason: str, is_last: bool) -> None:
        """A peer is lost, or silent, and its connections are ended; `is_last`: it was the last replica of its stage."""
        self._dialled.discard(peer)
        if is_last:
            self._reasons[stage] = reason
            self._reported.pop(stage, None)

    def reason(self, stage: int) -> str:
        """How the last replica of a stage was lost."""
        return self._reasons.get(stage, f"stage {stage}: has no replica")

    def watch(
        self, now_s: float, roster: Roster, reachable: Container[int], checkpoint: int, at_stake: Sequence[int]
    ) -> list[ev.Action]:
        """Report stages for which the run waits for other peers than before, and dial those peers. `reachable`: the
        peers that are heard. `checkpoint`, and the steps `at_stake` if the run goes back to it: see VacantReport."""
        waits_for = {stage: roster.awaited(stage) for stage in roster.vacant} if roster.view else {}
        actions: list[ev.Action] = []
        for stage, peers in waits_for.items():
            if self._reported.get(stage) != peers:
                waits_s = round(roster.wait_s(now_s, peers), 1)
                reason = self.reason(stage)
                actions.append(VacantReport(stage, reason, checkpoint, list(at_stake), peers, waits_s))
        self._reported = waits_for
        return actions + self._dial(waits_for, roster, reachable)

    def _dial(
        self, waits_for: Mapping[int, Sequence[int]], roster: Roster, reachable: Container[int]
    ) -> list[ev.Action]:
        silent = {peer for peers in waits_for.values() for peer in peers if peer not in reachable}
        dial = [roster.reach(peer) for peer in sorted(silent - self._dialled)]
        over = [ev.Disconnect(peer) for peer in sorted(self._dialled - silent) if peer not in reachable]
        self._dialled = silent
        return [*dial, *over]
