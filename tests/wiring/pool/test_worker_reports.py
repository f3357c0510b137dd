"""What a worker and its server say of the work of the worker."""

from collections import Counter
from dataclasses import replace

from test_pool_memory import WORKERS, churn

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import WorkerBeginsReport, WorkerProgressReport
from jaxdt.testing.case import play

N_STEPS = 8


def test_a_worker_says_for_whom_it_computes_and_how_much_it_has_handed_in():
    """Without faults it hands in all that it has done of the steps that are over."""
    begun, progress = [], {worker: [] for worker in WORKERS}
    done = {worker: Counter() for worker in WORKERS}  # step -> backwards that the worker has sent

    def note(now_s, peer, event, actions):
        for action in actions:
            if isinstance(action, WorkerBeginsReport):
                begun.append((peer, action.server, action.stage))
            if isinstance(action, WorkerProgressReport):
                progress[peer].append(action)
            if peer in done and isinstance(action, ev.Send) and isinstance(action.body, ev.TaskDone):
                done[peer][action.body.step] += 1
            if peer in done and isinstance(action, ev.Send) and isinstance(action.body, ev.TaskOutput):
                done[peer][action.body.key.step] += action.body.key.kind == "grad"

    play(replace(churn(N_STEPS, 0), faults=()), observer=note)
    place = {2: (0, 0), 3: (0, 0), 4: (1, 1), 5: (1, 1)}  # server and stage
    assert len(begun) >= 2 and sorted(begun) == [(worker, *place[worker]) for worker in WORKERS if done[worker]]
    for worker, reports in progress.items():
        assert [report.version for report in reports] == list(range(len(reports))) and len(reports) >= N_STEPS
        for report in reports:
            assert report.n_handed_in == sum(n for step, n in done[worker].items() if step < report.version)
            assert report.n_of_stage == 4 * report.version  # microbatches of a step
        assert reports[-1].n_handed_in < reports[-1].n_of_stage
