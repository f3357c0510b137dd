"""A model's tokenizer by tiktoken: the same tokens, or none."""

import json
import random
from typing import Any

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")

from jaxdt.model import byte_pairs  # noqa: E402
from jaxdt.model.byte_pairs import BYTE_OF, GPT2_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT, SINGLE_DIGITS_SPLIT  # noqa: E402
from jaxdt.model.prepare import prepare  # noqa: E402

TEXT = "It's a truth, universally acknowledged: 1813 + 27 tokens\n\n  can't be wrong — naïve café 日本語 42x7.\n" * 40
# Capitals by folding, spaces of all kinds, fractions, and the characters of the rules.
ODD = "\u017f\u212a\x85\xa0\u2028\u200b\u3000ßﬀ½²ⅷ٣一é’'\t\n\r\x0b\x1c  01aAsStTlLdDmMrReEvV.,-_<|>\u0301"
splits = tokenizers.pre_tokenizers
BY_BYTES = splits.ByteLevel(add_prefix_space=False, use_regex=False)
RULES = {
    GPT2_SPLIT: splits.ByteLevel(add_prefix_space=False),
    SINGLE_DIGITS_SPLIT: splits.Sequence([splits.Digits(True), splits.ByteLevel(add_prefix_space=False)]),
} | {
    split: splits.Sequence([splits.Split(tokenizers.Regex(split), "isolated"), BY_BYTES])
    for split in (LLAMA3_SPLIT, QWEN2_SPLIT)
}


def trained(split: str = GPT2_SPLIT) -> Any:
    """A small tokenizer of pairs of bytes."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = RULES[split]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=splits.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    made.encode_special_tokens = True
    return made


def changed(made: Any, **model: object) -> Any:
    """The tokenizer with other fields in its model."""
    content = json.loads(made.to_str())
    content["model"] |= model
    found = tokenizers.Tokenizer.from_str(json.dumps(content))
    found.encode_special_tokens = True
    return found


def of_merges(*merges: tuple[str, str], **model: object) -> Any:
    """A tokenizer of these merges alone, the first one first, whose unions are tokens."""
    tokens = dict.fromkeys([*BYTE_OF, *(left + right for left, right in merges)])
    numbers = {token: number for number, token in enumerate(reversed(tokens))}  # in no order of merging
    return changed(trained(), vocab=numbers, merges=[list(pair) for pair in merges], **model)


def test_the_rules_are_known_by_their_tokenizers():
    for split in RULES:
        assert byte_pairs._split_of(json.loads(trained(split).to_str())["pre_tokenizer"]) == split
    digits = splits.Sequence([splits.Digits(False), BY_BYTES])
    for other in (splits.ByteLevel(), splits.Whitespace(), BY_BYTES, digits, splits.Sequence([])):
        made = trained()
        made.pre_tokenizer = other
        assert byte_pairs._split_of(json.loads(made.to_str())["pre_tokenizer"]) is None


def test_merges_that_tiktoken_would_make_otherwise_are_refused():
    same = lambda made: byte_pairs._same_tokens(made.model, json.loads(made.to_str())["model"])  # noqa: E731
    tokens = same(of_merges(("a", "b"), ("b", "c"), ("ab", "c")))
    assert tokens is not None and tokens[-3:] == ["ab", "bc", "abc"]
    # ab comes first, and the list does not name it with c: abc is made of two tokens, which tiktoken would join.
    assert same(of_merges(("a", "b"), ("b", "c"), ("a", "bc"))) is None
    # Pairs with one union, and another between them: there is no order of tokens.
    assert same(of_merges(("a", "b"), ("b", "c"), ("ab", "c"), ("c", "a"), ("a", "bc"))) is None
    # abcd is never made, since bc comes first and stands between a and d: a word only, if whole words are tokens.
    merges = (("b", "c"), ("a", "b"), ("c", "d"), ("ab", "cd"))
    tokens = same(of_merges(*merges))
    assert tokens is not None and "abcd" not in tokens
    tokens = same(of_merges(*merges, ignore_merges=True))
    assert tokens is not None and "abcd" in tokens
    made = of_merges(*merges, ignore_merges=True)
    same(made)
    assert made.model.ignore_merges and made.encode("abcd").tokens == ["abcd"]


@pytest.mark.parametrize("split", RULES)
def test_tokens_are_those_of_the_package(split):
    pytest.importorskip("tiktoken", reason="the extra bpe is not installed")
    made = trained(split)
    pairs, drawn = byte_pairs.byte_pairs(made), random.Random(1)
    assert pairs is not None
    for n in range(300):
        start = drawn.randrange(len(TEXT))
        odd = "".join(drawn.choices(ODD, k=n % 30))
        text = f"{TEXT[start : start + n]}{odd}{drawn.choice(ODD) * drawn.randrange(200)}<|end|>"
        tokens = pairs.encode(text)
        assert tokens is not None
        assert np.frombuffer(tokens, np.uint32).tolist() == made.encode(text).ids, repr(text)


def test_tokens_of_whole_words_and_of_numbers_in_another_order():
    pytest.importorskip("tiktoken", reason="the extra bpe is not installed")
    merges = (("b", "c"), ("a", "b"), ("c", "d"), ("ab", "cd"), ("a", "a"), ("aa", "a"), ("aa", "aa"))
    for whole in (False, True):
        made = of_merges(*merges, ignore_merges=whole)
        pairs = byte_pairs.byte_pairs(made)
        assert pairs is not None
        for text in ("abcd", "abcd abcd", "abcdabcd", *("a" * n for n in range(1, 9)), "aaabcd aabc"):
            assert np.frombuffer(pairs.encode(text) or b"", np.uint32).tolist() == made.encode(text).ids, text


def test_where_tiktoken_may_differ_it_encodes_nothing():
    pytest.importorskip("tiktoken", reason="the extra bpe is not installed")
    made = trained()
    made.add_tokens(["<tool>"])
    made.normalizer = tokenizers.normalizers.NFC()
    pairs = byte_pairs.byte_pairs(made)
    assert pairs is not None and pairs.encode("é tool") is not None
    for text in ("a <tool>", "e\u0301", "a\U000fffff \u0378"):  # a token; not normal; a character of no version yet
        assert pairs.encode(text) is None, text
    assert pairs.encode("é tool") is not None
    lacking = json.loads(trained().to_str())["model"]["vocab"]
    del lacking["Ã"]  # byte 195, with which é begins
    pairs = byte_pairs.byte_pairs(changed(trained(), vocab=lacking, merges=[]))
    assert pairs is not None and pairs.encode("x") is not None and pairs.encode("éx") is None
    for other in (tokenizers.normalizers.Lowercase(), tokenizers.normalizers.NFKC()):
        made.normalizer = other
        assert byte_pairs.byte_pairs(made) is None


def test_a_rule_that_splits_otherwise_is_found_at_the_characters():
    pytest.importorskip("tiktoken", reason="the extra bpe is not installed")
    made = trained()
    other = GPT2_SPLIT.replace(r" ?\p{L}+", r" ?[\p{L}&&[^é]]+")  # as if é were no letter in one of the versions
    ranks = {byte_pairs.bytes_of(token): n for n, token in enumerate(BYTE_OF)}
    pairs = byte_pairs.BytePairs(made, other, ranks, np.arange(256, dtype=np.uint32), [])
    assert pairs.encode("cafe") is not None and pairs.encode("café") is None and pairs.encode("naïve") is not None


def test_a_token_file_is_the_same_with_and_without_tiktoken(tmp_path, monkeypatch):
    pytest.importorskip("tiktoken", reason="the extra bpe is not installed")
    trained().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(f"{TEXT}\u0378 {TEXT}", newline="")
    texts = [tmp_path / "a.txt"]
    found = {}
    for name in ("with", "without"):
        found[name] = prepare(texts, texts, str(tmp_path), tmp_path / f"{name}.tok").checksum
        monkeypatch.setattr(byte_pairs, "find_spec", lambda module: None)
    assert found["with"] == found["without"]
