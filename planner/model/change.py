"""Parts of a network, and a network after some devices left and others came."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxdt.run.errors import BadInput, nearest
from jaxdt.run.network import BandwidthPercentile, Device, Host, Link, Matrix, Network

NO_LINK = Link(0.0, 0.0)


def part_of(network: Network, devices: Iterable[int]) -> Network:
    """The network of some of the devices, in this order, with plain bandwidths alone."""
    chosen = [int(d) for d in devices]

    def picked(matrix: Matrix) -> Matrix:
        return tuple(tuple(matrix[a][b] for b in chosen) for a in chosen)

    return replace(
        network,
        devices=tuple(network.devices[d] for d in chosen),
        latency_s=picked(network.latency_s),
        bandwidth_gbps=picked(network.bandwidth_gbps),
        bandwidth_percentiles=(),
    )


@dataclass(frozen=True)
class Change:
    """Devices that left, by name; and a network that has the devices that came, with their links to each other and to
    devices that stay. Devices that it shares with the old network are taken from it, as newer measurements; a pair of
    devices that neither network has is without a link."""

    without: tuple[str, ...] = ()
    added: Network | None = None


def changed(network: Network, change: Change) -> Network:
    """The network after a change, with the percentiles that it and the network of the devices which came have in
    common; BadInput for devices that it does not have, and if nothing is left."""
    after = _changed(network, change)
    known = [] if change.added is None else [one.percentile for one in change.added.bandwidth_percentiles]
    percentiles: list[BandwidthPercentile] = []
    for percentile in (one.percentile for one in network.bandwidth_percentiles):
        if change.added is None or percentile in known:
            added = change.added and change.added.at_percentile(percentile)
            at = _changed(network.at_percentile(percentile), Change(change.without, added))
            percentiles.append(BandwidthPercentile(percentile, at.bandwidth_gbps))
    return replace(after, bandwidth_percentiles=tuple(percentiles))


def _changed(network: Network, change: Change) -> Network:
    index = {device.name: d for d, device in enumerate(network.devices)}
    for name in change.without:
        if name not in index:
            raise BadInput(f"--without: no device {name!r}{nearest(name, index)}")
    devices = {device.name: device for device in network.devices if device.name not in change.without}
    newer = {} if change.added is None else {device.name: d for d, device in enumerate(change.added.devices)}
    if change.added is not None:
        devices |= {device.name: device for device in change.added.devices if device.name not in change.without}
    if not devices:
        raise BadInput("--without: no device is left")
    names = list(devices)

    def link(src: str, dst: str) -> Link:
        if change.added is not None and src in newer and dst in newer:
            return change.added.link(newer[src], newer[dst])
        return network.link(index[src], index[dst]) if src in index and dst in index else NO_LINK

    links = [[NO_LINK if a == b else link(a, b) for b in names] for a in names]
    latency_s = tuple(tuple(one.latency_s for one in row) for row in links)
    bandwidth_gbps = tuple(tuple(one.bandwidth_gbps for one in row) for row in links)
    came = len(set(names) - set(index))
    name = f"{network.name or 'network'} -{len(change.without)} +{came}"
    hosts, egress_per_gb = _shared(network, change, devices.values())
    return Network(tuple(devices.values()), latency_s, bandwidth_gbps, name, hosts, egress_per_gb)


def _shared(network: Network, change: Change, devices: Iterable[Device]) -> tuple[tuple[Host, ...], dict[str, float]]:
    """Hosts and prices of regions that are left, those of the newcomers' network before those of the old one."""
    networks = [network, *([] if change.added is None else [change.added])]
    hosts = {host.name: host for one in networks for host in one.hosts}
    egress_per_gb = {region: price for one in networks for region, price in one.egress_per_gb.items()}
    left = list(devices)
    names, regions = {device.host for device in left}, {device.region for device in left}
    return (
        tuple(host for host in hosts.values() if host.name in names),
        {region: price for region, price in egress_per_gb.items() if region in regions},
    )
