"""The loop alone, without sockets: which tensors it stores."""

import numpy as np
import pytest

from jaxdt.membership.member import Membership, PeerIdentity
from jaxdt.membership.peer import Peer
from jaxdt.protocol import events as ev
from jaxdt.protocol.trace import Trace
from jaxdt.run.errors import BadInput
from jaxdt.run.work import Work
from jaxdt.runtime.loop import FLUSH_S, Loop

ACT = ev.Boundary(ev.Key("act", 0, 1, 0))
GENERATION = 2
VIEW = ev.View(7, 1, GENERATION, (ev.Member(0, 0, 1, "127.0.0.1:1"), ev.Member(1, 1, 1, "127.0.0.1:2")), (7, 7), 0)


class Kept:
    """The tensors of a peer, as far as they are received."""

    def __init__(self):
        self.by_key = {}

    def put(self, body, src, tensor):
        self.by_key[body.key] = tensor


class Nowhere:
    """A transport that connects nobody."""

    def connect(self, *arguments):
        return None

    def stats(self):
        return {}

    def queued_bytes(self, peer=None):
        return 0

    def pack(self, head):
        return [head]

    def send(self, *arguments, **options):
        return True

    def close(self, flush_s):
        return None


class Congested(Nowhere):
    """A transport on which this much waits for each peer."""

    def __init__(self, queued_bytes):
        self._queued_bytes = queued_bytes

    def queued_bytes(self, peer=None):
        return max(self._queued_bytes.values()) if peer is None else self._queued_bytes.get(peer, 0)


@pytest.mark.parametrize(("congested", "begins"), [(0, False), (9, True)])
def test_only_a_link_to_a_member_holds_work_back(congested, begins, monkeypatch):
    """Peer 9 is a worker of a pool that is paused: nobody waits for it."""
    monkeypatch.setattr("jaxdt.runtime.loop.QUEUE_BYTES_MAX", 100)
    loop = Loop(1, None, Trace(lambda line: None, 0), lambda report: None)
    loop.transport = Congested({congested: 101, ev.COORDINATOR: 0})
    loop._perform(ev.Meet(VIEW.members))
    loop._perform(ev.Run(Work(1, "F", 0, 1, 0)))
    assert loop.work.empty() is not begins


def tensors_after(*messages):
    """The tensors that peer 1 of the view holds after these messages of peer 0, each (header, array)."""
    identity = PeerIdentity("r", "f", 1, 1, 0, GENERATION, 4, 0, 0.5, 4.0)
    loop = Loop(1, Peer(Membership(identity)), Trace(lambda line: None, 0), lambda report: None)
    loop.tensors, loop.transport = Kept(), Nowhere()
    loop._machine.handle(0.0, ev.Received(ev.Header("r", GENERATION, 7, ev.COORDINATOR), VIEW))
    for header, array in messages:
        loop.on_message(0, ev.Received(header, ACT), [array])
    loop.post(ev.Stop(0, "enough"))
    loop.run("127.0.0.1:2")
    return loop.tensors.by_key


def test_a_message_of_an_old_generation_does_not_overwrite_what_waits():
    """It comes late, after a rollback, and names the same step and microbatch."""
    due, late = np.ones(2), np.zeros(2)
    now, before = ev.Header("r", GENERATION, 7, 0), ev.Header("r", GENERATION - 1, 6, 0)
    assert tensors_after((now, due), (before, late)) == {ACT.key: due}
    assert tensors_after((before, late)) == {}


def test_a_damaged_slice_of_state_is_its_senders_fault():
    """The thread that receives it looks, so the loop does not."""
    loop = Loop(0, None, Trace(lambda line: None, 0), lambda report: None)
    with pytest.raises(BadInput, match="checksum [0-9]+, expected 3, which came with it"):
        loop.on_message(
            1, ev.Received(ev.Header("r", 0, 1, 1), ev.State(ev.StateKey(4, 0, 2))), [np.array([1, 2, 3], np.int32)]
        )


@pytest.mark.parametrize("event", [ev.WroteCheckpoint(3), ev.Ran(Work(1, "U", step=2), 0.0, 0.1, {})], ids=str)
def test_the_counters_are_new_when_a_member_may_have_ended(event):
    class Heard:
        events = []

        def handle(self, now_s, event):
            self.events.append(event)
            return []

    loop = Loop(1, Heard(), Trace(lambda line: None, 0), lambda report: None)
    loop.tensors, loop.transport = Kept(), Nowhere()
    loop.transport.stats = lambda: {0: {"bytes_out": 70}}
    loop.post(event)
    loop.post(ev.Stop(0, "enough"))
    loop.run("127.0.0.1:2")
    status, then = Heard.events[-2:]
    assert status.bytes_to == {"0": 70} and then == event


def test_a_peer_that_leaves_before_it_is_let_in_tells_the_coordinator():
    class Recorded(Nowhere):
        sent, flush_s = [], None

        def pack(self, head):
            self.sent.append(head["kind"])
            return [head]

        def close(self, flush_s):
            self.flush_s = flush_s

    identity = PeerIdentity("r", "f", 1, 1, 0, GENERATION, 4, 0, 0.5, 4.0)
    loop = Loop(1, Peer(Membership(identity)), Trace(lambda line: None, 0), lambda report: None)
    loop.tensors, loop.transport = Kept(), Recorded()
    loop.post(ev.Leave())
    assert loop.run("127.0.0.1:2") == ev.Stop(0, "left before it was admitted")
    assert loop.transport.sent[-1] == "Leaving" and loop.transport.flush_s == FLUSH_S
