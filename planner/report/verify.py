"""`python -m planner verify`: are a plan's claims true? The cost by the independent evaluator; the bound by floors that
need no solver, and by enumeration up to 16 devices.

A bound of more devices that is above the floors rests on CP-SAT, which leaves no certificate. Such a bound is reported
as unchecked.
"""

import math
from argparse import Namespace
from typing import Any

from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from planner.model.proof import ROUNDING, is_optimal
from planner.report import pool_verify
from planner.report.plan_file import CostedPlan, costed, read_any
from planner.report.pool_plan import CostedPool
from planner.report.verdict import FALSE, TRUE, UNCHECKED, Verdict, verdict


def verify(plan: Plan, network: Network) -> list[Verdict]:
    """A verdict (true, FALSE or unchecked, and why) for every claim of a solver's plan: its cost by the evaluator that
    shares no code with the solvers, its bound by floors and, up to 16 devices, by enumeration; for a pool's plan its
    roles and the order of its stages. BadInput for a plan without sizes, or of other devices than the network's."""
    return verdicts(costed(plan, network))


def verdicts(costed: CostedPlan | CostedPool) -> list[Verdict]:
    """A verdict for every claim of a plan with its cost."""
    if isinstance(costed, CostedPool):
        return pool_verify.verdicts(costed)
    found = costed.plan.found
    checked = [_problem(costed), *_costs(costed)]
    if not costed.bound_holds:
        return [*checked, Verdict(UNCHECKED, "bound_s, gap, proved: not about this network and these sizes")]
    checked += _agreement(costed)
    if found["bound_s"] > 0:
        checked.append(_bound(costed))
    if "step_s" in found:
        checked.append(Verdict(UNCHECKED, f"step_s: {found['step_s']:.6g} s are the simulator's"))
    return checked


def _problem(costed: CostedPlan) -> Verdict:
    digest = costed.plan.found.get("problem_digest")
    if digest is None:
        return Verdict(UNCHECKED, "problem_digest: missing, so the plan does not say for which network it was made")
    name = costed.network.name or "this network"
    if costed.bound_holds:
        return Verdict(TRUE, f"problem_digest: {digest}, of {name} and the plan's sizes")
    return Verdict(FALSE, f"problem_digest: {digest} is of another network than {name}, or of other sizes")


def _costs(costed: CostedPlan) -> list[Verdict]:
    """The three costs that the plan says, against the reference evaluator's."""
    said: dict[str, Any] = costed.plan.found["cost"]
    rows = []
    for name in ("total_s", "datap_s", "pipelinep_s"):
        true_s = getattr(costed.cost, name)
        same = math.isclose(float(said[name]), true_s, rel_tol=ROUNDING)
        rows.append(verdict(same, f"cost.{name}: {said[name]!r}, {true_s!r} by the reference evaluator"))
    return rows


def _agreement(costed: CostedPlan) -> list[Verdict]:
    """Whether bound, gap and proof agree with each other and with the true cost."""
    found = costed.plan.found
    total_s, bound_s = costed.cost.total_s, float(found["bound_s"])
    rows = [verdict(bound_s <= total_s * (1 + ROUNDING), f"bound_s: {bound_s!r} is at most the cost {total_s!r}")]
    if bound_s > 0 and found["gap"] is not None:
        gap = (total_s - bound_s) / bound_s
        rows.append(verdict(math.isclose(found["gap"], gap, abs_tol=ROUNDING), f"gap: {found['gap']!r}, {gap!r}"))
    if found["proved"]:
        rows.append(verdict(is_optimal(total_s, bound_s), f"proved: the bound {bound_s!r} is the cost {total_s!r}"))
    return rows


def _bound(costed: CostedPlan) -> Verdict:
    """Whether the bound is below the cost of every placement."""
    from planner.cost.bounds import floor_s
    from planner.model.problem import placement_s, problem_of
    from planner.search import layouts

    bound_s = float(costed.plan.found["bound_s"])
    shape = costed.plan.n_stages, costed.plan.n_pipelines
    if math.prod(shape) != costed.network.n_devices:
        return Verdict(UNCHECKED, "bound_s: is about the devices that the plan uses, not about the whole network")
    problem = problem_of(costed.network, *shape, *costed.sizes)
    least_s = floor_s(problem)
    if bound_s <= least_s * (1 + ROUNDING):
        return Verdict(TRUE, f"bound_s: {bound_s!r} is at most the floor {least_s!r}, which needs no solver")
    cheapest_s = min(placement_s(problem, layout) for layout in (layouts.block(problem), layouts.rows(problem)))
    if bound_s > cheapest_s * (1 + ROUNDING):
        return Verdict(FALSE, f"bound_s: {bound_s!r} is above {cheapest_s!r}, the cost of a regular layout")
    from planner.search.exact import MAX_DEVICES, prove

    if problem.n_devices > MAX_DEVICES:
        return Verdict(
            UNCHECKED,
            f"bound_s: {bound_s!r} is above the floor {least_s!r}; for {problem.n_devices} devices it rests on CP-SAT",
        )
    _, optimum_s = prove(problem, layouts.block(problem), placement_s(problem, layouts.block(problem)))
    return verdict(
        bound_s <= optimum_s * (1 + ROUNDING), f"bound_s: {bound_s!r}, the optimum by enumeration is {optimum_s!r}"
    )


def run(flags: Namespace) -> int:
    """Exit code 0 if no claim is false, else 1."""
    found = verdicts(read_any(flags.plan, flags.network))
    for one in found:
        print(f"{one.state:<10}{one.text}")
    return 1 if any(one.state == FALSE for one in found) else 0
