import struct
import tracemalloc
import zlib

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_nodes import message_frame

from jaxdt.runtime.net import frame
from jaxdt.runtime.net.frame import DTYPES, FrameError, FrameFeed, Leaf, Payload
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.storage.words import aligned_empty

LIMITS = TransportLimits(chunk_bytes=64)
ALL_KINDS = tuple(frame.KINDS)

leaf_entries = st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3))
heads = st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9), max_size=3)


def random_leaves(entries, seed):
    rng = np.random.default_rng(seed)
    sizes = [Leaf(dtype, tuple(shape)) for dtype, shape in entries]
    raw = [rng.integers(0, 2, leaf.n_bytes, np.uint8) for leaf in sizes]
    return [data.view(DTYPES[leaf.dtype]).reshape(leaf.shape) for data, leaf in zip(raw, sizes, strict=True)]


def encode(sequence, head, leaves, limits=LIMITS):
    """All frames of a message, one after another."""
    table = frame.table_of(leaves, limits)
    payload = Payload(leaves)
    total = sum(leaf.n_bytes for leaf in table)
    out = bytearray()
    for offset in range(0, max(total, 1), limits.chunk_bytes):
        n = min(limits.chunk_bytes, total - offset)
        first = (b"", b"") if offset else (frame.pack_head(head, limits), frame.pack_table(table))
        sizes = {"offset": offset, "payload_bytes": n, "total_bytes": total}
        out += frame.pack_message(*first, view=7, sequence=sequence, **sizes)
        for piece in payload.part(offset, n):
            out += piece
    return bytes(out)


class Receiver:
    """Collects messages as (head, leaves), and checks that the parser asks for no more than the limits allow."""

    def __init__(self, limits=LIMITS, kinds=ALL_KINDS):
        self.messages = []
        self._limits = limits
        self._open = {}
        self._feed = FrameFeed(self._watched(frame.parse(limits, kinds, self._buffers_for, self._on_frame)))

    def feed(self, data, piece_bytes=1 << 20):
        for start in range(0, len(data), piece_bytes):
            self._feed.feed(data[start : start + piece_bytes])
        return self

    def _watched(self, parser):
        longest = max(frame.HEADER_BYTES, self._limits.head_bytes_max + self._limits.table_bytes_max)
        for buffer, between_frames in parser:
            assert len(buffer) <= max(longest, self._limits.chunk_bytes_max)
            yield buffer, between_frames

    def _buffers_for(self, chunk):
        if chunk.offset == 0:
            leaves = [aligned_empty(leaf.shape, DTYPES[leaf.dtype]) for leaf in chunk.table]
            self._open[chunk.sequence] = (chunk.head, leaves, Payload(leaves))
        if chunk.sequence not in self._open:
            raise FrameError("a chunk of nothing")
        return self._open[chunk.sequence][2].part(chunk.offset, chunk.payload_bytes)

    def _on_frame(self, chunk):
        if chunk.total_bytes == 0:
            self.messages.append((chunk.head, [np.empty(leaf.shape, DTYPES[leaf.dtype]) for leaf in chunk.table]))
        elif chunk.offset + chunk.payload_bytes == chunk.total_bytes:
            self.messages.append(self._open.pop(chunk.sequence)[:2])


@settings(max_examples=100)
@given(st.lists(st.tuples(heads, st.lists(leaf_entries, max_size=3)), max_size=3), st.integers(1, 200))
def test_messages_come_back_however_the_bytes_are_cut(content, piece_bytes):
    sent = [(head, random_leaves(entries, seed)) for seed, (head, entries) in enumerate(content)]
    data = b"".join(encode(i, *message) for i, message in enumerate(sent))
    got = Receiver().feed(data, piece_bytes).messages
    assert [head for head, _ in got] == [head for head, _ in sent]
    for (_, expected), (_, leaves) in zip(sent, got, strict=True):
        assert [(a.dtype, a.shape, a.tobytes()) for a in expected] == [(a.dtype, a.shape, a.tobytes()) for a in leaves]
        assert all(a.__array_interface__["data"][0] % 64 == 0 for a in leaves if a.size)


@settings(max_examples=60)
@given(heads, st.lists(leaf_entries, max_size=3), st.data())
def test_a_truncated_message_is_neither_delivered_nor_an_error(head, entries, data):
    raw = encode(1, head, random_leaves(entries, 0))
    cut = data.draw(st.integers(0, len(raw) - 1))
    assert Receiver().feed(raw[:cut]).messages == []


@settings(max_examples=150)
@given(st.data())
def test_a_flipped_bit_outside_the_payload_never_delivers(data):
    raw = bytearray(encode(1, {"a": 1}, [np.arange(4, dtype=np.float32)]))
    bit = data.draw(st.integers(0, (len(raw) - 16) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    receiver = Receiver()
    try:
        receiver.feed(bytes(raw))
    except FrameError as error:
        assert "\n" not in str(error)
    assert receiver.messages == []


@settings(max_examples=150)
@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_a_frame_error_or_a_wait(raw, with_magic):
    try:
        Receiver().feed((frame.MAGIC if with_magic else b"") + raw)
    except FrameError as error:
        assert "\n" not in str(error)


@settings(max_examples=150)
@given(st.binary(max_size=60), st.binary(max_size=60), st.integers(0, 100))
def test_garbage_under_a_good_checksum_is_a_frame_error(head, table, total):
    raw = message_frame(head, table, payload_bytes=total, total_bytes=total)
    try:
        Receiver().feed(raw + bytes(total))
    except FrameError as error:
        assert "\n" not in str(error)


def table_frame(table, total=0):
    return message_frame(msgpack.packb({}), msgpack.packb(table), payload_bytes=total, total_bytes=total)


def of_kind(kind, header):
    """The same header, of a frame without head and table, for another kind."""
    fields = header[:5] + bytes([kind]) + header[6:-4]
    return fields + struct.pack("!I", zlib.crc32(fields))


GOOD = encode(1, {}, [np.zeros(4, np.float32)])
BAD = {
    "magic": (b"HTTP" + GOOD[4:], "expected b'jxdt'"),
    "TLS record": (b"\x16\x03\x01\x02" + GOOD[4:], "only one side has a credential"),
    "version": (GOOD[:4] + b"\x09" + GOOD[5:], "version: got 9, expected 6"),
    "kind": (GOOD[:5] + b"\x63" + GOOD[6:], "kind: got 99, expected greeting or"),
    "flags": (GOOD[:6] + b"\x80" + GOOD[7:], "flags"),
    "checksum": (GOOD[:-20] + b"\xff" * 20, "checksum"),
    "huge head": (GOOD[:12] + b"\xff" * 4 + GOOD[16:], "head: got 4294967295, expected at most"),
    "huge table": (GOOD[:16] + b"\xff" * 4 + GOOD[20:], "leaf table: got 4294967295, expected at most"),
    "huge payload": (GOOD[:44] + b"\xff" * 8 + GOOD[52:], "payload: got"),
    "huge chunk": (message_frame(payload_bytes=1 << 23, total_bytes=1 << 24), "chunk: got 8388608"),
    "chunk beyond the end": (message_frame(offset=9, payload_bytes=9, total_bytes=10), "ends at byte 18"),
    "empty chunk": (message_frame(offset=9, payload_bytes=0, total_bytes=10), "empty chunk"),
    "late head": (message_frame(b"\x80", offset=5, payload_bytes=5, total_bytes=10), "at byte 0 only"),
    "ack with payload": (of_kind(frame.ACK, message_frame(payload_bytes=4, total_bytes=4)), "ack frame with 4 bytes"),
    "head not a map": (message_frame(msgpack.packb([1])), "head: got a list, expected a map"),
    "head too deep": (message_frame(b"\x91" * 1000 + b"\x90"), "head: lists and maps more than 32 deep"),
    "head too deep for msgpack": (message_frame(b"\x91" * 5000 + b"\x90"), "not msgpack"),
    "map too deep": (message_frame(b"\x81\x01" * 33 + b"\x80"), "head: lists and maps more than 32 deep"),
    "head not msgpack": (message_frame(b"\xc1"), "not msgpack"),
    "unhashable key": (message_frame(b"\x81\x90\x01"), "not msgpack"),
    "table not a list": (table_frame({}), "leaf table: got a dict"),
    "entry": (table_frame([["float32", [1]]], 4), "expected [dtype, shape, bytes]"),
    "dtype": (table_frame([["object", [1], 8]], 8), "dtype: got 'object', expected one of"),
    "dtype no string": (table_frame([[7, [1], 8]], 8), "dtype: got 7"),
    "shape": (table_frame([["int8", ["x"], 8]], 8), "shape: got ['x']"),
    "bool size": (table_frame([["int8", [True], 1]], 1), "shape: got [True]"),
    "negative": (table_frame([["int8", [-2, -4], 8]], 8), "expected sizes >= 0"),
    "overflow": (table_frame([["int8", [2**32, 2**32, 2], 0]]), "expected at most"),
    "overflow beside zero": (table_frame([["int8", [0, 2**62, 2**62], 0]]), "expected at most"),
    "dimensions": (table_frame([["int8", [1] * 40, 1]], 1), "dimensions: got 40"),
    "bytes": (table_frame([["float32", [4], 8]], 8), "got 8 bytes, expected 16"),
    "sum of bytes": (table_frame([["float32", [4], 16]], 12), "payload: got 12 bytes, expected the leaf table's 16"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_and_how(name):
    raw, words = BAD[name]
    with pytest.raises(FrameError) as caught:
        Receiver().feed(raw + bytes(64))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_only_the_kinds_of_this_place_are_taken():
    with pytest.raises(FrameError, match="got message, expected ack"):
        Receiver(kinds=(frame.ACK,)).feed(GOOD)


def test_claimed_lengths_are_not_allocated():
    bombs = [
        GOOD[:12] + struct.pack("!I", 1 << 31) + GOOD[16:],
        GOOD[:44] + struct.pack("!Q", 1 << 60) + GOOD[52:],
        message_frame(b"\xdd\x7f\xff\xff\xff" * 200),  # lists of two billion, in one another
        message_frame(b"\xdd\x00\x00\x03\x00" * 200),
        table_frame([["float64", [1 << 30], 1 << 33]]),
    ]
    tracemalloc.start()
    try:
        for bomb in bombs:
            with pytest.raises(FrameError):
                Receiver().feed(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (np.zeros(2, np.complex64), "dtype: got complex64"),
        (np.zeros(2, ">f4"), "dtype: got >f4"),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), "dtype: got float8_e4m3fn"),
        (np.zeros((1,) * 17, np.int8), "dimensions: got 17"),
    ],
)
def test_an_array_that_does_not_fit_a_frame_is_refused_before_it_is_sent(leaf, words):
    with pytest.raises(FrameError, match=words):
        frame.table_of([leaf], LIMITS)


def test_a_payload_is_read_across_leaves_without_copies():
    leaves = [np.arange(3, dtype=np.uint8), np.zeros(0, np.float32), np.arange(3, 10, dtype=np.uint8)]
    pieces = Payload(leaves).part(1, 5)
    assert b"".join(pieces) == bytes([1, 2, 3, 4, 5])
    pieces[0][0] = 99
    assert leaves[0][1] == 99
