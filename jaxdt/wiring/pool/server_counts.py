"""Counts of the work of a server's workers, for people: in its heartbeats, and at the end in the run's summary."""

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import TasksStolenReport, WorkerLostReport
from jaxdt.protocol.round_id import RoundKind
from jaxdt.run.codec import CodecSpec, exchanged_bytes
from jaxdt.run.work import WorkKind
from jaxdt.wiring.pool.server import PoolServer


class CountedServer:
    """Hands all events to the wiring, and counts. `codec`: how contributions travel.

    A step's aggregation lasts from the moment at which all microbatches of this server are computed until the next
    version is here: contributions, the sum over servers, the record of the step, the update; and, at all servers but
    those that compute longest, that these are awaited. Where updates are delayed the next step is computed
    meanwhile."""

    def __init__(self, wiring: PoolServer, codec: CodecSpec):
        self.READS = wiring.READS | {ev.Status, ev.Shard}
        self._wiring = wiring
        self._codec = codec
        self._counts = dict.fromkeys(
            ("microbatches", "by_workers", "stolen", "redone", "lost", "contribution_bytes"), 0.0
        )
        self._aggregation_s = 0.0
        self._steps_s = 0.0
        self._updated_s: float | None = None
        self._computed_s: dict[int, float] = {}  # step -> when all its microbatches were computed

    @property
    def queue(self) -> tuple[int, bool]:
        return self._wiring.queue

    def cancel_run(self) -> None:
        self._wiring.cancel_run()

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Status():
                return [ev.ServerCounts(self._values(), self._wiring.worker_statuses(now_s))]
            case ev.Received(_, ev.Shard(key)):
                if key.round.kind == RoundKind.CONTRIBUTION:
                    self._counts["contribution_bytes"] += exchanged_bytes(self._codec, key.hi - key.lo)
                return []
            case ev.Updated(_, version):
                self._on_updated(now_s, version)
            case _:
                pass
        actions = self._wiring.handle(now_s, event)
        is_of_worker = isinstance(event, ev.Ran) and event.work.kind == WorkKind.CONTRIBUTE
        for action in actions:
            match action:
                case ev.Accumulated():
                    self._counts["microbatches"] += 1
                    self._counts["by_workers"] += is_of_worker
                case TasksStolenReport(step=step, n_microbatches=n_microbatches):
                    self._counts["stolen"] += n_microbatches
                    self._computed_s.pop(step, None)  # there is more to compute
                case WorkerLostReport(n_redone=n_redone, begins_anew=begins_anew):
                    self._counts["lost"] += not begins_anew
                    self._counts["redone"] += n_redone
                case _:
                    pass
        for step in self._wiring.computed_steps:
            self._computed_s.setdefault(step, now_s)
        return actions

    def _on_updated(self, now_s: float, version: int) -> None:
        if self._updated_s is not None:
            self._steps_s += now_s - self._updated_s
        self._updated_s = now_s
        for step in [step for step in self._computed_s if step < version]:
            self._aggregation_s += now_s - self._computed_s.pop(step)

    def _values(self) -> dict[str, float]:
        now = {ev.WORKERS: float(self._wiring.n_workers), "leases": float(self._wiring.n_leases)}
        return now | self._counts | {"aggregation_s": self._aggregation_s, "steps_s": self._steps_s}
