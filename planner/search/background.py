"""Calls that a search does not wait for longer than its time lasts: compilation, proofs, and searches that compile."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from planner.search.incumbent import Incumbent

T = TypeVar("T")
LOOK_S = 0.02
LAST_WAIT_S = 1.0


class Background(Generic[T]):
    """A call in a thread of its own. A call that nobody waits for any more ends by itself."""

    def __init__(self, call: Callable[[], T], incumbent: Incumbent):
        self._call = call
        self._incumbent = incumbent
        self._result: T | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="planner-background")
        self._thread.start()

    def _run(self):
        try:
            self._result = self._call()
        except Exception as error:
            self._error = error

    @property
    def is_over(self) -> bool:
        """Whether the call has ended. Its error is raised here."""
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        return not self.is_over

    def result(self, end_s: float = math.inf) -> T | None:
        """The result; None if the call has not ended when the search is so old, or is interrupted."""
        while self.is_running and not self._incumbent.interrupted and self._incumbent.elapsed_s < end_s:
            self._thread.join(LOOK_S)
        return self._result if self.is_over else None

    def is_over_within(self, wait_s: float) -> bool:
        """Whether the call ends within so many seconds. Its error is raised here."""
        self._thread.join(wait_s)
        return self.is_over


@contextlib.contextmanager
def in_background(call: Callable[[], T], incumbent: Incumbent) -> Iterator[Background[T]]:
    """Run a call in a thread while the body runs, and stop the incumbent after the body; an error of the call is raised
    here. A running enumeration cannot be stopped, so this waits LAST_WAIT_S for the thread and no longer."""
    task = Background(call, incumbent)
    yield task
    incumbent.stop()
    task.is_over_within(LAST_WAIT_S)
