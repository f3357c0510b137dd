"""The time for which a scheduler window stays open: T, which adapts to the sizes of the groups (SDPipe).

T is at most a given number of seconds, or a share of the measured local step. A group of one doubles T, since too few
were ready in time. Any other group shrinks it by a tenth, down to a hundredth of the longest.
"""

import math
import statistics
from collections import deque

GROW, SHRINK = 2.0, 0.9
SHORTEST_FRAC = 0.01  # of the longest T
MEMBERS_MIN = 2  # a smaller group lengthens the window
STEPS_KEPT = 64


class StepTime:
    """The median seconds of a local step at a stage's replicas, from the moment at which a replica's group has formed
    until it is ready again: without its wait for a group, and robust against stragglers."""

    def __init__(self):
        self._began: dict[int, tuple[float, int]] = {}  # replica -> when its last group formed, and after which step
        self._seconds: deque[float] = deque(maxlen=STEPS_KEPT)

    @property
    def seconds(self) -> float:
        """inf as long as nothing is measured."""
        return statistics.median(self._seconds) if self._seconds else math.inf

    def began(self, now_s: float, peer: int, step: int) -> None:
        """The replica continues after `step` local steps."""
        self._began[peer] = now_s, step

    def on_ended(self, now_s: float, peer: int, step: int) -> None:
        """The replica has done `step` local steps. A step that is told again measures nothing."""
        began_s, n_before = self._began.pop(peer, (now_s, step))
        if step > n_before:
            self._seconds.append((now_s - began_s) / (step - n_before))

    def suppose(self, seconds: float) -> None:
        """A first value, before anything is measured."""
        self._seconds.append(seconds)

    def on_left(self, peer: int) -> None:
        self._began.pop(peer, None)


class WindowLength:
    """T: `longest_s`, or if that is 0 the share `frac` of a measured step, times a factor that adapts. With inf a
    window ends only when all replicas are ready; so do the first windows of a share, until a step is measured."""

    def __init__(self, longest_s: float, frac: float):
        self._longest_s = longest_s
        self._frac = frac
        self._factor = 1.0
        self.step_time = StepTime()

    @property
    def longest_s(self) -> float:
        return self._longest_s or self._frac * self.step_time.seconds

    @property
    def seconds(self) -> float:
        """T of a window that opens now."""
        return self._factor * self.longest_s

    def adapt(self, n_members: int) -> None:
        if n_members < MEMBERS_MIN:
            self._factor = min(GROW * self._factor, 1.0)
        else:
            self._factor = max(SHRINK * self._factor, SHORTEST_FRAC)
