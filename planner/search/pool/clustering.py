"""Divisive clustering of devices by the seconds of their exchanges.

The paper splits one cluster after another and says neither which nor how. Here the cluster of the largest diameter is
split, and where its parts are farthest apart: its minimum spanning tree loses the longest edge. So a set of devices
that are nearer to each other than to all others is not cut while any other is with it. DIANA, which moves devices by
average distances, does not keep that: one slow link of a device drags it out of its site. A missing link counts as one
slower than all others together. Ties go to the lower index.
"""

import itertools
from collections.abc import Iterator

import numpy as np

Cluster = tuple[int, ...]


def clusterings(delay_s: np.ndarray) -> Iterator[tuple[Cluster, ...]]:
    """Partitions of the devices [N] into 1, 2, ..., N clusters, each a split of the one before; both a cluster and a
    partition in ascending order. delay_s: [N, N], symmetric."""
    distance = _finite(delay_s)
    clusters: tuple[Cluster, ...] = (tuple(range(len(distance))),)
    yield clusters
    while any(len(cluster) > 1 for cluster in clusters):
        several = [cluster for cluster in clusters if len(cluster) > 1]
        widest = max(several, key=lambda cluster: distance[np.ix_(cluster, cluster)].max())
        others = [cluster for cluster in clusters if cluster != widest]
        clusters = tuple(sorted([*others, *_split(distance, widest)]))
        yield clusters


def _finite(delay_s: np.ndarray) -> np.ndarray:
    """The distances with a missing link above any sum of others."""
    finite = np.isfinite(delay_s)
    return np.where(finite, delay_s, 1.0 + 2 * delay_s.sum(where=finite))


def _split(distance: np.ndarray, cluster: Cluster) -> list[Cluster]:
    """The two parts of a cluster of at least two devices that remain when its nearest pairs are joined, one pair after
    another."""
    part = {d: {d} for d in cluster}
    pairs = sorted(itertools.combinations(cluster, 2), key=lambda pair: (distance[pair], pair))
    n_parts = len(cluster)
    for a, b in pairs:
        if n_parts == 2:
            break
        if part[a] is not part[b]:
            part[a] |= part[b]
            part.update(dict.fromkeys(part[b], part[a]))
            n_parts -= 1
    return sorted({tuple(sorted(members)) for members in part.values()})
