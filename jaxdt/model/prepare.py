"""Makes a token file from text files; the committed corpus is the default text."""

import codecs
import hashlib
import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxdt.model.data import MAGIC, TokenFile, open_data, verify_checksum, write_tokens
from jaxdt.model.tokenizer import Tokenizer, load_tokenizer
from jaxdt.spec.errors import BadInput

LOOKED_AT_BYTES = 4096
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
    """The token file `out` of these texts, each whole in memory. An undamaged file made before from the same texts with
    the same tokenizer is reused; one of other texts is replaced only with `replaces`, since a run that was trained on
    it could not go on. A file of another kind, or a damaged one, is refused. Raises BadInput."""
    encoder = load_tokenizer(tokenizer)
    train = [(path, read_text(path)) for path in train_paths]
    held_out = [(path, read_text(path)) for path in eval_paths]
    sources = source_checksum([text for _, text in train], [text for _, text in held_out])
    if Path(out).exists():
        file = open_data(out)
        if (file.tokenizer, file.source_checksum) == (tokenizer, sources):
            verify_checksum(file)
            return file
        if not replaces:
            raise BadInput(f"{out}: holds tokens of other texts, expected a new file; or delete it, if no run needs it")
    return write_tokens(
        out,
        tokenizer=tokenizer,
        vocab_size=encoder.vocab_size,
        train=_encode(encoder, train),
        held_out=_encode(encoder, held_out),
        source_checksum=sources,
    )


def read_text(path: str | Path) -> bytes:
    """A text file's bytes, decompressed if its name ends in .xz. Raises BadInput, also for UTF-16 and UTF-32: as bytes,
    every second token of such a text would be a zero."""
    try:
        content = Path(path).read_bytes()
        text = lzma.decompress(content) if str(path).endswith(".xz") else content
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}), expected a text file") from error
    except lzma.LZMAError as error:
        raise BadInput(f"{path}: cannot be decompressed ({error}), expected an .xz file") from error
    if text.startswith(MAGIC):
        raise BadInput(f"{path}: is a token file already, expected a text; to train on it: --config.data.path={path}")
    if encoding := _wide_encoding(text):
        raise BadInput(
            f"{path}: is {encoding}, expected UTF-8; to convert it: iconv -f {encoding} -t UTF-8 {path} > {path}.utf8"
        )
    return text


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


def source_checksum(train: Sequence[bytes], held_out: Sequence[bytes]) -> str:
    """SHA256 over the part and the SHA256 of each text in order. A text counts the same compressed or plain."""
    lines = [f"train {hashlib.sha256(text).hexdigest()}\n" for text in train]
    lines += [f"held-out {hashlib.sha256(text).hexdigest()}\n" for text in held_out]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _encode(tokenizer: Tokenizer, texts: list[tuple[str | Path, bytes]]) -> np.ndarray:
    """Token numbers [n_tokens] of the texts in order, with nothing between them."""
    parts = [np.zeros(0, np.uint8)]
    for path, text in texts:
        try:
            parts.append(tokenizer.encode(text))
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: byte {error.start} is not UTF-8, expected UTF-8 for {tokenizer.name}") from error
    return np.concatenate(parts)
