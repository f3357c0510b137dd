"""Lines for people on standard output."""

import contextlib


def print_line(line: str) -> None:
    """Print a line. A log on a full disk, or a terminal that is gone, must not end a run: the line stays in the buffer
    of standard output, which is written with the next line, and is lost once that buffer is full."""
    with contextlib.suppress(OSError):
        print(line, flush=True)
