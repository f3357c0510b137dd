"""Devices and the directed links between them: the only place where a size meets a bandwidth.

A link delivers FIFO. A message of n bytes occupies it for n / bandwidth and arrives one latency later, so two
messages in a row share one latency. A bandwidth of zero means that there is no link.
Devices of one host may share its line, cores and memory; devices and traffic between regions may have prices, all in
one currency.
"""

import functools
import itertools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxdt.run import serialize
from jaxdt.run.errors import BadInput, nearest, read_text, require_known, require_printable
from jaxdt.run.frozen_dataclass import frozen_dataclass
from jaxdt.run.options import GBPS_MIN
from jaxdt.run.serialize import SCHEMA_KEY, is_list, is_object

UNLIMITED_GBPS = math.inf
SCHEMA = "urn:jaxdt:schema:network:1"
EXAMPLES = "configs/networks"  # of the repository, whose names people type without the folder
LATENCY_MS_MAX = 1e5  # a simulation of more waits for heartbeats alone, as does a run
FIELDS = ("name", "devices", "hosts", "egress_per_gb", "latency_ms", "bandwidth_gbps", "bandwidth_percentiles")
# Fields that say where a network comes from. Nothing here reads them.
NOTES = (
    *("description", "source", "units", "seed", "directionality"),
    *("num_devices", "short_gbps", "paper_case", "dtfm_costs", "d_pp", "d_dp"),
)


@dataclass(frozen=True)
class Device:
    """One machine of a network. `kind` selects a profile or a device of the planner's catalogue; devices with one
    `host` share what its Host says; `price_per_hour` is paid while the device is used; `disconnect_prob`, of a device
    that comes and goes at will, is the probability that it goes within a batch, None for a reliable one."""

    name: str
    region: str = ""
    kind: str = ""
    memory_bytes: int | None = None
    host: str = ""
    price_per_hour: float = 0.0
    disconnect_prob: float | None = None


@dataclass(frozen=True)
class Host:
    """What the devices of one host share; None for what they do not. `cores`: so many of them compute at a time at
    full speed; `memory_bytes`: of all of them together; `out_gbps`, `in_gbps`: the line of their traffic with other
    hosts, of which programs get the share `goodput_frac`."""

    name: str
    cores: float | None = None
    memory_bytes: int | None = None
    out_gbps: float | None = None
    in_gbps: float | None = None
    goodput_frac: float = 1.0

    @property
    def goodput_gbps(self) -> tuple[float | None, float | None]:
        """What programs get of the line, out of the host and into it; None where it never limits."""
        out_gbps, in_gbps = self.out_gbps, self.in_gbps
        frac = self.goodput_frac
        return None if out_gbps is None else frac * out_gbps, None if in_gbps is None else frac * in_gbps

    def __post_init__(self) -> None:
        if not self.goodput_frac <= 1:
            raise BadInput(f"hosts: {self.name}: goodput_frac: got {self.goodput_frac}, expected a share in (0, 1]")
        for name, value in vars(self).items():
            least = GBPS_MIN if name.endswith("_gbps") else 0
            if name != "name" and value is not None and not (0 < value < math.inf and value >= least):
                raise BadInput(f"hosts: {self.name}: {name}: got {value}, expected a number > 0 and >= {least:g}")


@frozen_dataclass
class Link:
    """One direction between two devices. latency_s is one way; 1 gbps = 1e9 bit/s."""

    latency_s: float = 0.0
    bandwidth_gbps: float = UNLIMITED_GBPS

    def occupied_s(self, n_bytes: int) -> float:
        """Seconds for which n_bytes keep the link busy."""
        if n_bytes == 0:
            return 0.0
        return n_bytes * 8 / (self.bandwidth_gbps * 1e9) if self.bandwidth_gbps > 0 else math.inf

    def transfer_s(self, n_bytes: int) -> float:
        """Seconds from the first byte sent to the last byte received on an idle link."""
        return self.latency_s + self.occupied_s(n_bytes)


Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class BandwidthPercentile:
    """The bandwidths that links did not reach in `percentile` percent of their measurements."""

    percentile: int
    bandwidth_gbps: Matrix


@dataclass(frozen=True)
class Network:
    """n devices and n x n directed links; the diagonal is not a link. `hosts` are those whose devices share something;
    `egress_per_gb[region]` is the price of 1e9 bytes that leave a region for another one; `bandwidth_percentiles`, in
    ascending order, say how uncertain bandwidth_gbps is, where that is known."""

    devices: tuple[Device, ...]
    latency_s: Matrix
    bandwidth_gbps: Matrix
    name: str = ""
    hosts: tuple[Host, ...] = ()
    egress_per_gb: dict[str, float] = field(default_factory=dict[str, float], hash=False)
    bandwidth_percentiles: tuple[BandwidthPercentile, ...] = ()

    @property
    def n_devices(self) -> int:
        return len(self.devices)

    def link(self, src: int, dst: int) -> Link:
        """The link from device src to device dst; within one device it is free."""
        return _link() if src == dst else _link(self.latency_s[src][dst], self.bandwidth_gbps[src][dst])

    def require_devices(self, devices: Iterable[int], source: str) -> None:
        """BadInput, which begins with `source`, unless the network has the devices of these indices, which a plan
        uses."""
        if (last := max(devices)) >= self.n_devices:
            raise BadInput(f"{source}: has {self.n_devices} devices, the plan uses device {last}")

    @functools.cached_property
    def shared_hosts(self) -> tuple[Host, ...]:
        """The host of each device; one of its own, without a name, for a device that shares nothing."""
        known = {host.name: host for host in self.hosts}
        return tuple(known.get(device.host, _UNSHARED) for device in self.devices)

    def at_percentile(self, percentile: int | None) -> "Network":
        """The network with the bandwidths of one of its percentiles; None leaves it as it is. BadInput for a percentile
        that it does not have."""
        if percentile is None:
            return self
        for known in self.bandwidth_percentiles:
            if known.percentile == percentile:
                return replace(self, bandwidth_gbps=known.bandwidth_gbps)
        has = ", ".join(str(known.percentile) for known in self.bandwidth_percentiles) or "none"
        name = self.name or "the network"
        raise BadInput(f"--percentile: got {percentile}, the bandwidth_percentiles of {name} are {has}")


_UNSHARED = Host("")
_link = functools.lru_cache(maxsize=1024)(Link)  # one object for all equal ones: a simulation has a million links


def uniform(n_devices: int, latency_s: float = 0.0, bandwidth_gbps: float = UNLIMITED_GBPS) -> Network:
    """n equal devices on one host and equal links."""
    devices = tuple(Device(f"device{i}", host="local") for i in range(n_devices))
    latencies_s = ((latency_s,) * n_devices,) * n_devices
    bandwidths_gbps = ((bandwidth_gbps,) * n_devices,) * n_devices
    return Network(devices, latencies_s, bandwidths_gbps, "uniform")


def parse(text: str, source: str) -> Network:
    """A network from the text of a network.json; `source` names it in errors."""
    try:
        data: Any = serialize.parse_json(text, keys_once=True)
    except ValueError as error:
        raise BadInput(f"{source}: not JSON ({error}), expected a network file such as those in {EXAMPLES}") from None
    if not is_object(data):
        raise BadInput(f"{source}: got a {_type_name(data)}, expected an object with devices and matrices")
    require_known(data, (*FIELDS, *NOTES, SCHEMA_KEY), source)
    require_printable(data, source)
    devices = _devices(data, source)
    latency_ms = _matrix(data, "latency_ms", len(devices), source)
    bandwidth_gbps = _matrix(data, "bandwidth_gbps", len(devices), source)
    latency_s = tuple(tuple(ms / 1e3 for ms in row) for row in latency_ms)
    percentiles = _percentiles(data, len(devices), source)
    try:
        hosts = serialize.read(tuple[Host, ...], data.get("hosts", []), "hosts")
        egress_per_gb = serialize.read(dict[str, float], data.get("egress_per_gb", {}), "egress_per_gb")
        _check_hosts(hosts, devices)
        _check_egress(egress_per_gb, devices)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None
    name: Any = data.get("name", "")
    if not isinstance(name, str):
        raise BadInput(f"{source}: name: got {name!r}, expected a text")
    return Network(devices, latency_s, bandwidth_gbps, name, hosts, egress_per_gb, percentiles)


def load(path: str | Path) -> Network:
    """Read a network.json (latency_ms one way, bandwidth_gbps; directed matrices)."""
    return parse(read_text(path, EXAMPLES), str(path))


def to_json(network: Network) -> dict[str, Any]:
    """The content of network.json; links without a limit have no JSON number and are refused."""
    matrices = (network.bandwidth_gbps, *(one.bandwidth_gbps for one in network.bandwidth_percentiles))
    if any(math.isinf(gbps) for matrix in matrices for row in matrix for gbps in row):
        raise BadInput("network: bandwidth_gbps: got a link without a limit, which a file cannot hold")
    devices = [_stated(device) for device in network.devices]
    shared = {"hosts": [_stated(host) for host in network.hosts], "egress_per_gb": network.egress_per_gb}
    data: dict[str, Any] = {
        SCHEMA_KEY: SCHEMA,
        "name": network.name,
        "devices": devices,
        **{name: value for name, value in shared.items() if value},
        "latency_ms": [[s * 1e3 for s in row] for row in network.latency_s],
        "bandwidth_gbps": [list(row) for row in network.bandwidth_gbps],
    }
    if network.bandwidth_percentiles:
        data["bandwidth_percentiles"] = [
            {"percentile": one.percentile, "bandwidth_gbps": [list(row) for row in one.bandwidth_gbps]}
            for one in network.bandwidth_percentiles
        ]
    return data


def _stated(value: Device | Host) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    fields = type(value).__dataclass_fields__
    return {name: item for name, item in vars(value).items() if item != fields[name].default}


def _check_hosts(hosts: tuple[Host, ...], devices: tuple[Device, ...]) -> None:
    """BadInput for a host twice, or one that no device is on."""
    known = {device.host for device in devices}
    for i, host in enumerate(hosts):
        if host.name not in known:
            raise BadInput(f"hosts[{i}]: no device is on {host.name!r}{nearest(host.name, known)}")
        if host.name in {other.name for other in hosts[:i]}:
            raise BadInput(f"hosts[{i}]: {host.name!r} occurs twice, expected once")


def _check_egress(egress_per_gb: dict[str, float], devices: tuple[Device, ...]) -> None:
    """BadInput for a region without devices, or a price that is none."""
    known = {device.region for device in devices}
    for region, price in egress_per_gb.items():
        if region not in known:
            raise BadInput(f"egress_per_gb: no device is in {region!r}{nearest(region, known)}")
        if not 0 <= price < math.inf:
            raise BadInput(f"egress_per_gb: {region}: got {price}, expected a number >= 0")


def _devices(data: dict[str, Any], source: str) -> tuple[Device, ...]:
    entries: Any = data.get("devices")
    if not is_list(entries) or not entries:
        raise BadInput(f"{source}: devices: got {_type_name(entries)}, expected a list of at least one device")
    devices = tuple(_device(entry, f"{source}: devices[{i}]") for i, entry in enumerate(entries))
    names = [device.name for device in devices]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"{source}: devices: the name {name!r} occurs {names.count(name)} times, expected once")
    return devices


def _device(entry: Any, where: str) -> Device:
    if not is_object(entry) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise BadInput(f"{where}: expected an object with a name, got {entry!r}")
    require_known(entry, Device.__dataclass_fields__, where)
    texts = [entry.get(name) or "" for name in ("region", "kind", "host")]
    for name, text in zip(("region", "kind", "host"), texts, strict=True):
        if not isinstance(text, str):
            raise BadInput(f"{where}.{name}: got {text!r}, expected a text")
    region, kind, host = texts
    memory_bytes = entry.get("memory_bytes")
    if memory_bytes is not None and (type(memory_bytes) is not int or memory_bytes <= 0):
        raise BadInput(f"{where}.memory_bytes: got {memory_bytes!r}, expected a positive integer")
    price = entry.get("price_per_hour", 0.0)
    if not isinstance(price, int | float) or isinstance(price, bool) or not 0 <= price <= sys.float_info.max:
        raise BadInput(f"{where}.price_per_hour: got {price!r}, expected a number >= 0")
    prob = entry.get("disconnect_prob")
    if prob is not None and (not isinstance(prob, int | float) or isinstance(prob, bool) or not 0 <= prob <= 1):
        raise BadInput(f"{where}.disconnect_prob: got {prob!r}, expected a number from 0 to 1, or none if reliable")
    return Device(entry["name"], region, kind, memory_bytes, host, float(price), None if prob is None else float(prob))


def _percentiles(data: dict[str, Any], n: int, source: str) -> tuple[BandwidthPercentile, ...]:
    """The percentiles of the bandwidths; both numbers and bandwidths must ascend."""
    entries: Any = data.get("bandwidth_percentiles", [])
    if not is_list(entries):
        raise BadInput(f"{source}: bandwidth_percentiles: got {_type_name(entries)}, expected a list")
    found: list[BandwidthPercentile] = []
    for i, entry in enumerate(entries):
        where = f"{source}: bandwidth_percentiles[{i}]"
        percentile = entry.get("percentile") if is_object(entry) else None
        if is_object(entry):
            require_known(entry, BandwidthPercentile.__dataclass_fields__, where)
        low = found[-1].percentile + 1 if found else 0
        if type(percentile) is not int or not low <= percentile <= 100:
            raise BadInput(f"{where}.percentile: got {percentile!r}, expected an integer from {low} to 100")
        matrix = _matrix(entry, "bandwidth_gbps", n, where)
        if found:
            _check_at_least(matrix, found[-1], where)
        found.append(BandwidthPercentile(percentile, matrix))
    return tuple(found)


def _check_at_least(matrix: Matrix, lower: BandwidthPercentile, where: str) -> None:
    """BadInput for a bandwidth below that of a lower percentile."""
    for src, dst in itertools.permutations(range(len(matrix)), 2):
        gbps, least_gbps = matrix[src][dst], lower.bandwidth_gbps[src][dst]
        if gbps < least_gbps:
            raise BadInput(
                f"{where}.bandwidth_gbps[{src}][{dst}]: got {gbps}, expected at least the {least_gbps} of percentile "
                f"{lower.percentile}"
            )


def _matrix(data: dict[str, Any], field: str, n: int, source: str) -> Matrix:
    """The n x n numbers of a field; the diagonal is not a link and becomes 0."""
    rows = _list_of(data.get(field), n, f"{source}: {field}", "rows", f"{n} rows for {n} devices")
    least, most = (0.0, LATENCY_MS_MAX) if field == "latency_ms" else (GBPS_MIN, sys.float_info.max)
    return tuple(_matrix_row(row, i, n, f"{source}: {field}[{i}]", least, most) for i, row in enumerate(rows))


def _matrix_row(row: Any, diagonal: int, n: int, where: str, least: float, most: float) -> tuple[float, ...]:
    entries = _list_of(row, n, where, "numbers", f"{n} numbers")
    for j, entry in enumerate(entries):
        is_number = isinstance(entry, int | float) and not isinstance(entry, bool)
        if j != diagonal and (not is_number or not 0 <= entry <= sys.float_info.max):
            raise BadInput(f"{where}[{j}]: got {entry!r}, expected a finite number >= 0")
        if j != diagonal and not least <= (entry or least) <= most:
            zero = " or 0, for no link" if least else ""
            raise BadInput(f"{where}[{j}]: got {entry!r}, expected a number from {least:g} to {most:g}{zero}")
    return tuple(0.0 if j == diagonal else float(entry) for j, entry in enumerate(entries))


def _list_of(value: Any, n: int, where: str, items: str, expected: str) -> list[Any]:
    """The value, which must be a list of n items."""
    if not is_list(value):
        raise BadInput(f"{where}: got {_type_name(value)}, expected {expected}")
    if len(value) != n:
        raise BadInput(f"{where}: got {len(value)} {items}, expected {expected}")
    return value


def _type_name(value: object) -> str:
    return type(value).__name__
