"""For which server each of a pool's workers computes. The coordinator says it, and knows nothing else of workers.

A worker of the plan has its stage and server by the plan. Any other one gets the server that has the fewest workers, of
all stages. A worker whose server is gone asks again, and gets another server of its stage: it has compiled that
stage's functions.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence


class WorkerPlaces:
    """`planned`: worker -> (stage, server), of the plan's workers."""

    def __init__(self, planned: Mapping[int, tuple[int, int]]):
        self._planned = planned
        self._stage_of = {worker: stage for worker, (stage, _) in planned.items()}
        self._n_workers: Counter[int] = Counter()  # of each server

    def counted(self, server: int, n_workers: int) -> None:
        """A server says how many workers it has."""
        self._n_workers[server] = n_workers

    def place(self, worker: int, servers: Sequence[Collection[int]]) -> tuple[int, int | None]:
        """The stage and server of a worker that asks. `servers`: of each stage, those that are here. No server if the
        worker's stage has none."""
        if worker not in self._stage_of:
            found = [(self._n_workers[server], stage) for stage, row in enumerate(servers) for server in row]
            if not found:
                return 0, None
            self._stage_of[worker] = min(found)[1]
        stage = self._stage_of[worker]
        _, server = self._planned.get(worker, (stage, None))
        if server not in servers[stage]:
            server = min(servers[stage], key=lambda server: (self._n_workers[server], server), default=None)
        if server is not None:
            self._n_workers[server] += 1  # until the server says it
        return stage, server
