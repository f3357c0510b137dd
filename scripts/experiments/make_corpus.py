"""Make a larger corpus, about 80 MB of English prose, from Debian documentation packages.

    python scripts/make_corpus.py --out=runs/prose [--cache=DIR] [--packages=a,b,c]
    python scripts/prepare_data.py --train=runs/prose/train.txt --eval=runs/prose/heldout.txt --tokenizer=gpt2 \\
        --out=runs/prose/gpt2.tok

Needs Debian or a relative of it with `apt-get` (after `apt-get update`; no root) and `dpkg-deb`; about 230 MB are
downloaded from where the machine's own apt points to. Paragraphs that were seen before are left out, also between
packages. SOURCES.md beside the texts lists every package with version, licences and share; the texts are not part of
this repository. The same package versions give the same texts.
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
from jaxdt.spec.errors import BadInput

PACKAGES = """
debian-handbook debian-reference-en developers-reference maint-guide debian-policy debian-kernel-handbook
live-manual-html harden-doc aptitude-doc-en apt-doc linux-doc-6.1 manpages manpages-dev libvirt-doc xen-doc sudo
zsh-doc bash-doc slurm-wlm-doc postgresql-doc-15 sqlite3-doc apache2-doc bind9-doc exim4-doc-html postfix-doc nova-doc
cinder-doc keystone-doc neutron-doc borgbackup-doc git-doc mercurial-common subversion mutt autoconf-doc cmake-doc
doxygen-doc python3.11-doc python-django-doc python-sqlalchemy-doc perl-doc erlang-doc guile-3.0-doc octave-doc
fp-docs-3.2.2 nim-doc sbcl-doc r-doc-html lilypond-doc-html libreoffice-help-en-us
""".split()  # noqa: SIM905
# One document in so many is held out, drawn by its name and not by its place.
HELD_OUT_ONE_IN = 64
ENGLISH = ("en", "en_us", "en-us", "en_gb", "c")
OTHER_LANGUAGE = re.compile(r"[a-z]{2}(?:[_-][a-z]{2,4})?")
LANGUAGES = frozenset(
    ["ar", "bg", "ca", "cs", "da", "de", "el", "eo", "es", "et", "eu", "fa", "fi", "fr", "gl", "he", "hr", "hu", "id"]
    + ["it", "ja", "ko", "lt", "lv", "nb", "nl", "nn", "no", "pl", "pt", "ro", "ru", "sk", "sl", "sr", "sv", "tr", "uk"]
    + ["vi", "zh"]
)
# Lists of changes, by their files' names.
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

QUIET = not sys.stdout.isatty()  # no progress bars into a file

_OUT = flags.DEFINE_string("out", "runs/prose", "folder for train.txt, heldout.txt and SOURCES.md")
_CACHE = flags.DEFINE_string("cache", None, "folder that keeps the downloaded packages (default: none are kept)")
_PACKAGES = flags.DEFINE_list("packages", PACKAGES, "the packages to take")


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
    """(name, text) of the English files of an unpacked package, in order of their names, lists of changes left out; a
    manual that comes in HTML is not read again in Info, a page not again in the source that it was made from."""
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
    """False where a folder or a suffix of the name is the code of another language."""
    for part in re.split(r"[/.]", name.lower())[:-1]:
        if part not in ENGLISH and OTHER_LANGUAGE.fullmatch(part) and re.split("[_-]", part)[0] in LANGUAGES:
            return False
    return True


def copyright_of(package: str, folder: Path, cache: Path) -> str:
    """The copyright file of an unpacked package; where its folder is a link to another package's, that one's."""
    documentation = folder / "usr/share/doc" / package
    if documentation.is_symlink():
        package = documentation.readlink().name
        subprocess.run(["dpkg-deb", "--extract", str(download(package, cache).resolve()), str(folder)], check=True)
    notice = folder / "usr/share/doc" / package / "copyright"
    return notice.read_text(errors="replace") if notice.is_file() else ""


def licences(copyright_text: str) -> str:
    """The names in a machine-readable copyright file, else those of the well-known licences that it mentions."""
    names = [] if re.search(r"^License:\s*$", copyright_text, flags=re.MULTILINE) else LICENCE.findall(copyright_text)
    if not names:
        names = re.findall(r"common-licenses/([\w.+-]*\w)", copyright_text) + re.findall(WELL_KNOWN, copyright_text)
    return ", ".join(sorted({name.strip().replace("|", "or") for name in names})) or "see its copyright file"


class Corpus:
    """The two texts under way; a paragraph is written once, whatever signs stand between its letters and digits (the
    same page often comes in two formats)."""

    def __init__(self, out: Path):
        out.mkdir(parents=True, exist_ok=True)
        self._files = {False: (out / "train.txt").open("w"), True: (out / "heldout.txt").open("w")}
        self._seen: set[bytes] = set()
        self.n_bytes = 0

    def add(self, package: str, name: str, text: str) -> None:
        """The new paragraphs of a document, and an empty line or two behind it."""
        fresh = [paragraph for paragraph in paragraphs(name, text) if self._is_new(paragraph)]
        if fresh:
            chosen = hashlib.sha256(f"{package} {name}".encode()).digest()
            content = "\n\n".join(fresh) + "\n\n\n"
            self._files[int.from_bytes(chosen[:4], "big") % HELD_OUT_ONE_IN == 0].write(content)
            self.n_bytes += len(content.encode())

    def _is_new(self, paragraph: str) -> bool:
        digest = hashlib.sha256(re.sub(r"[\W_]+", "", paragraph.lower()).encode()).digest()[:12]
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True

    def close(self) -> None:
        """Both files are complete after this."""
        for file in self._files.values():
            file.close()


def add_package(corpus: Corpus, package: str, deb: Path, cache: Path) -> str:
    """Add a package's prose; its line of SOURCES.md."""
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
    """Fill `out`; returns the summary line."""
    out.mkdir(parents=True, exist_ok=True)  # before anything is fetched for it
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
