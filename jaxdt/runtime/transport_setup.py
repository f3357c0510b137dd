"""The transport of one process of a run: its address, its credential and the links that it emulates."""

from dataclasses import dataclass

from jaxdt.protocol.message import from_plain
from jaxdt.run.errors import BadInput
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.address import Address, advertised, default_listen, format_address, parse_address
from jaxdt.runtime.net.options import Issue, TransportCallbacks, TransportSettings
from jaxdt.runtime.net.shaper import LinkShape
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.run_job import RunJob
from jaxdt.sim.predict import device_links


@dataclass(frozen=True)
class OwnAddress:
    """Where a process listens, and where others reach it.

    listen: "host:port"; '' for a process that cannot be dialed.
    advertise: "host:port" at which others reach it, if it is not `listen`: a name, or a port that a router forwards.
    """

    listen: str
    advertise: str = ""

    def __post_init__(self):
        if self.advertise and not self.listen:
            raise BadInput(f"advertise: got {self.advertise}, expected none for a peer that does not listen")

    @classmethod
    def of_peer(cls, coordinator: Address, listen: str | None, advertise: str = "") -> "OwnAddress":
        """The address of a peer of this coordinator's run; `listen` None chooses it. BadInput, before the peer asks for
        a place in the run, if the run's other hosts cannot dial it."""
        own = cls(default_listen(coordinator) if listen is None else listen, advertise)
        if own.listen:
            address = parse_address("listen", own.listen)
            advertised(address, address, own.advertise, coordinator)
        return own


def start_transport(
    job: RunJob,
    loop: Loop,
    peer: int,
    own: OwnAddress,
    towards: Address | None = None,
    coordinator_term: int | None = None,
    issue: Issue | None = None,
) -> str:
    """Give the loop a transport that has started. Returns the address at which others reach this process; '' for a
    process that cannot be dialed. `towards` is an address that leads to the others: that of the coordinator, None for
    the coordinator itself, whose term is given and whose answer to tokens is `issue`."""
    listen = parse_address("listen", own.listen) if own.listen else None
    incarnation = loop.process if coordinator_term is None else coordinator_term
    link = device_links(job.network)

    def shape(dst: int) -> LinkShape | None:
        if job.network is None or max(peer, dst) >= job.network.n_devices:
            return None  # the network does not know a peer that joins later
        emulated = link(peer, dst)
        is_free = emulated.latency_s == 0 and emulated.bandwidth_gbps == float("inf")
        return None if is_free else LinkShape(emulated.latency_s, emulated.bandwidth_gbps)

    loop.transport = Transport(
        peer,
        job.connection_name,
        listen,
        job.load_credential(),
        TransportCallbacks(loop.on_message, loop.on_link, loop.expect, read=from_plain, on_death=loop.on_death),
        TransportSettings(shape, allow_plaintext=job.allow_plaintext, incarnation=incarnation, issue=issue),
    )
    bound = loop.transport.start()
    if listen is None or bound is None:
        return ""
    return format_address(advertised(listen, bound, own.advertise, towards))
