"""Measurements of other systems, predicted from what is known before: DDP and local SGD, and Sailor's plans."""

import csv
import json
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from experiments.page import ROOT
from experiments.reproduce.results import Job, Results
from matplotlib.figure import Figure

from jaxdt.api.simulate import SimulateOptions, scenario_of
from jaxdt.run.config import RunConfig, default_plan, parse
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Device, Host, Network
from jaxdt.run.plan import Plan, even_shares, ranges
from jaxdt.run.profile import DeviceKind, PartTimes, Profile
from jaxdt.sim.time_breakdown import break_down_step

DATA = ROOT / "configs/reproduce/measurements"
DATA_PARALLEL, SAILOR = DATA / "diloco_measured_localsgd_ddp.csv", DATA / "sailor_opt350m_gh200.json"
N_HOSTS, N_PARAMS = 4, 30_846_720
GOODPUT_FRAC = 0.9926  # iperf3 over the requested rate
INSTANCE_GBPS = 20.0  # a g6e.2xlarge, unshaped
NODE = "GH-96/4>GH-96/4"
RING, OWN = "ring", "shards"
SAILOR_WAYS = {
    "ring, blocking sends": dict(collective=RING, blocking_sends=True),
    "ring": dict(collective=RING),
    "as jaxdt does it": dict(collective=OWN),
}


# ------------------------------------------------------------------------------------------- DDP and local SGD


@dataclass(frozen=True)
class Point:
    """A measured run of DDP or local SGD; `compute_s` and `exchange_s` are medians of it."""

    algo: str
    every_steps: int
    gbps: float | None
    n_steps: int
    n_exchanges: int
    utilisation: float
    compute_s: float
    exchange_s: float

    @property
    def name(self) -> str:
        rate = "unshaped" if self.gbps is None else f"{self.gbps:g} Gb/s"
        return f"{'DDP' if self.algo == 'ddp' else f'local SGD, H = {self.every_steps}'}, {rate}"


def points() -> list[Point]:
    """The rows of the file."""
    lines = [line for line in DATA_PARALLEL.read_text().splitlines() if not line.startswith("#")]
    return [
        Point(
            algo=row["algo"],
            every_steps=int(row["H"]),
            gbps=float(row["requested_gbps"]) if row["requested_gbps"] else None,
            n_steps=int(row["n_kept"]),
            n_exchanges=int(row["n_sync"]),
            utilisation=float(row["cu_published"]),
            compute_s=float(row["compute_ms_median"]) / 1e3,
            exchange_s=float(row["sync_ms_median"]) / 1e3,
        )
        for row in csv.DictReader(lines)
    ]


def compute_s_of(algo: str) -> float:
    """One compute time for each algorithm: the unshaped run's, where there is one, else the median of all runs."""
    own = [point for point in points() if point.algo == algo]
    unshaped = [point.compute_s for point in own if point.gbps is None]
    return statistics.median(unshaped or [point.compute_s for point in own])


def data_parallel_job(point: Point, collective: str) -> Job:
    """Values: seconds of a step without exchange, and of an exchange beside it."""
    compute_s = compute_s_of(point.algo)
    inputs = f"{point.algo} {N_HOSTS} hosts {N_PARAMS} params {compute_s:g} s {point.gbps} Gb/s {collective}"
    return Job(inputs, 100, partial(data_parallel_s, point.algo, compute_s, point.gbps, collective))


def data_parallel_s(algo: str, compute_s: float, gbps: float | None, collective: str) -> list[float]:
    """Simulate steps with an exchange each, and without any."""
    sync = dict(kind="groups") if algo != "ddp" else {}
    model = dict(preset="debug", n_layers=1, d_model=2, d_ff=2, n_heads=1, max_len=2, tied_head=True)
    model["vocab_size"] = (N_PARAMS - parse(dict(model=model | dict(vocab_size=2))).model.facts.n_params) // 2 + 2
    plan = dict(pipelines=N_HOSTS, microbatches=N_HOSTS)
    config = parse(dict(model=model, plan=plan, sync=sync))
    assert config.model.facts.n_params == N_PARAMS
    line = gbps if gbps is not None else INSTANCE_GBPS
    frac = GOODPUT_FRAC if gbps is not None else 1.0
    hosts = tuple(Host(f"h{i}", out_gbps=line, in_gbps=line, goodput_frac=frac) for i in range(N_HOSTS))
    network = all_alike(hosts, 1e6)
    profile = Profile(config.model, 1, {"": DeviceKind(PartTimes(backward_s=compute_s))})
    with_s = step_s(config, default_plan(config), profile, network, collective=collective)
    return [compute_s, with_s - compute_s]


def all_alike(hosts: tuple[Host, ...], gbps: float) -> Network:
    """A device on each host, with equal links without latency."""
    n = range(len(hosts))
    links = tuple(tuple(0.0 if i == j else gbps for j in n) for i in n)
    devices = tuple(Device(f"d{i}", host=host.name) for i, host in enumerate(hosts))
    return Network(devices, ((0.0,) * len(hosts),) * len(hosts), links, "outside", hosts)


def step_s(config: RunConfig, plan: Plan, profile: Profile, network: Network, **ways) -> float:
    """Simulated seconds of a step in which nothing has to be durable."""
    scenario = scenario_of(config, profile, network, plan, SimulateOptions(persist_s=0.0, **ways))
    return break_down_step(scenario, 1).step_s


def utilisation_of(point: Point, collective: str, results: Results) -> float:
    """The predicted share of computing in the published window of a run."""
    local_s, exchange_s = results.get(data_parallel_job(point, collective))
    busy_s = point.n_steps * local_s
    return busy_s / (busy_s + point.n_exchanges * exchange_s)


# --------------------------------------------------------------------------------------------------- Sailor's plans


def sailor_plans() -> list[dict]:
    return json.loads(SAILOR.read_text())["plans"]


def plan_name(entry: dict) -> str:
    return f"{len(entry['layers'])} stages x {len(entry['kinds'][0])}, microbatch {entry['mbs']}, batch {entry['gbs']}"


def sailor_job(entry: dict, way: str) -> Job:
    n_works = 2 * entry["gbs"] // entry["mbs"] * len(entry["layers"])
    return Job(f"{entry['file']} {way}", 8 * n_works, partial(sailor_s, entry, way))


def sailor_s(entry: dict, way: str) -> list[float]:
    """Simulated seconds of a step of a plan; a device is a node of 4 GPUs."""
    data = json.loads(SAILOR.read_text())
    times = data["profiles"][f"OPT-350/GH-96/mbs{entry['mbs']}/tp4"]
    model = GPTConfig(24, 1024, 16, 4096, 2048, 50304)
    n_stages, n_pipelines = len(entry["layers"]), len(entry["kinds"][0])
    layers = list(entry["layers"])  # the embedding and the head count as a layer each
    layers[0] -= 1
    layers[-1] -= 1
    n_microbatches = entry["gbs"] // entry["mbs"]
    part = {name: PartTimes(f_s, b_s, 0.0, u_s) for name, (f_s, b_s, u_s) in list(times.items())[:3]}
    kind = DeviceKind(part["layer"], part["embedding"], part["head"])
    profile = Profile(model, entry["mbs"], {"": kind})
    fields = dict(preset="debug", n_layers=24, d_model=1024, n_heads=16, d_ff=4096, max_len=2048, vocab_size=50304)
    fields |= dict(tied_head=False)
    cut = dict(stages=n_stages, pipelines=n_pipelines, microbatches=n_microbatches)
    config = parse(dict(model=fields, plan=cut, train=dict(microbatch_size=entry["mbs"])))
    profile = replace(profile, model=config.model)
    plan = replace(
        default_plan(config), stages=ranges(layers), shares=even_shares(n_microbatches, n_pipelines), in_flight=None
    )
    gbps = 8 * data["node_gbytes_s"][NODE]["max"]
    hosts = tuple(Host(f"n{i}", out_gbps=gbps, in_gbps=gbps) for i in range(n_stages * n_pipelines))
    return [step_s(config, plan, profile, all_alike(hosts, gbps), **SAILOR_WAYS[way])]


# -------------------------------------------------------------------------------------------------------------- page


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    results.fill(data_parallel_job(point, way) for point in points() for way in (RING, "tree"))
    results.fill(sailor_job(entry, way) for entry in sailor_plans() for way in SAILOR_WAYS)
    return dict(pictures={"outside.png": draw(results)})


def error(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def errors_of(results: Results, collective: str, algo: str = "") -> list[float]:
    own = [point for point in points() if algo in ("", point.algo)]
    return [error(utilisation_of(point, collective, results), point.utilisation) for point in own]


def sailor_errors(results: Results, way: str) -> list[float]:
    return [error(results.get(sailor_job(entry, way))[0], entry["real_s"]) for entry in sailor_plans()]


def off(errors: list[float]) -> list[str]:
    """Median and worst of absolute errors, in percent."""
    sizes = [abs(one) for one in errors]
    return [f"{100 * statistics.median(sizes):.1f} %", f"{100 * max(sizes):.1f} %"]


def summary(results: Results) -> list[list]:
    rows = [
        ["utilisation, local SGD", 16, "ring", *off(errors_of(results, RING, "localsgd")), "6 %, 20 %"],
        ["utilisation, DDP", 5, "ring", *off(errors_of(results, RING, "ddp")), "6 %, 20 %"],
        ["utilisation, both", 21, "ring", *off(errors_of(results, RING)), "6 %, 20 %"],
        ["utilisation, both, to compare", 21, "tree", *off(errors_of(results, "tree")), "-"],
    ]
    rows += [
        ["seconds a step, Sailor's plans", 15, way, *off(sailor_errors(results, way)), "6.3 %, -"]
        for way in SAILOR_WAYS
    ]
    return rows


def data_parallel(results: Results) -> list[list]:
    rows = []
    for point in points():
        ring, tree = (utilisation_of(point, way, results) for way in (RING, "tree"))
        measured = point.utilisation
        rows.append(
            [point.name, f"{measured:.4f}", f"{ring:.4f}", f"{100 * error(ring, measured):+.1f} %"]
            + [f"{100 * error(tree, measured):+.1f} %"]
        )
    return rows


def sailor(results: Results) -> list[list]:
    rows = []
    for entry in sailor_plans():
        found = [results.get(sailor_job(entry, way))[0] for way in SAILOR_WAYS]
        cells = [f"{seconds:.3f} ({100 * error(seconds, entry['real_s']):+.1f} %)" for seconds in found]
        rows.append([plan_name(entry), f"{entry['real_s']:.3f}", *cells])
    return rows


def draw(results: Results) -> Figure:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for algo, marker in (("localsgd", "o"), ("ddp", "s")):
        own = [point for point in points() if point.algo == algo]
        predicted = [utilisation_of(point, RING, results) for point in own]
        left.plot([point.utilisation for point in own], predicted, marker, label=algo)
    left.plot((3e-4, 1), (3e-4, 1), "0.6", lw=1)
    left.set(xscale="log", yscale="log", xlabel="measured utilisation", ylabel="predicted (ring)")
    left.legend()
    measured = [entry["real_s"] for entry in sailor_plans()]
    way = next(iter(SAILOR_WAYS))
    right.plot(measured, [results.get(sailor_job(entry, way))[0] for entry in sailor_plans()], "o", label=way)
    right.plot((0, max(measured)), (0, max(measured)), "0.6", lw=1)
    right.set(xlabel="measured seconds a step", ylabel="predicted")
    right.legend()
    return figure


def causes(results: Results) -> list[list]:
    """Where the differences come from, with what the file says about single exchanges. Found afterwards: none of it is
    in the predictions."""
    local = [point for point in points() if point.algo == "localsgd"]
    rows = []
    for gbps in sorted({point.gbps for point in local if point.gbps}, reverse=True):
        own = {point.every_steps: point for point in local if point.gbps == gbps}
        ddp = next(point for point in points() if point.algo == "ddp" and point.gbps == gbps)
        _, ring_s = results.get(data_parallel_job(own[8], RING))
        later_s, first_s = own[8].exchange_s, own[128].exchange_s
        rows.append([f"{gbps:g} Gb/s", ring_s, later_s / ring_s, first_s / ring_s, ddp.exchange_s / ring_s])

    return rows
