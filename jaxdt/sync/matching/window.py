"""SDPipe's scheduler: replicas that are ready within one window average together (Miao et al., PVLDB 16(9), 2023).

The rules of one stage (Alg. 2 of the paper):
1. A window opens when the first replica is ready. It closes after T (window_length.py), or at once when all replicas
   are ready or as many as a group may have. Those who are ready then are a group.
2. The latest groups must connect all replicas of the stage (sync_graph.py). If they would not, the stage takes the
   enforcement token (token.py) and waits without a limit, until the replicas that are ready connect the graph.
3. Only one stage enforces at a time. If another one has the token, the group forms all the same and is marked as
   suspended: the graph is not connected then.
4. A replica that leaves is no longer awaited. One that joins counts as connected to the donor of its parameters.

A run cannot get stuck: while one stage enforces, all others close their groups within T, so each pipeline that is
waited for continues until its replica of that stage is ready, or leaves (the run's failure detection sees to that).
This needs a finite T where groups may be of some, and one token for all stages. Without the token, pipelines
stuck in two stages that enforce wait for each other.

Differences from the paper: a stage that enforces closes with the arrival that connects the graph, not after another
window (as the public code does). `connectivity_groups` 1 asks for groups of all replicas at all stages, which the token
would suspend where there are several; then groups form as with the rule "all".
"""

import enum
import math

from jaxdt.run.config import GroupsConfig, RunConfig
from jaxdt.run.plan import Plan
from jaxdt.sync.matching.all import MatchAll
from jaxdt.sync.matching.base import AveragingGroup, Matched, Matcher, MatcherEntry
from jaxdt.sync.matching.sync_graph import SYNC_GRAPHS, SyncGraph
from jaxdt.sync.matching.token import EnforcementToken
from jaxdt.sync.matching.window_length import WindowLength

GROUPS_PER_REPLICA = 4  # connectivity_groups -1; few groups are suspended then (3 % in simulations)


class Phase(enum.Enum):
    IDLE = "nobody is ready"
    COLLECTING = "a window is open"
    ENFORCING = "waits until the sync graph is connected"


class MatchWindow(Matcher):
    """One stage's scheduler. `group_size_max` 0: no limit. A group is larger than its limit where only a larger one
    connects the graph."""

    def __init__(
        self,
        replicas: tuple[int, ...],
        length: WindowLength,
        graph: SyncGraph,
        token: EnforcementToken,
        group_size_max: int = 0,
    ):
        self._replicas = set(replicas)
        self._length = length
        self._graph = graph
        self._token = token
        self._group_size_max = group_size_max
        self._ready: dict[int, int] = {}  # replica -> its local steps, in order of arrival
        self._phase = Phase.IDLE
        self._window = 0  # number of the window; a timer of another one is out of date
        self._is_checked = False  # whether the graph's check was due when the window opened

    def ready(self, now_s: float, peer: int, step: int) -> Matched:
        if peer not in self._replicas or peer in self._ready:
            known = "is ready already" if peer in self._ready else "is no replica of the stage"
            raise ValueError(f"peer {peer} is ready with step {step}, but it {known}")
        self._length.step_time.on_ended(now_s, peer, step)
        self._graph.on_arrived(len(self._replicas))
        self._ready[peer] = step
        timer = self._open(now_s) if self._phase is Phase.IDLE else None
        return self._close_if_complete(now_s) or Matched(timer=timer)

    def timer(self, now_s: float, tag: int) -> Matched:
        if tag != self._window or self._phase is not Phase.COLLECTING:
            return Matched()
        suspended = self._is_checked and not self._connects
        if suspended and not self._graph.enforces_early and self._token.take(self):
            self._phase = Phase.ENFORCING
            return Matched()
        return self._close(now_s, "timeout", suspended)

    def on_left(self, now_s: float, *peers: int) -> Matched:
        was_ready = bool(self._ready)
        for peer in peers:
            self._replicas.discard(peer)
            self._length.step_time.on_left(peer)
            self._ready.pop(peer, None)
        if self._ready:
            return self._close_if_complete(now_s) or Matched()
        if was_ready:
            self._end_window()
        return Matched()

    def on_joined(self, now_s: float, peer: int, donor: int) -> Matched:
        self._replicas.add(peer)
        self._graph.on_joined(peer, donor)
        return Matched()

    def on_restarted(self, step_s: float) -> None:
        """Groups of some have formed by then, perhaps of others at other stages. Then it could be for ever until all
        are ready, and a window needs an end at once."""
        self._length.step_time.suppose(step_s)

    def on_failed(self, number: int, survivors: tuple[int, ...]) -> None:
        self._graph.replace(number, survivors)

    @property
    def _connects(self) -> bool:
        return self._graph.would_connect(self._replicas, self._ready)

    def _open(self, now_s: float) -> tuple[float, int] | None:
        """Open a window; the timer that ends it, if one does."""
        self._window += 1
        self._phase = Phase.COLLECTING
        self._is_checked = self._graph.is_due
        if self._is_checked and self._graph.enforces_early and self._token.take(self):
            self._phase = Phase.ENFORCING
            return None
        seconds = self._length.seconds
        return (now_s + seconds, self._window) if seconds < math.inf else None

    def _close_if_complete(self, now_s: float) -> Matched | None:
        """Form a group if no other replica is still to come."""
        if len(self._ready) == len(self._replicas):
            return self._close(now_s, "full")
        if math.isinf(self._length.longest_s):
            return None  # without a timer only groups of all are live: others could wait for those who have continued
        if self._phase is Phase.ENFORCING:
            return self._close(now_s, "enforced") if self._connects else None
        limited = 0 < self._group_size_max <= len(self._ready)
        if limited and (not self._is_checked or self._connects):
            return self._close(now_s, "cap")
        return None

    def _close(self, now_s: float, cause: str, suspended: bool = False) -> Matched:
        members = tuple(sorted(self._ready))
        group = AveragingGroup(members, cause, self._phase is Phase.ENFORCING, suspended)
        for peer, step in self._ready.items():
            self._length.step_time.began(now_s, peer, step)
        self._length.adapt(len(members))
        self._graph.on_closed(self._replicas, members)
        self._end_window()
        return Matched((group,))

    def _end_window(self) -> None:
        self._ready = {}
        self._phase = Phase.IDLE
        self._token.release(self)


# ------------------------------------------------------------------------------------------------------ table entry


def _n_groups(settings: GroupsConfig, n_replicas: int) -> int:
    """So many groups of a stage in a row connect its replicas; 0 if none need to."""
    n_groups = settings.connectivity_groups
    return GROUPS_PER_REPLICA * n_replicas if n_groups < 0 else n_groups


def _build(settings: GroupsConfig, stage: int, replicas: tuple[int, ...], token: EnforcementToken) -> Matcher:
    n_groups = _n_groups(settings, len(replicas))
    if n_groups == 1:
        return MatchAll(replicas)
    graph = SYNC_GRAPHS[settings.connectivity_window](n_groups) if n_groups else SyncGraph()
    length = WindowLength(settings.window_s, settings.window_frac or 1 / len(replicas))
    return MatchWindow(replicas, length, graph, token, settings.group_size_max)


def _check(config: RunConfig, plan: Plan) -> str:
    groups = config.sync.groups
    if groups.group_size_max == 1:
        return "sync.groups.group_size_max: got 1, so nobody averages, expected 2 or more, or sync.groups.match none"
    if groups.group_size_max and math.isinf(groups.window_s):
        return (
            f"sync.groups.window_s: got inf with sync.groups.group_size_max {groups.group_size_max}, expected a finite "
            "time: those who are left over would wait for ever"
        )
    return ""


ENTRY = MatcherEntry(_build, _check, period=lambda settings, n_replicas: max(1, _n_groups(settings, n_replicas)))
