"""The bandwidths of a pool worker's links to the servers (hybrid parameter servers). The worker measures them
when it comes, over the run's own transport, before it has a place.

A probe and its answer carry as many bytes. The difference between the shortest round trips with and without them is the
time of these bytes there and back. On a link of one host this time is as short as what the trips differ by anyway, so
a link counts for at most GBPS_MAX.
"""

import time
from collections.abc import Mapping
from queue import Empty, SimpleQueue

from jaxdt.membership.link_echo import PADDING_BYTES_MAX
from jaxdt.protocol import events as ev
from jaxdt.protocol.message import from_plain, to_plain
from jaxdt.runtime.net.address import parse_address
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.reporting.console import print_line
from jaxdt.runtime.run_job import RunJob

N_PROBES = 3  # of each size; the first one also waits for the connection
ANSWER_S = 5.0
GBPS_MAX = 10.0  # a faster link is as good: its bytes take less than half a millisecond, which these trips vary by
NO_LINK_GBPS = 0.0  # of a server that does not answer


def gbps_of(seconds: float) -> float:
    """The bandwidth of a link on which the bytes of a probe and of its answer take so long, at most GBPS_MAX; also for
    a time of 0 or less, where a trip with the bytes was no longer than one without."""
    sent_gbit = 2 * 8 * PADDING_BYTES_MAX / 1e9
    return sent_gbit / max(sent_gbit / GBPS_MAX, seconds)


def measured_gbps(job: RunJob, own_id: int, servers: Mapping[int, str]) -> dict[int, float]:
    """The bandwidth to each server, one after the other, there and back, in 1e9 bit/s; NO_LINK_GBPS for one that does
    not answer. `servers`: their addresses, '' for one that cannot be dialed. `own_id`: the temporary id under which
    this process asks."""
    dialable = {server: address for server, address in servers.items() if address}
    print_line(f"measures its links to {len(dialable)} servers, for {ANSWER_S:.0f} s at most where one does not answer")
    answers: SimpleQueue[tuple[int, ev.LinkProbed]] = SimpleQueue()

    def on_message(src: int, event: ev.Received, leaves: list) -> None:
        if isinstance(event.body, ev.LinkProbed):
            answers.put((src, event.body))

    transport = Transport(
        own_id,
        job.connection_name,
        on_message=on_message,
        read=from_plain,
        credential=job.load_credential(),
        allow_plaintext=job.allow_plaintext,
    )

    def round_trip_s(server: int, number: int, n_bytes: int) -> float | None:
        """Seconds until a probe with so many bytes is answered; None without an answer."""
        began_s = time.monotonic()
        head = to_plain(ev.Header(job.run, 0, 0, own_id), ev.ProbeLink(number, n_bytes, "." * n_bytes))
        transport.send(server, head)
        while (left_s := began_s + ANSWER_S - time.monotonic()) > 0:
            try:
                src, answer = answers.get(timeout=left_s)
            except Empty:
                break
            if (src, answer.number) == (server, number):
                return time.monotonic() - began_s
        return None

    def gbps(server: int) -> float:
        shortest_s: list[float] = []
        for n_bytes in (0, PADDING_BYTES_MAX):
            trips_s: list[float] = []
            for number in range(N_PROBES):
                trip_s = round_trip_s(server, n_bytes + number, n_bytes)
                if trip_s is None:
                    return NO_LINK_GBPS
                trips_s.append(trip_s)
            shortest_s.append(min(trips_s))
        return gbps_of(shortest_s[1] - shortest_s[0])

    try:
        for server, address in dialable.items():
            transport.connect(server, parse_address(f"server {server}", address))
        found = {server: gbps(server) if server in dialable else NO_LINK_GBPS for server in servers}
    finally:
        transport.close(0.0)
    told = ", ".join(f"{server}: {gbps:.3g} Gb/s" if gbps else f"{server}: no answer" for server, gbps in found.items())
    print_line(f"measured its links to the servers: {told}")
    return found
