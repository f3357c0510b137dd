"""Bytes <-> frames, without a socket: the format of what travels between two peers, and what is refused.

A frame is a fixed header, a head (msgpack map), a leaf table (msgpack list) and a part of the payload:

    header (magic version kind flags view head_bytes table_bytes sequence offset payload_bytes total_bytes crc)
    head table part

A message is one MESSAGE frame with head and table and `offset` 0, then as many MESSAGE frames without them as its
payload needs; `sequence` identifies it within a session. Its payload is the leaves one after another, raw and
little-endian. The crc covers header, head and table, so that a corrupted length or sequence is noticed. The payload is
covered by TCP, and by AEAD records where there is a credential.

A length is compared with `TransportLimits` before anything of that length is allocated. A frame that breaks a rule
raises FrameError.
"""

import itertools
import math
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import ml_dtypes
import msgpack
import numpy as np

from jaxdt.run import versions
from jaxdt.runtime.net.options import TransportLimits

MAGIC = b"jxdt"
VERSION = versions.PROTOCOL
GREETING, WELCOME, REFUSED, MESSAGE, ACK, KEYS, REQUEST, CERTIFICATE = range(1, 9)
KINDS = {
    GREETING: "greeting",
    WELCOME: "welcome",
    REFUSED: "refused",
    MESSAGE: "message",
    ACK: "ack",
    KEYS: "keys",
    REQUEST: "request",
    CERTIFICATE: "certificate",
}

_FIELDS = struct.Struct("!4sBBHIIIQQQQ")
_CRC = struct.Struct("!I")
# Levels of lists and maps in one another. Messages use less than 12; code that walks a frame's content may recurse.
_DEPTH_MAX = 32
_pack_msgpack: Callable[[Any], bytes] = cast(Any, msgpack.packb)  # its own annotations lack the type of the result
HEADER_BYTES = _FIELDS.size + _CRC.size

DTYPES = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (ml_dtypes.bfloat16, "<f2", "<f4", "<f8", "<i1", "<u1", "<i4", "<i8", "?")
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FrameError(Exception):
    """One line: what was received (or passed in to be sent), and what was expected."""


class Leaf(NamedTuple):
    """One array of a message."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class PackedHead:
    """A head as msgpack, and the view that the frame's header repeats from it."""

    raw: bytes
    view: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A checked frame; `head` and `table` are those of a message's first frame, empty in the others."""

    kind: int
    view: int
    sequence: int
    offset: int
    payload_bytes: int
    total_bytes: int
    head: dict
    table: tuple[Leaf, ...]


class _Header(NamedTuple):
    kind: int
    view: int
    head_bytes: int
    table_bytes: int
    sequence: int
    offset: int
    payload_bytes: int
    total_bytes: int


def pack(kind: int, head: bytes = b"", sequence: int = 0) -> bytes:
    """A whole frame without payload: one of the handshake, or an ACK. `head` comes from pack_head."""
    fields = _FIELDS.pack(MAGIC, VERSION, kind, 0, 0, len(head), 0, sequence, 0, 0, 0)
    return fields + _CRC.pack(zlib.crc32(head, zlib.crc32(fields))) + head


def pack_message(
    head: bytes, table: bytes, *, view: int, sequence: int, offset: int, payload_bytes: int, total_bytes: int
) -> bytes:
    """A MESSAGE frame up to its part of the payload. `head` and `table` come from pack_head and pack_table."""
    sizes = (view, len(head), len(table), sequence, offset, payload_bytes, total_bytes)
    fields = _FIELDS.pack(MAGIC, VERSION, MESSAGE, 0, *sizes)
    body = head + table
    return fields + _CRC.pack(zlib.crc32(body, zlib.crc32(fields))) + body


def pack_head(head: dict, limits: TransportLimits) -> bytes:
    """A head as msgpack; TypeError for a value that msgpack does not know, FrameError when the head is too long."""
    raw = _pack_msgpack(head)
    _at_most("head", len(raw), limits.head_bytes_max)
    return raw


def view_of(head: dict) -> int:
    """The view that the header repeats from a head; 0 for none."""
    view = head.get("view")
    return view if type(view) is int and 0 <= view < 1 << 32 else 0


def table_of(leaves: Sequence, limits: TransportLimits) -> tuple[Leaf, ...]:
    """The leaf table of arrays. It reads only `.dtype` and `.shape`, so an array may still be on its device."""
    table = tuple(Leaf(_dtype_name(i, leaf.dtype), tuple(map(int, leaf.shape))) for i, leaf in enumerate(leaves))
    _at_most("leaves", len(table), limits.n_leaves_max)
    for i, leaf in enumerate(table):
        _check_shape(i, leaf, limits)
    _at_most("payload", sum(leaf.n_bytes for leaf in table), limits.payload_bytes_max)
    return table


def pack_table(table: Sequence[Leaf]) -> bytes:
    """A leaf table as msgpack: [[dtype, shape, bytes], ...]; empty when there are no leaves."""
    return _pack_msgpack([(leaf.dtype, leaf.shape, leaf.n_bytes) for leaf in table]) if table else b""


def parse(
    limits: TransportLimits,
    kinds: Sequence[int],
    buffers_for: Callable[[Frame], Iterable[memoryview]],
    on_frame: Callable[[Frame], None],
) -> Iterator[tuple[memoryview, bool]]:
    """Parse frames without end: yields (buffer, between_frames); the caller fills the buffer and asks for the next.

    `between_frames` is true where no frame has begun: the caller may wait there for any time. `buffers_for` returns the
    buffers that receive a frame's part of the payload, payload_bytes together. `on_frame` gets each frame when its
    last byte has arrived.
    """
    raw = memoryview(bytearray(HEADER_BYTES))
    while True:
        yield raw, True
        header = _unpack_header(raw, limits, kinds)
        body = memoryview(bytearray(header.head_bytes + header.table_bytes))
        if body:
            yield body, False
        frame = _unpack_body(raw, header, body, limits)
        if frame.payload_bytes:
            for buffer in buffers_for(frame):
                yield buffer, False
        on_frame(frame)


class FrameFeed:
    """Drives a parse() with bytes in pieces of any size."""

    def __init__(self, parser: Iterator[tuple[memoryview, bool]]):
        self._parser = parser
        self._unfilled = next(parser)[0]

    def feed(self, data: bytes) -> None:
        """Parse all of `data`. This calls the parser's `buffers_for` and `on_frame`."""
        source = memoryview(data)
        while source:
            n = min(len(source), len(self._unfilled))
            self._unfilled[:n] = source[:n]
            source = source[n:]
            self._unfilled = self._unfilled[n:]
            if not self._unfilled:
                self._unfilled = next(self._parser)[0]


class Payload:
    """The bytes of C-contiguous arrays as one sequence of bytes, without copying them."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._views = [array.reshape(-1).view(np.uint8).data for array in arrays if array.size]
        self._starts = list(itertools.accumulate(map(len, self._views), initial=0))

    def part(self, offset: int, n_bytes: int) -> list[memoryview]:
        """The pieces that hold bytes offset to offset + n_bytes."""
        pieces = []
        index = bisect_right(self._starts, offset) - 1
        while n_bytes > 0:
            start = offset - self._starts[index]
            piece = self._views[index][start : start + n_bytes]
            pieces.append(piece)
            offset += len(piece)
            n_bytes -= len(piece)
            index += 1
        return pieces


def _unpack_header(raw: memoryview, limits: TransportLimits, kinds: Sequence[int]) -> _Header:
    magic, version, kind, flags, *rest = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise FrameError(f"frame begins with {bytes(magic)!r}{_tls_hint(magic)}, expected {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"protocol version: got {version}, expected {VERSION}")
    if kind not in kinds:
        expected = " or ".join(KINDS[k] for k in kinds)
        raise FrameError(f"frame kind: got {KINDS.get(kind, kind)}, expected {expected}")
    if flags:
        raise FrameError(f"frame flags: got {flags:#x}, expected 0")
    header = _Header(kind, *rest)
    _at_most("head", header.head_bytes, limits.head_bytes_max)
    _at_most("leaf table", header.table_bytes, limits.table_bytes_max)
    _at_most("payload", header.total_bytes, limits.payload_bytes_max)
    _at_most("chunk", header.payload_bytes, limits.chunk_bytes_max)
    _check_chunk(header)
    return header


def _check_chunk(header: _Header) -> None:
    end = header.offset + header.payload_bytes
    if end > header.total_bytes:
        raise FrameError(f"chunk ends at byte {end}, expected at most the payload's {header.total_bytes}")
    if header.kind != MESSAGE and (header.total_bytes or header.table_bytes):
        raise FrameError(f"{KINDS[header.kind]} frame with {header.total_bytes} bytes of payload, expected none")
    if header.total_bytes and not header.payload_bytes:
        raise FrameError(f"empty chunk at byte {header.offset} of a payload of {header.total_bytes} bytes")
    if header.offset and (header.head_bytes or header.table_bytes):
        raise FrameError(f"head or leaf table at byte {header.offset} of a payload, expected at byte 0 only")


def _unpack_body(raw: memoryview, header: _Header, body: memoryview, limits: TransportLimits) -> Frame:
    (crc,) = _CRC.unpack_from(raw, _FIELDS.size)
    expected_crc = zlib.crc32(body, zlib.crc32(raw[: _FIELDS.size]))
    if crc != expected_crc:
        raise FrameError(f"checksum of header, head and leaf table: got {crc:#010x}, expected {expected_crc:#010x}")
    head = _unpack_head(body[: header.head_bytes], limits)
    table = _unpack_table(body[header.head_bytes :], limits)
    if not header.offset and sum(leaf.n_bytes for leaf in table) != header.total_bytes:
        expected = sum(leaf.n_bytes for leaf in table)
        raise FrameError(f"payload: got {header.total_bytes} bytes, expected the leaf table's {expected}")
    return Frame(
        header.kind,
        header.view,
        header.sequence,
        header.offset,
        header.payload_bytes,
        header.total_bytes,
        head,
        table,
    )


def _unpack_head(raw: memoryview, limits: TransportLimits) -> dict:
    head = _unpack_msgpack("head", raw, limits.n_leaves_max) if raw else {}
    if not isinstance(head, dict):
        raise FrameError(f"head: got a {type(head).__name__}, expected a map")
    return head


def _unpack_table(raw: memoryview, limits: TransportLimits) -> tuple[Leaf, ...]:
    entries = _unpack_msgpack("leaf table", raw, limits.n_leaves_max) if raw else []
    if not isinstance(entries, list):
        raise FrameError(f"leaf table: got a {type(entries).__name__}, expected a list")
    return tuple(_leaf(i, entry, limits) for i, entry in enumerate(entries))


def _unpack_msgpack(name: str, raw: memoryview, n_items_max: int):
    # msgpack allocates a list by its claimed length; an honest list has at least one byte for each item.
    n_items_max = min(n_items_max, len(raw))
    try:
        value = msgpack.unpackb(raw, strict_map_key=False, max_array_len=n_items_max, max_map_len=n_items_max)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FrameError(f"{name}: {len(raw)} bytes that are not msgpack ({_short(error)})") from None
    if _is_deeper(value, _DEPTH_MAX):
        raise FrameError(f"{name}: lists and maps more than {_DEPTH_MAX} deep, expected fewer")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and maps stand in one another more than `depth` deep; without recursion."""
    level = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level = [item for item in inner if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def _leaf(i: int, entry: object, limits: TransportLimits) -> Leaf:
    if not isinstance(entry, list) or len(entry) != 3:
        raise FrameError(f"leaf {i}: got {_short(entry)}, expected [dtype, shape, bytes]")
    dtype, shape, n_bytes = entry
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FrameError(f"leaf {i}: dtype: got {_short(dtype)}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        raise FrameError(f"leaf {i}: shape: got {_short(shape)}, expected a list of integers")
    leaf = Leaf(dtype, tuple(shape))
    _check_shape(i, leaf, limits)
    if type(n_bytes) is not int or n_bytes != leaf.n_bytes:
        raise FrameError(f"leaf {i}: got {_short(n_bytes)} bytes, expected {leaf.n_bytes} for {dtype}{leaf.shape}")
    return leaf


def _check_shape(i: int, leaf: Leaf, limits: TransportLimits) -> None:
    _at_most(f"leaf {i}: dimensions", len(leaf.shape), limits.n_dims_max)
    if any(size < 0 for size in leaf.shape):
        raise FrameError(f"leaf {i}: shape: got {_short(leaf.shape)}, expected sizes >= 0")
    # A size of zero counts as one, since numpy refuses (0, huge, huge) too.
    _at_most(f"leaf {i}: bytes", math.prod(size or 1 for size in leaf.shape), limits.payload_bytes_max)


def _dtype_name(i: int, dtype) -> str:
    name = _DTYPE_NAMES.get(np.dtype(dtype))
    if name is None:
        raise FrameError(f"leaf {i}: dtype: got {dtype}, expected one of {', '.join(DTYPES)}")
    return name


def _at_most(name: str, got: int, limit: int) -> None:
    if got > limit:
        raise FrameError(f"{name}: got {got}, expected at most {limit}")


def _tls_hint(magic: bytes) -> str:
    # A TLS record begins with its type (21 alert, 22 handshake) and the version 3.x.
    return " (TLS: only one side has a credential)" if magic[0] in (21, 22) and magic[1] == 3 else ""


def _short(value: object) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
