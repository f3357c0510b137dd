"""Makes a token file from text files; the committed corpus is the default text."""

import codecs
import hashlib
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxdt.model.data import MAGIC, TokenFile, open_data, verify_checksum, write_pieces
from jaxdt.model.tokenizer import Tokenizer, load_tokenizer
from jaxdt.run.errors import BadInput, why

LOOKED_AT_BYTES = 4096
PIECE_BYTES = 1 << 18  # the expression that splits GPT-2's text takes no run of 1,000,000 spaces
CORPUS = Path(__file__).resolve().parents[2] / "configs" / "corpus"
TRAIN_TEXTS = (CORPUS / "train.txt.xz",)
EVAL_TEXTS = (CORPUS / "heldout.txt.xz",)


def prepare(
    train_paths: Sequence[str | Path],
    eval_paths: Sequence[str | Path],
    tokenizer: str,
    out: str | Path,
    replaces: bool = False,
) -> TokenFile:
    """The token file `out` of these texts, each read in pieces, twice: nothing is encoded before all of it is known to
    be text that can be. An undamaged file made before from the same texts with the same tokenizer is reused; one of
    other texts is replaced only with `replaces`, since a run that was trained on it could not go on. A file of another
    kind, or a damaged one, is refused. Raises BadInput."""
    encoder = load_tokenizer(tokenizer)
    sources = source_checksum([sha256(encoder, path) for path in train_paths], [sha256(encoder, p) for p in eval_paths])
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
        train=_encoded(encoder, train_paths),
        held_out=_encoded(encoder, eval_paths),
        source_checksum=sources,
    )


def chunks(path: str | Path) -> Iterator[bytes]:
    """A text file's bytes in order, decompressed if its name ends in .xz. Raises BadInput, also for UTF-16 and UTF-32:
    as bytes, every second token of such a text would be a zero."""
    try:
        with lzma.open(path) if str(path).endswith(".xz") else Path(path).open("rb") as file:
            text = file.read(PIECE_BYTES)
            if text.startswith(MAGIC):
                hint = f"expected a text; to train on it: --config.data.path={path}"
                raise BadInput(f"{path}: is a token file already, {hint}")
            if encoding := _wide_encoding(text):
                hint = f"to convert it: iconv -f {encoding} -t UTF-8 {path} > {path}.utf8"
                raise BadInput(f"{path}: is {encoding}, expected UTF-8; {hint}")
            while text:
                yield text
                text = file.read(PIECE_BYTES)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected a text file") from error
    except (lzma.LZMAError, EOFError) as error:
        raise BadInput(f"{path}: cannot be decompressed ({error}), expected an .xz file") from error


def pieces(tokenizer: Tokenizer, path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The text of a file in pieces of at most twice PIECE_BYTES, each with the number of its first byte. Their tokens
    one after another are those of the whole text."""
    start, text = 0, b""
    try:
        for chunk in chunks(path):
            text += chunk
            if len(text) < PIECE_BYTES:
                continue
            size = tokenizer.cut(text, False)
            if not size:
                where = f"bytes {start} to {start + len(text)} are all of one word, number or white space"
                raise BadInput(f"{path}: {where}, expected less than {PIECE_BYTES} bytes for {tokenizer.name}")
            yield start, text[:size]
            start, text = start + size, text[size:]
        if tokenizer.cut(text, True):
            yield start, text
    except UnicodeDecodeError as error:
        where = f"byte {start + error.start}"
        raise BadInput(f"{path}: {where} is not UTF-8, expected UTF-8 for {tokenizer.name}") from error


def _wide_encoding(text: bytes) -> str:
    """UTF-16 or UTF-32 where a text begins with its byte order mark, or has a zero in place of the upper bytes of most
    characters; '' for other texts."""
    if text.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    head = text[:LOOKED_AT_BYTES]
    for first, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        upper, lower = head[first::2], head[1 - first :: 2]
        if upper and upper.count(0) > len(upper) / 2 and lower.count(0) < len(lower) / 10:
            return name
    return ""


def sha256(tokenizer: Tokenizer, path: str | Path) -> str:
    """The SHA256 of a text, which is read whole; BadInput if this tokenizer cannot encode it."""
    digest = hashlib.sha256()
    for _, piece in pieces(tokenizer, path):
        digest.update(piece)
    return digest.hexdigest()


def source_checksum(train: Sequence[str], held_out: Sequence[str]) -> str:
    """SHA256 over the part and the SHA256 of each text in order. A text counts the same compressed or plain."""
    lines = [*(f"train {digest}\n" for digest in train), *(f"held-out {digest}\n" for digest in held_out)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _encoded(tokenizer: Tokenizer, paths: Sequence[str | Path]) -> Iterator[np.ndarray]:
    """Token numbers of the texts in order, in pieces [n], with nothing between them."""
    for path in paths:
        for start, piece in pieces(tokenizer, path):
            try:
                tokens = tokenizer.encode(piece)
            except ValueError as error:
                where = f"bytes {start} to {start + len(piece)}"
                raise BadInput(f"{path}: {where} cannot be encoded by {tokenizer.name} ({why(error)})") from error
            yield tokens
