"""Shares of a whole number, by largest remainders."""

from collections.abc import Sequence


def shares(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` divided in proportion to `weights`; of equal remainders the first are rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    found = [int(part) for part in exact]
    for i in sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))[: total - sum(found)]:
        found[i] += 1
    return tuple(found)
