"""Stalls: with some probability a peer pauses before a Work, as on a host that is shared or overloaded.

Whether it does follows from the seed, the peer and the step (or the Work) alone. So a simulation and a real run with
the same stalls pause at the same Work, whatever the order of events.
"""

import hashlib
from dataclasses import dataclass

from jaxdt.run.errors import BadInput, require_one_of
from jaxdt.run.options import SECONDS
from jaxdt.run.work import Work, WorkKind

STEP, WORK = "step", "work"
SYNTAX = f"PROB,SECONDS,SEED or PROB,SECONDS,SEED,{WORK}"


@dataclass(frozen=True)
class Stalls:
    """With probability `prob` a peer pauses for `seconds`. `draws`: "step", once for each step and peer, before its
    first forward; "work", before each forward and each backward."""

    prob: float
    seconds: float
    seed: int = 0
    draws: str = STEP

    def __post_init__(self) -> None:
        if not 0 <= self.prob <= 1:
            raise BadInput(f"stall: got probability {self.prob}, expected a number in [0, 1]")
        if not SECONDS.holds(self.seconds):
            raise BadInput(f"stall: got {self.seconds} seconds, expected {SECONDS.text}")
        require_one_of("stall: draws", self.draws, (STEP, WORK))

    def draw_s(self, *names: object) -> float:
        """The seconds of the stall that these names decide: 0, or self.seconds."""
        text = " ".join(map(str, (self.seed, *names)))
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
        return self.seconds if number < self.prob * 2**64 else 0.0


class PeerStalls:
    """The stalls of one peer, asked in the order of its Work."""

    def __init__(self, stalls: Stalls, peer: int):
        self._stalls = stalls
        self._peer = peer
        self._step = -1  # the newest step that has begun

    def before_s(self, work: Work) -> float:
        """Seconds that the peer pauses before this Work."""
        if work.kind not in (WorkKind.FORWARD, WorkKind.BACKWARD) or work.step is None:
            return 0.0
        if self._stalls.draws == WORK:
            return self._stalls.draw_s(self._peer, work.step, work.kind, work.microbatch)
        if work.kind != WorkKind.FORWARD or work.step <= self._step:
            return 0.0
        self._step = work.step
        return self._stalls.draw_s(self._peer, work.step)


def parse(text: str) -> Stalls:
    """Stalls from PROB,SECONDS,SEED, or PROB,SECONDS,SEED,work for a draw before every Work."""
    prob, _, others = text.partition(",")
    seconds, _, others = others.partition(",")
    seed, _, draws = others.partition(",")
    try:
        numbers = float(prob), float(seconds), int(seed)
    except ValueError:
        raise BadInput(f"--stall: got {text!r}, expected {SYNTAX}") from None
    return Stalls(*numbers, draws or STEP)
