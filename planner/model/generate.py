"""Networks from a seed: homogeneous, data centres, spot machines, regions, the world, jittered links, home machines.

The links between cloud regions are measured: the 45 pairs of DS3Lab/DT-FM at cda948f (its delay and bandwidth table),
which are the data of the DT-FM paper's cases.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxdt.run.errors import BadInput, require_one_of
from jaxdt.run.network import Device, Network

REGIONS = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "Singapore", "Sydney", "London", "Frankfurt", "Ireland")

SAME_REGION = (5.0, 2.0)

# (latency in ms one way, bandwidth in Gb/s) from region i to regions i+1, i+2, ...
REGION_LINKS = (
    "67:0.79 49:1.1 96:0.523 124:0.46 163:0.341 139:0.36 136:0.42 143:0.404 124:0.482",
    "11:1.12 143:0.524 172:0.5 230:0.364 197:0.383 76:1.16 90:1.02 67:1.05",
    "130:0.694 159:0.529 197:0.452 185:0.484 86:1.05 99:0.799 77:1.14",
    "34:1.1 73:1.01 100:0.761 210:0.366 223:0.36 199:0.465",
    "74:1.14 148:0.58 238:0.342 235:0.358 228:0.335",
    "92:0.816 169:0.5 155:0.535 179:0.492",
    "262:0.326 265:0.328 254:0.344",
    "14:1.14 12:1.09",
    "24:1.08",
)

CITIES = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")
EARTH_KM_PER_MS = 120.0


def region_link(a: str, b: str) -> tuple[float, float]:
    """(latency_ms, bandwidth_gbps) between two regions, the same both ways."""
    i, j = sorted((REGIONS.index(a), REGIONS.index(b)))
    if i == j:
        return SAME_REGION
    latency_ms, bandwidth_gbps = REGION_LINKS[i].split()[j - i - 1].split(":")
    return float(latency_ms), float(bandwidth_gbps)


def _network(name: str, regions: list[str], link: Callable[[int, int], tuple[float, float]]) -> Network:
    """A network whose device i is in regions[i]; link(i, j) gives (latency_ms, bandwidth_gbps) of i -> j."""
    n = len(regions)
    n_in_region: dict[str, int] = {}
    devices = []
    for region in regions:
        number = n_in_region.get(region, 0)
        n_in_region[region] = number + 1
        devices.append(Device(f"{region.lower()}-{number}", region))
    pairs = [[link(i, j) if i != j else (0.0, 0.0) for j in range(n)] for i in range(n)]
    latency_s = tuple(tuple(pair[0] / 1e3 for pair in row) for row in pairs)
    bandwidth_gbps = tuple(tuple(pair[1] for pair in row) for row in pairs)
    return Network(tuple(devices), latency_s, bandwidth_gbps, name)


def homogeneous(n: int, rng: np.random.Generator) -> Network:
    """Equal links: 50 ms, 1 Gb/s."""
    del rng
    return _network("homogeneous", ["site"] * n, lambda i, j: (50.0, 1.0))


def datacenter(n: int, rng: np.random.Generator) -> Network:
    """Machines of eight devices: 100 Gb/s inside, 3.125 Gb/s across (the paper's case 1)."""
    del rng
    regions = [f"instance{i // 8}" for i in range(n)]
    return _network("datacenter", regions, lambda i, j: (0.0, 100.0 if regions[i] == regions[j] else 3.125))


def spot(n: int, rng: np.random.Generator) -> Network:
    """Half of the devices in machines of four, the others single (the paper's case 2 at any size)."""
    del rng
    n_grouped = n // 2 // 4 * 4
    regions = [f"spot{i // 4}" if i < n_grouped else f"spot{i - n_grouped + n_grouped // 4}" for i in range(n)]
    return _network("spot", regions, lambda i, j: (0.0, 100.0 if regions[i] == regions[j] else 1.25))


def multi_dc(n: int, rng: np.random.Generator) -> Network:
    """Two data centres: 1 ms and 5 Gb/s inside, 11 ms and 1.12 Gb/s across (the paper's case 3)."""
    del rng
    regions = ["Ohio" if i < n // 2 else "Virginia" for i in range(n)]
    return _network("multi_dc", regions, lambda i, j: (1.0, 5.0) if regions[i] == regions[j] else (11.0, 1.12))


def _spread(n: int, cities: tuple[str, ...]) -> list[str]:
    return [cities[i * len(cities) // n] for i in range(n)]


def regional(n: int, rng: np.random.Generator) -> Network:
    """Four regions of one continent in equal parts, measured links."""
    del rng
    regions = _spread(n, ("Virginia", "Oregon", "Ohio", "Ireland"))
    return _network("regional", regions, lambda i, j: region_link(regions[i], regions[j]))


def worldwide(n: int, rng: np.random.Generator) -> Network:
    """The eight cities of the paper's case 5 in equal parts, measured links."""
    del rng
    regions = _spread(n, CITIES)
    return _network("worldwide", regions, lambda i, j: region_link(regions[i], regions[j]))


def random_regions(n: int, rng: np.random.Generator) -> Network:
    """Every device in one of ten regions at random, measured links."""
    regions = sorted((REGIONS[k] for k in rng.integers(len(REGIONS), size=n)), key=REGIONS.index)
    return _network("random", regions, lambda i, j: region_link(regions[i], regions[j]))


def jitter(n: int, rng: np.random.Generator) -> Network:
    """`random` with every link perturbed by itself: latency x U(0.9, 1.3), bandwidth x U(0.5, 1), symmetric."""
    base = random_regions(n, rng)
    latency = np.triu(rng.uniform(0.9, 1.3, (n, n)), 1)
    bandwidth = np.triu(rng.uniform(0.5, 1.0, (n, n)), 1)
    latency_s = np.array(base.latency_s) * (latency + latency.T)
    bandwidth_gbps = np.array(base.bandwidth_gbps) * (bandwidth + bandwidth.T)
    return Network(
        base.devices, tuple(map(tuple, latency_s.tolist())), tuple(map(tuple, bandwidth_gbps.tolist())), "jitter"
    )


def gaming(n: int, rng: np.random.Generator) -> Network:
    """Home machines with their own access lines (0.02-0.4 Gb/s up, 2-5 times that down, 2-12 ms) around twelve
    towns on a 9000 x 4000 km map; the slower end of a pair sets its bandwidth."""
    towns = rng.uniform((0, 0), (9000, 4000), (12, 2))
    town = np.sort(rng.integers(len(towns), size=n))
    up_gbps = rng.choice([0.02, 0.04, 0.1, 0.2, 0.4], size=n)
    down_gbps = up_gbps * rng.uniform(2, 5, n)
    access_ms = rng.uniform(2, 12, n)
    distance_km = np.linalg.norm(towns[town][:, None] - towns[town][None, :], axis=-1)

    def link(i, j):
        latency_ms = access_ms[i] + access_ms[j] + distance_km[i, j] / EARTH_KM_PER_MS
        return round(float(latency_ms), 3), round(float(min(up_gbps[i], down_gbps[j])), 5)

    return _network("gaming", [f"town{k}" for k in town], link)


# Kind, region, part of the devices (one in so many), memory, price an hour: AWS on-demand list prices of 2024 in USD,
# for an eighth of p4d.24xlarge, p3.2xlarge and g4dn.xlarge; and for 1e9 bytes to another region.
MIXED = (
    ("A100", "Virginia", 6, 40e9, 4.097),
    ("V100", "Ohio", 3, 16e9, 3.06),
    ("T4", "Oregon", 2, 16e9, 0.526),
)
MIXED_EGRESS_PER_GB = 0.02


def mixed(n: int, rng: np.random.Generator) -> Network:
    """Three kinds of accelerators in three regions: a sixth A100 (40 GB) in Virginia, a third V100 (16 GB) in Ohio, the
    others T4 (16 GB) in Oregon; measured links, list prices."""
    del rng
    counts = [n // part for _, _, part, *_ in MIXED[:2]]
    counts.append(n - sum(counts))
    labels = [entry for entry, count in zip(MIXED, counts, strict=True) for _ in range(count)]
    regions = [region for _, region, *_ in labels]
    network = _network("mixed", regions, lambda i, j: region_link(regions[i], regions[j]))
    devices = tuple(
        replace(device, kind=kind, memory_bytes=round(memory_bytes), price_per_hour=price)
        for device, (kind, _, _, memory_bytes, price) in zip(network.devices, labels, strict=True)
    )
    egress_per_gb = dict.fromkeys(dict.fromkeys(regions), MIXED_EGRESS_PER_GB)
    return replace(network, devices=devices, egress_per_gb=egress_per_gb)


# Site, kind, part of the devices (one in so many), latency in ms and bandwidth in Gb/s inside the site.
POOL = (
    ("cloud", "RTX4090", 4, 0.1, 16.0),
    ("campus", "RTX4090", 4, 0.1, 16.0),
    ("standalone", "RTX3080", 2, 10.0, 0.3),
)
POOL_FAR_MS, POOL_FAR_GBPS = (100.0, 150.0), (0.05, 0.3)  # between sites (hybrid parameter servers, Case 3)


def pool(n: int, rng: np.random.Generator) -> Network:
    """A pool as in the hybrid parameter server paper's Sec. 4.4: a quarter of the devices in a cloud, a quarter on a
    campus, the others by themselves, two thirds of which disconnect with a probability of a half in a batch."""
    counts = [n // part for _, _, part, *_ in POOL[:2]]
    counts.append(n - sum(counts))
    labels = [entry for entry, count in zip(POOL, counts, strict=True) for _ in range(count)]
    inside = {site: (latency_ms, gbps) for site, _, _, latency_ms, gbps in POOL}
    far_ms, far_gbps = (np.triu(rng.uniform(*span, (n, n)), 1) for span in (POOL_FAR_MS, POOL_FAR_GBPS))
    far_ms, far_gbps = (np.round(one + one.T, 4) for one in (far_ms, far_gbps))

    def link(i: int, j: int) -> tuple[float, float]:
        if labels[i][0] == labels[j][0]:
            return inside[labels[i][0]]
        return float(far_ms[i, j]), float(far_gbps[i, j])

    network = _network("pool", [site for site, *_ in labels], link)
    n_reliable = sum(counts[:2]) + -(-counts[2] // 3)
    devices = tuple(
        replace(device, kind=kind, disconnect_prob=None if d < n_reliable else 0.5)
        for d, (device, (_, kind, *_)) in enumerate(zip(network.devices, labels, strict=True))
    )
    return replace(network, devices=devices)


GENERATORS = {
    "homogeneous": homogeneous,
    "datacenter": datacenter,
    "spot": spot,
    "multi_dc": multi_dc,
    "regional": regional,
    "worldwide": worldwide,
    "random": random_regions,
    "jitter": jitter,
    "gaming": gaming,
    "mixed": mixed,
    "pool": pool,
}


def generate(kind: str, n_devices: int, seed: int) -> Network:
    """A network of the kind; the same arguments give the same network."""
    require_one_of("--kind", kind, list(GENERATORS))
    if n_devices < 1:
        raise BadInput(f"--devices: got {n_devices}, expected an integer >= 1")
    network = GENERATORS[kind](n_devices, np.random.default_rng(seed))
    return replace(network, name=f"{kind}_{n_devices}_seed{seed}")
