"""Predicts the cost of a config's step on a network, before anything runs. scripts/simulate.py is this with flags.

    network = load_network("configs/networks/four_cities.json")
    result = simulate(config, profile_of_flops(config, 1e12, network), network)
    result.step_s, result.parts

Needs no jax.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxdt import build
from jaxdt.api.config import Config, fields_of
from jaxdt.protocol import trace
from jaxdt.protocol.perfetto import chrome
from jaxdt.protocol.reports import GroupReport
from jaxdt.run import config as configs
from jaxdt.run import network as networks
from jaxdt.run import profile as profiles
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, nearest
from jaxdt.run.network import Network
from jaxdt.run.options import (
    GBPS,
    SECONDS,
    at_least,
    option,
    require_accepted,
    with_meanings,
)
from jaxdt.run.plan import Plan
from jaxdt.run.profile import Profile
from jaxdt.sim.link_table import COLLECTIVES, SHARDS, ExchangeModel, LinkOptions
from jaxdt.sim.links import Jitter, Ramp
from jaxdt.sim.predict import simulate as simulate_run
from jaxdt.sim.scenario import PERSIST_S, SWEEPS, Scenario, check_swept, memory_bytes, simulated_groups
from jaxdt.sim.stragglers.stalls import Stalls
from jaxdt.sim.time_breakdown import WARM_UP_STEPS, Parts, TimeBreakdown, break_down_step
from jaxdt.sync.matching.mixing import Mixing, mixing_lines, mixing_of_stages

EFFICIENCY = 0.35
NO_NETWORK = "not given"  # the name of the network where none is given


@with_meanings
@dataclass(frozen=True)
class SimulateOptions:
    """The other options of a simulation. From `collective` on, they are for comparisons with other systems
    (jaxdt.sim.link_table.ExchangeModel says more). Flags of scripts/simulate.py have the same names, or end in _ms:"""

    steps: int = option(
        3,
        "Steps to simulate after the first, or more that are whole periods, such as the local steps up to an average; "
        "the result is their mean.",
        at_least(1),
    )
    persist_s: float = option(PERSIST_S, "Seconds until the record of a step is durable.", SECONDS, has_flag=False)
    jitter_s: float = option(
        0.0, "Uniform jitter of every message's latency, drawn from `seed`.", SECONDS, has_flag=False
    )
    seed: int = option(0, "Seed of the jitter, and of the peers that a --trace makes leave.")
    tcp_ramp: bool = option(False, "Connections start slowly again when they were idle.")
    access_gbps: float | None = option(None, "The line that all traffic of a host shares, each way.", GBPS)
    stalls: Stalls | None = option(None, "Pauses before some Work, or None; they count as compute.", has_flag=False)
    collective: str = option(SHARDS, f"How replicas exchange: {', '.join(COLLECTIVES)}; a run: {SHARDS}.")
    exchange_s: float = option(
        0.0, "Seconds that each exchange of replicas takes besides its bytes.", SECONDS, has_flag=False
    )
    overlap_frac: float = option(0.0, "Part of an exchange that runs beside the last backward before it.")
    blocking_sends: bool = option(False, "Devices wait until what they send over a boundary has arrived.")


@dataclass(frozen=True)
class Simulation:
    """A simulated step of a scenario. `str` of it is the table that scripts/simulate.py prints. `groups`: those
    in which replicas that may differ average."""

    scenario: Scenario
    times: TimeBreakdown
    groups: tuple[GroupReport, ...] = ()

    @property
    def mixing(self) -> dict[int, Mixing]:
        """Who met whom in averages, by stage (jaxdt.sync.matching.mixing); none where replicas are equal."""
        return mixing_of_stages(self.scenario.plan, self.groups)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.times.step_s

    @property
    def parts(self) -> Parts:
        """The parts of these seconds (jaxdt.sim.time_breakdown)."""
        return self.times.parts

    @property
    def utilisation(self) -> dict[int, float]:
        """peer -> the share of the step for which it computes, 0 to 1."""
        return self.times.utilisation

    @property
    def memory_bytes(self) -> dict[int, int]:
        """peer -> the most bytes that it holds at once."""
        return dict(sorted(memory_bytes(self.scenario).items()))

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a step in its seconds."""
        plan, config = self.scenario.plan, self.scenario.config
        return plan.n_microbatches * config.microbatch_shape.n_tokens / self.step_s

    def __str__(self) -> str:
        plan, times = self.scenario.plan, self.times
        lines = [
            f"{plan.shape}, {plan.n_microbatches} microbatches, {plan.schedule}",
            f"step         {self.step_s:12.4f} s   {self.tokens_per_s:,.0f} tokens/s{self._of_steps}",
        ]
        for name, seconds in asdict(times.parts).items():
            lines.append(f"  {name.removesuffix('_s'):10} {seconds:12.4f} s   {100 * seconds / self.step_s:5.1f} %")
        low, high = (pick(times.utilisation.values()) for pick in (min, max))
        mean = 100 * times.utilisation_mean
        lines.append(f"utilisation  {mean:12.1f} %   {100 * low:.1f} to {100 * high:.1f} % by peer")
        lines.append(f"memory       {max(self.memory_bytes.values()) / 1e9:12.3f} GB  on the fullest peer")
        if times.n_bytes:
            (src, dst), n_bytes = max(times.n_bytes.items(), key=lambda item: item[1])
            total = sum(times.n_bytes.values())
            most = f"{n_bytes / 1e9:.3f} GB on the link p{src} -> p{dst}"
            lines.append(f"network      {total / 1e9:12.3f} GB  a step, {most}")
        lines += mixing_lines(self.scenario.plan, self.groups)
        lines += links_note(self.scenario)
        return "\n".join(lines)

    @property
    def _of_steps(self) -> str:
        """For people, the steps of which this is the mean, where a period has several."""
        n_steps, n_period = self.times.n_steps, self.times.n_period
        return f", mean of {n_steps} steps in periods of {n_period}" if n_period > 1 else ""

    def to_json(self) -> dict[str, Any]:
        """The content of prediction.json."""
        plan = self.scenario.plan
        return {
            "step_s": self.step_s,
            "n_steps": self.times.n_steps,
            "parts": asdict(self.parts),
            "utilisation": self.utilisation,
            "memory_bytes": self.memory_bytes,
            "mixing": {stage: asdict(found) | {"meetings": met(found)} for stage, found in self.mixing.items()},
            "bytes_per_link": {f"{src}>{dst}": n for (src, dst), n in self.times.n_bytes.items()},
            "stages": plan.stages,
            "placement": plan.placement,
            "profile": self.scenario.profile.source,
            "network": self.scenario.network.name,
        }

    def save(self, folder: str | Path, timeline: bool = True) -> None:
        """Write prediction.json, and with `timeline` the first steps, up to an average where replicas may differ, as
        timeline.json and simulation.png."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prediction.json").write_text(json.dumps(self.to_json(), indent=1) + "\n")
        if not timeline:
            return
        from jaxdt.cli import plots  # loads matplotlib

        n_steps = build.period(self.scenario.config, self.scenario.plan).n_steps
        records = step_records(self.scenario, n_steps)
        stage_of = {peer: self.scenario.plan.seat(peer)[0] for peer in self.scenario.peers}
        (folder / "timeline.json").write_text(json.dumps(chrome(records, stage_of)))
        plots.simulation(folder / "simulation.png", records, asdict(self.parts), self.utilisation, n_steps)


def met(found: Mixing) -> dict[str, int]:
    """How often each pair met, by its name in prediction.json."""
    return {f"{a}-{b}": n for (a, b), n in sorted(found.meetings.items())}


def links_note(scenario: Scenario) -> list[str]:
    """The line that says that links cost nothing, where no network is given; else none."""
    return ["no network is given: links have latency 0 and no limit"] if scenario.network.name == NO_NETWORK else []


def simulate(
    config: Config,
    profile: Profile,
    network: Network | None = None,
    plan: Plan | None = None,
    options: SimulateOptions = SimulateOptions(),
) -> Simulation:
    """The seconds of a step of the config, in its parts. Without a network links cost nothing, without a plan the
    config's plan fields make one. BadInput where these do not fit together."""
    return simulate_scenario(scenario_of(run_config(config), profile, network, plan, options), options.steps)


def simulate_scenario(scenario: Scenario, n_steps: int) -> Simulation:
    """Simulates a scenario as `simulate` does: the mean of n_steps after the first."""
    return Simulation(scenario, break_down_step(scenario, n_steps), tuple(simulated_groups(scenario)))


def run_config(config: Config) -> RunConfig:
    """The checked config of a config object. A vocabulary that is not set is the preset's."""
    return config if isinstance(config, RunConfig) else configs.parse(fields_of(config))


def profile_of_flops(
    config: Config,
    flops: float | Mapping[str, float],
    network: Network | None = None,
    efficiency: float = EFFICIENCY,
) -> Profile:
    """The seconds of a model's parts on devices that do `flops` operations a second at their peak, of which the maths
    reaches the share `efficiency`: one figure for all devices, or one for each kind of the network's."""
    run = run_config(config)
    kinds = {device.kind for device in network.devices} if network else {""}
    by_kind = dict(flops) if isinstance(flops, Mapping) else dict.fromkeys(kinds, flops)
    if unknown := sorted(set(by_kind) - kinds):
        name, expected = network.name if network else "a network that is not given", "FLOP/s without a kind"
        if named := sorted(kinds - {""}):
            expected = f"one for each of {', '.join(named)}"
        hint = nearest(unknown[0], named)
        raise BadInput(
            f"--flops: got one for the kind {unknown[0]}, of which {name} has none{hint}, expected {expected}"
        )
    return profiles.from_flops(
        run.model,
        run.train.microbatch_size,
        by_kind,
        efficiency,
        dtype=run.dtype,
        remat=run.remat,
        seq_len=run.data.seq_len,
        optimizer=run.optim.name,
    )


def scenario_of(
    config: RunConfig, profile: Profile, network: Network | None, plan: Plan | None, options: SimulateOptions
) -> Scenario:
    """The input of a simulation, checked."""
    require_accepted(options, "--")
    plan = plan or configs.default_plan(config)
    build.check(config, plan)
    if network is None:  # equal devices, each on a host of its own
        network = networks.uniform(max(plan.peers + plan.workers) + 1)
        devices = tuple(replace(device, host="") for device in network.devices)
        network = replace(network, devices=devices, name=NO_NETWORK)
    links = LinkOptions(
        jitter=Jitter(options.jitter_s, options.seed) if options.jitter_s else None,
        ramp=Ramp() if options.tcp_ramp else None,
        access_gbps=_access_gbps(options.access_gbps, network, plan) if options.access_gbps is not None else {},
        exchange=ExchangeModel(options.collective, options.exchange_s, options.overlap_frac),
        blocking_sends=options.blocking_sends,
    )
    return Scenario(config, plan, profile, network, options.persist_s, links, options.stalls)


def sweep(scenario: Scenario, name: str, values: Sequence[float], n_steps: int) -> Iterator[dict[str, Any]]:
    """A point for each value of the quantity `name` (jaxdt.sim.scenario.SWEEPS): step_s, utilisation, parts."""
    check_swept(name, values)
    for value in values:
        times = break_down_step(SWEEPS[name].scenario(scenario, value), n_steps)
        yield {
            name: value,
            "step_s": times.step_s,
            "utilisation": times.utilisation_mean,
            "parts": asdict(times.parts),
        }


def step_records(scenario: Scenario, n_steps: int = 1) -> list[dict[str, Any]]:
    """The trace of the warm-up and n_steps after it."""
    lines: list[str] = []
    config = scenario.quiet(WARM_UP_STEPS + n_steps)
    simulate_run(config, scenario.plan, scenario.conditions(), trace.Trace(lines.append))
    return trace.read(lines)


def _access_gbps(gbps: float, network: Network, plan: Plan) -> dict[str, tuple[float, float]]:
    """(out, in) of the access line of each host."""
    hosts = [network.devices[peer].host or f"device{peer}" for peer in plan.peers]
    return dict.fromkeys(hosts, (gbps, gbps))
