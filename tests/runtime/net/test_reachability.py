"""Pairs of which one side cannot dial the other, or neither: a way back is opened, or said to be missing."""

import dataclasses
import socket

import pytest
import transport_nodes
from transport_nodes import LOOPBACK, MB, QUICK, eventually, threads_of_transports

from jaxdt.runtime.net import unix_socket

start, cred, run_credential = transport_nodes.start, transport_nodes.cred, transport_nodes.run_credential  # fixtures

SOON = dataclasses.replace(QUICK, undialable_s=0.05)


@pytest.fixture
def nowhere():
    """An address at which nobody answers: bound, so that no other process gets it, and not listened at."""
    with socket.socket() as reserved:
        reserved.bind(LOOPBACK)
        yield reserved.getsockname()


def test_a_peer_that_cannot_be_dialled_dials_back(start, cred, nowhere):
    """Peer 1 listens, but at an address that peer 0 cannot reach: a router does not forward its port."""
    a, b = start(0, cred, limits=SOON), start(1, cred, limits=SOON)
    a.transport.connect(1, nowhere)
    b.connect(a)
    b.transport.send(0, {"n": 1})
    assert a.next()[1] == {"n": 1}
    payload = transport_nodes.aligned_empty((MB,), "uint8")
    assert a.transport.send(1, {"n": 2}, [payload])
    assert a.transport.send(1, {"n": 3})
    assert sorted(head["n"] for head in b.heads(2)) == [2, 3]
    eventually(lambda: a.transport.queued_bytes() == 0)
    b.transport.send(0, {"n": 4})
    assert a.next()[1] == {"n": 4}
    assert b.stat(0, "messages_in") == 2 and a.stat(1, "messages_in") == 2


def test_a_way_back_survives_cuts(start, nowhere):
    a, b = start(0, limits=SOON), start(1, limits=SOON)
    a.transport.connect(1, nowhere)
    b.connect(a)
    b.transport.send(0, {"n": 0})
    for n in range(1, 4):
        a.transport.send(1, {"n": n})
        assert b.next()[1] == {"n": n}
        a.cut(1, "control")


def test_two_that_do_not_listen_have_no_way(start):
    a = start(0, listen=None)
    a.transport.connect(1, None)
    assert a.link(1, "no way") == "neither of the two listens (--listen=)"


def test_where_neither_side_can_dial_there_is_no_way(start, nowhere):
    a = start(0, limits=SOON)
    a.transport.connect(1, nowhere)
    a.transport.send(1, {})
    for _ in range(2):
        reason = a.link(1, "no way")
        assert reason.startswith(f"cannot dial 127.0.0.1:{nowhere[1]}: ")
        assert reason.endswith(", and it does not dial this peer")


def test_a_link_that_was_up_is_only_down(start, monkeypatch):
    monkeypatch.setattr(unix_socket, "dial", lambda address: None)
    a, b = start(0, limits=SOON), start(1)
    a.connect(b)
    a.transport.send(1, {"n": 1})
    b.next()
    a.link(1, "up")
    b.transport.close(0.0)
    a.link(1, "down")
    a.transport.send(1, {"n": 2})
    channel = a.channel(1, "control")
    eventually(lambda: channel._n_rounds > 3)
    a.link(1, "gone")
    assert a.links.empty()


def test_a_process_that_does_not_answer_is_within_reach(start):
    """Its host has accepted the connection, so the process is paused or busy, and no port has to be forwarded to it."""
    a = start(0, limits=dataclasses.replace(SOON, handshake_s=0.05))
    with socket.create_server(LOOPBACK) as paused:
        a.transport.connect(1, paused.getsockname())
        a.transport.send(1, {})
        dialled = [paused.accept()[0] for _ in range(4)]
        a.link(1, "down")
        assert a.links.empty()
    for sock in dialled:
        sock.close()
    a.transport.close(0.0)
    eventually(lambda: not threads_of_transports())  # it waits for them no longer than for a handshake
