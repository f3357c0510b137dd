"""What a server's workers do for it, in numbers."""

from dataclasses import replace

from jaxdt.protocol import events as ev
from jaxdt.protocol.ledger import NO_LOSSES
from jaxdt.protocol.reports import WorkerLostReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.codec import EXACT
from jaxdt.run.work import Work, WorkKind
from jaxdt.runtime.reporting.counts import PoolSummary, summary_lines
from jaxdt.wiring.pool.server_counts import CountedServer

ROUND = RoundId(RoundKind.CONTRIBUTION, 0, 0, peer=5, view=1, attempt=1)


class Scripted:
    """A wiring that answers each event with the next list."""

    READS = frozenset({ev.Ran, ev.Updated})
    n_workers, n_leases = 2, 3
    computed_steps = ()
    statuses = (ev.WorkerStatus(5, 2, 0.5),)

    def worker_statuses(self, now_s):
        return self.statuses

    def __init__(self, *answers):
        self._answers = list(answers)

    def handle(self, now_s, event):
        return self._answers.pop(0)


def ran(kind):
    return ev.Ran(Work(0, kind, None, 1, 0), 0.0, 1.0, {})


def counted(m):
    return ev.Accumulated(0, 0, m, 2, None)


def test_what_workers_did_and_for_how_long_the_server_aggregated():
    wiring = Scripted(
        [],
        [counted(0)],
        [counted(1), counted(2)],
        [WorkerLostReport(0, 6, "crashed", 3), WorkerLostReport(0, 5, "late", 1, begins_anew=True)],
        [],
    )
    server = CountedServer(wiring, EXACT)
    server.handle(1.0, ev.Updated(0, 0))
    wiring.computed_steps = [0]
    server.handle(7.0, ran(WorkKind.BACKWARD))  # all is computed
    for kind, n_numbers in ((RoundKind.CONTRIBUTION, 100), (RoundKind.GRADIENT, 50)):
        shard = ev.Shard(ev.SliceKey(replace(ROUND, kind=kind), 0, n_numbers, 5), ((5,), ()), 2, NO_LOSSES)
        assert server.handle(7.5, ev.Received(ev.Header("r", 0, 1, 5), shard)) == []
    assert len(server.handle(8.0, ran(WorkKind.CONTRIBUTE))) == 2
    server.handle(8.5, ran(WorkKind.BACKWARD))
    server.handle(9.0, ev.Updated(0, 1))
    (counts,) = server.handle(9.0, ev.Status({}))
    assert counts == ev.ServerCounts(
        {"workers": 2, "leases": 3, "microbatches": 3, "by_workers": 2, "stolen": 0, "redone": 4, "lost": 1}
        | {"contribution_bytes": 400, "aggregation_s": 2.0, "steps_s": 8.0},
        Scripted.statuses,
    )
    summary = PoolSummary()
    assert summary.fields is None and summary_lines(None) == [] and summary.doubt == ""
    summary.counted(0, counts.values)
    summary.counted(1, counts.values | {"aggregation_s": 1.0})
    summary.counted(2, {"step": 1.0})  # no server
    said = "workers were lost twice, 8 microbatches computed again: the prediction is of a run that keeps its workers"
    assert summary.doubt == said
    assert summary.fields["by_workers"] == 4 and summary.fields["aggregation_frac"] == 0.125
    assert "did 4 of 6 microbatches of stages; 2 were lost, 8 " in summary_lines(summary.fields)[0]
