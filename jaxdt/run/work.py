"""Work: one computation of one stage, and its text form."""

import re

from jaxdt.run.frozen_dataclass import frozen_dataclass

FORWARD, BACKWARD, REGENERATE, EVALUATE, GATHER, UPDATE = "F", "B", "R", "E", "G", "U"
NORM = "N"
LOCAL_STEP, LAY_OUT, ADOPT = "L", "P", "A"  # only where replicas may differ
CONTRIBUTE = "C"  # only at a server
# Kinds that are not timed by themselves take as long as these, which read and write as much.
TIMED_AS = {REGENERATE: BACKWARD, NORM: GATHER, LOCAL_STEP: UPDATE, LAY_OUT: GATHER, ADOPT: GATHER}
TIMED_AS[CONTRIBUTE] = GATHER
REPLACES_STATE = frozenset((UPDATE, LOCAL_STEP, ADOPT))
MESSAGE = "message"  # handling a message, at either end: no Work, but listed in a peer's seconds too
ON_A_CORE = "_on_a_core"  # behind a kind: the part of its seconds that a core computes, where a device is emulated
_WORK = re.compile(r"(?:(\d+):)?(\d+)([FBREGUNLPAC])(\d+)?(?:@p(\d+))?")


@frozen_dataclass(order=True)
class Work:
    """One computation of one stage. F and B: forward and backward of a microbatch; R: a backward that computes a lost
    input gradient again and adds nothing to the accumulator; E: forward without gradient, for the held-out loss; G: the
    accumulated gradient as one vector per group; U: the optimizer update.
    N: the norm of the accumulated gradient. Where replicas may differ: L: the update by this peer's own gradient; P:
    the parameters, some of them, or the whole state, as one vector; A: their mean over a group takes their place.
    At a server: C: a worker's gradient is added to the accumulator.
    The last stage computes forward, loss and backward fused in its B; its F only takes the input in."""

    stage: int
    kind: str
    microbatch: int | None = None
    peer: int | None = None
    step: int | None = None

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
    return Work(int(stage), kind, _optional_int(microbatch), _optional_int(peer), _optional_int(step))


def _optional_int(digits: str | None) -> int | None:
    return None if digits is None else int(digits)
