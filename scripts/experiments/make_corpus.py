"""Make a larger corpus, about 80 MB of English prose, from Debian documentation packages.

    python scripts/experiments/make_corpus.py --out=runs/prose [--cache=DIR] [--packages=a,b,c]
    python scripts/prepare_data.py --train=runs/prose/train.txt --eval=runs/prose/heldout.txt --tokenizer=gpt2 \\
        --out=runs/prose/gpt2.tok

Needs Debian or a distribution derived from it with `apt-get` (after `apt-get update`; no root) and `dpkg-deb`. About
230 MB are downloaded from the package sources of this machine. A paragraph that occurs more than once, in one package
or in several, is written once. SOURCES.md beside the texts lists every package with its version, licences and size. The
texts are not part of this repository. The same package versions give the same texts.
"""

import gzip
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from absl import flags
from prose import paragraphs
from rich.progress import track

from jaxdt.cli import script_main
from jaxdt.run.errors import BadInput

PACKAGES = re.findall(
    r"\S+",
    """
debian-handbook debian-reference-en developers-reference maint-guide debian-policy debian-kernel-handbook
live-manual-html harden-doc aptitude-doc-en apt-doc linux-doc-6.1 manpages manpages-dev libvirt-doc xen-doc sudo
zsh-doc bash-doc slurm-wlm-doc postgresql-doc-15 sqlite3-doc apache2-doc bind9-doc exim4-doc-html postfix-doc nova-doc
cinder-doc keystone-doc neutron-doc borgbackup-doc git-doc mercurial-common subversion mutt autoconf-doc cmake-doc
doxygen-doc python3.11-doc python-django-doc python-sqlalchemy-doc perl-doc erlang-doc guile-3.0-doc octave-doc
fp-docs-3.2.2 nim-doc sbcl-doc r-doc-html lilypond-doc-html libreoffice-help-en-us
""",
)
# One document in so many is held out. It is chosen by its name, so other documents do not change the choice.
HELD_OUT_ONE_IN = 64
ENGLISH = ("en", "en_us", "en-us", "en_gb", "c")
OTHER_LANGUAGE = re.compile(r"[a-z]{2}(?:[_-][a-z]{2,4})?")
LANGUAGES = frozenset(
    ["ar", "bg", "ca", "cs", "da", "de", "el", "eo", "es", "et", "eu", "fa", "fi", "fr", "gl", "he", "hr", "hu", "id"]
    + ["it", "ja", "ko", "lt", "lv", "nb", "nl", "nn", "no", "pl", "pt", "ro", "ru", "sk", "sl", "sr", "sv", "tr", "uk"]
    + ["vi", "zh"]
)
# Names of files that contain lists of changes.
CHANGES = re.compile(
    r"changelog|release_?notes|/(?:releases?|relnotes)/|/(?:old)?(?:news|changes|history|notes)\b[^/]*$"
    r"|/release-[\d-]+\.html$|/perl\d*delta\b[^/]*$",
    re.IGNORECASE,
)
LICENCE = re.compile(r"^License:[ \t]*(\S.*)$", re.MULTILINE)
WELL_KNOWN = (
    r"\b(?:GNU (?:\w+ ){1,3}License|BSD|MIT|Apache License|PostgreSQL License|Python License|[Pp]ublic domain"
    r"|CC BY(?:-SA)?)\b"
)

QUIET = not sys.stdout.isatty()  # a progress bar would fill a file with lines

_OUT = flags.DEFINE_string("out", "runs/prose", "folder for train.txt, heldout.txt and SOURCES.md")
_CACHE = flags.DEFINE_string("cache", None, "folder that keeps the downloaded packages (default: none are kept)")
_PACKAGES = flags.DEFINE_list("packages", PACKAGES, "names of the packages")


def download(package: str, cache: Path) -> Path:
    """The package's file in `cache`, fetched by apt if it is not there."""
    found = sorted(cache.glob(f"{package}_*.deb"))
    if not found:
        done = subprocess.run(["apt-get", "--quiet", "download", package], cwd=cache, capture_output=True, text=True)
        found = sorted(cache.glob(f"{package}_*.deb"))
        if done.returncode or not found:
            reason = (done.stderr.strip().splitlines() or ["no file"])[-1]
            raise BadInput(f"{package}: apt-get download failed ({reason}), expected a package of this Debian release")
    return found[-1]


def documents(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of the English files of an unpacked package, in order of their names, without lists of changes. If a
    manual is there as HTML, its Info file and the sources of its pages are left out."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    names = {str(path.relative_to(folder)): path for path in files}
    wanted = {name: path for name, path in names.items() if is_english(name) and not CHANGES.search(name)}
    pages = {(path.parent.name, path.stem) for path in wanted.values() if path.suffix == ".html"}
    for name, path in wanted.items():
        is_source = "_sources/" in name or (path.parent.name, re.split(r"\.(?:rst|txt)", path.name)[0]) in pages
        is_info = re.search(r"\.info(-\d+)?(\.gz)?$", name)
        if path.suffix == ".html" or not (pages and (is_source or is_info)):
            content = path.read_bytes()
            if name.endswith(".gz"):
                name, content = name.removesuffix(".gz"), gzip.decompress(content)
            yield name, content.decode("utf-8", errors="replace")


def is_english(name: str) -> bool:
    """False if a folder or a suffix in the name is the code of another language."""
    for part in re.split(r"[/.]", name.lower())[:-1]:
        if part not in ENGLISH and OTHER_LANGUAGE.fullmatch(part) and re.split("[_-]", part)[0] in LANGUAGES:
            return False
    return True


def copyright_of(package: str, folder: Path, cache: Path) -> str:
    """The text of the copyright file of an unpacked package. If its documentation folder is a link to that of another
    package, the text of the other package's file."""
    documentation = folder / "usr/share/doc" / package
    if documentation.is_symlink():
        package = documentation.readlink().name
        subprocess.run(["dpkg-deb", "--extract", str(download(package, cache).resolve()), str(folder)], check=True)
    notice = folder / "usr/share/doc" / package / "copyright"
    return notice.read_text(errors="replace") if notice.is_file() else ""


def licences(copyright_text: str) -> str:
    """The names of the licences in a machine-readable copyright file, or the well-known licences that another copyright
    file mentions."""
    names = [] if re.search(r"^License:\s*$", copyright_text, flags=re.MULTILINE) else LICENCE.findall(copyright_text)
    if not names:
        names = re.findall(r"common-licenses/([\w.+-]*\w)", copyright_text) + re.findall(WELL_KNOWN, copyright_text)
    return ", ".join(sorted({name.strip().replace("|", "or") for name in names})) or "see its copyright file"


class Corpus:
    """The two text files while they are written. Paragraphs with the same letters and digits are written once, whatever
    is between them: a page often exists in two formats."""

    def __init__(self, out: Path):
        out.mkdir(parents=True, exist_ok=True)
        self._files = {False: (out / "train.txt").open("w"), True: (out / "heldout.txt").open("w")}
        self._seen: set[bytes] = set()
        self.n_bytes = 0

    def add(self, package: str, name: str, text: str) -> None:
        """Write the paragraphs of a document that are new, and two empty lines after them."""
        new = [paragraph for paragraph in paragraphs(name, text) if self._is_new(paragraph)]
        if new:
            digest = hashlib.sha256(f"{package} {name}".encode()).digest()
            is_held_out = int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0
            content = "\n\n".join(new) + "\n\n\n"
            self._files[is_held_out].write(content)
            self.n_bytes += len(content.encode())

    def _is_new(self, paragraph: str) -> bool:
        digest = hashlib.sha256(re.sub(r"[\W_]+", "", paragraph.lower()).encode()).digest()[:12]
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True

    def close(self) -> None:
        """Complete both files."""
        for file in self._files.values():
            file.close()


def add_package(corpus: Corpus, package: str, deb: Path, cache: Path) -> str:
    """Add the prose of a package. Returns its line for SOURCES.md."""
    before = corpus.n_bytes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["dpkg-deb", "--extract", str(deb.resolve()), name], check=True)
        for document, text in documents(folder):
            corpus.add(package, document, text)
        licence = licences(copyright_of(package, folder, cache))
    version = deb.name.split("_")[1].replace("%3a", ":")
    return f"| {package} | {version} | {licence} | {(corpus.n_bytes - before) / 1e6:.2f} |"


def build(out: Path, cache: Path, packages: list[str]) -> str:
    """Write the texts and SOURCES.md to `out`. Returns one line about them."""
    out.mkdir(parents=True, exist_ok=True)  # fails before anything is downloaded
    debs = {package: download(package, cache) for package in track(packages, "downloading", disable=QUIET)}
    corpus = Corpus(out)
    lines = [
        add_package(corpus, package, deb, cache) for package, deb in track(list(debs.items()), "reading", disable=QUIET)
    ]
    corpus.close()
    head = (
        "Prose taken from these Debian packages, each under its own licences.\n\n| package | version | licences | MB |"
    )
    (out / "SOURCES.md").write_text("\n".join([head, "|---|---|---|---|", *lines]) + "\n")
    sizes = ", ".join(f"{name} {(out / name).stat().st_size / 1e6:.1f} MB" for name in ("train.txt", "heldout.txt"))
    return f"{out}: {len(packages)} packages, {sizes}; versions and licences in SOURCES.md"


def main() -> None:
    if not _PACKAGES.value:
        raise BadInput("--packages: got none, expected the names of packages")
    for program in ("apt-get", "dpkg-deb"):
        if not shutil.which(program):
            raise BadInput(f"{program}: not found, expected Debian or a relative of it")
    with tempfile.TemporaryDirectory() as name:
        cache = Path(_CACHE.value or name)
        cache.mkdir(parents=True, exist_ok=True)
        print(build(Path(_OUT.value), cache, _PACKAGES.value))


if __name__ == "__main__":
    script_main.run(main)
