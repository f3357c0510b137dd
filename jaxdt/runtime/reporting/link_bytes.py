"""The payload that each link of a run has carried, also the links of peers that have left it or have moved."""

from collections import Counter
from collections.abc import Mapping


class LinkBytes:
    """Adds up what peers count. A count begins again at 0 when a process is started anew, when a peer moves to another
    stage, and when a link is made again. What the last count of a link that was ended had missed is not known."""

    def __init__(self):
        self._ended: Counter[str] = Counter()  # "src->dst" -> bytes
        self._latest: dict[int, Mapping[str, int]] = {}  # of each peer, since its links were made

    def counted(self, peer: int, bytes_to: Mapping[str, int]) -> None:
        """A peer has sent so many bytes to each of these peers since it has a link to it."""
        for dst, n_bytes in self._latest.get(peer, {}).items():
            if bytes_to.get(dst, 0) < n_bytes:
                self._ended[f"{peer}->{dst}"] += n_bytes
        self._latest[peer] = dict(bytes_to)

    def totals(self) -> dict[str, int]:
        """Bytes of each link, by "src->dst"."""
        latest = {f"{peer}->{dst}": n for peer, bytes_to in self._latest.items() for dst, n in bytes_to.items()}
        return dict(self._ended + Counter(latest))
