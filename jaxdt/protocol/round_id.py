"""The name of a round: an exchange in which peers add up a vector."""

from enum import StrEnum

from jaxdt.run.frozen_dataclass import frozen_dataclass
from jaxdt.run.sizes import SHARED_TABLE

NO_PEER = -2


class RoundKind(StrEnum):
    """What a round adds up, and for what."""

    GRADIENT = "gradient"  # of a step; where replicas may differ, that of a shared table
    MEAN = "mean"  # the members of a group: what they exchange of their parameters
    STATE = "state"  # replicas that may differ: parameters and moments, for a checkpoint or as the result of the run
    HELD_OUT = "held_out"  # a snapshot of parameters, for a held-out loss
    CHECKPOINT = "checkpoint"  # a snapshot of a server's parameters, for a checkpoint
    PUSH = "push"  # what a worker has changed, on the way to its server
    PULL = "pull"  # a server's parameters, on the way to a worker
    CONTRIBUTION = "contribution"  # a gradient of a pool's worker, on the way to its server
    TABLE = "table"  # a pipeline's shared table, on the way from its first stage to its last
    HELD_OUT_TABLE = "held_out_table"  # the same of a snapshot for a held-out loss

    @property
    def is_coded(self) -> bool:
        """Whether `sync.codec` says how its numbers travel. Those of other kinds are exact."""
        return self in (RoundKind.GRADIENT, RoundKind.MEAN, RoundKind.PUSH, RoundKind.CONTRIBUTION)


Series = tuple[RoundKind, int, int, int]
Place = tuple[RoundKind, int, int, int, int]


@frozen_dataclass(order=True)
class RoundId:
    """`stage`: whose vector it adds up; SHARED_TABLE for the token table that the first and the last stage share.
    `number`: counts up in each series: a step, a group's number, a version. `fragment`: of the stage's layers. `peer`:
    the worker of a round between a server and one worker. `view`: in which the members last changed, or the admission
    of that worker. `attempt`: the greatest one counts, unless an earlier one turns out to be whole."""

    kind: RoundKind
    stage: int
    number: int
    fragment: int = 0
    peer: int = NO_PEER
    view: int = 0
    attempt: int = 0

    @property
    def series(self) -> Series:
        """Equal for rounds that follow one another."""
        return self.kind, self.stage, self.fragment, self.peer

    @property
    def place(self) -> Place:
        """Equal for all attempts of a round."""
        return self.kind, self.stage, self.number, self.fragment, self.peer

    @property
    def vector(self) -> str:
        """The name of the vector that is added up, in traces and for people."""
        name = "tied" if self.stage == SHARED_TABLE else f"stage{self.stage}"
        name += "" if self.kind == RoundKind.GRADIENT else f"/{self.kind}"
        name += "" if self.peer == NO_PEER else str(self.peer)
        return f"{name}/fragment{self.fragment}" if self.fragment else name

    def __str__(self) -> str:
        attempt = f", attempt {self.attempt}" if self.attempt else ""
        return f"round {self.number} of {self.vector}{attempt}"
