"""A batch on the machines of this project: a pool's servers and workers, swarm wiring, 1F1B pipelines.

Nothing but the batch is timed: the model has next to no parameters, so averaging, contributions and the fetch of a
version take no time on any side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from experiments.reproduce.hybrid_ps_parts.fleets import Losses, Machines
from experiments.reproduce.machines import on_machines, shares, work_s
from experiments.reproduce.results import Job, Results, described

from jaxdt.protocol.reports import StepReport
from jaxdt.run.config import PlanConfig, RunConfig, TrainConfig, WiringConfig
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.plan import Plan, PlanRoles
from jaxdt.sim.faults import CRASH, Fault
from jaxdt.sim.predict import WARM_UP_STEPS, Conditions, simulate
from jaxdt.sim.scenario import RARE

POOL, SWARM, FIXED = "pool", "swarm", "fixed"
WIDTH, FLOAT_BYTES = 8, 4
DEPTH = 8  # what swarm's window comes to at each machine of the first of two stages
KEEP_ALL = 1 << 50  # bytes of boundary tensors


@dataclass(frozen=True)
class System:
    """wiring: POOL, SWARM or FIXED. n_servers: of each stage of a pool. keeps: swarm's and fixed wiring's peers keep
    the boundary tensors of a batch, so a loss costs computation in the stage of the loss alone. by_power: pipelines
    have shares by their power; equal ones otherwise. depth: forwards of a machine that wait for their backward, where
    the plan decides it (beside workers one more, or what travels to them); swarm's window is four a peer."""

    wiring: str
    n_servers: int = 1
    keeps: bool = False
    by_power: bool = False
    depth: int = DEPTH


def batch_s(system: System, machines: Machines, losses: Losses | None, results: Results) -> float:
    """Seconds of a batch, in which machines may be lost."""
    if losses and losses.of(machines):
        return results.get(lossy_job(system, machines, losses, results))[1]
    return results.get(clean_job(system, machines))[1]


def clean_job(system: System, machines: Machines) -> Job:
    """A batch without losses: when it begins in the simulation, and its seconds."""
    return _job(system, machines, f"{described(system)} {described(machines)}", {})


def lossy_job(system: System, machines: Machines, losses: Losses, results: Results) -> Job:
    """The job of `clean_job` with losses, at shares of the seconds that it takes without."""
    begin_s, clean_s = results.get(clean_job(system, machines))
    at_s = {device: begin_s + share * clean_s for device, share in losses.of(machines).items()}
    return _job(system, machines, f"{described(system)} {described(machines)} {described(losses)}", at_s)


def _job(system: System, machines: Machines, inputs: str, lost_s: Mapping[int, float]) -> Job:
    n_works = 2 * machines.n_stages * machines.n_microbatches * (WARM_UP_STEPS + 1)
    return Job(inputs, n_works, partial(run_batch, system, machines, lost_s))


def run_batch(system: System, machines: Machines, lost_s: Mapping[int, float]) -> list[float]:
    """When the measured batch begins, and its seconds. lost_s: machine -> the moment of its end."""
    config, plan = config_of(system, machines), plan_of(system, machines)
    faults = [Fault(at_s, CRASH, device) for device, at_s in lost_s.items()]
    outcome = simulate(config, plan, conditions_of(machines, plan), faults=faults)
    begin_s, end_s = [at_s for at_s, _, report in outcome.reports if isinstance(report, StepReport)]
    return [begin_s, end_s - begin_s]


def config_of(system: System, machines: Machines) -> RunConfig:
    return RunConfig(
        GPTConfig(machines.n_stages, WIDTH, 1, WIDTH, 1, 1),
        PlanConfig(machines.n_stages, microbatches=machines.n_microbatches),
        train=TrainConfig(
            steps=WARM_UP_STEPS + 1, microbatch_size=round(machines.boundary_bytes / (WIDTH * FLOAT_BYTES))
        ),
        wiring=WiringConfig(system.wiring, retain_bytes=KEEP_ALL if system.keeps or system.wiring == POOL else 0),
        net=RARE,
        dtype="float32",
    )


def plan_of(system: System, machines: Machines) -> Plan:
    rows = [machines.stage(stage) for stage in range(machines.n_stages)]
    n = system.n_servers if system.wiring == POOL else len(rows[0])
    workers = tuple(tuple(row[n:]) for row in rows) if system.wiring == POOL else ()
    weights = [1.0] * n
    if system.by_power:
        weights = [1 / max(machines.stage_s(row[p]) for row in rows) for p in range(n)]
    return Plan(
        n_layers=machines.n_stages,
        stages=tuple((stage, stage + 1) for stage in range(machines.n_stages)),
        placement=tuple(tuple(row[:n]) for row in rows),
        shares=shares(machines.n_microbatches, weights),
        in_flight=(*[system.depth] * (machines.n_stages - 1), 1),
        codec=("none",) * (machines.n_stages - 1),
        roles=PlanRoles(workers=workers),
    )


def conditions_of(machines: Machines, plan: Plan) -> Conditions:
    last = plan.n_stages - 1
    peers = {peer: machines.stage_s(peer) for peer in plan.peers + plan.workers}
    return on_machines({peer: work_s(s, plan.seat(peer)[0] == last) for peer, s in peers.items()}, machines.link)
