"""The work of a pool's workers, as their servers count it (jaxdt.wiring.pool.server_counts)."""

from collections.abc import Mapping
from typing import Any

from jaxdt.protocol import events as ev

SUMS = ("microbatches", "by_workers", "stolen", "redone", "lost", "contribution_bytes")


class PoolSummary:
    """The counts of one run's workers. A server that was started again counts from nothing."""

    def __init__(self):
        self._latest: dict[int, Mapping[str, float]] = {}

    def counted(self, peer: int, values: Mapping[str, float]) -> None:
        """Take the counts in a peer's heartbeat, or in the totals at its end."""
        if ev.WORKERS in values:
            self._latest[peer] = values

    @property
    def fields(self) -> dict[str, Any] | None:
        """The fields for summary.json; None for a run without servers of workers."""
        if not self._latest:
            return None
        sums = {name: int(sum(values[name] for values in self._latest.values())) for name in SUMS}
        return sums | {"aggregation_frac": aggregation_frac(*self._latest.values())}

    @property
    def doubt(self) -> str:
        """The reason why a prediction may be far off, since it assumes a run that keeps its workers; '' without one."""
        fields = self.fields or {}
        if not fields.get("lost") and not fields.get("redone"):
            return ""
        often = {1: "once", 2: "twice"}.get(fields["lost"], f"{fields['lost']} times")
        lost = f"workers were lost {often}, {_microbatches(fields['redone'])} computed again"
        return f"{lost}: the prediction is of a run that keeps its workers"


def aggregation_frac(*servers: Mapping[str, float]) -> float | None:
    """The least share of the time of its steps for which one of these servers aggregated: the others also waited for
    that one to have computed. None before the first step is over."""
    shares = [values["aggregation_s"] / values["steps_s"] for values in servers if values["steps_s"]]
    return min(shares, default=None)


def summary_lines(pool: Mapping[str, Any] | None) -> list[str]:
    """Lines for people about a pool's counts; none without a pool."""
    if pool is None:
        return []
    was = "was" if pool["lost"] == 1 else "were"
    did = f"did {pool['by_workers']} of {pool['microbatches']} microbatches of stages"
    lines = [f"workers        {did}; {pool['lost']} {was} lost, {_microbatches(pool['redone'])} computed again"]
    if pool["aggregation_frac"] is not None:
        sent = f"{pool['contribution_bytes'] / 1e6:.1f} MB of gradients"
        lines.append(f"               sent {sent}; aggregation took {pool['aggregation_frac']:.0%} of a step")
    return lines


def _microbatches(n: int) -> str:
    return f"{n} microbatch{'es' * (n != 1)}"
