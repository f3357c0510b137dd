"""Stages of peers with access lines of their own, all fast or some slow: SWARM's Tables 2 to 4 and 9, Figure 7."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from experiments.reproduce.machines import FREE, on_machines, shares, work_s
from experiments.reproduce.results import Job, Results, described

from jaxdt.protocol.reports import StepReport
from jaxdt.run.config import NetConfig, PlanConfig, RunConfig, SyncConfig, TrainConfig, WiringConfig, default_plan
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Link
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import boundary_bytes
from jaxdt.run.work import WorkKind
from jaxdt.sim.faults import Fault
from jaxdt.sim.link_table import LinkOptions
from jaxdt.sim.links import Jitter
from jaxdt.sim.predict import WARM_UP_STEPS, Conditions, simulate
from jaxdt.sim.scenario import RARE

SLICE_BYTES = 1 << 30
SLOWDOWN = 2.0


@dataclass(frozen=True)
class Fleet:
    """A fleet whose steps are simulated.

    n_sequences: samples of a microbatch.
    compute_s: forward, recomputation and backward of one microbatch on one stage.
    latency_s, gbps: one way of each link. gbps is also the bandwidth, each way, of a peer's line, which all its traffic
        shares.
    window: the in-flight limit of the swarm wiring; 0 for its default.
    depth: the in-flight limit of 1F1B, as a multiple of the usual one (stages left, this one included).
    slow: peers on which all Work takes `slowdown` times as long.
    weights: how the pipelines divide the microbatches; equally without.
    seed: of the jitter and of the router's ties.
    blocking: a peer computes nothing while it sends a boundary tensor, latency included.
    synced: averaging and commit take time.
    n_layers: layers with parameters of their own; 0 for one a stage.
    """

    n_stages: int
    n_pipelines: int
    d_model: int
    n_sequences: int
    codec: str
    compute_s: float
    latency_s: float
    gbps: float
    jitter_s: float = 0.0
    wiring: str = "fixed"
    schedule: str = "1f1b"
    window: int = 0
    blocking: bool = False
    synced: bool = False
    seq_len: int = 512
    activation: str = "gelu"
    n_layers: int = 0
    depth: int = 1
    slow: Sequence[int] = ()
    weights: tuple[int, ...] = ()
    seed: int = 0
    slowdown: float = SLOWDOWN

    def job(self, share: int, faults: Sequence[Fault] = (), net: NetConfig = RARE) -> Job:
        """The simulation of a short run with `share` microbatches per pipeline; its values are the seconds of its
        steps."""
        inputs = f"{described(self)} share={share}"
        if faults:
            inputs += f" faults={list(faults)!r}"
        if net != RARE:
            inputs += f" net={described(net)}"
        n_works = 2 * self.n_stages * self.n_pipelines * share * (WARM_UP_STEPS + 1)
        return Job(inputs, n_works, partial(self.seconds, share, faults, net))

    def step_s(self, share: int, results: Results) -> float:
        """Seconds of a step with `share` microbatches per pipeline."""
        return results.get(self.job(share))[WARM_UP_STEPS]

    def seconds(self, share: int, faults: Sequence[Fault] = (), net: NetConfig = RARE) -> list[float]:
        """Seconds of each step of a short run with `share` microbatches per pipeline."""
        config, plan = self._config(share)
        outcome = simulate(replace(config, net=net), plan, self._conditions(config, plan), faults=faults)
        return [report.step_s for report in outcome.of(StepReport)]

    def _config(self, share: int) -> tuple[RunConfig, Plan]:
        n_layers = self.n_layers or self.n_stages
        model = GPTConfig(n_layers, self.d_model, 1, 4 * self.d_model, self.seq_len, 1, activation=self.activation)
        n_microbatches = share * self.n_pipelines
        config = RunConfig(
            model,
            PlanConfig(self.n_stages, self.n_pipelines, schedule=self.schedule, microbatches=n_microbatches),
            train=TrainConfig(steps=WARM_UP_STEPS + 1, seed=self.seed, microbatch_size=self.n_sequences),
            wiring=WiringConfig(self.wiring, window=self.window),
            sync=SyncConfig(slice_bytes=SLICE_BYTES),
            net=RARE,
            codec=self.codec,
            dtype="bfloat16",
        )
        plan = default_plan(config)
        parts = shares(n_microbatches, self.weights) if self.weights else plan.shares
        in_flight = tuple(self.depth * (self.n_stages - stage) for stage in range(self.n_stages))
        return config, replace(plan, shares=parts, in_flight=in_flight)

    def _conditions(self, config: RunConfig, plan: Plan) -> Conditions:
        link = Link(self.latency_s, self.gbps)
        return on_machines(
            {peer: self._seconds(config, plan, peer) for peer in plan.peers},
            lambda src, dst: link,
            link if self.synced else FREE,  # over which commits take time
            options=LinkOptions(
                jitter=Jitter(self.jitter_s, self.seed) if self.jitter_s else None,
                access_gbps={str(peer): (self.gbps, self.gbps) for peer in plan.peers},
            ),
            free=frozenset(() if self.synced else ("sync", "transfer")[: 1 + self.blocking]),
        )

    def _seconds(self, config: RunConfig, plan: Plan, peer: int) -> dict[str, float]:
        stage, pipeline = plan.seat(peer)
        is_last = stage == plan.n_stages - 1
        seconds = work_s(self.compute_s * (self.slowdown if peer in self.slow else 1.0), is_last)
        if self.blocking and not is_last:
            seconds[WorkKind.FORWARD] += self._blocked_s(boundary_bytes(config, plan, stage, pipeline, True))
        if self.blocking and stage > 0:
            seconds[WorkKind.BACKWARD] += self._blocked_s(boundary_bytes(config, plan, stage - 1, pipeline, False))
        return seconds

    def _blocked_s(self, n_bytes: int) -> float:
        """Seconds for which a sender blocks: on an idle line, with the mean of the jitter."""
        return Link(self.latency_s + self.jitter_s / 2, self.gbps).transfer_s(n_bytes)


def each_s(fleet: Fleet, short: int, long: int, results: Results) -> float:
    """Seconds that one more microbatch per pipeline takes in the steady state: the slope between two sizes of a
    step."""
    short_s, long_s = (fleet.step_s(share, results) for share in (short, long))
    return (long_s - short_s) / (long - short)


def step_at_s(fleet: Fleet, share: float, short: int, long: int, results: Results) -> float:
    """Seconds of a step with `share` microbatches per pipeline, on the line through those of two sizes."""
    microbatch_s = each_s(fleet, short, long, results)
    return fleet.step_s(long, results) + (share - long) * microbatch_s
