"""A transport remembers which messages of dropped peers have arrived, for a bounded number of peers, and nothing else.

Memory must be free without the collector of cycles, which runs too seldom for buffers of a megabyte.
"""

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
from jaxdt.runtime.net.connection import Connection, SelfPipe
from jaxdt.runtime.net.dialer import Dialer
from jaxdt.runtime.net.handshake import CHANNELS, HandshakeHello
from jaxdt.runtime.net.inbound_channel import InboundChannel, InboundSession, PartialMessage, ReverseDialer
from jaxdt.runtime.net.options import LinkState
from jaxdt.runtime.net.outbound_channel import ChunkWriter, OutboundChannel
from jaxdt.runtime.net.send_queue import QueuedMessage, SendQueue

__all__ = ["cred", "run_credential", "start"]  # fixtures

OF_ONE_PEER = {
    Dialer,
    PartialMessage,
    OutboundChannel,
    SendQueue,
    ChunkWriter,
    QueuedMessage,
    LinkState,
    ReverseDialer,
    AeadRecords,
    SelfPipe,
    Connection,
    transport._Peer,
}
REMEMBERED = {InboundChannel, InboundSession}


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(kinds):
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)


def come_and_go(node, peer, cred=None, n_messages=3):
    """A peer that nobody can dial sends on one connection and gets an answer on the other.

    Then its process ends in the middle of a message.
    """
    with (
        greeted(node, peer, "data", True, cred) as (sender, _),
        greeted(node, peer, "control", False, cred) as (back, _),
    ):
        for sequence in range(1, n_messages + 1):
            sender.write(message_bytes(sequence, {"n": sequence}, [np.zeros(4_000)]))
        for _ in range(n_messages):
            assert node.next()[0] == peer
        assert node.transport.send(peer, {"answer": peer})
        assert handshake.read_frame(back, (frame.MESSAGE,)).head == {"answer": peer}
        sender.write(message_bytes(n_messages + 1, {"n": 0}, [np.zeros(4_000)])[:1000])
    node.link(peer, "down")
    node.transport.drop(peer)


@contextmanager
def greeted(node, peer, channel="data", sends=True, cred=None):
    connection = Connection(socket.create_connection(node.address, timeout=WAIT_S), QUICK)
    connection.deadline_s = time.monotonic() + WAIT_S
    if cred is not None:
        handshake.secure(connection, cred.of(peer), is_dialer=True)
    yield (
        connection,
        handshake.greet(connection, HandshakeHello("run", peer, node.me, channel, sends, 5, 1 if sends else 0)),
    )
    connection.close()


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
    with greeted(node, 6) as (_, answer):
        assert answer.received == [[0, 3]]
    with greeted(node, 5) as (_, answer):
        assert answer.received == [[0, 0]]
    eventually(lambda: len(node.transport._threads) == 1)
    node.transport.drop(5)
    node.transport.drop(6)
    assert set(node.transport._dropped) == {8, 5, 6}


def test_a_dropped_peer_leaves_no_channel_that_it_did_not_use(start):
    node = start(0)
    node.transport.connect(1, None)
    node.transport.drop(1)
    assert not node.transport._inbound
    assert len(CHANNELS) == 2
