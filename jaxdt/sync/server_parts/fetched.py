"""Snapshots of a server (jaxdt.sync.server_parts.snapshots) at one of its workers.

The workers of one pipeline measure a held-out loss with one. The least worker of a stage keeps one aside for a
checkpoint, with the present state of its own optimizer. Each fetches it while it goes on, and uses it between two of
its local steps.
"""

from collections import deque

from jaxdt.protocol import events as ev
from jaxdt.protocol.participants import EachOnce, Participants
from jaxdt.protocol.reports import KeptReport
from jaxdt.protocol.round_id import RoundId, RoundKind, Series
from jaxdt.run.work import ADOPT, Work
from jaxdt.sync.exchange import Exchange, RoundSpec


class FetchedSnapshots:
    """One worker's. `n_elements`: numbers of the parameters, `slice_elements` of a slice."""

    def __init__(self, place: tuple[int, int, int], n_elements: int, slice_elements: int):
        self._stage, self._peer, self._server = place
        self._n_elements = n_elements
        self._slice_elements = slice_elements
        self._exchanges: dict[RoundId, Exchange] = {}
        self._last: dict[Series, int] = {}  # the last version that was asked for
        self._to_keep: deque[RoundId] = deque()  # whole, and for a checkpoint
        self._is_keeping = False

    def __contains__(self, round: RoundId) -> bool:
        return round in self._exchanges

    def fetch(self, round: RoundId) -> ev.Actions:
        """Get a snapshot, unless it was asked for before. An older one for a held-out loss is not needed any more."""
        if round.number <= self._last.get(round.series, -1):
            return []
        self._last[round.series] = round.number
        older = [other for other in self._exchanges if other.kind == round.kind == RoundKind.HELD_OUT]
        alone = (self._server,)
        spec = RoundSpec(round, self._n_elements, Participants(alone, alone, (self._peer,)), EachOnce(alone))
        self._exchanges[round] = Exchange(self._peer, spec, self._slice_elements)
        return [*(self._forget(other) for other in older), ev.Send(self._server, ev.FetchResult(round))]

    def is_whole(self, round: RoundId) -> bool:
        return round in self._exchanges and self._exchanges[round].complete

    def arrived(self, src: int, reduced: ev.Reduced) -> str:
        """A slice of a snapshot is here: why it cannot be right, '' if it is."""
        exchange, bounds = self._exchanges[reduced.key.round], (reduced.key.lo, reduced.key.hi)
        if bounds in exchange.sums or not exchange.gives(src, bounds):
            return ""
        if problem := exchange.problem(reduced.cover):
            return f"{exchange.round}: {problem}"
        if exchange.hold(reduced) and exchange.round.kind == RoundKind.CHECKPOINT:
            self._to_keep.append(exchange.round)
        return ""

    def keep(self) -> ev.Actions:
        """Between two local steps: keep aside one that is whole and for a checkpoint. The next one may only take its
        place when its checkpoint is being written, which begins with the new version."""
        if self._is_keeping or not self._to_keep:
            return []
        self._is_keeping = True
        round = self._to_keep.popleft()
        return [ev.Run(Work(self._stage, ADOPT, None, self._peer, round.number), 1.0, (round,))]

    def kept(self, round: RoundId, n_steps: int) -> ev.Actions:
        """One is kept, beside the optimizer's state after so many local steps: it can be written."""
        self._is_keeping = False
        version = round.number
        report = KeptReport(self._stage, version, self._peer, n_steps)
        return [self._forget(round), report, ev.MeanKept(version), ev.Updated(self._stage, version)]

    def close(self, round: RoundId) -> ev.Actions:
        """Nobody needs it any more."""
        return [self._forget(round)] if round in self._exchanges else []

    def _forget(self, round: RoundId) -> ev.Forget:
        del self._exchanges[round]
        return ev.Forget(round)
