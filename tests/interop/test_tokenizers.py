"""Tokenizers that come with a model: those of tokenizer.json, and those of GGUF files."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")

from jaxdt.cli.run_inputs import tokenizer_of  # noqa: E402
from jaxdt.interop.gguf_tokenizer import SPLITS, tokenizer_files  # noqa: E402
from jaxdt.model import prepare  # noqa: E402
from jaxdt.model.documents import Rule  # noqa: E402
from jaxdt.model.tokenizer import load_tokenizer, word_cut  # noqa: E402
from jaxdt.run.errors import BadInput  # noqa: E402

TEXT = "It's a truth, universally acknowledged: 1813 + 27 tokens\n\n  can't be wrong — naïve café 日本語 42x7.\n" * 40


def trained(*, marks_beginnings: bool = False) -> tokenizers.Tokenizer:
    """A small tokenizer of pairs of bytes."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    splits = tokenizers.pre_tokenizers
    made.pre_tokenizer = splits.Metaspace() if marks_beginnings else splits.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = splits.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer.json."""
    path = tmp_path_factory.mktemp("tokenizer")
    trained().save(str(path / "tokenizer.json"))
    return path


def test_a_text_has_the_tokens_that_its_model_knows(folder):
    tokenizer, known = load_tokenizer(str(folder)), trained()
    tokens = tokenizer.encode(TEXT.encode())
    assert tokens.tolist() == known.encode(TEXT).ids
    assert tokenizer.decode(tokens).decode() == TEXT
    assert tokenizer.vocab_size == known.get_vocab_size()
    assert tokenizer.encode_prompt(b"a<|end|>b").tolist()[1] == 0
    assert tokenizer.decode(tokenizer.encode(b"a<|end|>b")) == b"a<|end|>b" and 0 not in tokenizer.encode(b"a<|end|>b")
    assert load_tokenizer(str(folder / "tokenizer.json")).name == tokenizer.name
    assert tokenizer.name.startswith("hf:") and len(tokenizer.name) == 15


def test_a_text_in_pieces_has_the_tokens_of_the_whole(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE_BYTES", 100)
    (tmp_path / "text").write_text(TEXT)
    file = prepare.prepare([tmp_path / "text"], [tmp_path / "text"], str(folder), tmp_path / "text.tok")
    whole = load_tokenizer(str(folder)).encode(TEXT.encode())
    assert np.array_equal(file.tokens[: file.n_train_tokens], whole)
    assert file.tokenizer == load_tokenizer(str(folder)).name
    again = prepare.prepare([tmp_path / "text"], [tmp_path / "text"], str(folder), tmp_path / "text.tok")
    assert again.checksum == file.checksum


def test_a_token_file_has_its_tokenizer_and_the_end_of_text_that_stands_beside_it(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>", "special": true}}')
    (tmp_path / "a.txt").write_text("one <|end|>\ntwo")
    text = [tmp_path / "a.txt"]
    file = prepare.prepare(text, text, str(tmp_path), tmp_path / "a.tok", rule=Rule("line"))
    for path in tmp_path.glob("*.json"):
        path.unlink()
    tokenizer, ends = tokenizer_of(file, tmp_path)
    train = file.tokens[: file.n_train_tokens]
    assert ends == {0} and np.count_nonzero(train == 0) == 1
    assert [tokenizer.decode(part) for part in np.split(train, np.flatnonzero(train == 0))] == [
        b"one <|end|>",
        b"<|end|>two",
    ]


def test_a_tokenizer_with_tokens_of_several_words_takes_whole_texts_only(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.decoder = tokenizers.decoders.ByteLevel()
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["of the one of the two " * 50], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).cut(b"of the one", False) == 0


def test_where_a_text_may_be_cut():
    assert word_cut(b"one two three", False) == len(b"one two")
    assert word_cut(b"one, ", False) == 0
    assert word_cut("日本語\nab".encode(), False) == len("日本語".encode())
    assert word_cut(b"anything", True) == len(b"anything")


def test_a_tokenizer_that_marks_beginnings_takes_whole_texts_only(tmp_path):
    trained(marks_beginnings=True).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.cut(b"one two three", False), tokenizer.cut(b"one two three", True)) == (0, 13)


def test_what_is_no_tokenizer(tmp_path):
    with pytest.raises(BadInput, match=r"^tokenizer: got '.+', expected one of bytes, gpt2, a tokenizer\.json or a fo"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"tokenizer\.json: cannot be read \(.+\), expected a tokenizer of a model$"):
        load_tokenizer(str(tmp_path))


def fields_of(known: tokenizers.Tokenizer, rule: str) -> dict:
    """What a GGUF file says of a tokenizer."""
    model = json.loads(known.to_str())["model"]
    texts = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": [3 if text == "<|end|>" else 1 for text in texts],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }


# The words into which each rule splits a text.
WORDS = {
    "gpt-2": ["12345", "Ġx", "Ġ", "Ġit", "'s", "?", "Ċ", "Ċ", "Y"],
    "starcoder": ["1", "2", "3", "4", "5", "Ġx", "Ġ", "Ġit", "'s", "?", "Ċ", "Ċ", "Y"],
    "llama-bpe": ["123", "45", "Ġx", "Ġ", "Ġit", "'s", "?ĊĊ", "Y"],
    "qwen2": ["1", "2", "3", "4", "5", "Ġx", "Ġ", "Ġit", "'s", "?ĊĊ", "Y"],
}
SAME = {"mpt": "gpt-2", "refact": "starcoder", "smollm": "starcoder"}


@pytest.mark.parametrize("rule", SPLITS)
def test_each_rule_splits_a_text_as_its_models_do(rule, tmp_path):
    files = tokenizer_files(fields_of(trained(), rule), "file.gguf")
    made = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    words = [word for word, _ in made.pre_tokenizer.pre_tokenize_str("12345 x  it's?\n\nY")]
    assert words == WORDS[SAME.get(rule, rule)]
    assert made.decode(made.encode(TEXT).ids, skip_special_tokens=False) == TEXT
    assert made.encode("<|end|>").ids == [0]
    assert json.loads(files["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": "{{ messages }}",
    }


# Letters, digits and contractions beyond ASCII: capitals, a fraction, accents, ideographs, a tab before a word.
MORE_WORDS = {
    "gpt-2": ["I", "'", "LL", " ½234", " é日", "\t", "z"],
    "starcoder": ["I", "'", "LL", " ", "½", "2", "3", "4", " é日", "\t", "z"],
    "llama-bpe": ["I", "'LL", " ", "½23", "4", " é日", "\tz"],
    "qwen2": ["I", "'LL", " ", "½", "2", "3", "4", " é日", "\tz"],
}


@pytest.mark.parametrize("rule", SPLITS)
def test_each_rule_splits_what_is_not_ascii(rule):
    files = tokenizer_files(fields_of(trained(), rule), "file.gguf")
    made = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    words = [word for word, _ in made.pre_tokenizer.pre_tokenize_str("I'LL ½234 é日\tz")]
    assert [made.decoder.decode([word]) for word in words] == MORE_WORDS[SAME.get(rule, rule)]


def test_a_text_that_is_a_token_is_one_before_anything_is_split():
    fields = fields_of(trained(), "gpt-2")
    fields["tokenizer.ggml.tokens"].append("   ")
    fields["tokenizer.ggml.token_type"].append(4)
    made = tokenizers.Tokenizer.from_str(tokenizer_files(fields, "file.gguf")["tokenizer.json"].decode())
    number = len(fields["tokenizer.ggml.tokens"]) - 1
    encode = lambda text: made.encode(text).ids  # noqa: E731
    assert encode("a   b") == [*encode("a"), number, *encode("b")]
    assert made.decode([number]) == "   "


def test_the_tokenizer_of_a_gguf_file_is_that_of_its_model():
    known = trained()
    files = tokenizer_files(fields_of(known, "gpt-2"), "file.gguf")
    assert tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode()).encode(TEXT).ids == known.encode(TEXT).ids


def test_a_beginning_that_the_model_expects():
    fields = fields_of(trained(), "llama-bpe") | {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    made = tokenizers.Tokenizer.from_str(tokenizer_files(fields, "file.gguf")["tokenizer.json"].decode())
    assert made.encode("it").ids == [0, *made.encode("it", add_special_tokens=False).ids]


def test_an_unknown_rule_is_refused():
    with pytest.raises(
        BadInput, match=r"^file\.gguf: tokenizer\.ggml\.pre: got 'tekken', expected one of gpt-2, mpt, "
    ):
        tokenizer_files(fields_of(trained(), "tekken"), "file.gguf")
    assert tokenizer_files({"tokenizer.ggml.model": "rwkv"}, "file.gguf") == {}


def test_pieces_are_merged_by_their_scores_and_what_no_piece_has_becomes_bytes():
    pieces = {"<unk>": 2, "<s>": 3} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    pieces |= dict.fromkeys(("\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "abc"), 1)
    scores = {"bc": -1.0, "ab": -2.0, "\u2581a": -3.0, "abc": -4.0}
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.token_type": list(pieces.values()),
        "tokenizer.ggml.scores": [scores.get(piece, -10.0) for piece in pieces],
        "tokenizer.ggml.bos_token_id": 1,
    }
    made = tokenizers.Tokenizer.from_str(tokenizer_files(fields, "file.gguf")["tokenizer.json"].decode())
    assert made.encode("abc").tokens == ["<s>", "\u2581a", "bc"]  # bc first, so that ab is no pair any more
    assert made.encode("ab<s>abcabé", add_special_tokens=False).tokens == [
        *("\u2581", "ab", "<s>", "\u2581a", "bc", "ab", "<0xC3>", "<0xA9>"),
    ]
    assert made.decode(made.encode("abc ab é").ids, skip_special_tokens=True) == "abc ab é"
    for name, value, expected in (
        ("scores", [], "got 0 entries, expected one a token"),
        ("token_type", [1], "got 1 entries, expected one a token"),
        ("unknown_token_id", 999, f"got 999, expected less than {len(pieces)}"),
    ):
        with pytest.raises(BadInput, match=rf"^file\.gguf: tokenizer\.ggml\.{name}: {expected}"):
            tokenizer_files(fields | {f"tokenizer.ggml.{name}": value}, "file.gguf")


VOCABULARIES = os.environ.get("JAXDT_GGML_VOCABS", "")
N_VECTORS = 47


@pytest.mark.skipif(not VOCABULARIES, reason="JAXDT_GGML_VOCABS names no folder with llama.cpp's ggml-vocab-*.gguf")
@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "starcoder", "refact", "mpt", "llama-spm", "phi-3"])
def test_a_vocabulary_of_llama_cpp_gives_its_tokens(name):
    """Beside each file stand texts and the tokens that llama.cpp makes of them."""
    path = Path(VOCABULARIES) / f"ggml-vocab-{name}.gguf"
    reader = pytest.importorskip("gguf").GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    made = tokenizers.Tokenizer.from_str(tokenizer_files(fields, str(path))["tokenizer.json"].decode())
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    assert len(texts) == len(lines) == N_VECTORS
    for text, line in zip(texts, lines, strict=True):
        assert made.encode(text, add_special_tokens=False).ids == [int(number) for number in line.split()], repr(text)
