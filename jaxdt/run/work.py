"""Work: one computation of one stage, and its text form."""

import re
from enum import StrEnum

from jaxdt.run.frozen_dataclass import frozen_dataclass


class WorkKind(StrEnum):
    """The kinds of Work, with their letters in traces and seconds. FORWARD and BACKWARD are those of a microbatch.

    REGENERATE  a backward that computes a lost input gradient again, and adds nothing to the accumulator
    EVALUATE    a forward without gradient, for the held-out loss
    GATHER      the accumulated gradient becomes a vector
    UPDATE      the optimizer's update
    NORM        of the accumulated gradient

    LOCAL_STEP  where replicas may differ: the update by this peer's own gradient
    LAY_OUT     the parameters, some of them, or the whole state become a vector
    ADOPT       the result of a round takes their place
    CONTRIBUTE  another peer's gradient is added to the accumulator: a worker's at a pool's server, or where replicas
                may differ that of a token table which two stages share
    TABLE       that table becomes a vector at the first stage, or takes the place of the one before at the last
    """

    FORWARD = "F"
    BACKWARD = "B"
    REGENERATE = "R"
    EVALUATE = "E"
    GATHER = "G"
    UPDATE = "U"
    NORM = "N"
    LOCAL_STEP = "L"
    LAY_OUT = "P"
    ADOPT = "A"
    CONTRIBUTE = "C"
    TABLE = "T"


# Kinds that are not timed by themselves take as long as these, which read and write as much.
TIMED_AS = {
    WorkKind.REGENERATE: WorkKind.BACKWARD,
    WorkKind.NORM: WorkKind.GATHER,
    WorkKind.LOCAL_STEP: WorkKind.UPDATE,
    WorkKind.LAY_OUT: WorkKind.GATHER,
    WorkKind.ADOPT: WorkKind.GATHER,
    WorkKind.CONTRIBUTE: WorkKind.GATHER,
    WorkKind.TABLE: WorkKind.GATHER,
}
REPLACES_STATE = frozenset((WorkKind.UPDATE, WorkKind.LOCAL_STEP, WorkKind.ADOPT))
MESSAGE = "message"  # handling a message, at either end: no Work, but listed in a peer's seconds too
ON_A_CORE = "_on_a_core"  # behind a kind: the part of its seconds that a core computes, where a device is emulated
_WORK = re.compile(rf"(?:(\d+):)?(\d+)([{''.join(WorkKind)}])(\d+)?(?:@p(\d+))?")


@frozen_dataclass(order=True)
class Work:
    """One computation of one stage. The last stage computes forward, loss and backward fused in its BACKWARD; its
    FORWARD only takes the input in."""

    stage: int
    kind: WorkKind
    microbatch: int | None = None
    peer: int | None = None
    step: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The step and the microbatch, which all Work of a wiring has."""
        assert self.step is not None and self.microbatch is not None
        return self.step, self.microbatch

    def __str__(self) -> str:
        step = "" if self.step is None else f"{self.step}:"
        microbatch = "" if self.microbatch is None else self.microbatch
        peer = "" if self.peer is None else f"@p{self.peer}"
        return f"{step}{self.stage}{self.kind}{microbatch}{peer}"


def parse_work(text: str) -> Work:
    """The Work that `str` printed, such as 2F7@p13 or, with its step, 4:2F7@p13."""
    match = _WORK.fullmatch(text.strip())
    if not match:
        raise ValueError(f"work: got {text!r}, expected for example 2F7, 2F7@p13 or 4:2F7@p13")
    step, stage, kind, microbatch, peer = match.groups()
    return Work(int(stage), WorkKind(kind), _optional_int(microbatch), _optional_int(peer), _optional_int(step))


def is_work(text: str) -> bool:
    """Whether `parse_work` reads this text."""
    return bool(_WORK.fullmatch(text.strip()))


def _optional_int(digits: str | None) -> int | None:
    return None if digits is None else int(digits)
