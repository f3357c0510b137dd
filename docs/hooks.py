"""mkdocs hook: the site also shows files of the repository that the pages link to.

Pages in docs/ link to files outside of it (`../configs/study/README.md`), as GitHub wants it. mkdocs knows the files of
docs/ only. So README.md becomes the home page, every other linked file is added as `repository/<its path>`, and links
are rewritten to match. A link to a file that does not exist stays as it is, and `mkdocs build --strict` refuses it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
HOME = "README.md"
FENCE = re.compile(r"^ *```", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")  # a relative link: its target holds no scheme


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the home page and every file that a page leads to."""
    pages = [HOME, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(pages)
    while pages:
        page = pages.pop()
        for target in targets(page):
            if target not in seen and (ROOT / target).is_file() and not target.startswith("docs/"):
                seen.add(target)
                pages.append(target)
    for path in sorted(seen):
        if not path.startswith("docs/"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a page as the site needs them."""
    here = page.file.src_uri

    def rewritten(match: re.Match) -> str:
        target = site_path(resolved(repository_path(here), match[2]))
        return match[1] + posixpath.relpath(target, posixpath.dirname(here) or ".") + match[3]

    parts = FENCE.split(markdown)  # every second part stands inside a code block
    return "```".join(part if i % 2 else LINK.sub(rewritten, part) for i, part in enumerate(parts))


def targets(page: str) -> list[str]:
    """Paths in the repository that a Markdown file links to; none for any other file."""
    if not page.endswith(".md"):
        return []
    outside_code = "\n".join(FENCE.split((ROOT / page).read_text())[::2])
    return [resolved(page, match[2]) for match in LINK.finditer(outside_code)]


def resolved(page: str, link: str) -> str:
    """The path in the repository that a link of a file leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def site_path(path: str) -> str:
    """Where a file of the repository stands among the site's sources."""
    if path == HOME:
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def repository_path(site: str) -> str:
    """The inverse of site_path."""
    if site == "index.md":
        return HOME
    return site.removeprefix("repository/") if site.startswith("repository/") else f"docs/{site}"
