"""How much of this host's processors others used while a run went on.

It is all that was not idle, less what the run says that it used itself. The load average does not tell the two apart,
since one peer has several threads that want to compute.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from jaxdt.protocol import events as ev
from jaxdt.run.cpus import allowed_cpus
from jaxdt.runtime.reporting.counts import Totals


class ProcessorUse:
    """The processor time of a run's peers, by their heartbeats, and of this host."""

    def __init__(self):
        try:
            self._idle_before_s = idle_s()
        except FileNotFoundError:  # not a Linux
            self._idle_before_s = None
        self._own_before_s = _own_s()
        self._of_peers = Totals()

    def counted(self, peer: int, values: Mapping[str, float]) -> None:
        """Take the count in a peer's heartbeat, or in the totals at its end."""
        if ev.CPU_S in values:
            self._of_peers.counted(peer, {ev.CPU_S: values[ev.CPU_S]})

    def others_cores(self, seconds: float) -> float:
        """How many of the CPUs that this process may use others used on average in the `seconds` since this began; 0
        where the system does not say it. Peers on other hosts count as if they were here, so it is too small rather
        than too large."""
        if self._idle_before_s is None:
            return 0.0
        used_s = len(allowed_cpus()) * seconds - (idle_s() - self._idle_before_s)
        own_s = _own_s() - self._own_before_s + self._of_peers.by_name().get(ev.CPU_S, 0.0)
        return max(0.0, (used_s - own_s) / seconds)


def idle_s() -> float:
    """Idle seconds of this host since it was started, summed over the CPUs that this process may use.
    FileNotFoundError where there is no /proc/stat."""
    own = {f"cpu{cpu}" for cpu in allowed_cpus()}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    ticks = sum(int(row[4]) + int(row[5]) for row in rows if row and row[0] in own)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """The processor time of this process, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
