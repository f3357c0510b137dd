"""Measures the links between running hosts over the run's own transport: latency and bandwidth.

Every host runs a `MeasuringHost`. Host 0 leads: it asks the hosts to measure one ordered pair after the other, so that
no two measurements share a link. Without a common clock the time of one direction cannot be measured, so the latency is
half of the shortest round trip. The time of a message counts from its sending to the receiver's acknowledgement, minus
one round trip.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

import numpy as np

from jaxdt.run.errors import BadInput
from jaxdt.run.network import BandwidthPercentile, Device, Matrix, Network, to_json
from jaxdt.runtime.identity.credential import Credential
from jaxdt.runtime.net.address import Address, format_address
from jaxdt.runtime.net.shaper import LinkShape
from jaxdt.runtime.net.transport import Transport

N_PINGS = 8
SHORT_BYTES = 1 << 18
BYTES_MIN = 1 << 20
BYTES_MAX = 1 << 28
ANSWER_S = 60.0
PERCENTILES, PERCENTILE_ROUNDS = (10, 50, 90), 3


@dataclass(frozen=True)
class MeasuredLink:
    """One directed link: its one-way latency, and its bandwidth for a long transfer and for a short message after a
    pause (1e9 bit/s)."""

    latency_s: float
    bandwidth_gbps: float
    short_gbps: float


Links = dict[tuple[int, int], list[MeasuredLink]]  # the measurements of each ordered pair of hosts


def network_of(names: list[str], links: Links) -> dict:
    """The content of network.json: shortest latencies, medians of bandwidths, from PERCENTILE_ROUNDS measurements of a
    link on their percentiles, and the additional matrix `short_gbps`."""

    def matrix(value: Callable[[list[MeasuredLink]], float]) -> Matrix:
        n = len(names)
        return tuple(tuple(value(links[i, j]) if i != j else 0.0 for j in range(n)) for i in range(n))

    def gbps_at(percentile: int) -> Callable[[list[MeasuredLink]], float]:
        return lambda found: float(np.percentile([link.bandwidth_gbps for link in found], percentile))

    percentiles: tuple[BandwidthPercentile, ...] = ()
    if min(map(len, links.values())) >= PERCENTILE_ROUNDS:
        percentiles = tuple(BandwidthPercentile(percentile, matrix(gbps_at(percentile))) for percentile in PERCENTILES)
    latency_s = matrix(lambda found: min(link.latency_s for link in found))
    devices = tuple(Device(name) for name in names)
    short_gbps = matrix(lambda found: float(np.median([link.short_gbps for link in found])))
    network = Network(devices, latency_s, matrix(gbps_at(50)), "measured", bandwidth_percentiles=percentiles)
    return to_json(network) | {"short_gbps": short_gbps}


class MeasuringHost:
    """One host's side. `addresses[i]` is where host i listens; a long transfer takes at least `transfer_s`. Use as a
    context."""

    def __init__(
        self,
        index: int,
        addresses: list[Address],
        credential: Credential | None,
        transfer_s: float = 1.0,
        shape: Callable[[int], LinkShape | None] = lambda dst: None,
    ):
        self._index = index
        self._addresses = addresses
        self._transfer_s = transfer_s
        self._answers: Queue[tuple[int, dict]] = Queue()
        self._requests: Queue[dict] = Queue()
        self._transport = Transport(
            index,
            "measure links",
            on_message=self._on_message,
            expect=self._expect,
            listen=addresses[index],
            credential=credential,
            shape=shape,
        )

    def __enter__(self) -> "MeasuringHost":
        self._transport.start()
        for peer, address in enumerate(self._addresses):
            if peer != self._index:
                self._transport.connect(peer, address)
        return self

    def __exit__(self, *exception) -> None:
        self._transport.close(1.0)

    # -------------------------------------------------------------------------------------------------- the leader

    def lead(self, names: list[str], on_link: Callable[[int, int, MeasuredLink], None], n_rounds: int = 1) -> dict:
        """Measure all ordered pairs, n_rounds times one after another, call `on_link` with each measurement, and end
        the other hosts. Returns the content of network.json (`network_of`)."""
        n = len(self._addresses)
        links: Links = {pair: [] for pair in itertools.permutations(range(n), 2)}
        for src, dst in [*links] * n_rounds:
            link = self.measure(dst) if src == self._index else self._ask(src, dst)
            links[src, dst].append(link)
            on_link(src, dst, link)
        for peer in range(n):
            if peer != self._index:
                self._transport.send(peer, {"do": "end"})
        return network_of(names, links)

    def _ask(self, src: int, dst: int) -> MeasuredLink:
        self._transport.send(src, {"do": "measure", "to": dst})
        answer = self._answer(src, "measured", 4 * ANSWER_S)
        return MeasuredLink(answer["latency_s"], answer["bandwidth_gbps"], answer["short_gbps"])

    # -------------------------------------------------------------------------------------------------- the others

    def follow(self) -> None:
        """Measure what the leader requests, until it says that this is all."""
        while (request := self._requests.get())["do"] != "end":
            link = self.measure(request["to"])
            self._transport.send(0, {"do": "measured", **vars(link)})

    def measure(self, dst: int) -> MeasuredLink:
        """Measure the link to another host."""
        self._round_trip_s(dst, 0)  # the first two round trips make the connections of both channels
        self._round_trip_s(dst, 1)
        rtt_s = min(self._round_trip_s(dst, 0) for _ in range(N_PINGS))
        short_s = self._round_trip_s(dst, SHORT_BYTES) - rtt_s
        n_bytes = BYTES_MIN
        while (seconds := self._round_trip_s(dst, n_bytes) - rtt_s) < self._transfer_s and n_bytes < BYTES_MAX:
            n_bytes *= 2
        return MeasuredLink(rtt_s / 2, _gbps(n_bytes, seconds), _gbps(SHORT_BYTES, short_s))

    def _round_trip_s(self, dst: int, n_bytes: int) -> float:
        """Seconds until the acknowledgement of so many bytes is back."""
        leaves = [np.zeros(n_bytes, np.uint8)] if n_bytes else []
        start_s = time.monotonic()
        self._transport.send(dst, {"do": "take"}, leaves)
        self._answer(dst, "taken", ANSWER_S)
        return time.monotonic() - start_s

    def _answer(self, peer: int, kind: str, timeout_s: float) -> dict:
        try:
            src, head = self._answers.get(timeout=timeout_s)
        except Empty:
            address = format_address(self._addresses[peer])
            raise BadInput(f"host {peer} ({address}): no answer within {timeout_s:.0f} s") from None
        if (src, head["do"]) != (peer, kind):
            raise BadInput(f"host {src}: said {head['do']!r}, expected {kind!r} of host {peer}")
        return head

    def _on_message(self, src: int, head: dict, leaves: list[Any]) -> None:
        match head:
            case {"do": "take"}:
                self._transport.send(src, {"do": "taken"})
            case {"do": "taken"}:
                self._answers.put((src, head))
            case {"do": "measured", "latency_s": float(), "bandwidth_gbps": float(), "short_gbps": float()}:
                self._answers.put((src, head))
            case {"do": "measure", "to": int(to)} if src == 0 and 0 <= to < len(self._addresses) and to != self._index:
                self._requests.put(head)
            case {"do": "end"} if src == 0:
                self._requests.put(head)
            case _:
                raise BadInput(f"message of host {src}: got {str(head)[:60]}, which is no part of measuring")

    def _expect(self, src: int, head: dict, table: list) -> list[np.ndarray]:
        if len(table) != 1 or table[0][0] != np.uint8 or len(table[0][1]) != 1 or table[0][1][0] > BYTES_MAX:
            raise BadInput(f"message of host {src}: got tensors {str(table)[:60]}, expected at most {BYTES_MAX} bytes")
        return [np.empty(table[0][1], np.uint8)]


def _gbps(n_bytes: int, seconds: float) -> float:
    return n_bytes * 8 / max(seconds, 1e-6) / 1e9
