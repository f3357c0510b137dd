"""The input of a prediction (config, plan, profile and network), and what the simulator needs of it."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from jaxdt.build import exchanges_per_step, peer_load, replicas_may_differ, stage_memory, worker_vectors
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import GroupReport
from jaxdt.run.config import NetConfig, RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.network import LATENCY_MS_MAX, Link, Network
from jaxdt.run.options import GBPS, MICROBATCHES_MAX, Accepts, number_in
from jaxdt.run.plan import Plan, even_shares
from jaxdt.run.profile import Profile, codec_times, stage_seconds
from jaxdt.run.sizes import sync_groups
from jaxdt.run.work import WorkKind
from jaxdt.sim.link_table import LinkOptions
from jaxdt.sim.predict import (
    Conditions,
    TimedSpan,
    device_links,
    predict_step_s,
    shared_hosts,
    simulate,
    timed_span,
)
from jaxdt.sim.stragglers.stalls import Stalls

# Heartbeats cost simulation time, and without faults they change no step.
RARE = NetConfig(heartbeat_s=1e6, deadline_floor_s=1e7)
PERSIST_S = 0.002
# A prediction takes a millisecond for each slice of a stage's vector, and with so many of them the size of one hardly
# counts: more parameters than 4096 slices hold, 4.3e9 with the default sync.slice_bytes, get larger slices.
SLICES_MAX = 4096
REBALANCED_WORKS_MAX = 200_000  # a minute or two
AVERAGES_PER_REPLICA = 4  # times as many averages as replicas are simulated, as many as SDPipe lets groups connect in
EVENTS_MAX = 20_000_000  # forwards, backwards, messages of an exchange and heartbeats: a quarter of an hour on one core
GROUPS_WORKS_MAX = 20_000  # and never more Work than this, but two averages
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Scenario:
    """A plan on a network, with the seconds of a profile. Every peer has its own device. Devices that the network puts
    on one host share its cores and its line, as far as the network's `hosts` say; `options` may give hosts another
    line, and `stalls` hold up some Work. The coordinator is beside the plan's first peer."""

    config: RunConfig
    plan: Plan
    profile: Profile
    network: Network
    persist_s: float = PERSIST_S
    options: LinkOptions = field(default_factory=LinkOptions)
    stalls: Stalls | None = None

    def __post_init__(self):
        self.network.require_devices(self.peers, f"network {self.network.name!r}")
        if self.profile.model != self.config.model:
            raise BadInput("profile: was made for another model than the config's")
        for src, dst in pairs(self.plan):
            if self.network.link(src, dst).bandwidth_gbps == 0:
                raise BadInput(f"network: bandwidth_gbps[{src}][{dst}]: got 0, but the plan sends over this link")

    @property
    def peers(self) -> list[int]:
        """All processes but the coordinator: the members, and a pool's workers."""
        return self.plan.peers + self.plan.workers

    def conditions(self) -> Conditions:
        """Seconds, links and hosts for the simulator."""
        shared = shared_hosts(self.network, self.peers)
        options = replace(self.options, access_gbps={**shared.access_gbps, **self.options.access_gbps})
        return Conditions(
            seconds={peer: peer_seconds(self, peer) for peer in self.peers},
            link=device_links(self.network, self.plan.placement[0][0]),
            host_of=shared.host_of,
            cores=shared.cores,
            persist_s=self.persist_s,
            options=options,
            seconds_at=partial(seconds_at, self),
            stalls=self.stalls,
        )

    def span(self, n_steps: int) -> TimedSpan:
        """The span of n_steps, or of more that are whole periods, those of rebalancing included. BadInput where one of
        these takes too long to simulate."""
        n_period, rebalance_s = 1, self.config.wiring.rebalance_s
        if rebalance_s:
            step_s = predict_step_s(self.quiet(1), self.plan, self.conditions())
            n_period = math.ceil(rebalance_s / step_s)
            if n_period * 2 * self.plan.n_stages * self.plan.n_microbatches > REBALANCED_WORKS_MAX:
                raise BadInput(
                    f"wiring.rebalance_s: got {rebalance_s:g}, {n_period} steps of {step_s:.3g} s: too many to "
                    "simulate, expected 0, for a step in which peers keep the stages of the plan, or a shorter period"
                )
        span = timed_span(self.config, self.plan, n_steps, n_period)
        self.check_length(span.n_in_all)
        return span

    def check_length(self, n_steps: int, n_heartbeats: float = 0.0) -> None:
        """BadInput for steps that take too long to simulate, with the heartbeats of all peers meanwhile."""
        n_works = 2 * self.plan.n_stages * self.plan.n_microbatches
        n_messages = sum(n * (n - 1) for n in self.plan.n_replicas)
        n_events = n_steps * (n_works + n_messages) + n_heartbeats
        if n_events > EVENTS_MAX:
            raise BadInput(
                f"{n_steps} steps of {self.plan.n_microbatches} microbatches on {len(self.peers)} peers: got "
                f"{n_events:.3g} events to simulate, expected at most {EVENTS_MAX:.3g}: fewer or shorter steps, fewer "
                "microbatches, or fewer peers"
            )

    def quiet(self, n_steps: int) -> RunConfig:
        """The config for n_steps plain steps: no evaluation, no checkpoint but the last, hardly any heartbeats, and at
        most SLICES_MAX slices of a vector."""
        train = replace(self.config.train, steps=n_steps, eval_every_steps=0, checkpoint_every_steps=0)
        n_elements = max(group.n_elements for group in sync_groups(self.config, self.plan))
        slice_bytes = max(self.config.sync.slice_bytes, FLOAT_BYTES * -(-n_elements // SLICES_MAX))
        return replace(self.config, train=train, net=RARE, sync=replace(self.config.sync, slice_bytes=slice_bytes))


def peer_seconds(scenario: Scenario, peer: int) -> dict[str, float]:
    """Seconds per kind of Work of a peer of the plan."""
    return seconds_at(scenario, peer, *scenario.plan.seat(peer))


def seconds_at(scenario: Scenario, device: int, stage: int, pipeline: int = 0) -> dict[str, float]:
    """Seconds per kind of Work of a stage on a device, with encoding and decoding at the stage's boundaries."""
    plan, profile = scenario.plan, scenario.profile
    kind = scenario.network.devices[device].kind
    times = lambda boundary, forward: codec_times(profile, kind, plan.codec_of(boundary, pipeline, forward))  # noqa: E731
    found = stage_seconds(profile, kind, *plan.stages[stage])
    if stage > 0:
        found[WorkKind.FORWARD] += times(stage - 1, True).decode_s
        found[WorkKind.BACKWARD] += times(stage - 1, False).encode_s
    if stage < plan.n_stages - 1:
        found[WorkKind.FORWARD] += times(stage, True).encode_s
        found[WorkKind.BACKWARD] += times(stage, False).decode_s
    return found


def memory_bytes(scenario: Scenario) -> dict[int, int]:
    """The most bytes that each peer holds at once (jaxdt.run.memory)."""
    config, plan = scenario.config, scenario.plan
    found = {}
    for peer in plan.peers:
        stage, pipeline = plan.seat(peer)
        load = peer_load(config, plan, stage, pipeline)
        n_vectors = worker_vectors(config, plan, peer)
        memory = stage_memory(config, plan.schedule, plan.stages[stage], load, n_vectors=n_vectors)
        found[peer] = memory.total
    return found


def simulated_groups(scenario: Scenario) -> list[GroupReport]:
    """The groups that a scenario's replicas form, with one microbatch a pipeline: those of one average if it is of all
    replicas, else of many. None where replicas are equal, or never average."""
    config, plan = scenario.config, scenario.plan
    if plan.n_pipelines == 1 or not replicas_may_differ(config) or not exchanges_per_step(config):
        return []
    short = replace(scenario, plan=replace(plan, shares=(1,) * plan.n_pipelines))
    every_steps = config.sync.groups.every_steps
    n_works = 2 * plan.n_stages * plan.n_pipelines * every_steps
    n_averages = max(2, min(AVERAGES_PER_REPLICA * plan.n_pipelines, GROUPS_WORKS_MAX // n_works))
    for n in (1, n_averages):
        outcome = simulate(short.quiet(n * every_steps + 1), short.plan, short.conditions())
        groups = outcome.of(GroupReport)
        if groups and all(len(group.members) == plan.n_pipelines for group in groups):
            break
    return groups


def pairs(plan: Plan) -> list[tuple[int, int]]:
    """Ordered pairs of peers that exchange tensors: those of a hop, replicas of a stage, workers and servers of one."""
    found = [pair for row in plan.placement for pair in ((a, b) for a in row for b in row if a != b)]
    for workers, servers in zip(plan.roles.workers, plan.placement, strict=bool(plan.roles.workers)):
        found += [pair for a in workers for b in servers for pair in ((a, b), (b, a))]
    for boundary in range(plan.n_stages - 1):
        found += [pair for a, b, _ in plan.hop(boundary) for pair in ((a, b), (b, a))]
    return found


def with_bandwidth_gbps(scenario: Scenario, gbps: float) -> Scenario:
    """All links between hosts at one bandwidth."""
    return _relinked(scenario, lambda link: replace(link, bandwidth_gbps=gbps))


def with_latency_ms(scenario: Scenario, latency_ms: float) -> Scenario:
    """All links between hosts at one latency, one way."""
    return _relinked(scenario, lambda link: replace(link, latency_s=latency_ms / 1e3))


def with_microbatches(scenario: Scenario, n_microbatches: float) -> Scenario:
    """This many microbatches a step, evenly over the pipelines and at least one for each."""
    n_pipelines = scenario.plan.n_pipelines
    shares = even_shares(max(n_pipelines, round(n_microbatches)), n_pipelines)
    return replace(scenario, plan=replace(scenario.plan, shares=shares))


class Sweep(NamedTuple):
    """A quantity that can be varied: the scenario with another value of it, and the values that it can have."""

    scenario: Callable[[Scenario, float], Scenario]
    accepts: Accepts


SWEEPS = {
    "bandwidth_gbps": Sweep(with_bandwidth_gbps, GBPS),
    "latency_ms": Sweep(with_latency_ms, number_in(0.0, LATENCY_MS_MAX)),
    "microbatches": Sweep(with_microbatches, number_in(0.0, MICROBATCHES_MAX)),
}


def check_swept(name: str, values: Sequence[float]) -> None:
    """BadInput for a value that a quantity of SWEEPS cannot have."""
    for value in values:
        if not SWEEPS[name].accepts.holds(value):
            raise BadInput(f"{name}: got {value:g}, expected {SWEEPS[name].accepts.text}")


def _relinked(scenario: Scenario, change: Callable[[Link], Link]) -> Scenario:
    network = scenario.network
    host = [device.host for device in network.devices]
    apart = lambda i, j: i != j and (not host[i] or host[i] != host[j])  # noqa: E731
    n = range(network.n_devices)
    links = [[change(network.link(i, j)) if apart(i, j) else network.link(i, j) for j in n] for i in n]
    rows = lambda name: tuple(tuple(getattr(link, name) for link in row) for row in links)  # noqa: E731
    changed = replace(network, latency_s=rows("latency_s"), bandwidth_gbps=rows("bandwidth_gbps"))
    return replace(scenario, network=changed)


def without(conditions: Conditions, names: Collection[str]) -> Conditions:
    """The conditions in which the parts in `names` cost no time: "commit", "sync" (the exchange of gradients) and
    "transfer" (boundary tensors)."""
    link = conditions.link
    if "commit" in names:
        free = lambda src, dst: Link() if ev.COORDINATOR in (src, dst) else link(src, dst)  # noqa: E731
        conditions = replace(conditions, link=free, persist_s=0.0)
    return replace(conditions, free=frozenset(names) & {"sync", "transfer"})
