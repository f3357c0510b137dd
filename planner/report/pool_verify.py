"""Whether the claims of a pool's plan are true: its cost by Eq. 1 and 2, the roles of its devices, the order of its
stages. Nothing here is shared with the search."""

import itertools
import math
from collections.abc import Iterable, Sequence

from planner.cost.reference import pair_s
from planner.model.proof import ROUNDING
from planner.report.pool_plan import CostedPool, pool_digest
from planner.report.verdict import TRUE, UNCHECKED, Verdict, verdict

ENUMERATED_STAGES = 8


def verdicts(costed: CostedPool) -> list[Verdict]:
    """A verdict for every claim of a pool's plan on this network."""
    facts = costed.facts
    name = costed.network.name or "this network"
    same = facts.digest == pool_digest(costed.network)
    step_s = costed.cost.total_s
    return [
        verdict(same, f"digest: {facts.digest} is of {'' if same else 'another network than '}{name}"),
        verdict(
            math.isclose(facts.step_s, step_s, rel_tol=ROUNDING), f"step_s: {facts.step_s!r}, {step_s!r} by Eq. 1-2"
        ),
        *_roles(costed),
        _units(costed),
        _order(costed),
        Verdict(UNCHECKED, "unit_s: seconds of a unit on each device are the profile's"),
    ]


def _roles(costed: CostedPool) -> list[Verdict]:
    """Verdicts on the roles: servers are reliable, workers are not, and every device is in one place."""
    devices, stages = costed.network.devices, costed.stages
    wrong = [d for stage in stages for d in stage.servers if devices[d].disconnect_prob is not None]
    wrong += [d for stage in stages for d in stage.workers if devices[d].disconnect_prob is None]
    split = [k for k, one in enumerate(stages) if not _owned_once(one.front, one.back, costed.plan.roles.servers[k])]
    used = [devices[d].name for stage in stages for d in (*stage.servers, *stage.workers)]
    places = sorted([*used, *costed.plan.found.get("left_out", ())])
    once = places == sorted(costed.plan.devices)
    return [
        verdict(not wrong, f"roles: servers are reliable and workers are not{_but(costed.name(d) for d in wrong)}"),
        verdict(not split, f"roles: a server is in front or at the back, a lone one both{_but(map(str, split))}"),
        verdict(once, "roles: every device is a server, a worker or left out, and that once"),
    ]


def _but(exceptions: Iterable[str]) -> str:
    """The end of a claim that does not hold for some."""
    named = ", ".join(exceptions)
    return f", but for {named}" if named else ""


def _owned_once(front: Sequence[int], back: Sequence[int], servers: Sequence[int]) -> bool:
    if len(servers) == 1:
        return tuple(front) == tuple(back) == tuple(servers)
    return sorted([*front, *back]) == sorted(servers)


def _units(costed: CostedPool) -> Verdict:
    """Shares of a mini-batch go by power, rounded to whole units."""
    facts, names = costed.facts, costed.plan.devices
    n_units = costed.plan.n_microbatches // facts.n_minibatches
    for k, stage in enumerate(costed.stages):
        power = {d: 1 / sum(facts.unit_s[names[d]]) for d in stage.units}
        for d, n in stage.units.items():
            quota = n_units * power[d] / sum(power.values())
            if abs(n - quota) >= 1:
                return verdict(False, f"units: {costed.name(d)} of stage {k} has {n}, its power is worth {quota:.2f}")
    return Verdict(TRUE, f"units: the {n_units} of a mini-batch go by power, rounded")


def _order(costed: CostedPool) -> Verdict:
    """Whether no other order of the stages is a shorter path."""
    rows, path_s = costed.plan.roles.servers, costed.facts.path_s
    between: dict[tuple[int, int], float] = {}
    for a, b in itertools.combinations(range(len(rows)), 2):
        pairs = [pair_s(costed.network, d, e, costed.facts.unit_bytes) for d in rows[a] for e in rows[b]]
        between[a, b] = between[b, a] = sum(pairs) / len(pairs)
    own_s = _length_s(between, range(len(rows)))
    if not math.isclose(own_s, path_s, rel_tol=ROUNDING, abs_tol=ROUNDING):
        return verdict(False, f"path_s: {path_s!r}, {own_s!r} by the network")
    if len(rows) > ENUMERATED_STAGES:
        return Verdict(UNCHECKED, f"path_s: {path_s!r} is the length of {len(rows)} stages, too many to try all orders")
    orders = (order for order in itertools.permutations(range(len(rows))) if order[0] <= order[-1])
    least_s = min(_length_s(between, order) for order in orders)
    return verdict(
        path_s <= least_s * (1 + ROUNDING), f"path_s: {path_s!r}, the shortest order by enumeration {least_s!r}"
    )


def _length_s(between: dict[tuple[int, int], float], order: Sequence[int]) -> float:
    return sum(between[a, b] for a, b in itertools.pairwise(order))
