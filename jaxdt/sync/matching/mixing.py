"""Does a rule of averaging mix its replicas? Who met whom, the components of the exchange graph, and the mixing rate.

In the mean exchange matrix of a stage, row i is what replica i continues with after an average, in the mean over its
averages: the part 1 / n of each member of a group of n. Its second eigenvalue says how much of a difference between
replicas is left after each has averaged once, at the slowest: 0 where all average together, 1 where some never meet.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxdt.protocol.reports import GroupReport
from jaxdt.run.plan import Plan

N_ITERATIONS = 500  # of the power iteration; it ends earlier where the eigenvalue stands still
TOLERANCE = 1e-9
PAIRS_SHOWN = 12


@dataclass(frozen=True)
class Mixing:
    """The averages of the replicas of one stage: how many groups, how often each pair met, the components of the graph
    of pairs that met, and the second eigenvalue of the mean exchange matrix."""

    n_groups: int
    meetings: dict[tuple[int, int], int]
    components: tuple[tuple[int, ...], ...]
    second_eigenvalue: float

    @property
    def mixes(self) -> bool:
        return len(self.components) == 1


def mixing(replicas: Sequence[int], groups: Iterable[Sequence[int]]) -> Mixing:
    """What these groups do to the replicas of a stage."""
    groups = [tuple(sorted(set(group) & set(replicas))) for group in groups]
    meetings = Counter(pair for group in groups for pair in itertools.combinations(group, 2))
    component_of = {replica: {replica} for replica in replicas}
    for a, b in meetings:
        merged = component_of[a] | component_of[b]
        component_of.update(dict.fromkeys(merged, merged))
    components = tuple(sorted({tuple(sorted(component)) for component in component_of.values()}))
    return Mixing(len(groups), dict(meetings), components, _second_eigenvalue(replicas, groups))


def _second_eigenvalue(replicas: Sequence[int], groups: Sequence[Sequence[int]]) -> float:
    """By power iteration on the symmetric matrix that is similar to the mean exchange matrix, whose first eigenvector
    is known and taken away. No eigenvalue is negative. A replica that never averaged keeps what it has."""
    n_averages = Counter(member for group in groups for member in group)
    if len(replicas) < 2:
        return 0.0
    if any(n_averages[replica] == 0 for replica in replicas):
        return 1.0
    root = {replica: math.sqrt(n_averages[replica]) for replica in replicas}
    norm = math.sqrt(sum(n_averages.values()))
    draw = random.Random(0)
    vector, eigenvalue = {replica: draw.gauss(0, 1) for replica in replicas}, 0.0
    for _ in range(N_ITERATIONS):
        along = sum(vector[replica] * root[replica] for replica in replicas) / norm**2
        vector = {replica: vector[replica] - along * root[replica] for replica in replicas}
        length = math.sqrt(sum(x * x for x in vector.values()))
        if length < TOLERANCE:
            return 0.0
        vector = {replica: x / length for replica, x in vector.items()}
        product = dict.fromkeys(replicas, 0.0)
        for group in groups:
            mean = sum(vector[member] / root[member] for member in group) / len(group)
            for member in group:
                product[member] += mean / root[member]
        before, eigenvalue = eigenvalue, sum(product[replica] * vector[replica] for replica in replicas)
        if abs(eigenvalue - before) < TOLERANCE:
            break
        vector = product
    return min(1.0, eigenvalue)


def mixing_of_stages(plan: Plan, reports: Iterable[GroupReport]) -> dict[int, Mixing]:
    """By stage, for those with several replicas, from the groups of a run or a simulation; none without groups."""
    groups: dict[int, list[list[int]]] = {}
    for report in reports:
        groups.setdefault(report.stage, []).append(report.members)
    rows = enumerate(plan.placement)
    return {stage: mixing(row, groups[stage]) for stage, row in rows if len(row) > 1 and stage in groups}


def mixing_lines(plan: Plan, reports: Iterable[GroupReport]) -> list[str]:
    """For people: a line for each stage, and a warning where the replicas of one never meet."""
    lines: list[str] = []
    for stage, found in mixing_of_stages(plan, reports).items():
        met = [f"{a}-{b} {n}x" for (a, b), n in sorted(found.meetings.items())]
        shown = (
            f"{', '.join(met[:PAIRS_SHOWN])}{f' and {len(met) - PAIRS_SHOWN} more pairs' * (len(met) > PAIRS_SHOWN)}"
        )
        lines.append(
            f"stage {stage} averages in {found.n_groups} group{'s' * (found.n_groups != 1)}: met {shown or 'nobody'}; "
            f"second eigenvalue {found.second_eigenvalue:.3f}"
        )
        if not found.mixes:
            apart = " | ".join(" ".join(map(str, component)) for component in found.components)
            lines.append(
                f"warning: stage {stage}: replicas {apart} never met in {found.n_groups} groups: the rule does not "
                "mix, and each part trains a model of its own"
            )
    return lines
