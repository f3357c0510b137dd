"""The payload that each link of a run has carried, also the links of peers that have left it or have moved."""

from collections import Counter
from collections.abc import Mapping


class LinkBytes:
    """Adds up the bytes that peers count. A count begins again at 0 when a process is started anew, when a peer
    moves to another stage, and when a link is made again. Bytes after the last count of a link that was ended are
    not known."""

    def __init__(self):
        self._ended: Counter[str] = Counter()  # "src->dst" -> bytes
        self._latest: dict[int, Mapping[str, int]] = {}  # what each peer has counted last, by "src->dst"

    def counted(self, peer: int, bytes_to: Mapping[str, int], bytes_from: Mapping[str, int] | None = None) -> None:
        """A peer has sent so many bytes to each of these peers since it has a link to it, and has received so many from
        each of those that do not count themselves."""
        links = {f"{peer}->{dst}": n for dst, n in bytes_to.items()}
        links |= {f"{src}->{peer}": n for src, n in (bytes_from or {}).items()}
        for link, n_bytes in self._latest.get(peer, {}).items():
            if links.get(link, 0) < n_bytes:
                self._ended[link] += n_bytes
        self._latest[peer] = links

    def totals(self) -> dict[str, int]:
        """Bytes of each link, by "src->dst"."""
        return dict(sum(map(Counter, self._latest.values()), Counter(self._ended)))
