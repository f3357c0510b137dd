"""Work that takes far longer than its like: found by the peer that does it, while its heartbeats continue as ever.

A peer knows best what runs on its device and for how long, so it watches itself. Past the deadline its wiring asks
other replicas for the Work that may be done twice: forwards, of which the first result is used (jaxdt.wiring.routed). A
backward may not, since a gradient cannot be taken out of a sum (step protocol, Sec. 3.3). Once the step waits only for
this peer's accumulator, or the Work has taken several deadlines, the peer tells the coordinator that it blocks the run.
The coordinator continues without the peer and its accumulator if the stage has another replica, and the other replicas
do the lost Work. So each microbatch is counted once.
"""

from collections import defaultdict, deque
from collections.abc import Mapping

from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import WINDOW, spread_s
from jaxdt.run.work import Work, WorkKind

FACTOR = 8.0  # Work may take so many times the median of its kind: replicas of one host compete for its cores
PROFILE_FACTOR = 20.0  # the same for the first Work of a kind, of the time that it took alone
PATIENCE = 3.0  # deadlines after which overdue Work counts as blocking the run, whatever is known of the others
UNKNOWN_S = 300.0  # Work of a kind that was never timed may have to be compiled


class WorkWatch:
    """Watches the Work of one peer. `floor_s`: the shortest deadline. `tick_s`: seconds between two calls of `tick`."""

    def __init__(self, floor_s: float, tick_s: float):
        self._floor_s = floor_s
        self._tick_s_max = 2 * tick_s  # more has passed if the process stood still, and then its Work did too
        self._durations_s: Mapping[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._profile_s: Mapping[str, float] = {}
        self._work: Work | None = None
        self._age_s = 0.0
        self._ticked_s = 0.0
        self._deadline_s = 0.0
        self._next_report_s = 0.0
        self.is_overdue = False
        self._blocks = False

    def on_profiled(self, seconds: Mapping[str, float]) -> None:
        """How long each kind of Work took before the peer joined."""
        self._profile_s = seconds

    def on_done(self, work: Work, seconds: float) -> None:
        """A Work has ended. One that was overdue says nothing of its like."""
        is_watched = work == self._work
        if not (is_watched and self.is_overdue):
            self._durations_s[work.kind].append(seconds)
        if is_watched:
            self._forget()

    def tick(self, now_s: float, running: Work | None) -> ev.Overdue | None:
        """The message to the coordinator about the Work that runs now, or None if there is nothing to tell. The message
        comes again each time that the Work has taken twice as long as before."""
        if running is None:
            self._forget()
            return None
        if running != self._work:
            self._forget()
            self._work = running
            self._deadline_s = self._next_report_s = self._deadline_of(running)
        else:
            self._age_s += min(now_s - self._ticked_s, self._tick_s_max)
        self._ticked_s = now_s
        if self._age_s <= self._next_report_s:
            return None
        is_far_over = self._age_s > PATIENCE * self._deadline_s
        self._blocks = (
            self._blocks or is_far_over or running.kind in (WorkKind.GATHER, WorkKind.UPDATE, WorkKind.REGENERATE)
        )
        self.is_overdue = True
        self._next_report_s = 2 * self._age_s
        return self._overdue(running)

    def blocked(self) -> ev.Overdue | None:
        """The run waits for the Work that is overdue; what the coordinator has to know, unless it has been told."""
        if self._work is None or not self.is_overdue or self._blocks:
            return None
        self._blocks = True
        return self._overdue(self._work)

    def _overdue(self, work: Work) -> ev.Overdue:
        return ev.Overdue(str(work), self._age_s, self._deadline_s, self._blocks)

    def _forget(self) -> None:
        self._work = None
        self._age_s = 0.0
        self.is_overdue = False
        self._blocks = False

    def _deadline_of(self, work: Work) -> float:
        """Backwards that regenerate are too rare to be known: another length of samples compiles them again."""
        durations_s = self._durations_s[work.kind]
        if durations_s and work.kind != WorkKind.REGENERATE:
            return max(self._floor_s, spread_s(durations_s, FACTOR))
        if work.kind in self._profile_s:
            return max(self._floor_s, PROFILE_FACTOR * self._profile_s[work.kind])
        return max(self._floor_s, UNKNOWN_S)
