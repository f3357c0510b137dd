"""Markdown of a reproduced figure: tables, what was assumed, what is not modelled."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence]) -> str:
    """A markdown table; floats get three significant digits."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) + "\n"


def page(title: str, command: str, *parts: tuple[str, str]) -> str:
    """A page of (heading, body) sections."""
    sections = [f"## {heading}\n\n{body}" for heading, body in parts]
    return f"# {title}\n\n`{command}` writes this page and its pictures.\n\n" + "\n".join(sections)


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3g}"
    return str(value)
