"""Predicts the seconds of a step: simulates the machines of a run with measured seconds on a given network."""

import contextlib
import gc
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxdt.build import (
    RunStart,
    build_coordinator,
    build_peer,
    build_peers,
    build_workers,
    period,
    replicas_may_differ,
)
from jaxdt.membership.peer import Peer
from jaxdt.membership.rebalance_api import ByNumber
from jaxdt.protocol.reports import StepReport
from jaxdt.run.config import RunConfig, WiringConfig
from jaxdt.run.network import UNLIMITED_GBPS, Link, Network
from jaxdt.run.plan import Plan
from jaxdt.sim.arrivals import Arrivals, state_words
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.faults import JOIN, Fault
from jaxdt.sim.link_table import LinkOptions
from jaxdt.sim.sim_peer import Environment, Outcome, ProcessFactory, Recorder, SimPeer
from jaxdt.sim.stragglers.stalls import PeerStalls, Stalls
from jaxdt.sim.tensors import NoTensors

WARM_UP_STEPS = 1


@dataclass(frozen=True)
class TimedSpan:
    """The steps whose mean is the time of a step: `n_steps`, whole periods of `n_period`, behind the first `n_before`.
    `n_in_all` are simulated, so that others are behind those that are timed, as in the middle of a run. `by_row`: a
    step is a row of the metrics of replicas that may differ (jaxdt.protocol.reports.StepReport)."""

    n_before: int
    n_steps: int
    n_period: int
    n_in_all: int
    by_row: bool

    def step_s(self, outcome: Outcome) -> float:
        """The mean seconds of the timed steps. Rows are timed by their instants, since several may have the same."""
        first, end = self.n_before, self.n_before + self.n_steps
        if not self.by_row:
            return statistics.fmean(report.step_s for report in outcome.of(StepReport)[first:end])
        ends_s = [now_s for now_s, _, report in outcome.reports if isinstance(report, StepReport)]
        return (ends_s[end - 1] - ends_s[first - 1]) / self.n_steps


def timed_span(config: RunConfig, plan: Plan, n_steps: int, n_rebalanced: int = 1) -> TimedSpan:
    """The span of n_steps, or more if these are no whole periods. `n_rebalanced`: steps in a period of rebalancing."""
    known, by_row = period(config, plan), replicas_may_differ(config)
    n_period = math.lcm(known.n_steps, n_rebalanced)
    n_whole = n_period * -(-n_steps // n_period)
    n_in_all = known.n_before + n_whole + (1 if by_row else config.sync.delay)
    return TimedSpan(known.n_before, n_whole, n_period, n_in_all, by_row)


@dataclass(frozen=True)
class Conditions:
    """The hosts and links on which a plan runs. `seconds[peer]`: per kind of Work on one core, and per MESSAGE where
    the time of handling one counts; `host_of[peer]`: its host; `seconds_at(peer, stage)`, where peers join or change
    stages: the seconds of a stage on the machine of a peer of the plan; `stalls`: the stalls of all peers, or None. The
    other fields are those of Environment."""

    seconds: Mapping[int, Mapping[str, float]]
    link: Callable[[int, int], Link]
    host_of: Mapping[int, str]
    cores: Mapping[str, float]
    persist_s: float = 0.0
    options: LinkOptions = field(default_factory=LinkOptions)
    free: frozenset[str] = frozenset()
    seconds_at: Callable[[int, int], Mapping[str, float]] | None = None
    stalls: Stalls | None = None

    def stalls_of(self, peer: int) -> PeerStalls | None:
        """The stalls of one peer, from its first Work on."""
        return PeerStalls(self.stalls, peer) if self.stalls else None

    def environment(self, link: Callable[[int, int], Link]) -> Environment:
        """The environment of a simulation with these links."""
        return Environment(link, self.cores, self.persist_s, self.options, self.free)


def simulate(
    config: RunConfig,
    plan: Plan,
    conditions: Conditions,
    trace: Recorder | None = None,
    faults: Sequence[Fault] = (),
    until_s: float = math.inf,
    balance: ByNumber | None = None,
    *,
    is_over: Callable[[], bool] | None = None,
) -> Outcome:
    """Run the config's steps in virtual time, without arithmetic. `balance` decides which peers change stages, if not
    the config's rule does. TimeIsUp once is_over() says so."""
    with _without_gc():
        arrivals = Arrivals(
            config,
            plan,
            link=conditions.link,
            host_of=conditions.host_of,
            seconds_at=conditions.seconds_at,
            faults=faults,
            stalls_of=conditions.stalls_of,
        )
        has_joiners = any(fault.kind == JOIN for fault in faults)
        simulation = Simulation(
            build_coordinator(config, plan, RunStart("sim"), balance=balance),
            _make_peers(config, plan, conditions),
            conditions.environment(arrivals.link if has_joiners else conditions.link),
            faults,
            trace,
            processes=ProcessFactory(_anew(config, plan, conditions) or arrivals.make_peer),
        )
        outcome = simulation.run(until_s, is_over)
        simulation.release()
        return outcome


def _make_peers(config: RunConfig, plan: Plan, conditions: Conditions) -> dict[int, SimPeer]:
    start = RunStart("sim")
    machines = build_peers(config, plan, start) | build_workers(config, plan, start)
    return {peer: _planned_peer(config, plan, conditions, peer, machine) for peer, machine in machines.items()}


def _planned_peer(config: RunConfig, plan: Plan, conditions: Conditions, peer: int, machine: Peer) -> SimPeer:
    """A peer of the plan, on its own machine."""
    stage, _ = plan.seat(peer)
    return SimPeer(
        machine,
        NoTensors(config.train.microbatch_size, state_words(config, plan, stage)),
        conditions.host_of[peer],
        conditions.seconds[peer],
        stalls=conditions.stalls_of(peer),
        is_outside=plan.is_worker(peer),
    )


def _anew(config: RunConfig, plan: Plan, conditions: Conditions) -> Callable[[int, int | None], SimPeer] | None:
    """The maker of a peer of the plan that starts again, in its own place; None where replicas are equal."""
    if not replicas_may_differ(config):
        return None
    return lambda peer, stage: _planned_peer(
        config, plan, conditions, peer, build_peer(config, plan, peer, RunStart("sim"))
    )


@contextlib.contextmanager
def _without_gc():
    """Events form no cycles, and the search for cycles among a million messages took up to a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def predict_step_s(
    config: RunConfig,
    plan: Plan,
    conditions: Conditions,
    n_steps: int = 4,
    is_over: Callable[[], bool] | None = None,
) -> float:
    """Median seconds of a training step without evaluation, the first step left out; where replicas may differ, the
    mean over at least so many steps that are whole periods. Samples have their full length, also where those of the
    first steps are shorter. Peers keep the stages of the plan, whose step time this is. TimeIsUp once is_over() says
    so."""
    span = timed_span(config, plan, n_steps - WARM_UP_STEPS)
    n_in_all = span.n_in_all if span.by_row else n_steps
    train = replace(config.train, steps=n_in_all, eval_every_steps=0, checkpoint_every_steps=0)
    wiring = replace(config.wiring, rebalance_s=0.0, rebalance_rule=WiringConfig.rebalance_rule)
    outcome = simulate(replace(config, train=train, wiring=wiring), plan, conditions, is_over=is_over)
    if span.by_row:
        return span.step_s(outcome)
    return statistics.median(report.step_s for report in outcome.of(StepReport)[WARM_UP_STEPS:])


@dataclass(frozen=True)
class SharedHosts:
    """The hosts of peers, which are devices of a network: the host of each peer, cores of each host, and (out, in) gbps
    of the lines that limit."""

    host_of: Mapping[int, str]
    cores: Mapping[str, float]
    access_gbps: Mapping[str, tuple[float, float]]


def shared_hosts(network: Network, peers: Sequence[int]) -> SharedHosts:
    """The hosts and lines that the peers share by their network. A device without a host has one of its own; a host
    without a number of cores has a core for each of its peers."""
    hosts = network.shared_hosts
    host_of = {peer: network.devices[peer].host or f"device{peer}" for peer in peers}
    n_on = Counter(host_of.values())
    cores = {host_of[peer]: hosts[peer].cores or float(n_on[host_of[peer]]) for peer in peers}
    lines = {host_of[peer]: hosts[peer].goodput_gbps for peer in peers}
    access_gbps = {
        name: (out_gbps or UNLIMITED_GBPS, in_gbps or UNLIMITED_GBPS)
        for name, (out_gbps, in_gbps) in lines.items()
        if out_gbps or in_gbps
    }
    return SharedHosts(host_of, cores, access_gbps)


def device_links(network: Network | None, coordinator_device: int = 0) -> Callable[[int, int], Link]:
    """Links between peers, which are devices of the network; the coordinator is beside one of them."""
    if network is None:
        return lambda src, dst: Link()
    device = lambda peer: coordinator_device if peer < 0 else peer  # noqa: E731
    return lambda src, dst: network.link(device(src), device(dst))
