"""Random traces for the matchers of a run, and the rules that every trace must keep (SDPipe's spec, properties 1-6).

A trace is a list of (gap, action, stage, who). `Play` hands it to the matchers of several stages, with their timers,
and checks each group against a model of its own: who waits, who is there, which groups the stage has had.
"""

import heapq
import math
import random
from dataclasses import dataclass, field

from jaxdt.run.config import GroupsConfig
from jaxdt.sync.matching.base import Matched, matcher_entry
from jaxdt.sync.matching.token import EnforcementToken

READY, LEAVE, JOIN, FAIL = "ready", "leave", "join", "fail"
ACTIONS = (READY,) * 12 + (LEAVE, JOIN, JOIN, FAIL)
GAP_S = 0.25
T_S = 1.0


@dataclass(frozen=True)
class Setup:
    n_stages: int = 2
    n_pipelines: int = 4
    n_groups: int = 3
    window: str = "sliding"
    group_size_max: int = 0
    window_s: float = T_S

    @property
    def groups(self) -> GroupsConfig:
        return GroupsConfig(
            match="window",
            window_s=self.window_s,
            group_size_max=self.group_size_max,
            connectivity_groups=self.n_groups,
            connectivity_window=self.window,
        )


def random_trace(seed: int, n: int = 150) -> tuple[Setup, list[tuple[int, str, int, int]]]:
    rng = random.Random(f"trace {seed}")
    n_stages, n_pipelines, n_groups = rng.randint(1, 3), rng.randint(2, 6), rng.randint(2, 6)
    window = rng.choice(("sliding", "sliding", "tumbling"))
    setup = Setup(n_stages, n_pipelines, n_groups, window, group_size_max=rng.choice((0, 0, 2)))
    draw = lambda: (rng.randint(0, 3), rng.choice(ACTIONS), rng.randrange(3), rng.randrange(6))  # noqa: E731
    return setup, [draw() for _ in range(n)]


def is_connected(replicas: set[int], cliques: list[set[int]]) -> bool:
    """By walking from one replica to the next."""
    reached, todo = set(), [min(replicas)]
    while todo:
        reached.add(peer := todo.pop())
        todo += [other for clique in cliques if peer in clique for other in clique if other not in reached]
    return replicas <= reached


@dataclass
class Stage:
    """The knowledge about a stage that a matcher should have."""

    replicas: set[int]
    waiting: dict[int, float] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    opened_s: float = 0.0
    timer_s: float = math.inf
    groups: list[tuple[float, object]] = field(default_factory=list)
    cliques: list[set[int]] = field(default_factory=list)
    joins: list[tuple[int, set[int]]] = field(default_factory=list)  # (newest group at that time, edge)

    def latest(self, n: int) -> list[set[int]]:
        first = len(self.cliques) - n
        return self.cliques[first:] + [edge for number, edge in self.joins if number >= first]


class Play:
    """One trace. `groups` are those of all stages, in order."""

    def __init__(self, setup: Setup, token: EnforcementToken):
        self.setup = setup
        self.token = token
        self.now_s = 0.0
        self.timers: list[tuple[float, int, int]] = []  # (at_s, stage, tag)
        self.groups = []
        build = matcher_entry("window").build
        rows = [tuple(100 * s + p for p in range(setup.n_pipelines)) for s in range(setup.n_stages)]
        self.matchers = [build(setup.groups, s, row, token) for s, row in enumerate(rows)]
        self.stages = [Stage(set(row)) for row in rows]
        self.n_pipelines = setup.n_pipelines

    def run(self, trace) -> "Play":
        for gap, action, stage, who in trace:
            until_s = self.now_s + gap * GAP_S
            while self.timers and self.timers[0][0] < until_s:
                self.expire()
            self.now_s = until_s
            getattr(self, action)(stage % self.setup.n_stages, who)
            self.check_owner()
        while self.timers:
            self.expire()
            self.check_owner()
        return self

    def expire(self) -> None:
        self.now_s, stage, tag = heapq.heappop(self.timers)
        holder = self.token.holder
        self.check(stage, self.matchers[stage].timer(self.now_s, tag), holder)

    def ready(self, stage: int, who: int) -> None:
        model = self.stages[stage]
        free = sorted(model.replicas - set(model.waiting))
        if free:
            peer = free[who % len(free)]
            if not model.waiting:
                model.opened_s = self.now_s
            model.waiting[peer] = self.now_s
            model.steps[peer] = model.steps.get(peer, 0) + 1
            holder = self.token.holder
            self.check(stage, self.matchers[stage].ready(self.now_s, peer, model.steps[peer]), holder)

    def leave(self, stage: int, who: int) -> None:
        pipelines = sorted(peer % 100 for peer in self.stages[0].replicas)
        if len(pipelines) > 1:
            self.drop(pipelines[who % len(pipelines)])

    def drop(self, pipeline: int) -> None:
        for stage, model in enumerate(self.stages):
            peer = 100 * stage + pipeline
            model.replicas.discard(peer)
            model.waiting.pop(peer, None)
            holder = self.token.holder
            self.check(stage, self.matchers[stage].on_left(self.now_s, peer), holder)

    def join(self, stage: int, who: int) -> None:
        if len(self.stages[0].replicas) < 8:
            pipeline, self.n_pipelines = self.n_pipelines, self.n_pipelines + 1
            for stage, model in enumerate(self.stages):
                donors = sorted(model.replicas)
                donor, peer = donors[who % len(donors)], 100 * stage + pipeline
                model.replicas.add(peer)
                model.joins.append((len(model.cliques) - 1, {donor, peer}))
                assert self.matchers[stage].on_joined(self.now_s, peer, donor) == Matched()

    def fail(self, stage: int, who: int) -> None:
        """A member of the stage's last group is lost with its pipeline; the others average again, or nobody has."""
        model = self.stages[stage]
        if model.cliques and len(model.replicas) > 1:
            members = sorted(model.cliques[-1] & model.replicas)
            if members:
                dead = members[who % len(members)]
                number = len(model.cliques) - 1
                rest = set(members) - {dead} if who % 2 else set()
                model.cliques[-1] = rest
                self.matchers[stage].on_failed(number, tuple(sorted(rest)))
                self.drop(dead % 100)

    # ---------------------------------------------------------------------------------------------------- the rules

    def check(self, stage: int, matched: Matched, holder: object) -> None:
        """`holder` had the token before."""
        model = self.stages[stage]
        if matched.timer:
            at_s, tag = matched.timer
            assert self.setup.window_s / 100 <= at_s - self.now_s + 1e-9 and at_s <= self.now_s + self.setup.window_s
            assert not matched.groups
            model.timer_s = at_s
            heapq.heappush(self.timers, (at_s, stage, tag))
        for group in matched.groups:
            self.check_group(model, group, holder, self.matchers[stage])
            for peer in group.members:
                del model.waiting[peer]
            model.cliques.append(set(group.members))
            model.groups.append((self.now_s, group))
            self.groups.append((self.now_s, stage, group))
        assert not model.waiting or set(model.waiting) < model.replicas, "nobody is missing, and no group has formed"

    def check_group(self, model: Stage, group, holder: object, matcher: object) -> None:
        members = set(group.members)
        assert list(group.members) == sorted(members) and members <= model.replicas
        assert members == set(model.waiting), "all who wait are in the group"
        had_token = holder is matcher
        assert group.enforced == had_token or self.setup.window == "tumbling"
        if not group.enforced and math.isfinite(self.setup.window_s):
            assert self.now_s <= model.opened_s + self.setup.window_s + 1e-9
        if self.setup.window == "sliding":
            n_before = self.setup.n_groups - 1
            is_due = len(model.cliques) >= n_before
            connects = is_connected(model.replicas, [*model.latest(n_before), members])
            assert group.suspended == (is_due and not connects), (group, model.latest(n_before), model.replicas)
            if group.suspended:
                assert holder is not None and not had_token
        if group.cause == "timeout":
            assert self.now_s == model.timer_s, "a timer of another window"
        if group.cause == "cap":
            assert len(members) >= self.setup.group_size_max > 0
        assert (group.cause == "full") == (members == model.replicas)

    def check_owner(self) -> None:
        """At most one stage enforces: it has replicas that wait, and they do not connect the graph."""
        for stage, matcher in enumerate(self.matchers):
            if self.token.holder is matcher:
                model = self.stages[stage]
                assert model.waiting
                if self.setup.window == "sliding":
                    latest = model.latest(self.setup.n_groups - 1)
                    assert not is_connected(model.replicas, [*latest, set(model.waiting)])
            else:
                waits_s = self.now_s - min(self.stages[stage].waiting.values(), default=self.now_s)
                assert waits_s <= self.setup.window_s + 1e-9, "only a stage with the token waits longer"
