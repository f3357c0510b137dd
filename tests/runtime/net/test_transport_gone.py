"""What a transport keeps of peers that are gone: a bounded memory of what has arrived, and nothing else, without the
collector of cycles, which comes too seldom for buffers of a megabyte."""

import gc
import socket
import time
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from transport_nodes import QUICK, WAIT_S, cred, eventually, message_bytes, n_fds, run_credential, start

from jaxdt.runtime.net import frame, handshake, transport
from jaxdt.runtime.net.acceptor import Acceptor
from jaxdt.runtime.net.aead_records import AeadRecords
from jaxdt.runtime.net.connection import Connection
from jaxdt.runtime.net.handshake import LANES, Dialler, Hello
from jaxdt.runtime.net.inbound import Assembly, Inbound, Stream
from jaxdt.runtime.net.link_state import Link
from jaxdt.runtime.net.outbound_channel import OutboundChannel, Outgoing
from jaxdt.runtime.net.reverse_dial import ReverseDialer
from jaxdt.runtime.net.self_pipe import SelfPipe

__all__ = ["cred", "run_credential", "start"]  # fixtures

OF_ONE_PEER = {
    Dialler,
    Assembly,
    OutboundChannel,
    Outgoing,
    Link,
    ReverseDialer,
    AeadRecords,
    SelfPipe,
    Connection,
    transport._Peer,
}
REMEMBERED = {Inbound, Stream}


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(kinds):
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)


def come_and_go(node, peer, cred=None, n_messages=3):
    """A peer that nobody can dial: on one connection it sends, on the other it hears an answer. Then its process ends,
    in the middle of a message."""
    with (
        greeted(node, peer, "data", True, cred) as (sender, _),
        greeted(node, peer, "control", False, cred) as (back, _),
    ):
        for sequence in range(1, n_messages + 1):
            sender.write(message_bytes(sequence, {"n": sequence}, [np.zeros(4_000)]))
        for _ in range(n_messages):
            assert node.next()[0] == peer
        assert node.transport.send(peer, {"answer": peer})
        assert handshake.hear(back, (frame.MESSAGE,)).head == {"answer": peer}
        sender.write(message_bytes(n_messages + 1, {"n": 0}, [np.zeros(4_000)])[:1000])
    node.link(peer, "down")
    node.transport.drop(peer)


@contextmanager
def greeted(node, peer, lane="data", sends=True, cred=None):
    wire = Connection(socket.create_connection(node.address, timeout=WAIT_S), QUICK)
    wire.deadline_s = time.monotonic() + WAIT_S
    if cred is not None:
        handshake.secure(wire, cred.client_context, dialled=True)
    yield wire, handshake.greet(wire, Hello("run", peer, node.me, lane, sends, 5, 1 if sends else 0))
    wire.close()


def test_nothing_is_kept_of_peers_that_are_gone(start, cred, no_collector):
    node = start(0, cred)
    come_and_go(node, 1, cred)
    eventually(lambda: len(node.transport._threads) == 1)
    before, fds = alive(OF_ONE_PEER | {Acceptor}), n_fds()
    for peer in range(2, 8):
        come_and_go(node, peer, cred)
    eventually(lambda: len(node.transport._threads) == 1)
    assert alive(OF_ONE_PEER | {Acceptor}) == before
    assert n_fds() == fds and not node.transport._peers


def test_what_has_arrived_is_remembered_of_the_last_to_go(start, monkeypatch, no_collector):
    monkeypatch.setattr(transport, "_DROPPED_MAX", 3)
    node = start(0)
    for peer in range(1, 4):
        come_and_go(node, peer)
    before = alive(REMEMBERED)
    for peer in range(4, 9):
        come_and_go(node, peer)
        assert alive(REMEMBERED) == before
    with greeted(node, 6) as (_, theirs):
        assert theirs.have == [[0, 3]]
    with greeted(node, 5) as (_, theirs):
        assert theirs.have == [[0, 0]]
    eventually(lambda: len(node.transport._threads) == 1)
    node.transport.drop(5)
    node.transport.drop(6)
    assert set(node.transport._dropped) == {8, 5, 6}


def test_a_dropped_peer_leaves_no_lane_that_it_did_not_use(start):
    node = start(0)
    node.transport.connect(1, None)
    node.transport.drop(1)
    assert not node.transport._inbounds
    assert len(LANES) == 2
