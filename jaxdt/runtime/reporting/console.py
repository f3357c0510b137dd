"""Standard output, for people: lines, and whether there is a terminal for more than lines."""

import contextlib
import os
import sys
import termios
from collections.abc import Iterator


def print_line(line: str) -> None:
    """Print a line. A log on a full disk, or a terminal that is gone, must not end a run: the line stays in the buffer
    of standard output. The buffer is written with the next line; once it is full the line is lost."""
    with contextlib.suppress(OSError):
        print(f"{line}\n", end="", flush=True)  # one write: other processes may print to the same terminal


def has_own_terminal() -> bool:
    """Whether standard output is a terminal on which nothing else is expected to print meanwhile, so that a table may
    stay at its bottom. A job in the background shares its terminal; a shell without job control gives such a job no
    terminal for its input. For a coordinator that launch.py starts, the terminal is that of another session: the
    launcher has looked at it, and the peers print into files."""
    if not sys.stdout.isatty():
        return False
    try:
        foreground = os.tcgetpgrp(sys.stdout.fileno())
    except OSError:  # of another session
        return True
    return foreground == os.getpgrp() and sys.stdin is not None and sys.stdin.isatty()


@contextlib.contextmanager
def no_echo_of_interrupts() -> Iterator[None]:
    """The terminal does not show Ctrl-C as ^C meanwhile: within a table that would make a line longer than the table
    counts on, so that the next drawing begins a line too low. Nothing changes if standard output is no terminal."""
    try:
        before = termios.tcgetattr(sys.stdout.fileno())
    except (termios.error, OSError):
        yield
        return
    modes = list(before)
    modes[3] &= ~termios.ECHOCTL
    _set_modes(modes)
    try:
        yield
    finally:
        _set_modes(before)


def _set_modes(modes: list) -> None:
    with contextlib.suppress(termios.error):  # the terminal may be gone
        termios.tcsetattr(sys.stdout.fileno(), termios.TCSADRAIN, modes)
