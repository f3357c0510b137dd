"""`planner.verify`."""

from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from planner.report.plan_file import costed
from planner.report.verify import Verdict, verdicts


def verify(plan: Plan, network: Network) -> list[Verdict]:
    """A verdict (true, FALSE or unchecked, and why) for every claim of a solver's plan: its cost by the evaluator that
    shares no code with the solvers, its bound by floors and, up to 16 devices, by enumeration. BadInput for a plan
    without sizes, or of other devices than the network's."""
    return verdicts(costed(plan, network))
