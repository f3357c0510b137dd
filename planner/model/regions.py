"""Measured links between ten cloud regions, for generated networks.

The 45 pairs are those of DS3Lab/DT-FM at cda948f (its delay and bandwidth table), the data of the DT-FM paper's cases.
"""

REGIONS = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "Singapore", "Sydney", "London", "Frankfurt", "Ireland")

SAME_REGION = (5.0, 2.0)

# (latency in ms one way, bandwidth in Gb/s) from region i to regions i+1, i+2, ...
_UPPER = (
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


def region_link(a: str, b: str) -> tuple[float, float]:
    """(latency_ms, bandwidth_gbps) between two regions, the same both ways."""
    i, j = sorted((REGIONS.index(a), REGIONS.index(b)))
    if i == j:
        return SAME_REGION
    latency_ms, bandwidth_gbps = _UPPER[i].split()[j - i - 1].split(":")
    return float(latency_ms), float(bandwidth_gbps)
