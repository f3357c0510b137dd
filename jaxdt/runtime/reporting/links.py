"""What each link of a run has carried: its payload, also of peers that have left or have moved, and its codec."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from jaxdt.run.plan import Plan


class LinkBytes:
    """Adds up the bytes that peers count. A count begins again at 0 when a process is restarted, when a peer
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


class LinkCodecs:
    """Takes the views of a run, to know which stages the two ends of a link had. Peers of no common pipeline send to
    each other, too: after a loss, after a move, from and to newcomers, and with wiring `swarm` at any time."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._stages_of: defaultdict[int, set[int]] = defaultdict(set)

    def view(self, members: Mapping[int, int]) -> None:
        """A view with these members, peer -> stage, is durable."""
        for peer, stage in members.items():
            self._stages_of[peer].add(stage)

    def on(self, links: Collection[str]) -> dict[str, str]:
        """The codec of each link of the plan, and of those of `links` that led to a neighbouring stage, by "src->dst".
        Such a link may have carried microbatches of several pipelines: of codecs that differ, all are named, with a
        comma between them as in a plan."""
        found = {f"{src}->{dst}": name for (src, dst), name in self._plan.codec_of_links.items()}
        for link in sorted(set(links) - found.keys()):
            if names := self._names(*map(int, link.split("->"))):
                found[link] = ",".join(names)
        return found

    def _names(self, src: int, dst: int) -> list[str]:
        plan = self._plan
        hops = [(a, b) for a in self._stages_of[src] for b in self._stages_of[dst] if abs(a - b) == 1]
        return list(dict.fromkeys(plan.codec_of(min(a, b), i, a < b) for a, b in hops for i in range(plan.n_pipelines)))
