"""The transport of one process of a run: its address, its credential and the links that it emulates."""

from jaxdt.protocol.message import from_plain
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.connection import Address
from jaxdt.runtime.net.options import Issue, TransportCallbacks, TransportSettings
from jaxdt.runtime.net.shaper import LinkShape
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.run_job import RunJob
from jaxdt.sim.predict import device_links
from jaxdt.spec.errors import BadInput


def parse_address(name: str, address: str) -> Address:
    """The pair of a "host:port"; BadInput, which names the flag `name`, for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadInput(f"{name}: got {address!r}, expected host:port")
    return host, int(port)


def start_transport(job: RunJob, loop: Loop, peer: int, listen: str, issue: Issue | None = None) -> str:
    """Give the loop a transport that has started. Returns the address at which others reach this process; '' for a
    process that nobody can dial, whose `listen` is ''. `issue` is the coordinator's answer to tokens."""
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
        parse_address("listen", listen) if listen else None,
        job.load_credential(),
        TransportCallbacks(loop.on_message, loop.on_link, loop.expect, read=from_plain),
        TransportSettings(shape, allow_plaintext=job.allow_plaintext, issue=issue),
    )
    bound = loop.transport.start()
    return "{}:{}".format(*bound) if bound else ""
