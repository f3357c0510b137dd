"""Cases of pools from a seed: the servers' run, links and faults are drawn as those of any wiring whose replicas are
equal (jaxdt.testing.cases), and workers are added to them that crash, come back, pause, are slow or cut off, and are
told things twice and late. In most cases nothing happens to the servers."""

import random
from dataclasses import replace

from jaxdt.protocol.deadline import FIRST_CONTACT_S
from jaxdt.run import config as configs
from jaxdt.run.plan import Plan
from jaxdt.sim.faults import CRASH, CUT, DUPLICATE, PAUSE, POWER_OFF, REORDER, RESTART, SLOW, Fault
from jaxdt.testing.cases import Case, in_order, work_seconds
from jaxdt.testing.cases import draw_case as draw_case_of_servers

POOL = "pool"
MORE_STEPS = 2  # than other cases have, so that the times of leases are known in some
KINDS = (CRASH, CRASH, POWER_OFF, PAUSE, CUT, SLOW)  # of what happens to a worker
LEASES_LOST_MAX = 7  # a lease whose time is not known yet takes FIRST_CONTACT_S, then twice and four times that


def draw_case(seed: int) -> Case:
    """The case of a seed."""
    case = draw_case_of_servers(seed, POOL)
    rng = random.Random(f"pool case {seed}")
    config = case.config
    n_microbatches = max(config.plan.pipelines, rng.choice((2, 4, 6, 8)))
    config = replace(
        config,
        plan=replace(config.plan, workers=rng.choice((1, 2, 2, 3)), microbatches=n_microbatches),
        sync=replace(config.sync, codec=rng.choice(("none", "none", "bf16"))),
        train=replace(config.train, steps=config.train.steps + MORE_STEPS),
        wiring=replace(config.wiring, retain_bytes=rng.choice((500, 1 << 30))),
    )
    plan = configs.default_plan(config)
    slowest_s = max(seconds["F"] for seconds in case.seconds.values())
    link_kinds = sorted(set(case.links.values()), key=lambda link: link.latency_s)
    seconds, links = dict(case.seconds), dict(case.links)
    for worker in plan.workers:
        seconds[worker] = work_seconds(slowest_s * rng.choice((0.1, 0.3, 0.3, 1.0)))
        for server in plan.peers:
            for pair in ((worker, server), (server, worker)):
                links[pair] = rng.choice(link_kinds)
    of_servers = case.faults if rng.random() < 0.4 else ()
    run_s = 2 * case.config.train.steps * plan.n_microbatches * plan.n_stages * slowest_s + 10.0
    faults = [fault for worker in plan.workers for fault in _draw_faults(rng, worker, plan, run_s)]
    waits_s = LEASES_LOST_MAX * FIRST_CONTACT_S if faults else 0.0
    return replace(
        case,
        config=config,
        plan=plan,
        seconds=seconds,
        links=links,
        faults=in_order([*of_servers, *faults]),
        extra_s=waits_s,
    )


def _draw_faults(rng: random.Random, worker: int, plan: Plan, run_s: float) -> list[Fault]:
    """One after the other. Half of the workers hear everything once and in order."""
    servers = plan.placement[plan.seat(worker)[0]]
    faults: list[Fault] = []
    if rng.random() < 0.5:
        for kind in (DUPLICATE, REORDER):
            faults.append(Fault(0.0, kind, worker, run_s, others=servers))
            faults += [Fault(0.0, kind, server, run_s, others=(worker,)) for server in servers]
    at_s = rng.uniform(0.0, 0.5) * run_s
    for _ in range(rng.choice((0, 1, 2, 4))):
        kind, seconds = rng.choice(KINDS), rng.choice((0.3, 3.0, 6.0)) * rng.uniform(0.5, 3.0)
        if kind in (CRASH, POWER_OFF):
            faults.append(Fault(at_s, kind, worker))
            faults += [Fault(at_s + seconds, RESTART, worker)] if rng.random() < 0.8 else []
        else:
            others = servers if kind == CUT else ()
            faults.append(Fault(at_s, kind, worker, seconds, others=others, factor=rng.choice((5.0, 50.0))))
        at_s += seconds + rng.uniform(0.0, 0.5) * run_s
    return faults
