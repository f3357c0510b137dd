"""Calls that a search must not wait for longer than its time lasts: compilation, and searches that compile."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from planner.search.incumbent import Incumbent

T = TypeVar("T")
LOOK_S = 0.02


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

    def result(self, end_s: float) -> T | None:
        """The result; None if the call has not ended when the search is so old, or is interrupted."""
        while not self.is_over and not self._incumbent.interrupted and self._incumbent.elapsed_s < end_s:
            self._thread.join(LOOK_S)
        return self._result if self.is_over else None
