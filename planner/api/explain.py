"""`planner.explain`."""

from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from planner.report.explain import Explanation, explanation
from planner.report.plan_file import costed


def explain(plan: Plan, network: Network) -> Explanation:
    """Where the cost of a solver's plan comes from, and which single change would lower it most. BadInput for a plan
    without sizes, or of other devices than the network's. Needs neither numba nor OR-Tools."""
    return explanation(costed(plan, network))
