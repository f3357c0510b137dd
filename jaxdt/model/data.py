"""Token files, and the batches that all peers draw from them alike.

A token file is one header and then the train tokens and the held-out tokens, little-endian unsigned numbers of 2 bytes
(vocabulary up to 65,536) or 4. It is memory-mapped, so peers on one host share its pages.

A training batch is a pure function of the file and of (seed, step, microbatch): re-routing a microbatch, resuming and
joining need no iterator state. The train tokens are cut into windows of seq_len inputs; sample number
(step * n_microbatches + microbatch) * microbatch_size + i reads one window, and each run of n_windows samples (an
epoch) reads every window once, in an order drawn from the seed and the number of the epoch. Where samples grow with the
step (jaxdt.run.seq_lengths), each length has its own windows, and with them its own epochs.
"""

import hashlib
import math
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxdt.run.errors import BadInput, shell_line, why

MAGIC = b"JAXDTTOK"
VERSION = 1
TOKENIZER_NAME_BYTES = 16
# The fields of TokenFileHeader in order, 4 bytes of padding and the CRC-32 of both: 128 bytes, so tokens are aligned.
HEADER = struct.Struct(f"<8sIIQQQ{TOKENIZER_NAME_BYTES}s32s32s4x")
CRC = struct.Struct("<I")
HEADER_BYTES = HEADER.size + CRC.size
TOKEN_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
# Four half rounds make a Feistel network look random; two more cost a microsecond.
HALF_ROUNDS = 6


class TokenFileHeader(NamedTuple):
    """The fixed part of a token file. Checksums are SHA256: of all tokens as stored, and of the source texts."""

    magic: bytes
    version: int
    token_bytes: int
    vocab_size: int
    n_train_tokens: int
    n_eval_tokens: int
    tokenizer: bytes
    payload_sha256: bytes
    source_sha256: bytes

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.token_bytes * (self.n_train_tokens + self.n_eval_tokens)


class TokenFile:
    """An open token file. Lengths and the header were checked at opening, the tokens were not: see verify_checksum."""

    def __init__(self, path: Path, header: TokenFileHeader, tokens: np.ndarray):
        self.path = path
        self.vocab_size = header.vocab_size
        self.tokenizer = header.tokenizer.rstrip(b"\0").decode("ascii")
        self.n_train_tokens = header.n_train_tokens
        self.n_eval_tokens = header.n_eval_tokens
        self.checksum = header.payload_sha256.hex()
        self.source_checksum = header.source_sha256.hex()
        self.tokens = tokens

    def n_train_windows(self, seq_len: int) -> int:
        """Samples per epoch; neighbouring windows share one token (a target of one, an input of the next)."""
        n_windows = (self.n_train_tokens - 1) // seq_len
        if n_windows < 1:
            raise BadInput(
                f"{self.path}: got {self.n_train_tokens} train tokens, expected at least seq_len + 1 = {seq_len + 1}"
            )
        return n_windows

    def train_batch(
        self, seed: int, step: int, microbatch: int, microbatch_size: int, seq_len: int, n_microbatches: int
    ) -> np.ndarray:
        """Tokens int32 [microbatch_size, seq_len + 1] of microbatch 0..n_microbatches-1 of a step: inputs are all but
        the last column, targets all but the first. Raises BadInput if the train part holds no window."""
        if not 0 <= microbatch < n_microbatches or step < 0:
            raise ValueError(f"got step {step}, microbatch {microbatch} of {n_microbatches}")
        n_windows = self.n_train_windows(seq_len)
        first = (step * n_microbatches + microbatch) * microbatch_size
        windows = [window_of(seed, first + i, n_windows) for i in range(microbatch_size)]
        return self._windows(0, windows, seq_len)

    def n_eval_batches(self, microbatch_size: int, seq_len: int) -> int:
        """Full batches of held-out windows; the rest that fills no batch is left out. Raises BadInput if none fits."""
        n_batches = (self.n_eval_tokens - 1) // seq_len // microbatch_size
        if n_batches < 1:
            raise BadInput(
                f"{self.path}: got {self.n_eval_tokens} held-out tokens, expected at least "
                f"microbatch_size * seq_len + 1 = {microbatch_size * seq_len + 1}"
            )
        return n_batches

    def eval_batch(self, index: int, microbatch_size: int, seq_len: int) -> np.ndarray:
        """Tokens int32 [microbatch_size, seq_len + 1]: consecutive held-out windows, the same for every run."""
        n_batches = self.n_eval_batches(microbatch_size, seq_len)
        if not 0 <= index < n_batches:
            raise IndexError(f"{self.path}: got evaluation batch {index}, expected 0..{n_batches - 1}")
        windows = range(index * microbatch_size, (index + 1) * microbatch_size)
        return self._windows(self.n_train_tokens, windows, seq_len)

    def _windows(self, start: int, windows: Iterable[int], seq_len: int) -> np.ndarray:
        firsts = [start + window * seq_len for window in windows]
        tokens = np.stack([self.tokens[first : first + seq_len + 1] for first in firsts])
        largest = tokens.max()
        if largest >= self.vocab_size:  # a gather on a device would take another token's row without an error
            raise BadInput(f"{self.path}: got token {largest}, expected less than the vocabulary {self.vocab_size}")
        return tokens.astype(np.int32)


def window_of(seed: int, sample: int, n_windows: int) -> int:
    """The window that a sample reads; distinct for the n_windows samples of one epoch."""
    epoch, index = divmod(sample, n_windows)
    key = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=16).digest()
    return permuted(index, n_windows, key)


def permuted(index: int, n: int, key: bytes) -> int:
    """A bijection of 0..n-1 chosen by `key`: a Feistel network on a grid of about sqrt(n) by sqrt(n) cells, applied
    again from a cell outside the range until it gives one inside (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains", methods 2 and 3). The grid holds at most sqrt(n) cells too many, so one step is nearly always
    enough."""
    width = math.isqrt(n - 1) + 1
    height = -(-n // width)
    while True:
        row, column = divmod(index, width)
        for half_round in range(0, HALF_ROUNDS, 2):
            row = (row + _keyed_hash(key, half_round, column)) % height
            column = (column + _keyed_hash(key, half_round + 1, row)) % width
        index = row * width + column
        if index < n:
            return index


def _keyed_hash(key: bytes, half_round: int, value: int) -> int:
    digest = hashlib.blake2b(struct.pack("<QQ", half_round, value), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")


def open_data(path: str | Path) -> TokenFile:
    """Memory-map a token file. Raises BadInput if it cannot be read, is no token file, is of another version, has a
    damaged header, or is shorter or longer than its header says."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            blob = file.read(HEADER_BYTES)
            size_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected a token file") from error
    header = _parse_header(path, blob)
    if size_bytes != header.file_bytes:
        raise BadInput(f"{path}: got {size_bytes} bytes, expected {header.file_bytes} as its header says")
    n_tokens = header.n_train_tokens + header.n_eval_tokens
    tokens = np.memmap(path, TOKEN_DTYPES[header.token_bytes], mode="r", offset=HEADER_BYTES, shape=(n_tokens,))
    return TokenFile(path, header, tokens)


def _parse_header(path: Path, blob: bytes) -> TokenFileHeader:
    if blob[: len(MAGIC)] != MAGIC:
        words = ("python", "scripts/prepare_data.py", f"--train={path}", f"--out={path.with_suffix('.tok')}")
        expected = f"expected a token file; to make one of a text: {shell_line(*words)}"
        raise BadInput(f"{path}: got first bytes {blob[: len(MAGIC)]!r}, {expected}")
    if len(blob) < HEADER_BYTES:
        raise BadInput(f"{path}: got {len(blob)} bytes, expected a header of {HEADER_BYTES}")
    header = TokenFileHeader(*HEADER.unpack_from(blob))
    if header.version != VERSION:
        raise BadInput(f"{path}: got token file version {header.version}, expected {VERSION}")
    (crc,) = CRC.unpack_from(blob, HEADER.size)
    if crc != zlib.crc32(blob[: HEADER.size]):
        raise BadInput(f"{path}: got header CRC {zlib.crc32(blob[: HEADER.size]):08x}, expected {crc:08x}")
    if header.token_bytes not in TOKEN_DTYPES:
        raise BadInput(f"{path}: got {header.token_bytes} bytes per token, expected 2 or 4")
    return header


def verify_checksum(file: TokenFile) -> None:
    """Read the whole file; raises BadInput if the tokens are not those that were written."""
    got = hashlib.sha256(file.tokens.data).hexdigest()
    if got != file.checksum:
        raise BadInput(f"{file.path}: tokens have SHA256 {got:.12}, expected {file.checksum:.12} as its header says")


def write_tokens(
    path: str | Path,
    tokenizer: str,
    vocab_size: int,
    train: np.ndarray,
    held_out: np.ndarray,
    source_checksum: str = "00" * 32,
) -> TokenFile:
    """Write token numbers [n_train], [n_eval] as a token file and open it: see write_pieces."""
    return write_pieces(path, tokenizer, vocab_size, [train], [held_out], source_checksum)


def write_pieces(
    path: str | Path,
    tokenizer: str,
    vocab_size: int,
    train: Iterable[np.ndarray],
    held_out: Iterable[np.ndarray],
    source_checksum: str,
) -> TokenFile:
    """Write the token numbers of both parts, which come in pieces [n], as a token file and open it. The file appears
    whole or not at all. Raises BadInput if there is no train token to predict, a token is outside the vocabulary or the
    disk refuses."""
    path = Path(path)
    if len(tokenizer) > TOKENIZER_NAME_BYTES:
        raise ValueError(f"got tokenizer name {tokenizer!r}, expected at most {TOKENIZER_NAME_BYTES} characters")
    # No reader finds half a file, even after a crash. Peers of one host that prepare the same file at once replace it
    # by an equal one.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                writer = _PieceWriter(path, file, vocab_size)
                n_train, n_eval = writer.add("train", train), writer.add("held-out", held_out)
                if n_train < 2:
                    raise BadInput(f"{path}: got {n_train} train tokens, expected at least 2")
                header = TokenFileHeader(
                    magic=MAGIC,
                    version=VERSION,
                    token_bytes=writer.dtype.itemsize,
                    vocab_size=vocab_size,
                    n_train_tokens=n_train,
                    n_eval_tokens=n_eval,
                    tokenizer=tokenizer.encode("ascii"),
                    payload_sha256=writer.sha256.digest(),
                    source_sha256=bytes.fromhex(source_checksum),
                )
                writer.end(HEADER.pack(*header))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({why(error)})") from error
    return open_data(path)


class _PieceWriter:
    """Writes the tokens behind the place of the header, which counts them and is written last. `sha256`: of all tokens
    as stored."""

    def __init__(self, path: Path, file: BinaryIO, vocab_size: int):
        self.dtype = TOKEN_DTYPES[2 if vocab_size <= 1 << 16 else 4]
        self.sha256 = hashlib.sha256()
        self._path, self._file, self._vocab_size = path, file, vocab_size
        file.seek(HEADER_BYTES)

    def add(self, part: str, pieces: Iterable[np.ndarray]) -> int:
        """Write the tokens of a part; how many there are."""
        n_tokens = 0
        for tokens in pieces:
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
                got, most = f"{part} tokens {tokens.min()}..{tokens.max()}", self._vocab_size - 1
                raise BadInput(f"{self._path}: got {got}, expected 0..{most} (vocabulary)")
            stored = tokens.astype(self.dtype)
            self.sha256.update(stored.data)
            self._file.write(stored.data)
            n_tokens += len(tokens)
        return n_tokens

    def end(self, header: bytes) -> None:
        """Write the header; the file is durable on return."""
        self._file.seek(0)
        self._file.write(header + CRC.pack(zlib.crc32(header)))
        self._file.flush()
        os.fsync(self._file.fileno())
