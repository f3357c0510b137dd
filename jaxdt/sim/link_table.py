"""The links of a simulation: made when a pair first talks, with the options that hold for all of them."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxdt.protocol.events import COORDINATOR
from jaxdt.sim.links import At, Jitter, Pipe, Ramp, SimulatedLink
from jaxdt.spec.network import Link


@dataclass(frozen=True)
class LinkOptions:
    """What links do besides latency and bandwidth. `access_gbps[host]`: (out, in) of the line that all traffic of the
    host's peers with other hosts shares; a host that is not in it has one that never limits."""

    jitter: Jitter | None = None
    ramp: Ramp | None = None
    access_gbps: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class LinkTable:
    """`line(src, dst)`: the one SimulatedLink of an ordered pair. `host_of` says where peers sit; the coordinator's
    traffic has no payload and needs no host."""

    def __init__(self, link: Callable[[int, int], Link], at: At, host_of: Mapping[int, str], options: LinkOptions):
        self._link, self._at, self._host_of, self._options = link, at, dict(host_of), options
        self._plain = options.jitter is options.ramp is None and not options.access_gbps
        self._from: dict[int, dict[int, SimulatedLink]] = defaultdict(dict)
        self._ways: dict[tuple[str, int], Pipe] = {}

    def seat(self, peer: int, host: str) -> None:
        """A peer that was not there from the start."""
        self._host_of[peer] = host

    def of(self, src: int) -> Mapping[int, SimulatedLink]:
        """Those from src that have been made."""
        return self._from[src]

    def line(self, src: int, dst: int) -> SimulatedLink:
        lines = self._from[src]
        return lines.get(dst) or lines.setdefault(dst, self._made(src, dst))

    def _made(self, src: int, dst: int) -> SimulatedLink:
        link, options = self._link(src, dst), self._options
        if self._plain:
            return SimulatedLink(link, self._at)
        jitter_s = options.jitter.draws(src, dst) if options.jitter else None
        return SimulatedLink(link, self._at, jitter_s, options.ramp, *self._access(src, dst))

    def _access(self, src: int, dst: int) -> tuple[Pipe | None, Pipe | None]:
        """The ways out of src's host and into dst's."""
        ends = self._host_of.get(src), self._host_of.get(dst)
        if COORDINATOR in (src, dst) or ends[0] == ends[1]:
            return None, None
        return self._way(ends[0], 0), self._way(ends[1], 1)

    def _way(self, host: str, direction: int) -> Pipe | None:
        if host not in self._options.access_gbps:
            return None
        if (host, direction) not in self._ways:
            gbps = self._options.access_gbps[host][direction]
            self._ways[host, direction] = Pipe(Link(bandwidth_gbps=gbps), self._at)
        return self._ways[host, direction]
