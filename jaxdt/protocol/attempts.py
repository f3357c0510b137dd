"""Attempts at a step in a trace. A run that goes back to a checkpoint computes some steps again."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxdt.protocol import events as ev
from jaxdt.protocol.trace import TraceRecord
from jaxdt.run.work import Work, WorkKind, parse_work


@dataclass
class Attempt:
    """An attempt at `step`. `runs`: the records of its Work, each with the Work."""

    step: int
    runs: list[tuple[TraceRecord, Work]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The seconds from the first Work's start to the last one's end."""
        return max(run["t"] + run["s"] for run, _ in self.runs) - min(run["t"] for run, _ in self.runs)

    @property
    def n_peers(self) -> int:
        return len({run["peer"] for run, _ in self.runs})

    @property
    def evaluates(self) -> bool:
        return any(work.kind == WorkKind.EVALUATE for _, work in self.runs)


def attempts(records: Iterable[TraceRecord]) -> list[Attempt]:
    """All attempts in a trace, from records in order of time."""
    found: dict[tuple[int, int], Attempt] = {}
    n_rollbacks = 0
    for record in records:
        if record["what"] == "run":
            work = parse_work(record["work"])
            if work.step is not None:
                attempt = found.setdefault((n_rollbacks, work.step), Attempt(work.step))
                attempt.runs.append((record, work))
        elif record["what"] == "report" and record["kind"] == "rollback" and record["peer"] == ev.COORDINATOR:
            n_rollbacks += 1
    return list(found.values())


def typical_attempt(found: Iterable[Attempt]) -> Attempt | None:
    """An attempt of median duration among those without an evaluation and with most peers; None if there is none.
    Most peers are as many as took part in a quarter of the attempts: a peer may have left after a few steps."""
    found = list(found)
    found = [attempt for attempt in found if not attempt.evaluates] or found
    by_peers = sorted((attempt.n_peers for attempt in found), reverse=True)
    found = [attempt for attempt in found if attempt.n_peers == by_peers[len(found) // 4]]
    found.sort(key=lambda attempt: attempt.seconds)
    return found[len(found) // 2] if found else None
