"""Hosts of a wide-area network on one Linux machine: network namespaces, and a router between them.

Each host is a network namespace with one TUN device. The router is a process of its own, this file run as a program. It
reads the packets of all devices and hands each on after the delay of its link. Programs in a host use ordinary sockets,
so they meet the kernel's own TCP. The kernel needs namespaces and TUN; it needs no queueing discipline, since netem is
missing from many kernels. Needs root and `ip` of iproute2.
"""

import collections
import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxdt.run import network as networks

TUN = "/dev/net/tun"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000  # bytes; with 1500 the router would handle six times as many packets
JITTER_HOLD_S = 0.02  # a link's jitter is drawn again after so long: packets of one burst are late together
QUEUE_S_MIN = 0.05
EARLY_S = 1e-4  # about what the router itself takes for a packet
LAST_BYTE = 19  # of the IPv4 destination address
NETWORK = "10.88.0.0/24"
CONGESTION_CONTROL = "cubic"  # by the route: a namespace may not always choose its default
TCP_SETTINGS = {
    "tcp_slow_start_after_idle": "0",  # as docs/hosts.md advises
    "tcp_no_metrics_save": "1",
    "tcp_rmem": "4096 131072 67108864",
    "tcp_wmem": "4096 65536 67108864",
}


@dataclass(frozen=True)
class WanLink:
    """One direction between two hosts. The delay is latency_s and a jitter that is uniform in 0..jitter_s; packets stay
    in order. A packet is lost with `drop_prob`, and where the queue is longer than queue_s at full rate."""

    latency_s: float
    gbps: float
    jitter_s: float = 0.0
    drop_prob: float = 0.0

    @property
    def queue_s(self) -> float:
        """A round trip, as routers are usually given."""
        return max(QUEUE_S_MIN, 2 * self.latency_s)


CITIES = networks.load(Path(__file__).resolve().parents[3] / "configs/networks/four_cities.json")
CITIES_GBPS = 0.2  # at most: the router is one thread


def _same(link: WanLink) -> Callable[[int, int], WanLink]:
    return lambda src, dst: link


def _city(src: int, dst: int) -> WanLink:
    link = CITIES.link(src, dst)
    return WanLink(link.latency_s, min(link.bandwidth_gbps, CITIES_GBPS), jitter_s=5e-3, drop_prob=5e-4)


NETWORKS: dict[str, Callable[[int, int], WanLink]] = {
    "100mbps_20ms": _same(WanLink(20e-3, 0.1)),
    "100mbps_20ms_jitter10ms": _same(WanLink(20e-3, 0.1, jitter_s=10e-3)),
    "100mbps_10ms_loss0.1%": _same(WanLink(10e-3, 0.1, drop_prob=1e-3)),
    "four_cities_jitter5ms_loss0.05%": _city,
}


def missing() -> str:
    """A name for the thing that this machine lacks for such hosts; '' if it lacks nothing."""
    if os.name != "posix" or not sys.platform.startswith("linux"):
        return f"Linux (this is {sys.platform})"
    if os.geteuid() != 0:
        return "root"
    if not os.path.exists(TUN):
        return TUN
    if not shutil.which("ip"):
        return "ip (iproute2)"
    return ""


# ---------------------------------------------------------------------------------------------------------- the hosts


class NetworkHosts:
    """Hosts 0 to n - 1 with the links `link(src, dst)`. Use as a context. `seed`: of losses and jitter. Afterwards
    `counted` holds what the router counted: cpu_s, and packets that were forwarded, lost, and dropped from full
    queues."""

    def __init__(self, n: int, link: Callable[[int, int], WanLink], seed: int):
        self.names = [f"jaxdt{os.getpid()}n{i}" for i in range(n)]
        self.addresses = [f"10.88.0.{i + 1}" for i in range(n)]
        self.counted: dict[str, float] = {}
        self._links = [[asdict(link(src, dst)) if src != dst else None for dst in range(n)] for src in range(n)]
        self._seed = seed
        self._router: subprocess.Popen[str] | None = None

    def __enter__(self) -> "NetworkHosts":
        with contextlib.ExitStack() as stack:
            devices: list[int] = []
            try:
                for i, name in enumerate(self.names):
                    _ip("netns", "add", name)
                    devices.append(_tun_device(i, name, self.addresses[i]))
                    stack.callback(os.close, devices[-1])
                setup = {"names": self.names, "devices": devices, "links": self._links, "seed": self._seed}
                self._router = subprocess.Popen(
                    [sys.executable, "-I", str(Path(__file__).resolve()), json.dumps(setup)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=devices,
                    start_new_session=True,  # it stops when its input ends, also when this process is killed
                )
            except BaseException:
                _delete(self.names)
                raise
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._router is not None, "entered before"
        output, _ = self._router.communicate()
        self.counted = json.loads(output or "{}")

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Start a program in a host. The process id is the program's own. `options`: of Popen."""
        return subprocess.Popen(["ip", "netns", "exec", self.names[host], *command], **options)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _tun_device(index: int, name: str, address: str) -> int:
    """A TUN device in the namespace `name`, with its address; returns the descriptor of its packets. The device is made
    outside and moved, which keeps the descriptor."""
    device = f"jx{os.getpid()}n{index}"[-15:]
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    _ip("link", "set", device, "netns", name)
    for words in (
        ("link", "set", "lo", "up"),
        ("link", "set", device, "name", "wan0"),
        ("link", "set", "wan0", "mtu", str(MTU), "txqueuelen", "10000", "up"),
        ("addr", "add", f"{address}/24", "dev", "wan0", "noprefixroute"),
        ("route", "add", NETWORK, "dev", "wan0", "src", address, "congctl", CONGESTION_CONTROL),
    ):
        _ip("-n", name, *words)
    for setting, value in TCP_SETTINGS.items():
        text = f"echo '{value}' > /proc/sys/net/ipv4/{setting}"
        subprocess.run(["ip", "netns", "exec", name, "sh", "-c", text], check=True)
    return descriptor


def _delete(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


# --------------------------------------------------------------------------------------------------------- the router


@dataclass
class LinkState:
    """A link while it forwards. `free_s`: when its queue will be empty; `last_s`: the latest arrival so far."""

    link: WanLink
    rng: random.Random
    free_s: float = 0.0
    last_s: float = 0.0
    jitter_s: float = 0.0
    jitter_until_s: float = 0.0
    counts: collections.Counter[str] = field(default_factory=collections.Counter[str])

    def arrival_s(self, now_s: float, n_bytes: int) -> float | None:
        """The time when a packet that comes now arrives at the other host; None if it is lost."""
        link = self.link
        if self.rng.random() < link.drop_prob:
            self.counts["lost"] += 1
            return None
        start_s = max(now_s, self.free_s)
        if start_s - now_s > link.queue_s:
            self.counts["overflow"] += 1
            return None
        if now_s >= self.jitter_until_s:
            self.jitter_s = self.rng.uniform(0.0, link.jitter_s)
            self.jitter_until_s = now_s + JITTER_HOLD_S
        self.free_s = start_s + n_bytes * 8 / (link.gbps * 1e9)
        self.last_s = max(self.last_s, self.free_s + link.latency_s + self.jitter_s)
        self.counts["forwarded"] += 1
        return self.last_s


def route(setup: dict[str, Any]) -> None:
    """Forward packets until standard input ends; then remove the hosts and print what was counted."""
    devices = setup["devices"]
    states = [
        [link and LinkState(WanLink(**link), random.Random(f"{setup['seed']} {i} {j}")) for j, link in enumerate(row)]
        for i, row in enumerate(setup["links"])
    ]
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # busy programs must not make links slower
    try:
        _forward(devices, states)
    finally:
        _delete(setup["names"])
    counts = sum((state.counts for row in states for state in row if state), collections.Counter[str]())
    print(json.dumps({"cpu_s": round(time.process_time(), 3), **counts}), flush=True)


def _forward(devices: Sequence[int], states: Sequence[Sequence[LinkState | None]]) -> None:
    due: list[tuple[float, int, int, bytes]] = []  # when, order, device, packet
    order = itertools.count()
    source_of = {device: i for i, device in enumerate(devices)}
    while True:
        now_s = time.monotonic()
        while due and due[0][0] - EARLY_S <= now_s:
            _, _, device, packet = heapq.heappop(due)
            with contextlib.suppress(OSError):  # the host's queue is full: the packet is lost
                os.write(device, packet)
        wait_s = max(0.0, due[0][0] - EARLY_S - time.monotonic()) if due else None
        for device in select.select([*devices, sys.stdin], [], [], wait_s)[0]:
            if device is sys.stdin:
                return
            with contextlib.suppress(BlockingIOError):
                packet = os.read(device, MTU + 1)
                target = packet[LAST_BYTE] - 1 if packet[0] >> 4 == 4 else -1
                state = states[source_of[device]][target] if 0 <= target < len(devices) else None
                arrival_s = state.arrival_s(time.monotonic(), len(packet)) if state else None
                if arrival_s is not None:
                    heapq.heappush(due, (arrival_s, next(order), devices[target], packet))


if __name__ == "__main__":
    route(json.loads(sys.argv[1]))
