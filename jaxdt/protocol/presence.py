"""How many peers of each stage are there, by the coordinator's reports in a trace.

Views alone do not say it: the last replica of a stage stays a member while the run waits for it.
"""

from collections.abc import Iterable
from typing import Any

from jaxdt.protocol.events import COORDINATOR
from jaxdt.protocol.trace import TraceRecord


class _Members:
    """The members of the latest view, and which of them are absent."""

    def __init__(self):
        self._stage_of: dict[int, int] = {}
        self._absent: set[int] = set()
        self._ready: set[int] = set()  # those that the next view may admit again

    def hear(self, kind: str, fields: dict[str, Any]) -> None:
        """One report of the coordinator."""
        match kind:
            case "view":
                self._stage_of = {int(peer): stage for peer, stage in fields["members"].items()}
                self._absent -= self._ready
                self._ready.clear()
            case "lost":
                self._absent.add(fields["peer"])
                self._ready.discard(fields["peer"])
            case "candidate":
                self._ready.add(fields["peer"])
            case "returned":
                self._absent.discard(fields["peer"])
            case "restarted":  # this coordinator takes every member for present, until it reports another one lost
                self._absent.clear()
            case _:
                pass

    @property
    def of_stages(self) -> dict[int, int]:
        """Stage -> how many of its members are there."""
        counts = dict.fromkeys(self._stage_of.values(), 0)
        for peer, stage in self._stage_of.items():
            counts[stage] += peer not in self._absent
        return counts


def peers_there(records: Iterable[TraceRecord]) -> list[tuple[float, dict[int, int]]]:
    """(time in seconds, number of peers that are there by stage), from the first view on, at each change. A stage has
    the same key in all of them; one that no member of a view serves has 0 then."""
    members = _Members()
    counts_at: dict[float, dict[int, int]] = {}
    for record in records:
        if record["what"] == "report" and record["peer"] == COORDINATOR:
            members.hear(record["kind"], record["fields"])
            if counts := members.of_stages:
                counts_at[record["t"]] = counts
    stages = sorted({stage for counts in counts_at.values() for stage in counts})
    found = [(at_s, {stage: counts.get(stage, 0) for stage in stages}) for at_s, counts in counts_at.items()]
    return [one for i, one in enumerate(found) if i == 0 or one[1] != found[i - 1][1]]
