"""Two transports of one process that pass a tensor to and fro: what a message costs the processor, at its ends."""

from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from jaxdt.core.errors import BadInput
from jaxdt.runtime.buffer import aligned_empty
from jaxdt.runtime.credential import Credential
from jaxdt.runtime.transport import Transport

N_BYTES = 1 << 18  # of the tensor; threads that wake up cost more than these
PATIENCE_S = 30.0
N_ENDS = 4  # of one exchange: there and back


class Echo:
    """`exchange()` sends a tensor to the other end and waits until it is back. Use as a context."""

    def __init__(self, credential: Credential | None):
        self._came: SimpleQueue[None] = SimpleQueue()
        self._tensor = np.zeros(N_BYTES, np.uint8)
        self._here, self._there = (self._transport(me, credential) for me in (0, 1))

    def __enter__(self) -> "Echo":
        here, there = self._here.start(), self._there.start()
        self._here.connect(1, there)
        self._there.connect(0, here)
        self.exchange()  # which connects
        return self

    def __exit__(self, *_) -> None:
        for one in (self._here, self._there):
            one.close(0.0)

    def exchange(self) -> None:
        self._here.send(1, {}, [self._tensor])
        try:
            self._came.get(timeout=PATIENCE_S)
        except Empty:
            raise BadInput(f"127.0.0.1: a message to this process itself is lost for {PATIENCE_S:.0f} s") from None

    def _transport(self, me: int, credential: Credential | None) -> Transport:
        return Transport(
            me,
            "echo",
            ("127.0.0.1", 0),
            credential,
            on_message=self._back if me else self._arrived,
            on_link=lambda peer, state, reason: None,
            expect=lambda src, head, table: [aligned_empty((N_BYTES,), np.dtype(np.uint8))],
        )

    def _back(self, src: int, head: dict, leaves: list[Any]) -> None:
        self._there.send(0, {}, leaves)

    def _arrived(self, src: int, head: dict, leaves: list[Any]) -> None:
        self._came.put(None)
