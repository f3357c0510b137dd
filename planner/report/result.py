"""The result of `solve`, and its progress while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxdt.run.network import Network
    from jaxdt.run.plan import Plan
    from planner.cost.pool import PoolCost
    from planner.cost.reference import Cost
    from planner.model.moves import Move
    from planner.model.prices import StepPrice
    from planner.report.pool_plan import LevelScore


@dataclass(frozen=True)
class Progress:
    """The progress of a search.

    objective          comm_cost, step_time or cost_per_step
    best_s             the score of the best plan so far (None: no plan yet): seconds by Eq. 1-4, the estimated seconds
                       of a step, or by cost_per_step its estimated price
    shape              stages and pipelines of that plan; None without one, or with unequal numbers of replicas
    bound_s, gap       no plan costs less, 0 if nothing is known; (best - bound) / bound, None without a plan or a bound
    evaluations        plans scored so far, and evaluations_per_s in a second
    starts             by step_time and cost_per_step: the search by Eq. 1-4 for placements to start from, while it runs
    """

    objective: str
    elapsed_s: float
    best_s: float | None
    shape: tuple[int, int] | None
    bound_s: float
    gap: float | None
    evaluations: int
    evaluations_per_s: float
    starts: Progress | None = None


OnProgress = Callable[[Progress], None]
History = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Statistics:
    """The effort of a search: plans scored, seconds, the requested solver, its seed, and whether it was interrupted."""

    evaluations: int
    time_s: float
    solver: str
    seed: int
    interrupted: bool


@dataclass(frozen=True)
class ScoredStep:
    """A layout whose step was simulated: its source, its step's seconds, its cost by Eq. 1-4, and its price, where the
    network has prices."""

    name: str
    step_s: float
    cost: Cost
    price: StepPrice | None = None


@dataclass(frozen=True)
class Mended:
    """The cost of the nearest plan: its score in seconds (infinite if the plan uses a link that does not exist or does
    not fit its devices), bytes to move, seconds to move them."""

    score_s: float
    moved_bytes: float
    move_s: float


@dataclass(frozen=True, eq=False)
class Result:
    """The best plan of a search, for any objective.

    plan        ready to be written (jaxdt.run.plan.to_json) and run; plan.found holds this result's numbers
    objective   comm_cost, step_time or cost_per_step
    score_s     seconds of COMM-COST (Eq. 1), of the simulated step or of a pool's step; what was minimised, but by
                cost_per_step
    cost        COMM-COST and its terms by the reference evaluator, whatever was minimised; of a pool, its step by
                Eq. 1 and 2 in full
    step_s      simulated seconds of a step; None by comm_cost, and for a pool
    bound_s     no plan of this shape costs less by Eq. 1-4; 0 if nothing is known
    gap         (cost.total_s - bound_s) / bound_s; None without a bound
    proved      whether no plan of this shape costs less by Eq. 1-4, up to a millionth
    statistics  what the search took
    history     (seconds, score) of each improvement, of all solvers together; by cost_per_step of prices
    by_solver   the same of each solver that took part, by its name
    finalists   by step_time and cost_per_step: what was simulated, the plan first
    price       of a step, where it was simulated and the network has prices
    moves       where a plan runs: what each device fetches before it goes on, the longest first
    mended      where a plan runs: that plan with its gaps filled and nothing else changed, for comparison
    levels      of a pool: every number of stages that was looked at
    """

    plan: Plan
    network: Network
    objective: str
    score_s: float
    cost: Cost | PoolCost
    statistics: Statistics
    step_s: float | None = None
    bound_s: float = 0.0
    gap: float | None = None
    proved: bool = False
    history: History = ()
    by_solver: dict[str, History] = field(default_factory=dict[str, History])
    finalists: tuple[ScoredStep, ...] = ()
    price: StepPrice | None = None
    moves: tuple[Move, ...] = ()
    mended: Mended | None = None
    levels: tuple[LevelScore, ...] = ()
