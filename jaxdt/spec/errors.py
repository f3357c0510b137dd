"""The one exception for input that a person or a file got wrong."""

import difflib
from collections.abc import Iterable


class BadInput(Exception):
    """One line: which field or file, what came, what was expected. Scripts print it and exit with code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean "x"?)' for the known name closest to `name`, or '' when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f' (did you mean "{close[0]}"?)' if close else ""
