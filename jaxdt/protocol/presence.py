"""How many peers of each stage are there, and how many of a pool's workers, by the coordinator's reports in a trace.

Views alone do not say it: the last replica of a stage stays a member while the run waits for it.
"""

from collections.abc import Iterable
from typing import Any

from jaxdt.protocol import events as ev
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


class _Workers:
    """The workers of a pool that a server has admitted and has not lost. A server that is lost has lost them all."""

    def __init__(self):
        self._stage_of: dict[int, int] = {}  # of each server that was a member once
        self._server_of: dict[int, int] = {}

    def hear(self, kind: str, fields: dict[str, Any]) -> None:
        """One report of the coordinator."""
        match kind:
            case "view":
                self._stage_of |= {int(peer): stage for peer, stage in fields["members"].items()}
            case "worker_here" if fields["server"] in self._stage_of:
                self._server_of[fields["worker"]] = fields["server"]
            case "worker_gone" if self._server_of.get(fields["worker"]) == fields["server"]:
                del self._server_of[fields["worker"]]
            case "lost":
                servers = self._server_of.items()
                self._server_of = {worker: server for worker, server in servers if server != fields["peer"]}
            case _:
                pass

    @property
    def of_stages(self) -> dict[int, int]:
        """Stage -> how many workers compute for it."""
        counts = dict.fromkeys(self._stage_of.values(), 0)
        for server in self._server_of.values():
            counts[self._stage_of[server]] += 1
        return counts


def peers_there(records: Iterable[TraceRecord]) -> list[tuple[float, dict[int, int]]]:
    """(time in seconds, number of peers that are there by stage), from the first view on, at each change. A stage has
    the same key in all of them; one that no member of a view serves has 0 then."""
    return _counted(records, _Members())


def workers_there(records: Iterable[TraceRecord]) -> list[tuple[float, dict[int, int]]]:
    """The same of a pool's workers. A run without any has one entry at most."""
    return _counted(records, _Workers())


def _counted(records: Iterable[TraceRecord], found_there: _Members | _Workers) -> list[tuple[float, dict[int, int]]]:
    counts_at: dict[float, dict[int, int]] = {}
    for record in records:
        if record["what"] == "report" and record["peer"] == ev.COORDINATOR:
            found_there.hear(record["kind"], record["fields"])
            if counts := found_there.of_stages:
                counts_at[record["t"]] = counts
    stages = sorted({stage for counts in counts_at.values() for stage in counts})
    found = [(at_s, {stage: counts.get(stage, 0) for stage in stages}) for at_s, counts in counts_at.items()]
    return [one for i, one in enumerate(found) if i == 0 or one[1] != found[i - 1][1]]
