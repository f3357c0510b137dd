"""The shares of devices on one host, for estimates: each device gets an equal part, as if all were busy at once.

The simulator (jaxdt.sim) shares lines message by message and cores computation by computation instead. N devices, H
hosts with a line.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxdt.run.network import Network


def devices_beside(network: Network) -> np.ndarray:
    """Devices [N] on the host of each device, itself included."""
    n_on = Counter(device.host for device in network.devices)
    return np.array([n_on[device.host] if device.host else 1 for device in network.devices])


def room_bytes(network: Network, defaults: Sequence[int | None] | None = None) -> list[float]:
    """Memory of each device: what the network file says of it, else its default; infinite where nothing limits it. At
    most an equal part of its host's."""
    own = own_bytes(network, defaults)
    return [min(one, part) for one, part in zip(own, host_bytes(network), strict=True)]


def own_bytes(network: Network, defaults: Sequence[int | None] | None = None) -> list[float]:
    """Memory of each device alone, as the network file says it, else its default; infinite where both say nothing."""
    defaults = defaults or [None] * network.n_devices
    said = [device.memory_bytes or default for device, default in zip(network.devices, defaults, strict=True)]
    return [math.inf if n_bytes is None else n_bytes for n_bytes in said]


def host_bytes(network: Network) -> list[float]:
    """The equal part of its host's memory of each device; infinite where nothing limits it."""
    hosts = zip(network.shared_hosts, devices_beside(network), strict=True)
    return [math.inf if host.memory_bytes is None else host.memory_bytes / n for host, n in hosts]


def slowdown(network: Network) -> np.ndarray:
    """Times [N] as long as alone in which each device computes while all of its host do; 1 with cores of its own."""
    cores = np.array([math.inf if host.cores is None else host.cores for host in network.shared_hosts])
    return np.maximum(1.0, devices_beside(network) / cores)


def line_gbps(network: Network) -> tuple[np.ndarray, np.ndarray]:
    """(out, in) [N] of the line of each device's host; infinite where it never limits."""
    lines = [host.goodput_gbps for host in network.shared_hosts]
    outs = [math.inf if out_gbps is None else out_gbps for out_gbps, _ in lines]
    ins = [math.inf if in_gbps is None else in_gbps for _, in_gbps in lines]
    return np.array(outs), np.array(ins)


def capped_gbps(network: Network) -> np.ndarray:
    """Bandwidth [N, N] of each link while nothing else uses the lines of its two hosts."""
    return _limited(network, *line_gbps(network))


def fair_gbps(network: Network) -> np.ndarray:
    """Bandwidth [N, N] of each link while every device of its two hosts uses an equal part of their lines."""
    n = devices_beside(network)
    out_gbps, in_gbps = line_gbps(network)
    return _limited(network, out_gbps / n, in_gbps / n)


def _limited(network: Network, out_gbps: np.ndarray, in_gbps: np.ndarray) -> np.ndarray:
    gbps = np.array(network.bandwidth_gbps)
    if not network.hosts:
        return gbps
    limited = np.minimum(gbps, np.minimum(out_gbps[:, None], in_gbps[None, :]))
    names = [device.host for device in network.devices]
    host = np.array([names.index(name) if name else d for d, name in enumerate(names)])  # the first device on it
    return np.where(host[:, None] == host[None, :], gbps, limited)


def lines(network: Network) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(host [N] of each device among those with a line, or -1; seconds a byte [H] out of a host; the same in)."""
    named = [host for host in network.hosts if host.out_gbps is not None or host.in_gbps is not None]
    index = {host.name: h for h, host in enumerate(named)}
    host_of = np.array([index.get(device.host, -1) for device in network.devices])
    out_s = np.array([0.0 if out_gbps is None else 8e-9 / out_gbps for out_gbps, _ in (h.goodput_gbps for h in named)])
    in_s = np.array([0.0 if in_gbps is None else 8e-9 / in_gbps for _, in_gbps in (h.goodput_gbps for h in named)])
    return host_of, out_s, in_s
