"""Ctrl-C while a script is still importing or checking: one line, and no traceback. Standard library only.

Importing this module before all that takes time sets the handler. A script that has more to do when it is interrupted
sets its own one later.
"""

import os
import signal
from types import FrameType

from jaxdt.run.exit_codes import ExitCode


def end_on_interrupt(line: str = "interrupted before anything was begun") -> None:
    """From now on SIGINT ends this process with this line and code 130."""

    def end_at_once(number: int, frame: FrameType | None) -> None:
        del number, frame
        os.write(2, f"\n{line}\n".encode())
        os._exit(ExitCode.INTERRUPTED)

    signal.signal(signal.SIGINT, end_at_once)


end_on_interrupt()
