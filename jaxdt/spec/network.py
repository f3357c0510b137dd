"""Devices and the directed links between them: the only place where a size meets a bandwidth.

A link delivers FIFO. A message of n bytes occupies it for n / bandwidth and arrives one latency later, so two
messages in a row share one latency. A bandwidth of zero means that there is no link.
"""

import functools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdt.spec.errors import BadInput
from jaxdt.spec.frozen_dataclass import frozen_dataclass
from jaxdt.spec.serialize import SCHEMA_KEY, is_list, is_object

UNLIMITED_GBPS = math.inf
SCHEMA = "urn:jaxdt:schema:network:1"


@dataclass(frozen=True)
class Device:
    """One machine of a network. `kind` selects a profile, devices with one `host` share its cores."""

    name: str
    region: str = ""
    kind: str = ""
    memory_bytes: int | None = None
    host: str = ""


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


@dataclass(frozen=True)
class Network:
    """n devices and n x n directed links; the diagonal is not a link."""

    devices: tuple[Device, ...]
    latency_s: tuple[tuple[float, ...], ...]
    bandwidth_gbps: tuple[tuple[float, ...], ...]
    name: str = ""

    @property
    def n_devices(self) -> int:
        return len(self.devices)

    def link(self, src: int, dst: int) -> Link:
        """The link from device src to device dst; within one device it is free."""
        return _link() if src == dst else _link(self.latency_s[src][dst], self.bandwidth_gbps[src][dst])


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
        data: Any = json.loads(text)
    except ValueError as error:
        raise BadInput(f"{source}: not JSON ({error})") from None
    if not is_object(data):
        raise BadInput(f"{source}: got a {_type_name(data)}, expected an object with devices and matrices")
    devices = _devices(data, source)
    latency_ms = _matrix(data, "latency_ms", len(devices), source)
    bandwidth_gbps = _matrix(data, "bandwidth_gbps", len(devices), source)
    latency_s = tuple(tuple(ms / 1e3 for ms in row) for row in latency_ms)
    return Network(devices, latency_s, bandwidth_gbps, str(data.get("name", "")))


def load(path: str | Path) -> Network:
    """Read a network.json (latency_ms one way, bandwidth_gbps; directed matrices)."""
    try:
        return parse(Path(path).read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from None


def to_json(network: Network) -> dict[str, Any]:
    """The content of network.json; links without a limit have no JSON number and are refused."""
    if any(math.isinf(gbps) for row in network.bandwidth_gbps for gbps in row):
        raise BadInput("network: bandwidth_gbps: got a link without a limit, which a file cannot hold")
    devices = [{k: v for k, v in vars(device).items() if v not in ("", None)} for device in network.devices]
    return {
        SCHEMA_KEY: SCHEMA,
        "name": network.name,
        "devices": devices,
        "latency_ms": [[s * 1e3 for s in row] for row in network.latency_s],
        "bandwidth_gbps": [list(row) for row in network.bandwidth_gbps],
    }


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
    memory_bytes = entry.get("memory_bytes")
    if memory_bytes is not None and (type(memory_bytes) is not int or memory_bytes <= 0):
        raise BadInput(f"{where}.memory_bytes: got {memory_bytes!r}, expected a positive integer")
    name, region, kind, host = (str(entry.get(field) or "") for field in ("name", "region", "kind", "host"))
    return Device(name, region, kind, memory_bytes, host)


def _matrix(data: dict[str, Any], field: str, n: int, source: str) -> tuple[tuple[float, ...], ...]:
    """The n x n numbers of a field; the diagonal is not a link and becomes 0."""
    rows = _list_of(data.get(field), n, f"{source}: {field}", "rows", f"{n} rows for {n} devices")
    return tuple(_matrix_row(row, i, n, f"{source}: {field}[{i}]") for i, row in enumerate(rows))


def _matrix_row(row: Any, diagonal: int, n: int, where: str) -> tuple[float, ...]:
    entries = _list_of(row, n, where, "numbers", f"{n} numbers")
    for j, entry in enumerate(entries):
        is_number = isinstance(entry, int | float) and not isinstance(entry, bool)
        if j != diagonal and (not is_number or not 0 <= entry <= sys.float_info.max):
            raise BadInput(f"{where}[{j}]: got {entry!r}, expected a finite number >= 0")
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
