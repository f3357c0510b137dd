"""`planner.explain`."""

from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from planner.report import pool_explain
from planner.report.explain import Explanation, explanation
from planner.report.plan_file import costed
from planner.report.pool_plan import costed_pool, is_pool


def explain(plan: Plan, network: Network, search: bool = False) -> Explanation:
    """The sources of the cost of a solver's plan, and the single changes that would lower it: explain(...).suggestions,
    each with its change and the seconds that it saves. BadInput for a plan without sizes, or of other devices than the
    network's. Needs neither numba nor OR-Tools, unless `search` asks for every swap and for a search of other shapes,
    which takes some seconds a shape. A pool's plan gets no suggestions."""
    if is_pool(plan):
        pool = costed_pool(plan, network)
        return Explanation(pool.cost, (), pool_explain.text(pool))
    return explanation(costed(plan, network), search)
