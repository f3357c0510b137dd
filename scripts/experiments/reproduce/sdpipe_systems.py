"""The systems that SDPipe is compared with, as bare event simulations of the matchers that a run uses; their speed, the
sizes of their groups, and whether they get stuck."""

import random
import statistics
from dataclasses import dataclass, replace
from functools import partial

from experiments.reproduce.results import Job, Results, described

from jaxdt.run.config import GroupsConfig
from jaxdt.runtime.reporting.interval import SEEDS, Interval, paired_ratio
from jaxdt.sim.stragglers.group_timing import FLUSH, GroupOutcome, GroupTiming, time_groups
from jaxdt.sim.stragglers.server_line import ServerTiming
from jaxdt.sim.stragglers.stalls import STEP, Stalls
from jaxdt.sync.matching.token import EnforcementToken

COMPUTE_S, EXCHANGE_S = 0.06, 0.015
STEP_S = COMPUTE_S + EXCHANGE_S
N_MICROBATCHES = 4
STALL_PROB = 0.1
STALL_S = 0.3
PAPER_GROUPS = 10  # the paper's P
ENDLESS = 0  # connectivity_groups that asks for nothing

ALL, PAIRS, SDPIPE, SDPIPE_4N = "all-reduce", "AD-PSGD, pairs by step", "SDPipe, P = 10", "SDPipe, P = 4N"
TUMBLING, FIRST_COME, NONE = "SDPipe, tumbling P = 10", "AD-PSGD, first come", "no averaging"
PREDUCE, HETPIPE = "P-Reduce, halves", "HetPipe"
MANY_PIPELINES = (4, 8, 16)
MANY_STALLS_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.6)
# HetPipe's servers share one line of 10 Gb/s. A push or a pull of a stage occupies it for 10 ms: a quarter of the
# 102 MB of ResNet-50, half of which stays on its host. Waves and the bound on staleness: SDPipe's public code, and M.
HETPIPE_SERVERS = ServerTiming(transfer_s=0.01, wave=10, staleness=4)
HALF = -1  # group_size_max that stands for half of the pipelines
WINDOW = GroupsConfig(match="window", connectivity_groups=PAPER_GROUPS)
RULES: dict[str, GroupsConfig | ServerTiming] = {
    ALL: GroupsConfig(match="all"),
    PAIRS: GroupsConfig(match="pairs"),
    SDPIPE: WINDOW,
    SDPIPE_4N: replace(WINDOW, connectivity_groups=-1),
    TUMBLING: replace(WINDOW, connectivity_window="tumbling"),
    FIRST_COME: replace(WINDOW, connectivity_groups=ENDLESS, group_size_max=2),
    PREDUCE: replace(WINDOW, connectivity_groups=ENDLESS, group_size_max=HALF),
    HETPIPE: HETPIPE_SERVERS,
    NONE: GroupsConfig(match="none"),
}
SYSTEMS = tuple(RULES)
SYSTEMS_DRAWN = 250  # random ones, for the deadlocks


@dataclass(frozen=True)
class Pipelines:
    """A system of SYSTEMS, and what it runs on. `n_groups`: the P of SDPipe, if it is not the system's own."""

    system: str
    n_pipelines: int
    schedule: str = FLUSH
    n_stages: int = 4
    stall_s: float = STALL_S
    draws: str = STEP
    slow_times: float = 1.0
    n_groups: int | None = None
    n_steps: int = 80

    def steps_per_s(self, results: Results) -> list[float]:
        """Steps per second of all pipelines together, one value per seed."""
        return [results.get(self.job(seed))[0] for seed in SEEDS]

    def groups(self, results: Results) -> list[float]:
        """Mean size of a group, share of groups that connect too few and are let go."""
        values = [results.get(self.job(seed))[1:3] for seed in SEEDS]
        return [statistics.fmean(column) for column in zip(*values, strict=True)]

    def sizes(self, results: Results) -> list[float]:
        """Least, quartiles and largest of the sizes of groups, the median over seeds."""
        values = [results.get(self.job(seed))[3:] for seed in SEEDS]
        return [statistics.median(column) for column in zip(*values, strict=True)]

    def job(self, seed: int) -> Job:
        n_works = 2 * self.n_steps * self.n_pipelines * self.n_stages * self.timing(seed).step_microbatches
        return Job(f"{described(self)} seed={seed}", n_works, partial(self._values, seed))

    def outcome(self, seed: int) -> GroupOutcome:
        return time_groups(self.timing(seed))

    def _values(self, seed: int) -> list[float]:
        outcome = self.outcome(seed)
        sizes = sorted(outcome.sizes)
        quartiles = [sizes[round(part * (len(sizes) - 1) / 4)] for part in range(5)]
        return [outcome.steps_per_s, statistics.fmean(sizes), outcome.suspended_frac, *quartiles]

    def timing(self, seed: int) -> GroupTiming:
        return GroupTiming(
            self.n_stages,
            self.n_pipelines,
            self.n_steps,
            self._rule(),
            self.schedule,
            N_MICROBATCHES,
            COMPUTE_S,
            EXCHANGE_S,
            stalls=Stalls(STALL_PROB, self.stall_s, seed, self.draws),
            slow={0: self.slow_times},
        )

    def _rule(self) -> GroupsConfig | ServerTiming:
        rule = RULES[self.system]
        if isinstance(rule, ServerTiming) or rule.match != "window":
            return rule
        changed = dict[str, float | int](window_s=STEP_S / self.n_pipelines)
        if self.n_groups is not None:
            changed["connectivity_groups"] = self.n_groups
        if rule.group_size_max == HALF:
            changed["group_size_max"] = self.n_pipelines // 2
        return replace(rule, **changed)


def gain(one: Pipelines, other: str, results: Results) -> Interval:
    """Throughput of a system divided by that of another one in the same place, seed by seed."""
    beside = replace(one, system=other, n_groups=None)
    return paired_ratio(one.steps_per_s(results), beside.steps_per_s(results))


# --------------------------------------------------------------------------------------------------------- deadlocks


class NoToken(EnforcementToken):
    """Every stage may enforce."""

    def take(self, holder: object) -> bool:
        return True


def random_system(seed: int, schedule: str, draws: str, sends_first: bool) -> GroupTiming:
    """Stages, pipelines, window and P are drawn."""
    rng = random.Random(f"sdpipe system {seed}")
    return GroupTiming(
        n_stages=rng.randint(2, 6),
        n_pipelines=rng.randint(3, 6),
        n_steps=30,
        groups=GroupsConfig(
            match="window", window_s=rng.choice((0.005, 0.02, STEP_S)), connectivity_groups=rng.randint(2, 8)
        ),
        schedule=schedule,
        stalls=Stalls(STALL_PROB, STALL_S, seed, draws),
        sends_first=sends_first,
    )


@dataclass(frozen=True)
class RandomSystems:
    """SYSTEMS_DRAWN random systems, with or without the token."""

    schedule: str
    draws: str
    sends_first: bool
    has_token: bool

    def n_stuck(self, results: Results) -> int:
        return int(results.get(self.job())[0])

    def job(self) -> Job:
        n_works = SYSTEMS_DRAWN * 3_000
        return Job(f"{SYSTEMS_DRAWN} times {described(self)}", n_works, self._n_stuck)

    def _n_stuck(self) -> list[float]:
        token = EnforcementToken if self.has_token else NoToken
        numbers = range(SYSTEMS_DRAWN)
        systems = [random_system(n, self.schedule, self.draws, self.sends_first) for n in numbers]
        return [float(sum(time_groups(system, True, token()).is_stuck for system in systems))]
