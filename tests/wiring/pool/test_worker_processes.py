"""A server and the processes of its workers: one process counts for each worker, and what it did for a server that a
view comes to is no longer kept than it is there."""

import math
from collections import deque
from types import SimpleNamespace

import pytest

from jaxdt.membership.worker_membership import NO_SERVER, REFUSED_S, WorkerIdentity, WorkerMembership
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import WorkerLostReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run import config as run_config
from jaxdt.run.config import default_plan
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.work import Work, WorkKind
from jaxdt.wiring.pool.contributions import Contributions
from jaxdt.wiring.pool.entry import ENTRY
from jaxdt.wiring.pool.step_under_way import AskedContribution, StepUnderWay
from jaxdt.wiring.pool.worker_roster import N_PROCESSES, REFUSED_MAX, WorkerRoster

SERVER, NEIGHBOUR, WORKER, OTHER = 0, 1, 2, 3
N_MICROBATCHES = 4
MEMBERS = (ev.Member(SERVER, 0, 1), ev.Member(NEIGHBOUR, 1, 1))


def server(retain_bytes=1 << 20):
    """The first stage's server of two stages, whose first step has begun."""
    model = dict(preset="debug", n_layers=2, d_model=8, n_heads=2, max_len=4, vocab_size=16)
    plan = dict(stages=2, microbatches=N_MICROBATCHES, workers=2)
    wiring = dict(kind="pool", retain_bytes=retain_bytes)
    config = run_config.parse(dict(model=model, plan=plan, wiring=wiring))
    made = ENTRY.build(PeerSetup(config, default_plan(config), SERVER, 0, "f"), 1)[0]
    made.handle(0.0, ev.ViewChanged(ev.View(1, 1, 0, MEMBERS, (1, 1), 0)))
    made.handle(0.0, ev.Updated(0, 0))
    return made


def told(machine, now_s, src, body):
    return machine.handle(now_s, ev.Received(ev.Header("r", 0, 0, src), body))


def bodies(actions, kind, dst=None):
    """Messages of a kind among actions."""
    sends = [action for action in actions if isinstance(action, ev.Send) and dst in (None, action.dst)]
    return [send.body for send in sends if isinstance(send.body, kind)]


def enlisted(machine, now_s, worker=WORKER, process=7):
    return bodies(told(machine, now_s, worker, ev.Enlist(process, "f")), ev.Enlisted)[0]


# ------------------------------------------------------------------------------------------- one process of a worker


def test_an_answer_names_the_process_that_is_let_in():
    machine = server()
    first, second = enlisted(machine, 1.0), enlisted(machine, 2.0, process=8)
    assert (first.process, second.process) == (7, 8) and second.admission > first.admission


def test_what_an_earlier_process_says_late_changes_nothing():
    machine = server()
    enlisted(machine, 1.0, process=7)
    admission = enlisted(machine, 2.0, process=8).admission
    late = told(machine, 2.1, WORKER, ev.Enlist(7, "f"))
    [ended] = bodies(late, ev.Ended)
    assert ended.process == 7 and ended.reason == "worker 2: another process of worker 2 computes for this server"
    assert not [action for action in late if isinstance(action, WorkerLostReport)]
    assert enlisted(machine, 2.2, process=8).admission == admission


def test_a_worker_that_is_away_for_a_while_comes_back_and_one_that_was_replaced_does_not():
    machine = server()
    first = enlisted(machine, 1.0, process=7)
    machine.handle(2.0, ev.LinkChanged(WORKER, False, "cut"))
    assert enlisted(machine, 3.0, process=7).admission > first.admission
    machine.handle(4.0, ev.LinkChanged(WORKER, False, "cut"))
    enlisted(machine, 5.0, process=8)
    assert bodies(told(machine, 6.0, WORKER, ev.Enlist(7, "f")), ev.Ended)


def worker(process):
    machine = WorkerMembership(WorkerIdentity("r", "f", WORKER, SERVER, 10, 1.0, 100.0))
    machine.handle(0.0, ev.Started(process=process))
    machine.handle(0.0, ev.Ready({}, 1))
    return machine


def test_of_two_living_processes_of_a_worker_one_is_put_out_and_the_other_computes_on():
    """Both hear all that the server says to the worker, and the server hears both, over and over."""
    machine, twins, stops, lost = server(), {7: worker(7), 8: worker(8)}, {}, []
    for now_s in range(1, 20):
        for process in sorted(twins.keys() - stops.keys()):
            for enlist in bodies(twins[process].handle(now_s, ev.Woke("heartbeat")), ev.Enlist):
                answers = told(machine, now_s, WORKER, enlist)
                lost += [action for action in answers if isinstance(action, WorkerLostReport)]
                for body in bodies(answers, (ev.Enlisted, ev.Ended), WORKER):
                    for other in sorted(twins.keys() - stops.keys()):
                        stopped = [a for a in told(twins[other], now_s, SERVER, body) if isinstance(a, ev.Stop)]
                        stops |= dict.fromkeys([other] if stopped else [], stopped)
    assert stops == {7: [ev.Stop(3, "worker 2: another process of worker 2 computes for this server")]}
    assert len(lost) == 1


def test_a_worker_hears_only_what_is_said_to_its_process():
    machine = worker(8)
    assert told(machine, 1.0, SERVER, ev.Enlisted(1, 0, 0, 7)) == []
    assert told(machine, 1.0, SERVER, ev.Ended(3, "worker 2: late", 7)) == []
    assert told(machine, 1.0, SERVER, ev.Enlisted(2, 0, 0, 8)) != []
    assert told(machine, 1.0, SERVER, ev.Ended(130, "interrupted")) == [ev.Stop(130, "interrupted")]


def test_a_process_that_the_server_refuses_says_so_and_ends():
    """The transport refuses the connections of a second process while the first one's stand."""
    machine = worker(8)
    reason = "peer 2: another process has taken its place"
    [said] = machine.handle(1.0, ev.Refused(SERVER, reason))
    assert said.reason == reason
    assert not [a for a in machine.handle(1.0 + REFUSED_S, ev.Woke("heartbeat")) if isinstance(a, ev.Stop)]
    [stop] = machine.handle(1.1 + REFUSED_S, ev.Woke("heartbeat"))
    assert stop == ev.Stop(2, f"worker 2: server 0 has refused it for 30 s: {reason}")


def test_a_process_whose_connection_is_accepted_in_the_end_goes_on():
    machine = worker(8)
    machine.handle(1.0, ev.Refused(SERVER, "peer 2: another process has taken its place"))
    assert bodies(machine.handle(7.0, ev.LinkChanged(SERVER, True)), ev.Enlist)
    assert not [a for a in machine.handle(8.0 + REFUSED_S, ev.Woke("heartbeat")) if isinstance(a, ev.Stop)]


def test_a_process_that_was_put_out_stays_out_and_the_next_one_begins_anew():
    roster = WorkerRoster()
    assert roster.hear(1.0, WORKER, 7, 0.5) == ""
    assert [roster.refuse(WORKER, "its gradient is not finite") for _ in range(REFUSED_MAX - 1)] == [""] * 2
    line = "worker 2: 3 of its contributions were refused one after another, the last one: its gradient is infinite"
    assert roster.refuse(WORKER, "its gradient is infinite") == line == roster.hear(1.0, WORKER, 7, 0.5)
    assert roster.hear(1.0, WORKER, 8, 0.5) == "" and roster.refuse(WORKER, "its gradient is not finite") == ""


def test_refusals_are_forgotten_once_a_contribution_is_added():
    roster = WorkerRoster()
    roster.hear(1.0, WORKER, 7, 0.5)
    for _ in range(REFUSED_MAX):
        assert [roster.refuse(WORKER, "its gradient is not finite") for _ in range(REFUSED_MAX - 1)] == [""] * 2
        roster.count(WORKER, 4)


def test_a_process_that_was_put_out_ends_and_does_not_ask_for_another_server():
    """Its exit code is not that of a silent server, for which it would be back at once."""
    [stop] = worker(8).handle(1.0, ev.Received(ev.Header("r", 0, 0, SERVER), ev.Ended(3, "refused", 8)))
    assert stop == ev.Stop(3, "refused") and stop.code != NO_SERVER


def waiting_contribution(attempt, sq_norm=1.0):
    """A worker has contributed. Returns the step that it is for, and what the server has received."""
    rounds, items = (RoundId(RoundKind.CONTRIBUTION, 0, 0, view=1, attempt=attempt),), ((3, 7),)
    table = SimpleNamespace(contribution=lambda worker: items, commit=lambda worker, items: None)
    step = StepUnderWay(0, table, 0, deque(), None, asked={WORKER: AskedContribution(rounds, 0.0, 1.0)})
    return step, ev.ContributionReceived(WORKER, rounds, items, sq_norm)


@pytest.mark.parametrize(("sq_norm", "reason"), [
    *((sq_norm, None) for sq_norm in (0.0, 1e-30, 1.0, 1e30)),
    *((sq_norm, "its gradient is not finite") for sq_norm in (math.inf, math.nan)),
])  # fmt: skip
def test_every_finite_gradient_of_what_a_worker_has_done_is_added(sq_norm, reason):
    """A gradient of few samples, or of a small model, may be as small or as large as it likes."""
    step, received = waiting_contribution(1, sq_norm)
    contributions = Contributions(SERVER, 0, ["c"], SimpleNamespace(took=lambda *arguments: None))
    assert contributions.arrived(0.5, step, received)
    rejection = contributions.look_at(step, received)
    assert (rejection and rejection.reason) == reason
    assert (contributions.next_work() is None) == bool(reason)


def test_a_contribution_that_was_dropped_while_its_work_waited_is_not_taken_for_the_next_one():
    """The server was evicted, and is a member again before the Work of before ends."""
    contributions = Contributions(SERVER, 0, ["c"], SimpleNamespace(took=lambda *arguments: None))
    (before, first), (step, second) = waiting_contribution(1), waiting_contribution(2)
    assert contributions.look_at(before, first) is None and contributions.next_work()
    assert contributions.drop(keeps_what_is_being_added=False) == [ev.Forget(first.rounds[0])]
    assert contributions.look_at(step, second) is None
    assert contributions.next_work() is None, "its Work runs after that of the first one"
    assert contributions.added() is None and contributions.are_waiting(step)
    assert contributions.next_work()[1] == second.rounds
    assert contributions.added().rounds == second.rounds and not contributions.are_waiting(step)


def test_what_is_remembered_of_a_worker_is_bounded():
    roster = WorkerRoster()
    for process in range(10 * N_PROCESSES):
        assert roster.hear(1.0, WORKER, process, 0.5) == ""
    assert roster.hear(1.0, WORKER, 10 * N_PROCESSES - 2, 0.5) != ""
    assert len(roster._processes[WORKER].heard) == N_PROCESSES


# --------------------------------------------------------------------------------------------- what a server has kept


class Pool:
    """A server with workers, and what it lets go. The server's own computation goes on all the while."""

    def __init__(self, retain_bytes):
        self.machine = server(retain_bytes)
        self.admissions = {}
        self.leases = {WORKER: [], OTHER: []}
        self.discarded = set()

    def note(self, actions):
        self.discarded |= {action.key for action in actions if isinstance(action, ev.Discard)}
        for peer, leases in self.leases.items():
            leases += bodies(actions, ev.TaskLease, peer)
        return actions

    def join(self, peer):
        self.admissions[peer] = enlisted(self.machine, 1.0, peer, 7).admission
        self.note(told(self.machine, 1.0, peer, ev.WantsTasks(self.admissions[peer], 0, N_MICROBATCHES)))

    def do(self, peer):
        """The worker does all that it has been leased; those tasks."""
        done, self.leases[peer] = self.leases[peer], []
        for lease in done:
            result = ev.TaskDone(lease.admission, lease.step, lease.number, 1, None, 0.5, 0.5)
            if lease.kind == "F":
                output = ev.Key("act", lease.step, 1, lease.microbatch)
                result = ev.TaskOutput(output, lease.admission, lease.number, 1, None, 0.5, 0.5)
            self.note(told(self.machine, 2.0, peer, result))
        return done


@pytest.mark.parametrize("n_kept", [1, N_MICROBATCHES])
def test_what_a_worker_does_again_is_not_kept_once_it_was_let_go(n_kept):
    """Its output comes to the server the first time alone. So a server that let it go for others lacks it still, and
    must not promise it to those who do the rest of a step after a view."""
    one_bytes = server()._wiring._shape.sent_bytes[0][0]
    pool = Pool(n_kept * one_bytes)
    pool.join(WORKER)
    forwards = [lease.microbatch for lease in pool.do(WORKER)]
    for m in forwards:
        pool.note(told(pool.machine, 3.0, NEIGHBOUR, ev.Boundary(ev.Key("grad", 0, 1, m))))
    pool.do(WORKER)
    assert len(forwards) >= 2 and len(pool.discarded) // 2 == max(0, len(forwards) - n_kept)
    pool.join(OTHER)
    pool.note(pool.machine.handle(4.0, ev.LinkChanged(WORKER, False, "crashed")))
    again = pool.do(OTHER)
    assert [lease.microbatch for lease in again if lease.is_redo]
    pool.machine.handle(5.0, ev.ViewChanged(ev.View(2, 1, 0, MEMBERS, (1, 1), 0)))
    own = ev.Ran(Work(0, WorkKind.FORWARD, 0, SERVER, 0), 0.0, 5.0, {})  # the server's own computation ends
    [inventory] = bodies(pool.machine.handle(6.0, own), ev.Inventory, NEIGHBOUR)
    let_go = {key.microbatch for key in pool.discarded}
    assert not let_go & set(inventory.kept) and len(inventory.kept) == min(n_kept, len(forwards))


@pytest.mark.parametrize("number", [1, 2])
def test_a_tensor_that_comes_after_its_step_is_let_go(number):
    """In the first view, and in one in whose first step the servers did the rest by routes."""
    machine, late = server(), ev.Key("grad", 0, 1, 0)
    machine.handle(1.0, ev.ViewChanged(ev.View(number, 1, 0, MEMBERS, (1, 1), 0)))
    machine.handle(2.0, ev.Updated(0, 1))
    route, again = ((SERVER, NEIGHBOUR), (0,)) if number > 1 else ((), ())
    assert told(machine, 3.0, NEIGHBOUR, ev.Boundary(late, route, again)) == [ev.Discard(late)]
