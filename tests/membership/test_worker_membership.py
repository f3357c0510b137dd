"""A pool's worker and the silence of its server."""

from jaxdt.membership.worker_membership import NO_SERVER, WorkerIdentity, WorkerMembership
from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import FIRST_CONTACT_S

SERVER, PATIENCE_S = 1, 5.0


def worker():
    machine = WorkerMembership(WorkerIdentity("r", "f", 4, SERVER, 10, 1.0, PATIENCE_S))
    machine.handle(0.0, ev.Started(process=7))
    machine.handle(0.0, ev.Ready({}, 1))
    return machine


def from_server(machine, now_s, body):
    return machine.handle(now_s, ev.Received(ev.Header("r", 0, 1, SERVER), body))


def stop_of(actions):
    return next((action for action in actions if isinstance(action, ev.Stop)), None)


def test_a_server_that_is_silent_for_too_long_is_lost():
    machine = worker()
    from_server(machine, 1.0, ev.Enlisted(1, 0, 0, 7))
    assert ev.Send(SERVER, ev.Enlist(7, "f")) in machine.handle(1.0 + PATIENCE_S, ev.Woke("heartbeat"))
    stop = stop_of(machine.handle(1.1 + PATIENCE_S, ev.Woke("heartbeat")))
    assert stop and stop.code == NO_SERVER and stop.reason == "worker 4: server 1 was silent for 5 s"


def test_a_worker_says_how_much_processor_time_it_has_used():
    machine = worker()
    machine.handle(1.0, ev.Status({"cpu_s": 2.5}))
    assert ev.Send(SERVER, ev.Enlist(7, "f", 2.5)) in machine.handle(1.0, ev.Woke("heartbeat"))


def test_the_first_answer_may_take_as_long_as_a_run_takes_to_begin():
    machine = worker()
    assert stop_of(machine.handle(FIRST_CONTACT_S, ev.Woke("heartbeat"))) is None
    assert stop_of(machine.handle(FIRST_CONTACT_S + 0.1, ev.Woke("heartbeat")))


def test_a_pause_of_the_worker_itself_is_no_silence_of_its_server():
    machine = worker()
    from_server(machine, 1.0, ev.Enlisted(1, 0, 0, 7))
    machine.handle(60.0, ev.Paused(59.0))
    assert stop_of(machine.handle(60.0, ev.Woke("heartbeat"))) is None


def test_a_worker_ends_with_the_run_as_its_server_says():
    assert from_server(worker(), 1.0, ev.Ended(130, "interrupted")) == [ev.Stop(130, "interrupted")]
