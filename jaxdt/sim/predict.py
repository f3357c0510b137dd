"""What a step will cost: the run's own machines simulated with measured seconds on a given network."""

import contextlib
import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxdt.build import RunStart, build_coordinator, build_peers
from jaxdt.protocol.trace import Trace
from jaxdt.sim.arrivals import Arrivals, state_words
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.faults import JOIN, Fault
from jaxdt.sim.link_table import LinkOptions
from jaxdt.sim.sim_peer import Outcome, SimPeer
from jaxdt.sim.tensors import NoTensors
from jaxdt.spec.config import RunConfig
from jaxdt.spec.network import Link, Network
from jaxdt.spec.plan import Plan

WARM_UP_STEPS = 1


@dataclass(frozen=True)
class Conditions:
    """Where a plan runs. `seconds[peer]`: per kind of Work on one core, and per MESSAGE where handling one
    counts; `link(src, dst)` also knows the coordinator; `host_of[peer]` and `cores[host]`; `persist_s`: making a record
    durable; `free`: see Simulation. `seconds_at(peer, stage)`: of a newcomer on the machine of a peer, where some
    join."""

    seconds: Mapping[int, Mapping[str, float]]
    link: Callable[[int, int], Link]
    host_of: Mapping[int, str]
    cores: Mapping[str, float]
    persist_s: float = 0.0
    options: LinkOptions = field(default_factory=LinkOptions)
    free: frozenset[str] = frozenset()
    seconds_at: Callable[[int, int], Mapping[str, float]] | None = None


def simulate(
    config: RunConfig,
    plan: Plan,
    conditions: Conditions,
    trace: Trace | None = None,
    faults: Sequence[Fault] = (),
    until_s: float = math.inf,
) -> Outcome:
    """Run the config's steps in virtual time, without arithmetic."""
    with _without_gc():
        return _simulate(config, plan, conditions, trace, faults, until_s)


def _simulate(
    config: RunConfig,
    plan: Plan,
    conditions: Conditions,
    trace: Trace | None,
    faults: Sequence[Fault],
    until_s: float,
) -> Outcome:
    tensors = [
        NoTensors(config.train.microbatch_size, state_words(config, plan, stage)) for stage in range(plan.n_stages)
    ]
    seats = {
        peer: SimPeer(machine, tensors[plan.seat(peer)[0]], conditions.host_of[peer], conditions.seconds[peer])
        for peer, machine in build_peers(config, plan, RunStart("sim")).items()
    }
    coordinator = build_coordinator(config, plan, RunStart("sim"))
    how = conditions.cores, conditions.persist_s, trace, conditions.options, conditions.free, faults
    arrivals = Arrivals(config, plan, conditions.link, conditions.host_of, conditions.seconds_at, faults)
    link = arrivals.link if any(fault.kind == JOIN for fault in faults) else conditions.link
    simulation = Simulation(coordinator, seats, link, *how, seat_of=arrivals.seat_of)
    outcome = simulation.run(until_s)
    simulation.forget()
    return outcome


@contextlib.contextmanager
def _without_gc():
    """Events form no cycles, and looking for some among a million messages in flight took up to a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def predict_step_s(config: RunConfig, plan: Plan, conditions: Conditions, n_steps: int = 4) -> float:
    """Median seconds of a training step without evaluation, the first one left out; its samples have the full length,
    also where those of the first steps are shorter."""
    train = replace(config.train, steps=n_steps, eval_every_steps=0, checkpoint_every_steps=0)
    outcome = simulate(replace(config, train=train), plan, conditions)
    return statistics.median(fields["step_s"] for fields in outcome.fields("step")[WARM_UP_STEPS:])


def device_links(network: Network | None, coordinator_device: int = 0) -> Callable[[int, int], Link]:
    """Links between peers, which are devices of the network; the coordinator sits beside one of them."""
    if network is None:
        return lambda src, dst: Link()
    device = lambda peer: coordinator_device if peer < 0 else peer  # noqa: E731
    return lambda src, dst: network.link(device(src), device(dst))
