"""Markdown for the page of a reproduced figure."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence]) -> str:
    """A markdown table. Floats below 1e4 get four significant digits, larger ones three."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def bullets(lines: Sequence[str]) -> str:
    """A markdown list."""
    return "\n".join(f"- {line}" for line in lines) + "\n"


def page(title: str, origin: str, sections: Sequence[tuple[str, str]]) -> str:
    """A page with sections of (heading, body). `origin` says how the page is made."""
    bodies = [f"## {heading}\n\n{body}" for heading, body in sections]
    return f"# {title}\n\n{origin}\n\n" + "\n".join(bodies)


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3g}"
    return str(value)
