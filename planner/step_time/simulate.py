"""The step of a layout under the simulator: the machines of a run, in virtual time, on the network's directed links."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxdt.build import period
from jaxdt.run.config import GroupsConfig, NetConfig, RunConfig
from jaxdt.run.plan import Plan, even_shares
from jaxdt.sim.cluster import TimeIsUp
from jaxdt.sim.link_table import LinkOptions
from jaxdt.sim.predict import Conditions, device_links, predict_step_s, shared_hosts
from planner.model.layer_cuts import Ranges
from planner.step_time.tune import Layout, estimate_s
from planner.step_time.workload import MISSING_S, StepWorkload

MAX_WORKS = 4096
N_STEPS = 2
DELAY_STEPS = 2  # more with delayed updates, whose steps overlap
LOCAL_STEPS_MIN = 2  # of a period that is cut short
SLICES_PER_SHARD, MAX_SLICES = 8, 20_000
NO_HEARTBEATS = NetConfig(heartbeat_s=1e6, deadline_floor_s=1e7)  # they take time to simulate and change no step


def machine_plan(
    workload: StepWorkload,
    stages: Ranges,
    placement: Sequence[Sequence[int]],
    shares: tuple[int, ...],
    in_flight: tuple[int, ...] | None = None,
) -> Plan:
    """The plan that the machines of a run take, placement[stage] in indices of the network."""
    return Plan(
        n_layers=workload.n_layers,
        stages=stages,
        placement=tuple(tuple(int(d) for d in row) for row in placement),
        shares=shares,
        schedule=workload.schedule,
        in_flight=in_flight,
        codec=(workload.codec,) * (len(stages) - 1),
        devices=tuple(device.name for device in workload.network.devices),
    )


def plan_of_layout(workload: StepWorkload, layout: Layout, shares: tuple[int, ...] | None = None) -> Plan:
    """The plan of a layout, with other shares than the layout's if given."""
    in_flight = layout.depth if workload.schedule == "1f1b" else None
    return machine_plan(workload, layout.stages, layout.placement.tolist(), shares or layout.shares, in_flight)


def simulated_s(workload: StepWorkload, layout: Layout, is_over: Callable[[], bool] | None = None) -> float:
    """Seconds of a step; the estimated ones once is_over() says that time is up. Beyond MAX_WORKS forwards and
    backwards the simulator runs fewer microbatches, still enough to fill the pipelines, and the difference that the
    estimate predicts is added. Infinite for a layout that uses a missing link, where a simulation would never end.
    Where replicas average every few steps, whole periods count."""
    if layout.step_s >= MISSING_S:
        return math.inf
    shares = fewer_microbatches(layout)
    plan = plan_of_layout(workload, layout, shares)
    config = without_pauses(workload.run, _slice_bytes(workload, layout))
    n_steps = N_STEPS + DELAY_STEPS * config.sync.delay
    rest_s = 0.0 if shares == layout.shares else layout.step_s - estimate_s(workload, layout, shares)
    try:
        return rest_s + _period_step_s(config, plan, conditions_of(workload, plan), n_steps, is_over)
    except TimeIsUp:
        return layout.step_s


def _period_step_s(
    config: RunConfig, plan: Plan, conditions: Conditions, n_steps: int, is_over: Callable[[], bool] | None
) -> float:
    """Seconds of a step, in the mean over whole periods. Local steps beyond MAX_WORKS of a period are not simulated,
    but take as long as where nobody averages."""
    groups, n_period = config.sync.groups, period(config, plan).n_steps
    n_most = MAX_WORKS // (2 * plan.n_stages * plan.n_microbatches)
    n_least = groups.fragments * (groups.lag_steps + LOCAL_STEPS_MIN)  # fragments stay apart
    n_local = max(n_least, n_most * groups.every_steps // n_period)
    if n_period == 1 or n_local >= groups.every_steps:
        return predict_step_s(config, plan, conditions, n_steps, is_over)
    sync = config.sync
    shorter = replace(config, sync=replace(sync, groups=replace(groups, every_steps=n_local)))
    alone = replace(config, sync=replace(sync, groups=GroupsConfig(match="none", clip=groups.clip)))
    alone_s = predict_step_s(alone, plan, conditions, n_steps, is_over)
    shorter_s = predict_step_s(shorter, plan, conditions, n_steps, is_over)
    return alone_s + (shorter_s - alone_s) * n_local / groups.every_steps


def fewer_microbatches(layout: Layout) -> tuple[int, ...]:
    """The layout's shares, or smaller ones in proportion to them."""
    n_stages, n_pipelines = layout.shape
    most = max(MAX_WORKS // (2 * n_stages), n_pipelines * (layout.depth[0] + 2))
    total = sum(layout.shares)
    if total <= most:
        return layout.shares
    if len(set(layout.shares)) == 1:
        return even_shares(most // n_pipelines * n_pipelines, n_pipelines)
    return tuple(max(1, round(share * most / total)) for share in layout.shares)


def _slice_bytes(workload: StepWorkload, layout: Layout) -> int:
    """Slices as large as the exchange allows without changing its time much: each slice costs events."""
    gradient_bytes, tied_bytes = workload.gradient_bytes(layout.stages)
    n_stages, n_pipelines = layout.shape
    shard_bytes = max(float(gradient_bytes.max()), tied_bytes) / n_pipelines
    n_slices = min(SLICES_PER_SHARD, max(1, MAX_SLICES // (2 * n_stages * n_pipelines**2)))
    return round(shard_bytes / n_slices)


def without_pauses(run: RunConfig, slice_bytes: int) -> RunConfig:
    """The run's config for the simulation of some steps: no heartbeats, delayed updates from the first step, and slices
    of at least so many bytes."""
    sync = replace(run.sync, slice_bytes=max(run.sync.slice_bytes, slice_bytes), delay_after_steps=0)
    return replace(run, sync=sync, net=NO_HEARTBEATS)


def conditions_of(workload: StepWorkload, plan: Plan) -> Conditions:
    """Devices share what the network's hosts say, and the coordinator sits beside the first peer."""
    seconds = {}
    for (lo, hi), row in zip(plan.stages, plan.placement, strict=True):
        seconds |= {d: workload.seconds(workload.network.devices[d].kind, lo, hi) for d in row}
    links = device_links(workload.network, min(plan.peers))
    shared = shared_hosts(workload.network, plan.peers)
    options = LinkOptions(access_gbps=shared.access_gbps)
    return Conditions(seconds, links, shared.host_of, shared.cores, options=options)
