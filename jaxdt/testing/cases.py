"""Cases from a seed: a run of a kind, its links and its faults.

An equal seed gives an equal case, whatever was drawn before: the texts that seed a random.Random decide what is drawn,
so they stay as they are.

- Replicas stay equal, with a wiring "swarm" or "fixed". In some cases peers change stages: because of their queues, or
  at random, which moves peers that a queue never would.
- "pool": to such a run workers are added that crash, come back, pause, are slow or cut off, and are told things twice
  and late. In most cases nothing happens to the servers.
- "independent": replicas may differ, in averaging groups ("groups") or with servers ("server").
"""

import math
import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import FIRST_CONTACT_S
from jaxdt.run import config as configs
from jaxdt.run.config import GroupsConfig, NetConfig, RunConfig, WiringConfig
from jaxdt.run.network import Link
from jaxdt.run.plan import Plan
from jaxdt.sim.faults import (
    CLOG,
    CONTROL,
    CRASH,
    CRASH_SEEN_S,
    CUT,
    DATA,
    DEAD_LINK_S,
    DRAIN,
    DUPLICATE,
    ENDS,
    EVICT,
    FAIL,
    HOLD,
    JOIN,
    LATE,
    LEAVE,
    NEVER_DONE,
    PAUSE,
    POWER_OFF,
    REORDER,
    RESTART,
    SAVE,
    SLOW,
    STALE,
    STOP,
    TAKEOVER,
    TWICE,
    Fault,
    broken_link,
    draw,
    perturbations,
    spares_every_stage,
)
from jaxdt.sim.stragglers.stalls import STEP, WORK, Stalls
from jaxdt.testing.case import Busy, Case, work_seconds
from jaxdt.wiring.base import wiring_entry

POOL, INDEPENDENT = "pool", "independent"  # kinds of cases, beside wirings and syncs
WIRINGS_DRAWN = ("swarm", "swarm", "fixed")  # by seed
SYNCS_DRAWN = ("groups", "groups", "groups", "server")  # by seed

N_STEPS = 3
N_STEPS_WITH_MOVES = 6
GRACE_S = 20.0  # within the time that a run has after its last fault

MORE_STEPS = 2  # than other cases have, in a pool, so that the times of leases are known in some
WORKER_KINDS = (CRASH, CRASH, POWER_OFF, PAUSE, CUT, SLOW)  # of what happens to a pool's worker
LEASES_LOST_MAX = 7  # a lease whose time is not known yet takes FIRST_CONTACT_S, then twice and four times that

BLIP_S = 1.5  # a peer that does nothing for so long is not lost, also if a link stands still just then
HELD_S = 8.0  # longest time for which a link between servers stands still
HARMLESS_KINDS = (PAUSE, SLOW, CLOG, CUT, DUPLICATE, REORDER)  # as they are drawn where no peer may be lost
LOSSES = (CRASH, POWER_OFF, FAIL, LEAVE, PAUSE, CUT)
RETURNS_FRAC = 0.3  # of the cases with groups
STEPS_MORE = 8  # for a run in which a pipeline may come back
TIED_FRAC = 0.25  # of the cases
TIED_DRAWS = "head 168"  # draws no seed that a test knows for its faults
SMALL_SLICE, LARGE_SLICE = 1 << 9, 1 << 20


def draw_case(seed: int, kind: str = "") -> Case:
    """The case of a seed, of a kind in the text above; '' for one whose replicas stay equal, with a wiring that depends
    on the seed, as the sync does of "independent"."""
    if kind == POOL:
        return _with_workers(random.Random(f"pool case {seed}"), _draw_equal(seed, POOL))
    if kind == INDEPENDENT:
        return _draw_independent(seed, SYNCS_DRAWN[seed % len(SYNCS_DRAWN)])
    if kind in SYNCS_DRAWN:
        return _draw_independent(seed, kind)
    return _draw_equal(seed, kind or WIRINGS_DRAWN[seed % len(WIRINGS_DRAWN)])


def in_order(faults: Collection[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def kinds_of(cases: Collection[Case]) -> set[str]:
    """The kinds of faults in these cases."""
    return {fault.kind for case in cases for fault in case.faults}


def _draw_links(rng: random.Random, plan: Plan, latencies_s: tuple[float, ...], gbps: float) -> dict:
    ends = [ev.COORDINATOR, *plan.peers]
    return {(src, dst): Link(rng.choice(latencies_s), gbps) for src in ends for dst in ends if src != dst}


# --------------------------------------------------------------------------------------------- replicas that stay equal


def _draw_equal(seed: int, wiring: str) -> Case:
    rng = random.Random(f"case {seed}")
    config = _with_delay(_draw_config(rng, wiring), seed)
    plan = configs.default_plan(config)
    work_s = rng.choice((0.05, 0.3))
    seconds = {peer: work_seconds(work_s * rng.uniform(0.5, 3.0)) for peer in plan.peers}
    latencies_s = rng.choice(((0.001, 0.01), (0.01, 0.2), (0.1, 0.5)))
    gbps = rng.choice((1e-4, 1e-3))
    may_lose = plan.placement if rng.random() < 0.9 else [plan.peers]  # else a stage may lose all its peers
    persist_s = rng.choice((0.0, 0.05, 0.5))
    n_works = plan.n_microbatches / plan.n_pipelines + plan.n_stages
    run_s = N_STEPS * (10 * work_s * n_works + 8 * latencies_s[1] + persist_s)
    pause_s = rng.choice((1.0, 6.0, 15.0))
    n_faults = rng.choice((0, 1, 2, 2, 3, 4))
    links = _draw_links(rng, plan, latencies_s, gbps)
    drawn = draw(seed, may_lose, n_faults, rng.choice((0.5, 1.0)) * run_s, pause_s)
    faults = _with_arrivals(seed, rng, plan, run_s, drawn)
    nonfinite = None if config.train.on_nonfinite == "stop" else (0, 0, rng.randrange(N_STEPS))
    case = Case(seed, config, plan, seconds, links, persist_s, faults, nonfinite, busy=Busy.draw(seed))
    for text, with_more in MORE:
        case = with_more(random.Random(f"{text} {seed}"), case, run_s)
    return case


def _with_failures(rng: random.Random, case: Case, run_s: float) -> Case:
    """In half of the cases with newcomers one of them fails, before or after it has become a member. In up to a sixth
    of all cases a peer fails, or its Work hangs, whose stage can do without it."""
    faults = list(case.faults)
    for fault in case.faults:
        if fault.kind == JOIN and rng.random() < 0.5:
            fails_s = fault.at_s + rng.choice((0.0, 1.0)) * rng.uniform(0.0, run_s)
            faults.append(Fault(fails_s, FAIL, ev.TEMPORARY_IDS + fault.peer))
    peer = rng.choice(sorted(case.plan.peers))
    fails = Fault(rng.uniform(0.0, run_s), FAIL, peer)
    hangs = Fault(rng.uniform(0.0, run_s), SLOW, peer, rng.uniform(0.0, run_s), factor=NEVER_DONE)
    fault = rng.choice((fails, hangs, *[None] * 10))
    if fault and spares_every_stage([*faults, fault], case.plan.placement):
        faults.append(fault)
    return replace(case, faults=in_order(faults))


def _with_lost_announcements(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a fifth of the cases with a delay the coordinator cannot reach a peer and then dies, so that its messages to
    that peer, of up to two steps, are lost."""
    dies = any(fault.kind in ENDS and fault.peer == ev.COORDINATOR for fault in case.faults)
    if rng.random() >= 0.2 or not case.config.sync.delay or dies:
        return case
    at_s = rng.uniform(0.0, run_s)
    unreachable_s = rng.uniform(0.1, 0.5) * run_s
    dead_s = at_s + unreachable_s
    peer = rng.choice(sorted(case.plan.peers))
    faults = [
        Fault(at_s, CLOG, ev.COORDINATOR, unreachable_s + 0.1, others=(peer,), factor=0.0, channel=CONTROL),
        Fault(dead_s, CRASH, ev.COORDINATOR),
        Fault(dead_s + rng.uniform(0.2, 3.0), RESTART, ev.COORDINATOR),
    ]
    return replace(case, faults=in_order([*case.faults, *faults]))


def _with_second_processes(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a sixth of the cases a peer is started although it runs, and in half of those whose coordinator is replaced
    the old one continues."""
    faults = list(case.faults)
    if rng.random() < 1 / 6:
        begun_s = 1.0  # the first process of the peer is known by then
        faults.append(Fault(begun_s + rng.uniform(0.0, run_s), TWICE, rng.choice(sorted(case.plan.peers))))
    for fault in case.faults:
        if fault.kind == RESTART and fault.peer == ev.COORDINATOR and rng.random() < 0.5:
            faults.append(Fault(fault.at_s + rng.uniform(0.5, 5.0), STALE, ev.COORDINATOR, rng.uniform(0.0, 12.0)))
    return replace(case, faults=in_order(faults))


def _with_perturbations(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a fifth of the cases the parameters of some replicas change; these replicas compare them often."""
    if case.seed % 5 != 2:
        return case
    sync = replace(case.config.sync, check_every_steps=1 + case.seed // 5 % 2)
    faults = perturbations(case.seed, case.plan.placement, run_s)
    return replace(case, config=replace(case.config, sync=sync), faults=in_order([*case.faults, *faults]))


def _with_moves(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a third of the cases in which they can, peers change stages, about once a step or less often."""
    cause = rng.choice(("queue", "random", "", "", "", ""))
    if not cause or not wiring_entry(case.config.wiring.kind).may_change_stages:
        return case
    n_steps = N_STEPS_WITH_MOVES + case.config.sync.delay
    every_s = rng.choice((0.1, 0.3, 1.0)) * (run_s / N_STEPS)
    train = replace(case.config.train, steps=n_steps)
    wiring = case.config.wiring
    if cause == "queue":
        wiring = replace(wiring, rebalance_s=every_s, rebalance_moves=rng.choice((1, 3)))
    config = replace(case.config, train=train, wiring=wiring)
    return replace(case, config=config, random_moves_s=every_s if cause == "random" else 0.0)


def _with_vacant_stage(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a third of the cases the run waits for a lost stage, and one stage loses sight of its last replica while
    newcomers wait: all its other replicas end, and the last one falls silent, ends, or ends just after another replica
    has fallen silent. Some tensors are late, so that they arrive in another generation than the one they are of."""
    # A last replica whose device hangs for ever is awaited without end, so the two are not drawn together.
    never_ends = any(fault.until_s == math.inf or fault.factor == NEVER_DONE for fault in case.faults)
    if rng.random() >= 1 / 3 or never_ends:
        return case
    grace_s = rng.choice((8.0, 20.0, 20.0))
    row = rng.choice(case.plan.placement)
    *others, first, last = [None, None, *rng.sample(row, len(row))]
    at_s = rng.uniform(0.2, 1.0) * run_s
    faults = [Fault(rng.uniform(0.0, at_s), rng.choice(ENDS), peer) for peer in others if peer is not None]
    kind = rng.choice(("silence", "silence", "end", "eviction"))
    silent_s = rng.choice((rng.uniform(2.0, 12.0), rng.uniform(2.0, 12.0), grace_s + rng.uniform(5.0, 15.0)))
    if kind == "eviction" and first is not None:
        faults.append(_silence(rng, at_s, first, silent_s))
        faults.append(Fault(at_s + rng.uniform(3.0, 9.0), rng.choice(ENDS), last))
    else:
        faults += [Fault(rng.uniform(0.0, at_s), CRASH, first)] if first is not None else []
        faults.append(Fault(at_s, rng.choice(ENDS), last) if kind == "end" else _silence(rng, at_s, last, silent_s))
    faults += [Fault(rng.uniform(0.0, 1.0) * at_s, JOIN, 10 + n) for n in range(rng.choice((1, 1, 2)))]
    faults += [_slow_tensors(rng, at_s, case.plan) for _ in range(rng.choice((0, 0, 1)))]
    if rng.random() < 0.5:
        peers = tuple(sorted(case.plan.peers))
        faults.append(Fault(0.0, LATE, peers[0], at_s + grace_s, peers[1:], peers))
    wiring = replace(case.config.wiring, on_stage_lost="wait", stage_grace_s=grace_s)
    return replace(case, config=replace(case.config, wiring=wiring), faults=in_order([*case.faults, *faults]))


def _with_lost_stage(rng: random.Random, case: Case, run_s: float) -> Case:
    """In an eighth of the cases that stop when a stage is lost, all replicas of one stage end at once."""
    if case.config.wiring.on_stage_lost == "wait" or rng.random() >= 1 / 8:
        return case
    at_s = rng.uniform(0.2, 0.8) * run_s
    faults = [Fault(at_s, rng.choice(ENDS), peer) for peer in rng.choice(case.plan.placement)]
    return replace(case, faults=in_order([*case.faults, *faults]))


def _with_straggler(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a quarter of the cases a peer's Work of a moment takes very long, and ends, if its stage can do without it."""
    if rng.random() >= 1 / 4 or case.config.wiring.on_stage_lost == "wait":
        return case
    at_s, factor = rng.uniform(0.0, run_s), rng.choice((25.0, 50.0, 200.0))
    fault = Fault(at_s, SLOW, rng.choice(sorted(case.plan.peers)), rng.uniform(0.0, 1.0), factor=factor)
    if not spares_every_stage([*case.faults, fault], case.plan.placement):
        return case
    return replace(case, faults=in_order([*case.faults, fault]))


def _with_takeover(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a sixth of the cases whose coordinator does not die another one takes over, often while peers are evicted."""
    dies = any(fault.peer == ev.COORDINATOR and fault.kind in (*ENDS, RESTART) for fault in case.faults)
    if dies or rng.random() >= 1 / 6:
        return case
    begins_s = [fault.at_s for fault in case.faults if fault.may_lose] or [0.0]
    at_s = rng.choice(begins_s) + rng.choice((rng.uniform(0.0, 10.0), rng.uniform(0.0, run_s)))
    fault = Fault(max(1.0, at_s), TAKEOVER, ev.COORDINATOR, rng.uniform(0.0, 12.0))
    return replace(case, faults=in_order([*case.faults, fault]))


def _with_operator(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a sixth of the cases an operator pauses and resumes the run, wants a checkpoint, or wants a peer to go whose
    stage can do without it."""
    if rng.random() >= 1 / 6:
        return case
    kind = rng.choice((HOLD, HOLD, DRAIN, EVICT, SAVE))
    peer = rng.choice(sorted(case.plan.peers)) if kind in (DRAIN, EVICT) else ev.COORDINATOR
    seconds = rng.uniform(0.0, 20.0) if kind == HOLD else 0.0
    fault = Fault(rng.uniform(0.2, 1.0) * run_s, kind, peer, seconds)
    if fault.may_lose and not spares_every_stage([*case.faults, fault], case.plan.placement):
        return case
    return replace(case, faults=in_order([*case.faults, fault]))


def _with_slow_updates(rng: random.Random, case: Case, run_s: float) -> Case:
    """In the cases that delay updates and go back because of a gradient, the updates of one replica take about as long
    as a step. So the next generation may begin at the others while such an update runs."""
    if case.config.train.on_nonfinite != "rollback" or not case.config.sync.delay:
        return case
    peer, update_s = rng.choice(sorted(case.plan.peers)), rng.uniform(0.5, 2.0) * run_s / N_STEPS
    seconds = {**case.seconds, peer: {**case.seconds[peer], "U": update_s}}
    extra_s = case.extra_s + 3 * case.config.train.steps * update_s
    return replace(case, seconds=seconds, extra_s=extra_s)


def _with_stop(rng: random.Random, case: Case, run_s: float) -> Case:
    """In a twelfth of the cases an operator stops the run."""
    if rng.random() >= 1 / 12:
        return case
    return replace(case, faults=in_order([*case.faults, Fault(rng.uniform(0.1, 1.0) * run_s, STOP, ev.COORDINATOR)]))


def _with_codec(rng: random.Random, case: Case, run_s: float) -> Case:
    """In half of the cases gradients travel in few bytes."""
    sync = replace(case.config.sync, codec=rng.choice(("none", "none", "bf16", "int8")))
    return replace(case, config=replace(case.config, sync=sync))


def _silence(rng: random.Random, at_s: float, peer: int, seconds: float) -> Fault:
    """The coordinator does not hear a peer that lives."""
    if rng.random() < 0.5:
        return Fault(at_s, PAUSE, peer, seconds)
    return Fault(at_s, CUT, peer, seconds, others=(ev.COORDINATOR,), breaks_s=rng.choice((CRASH_SEEN_S, DEAD_LINK_S)))


def _slow_tensors(rng: random.Random, at_s: float, plan: Plan) -> Fault:
    """The tensors from one peer to another stand still for a while."""
    src, dst = rng.sample(sorted(plan.peers), 2)
    return Fault(at_s * rng.uniform(0.5, 1.0), CLOG, src, rng.uniform(1.0, 15.0), (), (dst,), 0.0, DATA)


def _with_own_disks(rng: random.Random, case: Case, run_s: float) -> Case:
    """In half of the cases the peers have no common disk, and send the parts of checkpoints to one another."""
    if rng.random() < 0.5:
        return case
    train = replace(case.config.train, checkpoint_copies=rng.choice((1, 2, 2, 3)))
    sync = replace(case.config.sync, slice_bytes=rng.choice((1 << 10, 1 << 20)))
    return replace(case, config=replace(case.config, train=train, sync=sync), has_common_disk=False)


def _with_arrivals(seed: int, rng: random.Random, plan: Plan, run_s: float, faults: list[Fault]) -> tuple[Fault, ...]:
    """Add arrivals and departures: some crashed peers start again, newcomers join, a peer may leave, the coordinator
    may die and start again, and in a quarter of the cases two peers lose their link."""
    found = list(faults)
    for fault in faults:
        if fault.kind in ENDS and rng.random() < 0.5:
            found.append(Fault(fault.at_s + rng.uniform(0.0, run_s), RESTART, fault.peer))
    found += [Fault(rng.uniform(0.0, run_s), JOIN, n) for n in range(rng.choice((0, 0, 1, 2)))]
    if rng.random() < 0.2:
        found.append(Fault(rng.uniform(0.5, 1.0) * run_s, LEAVE, rng.choice(sorted(plan.peers))))
    if rng.random() < 0.15:
        at_s = rng.uniform(0.0, run_s)
        found += [Fault(at_s, CRASH, ev.COORDINATOR), Fault(at_s + rng.uniform(0.2, 20.0), RESTART, ev.COORDINATOR)]
    cut = broken_link(seed, plan.placement, run_s)
    if seed % 4 == 3 and spares_every_stage([*found, cut], plan.placement):
        found.append(cut)
    return in_order(found)


def _draw_config(rng: random.Random, kind: str) -> RunConfig:
    stages, pipelines = rng.choice(((2, 1), (2, 2), (2, 2), (2, 3), (2, 3), (2, 4), (3, 2), (3, 2), (3, 3)))
    on_nonfinite = rng.choice(("stop",) * 8 + ("skip", "rollback"))
    eval_every_steps = rng.choice((0, 2))
    model = dict(preset="debug", n_layers=3, d_model=8, n_heads=2, d_ff=8, max_len=4, vocab_size=16)
    parsed = configs.parse(
        dict(
            model=model | {"tied_head": rng.random() < 0.5},
            plan=dict(stages=stages, pipelines=pipelines, microbatches=max(pipelines, rng.choice((1, 3, 5, 5)))),
            train=dict(
                steps=N_STEPS,
                on_nonfinite=on_nonfinite,
                checkpoint_every_steps=rng.choice((0, 1)),
                eval_every_steps=eval_every_steps,
                eval_microbatches=2,
            ),
            sync=dict(slice_bytes=rng.choice((1 << 10, 1 << 20))),
        )
    )
    wiring = WiringConfig(
        kind=kind,
        routers=rng.choice((1, 2, stages * pipelines)),
        window=rng.choice((0, 1, 3)),
        on_stage_lost="stop",
        stage_grace_s=GRACE_S,
        retain_bytes=rng.choice((0, 500, 1 << 30)),
    )
    return replace(parsed, wiring=wiring, net=NetConfig(heartbeat_s=0.5, deadline_floor_s=4.0))


def _with_delay(config: RunConfig, seed: int) -> RunConfig:
    """Every other case delays its updates, and half of those begin with a step without delay."""
    sync = replace(config.sync, delay=seed % 2, delay_after_steps=seed // 2 % 2)
    return replace(config, sync=sync, train=replace(config.train, steps=N_STEPS + sync.delay))


# What happens besides, in this order: the text that seeds its random.Random, and its function.
MORE = (
    ("failures", _with_failures),
    ("lost word", _with_lost_announcements),
    ("second", _with_second_processes),
    ("perturbations", _with_perturbations),
    ("moves", _with_moves),
    ("disks", _with_own_disks),
    ("vacant", _with_vacant_stage),
    ("lost stage", _with_lost_stage),
    ("straggler", _with_straggler),
    ("takeover", _with_takeover),
    ("operator", _with_operator),
    ("updates", _with_slow_updates),
    ("stop", _with_stop),
    ("codec", _with_codec),
)


# ---------------------------------------------------------------------------------------------------- a pool's workers


def _with_workers(rng: random.Random, case: Case) -> Case:
    """Add workers to a run of servers."""
    config = case.config
    n_microbatches = max(config.plan.pipelines, rng.choice((2, 4, 6, 8)))
    config = replace(
        config,
        plan=replace(config.plan, workers=rng.choice((1, 2, 2, 3)), microbatches=n_microbatches),
        sync=replace(config.sync, codec=rng.choice(("none", "int8", "bf16"))),
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
    faults = [fault for worker in plan.workers for fault in _draw_worker_faults(rng, worker, plan, run_s)]
    return replace(
        case,
        config=config,
        plan=plan,
        seconds=seconds,
        links=links,
        faults=in_order([*of_servers, *faults]),
        extra_s=LEASES_LOST_MAX * FIRST_CONTACT_S if faults else 0.0,
    )


def _draw_worker_faults(rng: random.Random, worker: int, plan: Plan, run_s: float) -> list[Fault]:
    """One after the other. Half of the workers hear everything once and in order."""
    servers = plan.placement[plan.seat(worker)[0]]
    faults: list[Fault] = []
    if rng.random() < 0.5:
        for kind in (DUPLICATE, REORDER):
            faults.append(Fault(0.0, kind, worker, run_s, others=servers))
            faults += [Fault(0.0, kind, server, run_s, others=(worker,)) for server in servers]
    at_s = rng.uniform(0.0, 0.5) * run_s
    for _ in range(rng.choice((0, 1, 2, 4))):
        kind, seconds = rng.choice(WORKER_KINDS), rng.choice((0.3, 3.0, 6.0)) * rng.uniform(0.5, 3.0)
        if kind in (CRASH, POWER_OFF):
            faults.append(Fault(at_s, kind, worker))
            faults += [Fault(at_s + seconds, RESTART, worker)] if rng.random() < 0.8 else []
        else:
            others = servers if kind == CUT else ()
            faults.append(Fault(at_s, kind, worker, seconds, others=others, factor=rng.choice((5.0, 50.0))))
        at_s += seconds + rng.uniform(0.0, 0.5) * run_s
    return faults


# -------------------------------------------------------------------------------------------- replicas that may differ


def _draw_independent(seed: int, sync: str) -> Case:
    rng = random.Random(f"independent {seed}")
    work_s = rng.choice((0.05, 0.3))
    latencies_s = rng.choice(((0.001, 0.01), (0.001, 0.01), (0.01, 0.2), (0.1, 0.4)))
    n_stages, n_pipelines, n_microbatches = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 3)
    step_s = 3 * work_s * (n_microbatches + n_stages - 1) + 4 * latencies_s[1]
    raw = _draw_independent_config(rng, sync, step_s, (n_stages, n_pipelines, n_microbatches))
    _draw_options(random.Random(f"options {seed}"), raw)
    raw["model"]["tied_head"] = random.Random(f"{TIED_DRAWS} {seed}").random() < TIED_FRAC
    returns = random.Random(f"return {seed}")
    has_returns = sync == "groups" and n_pipelines > 1 and returns.random() < RETURNS_FRAC
    raw["train"]["steps"] += STEPS_MORE if has_returns else 0
    config = configs.parse(raw)
    plan = configs.default_plan(config)
    seconds = {peer: work_seconds(work_s * rng.uniform(0.5, 2.0)) for peer in plan.peers}
    gbps = rng.choice((1e-4, 1e-3))
    links = _draw_links(rng, plan, latencies_s, gbps)
    draws = rng.choice((STEP, WORK, WORK))
    stalls = Stalls(rng.choice((0.0, 0.1, 0.3)), rng.choice((0.5, 1.0, 4.0)) * step_s, seed, draws)
    stalls = replace(stalls, seconds=min(stalls.seconds, 2.0))
    nonfinite, persist_s = _draw_nonfinite(rng, config, plan), rng.choice((0.0, 0.05, 0.5))
    run_s = config.train.steps * (step_s + stalls.prob * stalls.seconds)
    faults = [*_draw_blips(seed, rng, plan, run_s), *_draw_loss(random.Random(f"loss {seed}"), plan, run_s)]
    if not any(fault.kind == RESTART for fault in faults):
        faults += _draw_restarts(random.Random(f"restart {seed}"), plan, run_s)
    faults += _draw_held_links(random.Random(f"servers {seed}"), plan, run_s)
    faults += _draw_returns(returns, plan, run_s) if has_returns else []
    busy = Busy.draw(seed)
    return Case(seed, config, plan, seconds, links, persist_s, in_order(faults), nonfinite, busy=busy, stalls=stalls)


def _draw_independent_config(
    rng: random.Random, sync: str, step_s: float, sizes: tuple[int, int, int]
) -> dict[str, Any]:
    """The fields of a config. `sizes`: stages, pipelines, and microbatches of each pipeline (some get one more)."""
    n_stages, n_pipelines, n_microbatches = sizes
    n_more = rng.randrange(n_pipelines)
    draw_settings = {"groups": _draw_groups, "server": _draw_server}[sync]
    settings = draw_settings(rng, step_s, n_pipelines)
    has_servers = sync == "server"
    model = dict(preset="debug", n_layers=4, d_model=8, n_heads=2, d_ff=8, max_len=4, vocab_size=16)
    checkpoint_every = rng.choice((0, 0, 1, 2, 3))
    return dict(
        model=model,
        plan=dict(
            stages=n_stages,
            pipelines=n_pipelines,
            microbatches=n_pipelines * n_microbatches + n_more,
            servers=int(has_servers),
            schedule=rng.choice(("1f1b", "1f1b", "gpipe")),
        ),
        train=dict(
            steps=rng.randint(3, 8),
            checkpoint_every_steps=checkpoint_every,
            on_nonfinite=rng.choice(("stop", "skip", "skip")),
        ),
        optim=dict(clip_norm=rng.choice((0.0, 1.0, 1.0))),
        wiring=dict(on_stage_lost="stop"),
        sync=dict(kind=sync, slice_bytes=rng.choice((SMALL_SLICE, LARGE_SLICE)), **{sync: settings}),
        net=dict(heartbeat_s=0.5, deadline_floor_s=4.0),
    )


def _draw_options(rng: random.Random, raw: dict[str, Any]) -> None:
    """In half of the cases exchanged vectors are rounded, and groups have options that only some systems use."""
    if rng.random() < 0.5:
        return
    sync, train, groups = raw["sync"], raw["train"], raw["sync"].get("groups")
    sync["codec"] = rng.choice(("none", "int8"))
    train["eval_every_steps"] = rng.choice((0, 1, 2, 3))
    train["eval_microbatches"] = rng.choice((1, 3))
    if groups is None:
        return
    groups["weights"] = rng.choice(("equal", "samples"))
    groups["clip"] = rng.choice(("pipeline", "stage"))
    groups["average_moments"] = rng.random() < 0.3
    draw_more = rng.choice((_keep, _draw_stash, _draw_stash, _draw_streaming, _draw_streaming))
    draw_more(rng, raw)
    if not GroupsConfig(**raw["sync"]["groups"]).feeds_back and sync["codec"] == "int8":
        sync["codec"] = "bf16"


def _keep(rng: random.Random, raw: dict[str, Any]) -> None:
    """No more options."""


def _draw_stash(rng: random.Random, raw: dict[str, Any]) -> None:
    """Pipelines that are never flushed."""
    raw["plan"] |= dict(schedule="stash", microbatches=raw["plan"]["pipelines"])
    raw["sync"]["groups"]["clip"] = "stage"


def _draw_streaming(rng: random.Random, raw: dict[str, Any]) -> None:
    """All replicas average fragments, with lags, and keep a share of their own. Each stage has a block for each
    fragment."""
    raw["model"]["n_layers"] = 12
    drawn = raw["sync"]["groups"]
    n_fragments, distance = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    raw["sync"]["groups"] = dict(
        match="all",
        outer=rng.choice(("none", "none", "sgd", "nesterov")),
        fragments=n_fragments,
        every_steps=n_fragments * distance + rng.randrange(n_fragments),
        lag_steps=rng.choice((0, distance - 1, distance - 1)),
        mix_frac=rng.choice((0.0, 0.25, 0.5)),
        **{name: drawn[name] for name in ("weights", "clip", "average_moments")},
    )
    raw["train"]["steps"] += n_fragments * distance


def _draw_groups(rng: random.Random, step_s: float, n_pipelines: int) -> dict[str, Any]:
    match = rng.choice(("window", "window", "window", "window", "all", "all", "pairs", "none"))
    settings: dict[str, Any] = dict(match=match, every_steps=rng.choice((1, 1, 1, 2, 3)))
    if match == "window":
        window_s = rng.choice((0.02, 0.1, 0.25, 1.0, 1.0, 0.0, math.inf)) * step_s if n_pipelines else 0.0
        cap = 0 if math.isinf(window_s) else rng.choice((0, 0, 2, 3))
        n_groups = rng.choice((-1, 0, 1, 2, 3, n_pipelines, 2 * n_pipelines))
        kind = rng.choice(("sliding", "sliding", "tumbling"))
        settings |= dict(window_s=window_s, group_size_max=cap, connectivity_groups=n_groups, connectivity_window=kind)
        settings["window_frac"] = 0.0 if window_s else rng.choice((0.0, 0.1, 0.5))
    if match == "pairs":
        settings["seed"] = rng.randrange(100)
    if match == "all":
        settings["outer"] = rng.choice(("none", "sgd", "nesterov"))
    return settings


def _draw_server(rng: random.Random, step_s: float, n_pipelines: int) -> dict[str, Any]:
    del step_s, n_pipelines
    return dict(staleness=rng.choice((0, 1, 2, 4)), wave=rng.choice((1, 1, 2, 3)))


def _draw_nonfinite(rng: random.Random, config: RunConfig, plan: Plan) -> tuple[int, int, int] | None:
    """In an eighth of the cases a gradient is not finite."""
    place = rng.randrange(plan.n_stages), rng.randrange(plan.n_pipelines), rng.randrange(config.train.steps)
    return place if rng.random() < 1 / 8 else None


def _draw_blips(seed: int, rng: random.Random, plan: Plan, run_s: float) -> list[Fault]:
    """Faults that lose no peer:

    - a link stands still, is slow, or is cut for a moment
    - a device is slow
    - messages come twice or late
    - the coordinator or a peer does nothing for a while"""
    pause_s = rng.choice((1.0, 6.0, 15.0))
    n_faults = rng.choice((0, 0, 1, 2, 3))
    if len(plan.peers) == 1:
        n_faults = min(n_faults, 1)  # a coordinator that has paused leaves no pair of ends to draw
    faults = draw(seed, [[peer] for peer in plan.peers], n_faults, run_s, pause_s, HARMLESS_KINDS)
    if rng.random() < 0.25:
        faults.append(Fault(rng.uniform(0.0, run_s), PAUSE, rng.choice(plan.peers), rng.uniform(0.0, BLIP_S)))
    return faults


def _draw_held_links(rng: random.Random, plan: Plan, run_s: float) -> list[Fault]:
    """In a third of the cases with several servers the first one's links to another stand still now and then: news of a
    snapshot reaches the others late."""
    if len(plan.roles.servers) < 2 or rng.random() < 2 / 3:
        return []
    first, *others = [server for (server,) in plan.roles.servers]
    held = [(rng.uniform(0.0, run_s), rng.uniform(0.0, HELD_S)) for _ in range(rng.randint(1, 4))]
    return [Fault(at_s, CLOG, first, s, others=(rng.choice(others),), factor=0.0) for at_s, s in held]


def _draw_loss(rng: random.Random, plan: Plan, run_s: float) -> list[Fault]:
    """In two fifths of the cases a peer is lost or leaves, in some of them two are, or the coordinator dies and is
    started again."""
    if rng.random() >= 0.4:
        return []
    at_s = rng.uniform(0.0, run_s)
    if rng.random() < 0.2:
        return [Fault(at_s, CRASH, ev.COORDINATOR), Fault(at_s + rng.uniform(0.2, 20.0), RESTART, ev.COORDINATOR)]
    losses = [_draw_lost_peer(rng, plan, at_s)]
    if rng.random() < 0.3:
        losses.append(_draw_lost_peer(rng, plan, rng.choice((at_s, rng.uniform(0.0, run_s)))))
    return losses


def _draw_restarts(rng: random.Random, plan: Plan, run_s: float) -> list[Fault]:
    """In a quarter of the cases the coordinator dies and is started again, in some of them twice. A peer may be lost
    meanwhile, and the one that died may go on beside its successor."""
    if rng.random() >= 0.25:
        return []
    faults: list[Fault] = []
    at_s = rng.uniform(0.0, run_s)
    for _ in range(rng.choice((1, 1, 2))):
        kind, seen_s = rng.choice(((CRASH, CRASH_SEEN_S), (POWER_OFF, DEAD_LINK_S)))
        again_s = at_s + seen_s + rng.choice((rng.uniform(0.1, 3.0), rng.uniform(0.1, 20.0)))
        faults += [Fault(at_s, kind, ev.COORDINATOR), Fault(again_s, RESTART, ev.COORDINATOR)]
        if rng.random() < 0.3:
            faults.append(_draw_lost_peer(rng, plan, rng.uniform(at_s, again_s)))
        if rng.random() < 0.2:
            faults.append(Fault(again_s + rng.uniform(0.0, 1.0), STALE, ev.COORDINATOR, rng.uniform(0.0, 10.0)))
        at_s = again_s + rng.choice((0.05, rng.uniform(0.0, 0.5), rng.uniform(0.0, run_s)))
    return faults


def _draw_returns(rng: random.Random, plan: Plan, run_s: float) -> list[Fault]:
    """A peer dies and is started again. In some cases another process dies while the pipeline comes back, at any place,
    and in some of these it is started again too."""
    at_s, peer = rng.uniform(0.0, run_s / 3), rng.choice(plan.peers)
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind, seen_s = rng.choice(((CRASH, CRASH_SEEN_S), (POWER_OFF, DEAD_LINK_S)))
        again_s = at_s + seen_s + rng.choice((rng.uniform(0.1, 1.0), rng.uniform(0.1, 10.0)))
        faults.append(Fault(at_s, kind, peer))
        if peer == ev.COORDINATOR or rng.random() < 0.9:
            faults.append(Fault(again_s, RESTART, peer))
        at_s = again_s + rng.choice((rng.uniform(0.0, 1.0), rng.uniform(0.0, 6.0)))
        peer = rng.choice((peer, ev.COORDINATOR, *plan.peers))
    return faults


def _draw_lost_peer(rng: random.Random, plan: Plan, at_s: float) -> Fault:
    kind, peer = rng.choice(LOSSES), rng.choice(plan.peers)
    if kind == CUT:
        breaks_s = rng.choice((CRASH_SEEN_S, DEAD_LINK_S))
        return Fault(at_s, CUT, peer, rng.uniform(5.0, 20.0), others=(ev.COORDINATOR,), breaks_s=breaks_s)
    return Fault(at_s, kind, peer, rng.uniform(2.0, 20.0) if kind == PAUSE else 0.0)
