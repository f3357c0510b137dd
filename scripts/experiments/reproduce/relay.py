"""A server between two trainers on the simulator: the experiment behind SWARM's Table 1 and Figures 1 and 3.

Stage 1 is the server. Stages 0 and 2 compute nothing and stand for the trainer. The server receives and sends one
activation and one gradient per microbatch, which makes two round trips.
"""

from dataclasses import dataclass, replace

from experiments.reproduce.machines import on_machines, work_s
from experiments.reproduce.results import Job, Results, described

from jaxdt.protocol.reports import StepReport
from jaxdt.run.codec import BF16_BYTES, parse, wire_bytes
from jaxdt.run.config import RunConfig, TrainConfig, default_plan
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Link
from jaxdt.sim.predict import simulate
from jaxdt.sim.scenario import RARE
from jaxdt.sim.time_breakdown import Totals

GBPS, SEQ_LEN = 0.5, 512  # Table 1: 500 Mb/s, one sequence of 512 tokens
N_MICROBATCHES = 192


@dataclass(frozen=True)
class Relay:
    """A server that computes compute_s per microbatch. Up to `in_flight` microbatches are between it and each trainer,
    rtt_s away and back."""

    d_model: int
    compute_s: float
    rtt_s: float
    in_flight: int
    codec: str = "none"

    def utilisation(self, results: Results) -> float:
        """The part of the time in which the server is busy."""
        return results.get(Job(described(self), 2 * 2 * 3 * N_MICROBATCHES, self._simulated))[0]

    def _simulated(self) -> list[float]:
        """The part of the time in which the server is busy. The difference between the depths of two neighbours hides
        the round trip between them."""
        model = GPTConfig(3, self.d_model, 1, 4 * self.d_model, SEQ_LEN, 1)
        config = RunConfig(model, train=TrainConfig(steps=2), net=RARE, codec=self.codec, dtype="bfloat16")
        depths = f"{2 * self.in_flight - 1},{self.in_flight},1"
        config = replace(config, plan=replace(config.plan, stages=3, microbatches=N_MICROBATCHES, in_flight=depths))
        seconds = {0: work_s(0.0), 1: work_s(self.compute_s), 2: work_s(0.0)}
        conditions = on_machines(seconds, lambda src, dst: Link(self.rtt_s / 2, GBPS))
        totals = Totals(first_step=1)
        outcome = simulate(config, default_plan(config), conditions, totals)
        return [totals.busy_s[1] / outcome.of(StepReport)[1].step_s]


def one_at_a_time(d_model: int, compute_s: float, rtt_s: float, codec: str = "none") -> float:
    """The closed form of utilisation for one microbatch in flight: four tensors and two round trips in sequence."""
    return compute_s / (compute_s + 4 * boundary_s(d_model, codec) + 2 * rtt_s)


def boundary_s(d_model: int, codec: str = "none") -> float:
    """Seconds for which one boundary tensor of 16-bit numbers occupies the link."""
    return Link(0.0, GBPS).occupied_s(wire_bytes(parse(codec), SEQ_LEN * d_model, BF16_BYTES))
