"""Which boundary tensors a peer keeps until the step is committed, in case that they have to be sent again.

A microbatch that is counted here may have to be done again at a neighbour: with its output and its input gradient at
hand that costs the neighbour's Work alone. Beyond a budget the oldest are let go, but for the newest one, and with a
budget of 0 nothing is kept once it is sent; what is missing then is made again from the next copy upstream or
downstream (step protocol, Sec. 9).
"""

from jaxdt.protocol.events import Discard, Key
from jaxdt.spec.work import BACKWARD, FORWARD, REGENERATE, Work


class Retention:
    """Of one peer of `stage`; bytes of an output and of an input gradient."""

    def __init__(self, stage: int, n_stages: int, boundary_bytes: tuple[int, int], budget_bytes: int):
        self._stage, self._budget_bytes = stage, budget_bytes
        activation_bytes, gradient_bytes = boundary_bytes
        self._bytes = {FORWARD: activation_bytes if stage < n_stages - 1 else 0}
        self._bytes |= dict.fromkeys((BACKWARD, REGENERATE), gradient_bytes if stage > 0 else 0)
        self._whole: dict[int, int] = {}  # microbatch -> bytes, oldest first
        self._half: dict[int, int] = {}
        self._kept_bytes = 0  # of both
        self._promised = False

    def begin(self) -> None:
        """A step begins; what was kept for the one before is gone."""
        self._whole.clear()
        self._half.clear()
        self._kept_bytes = 0
        self._promised = False

    def made(self, work: Work) -> list[Discard]:
        """A Work of the step is done, and its result is kept; what is let go for it."""
        if work.kind not in self._bytes or not self._budget_bytes:
            return []
        m, n_bytes = work.microbatch, self._bytes[work.kind]
        if work.kind == FORWARD:
            self._kept_bytes += n_bytes - self._half.get(m, 0)
            self._half[m] = n_bytes
            return []
        self._kept_bytes += n_bytes - self._whole.get(m, 0)
        self._whole[m] = self._half.pop(m, 0) + n_bytes
        gone = []
        while self._kept_bytes > self._budget_bytes and not self._promised and len(self._whole) > 1:
            oldest = next(iter(self._whole))
            self._kept_bytes -= self._whole.pop(oldest)
            gone.append(Discard(Key("act", work.step, self._stage + 1, oldest)))
            gone.append(Discard(Key("grad", work.step, self._stage, oldest)))
        return gone

    def promise(self) -> tuple[int, ...]:
        """The microbatches whose tensors are here; from now on they stay until the step is over."""
        self._promised = True
        return tuple(sorted(self._whole))
