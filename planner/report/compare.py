"""`python -m planner compare a.json b.json`: two plans by the same evaluator, on the second one's network and sizes."""

from argparse import Namespace

from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan
from planner.report.plan_file import cost_plan, read
from planner.report.pool_plan import check_network
from planner.report.tables import HEADER, row


def moved_devices(a: Plan, b: Plan) -> list[str]:
    """Names of the devices that hold another stage in b than in a. A plan and its reverse count as the same: the order
    of `a` that moves fewer devices is taken."""
    stage_b = {peer: stage for stage, peers in enumerate(b.placement) for peer in peers}
    moved = []
    for order in (a.placement, a.placement[::-1]):
        stage_a = {peer: stage for stage, peers in enumerate(order) for peer in peers}
        moved.append([d for d in sorted(stage_a | stage_b) if stage_a.get(d) != stage_b.get(d)])
    return [b.devices[d] for d in min(moved, key=len)]


def shape_of(plan: Plan) -> str:
    return f"{plan.n_stages} stages x {plan.n_pipelines} pipelines"


def run(flags: Namespace) -> int:
    b = read(flags.b, flags.network)
    plan_a = plans.load(flags.a)
    if plan_a.devices != b.plan.devices:
        raise BadInput(f"{flags.a}: devices: expected those of {flags.b}")
    if shape_of(plan_a) != shape_of(b.plan):
        raise BadInput(f"{flags.a}: has {shape_of(plan_a)}, expected the {shape_of(b.plan)} of {flags.b}")
    for name in ("c_dp_bytes", "c_pp_bytes"):
        if plan_a.found.get(name, b.plan.found[name]) != b.plan.found[name]:
            raise BadInput(
                f"{flags.a}: {name}: got {plan_a.found[name]:g}, expected the {b.plan.found[name]:g} of {flags.b}"
            )
    check_network(plan_a, b.network, flags.a)
    a = cost_plan(plan_a, b.network, b.sizes)
    print(HEADER)
    print(row("a", *a.cost.terms_s))
    print(row("b", *b.cost.terms_s))
    print(row("b - a", *(to_s - from_s for to_s, from_s in zip(b.cost.terms_s, a.cost.terms_s, strict=True))))
    names = moved_devices(a.plan, b.plan)
    listed = f": {', '.join(names)}" if names else ""
    print(f"{len(names)} of {len(b.plan.devices)} devices hold another stage{listed}")
    return 0
