"""Makes a token file from the documents of files; the committed corpus is the default text.

A part of a token file is its documents one after another, with the tokenizer's end of text between two of them. Chats
have it behind each conversation.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdt.model import documents
from jaxdt.model.chat import Chats, Conversation
from jaxdt.model.data import TokenFile, Tokens, open_data, verify_checksum, write_pieces
from jaxdt.model.documents import Block, Rule
from jaxdt.model.tokenizer import BYTES, Tokenizer, load_tokenizer
from jaxdt.run.cpus import usable_cores
from jaxdt.run.errors import BadInput, why

PIECE_BYTES = 1 << 18  # the expression that splits GPT-2's text takes no run of 1,000,000 spaces
CORPUS = Path(__file__).resolve().parents[2] / "configs" / "corpus"
TRAIN_TEXTS = (CORPUS / "train.txt.xz",)
EVAL_TEXTS = (CORPUS / "heldout.txt.xz",)
FILE = Rule()


class Piece(NamedTuple):
    """Some text of a document, or several whole documents; the tokens of none depend on what is around it. `begins`,
    `ends`: it begins the first document, it ends the last. `path`, `block`: where it is."""

    texts: list[bytes]
    begins: bool
    ends: bool
    path: str | Path
    block: Block

    def place(self, index: int) -> str:
        return f"{self.path}: {self.block.place(index, self.block.start, self.block.start + len(self.texts[index]))}"


def prepare(
    train_paths: Sequence[str | Path],
    eval_paths: Sequence[str | Path],
    tokenizer: str | Tokenizer,
    out: str | Path,
    replaces: bool = False,
    rule: Rule = FILE,
    *,
    on_read: Callable[[int], None] = lambda n_bytes: None,
) -> TokenFile:
    """The token file `out` of the documents of these files, each read in pieces, twice: nothing is encoded before all
    of it is known to be text that can be. An undamaged file made before from the same documents with the same tokenizer
    is reused; one of others is replaced only with `replaces`, since a run that was trained on it could not go on. A
    file of another kind, or a damaged one, is refused. `on_read` hears how many more bytes have been read. Raises
    BadInput."""
    encoder = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    chats = Chats(encoder) if rule.chat else None
    read = partial(pieces, encoder, rule=rule, on_read=on_read)
    sources = source_checksum(encoder, read, train_paths, eval_paths, chats.about if chats else "")
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
        train=_encoded(encoder, read, train_paths, chats),
        held_out=_encoded(encoder, read, eval_paths, chats),
        source_checksum=sources,
        end_of_text=encoder.end_of_text,
        tokenizer_json=encoder.content,
    )


def pieces(
    tokenizer: Tokenizer, path: str | Path, rule: Rule = FILE, on_read: Callable[[int], None] = lambda n_bytes: None
) -> Iterator[Piece]:
    """The documents of a file in pieces of at most twice PIECE_BYTES. Their tokens one after another are those of the
    documents. Conversations are not cut."""
    rest = b""  # of a long document, whose tokens depend on what follows
    read_bytes = 0
    for block in documents.blocks(path, rule, PIECE_BYTES):
        on_read(block.read_bytes - read_bytes)
        read_bytes = block.read_bytes
        if rule.chat:
            yield Piece(block.texts, True, True, path, block)
            continue
        is_text = tokenizer.name != BYTES or tokenizer.end_of_text is not None
        if is_text and b"\0" in b"".join(block.texts):
            index = next(index for index, text in enumerate(block.texts) if b"\0" in text)
            where = block.place(index, block.start + block.texts[index].index(b"\0"))
            raise BadInput(
                f"{path}: {where} is zero, expected text; other bytes take --tokenizer={BYTES} --end_of_text=none"
            )
        if len(block.texts) > 1:
            _require_text(tokenizer, path, block)
            yield Piece(block.texts, True, True, path, block)
            continue
        text, start = rest + block.texts[0], block.start - len(rest)
        rest = text
        if not block.ends and len(text) < PIECE_BYTES:
            continue
        block = block._replace(texts=[text], start=start)
        size = _require_text(tokenizer, path, block)
        if not size:
            where = f"{block.place(0, start, start + len(text))} are all of one word, number or white space"
            raise BadInput(f"{path}: {where}, expected less than {PIECE_BYTES} bytes for {tokenizer.name}")
        yield Piece([text[:size]], start == 0, block.ends, path, block)
        rest = text[size:]
    on_read(max(0, os.path.getsize(path) - read_bytes))  # what follows the last document


def _require_text(tokenizer: Tokenizer, path: str | Path, block: Block) -> int:
    """How much of a block may be encoded alone: of several documents all. BadInput for what is no UTF-8."""
    try:
        return tokenizer.cut(b"\n".join(block.texts), block.ends)
    except UnicodeDecodeError:
        for index, text in enumerate(block.texts):
            try:
                tokenizer.cut(text, block.ends)
            except UnicodeDecodeError as error:
                where = block.place(index, block.start + error.start)
                raise BadInput(f"{path}: {where} is not UTF-8, expected UTF-8 for {tokenizer.name}") from error
        raise


def source_checksum(
    tokenizer: Tokenizer,
    read: Callable[[str | Path], Iterator[Piece]],
    train: Sequence[str | Path],
    held_out: Sequence[str | Path],
    about_chats: str = "",
) -> str:
    """SHA256 over the part and the SHA256 of the text of each file in order, and over how it makes documents and what
    stands between them where there are several; for chats over what else their tokens depend on, too. A file counts the
    same compressed or plain. The files are read whole; BadInput if this tokenizer cannot encode one."""
    lines = [f"chats {about_chats}\n"] if about_chats else []
    for part, paths in (("train", train), ("held-out", held_out)):
        n_in_part = 0
        for path in paths:
            text, lengths, n_bytes, n_documents = hashlib.sha256(), hashlib.sha256(), 0, 0
            for piece in read(path):
                text.update(b"".join(piece.texts))
                sizes = list(map(len, piece.texts))
                sizes[0] += n_bytes  # of a document that began in an earlier piece
                n_bytes = 0 if piece.ends else sizes.pop()
                lengths.update(b"".join([b"%d " % size for size in sizes]))
                n_documents += len(sizes)
            lines.append(f"{part} {text.hexdigest()}\n")
            lines += [f"documents {lengths.hexdigest()}\n"] if n_documents > 1 else []
            n_in_part += n_documents
        lines += [f"end of text {tokenizer.end_of_text}\n"] if n_in_part > 1 else []
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _encoded(
    tokenizer: Tokenizer,
    read: Callable[[str | Path], Iterator[Piece]],
    paths: Sequence[str | Path],
    chats: Chats | None,
) -> Iterator[Tokens]:
    """The tokens of a part, encoded on all cores."""
    n_threads = max(1, round(usable_cores()))
    pending: deque[Future[Tokens]] = deque()
    is_first = True
    with ThreadPoolExecutor(n_threads) as pool:
        for path in paths:
            for piece in read(path):
                if chats:
                    pending.append(pool.submit(_encode_chats, chats, piece))
                else:
                    pending.append(pool.submit(_encode, tokenizer, piece, is_first))
                is_first = False
                if len(pending) > 2 * n_threads:
                    yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _encode(tokenizer: Tokenizer, piece: Piece, is_first: bool) -> Tokens:
    """The tokens of a piece, with the end of text before each document but the part's first one."""
    try:
        numbers, lengths = tokenizer.encode_texts(piece.texts)
    except ValueError as error:
        raise _cannot_be_encoded(tokenizer, piece, error) from error
    starts = np.cumsum(lengths) - lengths
    if not piece.begins:
        return Tokens(numbers, starts[1:])
    if tokenizer.end_of_text is not None:
        behind = starts[1:] if is_first else starts
        numbers = np.insert(numbers, behind, tokenizer.end_of_text)
        starts = starts + np.arange(len(starts)) + (0 if is_first else 1)
    return Tokens(numbers, starts)


def _cannot_be_encoded(tokenizer: Tokenizer, piece: Piece, error: ValueError) -> BadInput:
    """What to say of a piece that the tokenizer refuses: the first document that it refuses alone."""
    for index, text in enumerate(piece.texts):
        try:
            tokenizer.encode_texts([text])
        except ValueError as of_one:
            reason = why(of_one)
            return BadInput(f"{piece.place(index)} cannot be encoded by {tokenizer.name} ({reason})")
    return BadInput(f"{piece.place(0)} and what follows cannot be encoded by {tokenizer.name} ({why(error)})")


def _encode_chats(chats: Chats, piece: Piece) -> Tokens:
    """The tokens of whole conversations, of which those of answers count."""
    found: list[Conversation] = []
    try:
        for conversation in chats.encode(piece.texts):
            found.append(conversation)  # so that `found` says which one was refused
    except ValueError as error:
        place = f"{piece.block.unit} {piece.block.numbers[len(found)]}"
        raise BadInput(f"{piece.path}: {place} cannot be encoded: {why(error)}") from None
    lengths = np.array([len(numbers) for numbers, _ in found])
    numbers, counted = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return Tokens(numbers, np.cumsum(lengths) - lengths, counted)
