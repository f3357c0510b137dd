"""`python -m planner compare a.json b.json`: two plans by the same evaluator, on the second one's network and sizes."""

from argparse import Namespace

from jaxdt.spec import plan as plans
from jaxdt.spec.errors import BadInput
from jaxdt.spec.plan import Plan
from planner.cost.reference import cost_of
from planner.model.plan_io import read
from planner.report.text import row


def moved(a: Plan, b: Plan) -> list[str]:
    """Devices that hold another stage in b than in a; a plan and its reverse count as the same, so the order of `a`
    that moves fewer devices is taken."""
    stage_b = {peer: stage for stage, peers in enumerate(b.placement) for peer in peers}
    ways = []
    for order in (a.placement, a.placement[::-1]):
        stage_a = {peer: stage for stage, peers in enumerate(order) for peer in peers}
        ways.append([d for d in sorted(stage_a | stage_b) if stage_a.get(d) != stage_b.get(d)])
    return [b.devices[d] for d in min(ways, key=len)]


def run(flags: Namespace) -> int:
    b = read(flags.b, flags.network)
    a = plans.load(flags.a)
    if a.devices != b.plan.devices:
        raise BadInput(f"{flags.a}: devices: expected those of {flags.b}")
    cost_a = cost_of(b.network, a.placement, b.c_dp_bytes, b.c_pp_bytes)
    print(f"{'seconds, Eq. 1-4':<16}{'total':>12}{'data-parallel':>16}{'pipeline':>12}")
    print(row("a", cost_a.total_s, cost_a.datap_s, cost_a.pipelinep_s))
    print(row("b", b.cost.total_s, b.cost.datap_s, b.cost.pipelinep_s))
    print(
        row(
            "b - a",
            b.cost.total_s - cost_a.total_s,
            b.cost.datap_s - cost_a.datap_s,
            b.cost.pipelinep_s - cost_a.pipelinep_s,
        )
    )
    names = moved(a, b.plan)
    print(
        f"{len(names)} of {len(b.plan.devices)} devices hold another stage" + (f": {', '.join(names)}" if names else "")
    )
    return 0
