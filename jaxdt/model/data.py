"""Token files, and the batches that all peers draw from them alike.

A token file is one header and then the train tokens and the held-out tokens, little-endian unsigned numbers of 2 bytes
(vocabulary up to 65,536) or 4. It is memory-mapped, so peers on one host share its pages. Behind them stand sections:
where documents begin, which tokens count as targets if not all do, and a copy of the tokenizer if that is a file; and
last the contents, an object of JSON with the place and SHA256 of each section by its name. Files of version 1 have no
sections.

A training batch is a pure function of the file and of (seed, step, microbatch): re-routing a microbatch, resuming and
joining need no iterator state. The train tokens are cut into windows of seq_len inputs; sample number
(step * n_microbatches + microbatch) * microbatch_size + i reads one window, and each run of n_windows samples (an
epoch) reads every window once, in an order drawn from the seed and the number of the epoch. Where samples grow with the
step (jaxdt.run.seq_lengths), each length has its own windows, and with them its own epochs.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxdt.run.errors import BadInput, shell_line, why
from jaxdt.run.serialize import parse_json

MAGIC = b"JAXDTTOK"
VERSION = 2
TOKENIZER_NAME_BYTES = 16
# The fields of TokenFileHeader in order, by version, 4 bytes of padding and the CRC-32 of both: 128 and 192 bytes, so
# tokens are aligned.
FIELDS = f"<8sIIQQQ{TOKENIZER_NAME_BYTES}s32s32s"
HEADERS = {1: struct.Struct(f"{FIELDS}4x"), VERSION: struct.Struct(f"{FIELDS}QQ32s20x")}
CRC = struct.Struct("<I")
HEADER_BYTES = HEADERS[VERSION].size + CRC.size
SECTION_ALIGNMENT_BYTES = 64
# Sections. DOCUMENTS: uint64 starts of train and held-out ones. COUNTED: a bit a token of train and held-out ones, the
# first in the lowest bit of a byte; 1 if the token counts as a target. TOKENIZER: a tokenizer.json.
DOCUMENTS, COUNTED, TOKENIZER = "documents", "counted", "tokenizer"
TOKEN_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
DOCUMENT_DTYPE = np.dtype("<u8")
# Four half rounds make a Feistel network look random; two more cost a microsecond.
HALF_ROUNDS = 6


class TokenFileHeader(NamedTuple):
    """The fixed part of a token file. Checksums are SHA256: of all tokens as stored, of the source texts, and of the
    contents, which end the file."""

    magic: bytes
    version: int
    token_bytes: int
    vocab_size: int
    n_train_tokens: int
    n_eval_tokens: int
    tokenizer: bytes
    payload_sha256: bytes
    source_sha256: bytes
    contents_start: int = 0
    contents_bytes: int = 0
    contents_sha256: bytes = b""

    @property
    def header_bytes(self) -> int:
        return HEADERS[self.version].size + CRC.size

    @property
    def tokens_end(self) -> int:
        return self.header_bytes + self.token_bytes * (self.n_train_tokens + self.n_eval_tokens)

    @property
    def file_bytes(self) -> int:
        return self.contents_start + self.contents_bytes if self.contents_bytes else self.tokens_end


class Section(NamedTuple):
    """Where a section is in its file."""

    start: int
    n_bytes: int
    sha256: str


class Tokens(NamedTuple):
    """Some token numbers of a part [n]. `starts`: where among them documents begin. `counted`: which of them count as
    targets, bool [n]; None for all."""

    numbers: np.ndarray
    starts: np.ndarray
    counted: np.ndarray | None = None


class TokenFile:
    """An open token file. Lengths, the header and the contents were checked at opening, tokens and sections were not:
    see verify_checksum. `end_of_text`: the token between documents; None where there is none. `files`: those of a
    mixture (jaxdt.model.mixture)."""

    files: Sequence["TokenFile"] = ()

    def __init__(self, path: Path, header: TokenFileHeader, tokens: np.ndarray, contents: dict[str, Any]):
        self.path = path
        self.vocab_size = header.vocab_size
        self.tokenizer = header.tokenizer.rstrip(b"\0").decode("ascii")
        self.n_train_tokens = header.n_train_tokens
        self.n_eval_tokens = header.n_eval_tokens
        self.checksum = header.payload_sha256.hex()
        self.source_checksum = header.source_sha256.hex()
        self.tokens = tokens
        self.end_of_text: int | None = contents["end_of_text"]
        self.n_train_documents: int = contents["n_train_documents"]
        self.sections: dict[str, Section] = contents["sections"]

    def section(self, name: str) -> bytes:
        """The bytes of a section, b'' where there is none. BadInput if they are not those that were written."""
        if name not in self.sections:
            return b""
        found = self.sections[name]
        try:
            with self.path.open("rb") as file:
                file.seek(found.start)
                content = file.read(found.n_bytes)
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be read ({why(error)}), expected a token file") from error
        self._check_section(name, content)
        return content

    def _mapped(self, name: str, dtype: np.dtype) -> np.ndarray:
        """A section as numbers, whose memory the peers of a host share; empty where there is none. BadInput if they are
        not those that were written."""
        if name not in self.sections:
            return np.zeros(0, dtype)
        found = self.sections[name]
        n_numbers = found.n_bytes // dtype.itemsize
        numbers = np.memmap(self.path, dtype, mode="r", offset=found.start, shape=(n_numbers,))
        self._check_section(name, numbers.data)
        return numbers

    def _check_section(self, name: str, content: Any) -> None:
        got, expected = hashlib.sha256(content).hexdigest(), self.sections[name].sha256
        if got != expected:
            raise BadInput(f"{self.path}: section {name} has SHA256 {got:.12}, expected {expected:.12}")

    @functools.cached_property
    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the documents of either part begin among its tokens, uint64 [n_documents]. A file of version 1 does not
        say so."""
        starts = self._mapped(DOCUMENTS, DOCUMENT_DTYPE)
        return starts[: self.n_train_documents], starts[self.n_train_documents :]

    @functools.cached_property
    def counted(self) -> np.ndarray | None:
        """Which tokens count as targets: uint8 [ceil(n_tokens / 8)], where token i, of train and then held-out ones, is
        bit i % 8 of number i // 8. None if all of them count."""
        if COUNTED not in self.sections:
            return None
        bits, expected = self._mapped(COUNTED, np.dtype(np.uint8)), -(-len(self.tokens) // 8)
        if len(bits) != expected:
            raise BadInput(f"{self.path}: section {COUNTED} has {len(bits)} bytes, expected {expected}, a bit a token")
        return bits

    @property
    def n_documents(self) -> int:
        """Those of both parts together."""
        return self.sections[DOCUMENTS].n_bytes // DOCUMENT_DTYPE.itemsize if DOCUMENTS in self.sections else 0

    @property
    def counts_all(self) -> bool:
        """Whether every token counts as a target."""
        return COUNTED not in self.sections

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
        places = self.train_places(seed, step, microbatch, microbatch_size, seq_len, n_microbatches)
        return self._samples(places, seq_len)

    def train_places(
        self, seed: int, step: int, microbatch: int, microbatch_size: int, seq_len: int, n_microbatches: int
    ) -> list[int]:
        """The number of the first token of each sample of that batch."""
        if not 0 <= microbatch < n_microbatches or step < 0:
            raise ValueError(f"got step {step}, microbatch {microbatch} of {n_microbatches}")
        n_windows = self.n_train_windows(seq_len)
        first = (step * n_microbatches + microbatch) * microbatch_size
        return [window_of(seed, first + i, n_windows) * seq_len for i in range(microbatch_size)]

    def n_eval_batches(self, microbatch_size: int, seq_len: int) -> int:
        """Full batches of held-out windows; the rest that fills no batch is left out. Raises BadInput if none fits."""
        n_batches = (self.n_eval_tokens - 1) // seq_len // microbatch_size
        if n_batches < 1:
            raise BadInput(
                f"{self.path}: got {self.n_eval_tokens} held-out tokens, expected at least "
                f"microbatch_size * seq_len + 1 = {microbatch_size * seq_len + 1}"
            )
        return n_batches

    def held_out_source(self, index: int) -> int:
        """Which of the `files` of a mixture gives a held-out batch."""
        return 0

    def by_source(self, losses: Iterable[tuple[int, float]], n_batches: int) -> dict[str, float]:
        """The held-out loss of each source of a mixture, from the number and loss of each microbatch; after `n_batches`
        they come again. No mixture has none."""
        return {}

    def eval_batch(self, index: int, microbatch_size: int, seq_len: int) -> np.ndarray:
        """Tokens int32 [microbatch_size, seq_len + 1]: consecutive held-out windows, the same for every run."""
        return self._samples(self.eval_places(index, microbatch_size, seq_len), seq_len)

    def eval_places(self, index: int, microbatch_size: int, seq_len: int) -> list[int]:
        """The number of the first token of each sample of that batch, counted from the first train token on."""
        n_batches = self.n_eval_batches(microbatch_size, seq_len)
        if not 0 <= index < n_batches:
            raise IndexError(f"{self.path}: got evaluation batch {index}, expected 0..{n_batches - 1}")
        windows = range(index * microbatch_size, (index + 1) * microbatch_size)
        return [self.n_train_tokens + window * seq_len for window in windows]

    def begins(self, place: int, seq_len: int) -> np.ndarray:
        """int32 [seq_len]: of each token from `place` on, how far behind `place` its document begins; 0 for a document
        that began before."""
        begins = np.zeros(seq_len, np.int32)
        found = self._document_starts(place, seq_len)
        begins[found] = found
        return np.maximum.accumulate(begins)

    def counted_targets(self, place: int, seq_len: int, *, within_documents: bool) -> np.ndarray:
        """bool [seq_len]: of each token from place + 1 on, whether it counts as a target; with `within_documents` none
        does that begins a document."""
        first = place + 1
        counted = np.ones(seq_len, bool)
        if self.counted is not None:
            bits = np.unpackbits(self.counted[first // 8 : -(-(first + seq_len) // 8)], bitorder="little")
            counted &= bits[first % 8 :][:seq_len].astype(bool)
        if within_documents:
            counted[self._document_starts(first, seq_len)] = False
        return counted

    def _document_starts(self, place: int, n_tokens: int) -> np.ndarray:
        """Which of the tokens from `place` on begin a document, counted from there."""
        train, held_out = self.documents
        starts, start = (train, place) if place < self.n_train_tokens else (held_out, place - self.n_train_tokens)
        lo, hi = np.searchsorted(starts, np.array([start, start + n_tokens], DOCUMENT_DTYPE))
        return starts[lo:hi].astype(np.int64) - start

    def _samples(self, places: Iterable[int], seq_len: int) -> np.ndarray:
        tokens = np.stack([self.tokens[first : first + seq_len + 1] for first in places])
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
            header = _parse_header(path, file.read(HEADER_BYTES))
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != header.file_bytes:
                raise BadInput(f"{path}: got {size_bytes} bytes, expected {header.file_bytes} as its header says")
            file.seek(header.contents_start)
            contents = _parse_contents(path, header, file.read(header.contents_bytes))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected a token file") from error
    n_tokens = header.n_train_tokens + header.n_eval_tokens
    dtype = TOKEN_DTYPES[header.token_bytes]
    tokens = np.memmap(path, dtype, mode="r", offset=header.header_bytes, shape=(n_tokens,))
    return TokenFile(path, header, tokens, contents)


def _parse_contents(path: Path, header: TokenFileHeader, blob: bytes) -> dict[str, Any]:
    """`end_of_text`, `n_train_documents` and `sections`, by name."""
    if header.version == 1:
        return {"end_of_text": None, "n_train_documents": 0, "sections": {}}
    if hashlib.sha256(blob).digest() != header.contents_sha256:
        raise BadInput(f"{path}: its contents are damaged, expected those that its header names; prepare it again")
    try:
        found = parse_json(blob)
        sections = {name: Section(*place) for name, place in found["sections"].items()}
        n_train = found["n_train_documents"]
        numbers = [n_train, *(number for place in sections.values() for number in place[:2])]
        if not all(isinstance(number, int) and 0 <= number <= header.contents_start for number in numbers):
            raise ValueError("a place or number is not of this file")
        if any(place.start + place.n_bytes > header.contents_start for place in sections.values()):
            raise ValueError("a section reaches beyond its end")
        return {"end_of_text": found["end_of_text"], "n_train_documents": n_train, "sections": sections}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: its contents are of another format ({why(error)}), prepare it again") from None


def _parse_header(path: Path, blob: bytes) -> TokenFileHeader:
    if blob[: len(MAGIC)] != MAGIC:
        words = ("python", "scripts/prepare_data.py", f"--train={path}", f"--out={path.with_suffix('.tok')}")
        expected = f"expected a token file; to make one of a text: {shell_line(*words)}"
        raise BadInput(f"{path}: got first bytes {blob[: len(MAGIC)]!r}, {expected}")
    version = int.from_bytes(blob[len(MAGIC) : len(MAGIC) + 4], "little")
    if version not in HEADERS and len(blob) >= HEADER_BYTES:
        raise BadInput(f"{path}: got token file version {version}, expected one up to {VERSION}")
    fields = HEADERS.get(version, HEADERS[VERSION])
    if len(blob) < fields.size + CRC.size:
        raise BadInput(f"{path}: got {len(blob)} bytes, expected a header of {fields.size + CRC.size}")
    header = TokenFileHeader(*fields.unpack_from(blob))
    (crc,) = CRC.unpack_from(blob, fields.size)
    if crc != zlib.crc32(blob[: fields.size]):
        raise BadInput(f"{path}: got header CRC {zlib.crc32(blob[: fields.size]):08x}, expected {crc:08x}")
    if header.token_bytes not in TOKEN_DTYPES:
        raise BadInput(f"{path}: got {header.token_bytes} bytes per token, expected 2 or 4")
    return header


def verify_checksum(file: TokenFile) -> None:
    """Read the whole file; raises BadInput if tokens or sections are not those that were written."""
    for of_mixture in file.files:
        verify_checksum(of_mixture)
    if file.files:
        return
    got = hashlib.sha256(file.tokens.data).hexdigest()
    if got != file.checksum:
        raise BadInput(f"{file.path}: tokens have SHA256 {got:.12}, expected {file.checksum:.12} as its header says")
    for name in file.sections:
        file.section(name)


def write_tokens(
    path: str | Path,
    tokenizer: str,
    vocab_size: int,
    train: np.ndarray,
    held_out: np.ndarray,
    source_checksum: str = "00" * 32,
) -> TokenFile:
    """Write token numbers [n_train], [n_eval], each of one document, as a token file and open it: see write_pieces."""
    first = np.zeros(1, np.int64)
    parts = [[Tokens(numbers, first[: len(numbers)])] for numbers in (train, held_out)]
    return write_pieces(path, tokenizer, vocab_size, parts[0], parts[1], source_checksum)


def write_pieces(
    path: str | Path,
    tokenizer: str,
    vocab_size: int,
    train: Iterable[Tokens],
    held_out: Iterable[Tokens],
    source_checksum: str,
    *,
    end_of_text: int | None = None,
    tokenizer_json: bytes = b"",
) -> TokenFile:
    """Write the tokens of both parts, which come in pieces, as a token file and open it. The file appears whole or not
    at all. `end_of_text`: what the pieces have between documents; `tokenizer_json`: the tokenizer, if it is a file.
    Raises BadInput if there is no train token to predict, a token is outside the vocabulary or the disk refuses."""
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
                contents = writer.sections(end_of_text, tokenizer_json)
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
                    contents_start=file.tell(),
                    contents_bytes=len(contents),
                    contents_sha256=hashlib.sha256(contents).digest(),
                )
                file.write(contents)
                writer.end(HEADERS[VERSION].pack(*header))
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
        self._starts: dict[str, list[np.ndarray]] = {}
        self._counted = _Bits()
        file.seek(HEADER_BYTES)

    def add(self, part: str, pieces: Iterable[Tokens]) -> int:
        """Write the tokens of a part; how many there are."""
        n_tokens = 0
        found: list[np.ndarray] = []
        self._starts[part] = found
        for tokens, starts, counted in pieces:
            found.append((starts + n_tokens).astype(DOCUMENT_DTYPE))
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
                got, most = f"{part} tokens {tokens.min()}..{tokens.max()}", self._vocab_size - 1
                raise BadInput(f"{self._path}: got {got}, expected 0..{most} (vocabulary)")
            stored = tokens.astype(self.dtype)
            self.sha256.update(stored.data)
            self._file.write(stored.data)
            self._counted.add(counted, len(tokens))
            n_tokens += len(tokens)
        return n_tokens

    def sections(self, end_of_text: int | None, tokenizer_json: bytes) -> bytes:
        """Write the sections behind the tokens. Returns the contents."""
        n_train_documents = sum(map(len, self._starts["train"]))
        # Where documents begin stays in as many arrays as pieces: together and as bytes they would be twice in memory.
        documents = [starts.data for starts in itertools.chain.from_iterable(self._starts.values())]
        found = {DOCUMENTS: documents, COUNTED: self._counted.packed(), TOKENIZER: [tokenizer_json]}
        sections = {name: self._section(parts) for name, parts in found.items() if any(map(len, parts))}
        contents = {"end_of_text": end_of_text, "n_train_documents": n_train_documents, "sections": sections}
        return json.dumps(contents).encode()

    def _section(self, parts: Iterable[bytes | memoryview]) -> Section:
        self._file.write(b"\0" * (-self._file.tell() % SECTION_ALIGNMENT_BYTES))
        start, sha256 = self._file.tell(), hashlib.sha256()
        for part in parts:
            sha256.update(part)
            self._file.write(part)
        return Section(start, self._file.tell() - start, sha256.hexdigest())

    def end(self, header: bytes) -> None:
        """Write the header; the file is durable on return."""
        self._file.seek(0)
        self._file.write(header + CRC.pack(zlib.crc32(header)))
        self._file.flush()
        os.fsync(self._file.fileno())


class _Bits:
    """Bits that come in pieces. They take no memory as long as all of them are 1."""

    def __init__(self) -> None:
        self._n_ones = 0  # before the others
        self._packed: list[bytes] = []
        self._rest = np.zeros(0, bool)  # fills no byte yet

    def add(self, bits: np.ndarray | None, n: int) -> None:
        """`bits`: bool [n]; None for n ones."""
        is_first = not self._packed and not len(self._rest)
        if is_first and (bits is None or bits.all()):
            self._n_ones += n
            return
        if is_first:
            self._packed, self._rest = [b"\xff" * (self._n_ones // 8)], np.ones(self._n_ones % 8, bool)
        self._rest = np.concatenate([self._rest, np.ones(n, bool) if bits is None else bits])
        whole = len(self._rest) // 8 * 8
        self._packed.append(np.packbits(self._rest[:whole], bitorder="little").tobytes())
        self._rest = self._rest[whole:]

    def packed(self) -> list[bytes]:
        """All of them in parts, 8 a byte, the first in its lowest bit; nothing if all are 1."""
        return [*self._packed, np.packbits(self._rest, bitorder="little").tobytes()]
