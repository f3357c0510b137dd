"""Documents in files of several kinds, and the token file that they make."""

import gzip
import json
import lzma
import re
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.model import documents, prepare
from jaxdt.model.documents import Rule, blocks
from jaxdt.model.tokenizer import load_tokenizer, with_end_of_text
from jaxdt.run.errors import BadInput

TEXTS = ["To be", "or not", "\N{POUND SIGN}1598\nto be", "that is"]


def found(path: Path, rule: Rule = Rule(), block_bytes: int = 1 << 18) -> list[bytes]:
    """The documents of a file, put together from their blocks."""
    whole, rest, read_bytes = [], b"", 0
    for block in blocks(path, rule, block_bytes):
        assert block.start == len(rest) and read_bytes <= block.read_bytes <= path.stat().st_size
        assert block.texts and all(block.texts) and len(block.numbers) == len(block.texts)
        assert len(block.texts) == 1 or (block.start == 0 and block.ends)
        texts, rest, read_bytes = [rest + block.texts[0], *block.texts[1:]], b"", block.read_bytes
        if not block.ends:
            rest = texts.pop()
        whole += texts
    assert rest == b""
    return whole


def zst(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="the extra data is not installed")
    half = len(content) // 2
    return zstandard.compress(content[:half]) + zstandard.compress(content[half:])


@pytest.mark.parametrize(("suffix", "compress"), [
    ("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".zst", zst),
])  # fmt: skip
def test_lines_of_json_are_documents_compressed_or_not(tmp_path, suffix, compress):
    path = tmp_path / f"a.jsonl{suffix}"
    lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate([*TEXTS, ""])]
    path.write_bytes(compress("\n\n".join(lines).encode()))
    assert found(path) == [text.encode() for text in TEXTS]
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    expected = "cannot be decompressed .*, expected all of an? .[gxz]" if suffix else "a.jsonl: line 9 is no JSON"
    with pytest.raises(BadInput, match=expected):
        found(path)


def test_the_mark_of_utf8_is_no_text(tmp_path):
    for name, content in {"a.txt": b"To be", "a.json": b'{"text": "To be"}\r\n'}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        assert found(tmp_path / name) == [b"To be"]
    (tmp_path / "a.json").write_text('[{"text": "a"}]')
    with pytest.raises(BadInput, match="a.json: line 1 is JSON of another kind, expected an object with the field 'te"):
        found(tmp_path / "a.json")


def test_rows_of_parquet_are_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": list(range(1000)), "body": ["x" * n for n in range(1000)]}), path)
    assert found(path, Rule(field="body")) == [b"x" * n for n in range(1, 1000)]
    with pytest.raises(BadInput, match=r"a.parquet: has no column 'text'; it has id, body, expected one of them"):
        found(path)
    with pytest.raises(BadInput, match="a.parquet: row 1 has int in 'id', expected a text"):
        found(path, Rule(field="id"))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(BadInput, match="a.parquet: cannot be read .*, expected a Parquet file"):
        found(path, Rule(field="body"))


@pytest.mark.parametrize(("line", "reason"), [
    (b'{"text": "a"', "is no JSON (Expecting ',' delimiter at 12), expected an object in each line"),
    (b"[" * 100_000, "is no JSON (objects or lists are nested too deeply), expected an object in each line"),
    (b'{"text": "\xff"}', "is no JSON ('utf-8' codec can't decode byte 0xff in position 10: invalid start byte), exp"),
    (b"[1]", "is JSON of another kind, expected an object with the field 'text'; to make lines of a list: jq -c '.[]'"),
    (b"1", "is JSON of another kind, expected an object with the field 'text'"),
    (b'{"txt": "a", "id": 1}', "has no field 'text' (did you mean \"txt\"?); it has txt, id, expected one of them"),
    (b'{"text": null}', "has null in 'text', expected a text"),
    (b'{"text": "\\ud800"}', "has half a character (surrogates not allowed) in 'text', expected a text"),
    (b'{"text": "' + b"x" * 500 + b'"}', "has more than 256 bytes, expected shorter lines"),
])  # fmt: skip
def test_a_line_that_holds_no_document_is_named(tmp_path, monkeypatch, line, reason):
    if len(line) < 1000:
        monkeypatch.setattr(documents, "LINE_BYTES_MAX", 256)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(BadInput, match=f"^{re.escape(str(path))}: line 2 {re.escape(reason)}"):
        found(path)


@given(st.lists(st.sampled_from(["a", "bc", " ", "", "def ghi", "\t"]), max_size=12), st.sampled_from(["\n", "\r\n"]),
       st.booleans(), st.integers(1, 6))  # fmt: skip
def test_lines_and_groups_of_lines(lines, end, ends_last, block_bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        path.write_bytes((end.join(lines) + end * ends_last).encode())
        assert found(path, Rule("line"), block_bytes) == [line.encode() for line in lines if line]
        groups = [[]]
        for line in lines:
            groups[-1].append(line) if line.strip() else groups.append([])
        assert found(path, Rule("blank"), block_bytes) == [end.join(group).encode() for group in groups if group]
        assert b"".join(found(path, Rule("file"), block_bytes)) == path.read_bytes()


# Token files


def test_documents_stand_between_ends_of_text_whatever_threads_and_batches_there_are(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(TEXTS * 30))
    files = []
    for piece_bytes, cores in ((1, 3), (50, 1), (1 << 20, 2)):
        monkeypatch.setattr(prepare, "PIECE_BYTES", piece_bytes)
        monkeypatch.setattr(prepare, "usable_cores", lambda cores=cores: cores)
        out = tmp_path / f"{piece_bytes}.tok"
        files.append(prepare.prepare([path], [path], "bytes", out, rule=Rule("line")))
    assert len({file.path.read_bytes() for file in files}) == 1
    train, starts = files[0].tokens[: files[0].n_train_tokens], files[0].documents[0].astype(int)
    lines = "\n".join(TEXTS * 30).encode().split(b"\n")
    assert bytes(train.astype(np.uint8)) == b"\0".join(lines)
    assert [bytes(train[lo : lo + len(line)].astype(np.uint8)) for lo, line in zip(starts, lines, strict=True)] == lines


def test_another_rule_or_end_of_text_makes_another_file(tmp_path):
    path, out = tmp_path / "a.txt", tmp_path / "a.tok"
    path.write_text("one\ntwo\nthree")
    by_line = prepare.prepare([path], [], "bytes", out, rule=Rule("line"))
    assert prepare.prepare([path], [], "bytes", out, rule=Rule("line")).checksum == by_line.checksum
    nothing = with_end_of_text(load_tokenizer("bytes"), "none")
    for tokenizer, rule in ((nothing, Rule("line")), ("bytes", Rule())):
        with pytest.raises(BadInput, match="a.tok: holds tokens of other texts"):
            prepare.prepare([path], [], tokenizer, out, rule=rule)
    joined = prepare.prepare([path], [], nothing, tmp_path / "b.tok", rule=Rule("line"))
    assert bytes(joined.tokens.astype(np.uint8)) == b"onetwothree" and joined.end_of_text is None


def test_bytes_that_are_no_text_are_refused_unless_asked_for(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\0two" * 100)
    reason = "a.txt: byte 3 is zero, expected text; other bytes take --tokenizer=bytes --end_of_text=none"
    for tokenizer in (load_tokenizer("bytes"), load_tokenizer("bytes")._replace(name="other", end_of_text=None)):
        with pytest.raises(BadInput, match=reason):
            prepare.prepare([path], [], tokenizer, tmp_path / "a.tok")
    nothing = with_end_of_text(load_tokenizer("bytes"), "none")
    assert prepare.prepare([path], [], nothing, tmp_path / "a.tok").n_train_tokens == 700


def test_an_end_of_text_that_is_no_token_is_refused():
    with pytest.raises(BadInput, match="end_of_text: got '<end>', expected a token of the tokenizer bytes, or none"):
        with_end_of_text(load_tokenizer("bytes"), "<end>")
    assert with_end_of_text(load_tokenizer("bytes"), "\n").end_of_text == 10


def test_long_documents_come_in_pieces(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"word " * 100 + b"\n\n" + b"other " * 3)
    with mock.patch.object(prepare, "PIECE_BYTES", 20):
        pieces = list(prepare.pieces(load_tokenizer("bytes"), path, Rule("blank")))
    assert [piece.ends for piece in pieces].count(True) == 2 and len(pieces) > 2
    assert pieces[-1].place(0).startswith(f"{path}: line 3: byte")
