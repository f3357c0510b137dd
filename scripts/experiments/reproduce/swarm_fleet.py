"""Equal stages of equal peers on access lines of their own: what SWARM's Table 2 and Figure 7 run on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxdt.protocol.events import COORDINATOR
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
    """`compute_s`: forward, recomputation and backward of a stage's microbatch. `gbps`: each way of each peer's line,
    which all its traffic shares, and of each link. `blocking`: a peer computes nothing while it sends a boundary
    tensor, latency included. `window`: of swarm, 0 for two microbatches a peer. `synced`: averaging and commit count.
    `n_layers`: with parameters of their own, 0 for one a stage."""

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
        """Seconds of a step with so many microbatches per pipeline."""
        return self.seconds(share)[WARM_UP_STEPS]

    def seconds(self, share: int, faults: Sequence[Fault] = (), net: NetConfig = RARE) -> list[float]:
        """Of each step of a short run."""
        config, plan = self._config(share)
        outcome = simulate(replace(config, net=net), plan, self._conditions(config, plan), faults=faults)
        return [fields["step_s"] for fields in outcome.fields("step")]

    def _config(self, share: int) -> tuple[RunConfig, Plan]:
        d_model, activation = self.d_model, self.activation
        model = GPTConfig(
            self.n_layers or self.n_stages, d_model, 1, 4 * d_model, self.seq_len, 1, activation=activation
        )
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
        forward_s, backward_s = (1 - BACKWARD_SHARE) * self.compute_s, BACKWARD_SHARE * self.compute_s
        if stage == plan.n_stages - 1:
            forward_s, backward_s = 0.0, self.compute_s  # one program
        elif self.blocking:
            forward_s += self._blocked_s(boundary_bytes(config, plan, stage, pipeline, True))
        if self.blocking and stage > 0:
            backward_s += self._blocked_s(boundary_bytes(config, plan, stage - 1, pipeline, False))
        return dict.fromkeys("EGUR", 0.0) | {FORWARD: forward_s, BACKWARD: backward_s}

    def _blocked_s(self, n_bytes: int) -> float:
        """On an idle line, with the mean of the jitter."""
        return Link(self.latency_s + self.jitter_s / 2, self.gbps).transfer_s(n_bytes)


def each_s(fleet: Fleet, short: int, long: int) -> float:
    """Seconds that one more microbatch per pipeline takes in the steady state."""
    return (fleet.step_s(long) - fleet.step_s(short)) / (long - short)
