"""Pages, from raw data: a Markdown template whose placeholders are filled with values; what both are compared with.

A placeholder is a Python expression in braces, as in an f-string, with a format if there is one: `{100 * share:.1f} %`.
It may use the page's values by name, the names of the module that found them, and `listed`. A brace is written twice.
What it gives is shown by its kind:

    a list of lists      rows of a table, whose head stands in the template
    a list of strings    items of a list
    a float              four significant digits, three from 1e4 on
    else                 its text
"""

import itertools
import json
import os
import statistics
import string
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from matplotlib.image import imread

from jaxdt.runtime.reporting.interval import Interval

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "page.md"
CODE = (
    "jaxdt",
    "planner",
    "scripts",
    "configs/networks",
    "configs/reproduce/traces",
    "configs/reproduce/measurements",
)  # what decides a value


def filled(template: str, module: ModuleType, values: Mapping[str, Any]) -> str:
    """The page of a template. `module`: the one that found the values."""
    names = vars(module) | {"listed": listed} | dict(values)
    parts = []
    for text, expression, form, _ in string.Formatter().parse(template):
        parts.append(text)
        if expression is not None:
            parts.append(shown(eval(expression, names), form or ""))  # the template is part of this repository
    return "".join(parts)


def shown(value: Any, form: str = "") -> str:
    """A value as it stands on a page."""
    if form:
        return format(value, form)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3g}"
    if not isinstance(value, str) and isinstance(value, Sequence) and value:
        return "\n".join(f"- {item}" if isinstance(item, str) else row(item) for item in value)
    return str(value)


def listed(values: Iterable, form: str = "", between: str = ", ") -> str:
    """Values in a sentence."""
    return between.join(format(value, form) for value in values)


def row(cells: Sequence) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(shown, cells)) + " |"


def markdown_table(head: Sequence[str], lines: Iterable[Sequence]) -> str:
    """A table with its head."""
    return "\n".join([row(head), f"|{'---|' * len(head)}", *map(row, lines)])


def spread(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """Mean, and standard deviation if there are several values."""
    deviation = f" +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.{digits}f}{deviation}"


def span(values: Collection[float], form: str) -> str:
    """The least and the largest value."""
    return f"{min(values):{form}} to {max(values):{form}}"


def centred(
    values: Collection[float], form: str, centre: Callable[[Collection[float]], float] = statistics.fmean
) -> str:
    """The mean, or the median as `centre`, and the least and the largest value."""
    return f"{centre(values):{form}} ({span(values, form)})"


def bars(found: Sequence[Interval]) -> tuple[list[float], list[float]]:
    """Means and half widths of intervals, as `errorbar` takes them."""
    return [one.mean for one in found], [one.half for one in found]


# ------------------------------------------------------------------------------------------ raw data, what is committed


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a line to a file of JSON lines and make it durable. An incomplete last line, which a crash may have left,
    is cut off first."""
    line = (json.dumps(record) + "\n").encode()
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def commit() -> str:
    """The commit that is checked out, and whether code or inputs differ from it. Empty outside a git checkout."""
    try:
        name, changed = (_git(*words) for words in (("rev-parse", "--short=7", "HEAD"), ("status", "-s", "--", *CODE)))
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{name} with changes" if changed else name


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def differences(committed: Path, made: Path, files: Collection[str] = ()) -> list[str]:
    """A line for each file that is not alike in both folders, of all of them or of `files`: text and values byte for
    byte, pictures pixel for pixel."""
    lines = []
    files = files or {path.name for folder in (committed, made) for path in folder.iterdir()} - {TEMPLATE}
    for file in sorted(files):
        old, new = committed / file, made / file
        if not old.exists() or not new.exists():
            lines.append(f"{old}: {'is no longer written' if old.exists() else 'is missing'}")
        elif file.endswith(".png"):
            if imread(old).tobytes() != imread(new).tobytes():
                lines.append(f"{old}: the picture differs")
        elif old.read_bytes() != new.read_bytes():
            lines.append(f"{old}: differs from what its command writes: {first_difference(old, new)}")
    return lines


def first_difference(old: Path, new: Path) -> str:
    """The first pair of lines in which two text files differ."""
    pairs = itertools.zip_longest(*(path.read_text().split("\n") for path in (old, new)))
    number, (was, now) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return f"line {number} was {was!r:.200}, now {now!r:.200}"
