"""An option of the configuration, said in one place: its default, what it means, and what it accepts. The checks of a
run's config, the help of launch.py and docs/reference/config.md read it there."""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from jaxdt.run.errors import BadInput, nearest

Kind = TypeVar("Kind")

MEANING, ACCEPTS, KEPT, HAS_FLAG = "meaning", "accepts", "kept", "has_flag"
# More is a mistake: a run or a simulation would not end, or break a clock, a timer or a number of 64 bits.
SECONDS_MAX = 1e7  # four months
PEERS_MAX = 4096  # of a stage, and stages
MICROBATCHES_MAX = 1_000_000  # of a step
SAMPLES_MAX = 100_000_000  # of a microbatch; a sample may be a token
SEED_MAX = 2**63 - 1
GBPS_MIN = 1e-6  # a thousand bits a second; less is no link


@dataclass(frozen=True)
class Accepts:
    """What an option accepts: the `text` behind "expected" in a refusal, and whether a value `holds`. `choices`: all
    names that it may have, if it is a name."""

    text: str
    holds: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()


def option(
    default: Any, meaning: str, accepts: Accepts | None = None, *, kept: bool = False, has_flag: bool = True
) -> Any:
    """A field of a dataclass of options. A default of None is accepted, too.

    meaning: a line of its help.
    kept: of a launch; in a resumed run None is what it was.
    has_flag: a script that has these options as flags has this one."""
    more = {KEPT: kept, HAS_FLAG: has_flag}
    return dataclasses.field(default=default, metadata=about(meaning, accepts) | more)


def about(meaning: str, accepts: Accepts | None = None) -> dict[str, Any]:
    """The metadata of an option, for a field that has no default."""
    return {MEANING: meaning, ACCEPTS: accepts}


def at_least(least: int) -> Accepts:
    """An integer of at least this size."""
    return Accepts(f"an integer >= {least}", lambda value: type(value) is int and value >= least)


def in_range(least: int, most: int) -> Accepts:
    """An integer between these."""
    return Accepts(f"an integer in {least}..{most}", lambda value: type(value) is int and least <= value <= most)


def one_of(choices: Iterable[Any]) -> Accepts:
    """One of these names, or numbers."""
    known = tuple(choices)
    return Accepts(f"one of {', '.join(map(str, known))}", known.__contains__, known)


def in_context(text: str) -> Accepts:
    """A rule that other options have a part in: the dataclass checks it by itself, and refuses in such words."""
    return Accepts(text, lambda _: True)


def _number(text: str, holds: Callable[[float], bool]) -> Accepts:
    return Accepts(text, lambda value: isinstance(value, int | float) and type(value) is not bool and holds(value))


def seconds_from(least: float, *, or_endless: bool = False) -> Accepts:
    """A duration of at least so many seconds, and at most SECONDS_MAX, or one without an end."""
    text = f"seconds from {least:g} to {SECONDS_MAX:g}{', or inf' if or_endless else ''}"
    return _number(text, lambda value: least <= value <= SECONDS_MAX or (or_endless and value == math.inf))


def number_in(least: float, most: float) -> Accepts:
    """A number between these."""
    return _number(f"a number from {least:g} to {most:g}", lambda value: least <= value <= most)


SECONDS = seconds_from(0.0)
SECONDS_OR_ENDLESS = seconds_from(0.0, or_endless=True)
GBPS = number_in(GBPS_MIN, math.inf)
GBPS_OR_NONE = _number(f"0, or {GBPS.text}", lambda value: value == 0 or GBPS.holds(value))
FINITE = _number("a finite number", math.isfinite)
POSITIVE = _number("a finite number > 0", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = _number("a finite number >= 0", lambda value: 0 <= value < math.inf)
NOT_NEGATIVE_OR_ENDLESS = _number("a number >= 0", lambda value: value >= 0)
BELOW_ONE = _number("a number in [0, 1)", lambda value: 0 <= value < 1)
UP_TO_ONE = _number("a number in [0, 1]", lambda value: 0 <= value <= 1)
A_BOOL = Accepts("true or false", lambda value: type(value) is bool)


def meaning_of(field: "dataclasses.Field[Any]") -> str:
    """The line of help of an option; "" for a field that is none."""
    return field.metadata.get(MEANING, "")


def accepts_of(field: "dataclasses.Field[Any]") -> Accepts | None:
    """What an option accepts, where more than its type is checked."""
    return field.metadata.get(ACCEPTS)


def kept_names(options: Any) -> list[str]:
    """The names of the options that a resumed run keeps."""
    return [field.name for field in dataclasses.fields(options) if field.metadata.get(KEPT)]


def flag_names(options: Any) -> list[str]:
    """The names of the options that are flags, too."""
    return [field.name for field in dataclasses.fields(options) if field.metadata.get(HAS_FLAG)]


def with_meanings(kind: type[Kind]) -> type[Kind]:
    """Adds a line for each option to the docstring of a dataclass, for help()."""
    fields = [field for field in dataclasses.fields(cast("Any", kind)) if meaning_of(field)]
    lines = [f"{field.name}: {meaning_of(field)}{' (kept)' if field.metadata.get(KEPT) else ''}" for field in fields]
    kind.__doc__ = "\n    ".join([f"{(kind.__doc__ or '').rstrip()}\n", *lines])
    return kind


def require_accepted(options: object, prefix: str) -> None:
    """BadInput for the first option of a dataclass whose value it does not accept. `prefix`: what stands before its
    name, such as "train." or "--"."""
    for name, accepts, default in _rules(type(options)):
        if refused := refusal(getattr(options, name), accepts, default):
            raise BadInput(f"{prefix}{name}: {refused}")


def refusal(value: Any, accepts: Accepts, default: Any) -> str:
    """The value and what was expected, for a value that an option does not accept; else ''."""
    if accepts.holds(value) or (value is None and default is None):
        return ""
    hint = nearest(value, map(str, accepts.choices)) if isinstance(value, str) else ""
    return f"got {value!r}, expected {accepts.text}{hint}"


@functools.cache
def _rules(kind: type[Any]) -> list[tuple[str, Accepts, Any]]:
    kinds = typing.get_type_hints(kind)
    rules: list[tuple[str, Accepts, Any]] = []
    for field in dataclasses.fields(kind):
        accepts = accepts_of(field) or (A_BOOL if kinds[field.name] is bool else None)
        if accepts:
            rules.append((field.name, accepts, field.default))
    return rules
