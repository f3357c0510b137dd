"""The means by which a caller ends a search."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from jaxdt.run.errors import BadInput

DEFAULT_TIME_S = 30.0


class Interrupt:
    """A request to end, from any thread, and what is called then. A callback must not ask for an interrupt itself."""

    def __init__(self) -> None:
        self.is_set = False
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def set(self) -> None:
        with self._lock:
            self.is_set = True
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    @contextlib.contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """Inside this context an interrupt calls callback(), at once if it came before."""
        with self._lock:
            self._callbacks.append(callback)
            is_set = self.is_set
        if is_set:
            callback()
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)


class Stop:
    """The end of a search: after `time_s` seconds, after `evaluations` plans were scored, or when `interrupt` is
    called. An optimal plan ends the search as well. With evaluations alone the same seed gives the same plan on every
    machine; with neither, time_s is 30.

    `interrupt` may be called from any thread, before or during the search, which then ends with its best plan."""

    def __init__(self, time_s: float | None = None, evaluations: int | None = None):
        for name, value in (("time_limit_s", time_s), ("evaluations", evaluations)):
            if value is not None and not 0 < value < float("inf"):
                raise BadInput(f"--{name}: got {value}, expected a positive number")
        self.time_s = DEFAULT_TIME_S if time_s is None and evaluations is None else time_s
        self.evaluations = evaluations
        self._interrupt = Interrupt()
        self.interrupt = self._interrupt.set
        self.on_interrupt = self._interrupt.calling

    @property
    def interrupted(self) -> bool:
        """Whether somebody has asked the search to end."""
        return self._interrupt.is_set
