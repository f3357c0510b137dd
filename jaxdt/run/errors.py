"""The one exception for input that a person or a file got wrong, the checks that most fields need, and the form of
commands that a line tells a person to type."""

import difflib
import io
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, cast


class BadInput(Exception):
    """One line that says which field or file is wrong, what it holds and what was expected. Scripts print the line and
    exit with code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean "x"?)' for the known name closest to `name`, or '' when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f' (did you mean "{close[0]}"?)' if close else ""


def unreadable(path: str | Path, error: OSError | UnicodeDecodeError, *more_folders: str | Path) -> BadInput:
    """The error for a file that could not be read. For one that does not exist it names the file of the most similar
    name, among those of its kind in its own folder and in `more_folders`, and the current folder if there is nothing of
    the path in it."""
    if isinstance(error, IsADirectoryError):
        return BadInput(f"{path}: is a folder, expected a file")
    if not isinstance(error, FileNotFoundError):
        return BadInput(f"{path}: cannot be read ({why(error)})")
    wanted = Path(path)
    found = {file.name: file for folder in (*more_folders, wanted.parent) for file in Path(folder).glob("*.*")}
    close = difflib.get_close_matches(wanted.name, [name for name in found if Path(name).suffix == wanted.suffix], n=1)
    here = "" if wanted.is_absolute() or wanted.parent.exists() else f" in {Path.cwd()}"
    hint = f'{here}; did you mean "{found[close[0]]}"?' if close else here
    return BadInput(f"{path}: cannot be read (no such file{hint})")


def require_writable(name: str, path: str | Path | None) -> None:
    """BadInput for a file that could not be written, before minutes go into what it is to hold; none is written."""
    if not path:
        return
    file, folder = Path(path), Path(path).absolute().parent
    if file.is_dir():
        raise BadInput(f"{name}: {path} is a folder, expected a file")
    if not folder.is_dir():
        raise BadInput(f"{name}: {path}: the folder {folder} does not exist")
    try:  # os.access does not say why not
        if file.is_file():
            file.open("ab").close()
        elif not file.exists():
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BadInput(f"{name}: {path} cannot be written ({why(error)})") from None


def read_text(path: str | Path, *more_folders: str | Path) -> str:
    """The text of a file in UTF-8. BadInput (`unreadable`) for one that cannot be read, or that holds no text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, *more_folders) from None


def print_what_cannot_be_shown_as_escapes() -> None:
    """From now on standard output takes every text: what its encoding does not have is printed as escapes, as on
    standard error. A script must not end in the middle of its work for a line that a terminal cannot show."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        cast(io.TextIOWrapper, sys.stdout).reconfigure(errors="backslashreplace")


def why(error: Exception) -> str:
    """The reason of an error in one line, without the path that an OSError repeats."""
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_text(value: str) -> bool:
    """Whether UTF-8 can hold the text: not one of a file name, or of JSON, with halves of surrogate pairs."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def require_text(name: str, value: str) -> None:
    """BadInput for a text that UTF-8 cannot hold, such as a file name in another encoding."""
    if not is_text(value):
        raise BadInput(f"{name}: got {value!a}, expected text that UTF-8 can hold")


def shell_line(*words: object) -> str:
    """A command to paste, as a POSIX shell reads it back, whatever blanks and quotes are in its words. Every line that
    shows one to a person gets it here."""
    return shlex.join(map(str, words))


def shortened(names: Sequence[str], shown_max: int = 4) -> str:
    """The first few names in one line, and how many more there are."""
    more = f" and {len(names) - shown_max} more" if len(names) > shown_max else ""
    return ", ".join(names[:shown_max]) + more


def require_at_least(name: str, value: int, least: int) -> None:
    """BadInput for a field below `least`."""
    if value < least:
        raise BadInput(f"{name}: got {value}, expected an integer >= {least}")


def require_one_of(name: str, value: object, choices: Sequence[str] | Sequence[int]) -> None:
    """BadInput for a field whose value is none of `choices`."""
    if value not in choices:
        hint = nearest(value, map(str, choices)) if isinstance(value, str) else ""
        raise BadInput(f"{name}: got {value!r}, expected one of {', '.join(map(str, choices))}{hint}")


def require_known(names: Iterable[object], known: Collection[str], where: str) -> None:
    """BadInput for a field that is not known, with the nearest name; `where` names what holds it."""
    for name in names:
        if name not in known:
            raise BadInput(
                f"{where}: {printable(str(name))}: unknown field{nearest(str(name), known)}; known: {', '.join(known)}"
            )


def printable(name: str) -> str:
    """A name as a terminal may show it: control characters, which would command it, are escaped."""
    return name if name.isprintable() else repr(name)


def require_printable(data: Any, where: str) -> None:
    """BadInput for a text in plain data, as a name or a value, with a control character: people see it on a
    terminal, which it would command."""
    if isinstance(data, str) and not data.isprintable():
        raise BadInput(f"{where}: got {data!r}, expected text without control characters")
    if isinstance(data, dict):
        entries = cast(dict[str, Any], data)
        for name, item in entries.items():
            require_printable(name, where)
            require_printable(item, f"{where}: {name}")
    if isinstance(data, list):
        for i, item in enumerate(cast(list[Any], data)):
            if isinstance(item, str | dict | list):
                require_printable(item, f"{where}[{i}]")


class ThreadDied(Exception):
    """One line: which thread has died that its process needs, and of what."""
