"""Peers that join or change their stage while a simulation runs: the machine of each, its speed and its links.

A join names a machine: that of a peer of the plan which has gone. The coordinator decides the peer id and the stage of
the newcomer; the newcomer computes at the speed of its machine's kind. A peer that changes its stage, and a newcomer
that is sent to another one, keeps its machine. Its state (parameters and moments) crosses the
simulated links slice by slice, from all peers that hold it, as in a run (jaxdt.sync.state_transfer). So a download
takes as long as the links need for it, beside the traffic of the step.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from jaxdt.build import RunStart, build_newcomer
from jaxdt.run.config import RunConfig
from jaxdt.run.network import Link
from jaxdt.run.plan import Plan
from jaxdt.sim.faults import JOIN, Fault
from jaxdt.sim.sim_peer import SimPeer
from jaxdt.sim.stragglers.stalls import PeerStalls
from jaxdt.sim.tensors import NoTensors


class Arrivals:
    """`link`, `host_of` and `seconds_at(machine, stage)` (seconds per kind of Work) know the plan's peers, each on a
    machine of its own. Newcomers get the machines of the joins among `faults` in the order in which they ask."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        link: Callable[[int, int], Link],
        host_of: Mapping[int, str],
        seconds_at: Callable[[int, int], Mapping[str, float]] | None,
        faults: Sequence[Fault],
        stalls_of: Callable[[int], PeerStalls | None] = lambda peer: None,
    ):
        self._config = config
        self._plan = plan
        self._link = link
        self._host_of = host_of
        self._seconds_at = seconds_at
        self._stalls_of = stalls_of
        joins = sorted((fault for fault in faults if fault.kind == JOIN), key=lambda fault: fault.at_s)
        self._free_machines = deque(fault.others[0] for fault in joins)
        self._machine_of = {peer: peer for peer in plan.peers}

    def link(self, src: int, dst: int) -> Link:
        """The link between the machines that two peers, or a peer and the coordinator, now run on."""
        return self._link(self._machine_of.get(src, src), self._machine_of.get(dst, dst))

    def make_peer(self, peer: int, stage: int | None) -> SimPeer:
        """A peer for `stage`: on its own machine if it has one, else, as a newcomer, on the next free one. No peer of
        the plan (stage None) starts again here."""
        assert stage is not None and self._seconds_at is not None
        if peer not in self._machine_of:
            self._machine_of[peer] = self._free_machines.popleft()
        machine = self._machine_of[peer]
        config, plan = self._config, self._plan
        return SimPeer(
            machine=build_newcomer(config, plan, peer, stage, RunStart("sim")),
            tensors=NoTensors(config.train.microbatch_size, state_words(config, plan, stage)),
            host=self._host_of[machine],
            seconds=self._seconds_at(machine, stage),
            stalls=self._stalls_of(peer),
        )


def state_words(config: RunConfig, plan: Plan, stage: int) -> int:
    """4-byte words of a stage's parameters and moments; the optimizer's counters are left out."""
    return config.model.facts.state_numbers(*plan.stages[stage], config.optim.moments)
