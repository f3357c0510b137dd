"""Advice to replan: after a change of members a search for a better plan begins, beside the coordinator's loop.

The search itself is passed in, since the runtime knows no planner. It runs in a thread that only waits for it, and its
failure is told like its result. Only one search runs at a time, and it is given up when members change again.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import ReplanReport
from jaxdt.run.plan import Plan

Seconds = Mapping[int, Mapping[str, float]]  # of each peer: per kind of Work, on the stage of the plan
NO_NETWORK = "it needs the links between the devices: --network=network.json (measure.py links writes one)"


class Search(Protocol):
    """One search for a better plan."""

    def run(self) -> ReplanReport:
        """Search, which takes a while."""
        ...

    def cancel(self) -> None:
        """End the search soon, before or while it runs; what it finds is of no use."""
        ...


StartSearch = Callable[[frozenset[int], Seconds], Search]  # for the members that are there


class ReplanAdvice:
    """The advice for one run, whose plan is `plan`. start: makes a search; None where there is no network to plan
    on."""

    def __init__(self, plan: Plan, start: StartSearch | None):
        self._planned = frozenset(plan.peers)
        self._start = start
        self._present: frozenset[int] = self._planned
        self._search: Search | None = None
        self._has_begun = False

    def members(self, members: Iterable[int], seconds: Seconds, post: Callable[[ev.Advised], None]) -> None:
        """These are the members now; `post` gets the advice, from another thread."""
        if not self._has_begun and self._start is None:
            post(ev.Advised(ReplanReport([], problem=NO_NETWORK)))
        self._has_begun = True
        present = frozenset(members)
        if self._start is None or present == self._present:
            return
        self._present = present
        self.end()
        if present == self._planned:
            return
        if unknown := sorted(present - self._planned):
            reason = f"the network does not say which devices the newcomers {', '.join(map(str, unknown))} are"
            post(ev.Advised(ReplanReport(sorted(present), problem=reason)))
            return
        self._search = search = self._start(present, seconds)
        threading.Thread(target=self._run, args=(search, present, post), name="replan", daemon=True).start()

    def end(self) -> None:
        """Give up the search that runs, if one does."""
        search, self._search = self._search, None
        if search is not None:
            search.cancel()

    def _run(self, search: Search, present: frozenset[int], post: Callable[[ev.Advised], None]) -> None:
        try:
            report = search.run()
        except Exception as error:  # told, and of no consequence for the run
            reason = (str(error).strip().splitlines() or [""])[-1]
            report = ReplanReport(sorted(present), problem=reason or type(error).__name__)
        if self._search is search:
            post(ev.Advised(report))
