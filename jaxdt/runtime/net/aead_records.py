"""What a connection says after its TLS handshake: records of AES-256-GCM under keys of its own, both directions.

TLS 1.3 proves to each side that the other holds the run's credential, and carries 32 random bytes from each: the keys
come from both, so that neither side can bring back an old key, and they are as secret, and as forward secret, as what
TLS carries. After that nothing more is said in TLS. A record is

    length (4 bytes, of the plaintext, authenticated)   ciphertext   tag (16 bytes)

Its nonce is its number within its direction; a key serves one direction of one connection and RECORDS_MAX records. So
each record opens at its own place only: one that was changed, left out, repeated, moved, sent back or taken from
another connection ends the connection, with nothing of it left in memory. A connection that is cut short between two
records looks like one that broke: what was not acknowledged goes over the next one, under new keys.

The reason is time: TLS records are 16 KB, each with calls and a copy of its own, these are up to 256 KB. Averaging 25M
numbers among 4 peers of one host took 0.438 s with TLS records and takes 0.239 s with these.
"""

import struct
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SHARE_BYTES = 32
RECORD_BYTES = 1 << 18
# 2^40 bytes are 2^36 blocks: with so many under one key AES-GCM is told from noise with a chance of 2^-57.
RECORDS_MAX = 1 << 22
_KEY_BYTES = 32
_TAG_BYTES = 16
_LENGTH = struct.Struct("!I")
_NONCE = struct.Struct("!IQ")
_PURPOSE = b"jaxdt 2: key from the dialling side, key from the accepting side"


class AeadRecords:
    """Both directions of one connection, used by its owner only. What is wrong raises ConnectionAbortedError: the
    connection must end then."""

    def __init__(self, mine: bytes, theirs: bytes, dialled: bool):
        shares = mine + theirs if dialled else theirs + mine
        keys = HKDF(SHA256(), 2 * _KEY_BYTES, salt=None, info=_PURPOSE).derive(shares)
        first, second = AESGCM(keys[:_KEY_BYTES]), AESGCM(keys[_KEY_BYTES:])
        self._out, self._in = (first, second) if dialled else (second, first)
        self._n_out = self._n_in = 0
        self._cipher = memoryview(bytearray(RECORD_BYTES + _TAG_BYTES))
        self._came = memoryview(bytearray(RECORD_BYTES + _TAG_BYTES))
        self._plain = memoryview(bytearray(RECORD_BYTES))
        self._rest = self._plain[:0]
        self._partial = bytearray()

    def seal(self, data) -> list:
        """The next record, of 1 to RECORD_BYTES, as two pieces; the second one's memory serves the next record too."""
        nonce, length = _nonce(self._n_out), _LENGTH.pack(len(data))
        self._n_out += 1
        cipher = self._cipher[: len(data) + _TAG_BYTES]
        self._out.encrypt_into(nonce, data, length, cipher)
        return [length, cipher]

    def read(self, fill: Callable[[memoryview, bool], None], buffer: memoryview) -> int:
        """Some of what comes, at least a byte; `fill(buffer, begun)` reads until its buffer is full, `begun`: a record
        has begun."""
        if not self._rest:
            length = memoryview(bytearray(_LENGTH.size))
            fill(length, False)
            n_bytes = _checked(length)
            came = self._came[: n_bytes + _TAG_BYTES]
            fill(came, True)
            if n_bytes <= len(buffer):
                self._open(length, came, buffer[:n_bytes])
                return n_bytes
            self._open(length, came, self._plain[:n_bytes])
            self._rest = self._plain[:n_bytes]
        n = min(len(buffer), len(self._rest))
        buffer[:n] = self._rest[:n]
        self._rest = self._rest[n:]
        return n

    def take(self, data: bytes) -> bytes:
        """What the whole records say among all that came so far, in pieces of any size."""
        self._partial += data
        plain = bytearray(self._rest)
        self._rest = self._plain[:0]
        while len(self._partial) >= _LENGTH.size:
            length = bytes(self._partial[: _LENGTH.size])
            n_bytes = _checked(length)
            end = _LENGTH.size + n_bytes + _TAG_BYTES
            if len(self._partial) < end:
                break
            self._open(length, bytes(self._partial[_LENGTH.size : end]), self._plain[:n_bytes])
            plain += self._plain[:n_bytes]
            del self._partial[:end]
        return bytes(plain)

    def _open(self, length, cipher, out: memoryview) -> None:
        """The next record into `out`."""
        try:
            self._in.decrypt_into(_nonce(self._n_in), cipher, bytes(length), out)
        except InvalidTag:
            out[:] = bytes(len(out))  # decrypted before the tag was compared
            raise ConnectionAbortedError("a record that was changed on its way, or is not the next one") from None
        self._n_in += 1


def _nonce(number: int) -> bytes:
    if number >= RECORDS_MAX:
        raise ConnectionAbortedError(f"{RECORDS_MAX} records under one key: time for a new one")
    return _NONCE.pack(0, number)


def _checked(length) -> int:
    (n_bytes,) = _LENGTH.unpack(length)
    if not 0 < n_bytes <= RECORD_BYTES:
        raise ConnectionAbortedError(f"a record of {n_bytes} bytes, expected 1 to {RECORD_BYTES}")
    return n_bytes
