"""The places of a pool's workers, as far as the coordinator knows: the server for which each worker computes. The
coordinator tells a worker its server when the worker asks, and hears from the servers which workers they have.

A worker of the plan has its stage and server by the plan. Any other one gets a stage by a rule of JOIN_RULES, and the
server of that stage with the fewest workers. A worker whose server is gone asks again, and gets another server of its
stage: it has compiled that stage's functions. A worker that a server still has gets that server, so two processes that
say they are one worker come to one server, which admits one of them.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdt.membership.newcomers import ASKED_S
from jaxdt.protocol import events as ev

Servers = Sequence[Collection[int]]  # of each stage, those that are here
Gbps = Mapping[int, float]  # server -> bandwidth to it


def _stage_of_fewest(servers: Servers, n_workers: Mapping[int, int], gbps: Gbps) -> int:
    return min((n_workers[server], stage) for stage, row in enumerate(servers) for server in row)[1]


def _stage_of_fastest(servers: Servers, n_workers: Mapping[int, int], gbps: Gbps) -> int:
    """The stage with the fastest links, in the mean over its servers; the first of equals (hybrid PS)."""
    means = {stage: statistics.fmean(gbps.get(s, 0.0) for s in row) for stage, row in enumerate(servers) if row}
    return max(means, key=lambda stage: (means[stage], -stage))


@dataclass(frozen=True)
class JoinRule:
    """`stage`: the one that a worker gets, where a server is here; `measures_links`: the worker has to do so before."""

    stage: Callable[[Servers, Mapping[int, int], Gbps], int]
    measures_links: bool


JOIN_RULES = {"balanced": JoinRule(_stage_of_fewest, False), "bandwidth": JoinRule(_stage_of_fastest, True)}


class WorkerPlaces:
    """`planned`: worker -> (stage, server), of the plan's workers; `rule`: of JOIN_RULES, for the others."""

    def __init__(self, planned: Mapping[int, tuple[int, int]], rule: str = "balanced"):
        self._rule = JOIN_RULES[rule]
        self._planned = planned
        self._stage_of = {worker: stage for worker, (stage, _) in planned.items()}
        self._n_workers: Counter[int] = Counter()  # of each server
        self._statuses: dict[
            int, tuple[float, tuple[ev.WorkerStatus, ...]]
        ] = {}  # of each server, and when it said them
        self._lost: set[int] = set()  # workers that may come back
        self._asked_s: dict[int, float] = {}  # when those got a place that no server has admitted since

    def on_workers(self, now_s: float, server: int, n_workers: int, statuses: tuple[ev.WorkerStatus, ...]) -> None:
        """A server says how many workers it has, and which."""
        self._n_workers[server] = n_workers
        self._statuses[server] = now_s, statuses

    def on_here(self, worker: int) -> bool:
        """A server has let the worker in. Whether it was lost before."""
        self._asked_s.pop(worker, None)
        is_back = worker in self._lost
        self._lost.discard(worker)
        return is_back

    def on_gone(self, worker: int) -> None:
        self._lost.add(worker)

    def on_asked(self, now_s: float, worker: int) -> None:
        """The worker has got a place, and gets ready."""
        self._asked_s[worker] = now_s

    def coming(self, now_s: float) -> list[int]:
        """Workers that get ready, for an operator; one that takes too long has ended perhaps."""
        self._asked_s = {worker: at_s for worker, at_s in self._asked_s.items() if now_s - at_s <= ASKED_S}
        return sorted(self._asked_s)

    def rows(self, now_s: float, servers: Servers) -> list[dict[str, Any]]:
        """The workers that the servers have, for an operator. `servers`: as in `place`."""
        found: list[dict[str, Any]] = []
        for stage, row in enumerate(servers):
            for server in sorted(set(row) & self._statuses.keys()):
                said_s, statuses = self._statuses[server]
                for status in statuses:
                    heard = {"n_counted": status.n_counted, "silent_s": round(status.silent_s + now_s - said_s, 1)}
                    found.append({"worker": status.worker, "stage": stage, "server": server} | heard)
        return found

    def to_measure(self, worker: int, servers: Servers, gbps: Gbps | None) -> list[int]:
        """The servers to which a worker has to measure its links before it gets a place; [] if it need not."""
        if worker in self._stage_of or gbps is not None or not self._rule.measures_links:
            return []
        return sorted(server for row in servers for server in row)

    def place(self, worker: int, servers: Servers, gbps: Gbps | None = None) -> tuple[int, int | None]:
        """The stage and server of a worker that asks, with what it has measured of its links. No server if the worker's
        stage has none, or no stage."""
        if worker not in self._stage_of:
            if not any(servers):
                return 0, None
            self._stage_of[worker] = self._rule.stage(servers, self._n_workers, gbps or {})
        stage = self._stage_of[worker]
        server = self._server_of(worker, stage)
        if server not in servers[stage]:
            server = min(servers[stage], key=lambda server: (self._n_workers[server], server), default=None)
        if server is not None:
            self._n_workers[server] += 1  # until the server says it
        return stage, server

    def _server_of(self, worker: int, stage: int) -> int | None:
        """The server that has the worker, or that the plan names."""
        for server, (_, statuses) in self._statuses.items():
            if any(status.worker == worker for status in statuses):
                return server
        return self._planned.get(worker, (stage, None))[1]
