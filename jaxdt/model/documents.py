"""Documents in files: texts, lines of JSON, or a column of a Parquet file. Texts and JSON may be compressed.

A text file is one document, or each of its lines is one, or each group of lines between blank ones. Long documents come
in blocks, so that a file may be larger than the memory.
"""

import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxdt.model.data import MAGIC
from jaxdt.run.errors import BadInput, nearest, why
from jaxdt.run.serialize import parse_json

LOOKED_AT_BYTES = 4096
LINE_BYTES_MAX = 1 << 26  # where documents go by lines: a line is read whole
COMPRESSED_BYTES = 1 << 14
RULES = ("file", "line", "blank")
JSON_LINES, PARQUET = (".jsonl", ".ndjson", ".json"), ".parquet"
LINE, ROW = "line", "row"
TEXT_FIELDS, CHAT_FIELDS = ["text"], ["messages", "conversations"]
# Of the two ways in which files write messages, the second one's names: of role and content, and of two roles.
SPEAKER, SAID, SPEAKERS = "from", "value", {"human": "user", "gpt": "assistant"}
ANSWERS = "assistant"  # the role of the model


class Rule(NamedTuple):
    """What is a document. `documents`: of a text file, one of RULES. `field`: of an object of JSON, or the column; ''
    for the usual ones. `chat`: the field is a conversation."""

    documents: str = "file"
    field: str = ""
    chat: bool = False

    def field_of(self, names: Collection[str]) -> str:
        """The field among those that an object or table has. KeyError with the first expected one, if it has none."""
        expected = [self.field] if self.field else CHAT_FIELDS if self.chat else TEXT_FIELDS
        for field in expected:
            if field in names:
                return field
        raise KeyError(expected[0])


class Block(NamedTuple):
    """Some documents of a file, none of them empty, or some bytes of a long one. `numbers`: of the lines or rows where
    they are, counted from 1, or where they begin; `unit` says which of the two, '' where the document is the file.
    `start`: the number of the first byte in its document; `ends`: no more of the last document follows. `read_bytes`:
    how much of the file has been read."""

    texts: list[bytes]
    numbers: Sequence[int]
    unit: str
    start: int
    ends: bool
    read_bytes: int

    def place(self, index: int, start: int, end: int | None = None) -> str:
        """Where a byte, or bytes, of a document are in the file."""
        found = f"byte {start}" if end is None else f"bytes {start} to {end}"
        return f"{self.unit} {self.numbers[index]}: {found}" if self.unit else found


def blocks(path: str | Path, rule: Rule, block_bytes: int) -> Iterator[Block]:
    """The documents of a file that are not empty, in order: several in a block of little more than `block_bytes`, or
    one that is longer in blocks of its own. A conversation is the JSON of its messages, and always whole. Raises
    BadInput for what cannot be read or decompressed, for UTF-16 and UTF-32, and for a line or row without a text or
    conversation."""
    for block in _found(path, rule, block_bytes):
        texts, numbers = block.texts, block.numbers
        if b"" in texts:
            there = [index for index, text in enumerate(texts) if text]
            texts, numbers = [texts[index] for index in there], [numbers[index] for index in there]
        if not texts or rule.chat or max(map(len, texts)) <= block_bytes:
            yield from [block._replace(texts=texts, numbers=numbers)] if texts else []
            continue
        first = 0
        for index, text in enumerate(texts):
            if len(text) > block_bytes:
                if index > first:
                    yield block._replace(texts=texts[first:index], numbers=numbers[first:index], ends=True)
                yield from _cut(block._replace(texts=[text], numbers=[numbers[index]]), block_bytes)
                first = index + 1
        if first < len(texts):
            yield block._replace(texts=texts[first:], numbers=numbers[first:])


def _cut(block: Block, block_bytes: int) -> Iterator[Block]:
    """One document in blocks of its own."""
    (text,) = block.texts
    for lo in range(0, len(text), block_bytes):
        hi = min(lo + block_bytes, len(text))
        yield block._replace(texts=[text[lo:hi]], start=block.start + lo, ends=block.ends and hi == len(text))


def _found(path: str | Path, rule: Rule, block_bytes: int) -> Iterator[Block]:
    name = Path(path).name
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    if name.endswith(PARQUET):
        return _rows(path, rule)
    if name.endswith(JSON_LINES):
        return _objects(path, rule, block_bytes)
    if rule.chat:
        raise BadInput(f"{path}: is a text, expected conversations in a file of {', '.join(JSON_LINES)} or {PARQUET}")
    return {"file": _whole, "line": _each_line, "blank": _groups}[rule.documents](path, block_bytes)


def _whole(path: str | Path, block_bytes: int) -> Iterator[Block]:
    with opened(path) as (file, read_bytes):
        start, text = 0, file.read(block_bytes)
        while text:
            following = file.read(block_bytes)
            yield Block([text], [1], "", start, not following, read_bytes())
            start, text = start + len(text), following


def _each_line(path: str | Path, block_bytes: int) -> Iterator[Block]:
    for block in _lines(path, block_bytes):
        has_cr = b"\r" in b"".join(block.texts)
        yield block._replace(texts=[line.rstrip(b"\r") for line in block.texts]) if has_cr else block


def _groups(path: str | Path, block_bytes: int) -> Iterator[Block]:
    """The groups of lines between lines of white space alone."""
    first, start, group = 1, 0, bytearray()
    texts: list[bytes] = []  # of groups that are whole
    numbers: list[int] = []
    read_bytes = 0
    for lines in _lines(path, block_bytes):
        read_bytes = lines.read_bytes
        for number, line in zip(lines.numbers, lines.texts, strict=True):
            is_blank = not line.strip()
            is_long = start > 0 or len(group) >= block_bytes
            if group and (is_blank or len(group) >= block_bytes):
                text = bytes(group.rstrip(b"\r\n") if is_blank else group)
                if is_long:
                    yield Block(texts, numbers, LINE, 0, True, read_bytes)
                    yield Block([text], [first], LINE, start, is_blank, read_bytes)
                    texts, numbers = [], []
                else:
                    texts.append(text)
                    numbers.append(first)
                start, group = 0 if is_blank else start + len(text), bytearray()
            if not is_blank:
                first = first if group or start else number
                group += line + b"\n"
        yield Block(texts, numbers, LINE, 0, True, read_bytes)
        texts, numbers = [], []
    if group:
        yield Block([bytes(group.rstrip(b"\r\n"))], [first], LINE, start, True, read_bytes)


def _objects(path: str | Path, rule: Rule, block_bytes: int) -> Iterator[Block]:
    for lines in _lines(path, block_bytes):
        found = zip(lines.numbers, lines.texts, strict=True)
        yield lines._replace(texts=[_text_of_line(path, number, rule, line) for number, line in found])


def _text_of_line(path: str | Path, number: int, rule: Rule, line: bytes) -> bytes:
    if not line.strip():
        return b""
    place = f"{LINE} {number}"
    try:
        found = parse_json(line.decode())
    except ValueError as error:
        reason = f"{error.msg} at {error.pos}" if isinstance(error, json.JSONDecodeError) else why(error)
        raise BadInput(f"{path}: {place} is no JSON ({reason}), expected an object in each line") from None
    try:
        field = rule.field_of(found if isinstance(found, dict) else ())
    except KeyError as error:
        (field,) = error.args
        if isinstance(found, dict):
            raise BadInput(f"{path}: {place} has no field {field!r}{_others(field, found)}") from None
        hint = f"; to make lines of a list: jq -c '.[]' {path}" if isinstance(found, list) else ""
        expected = f"expected an object with the field {field!r}{hint}"
        raise BadInput(f"{path}: {place} is JSON of another kind, {expected}") from None
    return _document(path, place, rule, field, found[field])


def _rows(path: str | Path, rule: Rule) -> Iterator[Block]:
    if find_spec("pyarrow") is None:
        raise BadInput(f"{path}: needs the module pyarrow, expected the extra data: pip install pyarrow")
    import pyarrow  # pyright: ignore[reportMissingImports]  an extra
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    try:
        with Path(path).open("rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
            columns = file.schema_arrow.names
            try:
                field = rule.field_of(columns)
            except KeyError as error:
                (field,) = error.args
                raise BadInput(f"{path}: has no column {field!r}{_others(field, columns)}") from None
            n_before, file_bytes = 0, Path(path).stat().st_size
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                numbers = range(n_before + 1, n_before + batch.num_rows + 1)
                found = zip(numbers, batch.column(0).to_pylist(), strict=True)
                texts = [_document(path, f"{ROW} {number}", rule, field, text) for number, text in found]
                n_before += batch.num_rows
                read_bytes = file_bytes * n_before // file.metadata.num_rows
                yield Block(texts, numbers, ROW, 0, True, read_bytes)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected a Parquet file") from None


def _document(path: str | Path, place: str, rule: Rule, field: str, found: Any) -> bytes:
    """The document that is in the field of an object or row."""
    if rule.chat:
        found = _conversation(f"{path}: {place}", field, found)
    elif not isinstance(found, str):
        kind = "null" if found is None else type(found).__name__
        raise BadInput(f"{path}: {place} has {kind} in {field!r}, expected a text")
    try:
        return found.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{path}: {place} has half a character ({error.reason}) in {field!r}, expected a text") from None


def _conversation(place: str, field: str, found: Any) -> str:
    """The JSON of messages, each with a role and a content."""
    if not isinstance(found, list) or not found:
        got = "no messages" if found in ([], None) else type(found).__name__
        raise BadInput(f"{place} has {got} in {field!r}, expected a list of messages")
    messages = [_message(f"{place} has in {field!r} message {n}", message) for n, message in enumerate(found, 1)]
    roles = dict.fromkeys(message["role"] for message in messages)
    if ANSWERS not in roles:
        got = ", ".join(map(repr, roles))
        raise BadInput(f"{place} has no answer in {field!r} (roles {got}), expected a message of the role {ANSWERS!r}")
    try:
        return json.dumps(messages, ensure_ascii=False)
    except (RecursionError, TypeError) as error:  # a row of Parquet may hold more than JSON can
        raise BadInput(f"{place} has no JSON in {field!r} ({why(error)}), expected messages") from None


def _message(place: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise BadInput(f"{place} as {type(found).__name__}, expected an object with 'role' and 'content'")
    message = {name: value for name, value in found.items() if value is not None}  # a column has all fields in each row
    if "role" not in message and SPEAKER in message:
        role = message.pop(SPEAKER)
        message = {"role": SPEAKERS.get(role, role) if isinstance(role, str) else role, **message}
        if SAID in message:
            message["content"] = message.pop(SAID)
    if not isinstance(message.get("role"), str):
        raise BadInput(f"{place} with the fields {', '.join(found) or 'none'}, expected a text in 'role'")
    # A content may be a list of parts, and an answer may call tools and say nothing.
    if not isinstance(message.get("content", [] if "tool_calls" in message else None), str | list):
        raise BadInput(f"{place} with the fields {', '.join(found)}, expected a text in 'content'")
    return message


def _others(field: str, names: Any) -> str:
    return f"{nearest(field, names)}; it has {', '.join(map(str, names)) or 'none'}, expected one of them as --field"


def _lines(path: str | Path, block_bytes: int) -> Iterator[Block]:
    """Lines without their ends, also empty ones. All of a block are read at once, which takes a tenth of the time."""
    with opened(path) as (file, read_bytes):
        number = 1
        while text := file.read(min(block_bytes, LINE_BYTES_MAX)):
            last = len(text) - text.rfind(b"\n") - 1  # of the last line, whose rest follows
            rest = file.readline(LINE_BYTES_MAX + 1 - last) if last else b""
            if last + len(rest) > LINE_BYTES_MAX:
                number += text.count(b"\n")
                raise BadInput(f"{path}: line {number} has more than {LINE_BYTES_MAX:,} bytes, expected shorter lines")
            lines = (text + rest).split(b"\n")
            if not lines[-1]:
                lines.pop()
            yield Block(lines, range(number, number + len(lines)), LINE, 0, True, read_bytes())
            number += len(lines)


# ----------------------------------------------------------------------------------------------------------- bytes


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """The file's bytes, decompressed if its name says how, without UTF-8's mark at their start; and how much of the
    file has been read. BadInput, also for UTF-16 and UTF-32: as bytes, every second token of such a text would be a
    zero."""
    suffix = next((suffix for suffix in COMPRESSIONS if str(path).endswith(suffix)), "")
    try:
        with Path(path).open("rb") as raw, io.BufferedReader(COMPRESSIONS[suffix](raw)) if suffix else raw as file:
            text = file.peek(LOOKED_AT_BYTES)[:LOOKED_AT_BYTES]
            if text.startswith(MAGIC):
                hint = f"expected a text; to train on it: --config.data.path={path}"
                raise BadInput(f"{path}: is a token file already, {hint}")
            if encoding := _wide_encoding(text):
                hint = f"to convert it: iconv -f {encoding} -t UTF-8 {path} > {path}.utf8"
                raise BadInput(f"{path}: is {encoding}, expected UTF-8; {hint}")
            if text.startswith(codecs.BOM_UTF8):
                file.read(len(codecs.BOM_UTF8))
            yield file, raw.tell
    except (lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        expected = f"expected all of a{'n' if suffix == '.xz' else ''} {suffix} file"
        raise BadInput(f"{path}: cannot be decompressed ({why(error)}), {expected}") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected a text file") from error


def _wide_encoding(text: bytes) -> str:
    """UTF-16 or UTF-32 where a text begins with its byte order mark, or has a zero in place of the upper bytes of most
    characters; '' for other texts."""
    if text.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    for first, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        upper, lower = text[first::2], text[1 - first :: 2]
        if upper and upper.count(0) > len(upper) / 2 and lower.count(0) < len(lower) / 10:
            return name
    return ""


class _Zstandard(io.RawIOBase):
    """What a .zst file holds, frame after frame. EOFError if the last one is cut off, which the package's own readers
    take for the end."""

    def __init__(self, file: IO[bytes]):
        if find_spec("zstandard") is None:
            raise BadInput(f"{file.name}: needs the module zstandard, expected the extra data: pip install zstandard")
        import zstandard  # pyright: ignore[reportMissingImports]  an extra

        self._file = file
        self._error = zstandard.ZstdError
        self._new_frame: Callable[[], Any] = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._text, self._rest = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            compressed, self._rest = self._rest or self._file.read(COMPRESSED_BYTES), b""
            if not compressed and self._frame:
                raise EOFError("the file ends within a frame")
            if not compressed:
                return 0
            frame = self._frame or self._new_frame()
            try:
                self._text = memoryview(frame.decompress(compressed))
            except self._error as error:
                raise zlib.error(str(error)) from None
            self._rest, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        n_bytes = min(len(buffer), len(self._text))
        buffer[:n_bytes], self._text = self._text[:n_bytes], self._text[n_bytes:]
        return n_bytes


COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {".xz": lzma.open, ".gz": gzip.open, ".zst": _Zstandard}
