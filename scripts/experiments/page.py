"""Pages: a Markdown template whose placeholders are filled with values.

A placeholder is a Python expression in braces, as in an f-string, with a format if there is one: `{100 * share:.1f} %`.
It may use the page's values by name, the names of the module that found them, and `listed`. A brace is written twice.
What it gives is shown by its kind:

    a list of lists      rows of a table, whose head stands in the template
    a list of strings    items of a list
    a float              four significant digits, three from 1e4 on
    else                 its text
"""

import string
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

TEMPLATE = "page.md"


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
