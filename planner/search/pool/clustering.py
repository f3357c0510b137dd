"""Divisive clustering (DIANA) of devices by the seconds of their exchanges.

The paper splits one cluster after another and says neither which nor how. Here the cluster of the largest diameter is
split; its most distant device leaves it, and those follow that are nearer to the ones that left than to the others
(Kaufman and Rousseeuw, Finding Groups in Data, 1990, chapter 6). A missing link counts as one slower than all others
together. Ties go to the lower index.
"""

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
        widest = max(
            clusters, key=lambda cluster: distance[np.ix_(cluster, cluster)].max() if len(cluster) > 1 else -1.0
        )
        clusters = tuple(sorted(other for other in clusters if other != widest) + list(_split(distance, widest)))
        clusters = tuple(sorted(clusters))
        yield clusters


def _finite(delay_s: np.ndarray) -> np.ndarray:
    """The distances with a missing link above any sum of others."""
    finite = np.isfinite(delay_s)
    return np.where(finite, delay_s, 1.0 + 2 * delay_s.sum(where=finite))


def _split(distance: np.ndarray, cluster: Cluster) -> tuple[Cluster, Cluster]:
    """The two parts of a cluster of at least two devices."""
    rest = list(cluster)
    farthest = max(rest, key=lambda d: distance[d, rest].sum())
    rest.remove(farthest)
    left = [farthest]
    while len(rest) > 1:
        inside_s = distance[np.ix_(rest, rest)].sum(axis=1) / (len(rest) - 1)
        gain_s = inside_s - distance[np.ix_(rest, left)].mean(axis=1)
        nearest = int(gain_s.argmax())
        if gain_s[nearest] <= 0:
            break
        left.append(rest.pop(nearest))
    return tuple(sorted(left)), tuple(sorted(rest))
