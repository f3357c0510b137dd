"""The pipeline that comes back, and the one that gives it its states: both follow from a view, so all members agree."""

from jaxdt.protocol import events as ev
from jaxdt.run.plan import Plan


def joining_pipeline(plan: Plan, view: ev.View) -> int | None:
    """The pipeline of a view whose members lack their states; there is one at most."""
    return plan.seat(view.joining[0])[1] if view.joining else None


def donor_pipeline(plan: Plan, view: ev.View) -> int | None:
    """The one that gives them: the least that is whole. None where nobody joins."""
    if not view.joining:
        return None
    states = view.by_peer.keys() - set(view.joining)
    whole = [p for p in range(plan.n_pipelines) if all(row[p] in states for row in plan.placement)]
    return min(whole, default=None)
