"""README, BUILD.md and docs/ name what exists (links, paths, modules, flags, fields); the reference is current."""

import dataclasses
import os
import posixpath
import re
import subprocess
import sys
import typing
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxdt.run.config import RunConfig
from jaxdt.run.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parent.parent
GUIDES = [ROOT / "README.md", ROOT / "BUILD.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*GUIDES, ROOT / "CHANGELOG.md", *sorted((ROOT / "configs").rglob("*.md"))]
README_LINES_MAX = 178

FENCE = re.compile(r"^ *```", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)
REPOSITORY_PATH = re.compile(r"(?<![\w./-])((?:jaxdt|planner|configs|scripts|tests|docs|requirements)/[\w./*{},-]*)")
FILE_NAME = re.compile(r"(?<![\w/.*-])(\w+\.(?:py|sh))\b")  # without its folder
MODULE = re.compile(r"`((?:jaxdt|planner)(?:\.\w+)+)")
SECTIONS = [name for name, kind in typing.get_type_hints(RunConfig).items() if dataclasses.is_dataclass(kind)]
FIELD = re.compile(rf"(?:--config\.|`)((?:{'|'.join(SECTIONS)})\.\w+)")
COMMAND = re.compile(r"(?:python|-m) [\w./ ]*?(?:scripts/[\w/]+\.py|planner)[^`\n\\]*(?:\\\n[^`\n\\]*)*")
FLAG = re.compile(r"(?<![\w-])--(\w+)")
RUN_DIR, AGAINST = re.compile(r"--run_dir=([\w/]+)"), re.compile(r"--against=([\w/,]+)")
DEFINED = re.compile(r"""(?:DEFINE_\w+|add_argument)\(\s*["'](?:--)?(\w+)["']""")
OPTION = re.compile(r"^    (\w+): [^=\n]+ = option\((?![^)]*has_flag=False)", re.MULTILINE)  # beside the config's own
OF_EVERY_SCRIPT = {"config", "help", "helpfull", "flagfile"}
NOT_FIELDS = {"json", "py", "png", "jsonl", "md"}  # `plan.json` is a file
NO_PATHS = {"configs/reproduce/TARGET/README.md"}  # a placeholder


def outside_code(text: str) -> str:
    """A page without its code blocks."""
    return "\n".join(FENCE.split(text)[::2])


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in HEADING.findall(outside_code(text)))
    return {re.sub(r"\s+", "-", heading.strip()) for heading in plain}


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_merge_is_left_half_done(page):
    marks = [line for line in page.read_text().splitlines() if line.startswith(("<" * 7, ">" * 7))]
    assert not marks, f"{named(page)}: {marks}, expected one of the two sides"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_and_headings(page):
    links = [link for link in LINK.findall(outside_code(page.read_text())) if "://" not in link]
    broken = [link for link in links if not leads_somewhere(page, link)]
    assert not broken, f"{named(page)}: these links lead nowhere: {broken}"


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether a relative link of a page leads to a file of the repository, and its anchor to a heading there."""
    path, _, anchor = link.partition("#")
    target = Path(posixpath.normpath(page.parent / path)) if path else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return False
    return not anchor or anchor in anchors(target.read_text())


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_paths_and_modules_exist(page):
    text = page.read_text()
    paths = {path.rstrip(".,") for path in REPOSITORY_PATH.findall(text)} - NO_PATHS
    missing = [path for path in sorted(paths) if not any(True for _ in expanded(path))]
    modules = {module for module in MODULE.findall(text) if not exists_in(module)}
    assert not missing and not modules, f"{named(page)}: not in the repository: {missing} {sorted(modules)}"


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_file_names_exist_somewhere(page):
    known = {
        path.name for folder in ("jaxdt", "planner", "configs", "scripts", "tests", "docs") for path in files(folder)
    }
    unknown = sorted(set(FILE_NAME.findall(page.read_text())) - known)
    assert not unknown, f"{named(page)}: no folder holds {unknown}"


def files(folder: str) -> list[Path]:
    return [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.sh")]


def expanded(path: str) -> list[Path]:
    """The files of a path, which may hold * and {a,b} as in a shell."""
    braces = re.match(r"(.*)\{(.*)\}(.*)", path)
    if braces:
        return [one for word in braces[2].split(",") for one in expanded(braces[1] + word + braces[3])]
    return list(ROOT.glob(path.rstrip("/")))


def exists_in(dotted: str) -> bool:
    """Whether a dotted name is a module, a package, or a name in a module's text."""
    *parts, last = dotted.split(".")
    whole, inside = ROOT.joinpath(*parts, last), ROOT.joinpath(*parts).with_suffix(".py")
    if whole.is_dir() or whole.with_suffix(".py").exists():
        return True
    return inside.exists() and re.search(rf"\b{last}\b", inside.read_text()) is not None


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_config_fields_exist(page):
    found = {name for name in FIELD.findall(page.read_text()) if name.rpartition(".")[2] not in NOT_FIELDS}
    unknown = sorted(found - config_fields())
    assert not unknown, f"{named(page)}: the config has no {unknown}"


def config_fields() -> set[str]:
    """Every field as section.field; a model also has a preset."""
    kinds = typing.get_type_hints(RunConfig)
    return {"model.preset"} | {f"{name}.{one.name}" for name in SECTIONS for one in dataclasses.fields(kinds[name])}


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_runs_that_a_page_compares_are_made_by_commands_of_the_page(page):
    commands = COMMAND.findall(page.read_text())
    made = {run for command in commands if "launch.py" in command for run in RUN_DIR.findall(command)}
    compared = [command for command in commands if "--against=" in command]
    named_runs = {
        run
        for command in compared
        for runs in (*RUN_DIR.findall(command), *AGAINST.findall(command))
        for run in runs.split(",")
    }
    assert named_runs <= made, f"{named(page)}: no command makes {sorted(named_runs - made)}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_flags_of_commands_exist(page):
    sources = [path for folder in ("jaxdt", "planner", "scripts") for path in (ROOT / folder).rglob("*.py")]
    defined = OF_EVERY_SCRIPT.union(*(DEFINED.findall(path.read_text()) for path in sources))
    outside = [path for path in sources if not path.is_relative_to(ROOT / "jaxdt/run")]
    defined = defined.union(*(OPTION.findall(path.read_text()) for path in outside))
    used = {flag for command in COMMAND.findall(page.read_text()) for flag in FLAG.findall(command)}
    unknown = sorted(used - defined)
    assert not unknown, f"{named(page)}: no script defines the flags {unknown}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


def test_every_page_of_docs_is_in_the_navigation():
    listed = re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(listed), f"mkdocs.yml does not list {sorted(pages - set(listed))}"


def run(*command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_generated_pages_and_tables_are_current():
    done = run(sys.executable, "docs/generate.py", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds(tmp_path):
    done = run(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").exists()
    assert (tmp_path / "site" / "repository" / "configs" / "study" / "study.png").exists()


QUOTES = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("evidence.md", "codecs.md", "replicas.md"))]
RESULTS = re.compile(r"\]\((?:\.\./)?(configs/[\w/]+\.md)[^)]*\)")
DECIMAL = re.compile(r"(?<![\w.-])\d+\.\d{2,}(?![\w.]*\d)")


def passages(text: str) -> list[str]:
    """The rows of tables and the paragraphs of a page, without its code."""
    parts = [line for block in re.split(r"\n\s*\n", outside_code(text)) for line in re.split(r"\n(?=[|-])", block)]
    return [re.sub(r"`[^`]*`", "", part) for part in parts]


@pytest.mark.parametrize("page", QUOTES, ids=named)
def test_quoted_figures_stand_on_the_page_that_is_linked(page):
    """Decimals in a row or paragraph that links pages of results stand on one of these pages."""
    quoted = 0
    for passage in passages(page.read_text()):
        results = "".join((ROOT / path).read_text() for path in RESULTS.findall(passage))
        figures = DECIMAL.findall(re.sub(r"\]\([^)]*\)", "", passage)) if results else []
        quoted += len(figures)
        missing = [figure for figure in figures if figure not in results]
        assert not missing, f"{named(page)}: {missing}, which the linked page does not have: {passage[:120]}"
    assert quoted


def test_the_page_of_exit_codes_has_them_all():
    rows = [f"| {code:d} | {code.meaning} | {code.who} |" for code in ExitCode]
    page = (ROOT / "docs/reference/exit_codes.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| ")][1:] == rows
