"""The verdict of verification on one claim of a plan."""

from dataclasses import dataclass

TRUE, FALSE, UNCHECKED = "true", "FALSE", "unchecked"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim: TRUE, FALSE or UNCHECKED, and the reason."""

    state: str
    text: str


def verdict(holds: bool, text: str) -> Verdict:
    return Verdict(TRUE if holds else FALSE, text)
