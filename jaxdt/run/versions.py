"""Versions of the data that old and new processes exchange: the protocol on the wire, and the format of checkpoints.

The protocol has one number, and all processes of a run speak the same one. A checkpoint outlives the program that wrote
it, so its format has two: a new major version cannot be read, a new minor one only adds fields that may be left out.
"""

from dataclasses import dataclass

from jaxdt.run.errors import BadInput


@dataclass(frozen=True)
class Version:
    """A version of the format of checkpoints; its text is major.minor."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


PROTOCOL = 6
CHECKPOINT = Version(2, 0)


def check_checkpoint(got: object, source: str) -> None:
    """BadInput, which names `source`, unless a checkpoint of this version can be read: of the same major version, and
    at most one minor version newer."""
    text = got if isinstance(got, str) else ""
    major, _, minor = text.partition(".")
    is_version = text.isascii() and major.isdigit() and minor.isdigit()
    if not is_version or int(major) != CHECKPOINT.major or int(minor) > CHECKPOINT.minor + 1:
        newest = Version(CHECKPOINT.major, CHECKPOINT.minor + 1)
        raise BadInput(f"{source}: format: got {got!r:.40}, expected {CHECKPOINT.major}.0 to {newest}")
