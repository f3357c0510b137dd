"""The codec of each link that carried tensors between stages. Peers of no common pipeline send to each other, too:
after a loss, after a move, from and to newcomers, and with wiring `swarm` at any time."""

from collections import defaultdict
from collections.abc import Collection, Mapping

from jaxdt.run.plan import Plan


class LinkCodecs:
    """Takes the views of a run, to know which stages the two ends of a link had."""

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
