"""Settings of glibc's allocator for processes that compute."""

import os
import sys

# A jitted call returns megabytes. By default glibc gives them back to the system after each call and faults them in
# again at the next one: 14,000 pages a call, which is a fifth of the time of a small stage.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MALLOC_ARENA_MAX": "1",
}


def restart() -> None:
    """Start this process again with the settings, unless it has them: glibc reads them when a process starts."""
    if sys.platform == "linux" and not ENVIRONMENT.keys() <= os.environ.keys():
        os.environ.update(ENVIRONMENT)
        os.execv(sys.executable, sys.orig_argv)
