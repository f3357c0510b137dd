"""Documents in files: texts, lines of JSON, or a column of a Parquet file. Texts and JSON may be compressed.

A text file is one document, or each of its lines is one, or each group of lines between blank ones. Long documents come
in spans, so that a file may be larger than the memory.
"""

import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
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


class Rule(NamedTuple):
    """What is a document. `documents`: of a text file, one of RULES. `field`: of an object of JSON, or the column."""

    documents: str = "file"
    field: str = "text"


class Span(NamedTuple):
    """Some bytes of a document. `place`: of the document in the file, '' where it is the file; `start`: the number of
    the first byte in the document; `ends`: no more of the document follows."""

    text: bytes
    place: str
    start: int
    ends: bool


def spans(path: str | Path, rule: Rule, span_bytes: int) -> Iterator[Span]:
    """The documents of a file that are not empty, in order, in spans of at most `span_bytes`. Raises BadInput for what
    cannot be read or decompressed, for UTF-16 and UTF-32, and for a line or row without a text."""
    for text, place, start, ends in _found(path, rule, span_bytes):
        for lo in range(0, len(text), span_bytes):
            hi = min(lo + span_bytes, len(text))
            yield Span(text[lo:hi], place, start + lo, ends and hi == len(text))


def _found(path: str | Path, rule: Rule, span_bytes: int) -> Iterator[Span]:
    name = Path(path).name
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    if name.endswith(PARQUET):
        return _rows(path, rule.field)
    if name.endswith(JSON_LINES):
        return _objects(path, rule.field)
    return {"file": _whole, "line": _each_line, "blank": _groups}[rule.documents](path, span_bytes)


def _whole(path: str | Path, span_bytes: int) -> Iterator[Span]:
    with opened(path) as file:
        start, text = 0, file.read(span_bytes)
        while text:
            following = file.read(span_bytes)
            yield Span(text, "", start, not following)
            start, text = start + len(text), following


def _each_line(path: str | Path, span_bytes: int) -> Iterator[Span]:
    for place, line in _lines(path):
        if text := line.rstrip(b"\r\n"):
            yield Span(text, place, 0, True)


def _groups(path: str | Path, span_bytes: int) -> Iterator[Span]:
    """The groups of lines between lines of white space alone."""
    first, start, text = "", 0, bytearray()
    for place, line in _lines(path):
        if not line.strip():
            if text:
                yield Span(bytes(text.rstrip(b"\r\n")), first, start, True)
            start, text = 0, bytearray()
            continue
        if not text:
            first = place
        elif len(text) >= span_bytes:
            yield Span(bytes(text), first, start, False)
            start, text = start + len(text), bytearray()
        text += line
    if text:
        yield Span(bytes(text.rstrip(b"\r\n")), first, start, True)


def _objects(path: str | Path, field: str) -> Iterator[Span]:
    for place, line in _lines(path):
        if not line.strip():
            continue
        try:
            found = parse_json(line.decode())
        except ValueError as error:
            reason = f"{error.msg} at {error.pos}" if isinstance(error, json.JSONDecodeError) else why(error)
            raise BadInput(f"{path}: {place} is no JSON ({reason}), expected an object in each line") from None
        if not isinstance(found, dict):
            raise BadInput(f"{path}: {place} is JSON of another kind, expected an object with the field {field!r}")
        if field not in found:
            raise BadInput(f"{path}: {place} has no field {field!r}{_others(field, found)}")
        yield from _row(path, place, field, found[field])


def _rows(path: str | Path, field: str) -> Iterator[Span]:
    if find_spec("pyarrow") is None:
        raise BadInput(f"{path}: needs the module pyarrow, expected the extra data: pip install pyarrow")
    import pyarrow  # pyright: ignore[reportMissingImports]  an extra
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    try:
        with Path(path).open("rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                raise BadInput(f"{path}: has no column {field!r}{_others(field, columns)}")
            n_before = 0
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for row, text in enumerate(batch.column(0).to_pylist(), n_before + 1):
                    yield from _row(path, f"row {row}", field, text)
                n_before += batch.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected a Parquet file") from None


def _row(path: str | Path, place: str, field: str, found: Any) -> Iterator[Span]:
    """The document that is in the field of an object or row."""
    if not isinstance(found, str):
        kind = "null" if found is None else type(found).__name__
        raise BadInput(f"{path}: {place} has {kind} in {field!r}, expected a text")
    try:
        text = found.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{path}: {place} has half a character ({error.reason}) in {field!r}, expected a text") from None
    if text:
        yield Span(text, place, 0, True)


def _others(field: str, names: Any) -> str:
    return f"{nearest(field, names)}; it has {', '.join(map(str, names)) or 'none'}, expected one of them as --field"


def _lines(path: str | Path) -> Iterator[tuple[str, bytes]]:
    """Lines with their ends and places."""
    with opened(path) as file:
        number = 1
        while line := file.readline(LINE_BYTES_MAX + 1):
            if len(line) > LINE_BYTES_MAX:
                raise BadInput(f"{path}: line {number} has more than {LINE_BYTES_MAX:,} bytes, expected shorter lines")
            yield f"line {number}", line
            number += 1


# ----------------------------------------------------------------------------------------------------------- bytes


@contextmanager
def opened(path: str | Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed if its name says how, without UTF-8's mark at their start. BadInput, also for
    UTF-16 and UTF-32: as bytes, every second token of such a text would be a zero."""
    suffix = next((suffix for suffix in COMPRESSIONS if str(path).endswith(suffix)), "")
    try:
        with io.BufferedReader(COMPRESSIONS[suffix](path)) if suffix else Path(path).open("rb") as file:
            text = file.peek(LOOKED_AT_BYTES)[:LOOKED_AT_BYTES]
            if text.startswith(MAGIC):
                hint = f"expected a text; to train on it: --config.data.path={path}"
                raise BadInput(f"{path}: is a token file already, {hint}")
            if encoding := _wide_encoding(text):
                hint = f"to convert it: iconv -f {encoding} -t UTF-8 {path} > {path}.utf8"
                raise BadInput(f"{path}: is {encoding}, expected UTF-8; {hint}")
            if text.startswith(codecs.BOM_UTF8):
                file.read(len(codecs.BOM_UTF8))
            yield file
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

    def __init__(self, path: str | Path):
        if find_spec("zstandard") is None:
            raise BadInput(f"{path}: needs the module zstandard, expected the extra data: pip install zstandard")
        import zstandard  # pyright: ignore[reportMissingImports]  an extra

        self._file = open(path, "rb")  # noqa: SIM115  this object closes it
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

    def close(self) -> None:
        self._file.close()
        super().close()


COMPRESSIONS: dict[str, Callable[[str | Path], Any]] = {".xz": lzma.open, ".gz": gzip.open, ".zst": _Zstandard}
