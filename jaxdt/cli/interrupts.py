"""Ctrl-C while a script is still importing or checking: one line, and no traceback. Standard library only.

Importing this module before all that takes time sets the handler. A script that has more to do when it is interrupted
sets its own one later.
"""

import os
import signal
from types import FrameType

INTERRUPTED = 130


def end_at_once(number: int, frame: FrameType | None) -> None:
    """The handler: nothing is under way that would have to be finished."""
    del number, frame
    os.write(2, b"\ninterrupted before anything was begun\n")
    os._exit(INTERRUPTED)


def end_on_interrupt() -> None:
    """From now on SIGINT ends this process with one line and code 130."""
    signal.signal(signal.SIGINT, end_at_once)


end_on_interrupt()
