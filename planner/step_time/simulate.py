"""A layout's step under the simulator: the run's own machines, virtual time, the network's directed links."""

import math

from jaxdt.sim.predict import Conditions, device_links, predict_step_s
from jaxdt.spec.config import NetConfig, RunConfig, SyncConfig, TrainConfig
from jaxdt.spec.plan import Plan, even_shares
from planner.model.problem import MISSING_S
from planner.step_time.tune import Layout, estimate_s
from planner.step_time.workload import Job

MOST_WORKS = 4096
N_STEPS = 2
SLICES_PER_SHARD, MOST_SLICES = 8, 20_000
RARE = NetConfig(heartbeat_s=1e6, deadline_floor_s=1e7)  # heartbeats cost time here and change no step


def plan_of_layout(job: Job, layout: Layout, shares: tuple[int, ...] | None = None) -> Plan:
    """The plan that would run."""
    in_flight = layout.depth if job.schedule == "1f1b" else None
    return Plan(
        n_layers=job.n_layers,
        stages=layout.stages,
        placement=tuple(tuple(int(d) for d in row) for row in layout.placement),
        shares=shares or layout.shares,
        schedule=job.schedule,
        in_flight=in_flight,
        codec=(job.codec,) * (len(layout.stages) - 1),
        devices=tuple(device.name for device in job.network.devices),
    )


def simulated_s(job: Job, layout: Layout) -> float:
    """Seconds of a step. Beyond MOST_WORKS forwards and backwards the simulator runs fewer microbatches, still enough
    to fill the pipelines, and the estimate's difference is added: its recurrence is the simulator's. Infinite over a
    link that does not exist, where a simulation would never end."""
    if layout.step_s >= MISSING_S:
        return math.inf
    shares = fewer(layout)
    plan = plan_of_layout(job, layout, shares)
    rest_s = 0.0 if shares == layout.shares else layout.step_s - estimate_s(job, layout, shares)
    return rest_s + predict_step_s(_config(job, layout), plan, _conditions(job, plan), N_STEPS)


def fewer(layout: Layout) -> tuple[int, ...]:
    """The layout's shares, or smaller ones in proportion to them."""
    n_stages, n_pipelines = layout.shape
    most = max(MOST_WORKS // (2 * n_stages), n_pipelines * (layout.depth[0] + 2))
    total = sum(layout.shares)
    if total <= most:
        return layout.shares
    if len(set(layout.shares)) == 1:
        return even_shares(most // n_pipelines * n_pipelines, n_pipelines)
    return tuple(max(1, round(share * most / total)) for share in layout.shares)


def _config(job: Job, layout: Layout) -> RunConfig:
    """Slices as large as the exchange allows without changing its time much: each costs events."""
    profile = job.profile
    sizes, tied = job.gradient_bytes(layout.stages)
    n_stages, n_pipelines = layout.shape
    shard = max(float(sizes.max()), tied) / n_pipelines
    n_slices = min(SLICES_PER_SHARD, max(1, MOST_SLICES // (2 * n_stages * n_pipelines**2)))
    return RunConfig(
        model=profile.model,
        train=TrainConfig(microbatch_size=profile.microbatch_size),
        sync=SyncConfig(slice_bytes=max(SyncConfig().slice_bytes, round(shard / n_slices))),
        net=RARE,
        codec=job.codec,
        dtype=profile.dtype,
        remat=profile.remat,
    )


def _conditions(job: Job, plan: Plan) -> Conditions:
    """Every device computes by itself; the coordinator sits beside the first peer."""
    seconds = {}
    for (lo, hi), row in zip(plan.stages, plan.placement, strict=True):
        seconds |= {d: job.seconds(job.network.devices[d].kind, lo, hi) for d in row}
    host_of = {peer: f"device{peer}" for peer in plan.peers}
    return Conditions(seconds, device_links(job.network, min(plan.peers)), host_of, dict.fromkeys(host_of.values(), 1))
