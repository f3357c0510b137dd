"""The result of `planner.replan`."""

from dataclasses import dataclass

from planner.api.result import Result
from planner.model.moves import Move


@dataclass(frozen=True)
class Mended:
    """The cost of the nearest plan: its score in seconds (infinite if the plan uses a link that does not exist or does
    not fit its devices), bytes to move, seconds to move them."""

    score_s: float
    moved_bytes: float
    move_s: float


@dataclass(frozen=True, eq=False)
class Replan:
    """A plan for the changed network, and how a run gets there.

    result        the plan, as `solve` gives it; plan.found["replan"] holds the numbers below
    score_s       what was minimised: result.score_s + move_s / horizon_steps
    moves         what each device fetches before it goes on, the longest first (planner.model.moves.Move)
    moved_bytes   of all of them
    move_s        seconds until the last one is done; links are taken as independent
    mended        the old plan with its gaps filled and nothing else changed, for comparison
    """

    result: Result
    score_s: float
    moves: tuple[Move, ...]
    moved_bytes: float
    move_s: float
    horizon_steps: float
    mended: Mended
