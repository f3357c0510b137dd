"""`planner.explain`."""

from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from planner.report.explain import Explanation, explanation
from planner.report.plan_file import costed


def explain(plan: Plan, network: Network, search: bool = False) -> Explanation:
    """Where the cost of a solver's plan comes from, and which single changes would lower it: explain(...).suggestions,
    each with its change and the seconds that it saves. BadInput for a plan without sizes, or of other devices than the
    network's. Needs neither numba nor OR-Tools, unless `search` asks for every swap and for a search of other shapes,
    which takes some seconds a shape."""
    return explanation(costed(plan, network), search)
