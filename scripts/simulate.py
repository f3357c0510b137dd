"""What a plan's step costs on a network, before anything runs. Needs no jax.

    python scripts/simulate.py --plan=plan.json --network=N.json --profile=profile.json --steps=4 --out=runs/sim
    python scripts/simulate.py --model=gpt3_1p3b --stages=8 --pipelines=8 --microbatches=512 --flops=1.25e14 \\
        --efficiency=0.35 --dtype=bfloat16 --network=N.json --sweep=bandwidth_gbps=0.05:10 --out=runs/sim

    python scripts/simulate.py --model=debug --flops=1e9 --stages=2 --pipelines=3 --faults=7:4
    python scripts/simulate.py --model=debug --flops=1e9 --stages=2 --microbatches=6 --grid
    python scripts/simulate.py --orders=orders.txt

Prints the parts of a step (jaxdt/sim/time_breakdown.py defines them) and writes to --out: prediction.json (parts,
utilisation and memory per peer, bytes per link), timeline.json (ui.perfetto.dev), simulation.png, and for a sweep
sweep.json and sweep.png. Without --plan the config's plan fields or --stages, --pipelines and --microbatches cut and
place evenly; without --profile the seconds follow from --flops and --efficiency; without --network links cost nothing.

With --faults or --trace it prints instead the faults, the course of a run of --steps under them, and how long the run
takes without (wired as the config says; without a config, `swarm`). --out receives faults.json and faults.png, with the
peers per stage and the throughput over time. Machines that come back in a trace join as newcomers.

With --grid it prints instead the schedule of one step as a grid of stages and time (a column is one forward or
backward, such as 0F1: stage 0, forward, microbatch 1), and where the schedule would deadlock; then the Work of a
simulated step in the order of each peer. --out receives orders.txt: a line per stage, an empty line between pipelines.
With --orders the same grid shows the orders of such a file, which people may write; nothing is simulated then.

Exit codes: 0 done, 1 the orders deadlock, 2 bad input.
"""

import check_installed  # noqa: F401

# isort: split
import json
import math
from dataclasses import replace
from pathlib import Path

from absl import flags

from jaxdt import build
from jaxdt.api import simulate as api
from jaxdt.cli import config_flag, option_flags, script_main
from jaxdt.protocol import schedule, trace
from jaxdt.protocol.presence import peers_there
from jaxdt.protocol.reports import GroupReport
from jaxdt.protocol.schedule import Order
from jaxdt.run import config as configs
from jaxdt.run import network as networks
from jaxdt.run import plan as plans
from jaxdt.run import profile as profiles
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, nearest, read_text
from jaxdt.run.options import SECONDS_MAX, in_range, number_in
from jaxdt.run.plan import Plan
from jaxdt.run.profile import Profile
from jaxdt.sim.availability import from_trace
from jaxdt.sim.fault_report import check_heartbeats, records, run_with_faults, sentence, summary, time_limit_s
from jaxdt.sim.faults import Fault, draw
from jaxdt.sim.link_table import OWN_EXCHANGE
from jaxdt.sim.predict import timed_span
from jaxdt.sim.scenario import SWEEPS, Scenario, check_swept
from jaxdt.sim.sim_peer import Outcome
from jaxdt.sim.stragglers import stalls
from jaxdt.sim.time_breakdown import WARM_UP_STEPS
from jaxdt.sync.matching.mixing import mixing_lines

flags.adopt_module_key_flags(config_flag)
option_flags.define(api.SimulateOptions)
PLAN = flags.DEFINE_string("plan", None, "A plan.json.")
NETWORK = flags.DEFINE_string("network", None, "A network.json; without one links cost nothing.")
PROFILE = flags.DEFINE_string("profile", None, "A profile.json; without one --flops says how fast devices are.")
FLOPS = flags.DEFINE_string("flops", None, "Peak FLOP/s of every device, or KIND=FLOP/s per kind of the network.")
EFFICIENCY = flags.DEFINE_float("efficiency", api.EFFICIENCY, "Share of --flops that the maths reaches.")
MODEL = flags.DEFINE_string("model", None, "A model preset, without --config and --profile.")
STAGES = flags.DEFINE_integer("stages", None, "Without a plan: stages.")
PIPELINES = flags.DEFINE_integer("pipelines", None, "Without a plan: pipelines.")
MICROBATCHES = flags.DEFINE_integer("microbatches", None, "Without a plan: microbatches of a step, over all pipelines.")
MICROBATCH_SIZE = flags.DEFINE_integer("microbatch_size", None, "Samples of a microbatch, without --config.")
CODEC = flags.DEFINE_string("codec", None, "Instead of the plan's codec.")
DTYPE = flags.DEFINE_string("dtype", None, "Without --config: float32 or bfloat16.")
JITTER_MS = flags.DEFINE_float("jitter_ms", 0.0, "Uniform jitter of every message's latency.")
EXCHANGE_MS = flags.DEFINE_float("exchange_ms", 0.0, "Each exchange of replicas takes this besides its bytes.")
STALL = flags.DEFINE_string(
    "stall", None, f"Stragglers, {stalls.SYNTAX}: peers pause before the first forward of a step, or before each Work."
)
SWEEP = flags.DEFINE_string("sweep", None, f"NAME=LOW:HIGH with {', '.join(SWEEPS)}; log-spaced, for all links.")
POINTS = flags.DEFINE_integer("points", 9, "Points of a sweep.")
FAULTS = flags.DEFINE_string("faults", None, "SEED:N, N faults drawn from a seed.")
TRACE = flags.DEFINE_string("trace", None, "An availability trace (jaxdt/sim/availability.py) of crashes and joins.")
TRACE_SPEED = flags.DEFINE_float("trace_speed", 1.0, "Seconds of the trace in one second of the run.")
GRID = flags.DEFINE_bool("grid", False, "Print the schedule of a step as a grid, and where it would deadlock.")
ORDERS = flags.DEFINE_string("orders", None, "A file with a schedule to print so, as --grid writes it to --out.")
OUT = flags.DEFINE_string("out", None, "Folder for the results.")
MILLISECONDS = number_in(0.0, 1e3 * SECONDS_MAX)
POINTS_MAX = FAULTS_MAX = 1000  # of these each takes time


def main() -> int:
    for flag, accepts in ((POINTS, in_range(2, POINTS_MAX)), (JITTER_MS, MILLISECONDS), (EXCHANGE_MS, MILLISECONDS)):
        if not accepts.holds(flag.value):
            raise BadInput(f"--{flag.name}: got {flag.value}, expected {accepts.text}")
    if ORDERS.value:
        return print_schedule(load_orders(Path(ORDERS.value)))
    options = replace(
        option_flags.read(api.SimulateOptions),
        jitter_s=JITTER_MS.value / 1e3,
        exchange_s=EXCHANGE_MS.value / 1e3,
        stalls=stalls.parse(STALL.value) if STALL.value else None,
    )
    scenario = scenario_of_flags(options)
    if FAULTS.value or TRACE.value:
        if scenario.options.exchange != OWN_EXCHANGE or options.blocking_sends:
            raise BadInput(
                "--collective, --exchange_ms, --overlap_frac, --blocking_sends: got one beside --faults or --trace, "
                "expected none: other systems' exchanges are not simulated under faults"
            )
        run_faults(scenario, options)
        return 0
    if GRID.value:
        return run_grid(scenario)
    run_prediction(scenario, options.steps)
    return 0


def run_prediction(scenario: Scenario, n_steps: int) -> None:
    """The parts of a step, and a sweep if there is one."""
    sweep = parse_sweep(SWEEP.value) if SWEEP.value else None
    if OUT.value:
        Path(OUT.value).mkdir(parents=True, exist_ok=True)
    result = api.simulate_scenario(scenario, n_steps)
    print(result)
    if OUT.value:
        result.save(OUT.value)
    if sweep:
        name, values = sweep
        run_sweep(scenario, name, values, n_steps)
    if OUT.value:
        print(f"wrote {', '.join(str(path) for path in sorted(Path(OUT.value).iterdir()))}")


# ------------------------------------------------------------------------------------------------------------- input


def scenario_of_flags(options: api.SimulateOptions) -> Scenario:
    """The scenario that all flags together describe; raises BadInput where they contradict each other."""
    profile = profiles.load(PROFILE.value) if PROFILE.value else None
    config = config_of_flags(profile)
    plan = plan_of_flags(config)
    network = networks.load(NETWORK.value) if NETWORK.value else None
    profile = profile or api.profile_of_flops(config, flops_of_flags(), network, EFFICIENCY.value)
    return api.scenario_of(config, profile, network, plan, options)


def config_of_flags(profile: Profile | None) -> RunConfig:
    """The config of --config; without it, the model of the profile or a preset, with what the flags say."""
    if config_flag.is_given():
        return configs.parse(config_flag.config_dict().to_dict())
    if profile is None and MODEL.value is None:
        raise BadInput("--config, --profile, --model: got none of them, expected one that says which model")
    plan = {"stages": STAGES.value, "pipelines": PIPELINES.value, "microbatches": MICROBATCHES.value}
    plan = {name: value for name, value in plan.items() if value is not None}
    plan.setdefault("microbatches", 4 * plan.get("stages", 1) * plan.get("pipelines", 1))
    fields = {"plan": plan, "train": {}}
    fields["model"] = {"preset": MODEL.value} if MODEL.value else profiles.to_json(profile)["model"]
    if profile:
        fields |= {"dtype": profile.dtype, "remat": profile.remat}
        fields["train"]["microbatch_size"] = profile.microbatch_size
    if DTYPE.value:
        fields["dtype"] = DTYPE.value
    if MICROBATCH_SIZE.value is not None:
        fields["train"]["microbatch_size"] = MICROBATCH_SIZE.value
    if FAULTS.value or TRACE.value:
        fields["wiring"] = {"kind": "swarm"}
    return configs.parse(fields)


def plan_of_flags(config: RunConfig) -> Plan:
    plan = plans.load(PLAN.value) if PLAN.value else configs.default_plan(config)
    return replace(plan, codec=(CODEC.value,) * (plan.n_stages - 1)) if CODEC.value else plan


def flops_of_flags() -> float | dict[str, float]:
    """FLOP/s of all devices, or of each kind."""
    if not FLOPS.value:
        raise BadInput("--profile, --flops: got neither, expected one that says how fast the devices are")
    return profiles.parse_flops(FLOPS.value)


def parse_sweep(text: str) -> tuple[str, list[float]]:
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
    check_swept(name, (low, high))
    n = POINTS.value - 1
    return name, [low * (high / low) ** (i / n) for i in range(n + 1)]


# ------------------------------------------------------------------------------------------------------------ output


def run_sweep(scenario: Scenario, name: str, values: list[float], n_steps: int) -> None:
    """Step time and utilisation along one quantity."""
    points = []
    for point in api.sweep(scenario, name, values, n_steps):
        points.append(point)
        value, utilisation = point[name], 100 * point["utilisation"]
        print(f"{name} {value:10.4g}   step {point['step_s']:10.4f} s   utilisation {utilisation:5.1f} %")
    if OUT.value:
        from jaxdt.cli import plots

        (Path(OUT.value) / "sweep.json").write_text(json.dumps(points, indent=1) + "\n")
        plots.sweep(Path(OUT.value) / "sweep.png", name, points)


# ------------------------------------------------------------------------------------------------------------ schedule


def run_grid(scenario: Scenario) -> int:
    """The plan's schedule, if the wiring follows one, and a simulated step; the exit code."""
    plan = scenario.plan
    if build.follows_plan(scenario.config):
        orders = [
            {stage: schedule.stage_order(plan, stage, pipeline) for stage in range(plan.n_stages)}
            for pipeline in range(plan.n_pipelines)
        ]
        if OUT.value:
            write_orders(Path(OUT.value), orders)
        if code := print_schedule(orders):
            return code
    print(f"step {WARM_UP_STEPS} as simulated, in the order of each peer:")
    print(trace.grid(api.step_records(scenario), WARM_UP_STEPS))
    return 0


def print_schedule(pipelines: list[dict[int, Order]]) -> int:
    """Print the schedule of each pipeline (stage -> order) as a grid; exit code 1 if one of them deadlocks."""
    code = 0
    for pipeline, orders in enumerate(pipelines):
        try:
            run = schedule.dry_run(orders)
        except ValueError as error:
            raise BadInput(f"pipeline {pipeline}: {error}") from None
        print(f"pipeline {pipeline}:\n{schedule.grid(run)}")
        if run.deadlock:
            print(f"deadlocks after {len(run.ticks)} ticks: {run.deadlock}")
            code = 1
        else:
            print(f"no deadlock, {len(run.ticks)} ticks")
    return code


def write_orders(out: Path, pipelines: list[dict[int, Order]]) -> None:
    """orders.txt: a line per stage, an empty line between pipelines."""
    out.mkdir(parents=True, exist_ok=True)
    blocks = ["\n".join(schedule.text(order) for order in orders.values()) for orders in pipelines]
    (out / "orders.txt").write_text("\n\n".join(blocks) + "\n")


def load_orders(path: Path) -> list[dict[int, Order]]:
    """The orders of each pipeline, as write_orders has written them or people have."""
    text = read_text(path)
    pipelines: list[dict[int, Order]] = [{}]
    for number, line in enumerate(text.strip().splitlines(), start=1):
        if not line.strip():
            pipelines.append({})
            continue
        try:
            pipelines[-1][len(pipelines[-1])] = schedule.parse(line)
        except ValueError as error:
            raise BadInput(f"--orders: {path}: line {number}: {error}") from None
    pipelines = [orders for orders in pipelines if orders]
    if not pipelines:
        raise BadInput(f"--orders: {path} is empty, expected a line per stage")
    return pipelines


# -------------------------------------------------------------------------------------------------------------- faults


def run_faults(scenario: Scenario, options: api.SimulateOptions) -> None:
    """The run under faults beside the run without; the faults are drawn and printed before it begins."""
    stages, span = scenario.plan.placement, timed_span(scenario.config, scenario.plan, options.steps)
    n_steps = span.n_in_all if span.n_period > 1 else options.steps
    check_heartbeats(scenario, n_steps)
    undisturbed = run_with_faults(scenario, n_steps)
    undisturbed_s = undisturbed.now_s
    faults = []
    if FAULTS.value:
        seed, n = parse_faults(FAULTS.value)
        pause_s = max(scenario.config.net.deadline_floor_s, undisturbed_s / 4)
        faults += draw(seed, stages, n, undisturbed_s, pause_s)
    if TRACE.value:
        faults += faults_of_trace(scenario, options.seed, time_limit_s(undisturbed_s))
    print("\n".join([*api.links_note(scenario), *(list(map(sentence, faults)) or ["no faults"])]))
    disturbed = run_with_faults(scenario, n_steps, faults, undisturbed_s)
    print("\n".join([*summary(undisturbed, disturbed), *mixing_lines(scenario.plan, disturbed.of(GroupReport))]))
    if OUT.value:
        write_fault_report(Path(OUT.value), faults, disturbed)


def write_fault_report(out: Path, faults: list[Fault], outcome: Outcome) -> None:
    """faults.json and faults.png."""
    from jaxdt.cli import plots

    out.mkdir(parents=True, exist_ok=True)
    reports = records(outcome)
    peers = peers_there(reports)
    found = {
        "faults": list(map(sentence, faults)),
        "steps": [{"t_s": r["t"]} | r["fields"] for r in reports if r["kind"] == "step"],
        "peers_per_stage": [{"t_s": t_s, "peers": list(of_stages.values())} for t_s, of_stages in peers],
    }
    (out / "faults.json").write_text(json.dumps(found, indent=1) + "\n")
    if peers:
        plots.run_under_faults(out / "faults.png", reports)


def faults_of_trace(scenario: Scenario, seed: int, until_s: float) -> list[Fault]:
    """The faults of --trace that begin before until_s."""
    if not 0 < TRACE_SPEED.value < math.inf:
        raise BadInput(f"--trace_speed: got {TRACE_SPEED.value}, expected a finite number > 0")
    return from_trace(TRACE.value, scenario.plan.placement, seed, until_s, TRACE_SPEED.value)


def parse_faults(text: str) -> tuple[int, int]:
    """(seed, number of faults) of SEED:N."""
    seed, _, n = text.partition(":")
    if not (seed.isdecimal() and n.isdecimal() and 0 < int(n) <= FAULTS_MAX):
        raise BadInput(f"--faults: got {text!r}, expected SEED:N with N in 1..{FAULTS_MAX}")
    return int(seed), int(n)


if __name__ == "__main__":
    script_main.run(main)
