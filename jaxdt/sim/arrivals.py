"""Who comes while a simulation runs: on which machine, how fast, and over which links.

A join names the machine: that of a peer of the plan, which has gone. The coordinator says which peer the newcomer is
and which stage it gets; it computes at the speed of its machine's kind. Its state, parameters and moments, comes over
the simulated links from all who hold it, slice by slice as in a run (jaxdt.sync.state_transfer): so a download takes
what the links make of it, beside the traffic of the step.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from jaxdt.build import RunStart, build_newcomer
from jaxdt.sim.faults import JOIN, Fault
from jaxdt.sim.sim_peer import SimPeer
from jaxdt.sim.tensors import NoTensors
from jaxdt.spec.config import RunConfig
from jaxdt.spec.network import Link
from jaxdt.spec.optim import OPTIMIZERS
from jaxdt.spec.plan import Plan


class Arrivals:
    """`link` and `host_of` know the plan's peers (`link` the coordinator too), each a machine of its own;
    `seconds_at(machine, stage)`: per kind of Work. Those who join are seated in the order in which they ask."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        link: Callable[[int, int], Link],
        host_of: Mapping[int, str],
        seconds_at: Callable[[int, int], Mapping[str, float]],
        faults: Sequence[Fault],
    ):
        self._config, self._plan = config, plan
        self._link, self._host_of, self._seconds_at = link, host_of, seconds_at
        joins = sorted((fault for fault in faults if fault.kind == JOIN), key=lambda fault: fault.at_s)
        self._waiting = deque(fault.others[0] for fault in joins)
        self._machine_of: dict[int, int] = {}

    def link(self, src: int, dst: int) -> Link:
        """Between peers, whoever sits where by now."""
        return self._link(self._machine_of.get(src, src), self._machine_of.get(dst, dst))

    def seat_of(self, peer: int, stage: int) -> SimPeer:
        """The seat of a newcomer."""
        machine = self._machine_of[peer] = self._waiting.popleft()
        config, plan = self._config, self._plan
        tensors = NoTensors(config.train.microbatch_size, state_words(config, plan, stage))
        made = build_newcomer(config, plan, peer, stage, RunStart("sim"))
        return SimPeer(made, tensors, self._host_of[machine], self._seconds_at(machine, stage))


def state_words(config: RunConfig, plan: Plan, stage: int) -> int:
    """4-byte words of a stage's parameters and moments; the optimizer's counters are left out."""
    return config.model.stage_params(*plan.stages[stage]) * (1 + OPTIMIZERS[config.optim.name].n_moments)
