"""Restarts a process that computes with the settings of glibc's allocator that it needs."""

import os
import sys

from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT


def restart() -> None:
    """Start this process again with the settings, unless it has them: glibc reads them when a process starts."""
    if sys.platform == "linux" and not MALLOC_ENVIRONMENT.keys() <= os.environ.keys():
        os.environ.update(MALLOC_ENVIRONMENT)
        os.execv(sys.executable, sys.orig_argv)
