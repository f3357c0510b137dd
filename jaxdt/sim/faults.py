"""Faults of a simulation, drawn from a seed and printed before it runs: an equal seed gives an equal run."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

CRASH, PAUSE = "crash", "pause"


@dataclass(frozen=True)
class Fault:
    """What happens to a peer at at_s. A crash ends it; who is paused hears and does nothing for `seconds`."""

    at_s: float
    kind: str
    peer: int
    seconds: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.3f} s" if self.kind == PAUSE else ""
        return f"{self.at_s:.3f} s: {self.kind} peer {self.peer}{lasts}"


def draw(seed: int, stages: Sequence[Sequence[int]], n: int, until_s: float, pause_s: float) -> list[Fault]:
    """n faults on peers of `stages` (peers of each stage) before until_s, pauses of up to pause_s. At most all but one
    peer of a stage are hit, since a stage without any ends the run."""
    rng = random.Random(f"faults {seed}")
    left = [list(peers) for peers in stages]
    faults = []
    for _ in range(n):
        stage = rng.choice([peers for peers in left if len(peers) > 1] or [None])
        if stage is None:
            break
        peer = stage.pop(rng.randrange(len(stage)))
        kind = rng.choice((CRASH, PAUSE))
        faults.append(Fault(rng.uniform(0.0, until_s), kind, peer, rng.uniform(0.0, pause_s) if kind == PAUSE else 0.0))
    return sorted(faults, key=lambda fault: fault.at_s)
