"""Makes a token file from the documents of files; the committed corpus is the default text.

A part of a token file is its documents one after another, with the tokenizer's end of text between two of them.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdt.model import documents
from jaxdt.model.data import TokenFile, Tokens, open_data, verify_checksum, write_pieces
from jaxdt.model.documents import Rule
from jaxdt.model.tokenizer import BYTES, Tokenizer, load_tokenizer
from jaxdt.run.cpus import usable_cores
from jaxdt.run.errors import BadInput, why

PIECE_BYTES = 1 << 18  # the expression that splits GPT-2's text takes no run of 1,000,000 spaces
BATCH_BYTES = 1 << 20  # a thread encodes as much at a time
CORPUS = Path(__file__).resolve().parents[2] / "configs" / "corpus"
TRAIN_TEXTS = (CORPUS / "train.txt.xz",)
EVAL_TEXTS = (CORPUS / "heldout.txt.xz",)
FILE = Rule()


class Piece(NamedTuple):
    """Some text of a document, whose tokens do not depend on what is around it. `place`: where it is in its file;
    `ends`: it ends the document."""

    text: bytes
    place: str
    ends: bool


def prepare(
    train_paths: Sequence[str | Path],
    eval_paths: Sequence[str | Path],
    tokenizer: str | Tokenizer,
    out: str | Path,
    replaces: bool = False,
    rule: Rule = FILE,
) -> TokenFile:
    """The token file `out` of the documents of these files, each read in pieces, twice: nothing is encoded before all
    of it is known to be text that can be. An undamaged file made before from the same documents with the same tokenizer
    is reused; one of others is replaced only with `replaces`, since a run that was trained on it could not go on. A
    file of another kind, or a damaged one, is refused. Raises BadInput."""
    encoder = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    sources = source_checksum(encoder, rule, train_paths, eval_paths)
    if Path(out).exists():
        file = open_data(out)
        if (file.tokenizer, file.source_checksum) == (encoder.name, sources):
            verify_checksum(file)
            return file
        if not replaces:
            raise BadInput(f"{out}: holds tokens of other texts, expected a new file; or delete it, if no run needs it")
    return write_pieces(
        out,
        tokenizer=encoder.name,
        vocab_size=encoder.vocab_size,
        train=_encoded(encoder, train_paths, rule),
        held_out=_encoded(encoder, eval_paths, rule),
        source_checksum=sources,
        end_of_text=encoder.end_of_text,
        tokenizer_json=encoder.content,
    )


def pieces(tokenizer: Tokenizer, path: str | Path, rule: Rule = FILE) -> Iterator[Piece]:
    """The documents of a file in pieces of at most twice PIECE_BYTES. Their tokens one after another are those of the
    documents."""
    text, start = b"", 0
    for span in documents.spans(path, rule, PIECE_BYTES):
        if not text:
            start = span.start
        text += span.text
        is_text = tokenizer.name != BYTES or tokenizer.end_of_text is not None
        if is_text and b"\0" in span.text:
            number = span.start + span.text.index(b"\0")
            raise BadInput(f"{path}: {place(span.place, number)} is zero, expected text; other bytes take "
                           f"--tokenizer={BYTES} --end_of_text=none")  # fmt: skip
        if not span.ends and len(text) < PIECE_BYTES:
            continue
        end = start + len(text)
        try:
            size = tokenizer.cut(text, span.ends)
        except UnicodeDecodeError as error:
            where = place(span.place, start + error.start)
            raise BadInput(f"{path}: {where} is not UTF-8, expected UTF-8 for {tokenizer.name}") from error
        if not size:
            where = f"{place(span.place, start, end)} are all of one word, number or white space"
            raise BadInput(f"{path}: {where}, expected less than {PIECE_BYTES} bytes for {tokenizer.name}")
        yield Piece(text[:size], place(span.place, start, start + size), span.ends)
        start, text = start + size, text[size:]


def place(document: str, start: int, end: int | None = None) -> str:
    """Where a byte or bytes are in a file."""
    found = f"byte {start}" if end is None else f"bytes {start} to {end}"
    return f"{document}: {found}" if document else found


def source_checksum(
    tokenizer: Tokenizer, rule: Rule, train: Sequence[str | Path], held_out: Sequence[str | Path]
) -> str:
    """SHA256 over the part and the SHA256 of the text of each file in order, and over how it makes documents and what
    stands between them where there are several. A file counts the same compressed or plain. The files are read whole;
    BadInput if this tokenizer cannot encode one."""
    lines = []
    for part, paths in (("train", train), ("held-out", held_out)):
        n_in_part = 0
        for path in paths:
            text, lengths, n_bytes, n_documents = hashlib.sha256(), hashlib.sha256(), 0, 0
            for piece in pieces(tokenizer, path, rule):
                text.update(piece.text)
                n_bytes += len(piece.text)
                if piece.ends:
                    lengths.update(b"%d " % n_bytes)
                    n_bytes, n_documents = 0, n_documents + 1
            lines.append(f"{part} {text.hexdigest()}\n")
            lines += [f"documents {lengths.hexdigest()}\n"] if n_documents > 1 else []
            n_in_part += n_documents
        lines += [f"end of text {tokenizer.end_of_text}\n"] if n_in_part > 1 else []
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _encoded(tokenizer: Tokenizer, paths: Sequence[str | Path], rule: Rule) -> Iterator[Tokens]:
    """The tokens of a part, encoded on all cores."""
    n_threads = max(1, round(usable_cores()))
    pending: deque[Future[Tokens]] = deque()
    with ThreadPoolExecutor(n_threads) as pool:
        for batch in _batches(tokenizer, paths, rule):
            pending.append(pool.submit(_encode, tokenizer, batch))
            if len(pending) > 2 * n_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class Numbered(NamedTuple):
    """A piece, with its file and the number of its document in the part. `begins`: the document begins with it."""

    piece: Piece
    path: str | Path
    document: int
    begins: bool


def _batches(tokenizer: Tokenizer, paths: Sequence[str | Path], rule: Rule) -> Iterator[list[Numbered]]:
    batch: list[Numbered] = []
    n_bytes, document, begins = 0, 0, True
    for path in paths:
        for piece in pieces(tokenizer, path, rule):
            batch.append(Numbered(piece, path, document, begins))
            document, begins = document + piece.ends, piece.ends
            n_bytes += len(piece.text)
            if n_bytes >= BATCH_BYTES:
                yield batch
                batch, n_bytes = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, batch: list[Numbered]) -> Tokens:
    """The tokens of these pieces, with the end of text before each document but the part's first one."""
    between = [] if tokenizer.end_of_text is None else [np.array([tokenizer.end_of_text])]
    arrays: list[np.ndarray] = []
    starts: list[int] = []
    n_tokens = 0
    for piece, path, document, begins in batch:
        if begins:
            arrays += between if document else []
            n_tokens += len(between) if document else 0
            starts.append(n_tokens)
        try:
            arrays.append(tokenizer.encode(piece.text))
        except ValueError as error:
            raise BadInput(f"{path}: {piece.place} cannot be encoded by {tokenizer.name} ({why(error)})") from error
        n_tokens += len(arrays[-1])
    return Tokens(np.concatenate(arrays), np.array(starts, np.int64))
