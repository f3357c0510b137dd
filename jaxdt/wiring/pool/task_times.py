"""How long the clients of a server take for a microbatch, how many leases a worker needs so that it never waits for the
next one, to whom the last tasks of a batch do not go, and how many of them another server's clients should do.

A worker says with each result how long it computed, and how long it held the task: from the moment at which all that
the task needs was there until the result went off. The rest of the time since the lease was granted the task travelled.
So no clocks are compared.
"""

import heapq
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping

from jaxdt.protocol.deadline import FIRST_CONTACT_S, WINDOW, spread_s

Loads = tuple[tuple[float, float], ...]  # of clients: seconds of work yet to do, and seconds of a microbatch
FACTOR = 3.0  # of the median, until a deadline (hybrid parameter servers give no number)
LEASES_MIN, LEASES_MAX = 2, 8  # of a worker at a time: one runs and one waits; more of them where tasks travel for long


class TaskTimes:
    """The times of the clients of one server, of which the server itself is one."""

    def __init__(self):
        self._work: defaultdict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._work_s: dict[str, dict[int, float]] = {}  # kind -> client -> median
        self._travel: defaultdict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def computed(self, client: int, kind: str, work_s: float) -> None:
        """The client has computed a task, which contained no forward that is done again."""
        work = self._work[client, kind]
        work.append(work_s)
        self._work_s.setdefault(kind, {})[client] = statistics.median(work)

    def travelled(self, worker: int, kind: str, travel_s: float) -> None:
        """A task was so long on its way to a worker and back, input and output included."""
        self._travel[worker, kind].append(max(0.0, travel_s))

    def forget(self, worker: int) -> None:
        for times in (self._work, self._travel):
            for key in [key for key in times if key[0] == worker]:
                del times[key]
        for work_s in self._work_s.values():
            work_s.pop(worker, None)

    def n_leases(self, worker: int, kind: str) -> int:
        """How many leases the worker needs at a time: one runs, and while one travels the others are computed. The
        shortest travel counts, since a longer one may have waited for the one before."""
        travel, work_s = self._travel.get((worker, kind)), self._work_s.get(kind, {}).get(worker)
        if not travel or not work_s:
            return LEASES_MIN
        return min(LEASES_MAX, max(LEASES_MIN, 1 + math.ceil(min(travel) / work_s)))

    @property
    def is_known(self) -> bool:
        """Whether any client has computed anything."""
        return any(self._work_s.values())

    def microbatch_s(self, client: int) -> float:
        """Seconds of forward and backward of a microbatch. Any number if nothing is known of any client."""
        return sum(self.task_s(client, kind) for kind in self._work_s) or 1.0

    def task_s(self, client: int, kind: str) -> float:
        """Seconds of a task of a microbatch. A client of which nothing is known counts like the others; 0 if nothing is
        known of any client."""
        of_kind = self._work_s.get(kind)
        if not of_kind:
            return 0.0
        return of_kind[client] if client in of_kind else statistics.median(of_kind.values())


def others_are_sooner(client: int, held: Mapping[int, int], microbatch_s: Mapping[int, float], n_left: int) -> bool:
    """Whether the other clients could do all that is left before this one would be done with one more. Then it should
    have none: the batch would end later. `held`: client -> microbatches that it has to do; `n_left`: microbatches
    without a client. False for the client that would be done first."""
    end_s = (held[client] + 1) * microbatch_s[client]
    n_sooner = sum(
        max(0, math.ceil(end_s / microbatch_s[other] - 1e-6) - 1 - n) for other, n in held.items() if other != client
    )
    return n_sooner >= n_left


def share_of(thieves: Loads, own: Loads, n_left: int) -> int:
    """How many of `n_left` microbatches another server's clients should do, if each microbatch goes to the client that
    would be done with it first, an own one if two are alike."""
    ends = [(busy_s + microbatch_s, 0, microbatch_s) for busy_s, microbatch_s in own]
    ends += [(busy_s + microbatch_s, 1, microbatch_s) for busy_s, microbatch_s in thieves]
    heapq.heapify(ends)
    n_stolen = 0
    for _ in range(n_left):
        end_s, is_thief, microbatch_s = ends[0]
        n_stolen += is_thief
        heapq.heapreplace(ends, (end_s + microbatch_s, is_thief, microbatch_s))
    return n_stolen


class LeaseTimes:
    """The deadlines of the workers of one server: how long each may take for what it was asked for, learned from what
    took how long before. `floor_s`: the shortest one.

    The time counts from the request to the answer, so it contains the link and the worker's queue. A worker of which
    nothing is known yet is measured by the others. After each failure of the same task the time doubles: what is slow
    for everybody gets done in the end."""

    def __init__(self, floor_s: float):
        self._floor_s = floor_s
        self._of_worker: defaultdict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._of_all: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def took(self, worker: int, what: str, seconds: float) -> None:
        """The worker has answered in time."""
        self._of_worker[worker, what].append(seconds)
        self._of_all[what].append(seconds)

    def forget(self, worker: int) -> None:
        """The worker is gone; should it come again, it is measured by the others first."""
        for key in [key for key in self._of_worker if key[0] == worker]:
            del self._of_worker[key]

    def timeout_s(self, worker: int, what: str, n_failures: int = 0) -> float:
        """How long the worker may take, after so many failures of others or its own. Nothing of the kind was ever
        done: as long as a process may take to begin, since it may have to compile."""
        seconds = self._of_worker.get((worker, what)) or self._of_all.get(what)
        timeout_s = spread_s(seconds, FACTOR) if seconds else FIRST_CONTACT_S
        return max(self._floor_s, timeout_s) * 2**n_failures
