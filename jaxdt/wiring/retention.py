"""The boundary tensors that a peer keeps until the step is committed, in case that they have to be sent again.

A microbatch that is counted here may have to be done again at a neighbour. With its output and its input gradient at
hand, that costs the neighbour's Work alone. Beyond a budget the oldest tensors are let go, but never the newest. With a
budget of 0 nothing is kept once it is sent. A missing tensor is made again from the nearest copy upstream or downstream
(step protocol, Sec. 9).
"""

from jaxdt.protocol import events as ev
from jaxdt.run.work import Work, WorkKind
from jaxdt.wiring.base import StepShape


class Retention:
    """The tensors that one peer keeps, within the budget `shape.retain_bytes`."""

    def __init__(self, shape: StepShape):
        self._stage = shape.stage
        self._budget_bytes = shape.retain_bytes
        activation_bytes, gradient_bytes = shape.sent_bytes_max
        self._bytes = {
            WorkKind.FORWARD: 0 if shape.is_last_stage else activation_bytes,
            WorkKind.BACKWARD: gradient_bytes if shape.stage > 0 else 0,
            WorkKind.REGENERATE: gradient_bytes if shape.stage > 0 else 0,
        }
        self._both: dict[int, int] = {}  # microbatch -> bytes of output and input gradient, oldest first
        self._outputs: dict[int, int] = {}  # microbatches whose backward is still to come
        self._kept_bytes = 0  # of both
        self._is_promised = False

    def begin_step(self) -> None:
        """A step begins; nothing is kept of the one before."""
        self._both.clear()
        self._outputs.clear()
        self._kept_bytes = 0
        self._is_promised = False

    def made(self, work: Work) -> list[ev.Discard]:
        """A Work of the step is done and its result is kept. Returns the tensors that are let go for it."""
        if work.kind not in self._bytes or not self._budget_bytes:
            return []
        m = work.microbatch
        step = work.step
        assert m is not None and step is not None  # as in all Work of a wiring
        n_bytes = self._bytes[work.kind]
        if work.kind == WorkKind.FORWARD:
            self._kept_bytes += n_bytes - self._outputs.get(m, 0)
            self._outputs[m] = n_bytes
            return []
        self._kept_bytes += n_bytes - self._both.get(m, 0)
        self._both[m] = self._outputs.pop(m, 0) + n_bytes
        discards: list[ev.Discard] = []
        while self._kept_bytes > self._budget_bytes and not self._is_promised and len(self._both) > 1:
            oldest = next(iter(self._both))
            self._kept_bytes -= self._both.pop(oldest)
            discards.append(ev.Discard(ev.Key("act", step, self._stage + 1, oldest)))
            discards.append(ev.Discard(ev.Key("grad", step, self._stage, oldest)))
        return discards

    def keeps_output(self, microbatch: int) -> bool:
        """Whether the output of this microbatch can be sent again."""
        return microbatch in self._outputs or microbatch in self._both

    def promise(self) -> tuple[int, ...]:
        """The microbatches whose tensors are here; from now on they stay until the step is over."""
        self._is_promised = True
        return tuple(sorted(self._both))
