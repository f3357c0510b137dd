"""Records of AES-256-GCM over whole pieces of a chunk, on a connection whose keys came inside mutual TLS 1.3.

An experiment: TLS records are 16 KB, each with a call, a lock and a copy of its own; these are up to 256 KB, and go
through the newer OpenSSL that `cryptography` brings. A record is its length (4 bytes, authenticated), ciphertext, tag;
its nonce is its number within its direction, under a key that serves one direction of one connection.
"""

import secrets
import struct
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

RECORD_BYTES = 1 << 18
KEY_BYTES = 32
TAG_BYTES = 16
_LENGTH = struct.Struct("!I")
_NONCE = struct.Struct("!IQ")


class Sealed:
    """Both directions of one connection; used by its owner only. `dialled`: the side that made the keys."""

    def __init__(self, keys: bytes, dialled: bool):
        first, second = AESGCM(keys[:KEY_BYTES]), AESGCM(keys[KEY_BYTES:])
        self._out, self._in = (first, second) if dialled else (second, first)
        self._n_out = self._n_in = 0
        self._cipher = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
        self._came = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
        self._plain = memoryview(bytearray(RECORD_BYTES))
        self._rest = self._plain[:0]
        self._partial = bytearray()

    def seal(self, data) -> list:
        """One record of at most RECORD_BYTES; its buffer serves the next one too."""
        length = _LENGTH.pack(len(data))
        cipher = self._cipher[: len(data) + TAG_BYTES]
        self._out.encrypt_into(_NONCE.pack(0, self._n_out), data, length, cipher)
        self._n_out += 1
        return [memoryview(length), cipher]

    def read(self, fill: Callable[[memoryview, bool], None], buffer: memoryview) -> int:
        """Some of what comes, at least a byte; `fill(buffer, begun)` reads ciphertext until the buffer is full."""
        if not self._rest:
            length = bytearray(_LENGTH.size)
            fill(memoryview(length), False)
            n_bytes = _checked(length)
            came = self._came[: n_bytes + TAG_BYTES]
            fill(came, True)
            if n_bytes <= len(buffer):
                self._open(came, length, buffer[:n_bytes])
                return n_bytes
            self._rest = self._plain[:n_bytes]
            self._open(came, length, self._rest)
        n = min(len(buffer), len(self._rest))
        buffer[:n] = self._rest[:n]
        self._rest = self._rest[n:]
        return n

    def take(self, data: bytes) -> bytes:
        """What whole records say, of ciphertext that comes in pieces of any size."""
        self._partial += data
        plain = bytes(self._rest)
        self._rest = self._plain[:0]
        while len(self._partial) >= _LENGTH.size:
            length = bytes(self._partial[: _LENGTH.size])
            end = _LENGTH.size + _checked(length) + TAG_BYTES
            if len(self._partial) < end:
                break
            out = bytearray(end - _LENGTH.size - TAG_BYTES)
            self._open(bytes(self._partial[_LENGTH.size : end]), length, out)
            del self._partial[:end]
            plain += out
        return plain

    def _open(self, cipher, length, out) -> None:
        try:
            self._in.decrypt_into(_NONCE.pack(0, self._n_in), cipher, bytes(length), out)
        except InvalidTag:
            raise ConnectionAbortedError("a record that was changed on its way") from None
        self._n_in += 1


def new_keys() -> bytes:
    return secrets.token_bytes(2 * KEY_BYTES)


def _checked(length: bytes) -> int:
    (n_bytes,) = _LENGTH.unpack(length)
    if not 0 < n_bytes <= RECORD_BYTES:
        raise ConnectionAbortedError(f"a record of {n_bytes} bytes, expected at most {RECORD_BYTES}")
    return n_bytes
