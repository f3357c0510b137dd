"""The test whether a plan is optimal: its relative gap to a lower bound, and the error for an impossible bound."""

PROOF_GAP = 1e-6  # (cost - bound) / bound, up to which a plan is called optimal
ROUNDING = 1e-9  # relative difference that sums of the same floats in another order may have


class BoundError(Exception):
    """A lower bound is above the cost of a plan that exists, so that one of the two is wrong. A defect of ours."""


def is_optimal(cost_s: float, bound_s: float) -> bool:
    """Whether no plan costs less than a plan of this cost by more than PROOF_GAP."""
    return cost_s <= bound_s * (1 + PROOF_GAP)


def checked_bound(bound_s: float, cost_s: float) -> float:
    """The bound of a plan's cost. BoundError for a bound above the cost by more than rounding, which explains the
    smaller differences: those give the cost itself."""
    if bound_s > cost_s * (1 + ROUNDING):
        raise BoundError(
            f"bound_s: got {bound_s!r} s, above the {cost_s!r} s of a plan that exists; one of them is wrong"
        )
    return min(bound_s, cost_s)
