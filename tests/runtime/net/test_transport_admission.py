import contextlib
import errno
import queue
import random
import re
import socket
import threading
import time

import numpy as np
import pytest
import transport_nodes
from transport_nodes import (
    LOOPBACK,
    MB,
    QUICK,
    WAIT_S,
    Node,
    eventually,
    greeted,
    message_bytes,
    message_frame,
    raw_connection,
)

from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.runtime.net import frame, handshake
from jaxdt.runtime.net.connection import Connection
from jaxdt.runtime.net.handshake import HandshakeHello
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.storage.words import aligned_empty

start, cred, run_credential = transport_nodes.start, transport_nodes.cred, transport_nodes.run_credential  # fixtures

# --- who is let in ---


def test_another_run_is_refused_on_both_sides(start, cred):
    a, b = start(0, cred, run="mine"), start(1, cred, run="yours")
    a.connect(b)
    a.transport.send(1, {})
    assert "peer 0 is of run 'mine', peer 1 of 'yours'" in a.link(1, "refused")
    assert "peer 0 is of run 'mine', peer 1 of 'yours'" in b.link(None, "refused")


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ("run a, config 1, plan 2, tokens 3", ": files of two launches; each host needs those of the last one"),
        ("run b, config 1, plan 9, tokens 3", ": they differ in plan; give each process the same files"),
        ("run b, config 9, plan 9, tokens 3", ": they differ in config, plan; give each process the same files"),
        ("strange", "of 'run b, config 1, plan 2, tokens 3'"),
    ],
)
def test_a_refused_process_hears_in_what_it_differs(theirs, says):
    hello = HandshakeHello(theirs, 0, 1, "control", True, 1)
    with pytest.raises(handshake.HandshakeRefused, match=re.escape(says)):
        handshake.check_hello(hello, "run b, config 1, plan 2, tokens 3", 1)


def test_another_peer_at_the_address_is_refused_on_both_sides(start):
    a, b = start(0), start(2)
    a.transport.connect(1, b.address)
    a.transport.send(1, {})
    assert "0 wants peer 1, this is peer 2" in a.link(1, "refused")
    assert "0 wants peer 1, this is peer 2" in b.link(None, "refused")


def test_the_coordinator_is_called_by_its_name(start):
    a, b = start(0), start(2)
    a.transport.connect(ev.COORDINATOR, b.address)
    a.transport.send(ev.COORDINATOR, {})
    assert "peer: peer 0 wants coordinator, this is peer 2" in a.link(ev.COORDINATOR, "refused")
    with pytest.raises(BadInput, match="^coordinator: got 10.0.0.1 without a credential"):
        b.transport.connect(ev.COORDINATOR, ("10.0.0.1", 5))


def test_the_peer_that_answers_must_be_the_one_that_was_dialed(start):
    a = start(0)
    with socket.create_server(LOOPBACK) as server:
        a.transport.connect(1, server.getsockname())
        a.transport.send(1, {})
        connection = Connection(server.accept()[0], QUICK)
        connection.deadline_s = time.monotonic() + WAIT_S
        hello = handshake.parse_hello(handshake.read_frame(connection, (frame.GREETING,)).head)
        handshake.send_hello(
            connection, frame.WELCOME, HandshakeHello("run", 9, 0, hello.channel, False, hello.session)
        )
        assert "answers as peer 9, expected peer 1" in a.link(1, "refused")
        connection.close()


def test_a_process_whose_place_another_one_has_taken_is_refused_until_that_one_is_dropped(start):
    b = start(1)
    first, second = start(0, incarnation=7), start(0, incarnation=8)
    for node in (first, second):
        node.connect(b)
    first.transport.send(1, {"n": 1})
    assert b.next()[1] == {"n": 1}
    second.transport.send(1, {"n": 2})
    assert second.link(1, "refused") == "peer 0: another process has taken its place"
    b.transport.drop(0)
    first.transport.close(0.0)
    assert b.next()[1] == {"n": 2}


def test_the_process_that_a_view_names_replaces_one_that_was_faster(start):
    """A paused process was replaced, and goes on: it dials the members before its successor has done so."""
    b = start(1)
    paused, successor = start(0, incarnation=7), start(0, incarnation=8)
    for node in (paused, successor):
        node.connect(b)
    paused.transport.send(1, {"n": 1})
    assert b.next()[1] == {"n": 1}
    b.transport.connect(0, None, 8)
    successor.transport.send(1, {"n": 2})
    assert b.next()[1] == {"n": 2}
    assert paused.link(1, "refused") == "peer 0: another process has taken its place"
    paused.transport.send(1, {"n": 3})
    successor.transport.send(1, {"n": 4})
    assert b.next()[1] == {"n": 4}


def test_of_two_coordinators_the_later_one_is_heard(start):
    b = start(1)
    stale, present = start(ev.COORDINATOR, incarnation=3), start(ev.COORDINATOR, incarnation=4)
    for node in (stale, present):
        node.connect(b)
        node.transport.send(1, {"term": node is present})
        assert b.next()[1] == {"term": node is present}
    assert stale.link(1, "refused") == "coordinator: its term 3 is over, term 4 has begun"


def test_a_refusal_that_repeats_is_told_once(start):
    checked = threading.Semaphore(0)
    a, b = start(0, run="mine"), start(1, run="yours")
    check = b.transport._acceptor._check
    b.transport._acceptor._check = lambda hello: (checked.release(), check(hello))
    a.connect(b)
    a.transport.send(1, {})
    assert all(checked.acquire(timeout=WAIT_S) for _ in range(4))
    assert (a.links.qsize(), b.links.qsize()) == (1, 1)


def test_the_credential_of_another_run_is_refused_on_both_sides(start, run_credential, tmp_path):
    other = transport_nodes.RunCredentials(tmp_path)
    a, b, good = start(0, run_credential), start(1, other), start(2, run_credential)
    a.connect(b)
    a.transport.send(1, {})
    assert "is of another run" in a.link(1, "refused")
    assert b.link(None, "refused")
    good.connect(a)
    good.transport.send(0, {"good": 1})
    assert a.next()[1] == {"good": 1}


def test_only_one_side_has_a_credential(start, run_credential):
    plain, secure = start(0), start(1, run_credential)
    plain.connect(secure)
    plain.transport.send(1, {})
    assert "got plaintext, expected TLS" in secure.link(None, "refused")
    assert "got plaintext, expected TLS" in plain.link(1, "refused")
    secure.connect(plain)
    secure.transport.send(0, {})
    assert "only one side has a credential" in plain.link(None, "refused")
    assert secure.link(0, "refused")


def test_garbage_to_the_port_harms_nobody_else(start, cred):
    a, b = start(0, cred), start(1, cred)
    a.connect(b)
    a.transport.send(1, {"n": 1})
    b.next()
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 9, random.Random(1).randbytes(300), b"jxdt" + bytes(300)):
        with raw_connection(b) as sock:
            sock.sendall(noise)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1000):
                    continue
        assert "\n" not in b.link(None, "refused")
    a.transport.send(1, {"n": 2})
    assert b.next()[1] == {"n": 2}
    assert a.reconnects(1) == 0


def test_another_version_is_refused_with_a_reason(start):
    b = start(1)
    with raw_connection(b) as sock:
        hello = bytearray(frame.pack(frame.GREETING, b"\x80"))
        hello[4] = 9
        sock.sendall(hello)
        assert b"protocol version: got 9, expected 6" in sock.recv(1000)
    assert "protocol version: got 9, expected 6" in b.link(None, "refused")


def test_a_greeting_with_a_field_of_the_wrong_kind(start):
    b = start(1)
    with raw_connection(b) as sock, pytest.raises(handshake.HandshakeRefused, match="session: got 'x', expected int"):
        greeted(b, sock, session="x")
    assert "session" in b.link(None, "refused")


def test_connections_that_do_not_greet_are_few_and_short(start, cred):
    b = start(1, cred, limits=TransportLimits(handshake_s=1.0, n_greeting_max=2))
    with raw_connection(b) as first, raw_connection(b) as second:
        for sock in (first, second):
            sock.sendall(b"\x16\x03" if cred else b"jx")
        greeting = b.transport._acceptor._greeting
        # These bytes may arrive after a connection that was begun later, and a silent one would give way to it.
        eventually(lambda: len(greeting) == 2 and not any(connection.is_silent() for connection in list(greeting)))
        with raw_connection(b) as third:
            assert third.recv(10) == b""
        assert "2 others have not greeted yet" in b.link(None, "refused")
        for sock in (first, second):
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1000):
                    continue
    a = start(0, cred)
    a.connect(b)
    a.transport.send(1, {"in": True})
    assert b.next()[1] == {"in": True}


def test_a_frame_that_does_not_advance_ends_its_connection(start):
    b = start(1, limits=TransportLimits(idle_s=0.1))
    with raw_connection(b) as sock:
        connection, _ = greeted(b, sock)
        connection.write(message_bytes(1, {}, [np.zeros(100)])[:200])
        assert sock.recv(10) == b""
    assert "expected bytes came in time" in b.link(7, "down")


def test_a_broken_frame_ends_its_connection_only(start):
    a, b = start(0), start(1)
    a.connect(b)
    a.transport.send(1, {"n": 1}, [np.zeros(1)])
    b.next()
    table = frame.pack_table(frame.table_of([np.zeros(250)], TransportLimits()))
    begun = message_frame(b"\x80", table, sequence=1, payload_bytes=1000, total_bytes=2000) + bytes(1000)
    broken = [
        b"x" * 100,
        message_frame(sequence=2, offset=10, payload_bytes=10, total_bytes=20),
        begun + message_frame(sequence=1, offset=1000, payload_bytes=2000, total_bytes=3000),
        begun + message_frame(sequence=1, offset=500, payload_bytes=1500, total_bytes=2000),
    ]
    for noise, words in zip(
        broken, ("begins with", "expected byte 0", "expected 2000", "expected byte 1000"), strict=True
    ):
        with raw_connection(b) as sock:
            greeted(b, sock)[0].write(noise)
            assert words in b.link(7, "down")
    a.transport.send(1, {"n": 2}, [np.zeros(1)])
    assert b.next()[1] == {"n": 2}
    assert a.reconnects(1) == 0


def test_plaintext_stays_on_loopback(start):
    everywhere = dict(on_message=lambda *_: None, listen=("0.0.0.0", 0))
    with pytest.raises(BadInput, match="listen: got 0.0.0.0 without a credential"):
        Transport(0, "run", **everywhere)
    with pytest.raises(BadInput, match="peer 1: got 10.0.0.1 without a credential"):
        start(0).transport.connect(1, ("10.0.0.1", 5))
    Transport(0, "run", **everywhere, allow_plaintext=True)


@pytest.mark.parametrize("address", [("", 5), ("a..b", 5), ("x" * 99, 5), ("a\0b", 5), ("localhost", 1 << 16)])
def test_what_is_no_address_is_bad_input(start, address):
    with pytest.raises(BadInput, match="peer 1: got .* expected a host name or address and a port"):
        start(0).transport.connect(1, address)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such option")
def test_a_dead_link_is_noticed_after_six_seconds(start, cred, request):
    if "unix" in request.node.name:
        pytest.skip("a Unix socket has no link that could die alone")
    a, b = start(0, cred), start(1, cred)
    a.connect(b)
    a.transport.send(1, {}, [np.zeros(1)])
    b.next()
    for connection in (a.channel(1)._connection, b.transport._inbound[0, "data"]._connection):
        options = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_NODELAY")
        got = [connection._sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options]
        assert got[0] == 1000 * (got[1] + got[2] * got[3]) == 6000 and got[4]
        assert connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_dead_link_is_not_taken_for_an_idle_one(monkeypatch):
    with socket.create_server(LOOPBACK) as server:
        connection = Connection(socket.create_connection(server.getsockname()), QUICK)
        answers = iter([TimeoutError("timed out"), TimeoutError(errno.ETIMEDOUT, "Connection timed out")])

        def recv_into(buffer):
            raise next(answers)

        monkeypatch.setattr(connection, "_receive", recv_into)
        with pytest.raises(TimeoutError, match="Connection timed out"):
            connection.read_exactly(memoryview(bytearray(4)), may_wait=True)
        connection.close()


def test_a_port_in_use_is_bad_input(start):
    with pytest.raises(BadInput, match="cannot bind"):
        Node(1, listen=start(0).address)


# --- what the caller refuses ---


def test_unwanted_payload_is_discarded_and_counted(start, cred):
    def expect(src, head, table):
        if head["n"] == 2:
            raise BadInput("n: got 2")
        return None if table != [(np.dtype(np.float32), (3,))] else [aligned_empty((3,), np.float32)]

    a, b = start(0, cred), start(1, cred, expect=expect)
    a.connect(b)
    a.transport.send(1, {"n": 1}, [np.zeros((5, MB), np.uint8)])
    a.transport.send(1, {"n": 2}, [np.zeros(3, np.float32)])
    a.transport.send(1, {"n": 3}, [np.zeros(3, np.float32)])
    assert b.next()[1] == {"n": 3}
    eventually(lambda: a.transport.queued_bytes() == 0)
    assert (b.stat(0, "unwanted"), b.stat(0, "messages_in"), a.reconnects(1)) == (2, 1, 0)
    assert b.link(0, "refused") == "n: got 2"


def test_bad_input_from_on_message_is_the_senders_fault(start):
    def on_message(src, head, leaves):
        if head["n"] == 1:
            raise BadInput("n: got 1")

    a, b = start(0), start(1, on_message=on_message)
    a.connect(b)
    a.transport.send(1, {"n": 1})
    a.transport.send(1, {"n": 2})
    assert b.next()[1] == {"n": 2}
    assert b.link(0, "refused") == "n: got 1"
    assert a.reconnects(1) == 0


def test_a_bug_in_a_callback_is_reported_and_not_swallowed(monkeypatch, start):
    raised = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.put(args.exc_type))

    def on_message(src, head, leaves):
        raise KeyError("oops")

    a, b = start(0), start(1, on_message=on_message, expect=lambda *_: [np.zeros(9)])
    a.connect(b)
    a.transport.send(1, {})
    assert "KeyError('oops')" in b.link(None, "refused")
    assert raised.get(timeout=WAIT_S) is KeyError
    a.transport.send(1, {}, [np.zeros(3)])
    assert "expect: buffer 0 is float64(9,)" in b.link(None, "refused")
    assert raised.get(timeout=WAIT_S) is ValueError
