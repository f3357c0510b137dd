"""The links of a simulation: each is made when its pair first communicates, with options that hold for all of them."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxdt.protocol.events import COORDINATOR
from jaxdt.sim.links import At, Jitter, Pipe, Ramp, SimulatedLink
from jaxdt.spec.network import Link

OUT, IN = 0, 1  # directions of an access line, as indices of access_gbps[host]


@dataclass(frozen=True)
class LinkOptions:
    """The effects on links besides latency and bandwidth. `access_gbps[host]`: (out, in) of the line that all traffic
    of the host's peers with other hosts shares; a host that is missing there has a line that never limits."""

    jitter: Jitter | None = None
    ramp: Ramp | None = None
    access_gbps: Mapping[str, tuple[float, float]] = field(default_factory=dict)


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
        if COORDINATOR in (src, dst) or src_host == dst_host:
            return None, None
        return self._access_pipe(src_host, OUT), self._access_pipe(dst_host, IN)

    def _access_pipe(self, host: str | None, direction: int) -> Pipe | None:
        if host is None or host not in self._options.access_gbps:
            return None
        if (host, direction) not in self._access_pipes:
            gbps = self._options.access_gbps[host][direction]
            self._access_pipes[host, direction] = Pipe(Link(bandwidth_gbps=gbps), self._at)
        return self._access_pipes[host, direction]
