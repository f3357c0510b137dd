"""How much longer a batch takes with losses if work is a fluid: no tasks, links or waiting, so each stage's machines
compute all the time. The model shares no code with the simulator, and is a check of it.

A stage has one unit of work, and each machine a power. With T0 the batch without losses, machine i is lost at t_i T0
after it has done c_i t_i T0. The rest of the batch begins at once on the machines that are left.

    KEEP        its finished work stays: the gradients survive, which no system brings about
    REDO        its stage does that work again; the paper's servers, counted exactly
    EVERYWHERE  all stages do that work again, from the tokens on: swarm without kept tensors
"""

from collections.abc import Mapping

from experiments.reproduce.hybrid_ps_parts.fleets import Fleet

KEEP, REDO, EVERYWHERE = "keep", "redo", "everywhere"


def slowdown(fleet: Fleet, lost: Mapping[int, float], reading: str) -> float:
    """Seconds of a batch with losses over seconds without. lost: machine -> the moment, a share of the batch."""
    stages = [fleet.stage(stage) for stage in range(fleet.n_stages)]
    power = {d: 1 / site.slowdown for d, site in enumerate(fleet.devices)}
    clean = 1 / min(sum(power[d] for d in row) for row in stages)
    done = {d: power[d] * moment * clean for d, moment in lost.items()}
    ends = []
    for row in stages:
        left = sum(power[d] for d in row if d not in lost)
        own, others = (sum(n for d, n in done.items() if (d in row) is mine) for mine in (True, False))
        again = {KEEP: -own, REDO: 0.0, EVERYWHERE: others}[reading]
        ends.append((1 + again) / left if left else float("inf"))
    return max(ends) / clean
