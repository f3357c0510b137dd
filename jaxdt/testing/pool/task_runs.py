"""Random runs of a server's task table against workers that are lost, late or told everything twice.

    python -m jaxdt.testing.pool.task_runs --runs=2000

An accumulator is a list of microbatches, so a sum shows what is in it. A run is right if the server's sum holds each
microbatch exactly once. The control issues again only what was unfinished when a worker was lost, as the paper's text
has it. Prints how many runs of each were right. Exit codes: 0 all runs of the table were right, 1 some were not.
"""

import argparse
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxdt.run.work import WorkKind
from jaxdt.testing.pool.reissue_only import ReissueOnly
from jaxdt.wiring.pool.task_table import Lease, TaskTable, Verdict

SERVER = 0
N_CREDITS = 2
LEASE_S = 8.0  # of which a task takes about one, if the worker is there
SEEN_S = 1.0  # until the server knows that a worker has ended
CALLED_S = 10.0  # for so long the server waits for a contribution
END_S = 1e4  # a run that takes longer will never end


@dataclass
class Worker:
    """`admission` grows each time that the server admits the worker. One that is away answers nothing."""

    admission: int
    speed: float
    sum: list[int] = field(default_factory=list)
    counted: list[tuple[int, int]] = field(default_factory=list)  # microbatch and lease of what is in `sum`
    leases: list[Lease] = field(default_factory=list)  # that wait or run
    away_until_s: float = 0.0
    n_backwards: int = 0


@dataclass(frozen=True)
class RunOptions:
    """How often what goes wrong. Rates are per second and worker."""

    n_microbatches: int
    n_workers: int
    is_last_stage: bool
    crash_rate: float
    pause_rate: float
    duplicate_prob: float
    late_prob: float

    @staticmethod
    def draw(rng: random.Random) -> "RunOptions":
        return RunOptions(
            n_microbatches=rng.randint(1, 24),
            n_workers=rng.randint(1, 5),
            is_last_stage=rng.random() < 0.3,
            crash_rate=rng.choice((0.0, 0.02, 0.1)),
            pause_rate=rng.choice((0.0, 0.02, 0.1)),
            duplicate_prob=rng.choice((0.0, 0.2)),
            late_prob=rng.choice((0.0, 0.05)),
        )


class TaskRun:
    """One step of one server. `total`: what the server's accumulator holds at the end."""

    def __init__(self, seed: int, table_type: type[TaskTable] = TaskTable, options: RunOptions | None = None):
        self._rng = random.Random(f"pool {seed}")
        self.options = options or RunOptions.draw(self._rng)
        n = self.options.n_microbatches
        self.table = table_type(range(n), SERVER, self.options.is_last_stage, itertools.count(1))
        self.now_s = 0.0
        self.total: list[int] = []
        self.workers = {
            peer: Worker(admission=1, speed=self._rng.uniform(0.5, 2.0))
            for peer in range(1, 1 + self.options.n_workers)
        }
        self._events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._order = itertools.count()
        self._called: dict[int, float] = {}  # worker -> until when the server waits for its contribution
        self._is_server_busy = False
        self._is_over = False

    def run(self) -> Counter[int]:
        """How often each microbatch is in the server's sum. RuntimeError if the step never ends."""
        for m in range(self.options.n_microbatches):
            self._at(self._rng.uniform(0.0, 3.0), self._input_arrived, m)
        self._at(0.0, self._tick)
        while not self._is_over:
            if not self._events or self.now_s > END_S:
                raise RuntimeError("the step does not end")
            self.now_s, _, callback, args = heapq.heappop(self._events)
            callback(*args)
        return Counter(self.total)

    def _at(self, when_s: float, callback: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), callback, args))

    def _say(self, callback: Callable[..., None], *args: object) -> None:
        """A message: it arrives some time, in any order, perhaps twice and perhaps very late."""
        rng, options = self._rng, self.options
        for _ in range(1 + (rng.random() < options.duplicate_prob)):
            delay_s = rng.uniform(0.01, 0.5) + (rng.uniform(0.0, 30.0) if rng.random() < options.late_prob else 0.0)
            self._at(self.now_s + delay_s, callback, *args)

    # ------------------------------------------------------------------------------------------------------ the server

    def _input_arrived(self, m: int) -> None:
        self.table.input_arrived(m)
        self._serve()

    def _gradient_arrived(self, m: int) -> None:
        self.table.gradient_arrived(m)
        self._serve()

    def _tick(self) -> None:
        self.table.expire(self.now_s)
        for peer, until_s in list(self._called.items()):
            if until_s <= self.now_s:
                self._lose(peer)
        self._break_things()
        self._serve()
        self._at(self.now_s + 0.5, self._tick)

    def _serve(self) -> None:
        """Grant what can be granted, and call for contributions when all is done."""
        for peer in self.workers:
            while peer not in self._called and (task := self._task_for(peer)):
                lease = self.table.lease(*task, peer, self.now_s, self.now_s + LEASE_S)
                self._say(self._leased, peer, self.workers[peer].admission, lease)
        task = self.table.next_task(SERVER, in_flight_max=2)
        if not self._is_server_busy and task:
            self._is_server_busy = True
            self._at(self.now_s + 1.0, self._server_did, self.table.lease(*task, SERVER, self.now_s))
        if self.table.is_committed:
            self._is_over = True
        elif self.table.is_done:
            for peer in self.table.contributors:
                if peer not in self._called:
                    self._called[peer] = self.now_s + CALLED_S
                    self._say(self._call, peer, self.workers[peer].admission)

    def _task_for(self, peer: int) -> tuple[WorkKind, int] | None:
        backward = self.table.own_backward(peer)
        if backward is not None:
            return WorkKind.BACKWARD, backward
        return self.table.next_task(peer, 3) if len(self.table.leases_of(peer)) < N_CREDITS else None

    def _server_did(self, lease: Lease) -> None:
        self._is_server_busy = False
        assert self.table.finish(lease.number) is Verdict.ACCEPTED
        self._accepted(lease)
        if lease.kind == WorkKind.BACKWARD:
            self.total.append(lease.microbatch)
            assert self.table.commit(SERVER, self.table.contribution(SERVER))
        self._serve()

    def _result(self, peer: int, admission: int, lease: Lease) -> None:
        if admission != self.workers[peer].admission:
            return
        verdict = self.table.finish(lease.number)
        if verdict is Verdict.ACCEPTED:
            self._accepted(lease)
        elif verdict is Verdict.STALE and lease.kind == WorkKind.BACKWARD:
            self._lose(peer)
        self._serve()

    def _accepted(self, lease: Lease) -> None:
        if lease.kind == WorkKind.FORWARD:
            self._at(self.now_s + self._rng.uniform(0.1, 2.0), self._gradient_arrived, lease.microbatch)

    def _contributed(self, peer: int, admission: int, items: tuple[tuple[int, int], ...], total: list[int]) -> None:
        if admission != self.workers[peer].admission or peer not in self._called:
            return
        if self.table.commit(peer, items):
            self.total += total
            del self._called[peer]
        else:
            self._lose(peer)
        self._serve()

    def _lose(self, peer: int) -> None:
        """The server loses the worker, and admits it again if it is still there."""
        self.table.void(peer)
        self._called.pop(peer, None)
        if type(self.table) is ReissueOnly:
            return  # the paper's text knows of no admission
        worker = self.workers[peer]
        self.workers[peer] = Worker(worker.admission + 1, worker.speed, away_until_s=worker.away_until_s)

    # ------------------------------------------------------------------------------------------------------ the workers

    def _break_things(self) -> None:
        """Half a second's worth of crashes and pauses."""
        for peer, worker in self.workers.items():
            if self._rng.random() < self.options.crash_rate / 2:
                worker.sum, worker.counted, worker.leases = [], [], []
                worker.away_until_s = self.now_s + self._rng.uniform(2.0, 20.0)
                self._at(self.now_s + SEEN_S, self._lose, peer)
            elif self._rng.random() < self.options.pause_rate / 2:
                worker.away_until_s = max(worker.away_until_s, self.now_s + self._rng.uniform(0.0, 30.0))

    def _when_back(self, peer: int, callback: Callable[..., None], *args: object) -> bool:
        """Whether the worker is away; then it hears what it is told when it is back."""
        until_s = self.workers[peer].away_until_s
        if until_s > self.now_s:
            self._at(until_s, callback, *args)
        return until_s > self.now_s

    def _leased(self, peer: int, admission: int, lease: Lease) -> None:
        worker = self.workers[peer]
        if admission != worker.admission or self._when_back(peer, self._leased, peer, admission, lease):
            return
        if any(lease.number == other.number for other in worker.leases):
            return  # said twice
        worker.leases.append(lease)
        if len(worker.leases) == 1:
            self._at(self.now_s + 1.0 / worker.speed, self._worker_did, peer, worker, lease)

    def _worker_did(self, peer: int, worker: Worker, lease: Lease) -> None:
        """The worker's device is done with its first lease, unless the process has ended."""
        if worker is not self.workers[peer] or lease not in worker.leases:
            return
        if self._when_back(peer, self._worker_did, peer, worker, lease):
            return
        worker.leases.remove(lease)
        if lease.kind == WorkKind.BACKWARD and (lease.microbatch, lease.number) not in worker.counted:
            worker.sum.append(lease.microbatch)
            worker.counted.append((lease.microbatch, lease.number))
            worker.n_backwards += 1
        self._say(self._result, peer, worker.admission, lease)
        if worker.leases:
            self._at(self.now_s + 1.0 / worker.speed, self._worker_did, peer, worker, worker.leases[0])

    def _call(self, peer: int, admission: int) -> None:
        worker = self.workers[peer]
        if admission != worker.admission or self._when_back(peer, self._call, peer, admission) or not worker.counted:
            return
        self._say(self._contributed, peer, admission, tuple(sorted(worker.counted)), worker.sum)
        worker.sum, worker.counted = [], []


def is_right(seed: int, table_type: type[TaskTable] = TaskTable) -> bool:
    """Whether the server's sum holds each microbatch once in the run of a seed."""
    run = TaskRun(seed, table_type)
    return run.run() == Counter(range(run.options.n_microbatches))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=2000)
    n_runs = parser.parse_args().runs
    n_wrong = {kind: sum(not is_right(seed, kind) for seed in range(n_runs)) for kind in (TaskTable, ReissueOnly)}
    for kind, wrong in n_wrong.items():
        print(f"{kind.__name__}: {n_runs - wrong} of {n_runs} runs right, {100 * wrong / n_runs:.1f} % wrong")
    return 1 if n_wrong[TaskTable] else 0


if __name__ == "__main__":
    raise SystemExit(main())
