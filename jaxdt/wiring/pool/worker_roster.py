"""The workers that a server has admitted, each under an admission, and which of their processes count.

A worker keeps its id when it is started again, and messages of its earlier process may come late. So the newest process
of an id counts: when the server hears of another one, the one before is evicted and is never admitted again. All that a
worker says besides stands under an admission, a number that grows and never repeats, so what an earlier process has
computed or contributed changes nothing. A process is evicted, too, after REFUSED_MAX contributions in a row that
cannot be right; the worker may be started again.
"""

from collections import deque
from dataclasses import dataclass, field

from jaxdt.protocol import events as ev

REFUSED_MAX = 3  # contributions of a process that were refused one after another, before it is evicted
ADMISSIONS = 1_000_000  # of workers, for each admission of their server
N_PROCESSES = 8  # of an id, that are remembered


@dataclass
class AdmittedWorker:
    """A worker that is admitted. `versions`: of the parameters that it holds; `n_tasks`: leases that it takes at most;
    `is_late`: a lease of its has run out, and it has answered nothing since."""

    process: int
    admission: int
    versions: frozenset[int] = frozenset()
    n_tasks: int = 0
    is_late: bool = False


@dataclass
class _Processes:
    """The processes of one id: those that were heard, the newest last. `refused`: why contributions of the newest were
    refused since one was added; `heard_s`: when the worker was heard last; `n_counted`: microbatches whose gradient it
    has contributed; `cpu_s`: the processor time of the newest process."""

    heard: deque[int] = field(default_factory=lambda: deque(maxlen=N_PROCESSES))
    refused: list[str] = field(default_factory=list)
    heard_s: float = 0.0
    n_counted: int = 0
    cpu_s: float = 0.0


class WorkerRoster:
    """The workers of one server."""

    def __init__(self):
        self.admitted: dict[int, AdmittedWorker] = {}
        self._waiting: dict[int, int] = {}  # worker -> process, of those who have asked before there was a version
        self._processes: dict[int, _Processes] = {}
        self._n_admissions = 0

    def hear(self, now_s: float, peer: int, process: int, cpu_s: float) -> str:
        """A process, which has used `cpu_s`, says that it is the worker `peer`. Why it is evicted; '' if it is not."""
        processes = self._processes.setdefault(peer, _Processes())
        if process not in processes.heard:
            processes.heard.append(process)
            processes.refused.clear()
        if process != processes.heard[-1]:
            return f"worker {peer}: another process of worker {peer} computes for this server"
        processes.heard_s, processes.cpu_s = now_s, cpu_s
        return self._evict(peer, processes)

    def is_another(self, peer: int, process: int) -> bool:
        """Whether another process of the worker is admitted."""
        return peer in self.admitted and self.admitted[peer].process != process

    def wait(self, peer: int, process: int) -> None:
        """There is no version yet that the worker could compute with."""
        self._waiting[peer] = process

    def take_waiting(self) -> list[tuple[int, int]]:
        """Those who have waited, and their processes; they wait no more."""
        waiting, self._waiting = self._waiting, {}
        return sorted(waiting.items())

    def admit(self, peer: int, process: int, own_admission: int) -> None:
        """The worker is admitted, under a new admission. `own_admission`: of the server."""
        self._n_admissions += 1
        self.admitted[peer] = AdmittedWorker(process, own_admission * ADMISSIONS + self._n_admissions)

    def remove(self, peer: int) -> None:
        self.admitted.pop(peer, None)

    def of_admission(self, peer: int, admission: int) -> AdmittedWorker | None:
        """A worker that speaks under its present admission."""
        worker = self.admitted.get(peer)
        return worker if worker and worker.admission == admission else None

    def refuse(self, peer: int, problem: str) -> str:
        """A contribution of the worker's newest process cannot be right. Why that is evicted; '' if it is not."""
        processes = self._processes[peer]
        processes.refused.append(problem)
        return self._evict(peer, processes)

    def count(self, peer: int, n_microbatches: int) -> None:
        """The gradient of so many microbatches, which the worker has contributed, is added."""
        self._processes[peer].n_counted += n_microbatches
        self._processes[peer].refused.clear()

    def statuses(self, now_s: float) -> tuple[ev.WorkerStatus, ...]:
        """The statuses of the workers that are admitted."""
        known = ((peer, self._processes[peer]) for peer in sorted(self.admitted))
        return tuple(ev.WorkerStatus(peer, one.n_counted, now_s - one.heard_s, one.cpu_s) for peer, one in known)

    @staticmethod
    def _evict(peer: int, processes: _Processes) -> str:
        if len(processes.refused) < REFUSED_MAX:
            return ""
        last = processes.refused[-1]
        return f"worker {peer}: {REFUSED_MAX} of its contributions were refused one after another, the last one: {last}"
