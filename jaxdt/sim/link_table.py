"""The links of a simulation: each is made when its pair first communicates, with options that hold for all of them."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput, require_one_of
from jaxdt.run.network import Link
from jaxdt.run.options import SECONDS
from jaxdt.sim.links import At, Jitter, Pipe, Ramp, SimulatedLink

OUT, IN = 0, 1  # directions of an access line, as indices of access_gbps[host]


class CollectiveCost(NamedTuple):
    """An exchange among some replicas: messages one after another, and the parts of the vector that the busiest link
    and the busiest line of a host carry."""

    n_hops: int
    link_frac: float
    line_frac: float


SHARDS = "shards"
COLLECTIVES: dict[str, Callable[[int], CollectiveCost]] = {
    SHARDS: lambda n: CollectiveCost(2, 2 / n, 2 * (n - 1) / n),
    "ring": lambda n: CollectiveCost(2 * (n - 1), 2 * (n - 1) / n, 2 * (n - 1) / n),
    "tree": lambda n: CollectiveCost(2 * math.ceil(math.log2(n)), 1.0, 2.0 if n > 2 else 1.0),
}


@dataclass(frozen=True)
class ExchangeModel:
    """How the replicas of a stage exchange their vectors, to compare with systems that do it in another way than a
    run's own machines, whose messages the default simulates one by one. `collective`: one of COLLECTIVES (tree: two
    binary trees with half of the vector each); `seconds`: of each exchange besides its bytes; `overlap_frac`: the part
    of an exchange that runs beside the last backward before it, as far as that lasts. An exchange begins when all
    members have their vectors, and has its links and lines for itself."""

    collective: str = SHARDS
    seconds: float = 0.0
    overlap_frac: float = 0.0

    def __post_init__(self) -> None:
        require_one_of("collective", self.collective, tuple(COLLECTIVES))
        if not SECONDS.holds(self.seconds):
            raise BadInput(f"exchange seconds: got {self.seconds}, expected {SECONDS.text}")
        if not 0 <= self.overlap_frac <= 1:
            raise BadInput(f"overlap_frac: got {self.overlap_frac}, expected a share from 0 to 1")


OWN_EXCHANGE = ExchangeModel()


@dataclass(frozen=True)
class LinkOptions:
    """The effects on links besides latency and bandwidth. `access_gbps[host]`: (out, in) of the line that all traffic
    of the host's peers with other hosts shares; a host that is missing there has a line that never limits.
    `blocking_sends`: a device begins no Work until what it has sent over a boundary has arrived, as in Megatron-LM."""

    jitter: Jitter | None = None
    ramp: Ramp | None = None
    access_gbps: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    exchange: ExchangeModel = OWN_EXCHANGE
    blocking_sends: bool = False


class LinkTable:
    """`link(src, dst)`: the one SimulatedLink of an ordered pair. `host_of[peer]` is the host of a peer; the
    coordinator needs none, since its messages carry no payload."""

    def __init__(
        self, network_link: Callable[[int, int], Link], at: At, host_of: Mapping[int, str], options: LinkOptions
    ):
        self._network_link = network_link
        self._at = at
        self._host_of = dict(host_of)
        self._options = options
        self._plain = options.jitter is options.ramp is None and not options.access_gbps
        self._links_from: dict[int, dict[int, SimulatedLink]] = defaultdict(dict)
        self._access_pipes: dict[tuple[str, int], Pipe] = {}

    def set_host(self, peer: int, host: str) -> None:
        """The host of a peer that was not there from the start, or that has moved."""
        self._host_of[peer] = host

    def links_from(self, src: int) -> Mapping[int, SimulatedLink]:
        """Links from src that have been made so far, by their other end."""
        return self._links_from[src]

    def link(self, src: int, dst: int) -> SimulatedLink:
        links = self._links_from[src]
        return links.get(dst) or links.setdefault(dst, self._make(src, dst))

    def exchange_s(self, members: Sequence[int], n_bytes: float, backward_s: float) -> float:
        """Seconds from the moment when all members of an exchange have their vectors of n_bytes, by the model."""
        model = self._options.exchange
        cost = COLLECTIVES[model.collective](len(members))
        is_ring = model.collective == "ring"
        pairs = zip(members, [*members[1:], members[0]], strict=True) if is_ring else itertools.permutations(members, 2)
        links = [self._network_link(a, b) for a, b in pairs]
        lines = [gbps for member in members for gbps in self._options.access_gbps.get(self._host_of[member], ())]
        link_s = max(link.occupied_s(round(cost.link_frac * n_bytes)) for link in links)
        line_s = max((Link(0.0, gbps).occupied_s(round(cost.line_frac * n_bytes)) for gbps in lines), default=0.0)
        seconds = model.seconds + cost.n_hops * max(link.latency_s for link in links) + max(link_s, line_s)
        return seconds - min(model.overlap_frac * seconds, backward_s)

    def _make(self, src: int, dst: int) -> SimulatedLink:
        link = self._network_link(src, dst)
        options = self._options
        if self._plain:
            return SimulatedLink(link, self._at)
        jitter_s = options.jitter.draws(src, dst) if options.jitter else None
        access_out, access_in = self._access(src, dst)
        return SimulatedLink(link, self._at, jitter_s, options.ramp, access_out, access_in)

    def _access(self, src: int, dst: int) -> tuple[Pipe | None, Pipe | None]:
        """The access lines out of the host of src and into the host of dst."""
        src_host = self._host_of.get(src)
        dst_host = self._host_of.get(dst)
        if ev.COORDINATOR in (src, dst) or src_host == dst_host:
            return None, None
        return self._access_pipe(src_host, OUT), self._access_pipe(dst_host, IN)

    def _access_pipe(self, host: str | None, direction: int) -> Pipe | None:
        if host is None or host not in self._options.access_gbps:
            return None
        if (host, direction) not in self._access_pipes:
            gbps = self._options.access_gbps[host][direction]
            self._access_pipes[host, direction] = Pipe(Link(bandwidth_gbps=gbps), self._at)
        return self._access_pipes[host, direction]
