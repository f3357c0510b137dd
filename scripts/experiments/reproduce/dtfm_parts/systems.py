"""The systems of DT-FM's Figure 3, simulated: GPT3-1.3B on 64 V100, with or without overlap, at some depth of 1F1B."""

import functools
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.reproduce.results import Job

from jaxdt.run import network as networks
from jaxdt.run.config import RunConfig, SyncConfig, TrainConfig
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan, even_shares, ranges
from jaxdt.run.profile import from_flops
from jaxdt.run.sizes import boundary_bytes
from jaxdt.run.work import WorkKind
from jaxdt.sim.predict import WARM_UP_STEPS, Conditions, predict_step_s
from jaxdt.sim.scenario import Scenario, memory_bytes, without

FOLDER = Path(__file__).resolve().parents[4] / "configs" / "networks"
CASES = {  # name: file, and (inside, across) bandwidths in Gb/s of the paper's text if the file has others
    "1 data centre": ("dtfm_case1_datacenter", None),
    "1, text": ("dtfm_case1_datacenter", (1200.0, 25.0)),
    "2 spot": ("dtfm_case2_spot", None),
    "2, text": ("dtfm_case2_spot", (100.0, 10.0)),
    "3 two data centres": ("dtfm_case3_multi_dc", None),
    "4 regional": ("dtfm_case4_regional", None),
    "5 worldwide": ("dtfm_case5_worldwide", None),
}
FLOPS, EFFICIENCY, EFFICIENCIES = 1.25e14, 0.35, (0.25, 0.35, 0.45)
SLICE_BYTES = 32 << 20
SHORT, LONG = 512, 1024  # samples of the steps that are simulated; other steps are on the line through them
Placement = tuple[tuple[int, ...], ...]  # a device by stage and pipeline


@dataclass(frozen=True, order=True)
class Options:
    """How a system runs. Without `overlap` a peer computes nothing while it sends a boundary tensor. `depth` multiplies
    the forwards in flight that plain 1F1B has."""

    overlap: bool
    depth: int

    def __str__(self) -> str:
        return f"{'overlap' if self.overlap else 'blocking'}, depth {self.depth}"


@dataclass(frozen=True)
class System:
    """A training system that is simulated. `efficiency` is the part of the peak FLOP/s that is reached."""

    network: Network
    n_layers: int
    placement: Placement
    options: Options
    efficiency: float = EFFICIENCY


@dataclass(frozen=True)
class Times:
    """step_s = fixed_s + each_s for every sample, from two simulations."""

    fixed_s: float
    each_s: float

    def step_s(self, batch: int) -> float:
        """Seconds of a step of `batch` samples."""
        return self.fixed_s + batch * self.each_s


def model_of(n_layers: int) -> GPTConfig:
    """GPT3-1.3B with the sizes of the published scheduler: layers only, and almost no vocabulary."""
    return GPTConfig(n_layers, 2048, 16, 8192, 2048, 128)


@functools.cache
def network_of(case: str) -> Network:
    """The network of a case, with the bandwidths of the paper's text if the case asks for them."""
    file, text_gbps = CASES[case]
    network = networks.load(FOLDER / f"{file}.json")
    if text_gbps is None:
        return network
    inside_gbps, across_gbps = text_gbps
    fastest = max(max(row) for row in network.bandwidth_gbps)
    rows = []
    for row in network.bandwidth_gbps:
        rows.append(tuple(gbps and (inside_gbps if gbps == fastest else across_gbps) for gbps in row))
    return replace(network, bandwidth_gbps=tuple(rows))


@functools.cache
def label_of(case: str) -> str:
    """A case, with a digest of its network."""
    return f"case={case!r} network={_digest(network_of(case))}"


def job(case: str, system: System, batch: int) -> Job:
    """The simulation of a step of `batch` samples; its value is the step's seconds."""
    n_stages, n_pipelines = len(system.placement), len(system.placement[0])
    inputs = (
        f"{label_of(case)} n_layers={system.n_layers} {n_stages} x {n_pipelines} "
        f"placement={_digest(system.placement)} {system.options} efficiency={system.efficiency} batch={batch}"
    )
    return Job(inputs, 2 * n_stages * batch * (WARM_UP_STEPS + 1), functools.partial(_seconds, system, batch))


def _digest(value) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _seconds(system: System, batch: int) -> list[float]:
    return [simulated_s(system, batch)]


def times(short_s: float, long_s: float) -> Times:
    """The times of a system whose steps of SHORT and LONG samples take so many seconds."""
    each_s = (long_s - short_s) / (LONG - SHORT)
    return Times(long_s - LONG * each_s, each_s)


def scenario_of(system: System, batch: int) -> Scenario:
    """The system's plan on its network, for steps of `batch` samples."""
    model = model_of(system.n_layers)
    config = RunConfig(model, train=TrainConfig(), sync=SyncConfig(slice_bytes=SLICE_BYTES), dtype="bfloat16")
    n_stages, n_pipelines = len(system.placement), len(system.placement[0])
    stages = ranges(even_shares(system.n_layers, n_stages))
    in_flight = tuple(system.options.depth * (n_stages - stage) for stage in range(n_stages))
    plan = Plan(system.n_layers, stages, system.placement, (batch // n_pipelines,) * n_pipelines, in_flight=in_flight)
    kinds = dict.fromkeys({device.kind for device in system.network.devices}, FLOPS)
    profile = from_flops(model, 1, kinds, system.efficiency, dtype="bfloat16")
    return Scenario(config, plan, profile, system.network)


def simulated_s(system: System, batch: int) -> float:
    """Seconds of a step of `batch` samples."""
    scenario = scenario_of(system, batch)
    conditions = scenario.conditions()
    if not system.options.overlap:
        conditions = without(replace(conditions, seconds=blocking(scenario, conditions)), ("transfer",))
    return predict_step_s(scenario.quiet(1), scenario.plan, conditions, WARM_UP_STEPS + 1)


def memory_gb(system: System) -> float:
    """The most that a device holds, by the run's own rule."""
    return max(memory_bytes(scenario_of(system, LONG)).values()) / 1e9


def blocking(scenario: Scenario, conditions: Conditions) -> dict[int, dict[str, float]]:
    """Seconds of Work by peer, in which the Work contains the transfer of what it sends, latency included."""
    plan = scenario.plan
    blocked: dict[int, dict[str, float]] = {}
    for peer, seconds in conditions.seconds.items():
        stage, pipeline = plan.seat(peer)
        blocked[peer] = dict(seconds)
        for kind, other, boundary in ((WorkKind.FORWARD, stage + 1, stage), (WorkKind.BACKWARD, stage - 1, stage - 1)):
            if 0 <= other < plan.n_stages:
                n_bytes = boundary_bytes(scenario.config, plan, boundary, pipeline, kind == WorkKind.FORWARD)
                link = scenario.network.link(peer, plan.placement[other][pipeline])
                blocked[peer][kind] += link.transfer_s(n_bytes)
    return blocked
