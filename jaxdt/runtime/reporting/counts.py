"""The figures of a run that add up over its peers: what its links carried, its views, a pool's work, processors."""

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxdt.protocol import events as ev
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.plan import Plan

SUMS = ("microbatches", "by_workers", "stolen", "redone", "lost", "contribution_bytes")


class Totals:
    """Adds up what peers count themselves. A count begins again at 0 when a process is restarted, when a peer moves to
    another stage, and that of a link when the link is made again. What was counted after the last report is not
    known."""

    def __init__(self):
        self._ended: dict[str, Any] = {}
        self._latest: dict[int, Mapping[str, float]] = {}  # of each peer

    def counted(self, peer: int, counts: Mapping[str, float]) -> None:
        for name, n in self._latest.get(peer, {}).items():
            if counts.get(name, 0) < n:
                self._ended[name] = self._ended.get(name, 0) + n
        self._latest[peer] = counts

    def by_name(self) -> dict[str, Any]:
        """The sums over all peers and processes."""
        return dict(sum(map(Counter, self._latest.values()), Counter(self._ended)))


def link_bytes(peer: int, bytes_to: Mapping[str, int], bytes_from: Mapping[str, int] | None = None) -> dict[str, int]:
    """By "src->dst": what a peer has sent to each of these peers, and has received from each of those that do not count
    themselves."""
    links = {f"{peer}->{dst}": n for dst, n in bytes_to.items()}
    return links | {f"{src}->{peer}": n for src, n in (bytes_from or {}).items()}


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


class MembershipChanges:
    """Counted over the views of a run. A peer that moves to another stage is in no view for a while."""

    def __init__(self):
        self._stage_of: dict[int, int] = {}  # each peer that was ever in a view -> its last stage
        self._present: set[int] = set()
        self._n_gone = self._n_joined = self._n_moved = 0

    def view(self, members: Mapping[int, int]) -> None:
        """A view with these members, peer -> stage, is durable."""
        is_first = not self._stage_of
        self._n_gone += len(self._present - members.keys())
        for peer in members if not is_first else ():
            self._enter(peer, members[peer])
        self._stage_of |= members
        self._present = set(members)

    def _enter(self, peer: int, stage: int) -> None:
        has_moved = self._stage_of.get(peer, stage) != stage
        if has_moved:
            self._n_moved += 1
            self._n_gone -= peer not in self._present
        elif peer not in self._present:
            self._n_joined += 1

    @property
    def text(self) -> str:
        """Such as "2 peers gone, 1 joined"; "" if the members are those of the first view, and have always been."""
        counts = {"gone": self._n_gone, "joined": self._n_joined, "moved to another stage": self._n_moved}
        n_first, *_ = [n for n in counts.values() if n] or [0]
        noun = "peer" if n_first == 1 else "peers"
        return ", ".join(f"{n} {verb}" for verb, n in counts.items() if n).replace(" ", f" {noun} ", 1)


class ExpertLoads:
    """The figures of the experts on each peer, at its latest step: what its layers added to the loss, and the load of
    the busiest expert of a layer."""

    def __init__(self):
        self._latest: dict[int, dict[str, float]] = {}

    def counted(self, peer: int, values: Mapping[str, float]) -> None:
        """Take those in a peer's heartbeat, or in the totals at its end."""
        if found := {name: values[name] for name in ev.EXPERTS if name in values}:
            self._latest[peer] = found

    @property
    def fields(self) -> dict[str, dict[str, float]] | None:
        """By peer, for summary.json; None for a model without experts."""
        return {str(peer): self._latest[peer] for peer in sorted(self._latest)} or None


def expert_lines(experts: Mapping[str, Mapping[str, float]] | None) -> list[str]:
    """A line for people about the loads; none without experts."""
    if not experts:
        return []
    loss, load = ev.EXPERTS
    peer, busiest = max(experts.items(), key=lambda item: item[1][load])
    of_loss = f"largest auxiliary loss of a stage {max(figures[loss] for figures in experts.values()):.2g}"
    return [
        f"experts        the busiest has {busiest[load]:.2f} x the mean load of its layer, on peer {peer}; {of_loss}"
    ]


class PoolSummary:
    """The counts of one run's workers. A server that was started again counts from nothing."""

    def __init__(self):
        self._latest: dict[int, Mapping[str, float]] = {}

    def counted(self, peer: int, values: Mapping[str, float]) -> None:
        """Take the counts in a peer's heartbeat, or in the totals at its end."""
        if ev.WORKERS in values:
            self._latest[peer] = values

    @property
    def fields(self) -> dict[str, Any] | None:
        """The fields for summary.json; None for a run without servers of workers."""
        if not self._latest:
            return None
        sums = {name: int(sum(values[name] for values in self._latest.values())) for name in SUMS}
        return sums | {"aggregation_frac": aggregation_frac(*self._latest.values())}

    @property
    def doubt(self) -> str:
        """The reason why a prediction may be far off, since it assumes a run that keeps its workers; '' without one."""
        fields = self.fields or {}
        if not fields.get("lost") and not fields.get("redone"):
            return ""
        often = {1: "once", 2: "twice"}.get(fields["lost"], f"{fields['lost']} times")
        lost = f"workers were lost {often}, {_microbatches(fields['redone'])} computed again"
        return f"{lost}: the prediction is of a run that keeps its workers"


def aggregation_frac(*servers: Mapping[str, float]) -> float | None:
    """The least share of the time of its steps for which one of these servers aggregated: the others also waited for
    that one to have computed. None before the first step is over."""
    shares = [values["aggregation_s"] / values["steps_s"] for values in servers if values["steps_s"]]
    return min(shares, default=None)


def summary_lines(pool: Mapping[str, Any] | None) -> list[str]:
    """Lines for people about a pool's counts; none without a pool."""
    if pool is None:
        return []
    was = "was" if pool["lost"] == 1 else "were"
    did = f"did {pool['by_workers']} of {pool['microbatches']} microbatches of stages"
    lines = [f"workers        {did}; {pool['lost']} {was} lost, {_microbatches(pool['redone'])} computed again"]
    if pool["aggregation_frac"] is not None:
        sent = f"{pool['contribution_bytes'] / 1e6:.1f} MB of gradients"
        lines.append(f"               sent {sent}; aggregation took {pool['aggregation_frac']:.0%} of a step")
    return lines


def _microbatches(n: int) -> str:
    return f"{n} microbatch{'es' * (n != 1)}"


class ProcessorUse:
    """How much of this host's processors others used while a run went on: all that was not idle, less what the run says
    that it used itself. The load average does not tell the two apart, since one peer has several threads that want to
    compute."""

    def __init__(self):
        try:
            self._idle_before_s = idle_s()
        except FileNotFoundError:  # not a Linux
            self._idle_before_s = None
        self._own_before_s = _own_s()
        self._of_peers = Totals()

    def counted(self, peer: int, values: Mapping[str, float]) -> None:
        """Take the count in a peer's heartbeat, or in the totals at its end."""
        if ev.CPU_S in values:
            self._of_peers.counted(peer, {ev.CPU_S: values[ev.CPU_S]})

    def others_cores(self, seconds: float) -> float:
        """How many of the CPUs that this process may use others used on average in the `seconds` since this began; 0
        where the system does not say it. Peers on other hosts count as if they were here, so it is too small rather
        than too large."""
        if self._idle_before_s is None:
            return 0.0
        used_s = len(allowed_cpus()) * seconds - (idle_s() - self._idle_before_s)
        own_s = _own_s() - self._own_before_s + self._of_peers.by_name().get(ev.CPU_S, 0.0)
        return max(0.0, (used_s - own_s) / seconds)


def idle_s() -> float:
    """Idle seconds of this host since it was started, summed over the CPUs that this process may use.
    FileNotFoundError where there is no /proc/stat."""
    own = {f"cpu{cpu}" for cpu in allowed_cpus()}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    ticks = sum(int(row[4]) + int(row[5]) for row in rows if row and row[0] in own)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """The processor time of this process, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
