import contextlib
import socket
import threading

import numpy as np
import transport_nodes
from hypothesis import given
from hypothesis import strategies as st
from transport_nodes import (
    LOOPBACK,
    MB,
    QUICK,
    WAIT_S,
    eventually,
    greeted,
    message_bytes,
    message_frame,
    raw_connection,
)

from jaxdt.runtime.net import frame
from jaxdt.runtime.net.connection import Connection, SelfPipe
from jaxdt.runtime.net.inbound_channel import InboundSession
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.net.shaper import LinkShape

start, cred, run_credential = transport_nodes.start, transport_nodes.cred, transport_nodes.run_credential  # fixtures


def test_a_connection_cut_inside_a_message_delivers_it_once(start, cred):
    a, b = start(0, cred), start(1, cred)
    a.connect(b)
    b.gate.clear()
    payload = np.random.default_rng(0).integers(0, 255, 32 * MB, np.uint8)
    a.transport.send(1, {"n": 1}, [payload])
    b.asked.get(timeout=WAIT_S)
    a.cut(1)
    a.transport.send(1, {"n": 2}, [np.zeros(1)])
    b.gate.set()
    first, second = b.next(), b.next()
    assert (first[1], second[1]) == ({"n": 1}, {"n": 2})
    assert np.array_equal(first[2][0], payload)
    eventually(lambda: a.transport.queued_bytes() == 0)
    assert b.asked.qsize() == 1  # the second message: the first was asked for once
    assert a.reconnects(1) >= 1 and a.stat(1, "resent_bytes") > 0
    assert b.inbox.empty() and b.stat(0, "messages_in") == 2


def test_a_message_whose_acknowledgement_was_lost_is_not_sent_again(start, cred):
    inside, leave = threading.Event(), threading.Event()

    def hold(src, head, leaves):
        inside.set()
        assert leave.wait(WAIT_S)

    a, b = start(0, cred), start(1, cred, on_message=hold)
    a.connect(b)
    a.transport.send(1, {}, [np.zeros(10)])
    assert inside.wait(WAIT_S)
    a.cut(1)
    leave.set()
    eventually(lambda: a.transport.queued_bytes() == 0)
    assert a.stat(1, "messages_out") == b.stat(0, "messages_in") == 1
    assert b.stat(0, "duplicates") == 0


def test_duplicates_are_dropped_by_session_and_sequence(start):
    b = start(1)
    ack = frame.pack(frame.ACK, sequence=1)
    one, three = (message_bytes(i, {"i": i}, [np.arange(4.0)]) for i in (1, 3))
    for oldest, expected in ((1, [[0, 0]]), (1, [[0, 1], [3, 3]])):
        with raw_connection(b) as sock:
            connection, received = greeted(b, sock, oldest=oldest)
            assert received == expected
            answer = memoryview(bytearray(3 * len(ack)))
            connection.write(one + one + three)
            connection.read_exactly(answer)
            assert bytes(answer[: 2 * len(ack)]) == ack + ack
            connection.close()
    assert [head["i"] for head in b.heads(2)] == [1, 3]
    assert (b.stat(7, "messages_in"), b.stat(7, "duplicates")) == (2, 4)
    with raw_connection(b) as sock:
        connection, received = greeted(b, sock, session=6)
        assert received == [[0, 0]]
        connection.write(one)
        assert b.next()[1] == {"i": 1}
        connection.close()
    with raw_connection(b) as sock:
        assert greeted(b, sock, session=5)[1] == [[0, 1], [3, 3]]


@given(st.permutations(range(1, 12)), st.integers(0, 11), st.integers(1, 12))
def test_a_session_knows_exactly_what_arrived(order, n, oldest):
    session = InboundSession()
    for sequence in order[:n]:
        session.add(sequence)
    assert {s for s in range(1, 12) if session.has(s)} == set(order[:n])
    ranges = session.ranges()
    assert {s for a, b in ranges for s in range(a, b + 1)} - {0} == set(order[:n])
    assert all(b + 1 < a for (_, b), (a, _) in zip(ranges, ranges[1:], strict=False))
    session.forget_below(oldest)
    assert {s for s in range(1, 12) if session.has(s)} == set(order[:n]) | set(range(1, oldest))


def test_a_restarted_peer_gets_what_waits_for_it(start, cred):
    a, b = start(0, cred), start(1, cred)
    a.connect(b)
    a.transport.send(1, {"n": 1}, [np.zeros(3)])
    assert b.next()[1] == {"n": 1}
    a.link(1, "up")
    eventually(lambda: a.transport.queued_bytes() == 0)
    b.transport.close(0.0)
    a.link(1, "down")
    a.transport.send(1, {"n": 2}, [np.zeros(3)])
    again = start(1, cred, listen=b.address)
    assert again.next()[1] == {"n": 2}
    a.link(1, "up")
    again.connect(a)
    again.transport.send(0, {"n": 3}, [np.zeros(3)])
    assert a.next()[1] == {"n": 3}


def test_emulated_drops_lose_and_repeat_nothing(start):
    a, b = start(0, shape=lambda dst: LinkShape(drop_prob=0.3, seed=1)), start(1)
    a.connect(b)
    for i in range(40):
        a.transport.send(1, {"i": i}, [np.full(1000, i)])
    assert [(head["i"], leaves[0][0]) for _, head, leaves in (b.next() for _ in range(40))] == [
        (i, i) for i in range(40)
    ]
    assert a.reconnects(1) > 0 and b.inbox.empty()


def test_a_dropped_peer_is_forgotten_until_it_is_wanted_again(start, cred):
    a, b = start(0, cred), start(1, cred)
    a.connect(b)
    a.transport.send(1, {"n": 1}, [np.zeros(3)])
    b.next()
    b.gate.clear()
    a.transport.send(1, {"n": 2}, [np.zeros(8 * MB, np.uint8)])
    a.transport.drop(1)
    assert a.transport.queued_bytes() == 0 and not a.transport.send(1, {})
    b.gate.set()
    b.link(0, "down")
    eventually(lambda: not any("send" in t.name for t in threading.enumerate() if t.name.startswith("jaxdt-0-")))
    a.connect(b)
    a.transport.send(1, {"n": 3}, [np.zeros(3)])
    heads = [b.next()[1]["n"]]
    if heads == [2]:  # it was all in the kernel's buffers when the peer was dropped
        heads = [b.next()[1]["n"]]
    assert heads == [3]
    assert a.stat(1, "bytes_out") >= 48, "what was sent before it was dropped still counts"


def test_close_sends_what_is_queued(start, cred):
    a, b = start(0, cred), start(1, cred)
    a.connect(b)
    for i in range(20):
        a.transport.send(1, {"i": i}, [np.zeros(MB // 2, np.uint8)])
    a.transport.close(WAIT_S)
    assert [head["i"] for head in b.heads(20)] == list(range(20))
    assert not a.transport.send(1, {})


def test_a_dropped_peer_that_still_sends_comes_back_by_itself(start, cred):
    a, b = start(0, cred), start(1, cred)
    b.connect(a)
    b.transport.send(0, {"n": 1}, [np.zeros(3)])
    a.next()
    a.transport.drop(1)
    eventually(lambda: b.reconnects(0) >= 1)
    b.transport.send(0, {"n": 2}, [np.zeros(3)])
    assert a.next()[1] == {"n": 2}
    assert a.transport.send(1, {})  # known again


def test_a_newer_connection_of_a_lane_replaces_the_older(start):
    b = start(1, limits=TransportLimits(partial_max=2))
    with raw_connection(b) as first, raw_connection(b) as second:
        greeted(b, first)
        connection, received = greeted(b, second, oldest=50)
        assert received == [[0, 49]]
        assert first.recv(10) == b""
        connection.write(message_bytes(50, {"n": 50}, [np.zeros(1)]))
        assert b.next()[1] == {"n": 50}


def test_a_sender_cannot_begin_messages_without_end(start):
    b = start(1, limits=TransportLimits(partial_max=2))
    table = frame.pack_table(frame.table_of([np.zeros(2)], TransportLimits()))
    with raw_connection(b) as sock:
        connection, _ = greeted(b, sock)
        for sequence in (1, 2, 3):
            sizes = {"sequence": sequence, "payload_bytes": 8, "total_bytes": 16}
            connection.write(message_frame(b"\x80", table, **sizes) + bytes(8))
        assert "message 3: 2 others begun and not ended" in b.link(7, "down")


def test_acknowledgements_are_read_while_a_write_finds_no_room():
    """The other side reads more only after its acknowledgement was read: otherwise both would wait for ever."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(LOOPBACK))
        connection = Connection(socket.create_connection(server.getsockname()), QUICK)
        other_side = stack.enter_context(server.accept()[0])
        self_pipe = SelfPipe()
        stack.callback(self_pipe.close)
        stack.callback(connection.close)
        connection.start_sending(self_pipe)
        other_side.send(b"ack")
        n_read = 0

        def read_acks():
            nonlocal n_read
            if connection.read_available():
                n_read += len(other_side.recv(MB))
                other_side.send(b"ack")

        connection.write_pieces([bytes(10), memoryview(bytes(32 * MB))], read_acks)
        assert n_read > 0
