"""The records after the TLS handshake, in memory: who can read them, and that each opens at its own place only."""

import io
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdt.runtime.net import aead_records
from jaxdt.runtime.net.aead_records import RECORD_BYTES, AeadRecords

MINE, YOURS = bytes(range(32)), bytes(range(32, 64))
CHANGED = "changed on its way, or is not the next one"


def two_ends(mine=MINE, yours=YOURS):
    """The dialling and the accepting side of one connection."""
    return AeadRecords(mine, yours, True), AeadRecords(yours, mine, False)


def record(end, data):
    return b"".join(end.seal(data))


def read(end, data, n_bytes=100):
    """What one read makes of `data`, and how many bytes of that it asked for."""
    source, buffer = io.BytesIO(data), memoryview(bytearray(n_bytes))

    def fill(part, begun):
        if source.readinto(part) < len(part):
            raise ConnectionAbortedError("closed by the other side")

    try:
        return bytes(buffer[: end.read(fill, buffer)])
    except ConnectionAbortedError:
        assert bytes(buffer) == bytes(n_bytes), "something of a bad record was left"
        raise
    finally:
        end.n_asked = source.tell()


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 60), st.booleans())
def test_records_are_read_in_pieces_of_any_size(said, n_bytes, dialler_speaks):
    ends = two_ends()
    speaker, hearer = ends if dialler_speaks else ends[::-1]
    source, heard = io.BytesIO(b"".join(record(speaker, data) for data in said)), b""
    while len(heard) < sum(map(len, said)):
        buffer = memoryview(bytearray(n_bytes))
        n = hearer.read(lambda part, begun: source.readinto(part), buffer)
        assert n >= 1
        heard += buffer[:n]
    assert heard == b"".join(said)


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 60))
def test_records_come_in_pieces_of_any_size(said, n_bytes):
    speaker, hearer = two_ends()
    raw = b"".join(record(speaker, data) for data in said)
    assert b"".join(hearer.take(raw[i : i + n_bytes]) for i in range(0, len(raw), n_bytes)) == b"".join(said)


def test_what_a_read_has_left_is_taken_first():
    speaker, hearer = two_ends()
    assert read(hearer, record(speaker, b"abcdef"), n_bytes=2) == b"ab"
    assert hearer.take(record(speaker, b"gh")) == b"cdefgh"


def test_the_largest_record():
    speaker, hearer = two_ends()
    data = bytes(RECORD_BYTES - 1) + b"x"
    assert hearer.take(record(speaker, data)) == data


def test_the_same_words_never_look_the_same():
    """One key for each direction and connection, one nonce for each record."""
    ends = [*two_ends(), *two_ends(mine=bytes(32)), *two_ends(yours=bytes(32)), *two_ends(YOURS, MINE)]
    assert len({record(end, bytes(100)) for end in ends for _ in range(20)}) == 20 * len(ends)


@pytest.mark.parametrize("which", [0, 1])
def test_both_shares_count(which):
    shares = [MINE, YOURS]
    speaker, _ = two_ends(*shares)
    shares[which] = bytes([shares[which][0] ^ 1]) + shares[which][1:]
    with pytest.raises(ConnectionAbortedError, match=CHANGED):
        read(two_ends(*shares)[1], record(speaker, b"x" * 9))


def test_a_share_that_is_given_back_makes_no_common_key():
    """Who repeats the other's share has two keys all the same, and its own records do not open."""
    dialled = AeadRecords(MINE, MINE, True)
    with pytest.raises(ConnectionAbortedError, match=CHANGED):
        read(dialled, record(dialled, b"x" * 9))


def flipped(data, at):
    data = bytearray(data)
    data[at] ^= 1
    return bytes(data)


ATTACKS = {
    "bit of ciphertext": lambda first, second, own: flipped(first, 10),
    "bit of the tag": lambda first, second, own: flipped(first, -1),
    "bit of the length": lambda first, second, own: flipped(first, 3) + bytes(1),
    "left out": lambda first, second, own: second,
    "repeated": lambda first, second, own: first + first,
    "in another order": lambda first, second, own: second + first,
    "sent back": lambda first, second, own: own,
    "of another connection": lambda first, second, own: record(two_ends(mine=bytes(32))[0], b"x" * 50),
    "not sealed": lambda first, second, own: struct.pack("!I", 50) + bytes(50 + 16),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("by_take", [False, True])
def test_what_is_not_the_next_record_ends_the_connection(attack, by_take):
    speaker, hearer = two_ends()
    bad = attack(record(speaker, b"x" * 50), record(speaker, b"y" * 50), record(hearer, b"z" * 50))
    with pytest.raises(ConnectionAbortedError, match=CHANGED):
        if by_take:
            hearer.take(bad)
        else:
            read(hearer, bad)
            read(hearer, bad[70:])  # the second record, where the first is a good one


@pytest.mark.parametrize("n_bytes", [0, RECORD_BYTES + 1, 0x16030301, 2**32 - 1])
def test_a_length_is_checked_before_anything_else(n_bytes):
    _, hearer = two_ends()
    came = struct.pack("!I", n_bytes) + bytes(100)
    words = f"a record of {n_bytes} bytes, expected 1 to {RECORD_BYTES}"
    with pytest.raises(ConnectionAbortedError, match=words):
        read(hearer, came)
    assert hearer.n_asked == 4
    with pytest.raises(ConnectionAbortedError, match=words):
        hearer.take(came)


def test_a_record_that_ends_too_soon_says_nothing():
    speaker, hearer = two_ends()
    whole = record(speaker, b"x" * 50)
    for n in range(len(whole)):
        with pytest.raises(ConnectionAbortedError, match="closed by the other side"):
            read(hearer, whole[:n])
    assert [hearer.take(whole[n : n + 1]) for n in range(len(whole))] == [b""] * (len(whole) - 1) + [b"x" * 50]


def test_a_key_has_its_number_of_records(monkeypatch):
    monkeypatch.setattr(aead_records, "RECORDS_MAX", 3)
    speaker, hearer = two_ends()
    for _ in range(3):
        assert hearer.take(record(speaker, b"x")) == b"x"
    with pytest.raises(ConnectionAbortedError, match="3 records under one key"):
        record(speaker, b"x")
    monkeypatch.setattr(aead_records, "RECORDS_MAX", 4)
    one_more = record(speaker, b"x")
    monkeypatch.setattr(aead_records, "RECORDS_MAX", 3)
    with pytest.raises(ConnectionAbortedError, match="3 records under one key"):
        hearer.take(one_more)
