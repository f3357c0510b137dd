"""The records after the TLS handshake, in memory: who can decrypt them, and that each has its own place only."""

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.runtime.net import aead_records
from jaxdt.runtime.net.aead_records import RECORD_BYTES, AeadRecords

OWN = bytes(range(32))
OTHER = bytes(range(32, 64))
CHANGED = "changed on its way, or is not the next one"


def two_ends(own=OWN, other=OTHER):
    """The dialing and the accepting side of one connection."""
    return AeadRecords(own, other, True), AeadRecords(other, own, False)


def record(end, data):
    return b"".join(end.encrypt(data))


def read(end, data, n_bytes=100):
    """The plaintext that one read returns for `data`; `end.n_asked` is how many bytes it asked for."""
    source = io.BytesIO(data)
    buffer = memoryview(bytearray(n_bytes))

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


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 60), st.booleans())
def test_records_are_read_in_pieces_of_any_size(chunks, n_bytes, dialer_sends):
    ends = two_ends()
    sender, receiver = ends if dialer_sends else ends[::-1]
    source = io.BytesIO(b"".join(record(sender, data) for data in chunks))
    plaintext = b""
    while len(plaintext) < sum(map(len, chunks)):
        buffer = memoryview(bytearray(n_bytes))
        n = receiver.read(lambda part, begun: source.readinto(part), buffer)
        assert n >= 1
        plaintext += buffer[:n]
    assert plaintext == b"".join(chunks)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 60))
def test_records_come_in_pieces_of_any_size(chunks, n_bytes):
    sender, receiver = two_ends()
    raw = b"".join(record(sender, data) for data in chunks)
    assert b"".join(receiver.decrypt(raw[i : i + n_bytes]) for i in range(0, len(raw), n_bytes)) == b"".join(chunks)


def test_what_a_read_has_left_is_decrypted_first():
    sender, receiver = two_ends()
    assert read(receiver, record(sender, b"abcdef"), n_bytes=2) == b"ab"
    assert receiver.decrypt(record(sender, b"gh")) == b"cdefgh"


def test_the_largest_record():
    sender, receiver = two_ends()
    data = bytes(RECORD_BYTES - 1) + b"x"
    assert receiver.decrypt(record(sender, data)) == data


def test_the_same_plaintext_is_never_the_same_record():
    """One key for each direction and connection, one nonce for each record."""
    ends = [*two_ends(), *two_ends(own=bytes(32)), *two_ends(other=bytes(32)), *two_ends(OTHER, OWN)]
    assert len({record(end, bytes(100)) for end in ends for _ in range(20)}) == 20 * len(ends)


@pytest.mark.parametrize("which", [0, 1])
def test_both_shares_count(which):
    shares = [OWN, OTHER]
    sender, _ = two_ends(*shares)
    shares[which] = bytes([shares[which][0] ^ 1]) + shares[which][1:]
    with pytest.raises(ConnectionAbortedError, match=CHANGED):
        read(two_ends(*shares)[1], record(sender, b"x" * 9))


def test_a_share_that_is_sent_back_makes_no_common_key():
    """A side that repeats the other's share still gets two keys, and cannot decrypt its own records."""
    from_dialer = AeadRecords(OWN, OWN, True)
    with pytest.raises(ConnectionAbortedError, match=CHANGED):
        read(from_dialer, record(from_dialer, b"x" * 9))


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
    "of another connection": lambda first, second, own: record(two_ends(own=bytes(32))[0], b"x" * 50),
    "not encrypted": lambda first, second, own: struct.pack("!I", 50) + bytes(50 + 16),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("by_decrypt", [False, True])
def test_what_is_not_the_next_record_ends_the_connection(attack, by_decrypt):
    sender, receiver = two_ends()
    bad = attack(record(sender, b"x" * 50), record(sender, b"y" * 50), record(receiver, b"z" * 50))
    with pytest.raises(ConnectionAbortedError, match=CHANGED):
        if by_decrypt:
            receiver.decrypt(bad)
        else:
            read(receiver, bad)
            read(receiver, bad[70:])  # the second record, where the first is a good one


@pytest.mark.parametrize("n_bytes", [0, RECORD_BYTES + 1, 0x16030301, 2**32 - 1])
def test_a_length_is_checked_before_anything_else(n_bytes):
    _, receiver = two_ends()
    came = struct.pack("!I", n_bytes) + bytes(100)
    reason = f"a record of {n_bytes} bytes, expected 1 to {RECORD_BYTES}"
    with pytest.raises(ConnectionAbortedError, match=reason):
        read(receiver, came)
    assert receiver.n_asked == 4
    with pytest.raises(ConnectionAbortedError, match=reason):
        receiver.decrypt(came)


def test_a_record_that_ends_too_soon_yields_nothing():
    sender, receiver = two_ends()
    whole = record(sender, b"x" * 50)
    for n in range(len(whole)):
        with pytest.raises(ConnectionAbortedError, match="closed by the other side"):
            read(receiver, whole[:n])
    assert [receiver.decrypt(whole[n : n + 1]) for n in range(len(whole))] == [b""] * (len(whole) - 1) + [b"x" * 50]


def test_a_key_has_its_number_of_records(monkeypatch):
    monkeypatch.setattr(aead_records, "RECORDS_MAX", 3)
    sender, receiver = two_ends()
    for _ in range(3):
        assert receiver.decrypt(record(sender, b"x")) == b"x"
    with pytest.raises(ConnectionAbortedError, match="3 records under one key"):
        record(sender, b"x")
    monkeypatch.setattr(aead_records, "RECORDS_MAX", 4)
    one_more = record(sender, b"x")
    monkeypatch.setattr(aead_records, "RECORDS_MAX", 3)
    with pytest.raises(ConnectionAbortedError, match="3 records under one key"):
        receiver.decrypt(one_more)
