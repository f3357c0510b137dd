"""Byte-pair encoding of a tokenizer.json by tiktoken, where both give the same tokens. It is faster than the package
tokenizers and holds no lock of Python, so texts are encoded on all cores.

Both split a text into words, and then merge pairs of neighbours in each word. The package merges the pairs that its
list names, the first of the list first; tiktoken merges any two neighbours whose union is a token, in an order of
tokens. On equal ends the leftmost goes first in both. The merges are the same if

- pairs with the same union stand together in the list, so it orders unions; and
- the package's merges make one token of every token's own bytes, or more than two.

Proof. What is merged between two borders does not depend on what is outside, as long as the borders stand. So if two
neighbours in a word have a token as their union, the package's merges of that token's bytes alone come to the same two
neighbours. They do not end there, so the list names this pair; and there is one such pair for a token. The pairs that
either may merge are therefore the same at every moment, and so is the first of them.

The words are the same if both know the rule, and put each character of the text into the same class: letters, numbers,
white space, and others. That depends on the version of Unicode of each, so each character is tried once."""

import itertools
import json
import re
import sys
import threading
import unicodedata
from importlib.util import find_spec
from typing import Any

import numpy as np

# GPT-2 splits text so before merging: contractions, words, numbers and signs each with one leading space, white space.
# The rule is part of the encoding's definition (Radford et al. 2019, released with the model).
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same between single digits. White space before a digit is at an end, so all of it is one word.
SINGLE_DIGITS_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
# Contractions, words with one sign or blank before them, runs of at most three digits, signs, and white space.
LLAMA3_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# Shows the class of a character by where words end, also one that a contraction may have for another's capital.
PROBE = "a{0}a\n.{0}.\n1{0}1\na {0} a\na'{0} '{0}e '{0}l 'l{0} 'r{0} 'v{0} '{0}{0}\n"
UNTRIED, ALIKE, DIFFERENT = range(3)  # kinds of characters


def _byte_of() -> dict[str, int]:
    """The character by which a vocabulary writes a byte: itself if Latin-1 prints it, else the next free one from 256
    on."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = _byte_of()
END = "<|endoftext|>"  # is text in texts
ALL_BYTES = [bytes([byte]) for byte in range(256)]


def bytes_of(token: str) -> bytes:
    """What a token of a vocabulary stands for. KeyError if it has a character that is no byte."""
    return bytes(map(BYTE_OF.__getitem__, token))


def encoding(split: str, ranks: dict[bytes, int], special: dict[str, int]) -> Any:
    """Of tiktoken: words by an expression, merged to the tokens in the order of their ranks. Without a special token it
    would look for one at each character."""
    import tiktoken  # pyright: ignore[reportMissingImports]  an extra

    return tiktoken.Encoding("byte pairs", pat_str=split, mergeable_ranks=ranks, special_tokens=special)


class BytePairs:
    """The tokens of texts by tiktoken. Threads may share it.

    - `tokenizer`: of the package. Its texts `apart` are tokens before anything is split.
    - `ranks`: by the bytes of each token, in the order of merging. `numbers`: the token numbers by rank."""

    def __init__(self, tokenizer: Any, split: str, ranks: dict[bytes, int], numbers: np.ndarray, apart: list[str]):
        self._tokenizer, self._split = tokenizer, split
        self._apart = re.compile("|".join(map(re.escape, apart))) if apart else None
        self._ranks, self._numbers = ranks, numbers
        self._encoding = encoding(split, ranks, {END: len(ranks)})
        self._kinds = np.zeros(sys.maxunicode + 1, np.uint8)  # by character
        self._trying = threading.Lock()

    def encode(self, text: str) -> bytes | None:
        """Token numbers as bytes of uint32; None where they may differ from the package's."""
        is_normal = self._tokenizer.normalizer is None or unicodedata.is_normalized("NFC", text)
        if not is_normal or (self._apart and self._apart.search(text)):
            return None
        characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        if UNTRIED in (kinds := self._kinds[characters]):
            with self._trying:
                self._try([chr(code) for code in np.unique(characters[kinds == UNTRIED])])
            kinds = self._kinds[characters]
        if DIFFERENT in kinds:
            return None
        return self._numbers[self._encoding.encode_to_numpy(text, disallowed_special=())].tobytes()

    def _try(self, characters: list[str]) -> None:
        """What only a later version of Unicode knows may be normalized otherwise, and a vocabulary may lack a byte."""
        known = [one for one in characters if unicodedata.category(one) != "Cn" and self._ranks.keys() >= _bytes(one)]
        self._kinds[list(map(ord, characters))] = DIFFERENT
        self._kinds[list(map(ord, self._split_alike(known)))] = ALIKE

    def _split_alike(self, characters: list[str]) -> list[str]:
        """Those at which both find the same words. Each of the package's is a token here, and so is each with the next
        one, so that words which tiktoken cuts otherwise become other tokens."""
        text = "".join(map(PROBE.format, characters))
        found = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        words = [text[lo:hi].encode() for _, (lo, hi) in found]
        both = map(b"".join, itertools.pairwise(words))
        tokens = list(dict.fromkeys([*ALL_BYTES, *words, *both]))
        ranks = {token: rank for rank, token in enumerate(tokens)}
        tried = encoding(self._split, ranks, {END: len(ranks)})
        if [tokens[rank] for rank in tried.encode_to_numpy(text, disallowed_special=())] == words:
            return characters
        half = len(characters) // 2
        return [*self._split_alike(characters[:half]), *self._split_alike(characters[half:])] if half else []


def _bytes(character: str) -> set[bytes]:
    return {bytes([byte]) for byte in character.encode()}


def byte_pairs(tokenizer: Any) -> BytePairs | None:
    """A tokenizer of the package tokenizers by tiktoken; None where it is not installed, or not known to give the same
    tokens. Takes up to 2 s for 128,000 tokens, during which no other thread may use the tokenizer."""
    if find_spec("tiktoken") is None:
        return None
    content = json.loads(tokenizer.to_str())
    model, normalizer = content["model"], content["normalizer"]
    split = _split_of(content["pre_tokenizer"] or {})
    if split is None or normalizer not in (None, {"type": "NFC"}) or model["type"] != "BPE":
        return None
    if any(model[name] for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        return None
    tokens = _same_tokens(tokenizer.model, model)
    if tokens is None:
        return None
    ranks = {bytes_of(token): rank for rank, token in enumerate(tokens)}
    numbers = np.array([model["vocab"][token] for token in tokens], np.uint32)
    apart = [token["content"] for token in content["added_tokens"] if not token["special"]]
    return BytePairs(tokenizer, split, ranks, numbers, apart)


def _same_tokens(merges: Any, model: dict[str, Any]) -> list[str] | None:
    """The tokens for tiktoken, in the order in which they are merged; None if it may merge otherwise. `merges`: the
    model as the package has it, `model`: its content."""
    vocabulary, takes_whole_words = model["vocab"], model["ignore_merges"]
    single = {character: byte for character, byte in BYTE_OF.items() if character in vocabulary}
    unions = [union for union, _ in itertools.groupby(left + right for left, right in model["merges"])]
    if len(set(unions)) < len(unions):
        return None
    # A word that is a token may be that token, whatever the merges make of it.
    tokens = dict.fromkeys([*single, *unions, *(vocabulary if takes_whole_words else ())])
    same = []
    merges.ignore_merges = False
    try:
        for token in tokens:
            if single.keys() >= set(token):
                n_parts = len(merges.tokenize(token))
                if n_parts == 2:
                    return None
                if n_parts == 1 or takes_whole_words:
                    same.append(token)
    finally:
        merges.ignore_merges = takes_whole_words
    return same


def _split_of(found: dict[str, Any]) -> str | None:
    """The expression that splits texts like a pre-tokenizer; None for one that is not known."""
    steps = found["pretokenizers"] if found.get("type") == "Sequence" else [found]
    if not steps:
        return None
    *before, last = [{name: value for name, value in step.items() if name != "trim_offsets"} for step in steps]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False}
    if last == by_bytes | {"use_regex": True}:
        digits = {"type": "Digits", "individual_digits": True}
        return GPT2_SPLIT if not before else SINGLE_DIGITS_SPLIT if before == [digits] else None
    if last == by_bytes | {"use_regex": False}:
        for split in (GPT2_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT):
            pattern = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
            if before == [pattern]:
                return split
    return None
