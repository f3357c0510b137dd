"""How far a long reading of files is, on standard error."""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

SILENT_S = 2.0  # what takes less needs no word
DRAWN_EVERY_S = 0.25
PRINTED_EVERY_S = 30.0
MB = 1_000_000


class ReadingProgress:
    """Says how much of these files has been read: on a terminal in one line, which is written again and goes away in
    the end, elsewhere in a line every 30 s. `passes`: what is done with the files each time that all of them are
    read."""

    def __init__(self, paths: Sequence[str | Path], passes: Sequence[str]):
        self._passes = passes
        self._all_bytes = sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
        self._read_bytes = 0
        self._n_passes_done = 0
        self._draws = sys.stderr is not None and sys.stderr.isatty()
        self._pass_begun_s = self._latest_s = time.monotonic()
        self._next_s = self._latest_s + (SILENT_S if self._draws else PRINTED_EVERY_S)
        self._shows = False

    def __enter__(self) -> "ReadingProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shows and self._draws:
            self._write("\r\x1b[K")

    def read(self, n_bytes: int) -> None:
        """So many more bytes have been read."""
        now_s = time.monotonic()
        if self._read_bytes >= self._all_bytes > 0 and self._n_passes_done + 1 < len(self._passes):
            self._read_bytes, self._pass_begun_s = 0, self._latest_s
            self._n_passes_done += 1
        self._read_bytes += n_bytes
        self._latest_s = now_s
        if now_s >= self._next_s:
            self._write(f"\r\x1b[K{self.line(now_s)}" if self._draws else f"{self.line(now_s)}\n")
            self._next_s = now_s + (DRAWN_EVERY_S if self._draws else PRINTED_EVERY_S)
            self._shows = True

    def line(self, now_s: float) -> str:
        """What is said at a moment."""
        mb_per_s = self._read_bytes / MB / max(now_s - self._pass_begun_s, 1e-3)
        if not self._all_bytes:  # a pipe has no size
            return f"read: {self._read_bytes / MB:.0f} MB, {mb_per_s:.1f} MB/s"
        left_mb = max(self._all_bytes - self._read_bytes, 0) / MB
        left = f", {left_mb / mb_per_s:.0f} s left" if mb_per_s else ""
        done = f"{self._read_bytes / MB:.0f} of {self._all_bytes / MB:.0f} MB"
        return f"{self._passes[self._n_passes_done]}: {done}, {mb_per_s:.1f} MB/s{left}"

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone, which ends nothing
            sys.stderr.write(text)
            sys.stderr.flush()
