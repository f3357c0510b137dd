"""Measures the links between running hosts: round trips, and how fast messages arrive, over the run's own transport.

Every host runs a `Host`; the one with index 0 leads: it asks the others, one ordered pair at a time, to measure, so
that no two measurements share a link. What one way takes cannot be told without a common clock: latency is half the
shortest round trip. A message's seconds run from its sending to its receiver's word that it is there, less one round
trip.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

import numpy as np

from jaxdt.runtime.net.connection import Address
from jaxdt.runtime.net.credential import Credential
from jaxdt.runtime.net.options import TransportCallbacks, TransportSettings
from jaxdt.runtime.net.shaper import LinkShape
from jaxdt.runtime.net.transport import Transport
from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Device, Network, to_json

N_PINGS = 8
SHORT_BYTES = 1 << 18
FIRST_BYTES, LAST_BYTES = 1 << 20, 1 << 28
PATIENCE_S = 60.0


@dataclass(frozen=True)
class LinkFound:
    """One directed link: seconds one way, and 1e9 bit/s of a long transfer and of a short message after a pause."""

    latency_s: float
    bandwidth_gbps: float
    short_gbps: float


class Host:
    """One host's side; `addresses[i]` is where host i listens. Use as a context."""

    def __init__(
        self,
        me: int,
        addresses: list[Address],
        credential: Credential | None,
        transfer_s: float = 1.0,
        shape: Callable[[int], LinkShape | None] | None = None,
    ):
        self._me, self._addresses, self._transfer_s = me, addresses, transfer_s
        self._answers: Queue[tuple[int, dict]] = Queue()
        self._orders: Queue[dict] = Queue()
        self._transport = Transport(
            me,
            "measure links",
            addresses[me],
            credential,
            TransportCallbacks(self._on_message, on_link=lambda peer, state, reason: None, expect=self._expect),
            TransportSettings(shape),
        )

    def __enter__(self) -> "Host":
        self._transport.start()
        for peer, address in enumerate(self._addresses):
            if peer != self._me:
                self._transport.connect(peer, address)
        return self

    def __exit__(self, *_) -> None:
        self._transport.close(1.0)

    # -------------------------------------------------------------------------------------------------- the leader

    def lead(self, names: list[str], found: Callable[[int, int, LinkFound], None]) -> dict:
        """Measure all ordered pairs, tell `found` of each, end the others; the content of network.json, with a matrix
        `short_gbps` more."""
        n = len(self._addresses)
        links: dict[tuple[int, int], LinkFound] = {}
        for src, dst in itertools.permutations(range(n), 2):
            links[src, dst] = self.measure(dst) if src == self._me else self._ask(src, dst)
            found(src, dst, links[src, dst])
        for peer in range(n):
            if peer != self._me:
                self._transport.send(peer, {"do": "end"})

        def matrix(field: str) -> tuple[tuple[float, ...], ...]:
            rows = [[getattr(links[i, j], field) if i != j else 0.0 for j in range(n)] for i in range(n)]
            return tuple(map(tuple, rows))

        devices = tuple(Device(name) for name in names)
        network = Network(devices, matrix("latency_s"), matrix("bandwidth_gbps"), "measured")
        return to_json(network) | {"short_gbps": matrix("short_gbps")}

    def _ask(self, src: int, dst: int) -> LinkFound:
        self._transport.send(src, {"do": "measure", "to": dst})
        answer = self._answer(src, "measured", 4 * PATIENCE_S)
        return LinkFound(answer["latency_s"], answer["bandwidth_gbps"], answer["short_gbps"])

    # -------------------------------------------------------------------------------------------------- the others

    def follow(self) -> None:
        """Measure what the leader asks for, until it says that this is all."""
        while (order := self._orders.get())["do"] != "end":
            link = self.measure(order["to"])
            self._transport.send(0, {"do": "measured", **vars(link)})

    def measure(self, dst: int) -> LinkFound:
        """The link to another host."""
        self._round_trip_s(dst, 0)  # connects both channels
        self._round_trip_s(dst, 1)
        rtt_s = min(self._round_trip_s(dst, 0) for _ in range(N_PINGS))
        short_s = self._round_trip_s(dst, SHORT_BYTES) - rtt_s
        n_bytes = FIRST_BYTES
        while (seconds := self._round_trip_s(dst, n_bytes) - rtt_s) < self._transfer_s and n_bytes < LAST_BYTES:
            n_bytes *= 2
        return LinkFound(rtt_s / 2, _gbps(n_bytes, seconds), _gbps(SHORT_BYTES, short_s))

    def _round_trip_s(self, dst: int, n_bytes: int) -> float:
        """Seconds until the word is back that so many bytes have arrived."""
        leaves = [np.zeros(n_bytes, np.uint8)] if n_bytes else []
        start_s = time.monotonic()
        self._transport.send(dst, {"do": "take"}, leaves)
        self._answer(dst, "taken", PATIENCE_S)
        return time.monotonic() - start_s

    def _answer(self, peer: int, what: str, patience_s: float) -> dict:
        try:
            src, head = self._answers.get(timeout=patience_s)
        except Empty:
            host, port = self._addresses[peer]
            raise BadInput(f"host {peer} ({host}:{port}): no answer within {patience_s:.0f} s") from None
        if (src, head["do"]) != (peer, what):
            raise BadInput(f"host {src}: said {head['do']!r}, expected {what!r} of host {peer}")
        return head

    def _on_message(self, src: int, head: dict, leaves: list[Any]) -> None:
        match head:
            case {"do": "take"}:
                self._transport.send(src, {"do": "taken"})
            case {"do": "taken"}:
                self._answers.put((src, head))
            case {"do": "measured", "latency_s": float(), "bandwidth_gbps": float(), "short_gbps": float()}:
                self._answers.put((src, head))
            case {"do": "measure", "to": int(to)} if src == 0 and 0 <= to < len(self._addresses) and to != self._me:
                self._orders.put(head)
            case {"do": "end"} if src == 0:
                self._orders.put(head)
            case _:
                raise BadInput(f"message of host {src}: got {str(head)[:60]}, which is no part of measuring")

    def _expect(self, src: int, head: dict, table: list) -> list[np.ndarray]:
        if len(table) != 1 or table[0][0] != np.uint8 or len(table[0][1]) != 1 or table[0][1][0] > LAST_BYTES:
            raise BadInput(f"message of host {src}: got tensors {str(table)[:60]}, expected at most {LAST_BYTES} bytes")
        return [np.empty(table[0][1], np.uint8)]


def _gbps(n_bytes: int, seconds: float) -> float:
    return n_bytes * 8 / max(seconds, 1e-6) / 1e9
