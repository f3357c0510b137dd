"""Versions of the data that old and new processes exchange: the protocol on the wire, and the format of checkpoints.

A new major version means that the two cannot understand each other. A new minor version only adds what the one before
it may leave out: a field with a default, a kind of message that nobody waits for. So neighbouring minor versions may
run together while the processes of a run are replaced one by one.
"""

from dataclasses import dataclass

from jaxdt.run.errors import BadInput


@dataclass(frozen=True)
class Version:
    """A version number; its text is major.minor."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


PROTOCOL = Version(4, 0)
CHECKPOINT = Version(2, 0)


def check_protocol(got: Version) -> None:
    """BadInput unless the other side's version is at most one minor version away."""
    if got.major != PROTOCOL.major or abs(got.minor - PROTOCOL.minor) > 1:
        raise BadInput(f"protocol version: got {got}, expected {_range(max(0, PROTOCOL.minor - 1))}")


def _range(first_minor: int) -> str:
    return f"{Version(PROTOCOL.major, first_minor)} to {Version(PROTOCOL.major, PROTOCOL.minor + 1)}"


def check_checkpoint(got: object, source: str) -> None:
    """BadInput, which names `source`, unless a checkpoint of this version can be read: of the same major version, and
    at most one minor version newer."""
    text = got if isinstance(got, str) else ""
    major, _, minor = text.partition(".")
    is_version = text.isascii() and major.isdigit() and minor.isdigit()
    if not is_version or int(major) != CHECKPOINT.major or int(minor) > CHECKPOINT.minor + 1:
        newest = Version(CHECKPOINT.major, CHECKPOINT.minor + 1)
        raise BadInput(f"{source}: format: got {got!r:.40}, expected {CHECKPOINT.major}.0 to {newest}")
