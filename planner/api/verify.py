"""`planner.verify`."""

from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from planner.report import pool_verify
from planner.report.plan_file import costed
from planner.report.pool_plan import costed_pool, is_pool
from planner.report.verdict import Verdict
from planner.report.verify import verdicts


def verify(plan: Plan, network: Network) -> list[Verdict]:
    """A verdict (true, FALSE or unchecked, and why) for every claim of a solver's plan: its cost by the evaluator that
    shares no code with the solvers, its bound by floors and, up to 16 devices, by enumeration; for a pool's plan its
    roles and the order of its stages. BadInput for a plan without sizes, or of other devices than the network's."""
    if is_pool(plan):
        return pool_verify.verdicts(costed_pool(plan, network))
    return verdicts(costed(plan, network))
