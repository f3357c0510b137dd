"""The loop: what goes to many is encoded once, how long it is busy at a time, and the order of what is computed."""

from jaxdt.protocol import events as ev
from jaxdt.protocol.trace import Trace
from jaxdt.run.work import Work
from jaxdt.runtime import loop as loop_module
from jaxdt.runtime.loop import Loop
from jaxdt.sim.tensors import NoTensors

HEADER = ev.Header("r", 0, 1, -1)


class Transport:
    def __init__(self):
        self.sent = []

    def pack(self, head):
        return [head]  # a new object for each call

    def send(self, dst, head, leaves, priority):
        self.sent.append((dst, head))

    def close(self, flush_s):
        pass


class Sends:
    def __init__(self, actions):
        self.actions = actions

    def handle(self, now_s, event):
        return [*self.actions, ev.Stop(0, "done")] if isinstance(event, ev.Started) else []


def sent(*actions):
    loop = Loop(-1, Sends(actions), Trace(lambda line: None), lambda report: None)
    loop.transport = Transport()
    loop.run("")
    return loop.transport.sent


def test_a_message_to_many_is_encoded_once():
    ended = ev.Ended(0, "done")
    heads = [head for _, head in sent(*(ev.Send(peer, ended, header=ev.Header("r", 0, 1, -1)) for peer in range(256)))]
    assert len(heads) == 256 and all(head is heads[0] for head in heads)


def test_each_message_is_encoded_under_its_own_header():
    ended = ev.Ended(0, "done")
    later = ev.Header("r", 0, 2, -1)
    (_, first), (_, second), (_, third) = sent(
        ev.Send(0, ended, header=HEADER),
        ev.Send(1, ended, header=later),
        ev.Send(2, ev.HeartbeatAck(1, 0.0), header=later),
    )
    assert [head[0]["head"]["view"] for head in (first, second, third)] == [1, 2, 2]
    assert third[0]["kind"] == "HeartbeatAck"


def test_the_longest_time_without_a_pause_is_known(monkeypatch):
    """Three events that wait take 2 s each; then the loop has to wait, and a timer takes 1 s."""
    now_s = [0.0]
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: now_s[0])

    class Slow:
        def handle(self, at_s, event):
            if isinstance(event, ev.Started):
                return [ev.WakeAt(0.0, "end")]
            now_s[0] += {ev.Interrupted: 2.0, ev.Woke: 1.0}.get(type(event), 0.0)
            return [ev.Stop(0, "done")] if isinstance(event, ev.Woke) else []

    loop = Loop(-1, Slow(), Trace(lambda line: None), lambda report: None)
    loop.transport = Transport()
    for _ in range(3):
        loop.post(ev.Interrupted())
    loop.run("")
    assert loop.busy_s_max == 6.0


def test_the_compute_thread_gets_all_in_the_order_in_which_the_machine_asks(monkeypatch):
    """Also while a link is congested: else Work of before a Restore would run after it, with what it restored."""
    asked = [
        ev.Run(Work(0, "F", 0, 0, 3)),
        ev.Free(3),
        ev.Restore(2, 1),
        ev.Run(Work(0, "F", 0, 0, 2)),
        ev.Install(4, 1),
    ]
    loop = Loop(0, Sends(asked), Trace(lambda line: None), lambda report: None)
    loop.transport, loop.tensors = Transport(), NoTensors(1)
    n_looks = iter([2, 1, *[0] * 9])
    monkeypatch.setattr(Loop, "_queued_bytes_max", lambda self: next(n_looks))
    monkeypatch.setattr("jaxdt.runtime.loop.QUEUE_BYTES_MAX", 0)
    loop.run("")
    handed_over = [loop.work.get() for _ in range(len(asked) + 1)]
    assert handed_over == [*asked, None]
