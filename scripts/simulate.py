"""What a plan's step costs on a network, before anything runs. Needs no jax.

    python scripts/simulate.py --plan=plan.json --network=N.json --profile=profile.json --steps=4 --out=runs/sim
    python scripts/simulate.py --model=gpt3_1p3b --stages=8 --pipelines=8 --microbatches=512 --flops=1.25e14 \\
        --efficiency=0.35 --dtype=bfloat16 --network=N.json --sweep=bandwidth_gbps=0.05:10 --out=runs/sim

    python scripts/simulate.py --model=debug --flops=1e9 --stages=2 --pipelines=3 --faults=7:4

Prints the step's parts (jaxdt/sim/time_breakdown.py defines them) and writes to --out: prediction.json (parts,
utilisation and memory per peer, bytes per link), timeline.json (ui.perfetto.dev), simulation.png, and for a sweep
sweep.json and sweep.png. Without --plan the config's plan fields or --stages, --pipelines and --microbatches cut and
place evenly; without --profile the seconds follow from --flops and --efficiency; without --network links cost nothing.
With --faults or --trace, instead: the faults, what the run of --steps makes of them, and how long it takes without
(wired as the config says, without one `swarm`); --out receives faults.json and faults.png, with the peers per stage
and the throughput over time. Machines that come back in a trace join as newcomers. Exit codes: 0 done, 2 bad input.
"""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from jaxdt import build
from jaxdt.cli import script_main
from jaxdt.protocol.perfetto import chrome
from jaxdt.protocol.trace import Trace, read
from jaxdt.sim.availability import from_trace
from jaxdt.sim.fault_report import endure, patience_s, records, summary
from jaxdt.sim.faults import Fault, draw
from jaxdt.sim.link_table import LinkOptions
from jaxdt.sim.links import Jitter, Ramp
from jaxdt.sim.predict import simulate
from jaxdt.sim.scenario import SWEEPS, Scenario, memory_bytes
from jaxdt.sim.sim_peer import Outcome
from jaxdt.sim.time_breakdown import WARM_UP_STEPS, TimeBreakdown, account
from jaxdt.spec import config as configs
from jaxdt.spec import network as networks
from jaxdt.spec import plan as plans
from jaxdt.spec import profile as profiles
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput, nearest
from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from jaxdt.spec.profile import Profile

CONFIG = config_flags.DEFINE_config_file("config", None, "A configs/*.py file; --config.FIELD=VALUE changes a field.")
PLAN = flags.DEFINE_string("plan", None, "A plan.json.")
NETWORK = flags.DEFINE_string("network", None, "A network.json; without one links cost nothing.")
PROFILE = flags.DEFINE_string("profile", None, "A profile.json; without one --flops says how fast devices are.")
FLOPS = flags.DEFINE_list("flops", [], "Peak FLOP/s of every device, or KIND=FLOP/s per kind of the network.")
EFFICIENCY = flags.DEFINE_float("efficiency", 0.35, "Share of --flops that the maths reaches.")
MODEL = flags.DEFINE_string("model", None, "A model preset, without --config and --profile.")
STAGES = flags.DEFINE_integer("stages", None, "Without a plan: stages.")
PIPELINES = flags.DEFINE_integer("pipelines", None, "Without a plan: pipelines.")
MICROBATCHES = flags.DEFINE_integer("microbatches", None, "Without a plan: microbatches of a step, over all pipelines.")
MICROBATCH_SIZE = flags.DEFINE_integer("microbatch_size", None, "Samples of a microbatch, without --config.")
SCHEDULE = flags.DEFINE_enum("schedule", None, plans.SCHEDULES, "Instead of the plan's schedule.")
CODEC = flags.DEFINE_string("codec", None, "Instead of the plan's codec.")
DTYPE = flags.DEFINE_string("dtype", None, "Without --config: float32 or bfloat16.")
STEPS = flags.DEFINE_integer("steps", 3, "Steps to simulate behind the first.")
PERSIST_MS = flags.DEFINE_float("persist_ms", 2.0, "Making the record of a step durable.")
JITTER_MS = flags.DEFINE_float("jitter_ms", 0.0, "Uniform jitter of every message's latency.")
RAMP = flags.DEFINE_bool("tcp_ramp", False, "Connections start slowly again when they were idle.")
ACCESS = flags.DEFINE_float("access_gbps", None, "The line that all traffic of a host shares, each way.")
SEED = flags.DEFINE_integer("seed", 0, "Of the jitter.")
SWEEP = flags.DEFINE_string("sweep", None, f"NAME=LOW:HIGH with {', '.join(SWEEPS)}; log-spaced, for all links.")
POINTS = flags.DEFINE_integer("points", 9, "Points of a sweep.")
FAULTS = flags.DEFINE_string("faults", None, "SEED:N, so many faults from a seed.")
TRACE = flags.DEFINE_string("trace", None, "An availability trace (jaxdt/sim/availability.py): who goes and who comes.")
TRACE_SPEED = flags.DEFINE_float("trace_speed", 1.0, "Seconds of the trace in one second of the run.")
TIMELINE = flags.DEFINE_bool("timeline", True, "Write timeline.json and simulation.png.")
OUT = flags.DEFINE_string("out", None, "Folder for the results.")


def main() -> int:
    for flag, least in ((STEPS, 1), (POINTS, 2), (PERSIST_MS, 0), (JITTER_MS, 0)):
        if not least <= flag.value < math.inf:
            raise BadInput(f"--{flag.name}: got {flag.value}, expected a number >= {least}")
    scenario = scenario_of_flags()
    if FAULTS.value or TRACE.value:
        run_ordeal(scenario)
        return 0
    sweep = parsed_sweep(SWEEP.value) if SWEEP.value else None
    if OUT.value:
        Path(OUT.value).mkdir(parents=True, exist_ok=True)
    result = account(scenario, STEPS.value)
    print(table(scenario, result))
    if OUT.value:
        out = Path(OUT.value)
        (out / "prediction.json").write_text(json.dumps(as_json(scenario, result), indent=1) + "\n")
        if TIMELINE.value:
            write_timeline(out, scenario, result)
    if sweep:
        run_sweep(scenario, *sweep)
    if OUT.value:
        print(f"wrote {', '.join(str(path) for path in sorted(out.iterdir()))}")
    return 0


# ------------------------------------------------------------------------------------------------------------- input


def scenario_of_flags() -> Scenario:
    """Everything of the flags, checked against one another."""
    profile = profiles.load(PROFILE.value) if PROFILE.value else None
    config = config_of_flags(profile)
    plan = plan_of_flags(config)
    build.check(config, plan)
    network = networks.load(NETWORK.value) if NETWORK.value else networks.uniform(max(plan.peers) + 1)
    if not NETWORK.value:  # equal devices, each on a host of its own
        network = replace(network, devices=tuple(replace(device, host="") for device in network.devices))
    profile = profile or profile_of_flops(config, network)
    options = LinkOptions(
        jitter=Jitter(JITTER_MS.value / 1e3, SEED.value) if JITTER_MS.value else None,
        ramp=Ramp() if RAMP.value else None,
        access_gbps=access(network, plan) if ACCESS.value is not None else {},
    )
    return Scenario(config, plan, profile, network, PERSIST_MS.value / 1e3, options)


def config_of_flags(profile: Profile | None) -> RunConfig:
    """The config file's; else the profile's model or a preset, with the flags."""
    if CONFIG.value is not None:
        try:
            return configs.parse(CONFIG.value.to_dict())
        except OSError as error:
            raise BadInput(f"--config: {str(error).strip().splitlines()[-1].strip()}") from None
    if profile is None and MODEL.value is None:
        raise BadInput("--config, --profile, --model: got none of them, expected one that says which model")
    cut = {"stages": STAGES, "pipelines": PIPELINES, "microbatches": MICROBATCHES}
    cut = {name: flag.value for name, flag in cut.items() if flag.value is not None}
    cut.setdefault("microbatches", 4 * cut.get("stages", 1) * cut.get("pipelines", 1))
    model = {"preset": MODEL.value} if MODEL.value else profiles.to_json(profile)["model"]
    fields = {"model": model, "plan": cut, "train": {}}
    size = MICROBATCH_SIZE.value
    size = profile.microbatch_size if size is None and profile else size
    fields["train"] |= {"microbatch_size": size} if size is not None else {}
    dtype = DTYPE.value or (profile.dtype if profile else None)
    fields |= {"dtype": dtype} if dtype else {}
    fields |= {"wiring": {"kind": "swarm"}} if FAULTS.value or TRACE.value else {}
    fields |= {"remat": profile.remat} if profile else {}
    return configs.parse(fields)


def plan_of_flags(config: RunConfig) -> Plan:
    plan = plans.load(PLAN.value) if PLAN.value else configs.default_plan(config)
    if SCHEDULE.value:
        plan = replace(plan, schedule=SCHEDULE.value)
    return replace(plan, codec=(CODEC.value,) * (plan.n_stages - 1)) if CODEC.value else plan


def profile_of_flops(config: RunConfig, network: Network) -> Profile:
    """Seconds from FLOP/s: one figure for all kinds of the network's devices, or one for each."""
    if not FLOPS.value:
        raise BadInput("--profile, --flops: got neither, expected one that says how fast the devices are")
    given = dict(entry.rpartition("=")[::2] for entry in FLOPS.value)
    try:
        flops = {kind: float(value) for kind, value in given.items()}
    except ValueError:
        raise BadInput(f"--flops: got {','.join(FLOPS.value)}, expected FLOP/s or KIND=FLOP/s") from None
    kinds = {device.kind for device in network.devices}
    if set(flops) == {""}:
        flops = dict.fromkeys(kinds, flops[""])
    size, remat = config.train.microbatch_size, config.remat
    return profiles.from_flops(config.model, size, flops, EFFICIENCY.value, dtype=config.dtype, remat=remat)


def access(network: Network, plan: Plan) -> dict[str, tuple[float, float]]:
    if not ACCESS.value > 0:
        raise BadInput(f"--access_gbps: got {ACCESS.value}, expected a number > 0")
    return {network.devices[peer].host or f"device{peer}": (ACCESS.value, ACCESS.value) for peer in plan.peers}


def parsed_sweep(text: str) -> tuple[str, list[float]]:
    """The name and the log-spaced points of NAME=LOW:HIGH."""
    name, _, span = text.partition("=")
    if name not in SWEEPS:
        raise BadInput(f"--sweep: got {name!r}{nearest(name, SWEEPS)}, expected one of {', '.join(SWEEPS)}")
    try:
        low, high = (float(word) for word in span.split(":"))
    except ValueError:
        raise BadInput(f"--sweep: got {text!r}, expected {name}=LOW:HIGH") from None
    if not 0 < low < high < math.inf:
        raise BadInput(f"--sweep: got {text!r}, expected 0 < LOW < HIGH")
    n = POINTS.value - 1
    return name, [low * (high / low) ** (i / n) for i in range(n + 1)]


# ------------------------------------------------------------------------------------------------------------ output


def table(scenario: Scenario, result: TimeBreakdown) -> str:
    plan, memory = scenario.plan, memory_bytes(scenario)
    tokens = plan.n_microbatches * scenario.config.train.microbatch_size * scenario.config.model.seq_len
    lines = [
        f"{plan.n_stages} stages x {plan.n_pipelines} pipelines, {plan.n_microbatches} microbatches, {plan.schedule}",
        f"step         {result.step_s:12.4f} s   {tokens / result.step_s:,.0f} tokens/s",
    ]
    for name, seconds in asdict(result.parts).items():
        label = name.removesuffix("_s")
        lines.append(f"  {label:10} {seconds:12.4f} s   {100 * seconds / result.step_s:5.1f} %")
    low, high = (pick(result.utilisation.values()) for pick in (min, max))
    lines.append(
        f"utilisation  {100 * result.utilisation_mean:12.1f} %   {100 * low:.1f} to {100 * high:.1f} % by peer"
    )
    lines.append(f"memory       {max(memory.values()) / 1e9:12.3f} GB  on the fullest peer")
    if result.n_bytes:
        (src, dst), n_bytes = max(result.n_bytes.items(), key=lambda item: item[1])
        total = sum(result.n_bytes.values())
        lines.append(
            f"network      {total / 1e9:12.3f} GB  a step, {n_bytes / 1e9:.3f} GB on the link p{src} -> p{dst}"
        )
    return "\n".join(lines)


def as_json(scenario: Scenario, result: TimeBreakdown) -> dict:
    return {
        "step_s": result.step_s,
        "parts": asdict(result.parts),
        "utilisation": result.utilisation,
        "memory_bytes": dict(sorted(memory_bytes(scenario).items())),
        "bytes_per_link": {f"{src}>{dst}": n for (src, dst), n in result.n_bytes.items()},
        "stages": scenario.plan.stages,
        "placement": scenario.plan.placement,
        "profile": scenario.profile.source,
        "network": scenario.network.name,
    }


def write_timeline(out: Path, scenario: Scenario, result: TimeBreakdown) -> None:
    """One step behind the warm-up, as a timeline and as a picture."""
    from jaxdt.cli import plots

    lines: list[str] = []
    simulate(scenario.quiet(WARM_UP_STEPS + 1), scenario.plan, scenario.conditions(), Trace(lines.append))
    records = read(lines)
    stage_of = {peer: scenario.plan.seat(peer)[0] for peer in scenario.plan.peers}
    (out / "timeline.json").write_text(json.dumps(chrome(records, stage_of)))
    plots.simulation(out / "simulation.png", records, asdict(result.parts), result.utilisation)


def run_sweep(scenario: Scenario, name: str, values: list[float]) -> None:
    """Step time and utilisation along one quantity."""
    points = []
    for value in values:
        result = account(SWEEPS[name](scenario, value), STEPS.value)
        point = {name: value, "step_s": result.step_s, "utilisation": result.utilisation_mean}
        points.append(point | {"parts": asdict(result.parts)})
        print(
            f"{name} {value:10.4g}   step {result.step_s:10.4f} s   utilisation {100 * result.utilisation_mean:5.1f} %"
        )
    if OUT.value:
        from jaxdt.cli import plots

        (Path(OUT.value) / "sweep.json").write_text(json.dumps(points, indent=1) + "\n")
        plots.sweep(Path(OUT.value) / "sweep.png", name, points)


def run_ordeal(scenario: Scenario) -> None:
    """The run under faults beside the run without; the faults are known, and printed, before it begins."""
    stages, n_steps = scenario.plan.placement, STEPS.value
    calm = endure(scenario, n_steps)
    faults = []
    if FAULTS.value:
        seed, n = parsed_faults(FAULTS.value)
        faults += draw(seed, stages, n, calm.now_s, max(scenario.config.net.deadline_floor_s, calm.now_s / 4))
    if TRACE.value:
        faults += faults_of_trace(scenario, patience_s(calm.now_s))
    print("\n".join(map(str, faults)) or "no faults")
    stormy = endure(scenario, n_steps, faults, calm.now_s)
    print("\n".join(summary(calm, stormy)))
    if OUT.value:
        write_ordeal(Path(OUT.value), faults, stormy)


def write_ordeal(out: Path, faults: list[Fault], stormy: Outcome) -> None:
    """faults.json and faults.png."""
    from jaxdt.cli import plots

    out.mkdir(parents=True, exist_ok=True)
    told = records(stormy)
    views = [(r["t"], sorted(r["fields"]["members"].values())) for r in told if r["kind"] == "view"]
    stages = sorted({stage for _, held in views for stage in held})
    found = {
        "faults": list(map(str, faults)),
        "steps": [{"t_s": r["t"]} | r["fields"] for r in told if r["kind"] == "step"],
        "peers_per_stage": [{"t_s": t_s, "peers": [held.count(stage) for stage in stages]} for t_s, held in views],
    }
    (out / "faults.json").write_text(json.dumps(found, indent=1) + "\n")
    if views:
        plots.endured(out / "faults.png", told)


def faults_of_trace(scenario: Scenario, until_s: float) -> list[Fault]:
    """What the trace holds before until_s."""
    if not 0 < TRACE_SPEED.value < math.inf:
        raise BadInput(f"--trace_speed: got {TRACE_SPEED.value}, expected a finite number > 0")
    return from_trace(TRACE.value, scenario.plan.placement, SEED.value, until_s, TRACE_SPEED.value)


def parsed_faults(text: str) -> tuple[int, int]:
    """SEED:N."""
    seed, _, n = text.partition(":")
    if not (seed.isdecimal() and n.isdecimal() and int(n) > 0):
        raise BadInput(f"--faults: got {text!r}, expected SEED:N with N >= 1")
    return int(seed), int(n)


if __name__ == "__main__":
    script_main.run(main)
