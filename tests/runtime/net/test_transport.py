import socket
import threading
import zlib

import ml_dtypes
import numpy as np
import pytest
import transport_nodes
from transport_nodes import LOOPBACK, MB, WAIT_S, eventually

from jaxdt.runtime.net.frame import FrameError

start, cred, run_credential = transport_nodes.start, transport_nodes.cred, transport_nodes.run_credential  # fixtures

# --- messages ---


def test_every_dtype_and_shape_arrives_as_it_was(start, cred):
    a, b = start(0, cred), start(1, cred)
    a.connect(b)
    dtypes = [ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64, bool]
    leaves = [np.arange(6).reshape(2, 3).astype(dtype) for dtype in dtypes]
    leaves += [np.float32(3.5), np.zeros((0, 4), np.float32), np.arange(12.0).reshape(3, 4).T]
    leaves += [np.random.default_rng(0).integers(0, 255, (3, MB), np.uint8)]
    head = {"kind": "x", "n": [1, 2, None], "view": 3}
    assert a.transport.send(1, head, leaves)
    src, got_head, got = b.next()
    assert (src, got_head) == (0, head)
    for leaf, received in zip(leaves, got, strict=True):
        assert (received.dtype, received.shape) == (leaf.dtype, np.shape(leaf))
        assert np.array_equal(np.asarray(leaf), received)
    assert a.transport.send(1, {"empty": True}, [np.zeros((0, 2), np.int8)])
    assert b.next()[2][0].shape == (0, 2)
    assert a.transport.send(1, {"only": "head"})
    assert b.next() == (0, {"only": "head"}, [])
    assert b.asked.qsize() == 2  # not for a message without leaves


def test_many_and_big_messages_both_ways_at_once(start, cred):
    a, b, c = start(0, cred), start(1, cred), start(2, cred)
    n = 40
    nodes = (a, b, c)
    for node in nodes:
        for other in nodes:
            if other is not node:
                node.connect(other)
    rng = np.random.default_rng(0)
    big = rng.integers(0, 255, 5 * MB // 2, np.uint8)
    small = rng.integers(0, 255, 100, np.uint8)
    for i in range(n):
        for node in nodes:
            for other in nodes:
                if other is not node:
                    node.transport.send(other.me, {"i": i}, [small if i % 4 else big])
                    node.transport.send(other.me, {"i": i})
    for node in nodes:
        got = {(src, n_leaves): [] for src in range(3) for n_leaves in (0, 1) if src != node.me}
        for _ in range(4 * n):
            src, head, leaves = node.next()
            got[src, len(leaves)].append(head["i"])
            if leaves:
                assert zlib.crc32(leaves[0]) == zlib.crc32(small if head["i"] % 4 else big)
        assert all(order == list(range(n)) for order in got.values())
    eventually(lambda: all(node.transport.queued_bytes() == 0 for node in nodes))


def test_a_slice_of_the_callers_vector_is_filled_in_place(start, cred):
    vector = np.zeros(100, np.float32)
    a, b = start(0, cred), start(1, cred, expect=lambda src, head, table: [vector[head["lo"] : head["hi"]]])
    a.connect(b)
    a.transport.send(1, {"lo": 10, "hi": 13}, [np.array([1, 2, 3], np.float32)])
    assert b.next()[2][0].base is vector
    assert vector[9:14].tolist() == [0, 1, 2, 3, 0]


def test_a_plain_buffer_from_expect_becomes_an_array(start):
    a, b = start(0), start(1, expect=lambda src, head, table: [bytearray(24)])
    a.connect(b)
    a.transport.send(1, {}, [np.arange(6, dtype=np.int32).reshape(2, 3)])
    assert b.next()[2][0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_leaf_is_converted_in_the_sender_thread(start):
    class OnDevice:
        shape = (2,)
        dtype = np.dtype(np.float32)
        threads = []

        def __array__(self, dtype=None, copy=None):
            self.threads.append(threading.current_thread().name)
            return np.ones(2, np.float32)

    a, b = start(0), start(1)
    a.connect(b)
    a.transport.send(1, {}, [OnDevice()])
    assert b.next()[2][0].tolist() == [1, 1]
    assert OnDevice.threads == ["jaxdt-0-send-data-1"]


def test_what_cannot_be_sent_is_refused_in_send(start):
    a = start(0)
    a.transport.connect(1, ("127.0.0.1", 1))
    with pytest.raises(FrameError, match="complex64"):
        a.transport.send(1, {}, [np.zeros(1, np.complex64)])
    with pytest.raises(FrameError, match="head: got"):
        a.transport.send(1, {"x": "y" * (2 * MB)})
    assert not a.transport.send(2, {})


# --- order ---


def test_queued_messages_go_by_priority_then_in_order(start):
    a = start(0)
    with socket.create_server(LOOPBACK) as reserved:
        address = reserved.getsockname()[:2]
    a.transport.connect(1, address)
    for i, priority in enumerate([5, 1, 5, 0, 1, 0]):
        a.transport.send(1, {"i": i}, [np.zeros(3)], priority=priority)
    assert "ECONNREFUSED" in a.link(1, "gone")
    b = start(1, listen=address)
    assert [head["i"] for head in b.heads(6)] == [3, 5, 1, 4, 0, 2]
    a.link(1, "up")


def test_an_urgent_message_overtakes_between_chunks(start, cred):
    a, b = start(0, cred), start(1, cred)
    a.connect(b)
    b.gate.clear()
    a.transport.send(1, {"name": "shard"}, [np.zeros(64 * MB, np.uint8)], priority=9)
    b.asked.get(timeout=WAIT_S)  # the shard has begun; more than the kernel buffers of it cannot be sent
    a.transport.send(1, {"name": "activation"}, [np.ones(3)], priority=0)
    b.gate.set()
    assert [head["name"] for head in b.heads(2)] == ["activation", "shard"]


def test_a_heartbeat_does_not_wait_for_a_shard(start, cred):
    a, b = start(0, cred), start(1, cred)
    a.connect(b)
    b.gate.clear()
    a.transport.send(1, {"name": "shard"}, [np.zeros(32 * MB, np.uint8)])
    b.asked.get(timeout=WAIT_S)
    a.transport.send(1, {"name": "heartbeat"})
    assert b.next()[1] == {"name": "heartbeat"}
    b.gate.set()
    assert b.next()[1] == {"name": "shard"}


def test_queued_bytes_count_until_the_acknowledgement(start):
    a, b, c = start(0), start(1), start(2)
    a.connect(b)
    a.connect(c)
    b.gate.clear()
    for _ in range(3):
        a.transport.send(1, {}, [np.zeros(1000, np.uint8)])
    a.transport.send(2, {}, [np.zeros(500, np.uint8)])
    eventually(lambda: a.transport.queued_bytes(2) == 0)
    assert (a.transport.queued_bytes(1), a.transport.queued_bytes(), a.transport.queued_bytes(9)) == (3000, 3000, 0)
    b.gate.set()
    eventually(lambda: a.transport.queued_bytes() == 0)


# --- a peer that nobody can dial ---


def test_a_peer_behind_nat_opens_both_directions(start, cred):
    public, hidden = start(0, cred), start(1, cred, listen=None)
    hidden.connect(public)
    assert hidden.address is None
    hidden.transport.send(0, {"hello": 1})
    public.next()
    public.link(1, "up")
    public.transport.send(1, {"n": 1})
    assert hidden.next()[1] == {"n": 1}
    payload = np.random.default_rng(0).integers(0, 255, 3 * MB, np.uint8)
    for n in range(3):
        eventually(lambda: public.transport.send(1, {"n": n}, [payload]))  # noqa: B023
        src, head, leaves = hidden.next()
        assert (src, head) == (0, {"n": n}) and np.array_equal(leaves[0], payload)
        eventually(lambda: public.channel(1)._connection is not None)
        public.cut(1)
    eventually(lambda: public.transport.queued_bytes() == 0)
    assert hidden.stat(0, "messages_in") == 4


def test_a_public_peer_that_restarts_is_dialed_again(start):
    public, hidden = start(0), start(1, listen=None)
    hidden.connect(public)
    public.link(1, "up")
    public.transport.close(0.0)
    hidden.link(0, "down")
    again = start(0, listen=public.address)
    again.link(1, "up")
    eventually(lambda: again.transport.send(1, {"back": 1}, [np.zeros(2)]))
    assert hidden.next()[1] == {"back": 1}
