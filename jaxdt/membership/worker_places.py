"""For which server each of a pool's workers computes, as far as the coordinator knows: it tells a worker that asks, and
hears it from the servers.

A worker of the plan has its stage and server by the plan. Any other one gets the server that has the fewest workers, of
all stages. A worker whose server is gone asks again, and gets another server of its stage: it has compiled that
stage's functions. A worker that a server still has gets that server, so two processes that say they are one worker come
to one server, which lets one of them in.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxdt.protocol.events import WorkerStatus


class WorkerPlaces:
    """`planned`: worker -> (stage, server), of the plan's workers."""

    def __init__(self, planned: Mapping[int, tuple[int, int]]):
        self._planned = planned
        self._stage_of = {worker: stage for worker, (stage, _) in planned.items()}
        self._n_workers: Counter[int] = Counter()  # of each server
        self._statuses: dict[int, tuple[float, tuple[WorkerStatus, ...]]] = {}  # of each server, and when it said them
        self._lost: set[int] = set()  # workers that may come back

    def counted(self, now_s: float, server: int, n_workers: int, statuses: tuple[WorkerStatus, ...]) -> None:
        """A server says how many workers it has, and which."""
        self._n_workers[server] = n_workers
        self._statuses[server] = now_s, statuses

    def here(self, worker: int) -> bool:
        """A server has let the worker in. Whether it was lost before."""
        is_back = worker in self._lost
        self._lost.discard(worker)
        return is_back

    def gone(self, worker: int) -> None:
        """A server has lost the worker."""
        self._lost.add(worker)

    def rows(self, now_s: float, servers: Sequence[Collection[int]]) -> list[dict[str, Any]]:
        """The workers that the servers have, for an operator. `servers`: as in `place`."""
        found: list[dict[str, Any]] = []
        for stage, row in enumerate(servers):
            for server in sorted(set(row) & self._statuses.keys()):
                said_s, statuses = self._statuses[server]
                for status in statuses:
                    heard = {"n_counted": status.n_counted, "silent_s": round(status.silent_s + now_s - said_s, 1)}
                    found.append({"worker": status.worker, "stage": stage, "server": server} | heard)
        return found

    def place(self, worker: int, servers: Sequence[Collection[int]]) -> tuple[int, int | None]:
        """The stage and server of a worker that asks. `servers`: of each stage, those that are here. No server if the
        worker's stage has none."""
        if worker not in self._stage_of:
            found = [(self._n_workers[server], stage) for stage, row in enumerate(servers) for server in row]
            if not found:
                return 0, None
            self._stage_of[worker] = min(found)[1]
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
