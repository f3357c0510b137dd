"""Equal stages of equal peers, each with an access line of its own: the fleet of SWARM's Table 2 and Figure 7."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxdt.protocol.events import COORDINATOR
from jaxdt.protocol.reports import StepReport
from jaxdt.sim.faults import Fault
from jaxdt.sim.link_table import LinkOptions
from jaxdt.sim.links import Jitter
from jaxdt.sim.predict import WARM_UP_STEPS, Conditions, simulate
from jaxdt.sim.scenario import RARE
from jaxdt.spec.config import NetConfig, PlanConfig, RunConfig, SyncConfig, TrainConfig, WiringConfig, default_plan
from jaxdt.spec.model import GPTConfig
from jaxdt.spec.network import Link
from jaxdt.spec.plan import Plan
from jaxdt.spec.sizes import boundary_bytes
from jaxdt.spec.work import BACKWARD, FORWARD

BACKWARD_SHARE = 0.75  # of a microbatch's compute: recomputation and backward, 3 of 4 forwards' worth
SLICE_BYTES = 1 << 30


@dataclass(frozen=True)
class Fleet:
    """A fleet whose steps are simulated.

    n_sequences: samples of a microbatch.
    compute_s: forward, recomputation and backward of one microbatch on one stage.
    latency_s, gbps: one way of each link. gbps is also the bandwidth, each way, of a peer's line, which all its traffic
        shares.
    window: the in-flight limit of the swarm wiring; 0 for its default.
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

    def step_s(self, share: int) -> float:
        """Seconds of a step with `share` microbatches per pipeline."""
        return self.seconds(share)[WARM_UP_STEPS]

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
            train=TrainConfig(steps=WARM_UP_STEPS + 1, microbatch_size=self.n_sequences),
            wiring=WiringConfig(self.wiring, window=self.window),
            sync=SyncConfig(slice_bytes=SLICE_BYTES),
            net=RARE,
            codec=self.codec,
            dtype="bfloat16",
        )
        return config, default_plan(config)

    def _conditions(self, config: RunConfig, plan: Plan) -> Conditions:
        link = Link(self.latency_s, self.gbps)
        free = () if self.synced else ("sync", "transfer")[: 1 + self.blocking]
        host_of = {peer: str(peer) for peer in plan.peers}
        return Conditions(
            seconds={peer: self._seconds(config, plan, peer) for peer in plan.peers},
            link=lambda src, dst: Link() if COORDINATOR in (src, dst) and not self.synced else link,
            host_of=host_of,
            cores=dict.fromkeys(host_of.values(), 1),
            options=LinkOptions(
                jitter=Jitter(self.jitter_s) if self.jitter_s else None,
                access_gbps=dict.fromkeys(host_of.values(), (self.gbps, self.gbps)),
            ),
            free=frozenset(free),
        )

    def _seconds(self, config: RunConfig, plan: Plan, peer: int) -> dict[str, float]:
        stage, pipeline = plan.seat(peer)
        forward_s = (1 - BACKWARD_SHARE) * self.compute_s
        backward_s = BACKWARD_SHARE * self.compute_s
        if stage == plan.n_stages - 1:  # its backward contains its forward
            forward_s = 0.0
            backward_s = self.compute_s
        elif self.blocking:
            forward_s += self._blocked_s(boundary_bytes(config, plan, stage, pipeline, True))
        if self.blocking and stage > 0:
            backward_s += self._blocked_s(boundary_bytes(config, plan, stage - 1, pipeline, False))
        return dict.fromkeys("EGUR", 0.0) | {FORWARD: forward_s, BACKWARD: backward_s}

    def _blocked_s(self, n_bytes: int) -> float:
        """Seconds for which a sender blocks: on an idle line, with the mean of the jitter."""
        return Link(self.latency_s + self.jitter_s / 2, self.gbps).transfer_s(n_bytes)


def each_s(fleet: Fleet, short: int, long: int) -> float:
    """Seconds that one more microbatch per pipeline takes in the steady state: the slope between two sizes of a
    step."""
    return (fleet.step_s(long) - fleet.step_s(short)) / (long - short)
