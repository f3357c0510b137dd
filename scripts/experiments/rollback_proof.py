"""Whether a rollback was needed: what the living processes held when a run went back to a checkpoint.

The coordinator's trace says which members had prepared the last committed step, and so hold its version. The processes'
own logs say which process was that member, and which processes have fetched the version since. The script that runs the
processes knows when each of them ended. A rollback that loses steps was needed if no living process of some stage held
the version that was committed last.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

ADOPTED = re.compile(r" is in view (\d+), with peers? (.*)$")
NUMBER = re.compile(r"\d+")
DOWNLOAD = re.compile(r" has the state of step (\d+) ")
JOINS = re.compile(r"^peer (\d+): joins ", re.MULTILINE)
HEARD_S = 1.0  # the coordinator has to hear of a download before it can count on it


@dataclass
class Life:
    """One process of a peer. `peer`: None for a newcomer that has no id yet. `ended_s`: when it ended, or was replaced
    by its owner. `views`: the numbers of those views with the peer that it has adopted. `downloads`: (when, version) of
    states that it fetched."""

    peer: int | None
    ended_s: float = math.inf
    views: list[int] = field(default_factory=list)
    downloads: list[tuple[float, int]] = field(default_factory=list)

    def note(self, line: str, now_s: float) -> None:
        """Take in a line of the log of the process."""
        if found := JOINS.search(line):
            self.peer = int(found[1])
        if (found := ADOPTED.search(line)) and str(self.peer) in NUMBER.findall(found[2]):
            self.views.append(int(found[1]))
        if found := DOWNLOAD.search(line):
            self.downloads.append((now_s, int(found[1])))

    def view_until(self, number: int) -> int:
        """The last view up to `number` that the process adopted; 0 if there is none."""
        return max((view for view in self.views if view <= number), default=0)


@dataclass(frozen=True)
class Rollback:
    """A rollback that lost steps. `holders[stage]`: peers whose living process held the version of `step` updates, and
    None if the trace does not say who the members were."""

    at_s: float
    step: int
    to: int
    holders: dict[int, list[int]] | None

    @property
    def was_needed(self) -> bool:
        return self.holders is not None and not all(self.holders.values())


@dataclass(frozen=True)
class _Committed:
    """The members of the view in which the last step was committed, and when that was."""

    at_s: float = 0.0
    n_committed: int = 0
    view: int = 0
    members: Mapping[int, int] = field(default_factory=dict)


def rollbacks(records: Iterable[Mapping], lives: Sequence[Life], n_stages: int) -> list[Rollback]:
    """The rollbacks that lost steps. `records`: the coordinator's trace."""
    found: list[Rollback] = []
    views: dict[int, Mapping[int, int]] = {}
    view = 0
    last = _Committed()
    for record in records:
        report, at_s = record["fields"], record["t"]
        match record["kind"]:
            case "view":
                view = report["view"]
                views[view] = {int(peer): stage for peer, stage in report["members"].items()}
            case "step":
                last = _Committed(at_s, report["step"] + 1, view, views.get(view, {}))
            case "restarted" if report["step"] != last.n_committed:  # the coordinator before could not report it
                last = _Committed(at_s, report["step"], report["view"], views.get(report["view"], {}))
            case "rollback" if report["again"]:
                is_known = last.n_committed == report["step"] and last.members
                present = last.members | views.get(view, {}) if is_known else {}
                by_stage = [[peer for peer in present if present[peer] == stage] for stage in range(n_stages)]
                holders = {stage: _holders(peers, at_s, last, lives) for stage, peers in enumerate(by_stage)}
                found.append(Rollback(at_s, report["step"], report["to"], holders if is_known else None))
    return found


def _holders(peers: Iterable[int], at_s: float, last: _Committed, lives: Iterable[Life]) -> list[int]:
    """Which of these peers have a living process that holds the version of `last`."""
    found: list[int] = []
    for peer in sorted(peers):
        own = [life for life in lives if life.peer == peer]
        prepared = max(own, key=lambda life: life.view_until(last.view), default=None)
        is_prepared = peer in last.members and prepared and prepared.view_until(last.view)
        holding = [prepared] if prepared and is_prepared else []
        holding += [life for life in own if _has_fetched(life, last, at_s)]
        found += [peer] * any(life.ended_s > at_s for life in holding)
    return found


def _has_fetched(life: Life, last: _Committed, before_s: float) -> bool:
    """Whether a process has fetched the version of `last`, long enough ago for the coordinator to know."""
    return any(
        version == last.n_committed and last.at_s < when_s + HEARD_S < before_s for when_s, version in life.downloads
    )
