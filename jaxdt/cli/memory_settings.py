"""glibc's allocator set up for processes that compute, before anything else is imported."""

import os
import sys

# A jitted call returns megabytes, which glibc would give back to the system and fault in again, 14,000 pages a call:
# a fifth of the time of a small stage. These settings are read when a process starts, so it starts once more.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": 1 << 30,
    "MALLOC_TRIM_THRESHOLD_": (1 << 31) - 1,
    "MALLOC_TOP_PAD_": 1 << 26,
    "MALLOC_ARENA_MAX": 1,
}


def restart() -> None:
    """Start this process again with the settings, where it does not have them."""
    if sys.platform == "linux" and not MALLOC.keys() <= os.environ.keys():
        os.environ.update({name: str(value) for name, value in MALLOC.items()})
        os.execv(sys.executable, sys.orig_argv)
