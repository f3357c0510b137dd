"""How much of this host's processors others used while a run went on: all that was used, less what the run says that it
used itself. The load average does not tell the two apart, since one peer has several threads that want to compute."""

import os
from collections.abc import Mapping
from pathlib import Path

from jaxdt.protocol.events import CPU_S

IDLE, N_FIELDS = (3, 4), 8  # of /proc/stat: idle and iowait; what follows the first 8 is counted in them already


class ProcessorUse:
    """The processor time of a run's peers, by their heartbeats, and of this host."""

    def __init__(self):
        self._used_before_s = used_s()
        self._own_before_s = _own_s()
        self._ended_s = 0.0
        self._latest_s: dict[int, float] = {}

    def counted(self, peer: int, values: Mapping[str, float]) -> None:
        """Take the count in a peer's heartbeat, or in the totals at its end. It is smaller than the last one when the
        peer has been started again."""
        if CPU_S in values:
            last_s = self._latest_s.get(peer, 0.0)
            if values[CPU_S] < last_s:
                self._ended_s += last_s
            self._latest_s[peer] = values[CPU_S]

    def others_cores(self, seconds: float) -> float:
        """How many cores others used on average in the `seconds` since this began; 0 where the system does not say it.
        Peers on other hosts count as if they were here, so it is too small rather than too large."""
        used_now_s = used_s()
        if used_now_s is None or self._used_before_s is None:
            return 0.0
        peers_s = self._ended_s + sum(self._latest_s.values())
        others_s = used_now_s - self._used_before_s - (_own_s() - self._own_before_s) - peers_s
        return max(0.0, others_s / seconds)


def used_s() -> float | None:
    """The processor time that this host has used since it started, over all cores; None where there is no /proc."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1 : 1 + N_FIELDS]]
    except (OSError, ValueError):
        return None
    return sum(n for i, n in enumerate(ticks) if i not in IDLE) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """The processor time of this process, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
