"""A model of the scheduler's rules for averaging groups, which sees what the scheduler hears and what it reports.

A wrong group raises RuleBroken. The rules are those of SDPipe (Miao et al., PVLDB 16(9), 2023), in their words here:
every replica that waits gets one group; any P groups in a row connect the stage's replicas, or the last of them is
marked as suspended, which needs another stage that enforces at that moment.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from jaxdt.protocol.reports import GroupReport
from jaxdt.run.config import GroupsConfig
from jaxdt.testing.promises import ANSWERED, CONNECTED, MEMBERS, TOKEN, WINDOW, Promise

ROUNDING_S = 1e-6
GROUPS_PER_REPLICA = 4  # what connectivity_groups -1 stands for


class RuleBroken(Exception):
    """`problem`: how the rules break a promise."""

    def __init__(self, promise: Promise, problem: str):
        super().__init__(problem)
        self.promise = promise


def is_connected(replicas: Collection[int], cliques: Iterable[Collection[int]]) -> bool:
    """Whether these cliques connect the replicas, also over others that have gone."""
    if not replicas:
        return True
    all_cliques = [set(clique) for clique in cliques]
    reached = {min(replicas)}
    is_growing = True
    while is_growing:
        touched = set[int]().union(*(clique for clique in all_cliques if clique & reached))
        is_growing = not touched <= reached
        reached |= touched
    return reached.issuperset(replicas)


@dataclass
class StageGroups:
    """One stage: its replicas that have not gone, who of them waits and after how many steps, since when, and its
    groups. `answered`: the steps for which a replica last got a group. `is_checked`: whether the group that
    closes the open window has to connect the replicas."""

    stage: int
    replicas: set[int]
    waiting: dict[int, int] = field(default_factory=dict[int, int])
    opened_s: float = math.inf
    answered: dict[int, int] = field(default_factory=dict[int, int])
    cliques: list[set[int]] = field(default_factory=list[set[int]])
    formed: list[set[int]] = field(default_factory=list[set[int]])  # the same, as they were first
    n_arrived: int = 0  # since a check became due; only of tumbling windows
    is_due: bool = False
    is_checked: bool = False
    enforced_s: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # windows, from and to
    connects_from: int = 0  # the first group that counts, with tumbling windows
    returns: list[tuple[int, set[int]]] = field(default_factory=list[tuple[int, set[int]]])  # see latest

    def latest(self, first: int) -> list[set[int]]:
        """The groups from number `first` on. A replica that has come back is connected with its donor, as if they had
        both been in the newest group of that time."""
        edges = [edge for number, edge in self.returns if number >= first]
        return [*self.cliques[max(0, first) :], *edges]


@dataclass
class Suspension:
    """A group was suspended, so one of these stages has to be enforcing, in the window that is open there."""

    line: str
    candidates: set[int]


class GroupRules:
    """All stages of a run. `rows[stage]`: the replicas, in the order of their pipelines."""

    def __init__(self, groups: GroupsConfig, rows: Collection[Collection[int]]):
        self._groups = groups
        self._stages = [StageGroups(stage, set(row)) for stage, row in enumerate(rows)]
        self._pipeline_of = {peer: pipeline for row in rows for pipeline, peer in enumerate(row)}
        n_groups, n = groups.connectivity_groups, len(self._stages[0].replicas)
        self._n_groups = GROUPS_PER_REPLICA * n if n_groups < 0 else n_groups
        self._suspensions: list[Suspension] = []
        self._pairs: dict[tuple[int, int], set[int]] = {}  # step and pipeline -> the pipelines of its group
        self._last_s = 0.0
        self._late_since_s = 0.0  # windows that opened before may end late, since the coordinator did nothing
        self.n_enforced = self.n_suspended = 0

    @property
    def _is_window(self) -> bool:
        """Whether a scheduler window decides. With one group in a row, groups are those of all."""
        return self._groups.match == "window" and self._n_groups != 1

    @property
    def _is_sliding(self) -> bool:
        return self._is_window and self._n_groups > 1 and self._groups.connectivity_window == "sliding"

    @property
    def _is_tumbling(self) -> bool:
        return self._is_window and self._n_groups > 0 and self._groups.connectivity_window == "tumbling"

    @property
    def _window_s(self) -> float:
        """The longest time that a window may be open; inf if it is not known from the config."""
        return self._groups.window_s or math.inf

    # ------------------------------------------------------------------------------------------------- what is heard

    def advance(self, now_s: float, is_settled: bool) -> None:
        """Something is about to happen at the coordinator, and all that happened there before `now_s` is known, unless
        it is not settled who is a member."""
        if now_s > self._last_s and is_settled:
            self._check_stages(self._last_s)
        self._last_s = now_s

    def paused(self, now_s: float) -> None:
        """The coordinator did nothing until now, so windows end late."""
        self._late_since_s = now_s

    def wants(self, now_s: float, peer: int, step: int) -> None:
        """A replica waits for a group after so many steps. A repeated message changes nothing."""
        stage = self._stage_of(peer)
        if stage is None or step <= stage.answered.get(peer, -1) or peer in stage.waiting:
            return
        if self._is_tumbling:
            stage.n_arrived += 1
            if stage.n_arrived >= self._n_groups * len(stage.replicas):
                stage.n_arrived, stage.is_due = 0, True
        if not stage.waiting:
            stage.opened_s = now_s
            stage.is_checked = stage.is_due or (self._is_sliding and len(stage.cliques) >= self._n_groups - 1)
        stage.waiting[peer] = step

    def left(self, peer: int) -> None:
        """A replica is no longer awaited."""
        stage = self._stage_of(peer)
        if stage is None:
            return
        stage.replicas.discard(peer)
        stage.waiting.pop(peer, None)
        if not stage.waiting:
            self._window_ended(stage, True)

    def joined(self, stage: int, peer: int, donor: int) -> None:
        """A replica has come back, with the state of its donor. Its former parameters are lost, so in earlier groups it
        counts as another replica."""
        of_stage = self._stages[stage]
        before = -1 - len(of_stage.returns)
        for clique in (*of_stage.cliques, *(edge for _, edge in of_stage.returns)):
            if peer in clique:
                clique.remove(peer)
                clique.add(before)
        of_stage.replicas.add(peer)
        of_stage.answered.pop(peer, None)
        of_stage.returns.append((len(of_stage.cliques) - 1, {donor, peer}))

    def _stage_of(self, peer: int) -> StageGroups | None:
        """The groups of the stage of a replica; None if the replica has gone."""
        return next((stage for stage in self._stages if peer in stage.replicas), None)

    # ------------------------------------------------------------------------------------------------ groups that form

    def formed(self, now_s: float, report: GroupReport) -> None:
        """A group has formed."""
        stage = self._stages[report.stage]
        if 0 <= report.k < len(stage.cliques):
            self._formed_again(stage, report)
            return
        self._check_members(stage, report)
        members = set(report.members)
        if self._is_window:
            self._check_window(now_s, stage, report)
        elif self._groups.match == "pairs":
            self._check_pair(stage, report)
        elif members != stage.replicas:
            raise RuleBroken(MEMBERS, f"{report} has formed, replicas are {sorted(stage.replicas)}")
        stage.cliques.append(set(members))
        stage.formed.append(members)
        for peer in members:
            stage.answered[peer] = stage.waiting.pop(peer)
        if report.enforced:
            stage.enforced_s.append((stage.opened_s, now_s))
        self._window_ended(stage, report.enforced)

    def _formed_again(self, stage: StageGroups, report: GroupReport) -> None:
        """Other members have averaged than first said, since some are lost: then they are among those of before."""
        members, before = set(report.members), stage.formed[report.k]
        if not members <= before or not members:
            raise RuleBroken(MEMBERS, f"{report} is formed again, with others than {sorted(before)}")
        for peer, step in zip(report.members, report.steps, strict=True):
            if step > stage.answered.get(peer, -1):
                raise RuleBroken(MEMBERS, f"{report}: peer {peer} was in it after {stage.answered.get(peer)} steps")
        stage.cliques[report.k] = members

    def _check_members(self, stage: StageGroups, report: GroupReport) -> None:
        if report.k != len(stage.cliques):
            raise RuleBroken(MEMBERS, f"{report} follows {len(stage.cliques)} groups")
        if not report.members or list(report.members) != sorted(set(report.members)):
            raise RuleBroken(MEMBERS, f"{report}: its members are not in order, or not there")
        for peer, step in zip(report.members, report.steps, strict=True):
            if peer not in stage.replicas:
                raise RuleBroken(MEMBERS, f"{report}: peer {peer} is none of the replicas {sorted(stage.replicas)}")
            if stage.waiting.get(peer) != step:
                waits = f"waits after {stage.waiting[peer]} steps" if peer in stage.waiting else "does not wait"
                raise RuleBroken(ANSWERED, f"{report}: peer {peer} {waits}")

    def _check_pair(self, stage: StageGroups, report: GroupReport) -> None:
        """Two at most, after equal steps, and the same pipelines at all stages."""
        if len(report.members) > 2 or len(set(report.steps)) > 1:
            raise RuleBroken(MEMBERS, f"{report} is no pair of one step")
        pipelines = {self._pipeline_of[peer] for peer in report.members}
        for peer, step in zip(report.members, report.steps, strict=True):
            known = self._pairs.setdefault((step, self._pipeline_of[peer]), pipelines)
            if known != pipelines and len(known) == len(pipelines):
                raise RuleBroken(MEMBERS, f"{report} has formed, at another stage pipelines {sorted(known)}")

    def _check_window(self, now_s: float, stage: StageGroups, report: GroupReport) -> None:
        members, cap = set(report.members), self._groups.group_size_max
        if members != set(stage.waiting):
            raise RuleBroken(ANSWERED, f"{report} leaves {sorted(set(stage.waiting) - members)} out, who wait")
        is_late = stage.opened_s <= now_s <= self._late_since_s
        if not report.enforced and not is_late and now_s > stage.opened_s + self._window_s + ROUNDING_S:
            raise RuleBroken(WINDOW, f"{report} has waited since {stage.opened_s:.3f} s without enforcing")
        is_full = members == stage.replicas
        if report.cause == "cap" and not 0 < cap <= len(members):
            raise RuleBroken(WINDOW, f"{report} has closed at {len(members)} members, the most are {cap}")
        if math.isinf(self._groups.window_s) and not is_full:
            raise RuleBroken(WINDOW, f"{report} has closed, and its window has no end")
        self._check_connected(now_s, stage, report)

    def _check_connected(self, now_s: float, stage: StageGroups, report: GroupReport) -> None:
        """A group that should connect the stage's replicas and does not is marked, and no other one is."""
        members = set(report.members)
        connects = self._connects(stage, members)
        if report.suspended != (stage.is_checked and not connects):
            state = "due" if stage.is_checked else "not due"
            raise RuleBroken(
                CONNECTED, f"{report}: a check is {state}, connected: {connects}, {sorted(stage.replicas)}"
            )
        if self._is_tumbling and stage.is_due and connects:
            stage.is_due, stage.connects_from = False, len(stage.cliques) + 1
        self.n_enforced += report.enforced
        self.n_suspended += report.suspended
        if report.suspended:
            self._suspend(now_s if self._is_sliding else stage.opened_s, stage, report)

    def _suspend(self, at_s: float, stage: StageGroups, report: GroupReport) -> None:
        """The stage wanted to enforce at that time, and another one did, or it will show that it does."""
        others = [other for other in self._stages if other is not stage]
        if not any(opened_s <= at_s <= closed_s for other in others for opened_s, closed_s in other.enforced_s):
            candidates = {other.stage for other in others if other.opened_s <= at_s}
            self._suspensions.append(Suspension(str(report), candidates))
            self._check_suspensions()

    def _connects(self, stage: StageGroups, members: Collection[int]) -> bool:
        """Whether the latest groups with this one more connect the stage's replicas."""
        first = len(stage.cliques) - (self._n_groups - 1) if self._is_sliding else stage.connects_from
        is_tumbling = not self._is_sliding
        latest = stage.latest(first)
        if is_tumbling:  # one that came after the last connected group stands with that one's number
            latest += [edge for number, edge in stage.returns if number == first - 1]
        return is_connected(stage.replicas, [*latest, members])

    def _window_ended(self, stage: StageGroups, may_enforce: bool) -> None:
        """The stage's window is over; whether it may have been enforcing."""
        stage.opened_s = math.inf
        for suspension in list(self._suspensions):
            if stage.stage in suspension.candidates and may_enforce:
                self._suspensions.remove(suspension)
            suspension.candidates.discard(stage.stage)
        self._check_suspensions()

    def _check_suspensions(self) -> None:
        for suspension in self._suspensions:
            if not suspension.candidates:
                raise RuleBroken(TOKEN, f"{suspension.line} was suspended, and no other stage has enforced then")

    # --------------------------------------------------------------------------------------------- between two events

    def _check_stages(self, at_s: float) -> None:
        """No stage waits for what has come, and one at most waits longer than its window."""
        late: list[StageGroups] = []
        for stage in self._stages:
            if stage.waiting and stage.replicas == set(stage.waiting):
                raise RuleBroken(ANSWERED, f"stage {stage.stage}: all replicas wait, and no group has formed")
            is_late = at_s > stage.opened_s + self._window_s + ROUNDING_S
            if self._is_window and is_late and at_s > self._late_since_s:
                late.append(stage)
        for stage in late:
            if not stage.is_checked or self._connects(stage, stage.waiting):
                raise RuleBroken(WINDOW, f"stage {stage.stage} waits beyond its window, and has no reason to")
        if len(late) > 1:
            names = ", ".join(str(stage.stage) for stage in late)
            raise RuleBroken(TOKEN, f"stages {names} wait beyond their windows at the same time")

    def waiting(self) -> Mapping[int, int]:
        """Replica -> the steps after which it waits, at all stages."""
        return {peer: step for stage in self._stages for peer, step in stage.waiting.items()}
