"""SDPipe's throughput under stragglers (its Section 5.2) and the sizes of its groups (Figure 9)."""

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.reproduce.page import bullets, page, table
from experiments.reproduce.results import Job, Results, described
from matplotlib.figure import Figure

from jaxdt.runtime.reporting.interval import SEEDS, Interval, interval, paired_ratio
from jaxdt.sim.stragglers.group_timing import FLUSH, STASH, GroupTiming, time_groups
from jaxdt.sim.stragglers.stalls import STEP, WORK, Stalls
from jaxdt.spec.config import GroupsConfig
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
SYSTEMS = (ALL, PAIRS, SDPIPE, SDPIPE_4N, TUMBLING, FIRST_COME, NONE)
MANY_PIPELINES = (4, 8, 16)
MANY_STALLS_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.6)
SCHEDULE_NAMES = {FLUSH: "flush", STASH: "stash"}
EARLIER = {  # gains of SDPipe with P = 10 by number of pipelines, from a simulation written apart from this one
    (FLUSH, ALL): {4: 1.46, 8: 1.65, 16: 1.76},
    (FLUSH, PAIRS): {4: 1.25, 8: 1.29, 16: 1.24},
    (STASH, ALL): {4: 1.37, 8: 1.50, 16: 1.57},
    (STASH, PAIRS): {4: 1.25, 8: 1.20, 16: 1.18},
}
EARLIER_BY_P = {5: (1.43, 0.53), 10: (1.65, 0.29), 32: (1.97, 0.07), ENDLESS: (2.16, 0.0)}
PAPER_FIGURE_9 = {1: (8, 8, 8, 8, 8), 2: (3, 6, 8, 8, 8), 5: (2, 3, 4, 6, 8)}
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
        """Of all pipelines, one value per seed."""
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

    def _values(self, seed: int) -> list[float]:
        outcome = time_groups(self.timing(seed))
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

    def _rule(self) -> GroupsConfig:
        simple = {ALL: "all", PAIRS: "pairs", NONE: "none"}
        if self.system in simple:
            return GroupsConfig(match=simple[self.system])
        n_groups = {SDPIPE: PAPER_GROUPS, TUMBLING: PAPER_GROUPS, SDPIPE_4N: -1, FIRST_COME: ENDLESS}[self.system]
        return GroupsConfig(
            match="window",
            window_s=STEP_S / self.n_pipelines,
            group_size_max=2 if self.system == FIRST_COME else 0,
            connectivity_groups=n_groups if self.n_groups is None else self.n_groups,
            connectivity_window="tumbling" if self.system == TUMBLING else "sliding",
        )


def gain(one: Pipelines, other: str, results: Results) -> Interval:
    """Throughput of a system divided by that of another one in the same place, seed by seed."""
    beside = Pipelines(
        other, one.n_pipelines, one.schedule, one.n_stages, one.stall_s, one.draws, one.slow_times, n_steps=one.n_steps
    )
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


# -------------------------------------------------------------------------------------------------------------- page


def run(out: Path, origin: str, results: Results) -> str:
    """The text of the page. The picture is written to `out`."""
    results.fill(most_jobs())
    draw(out / "sdpipe.png", results)
    return page(
        "SDPipe Section 5.2 and Figure 9: stragglers, and the sizes of groups",
        origin,
        [
            ("Targets", targets(results)),
            ("Throughput over that of all-reduce", "![gains](sdpipe.png)\n\n" + throughput(results)),
            ("Longer stalls", longer_stalls(results)),
            ("P, the groups that connect a stage", connectivity(results)),
            ("A pipeline that is always slow", slow_pipeline(results)),
            ("Sizes of groups (Figure 9): least, quartiles, largest", figure_9(results)),
            ("Deadlocks", deadlocks(results)),
            ("Where ours differs, and why", bullets(WHY)),
            ("Assumptions", bullets(ASSUMPTIONS)),
            ("Not here yet", bullets(NOT_YET)),
        ],
    )


def most_jobs() -> list[Job]:
    """All but the smallest tables' jobs, to be computed side by side."""
    places = itertools.product(SYSTEMS, MANY_PIPELINES, (FLUSH, STASH), SEEDS)
    systems = itertools.product((FLUSH, STASH), (WORK, STEP), (True, False), (True, False))
    jobs = [Pipelines(system, n, schedule).job(seed) for system, n, schedule, seed in places]
    return jobs + [RandomSystems(*system).job() for system in systems]


def targets(results: Results) -> str:
    """Orders and ranges that must hold, and whether they do."""
    flush = [Pipelines(SDPIPE, n) for n in MANY_PIPELINES]
    gains = [gain(place, ALL, results).mean for place in flush]
    over_pairs = [gain(place, PAIRS, results).low for place in flush]
    pairs = [gain(Pipelines(PAIRS, n), ALL, results).low for n in MANY_PIPELINES]
    by_stall = [gain(Pipelines(SDPIPE, 8, stall_s=s), ALL, results).mean for s in MANY_STALLS_S]
    rows = [
        ["SDPipe (P = 10) over all-reduce, flush", "1.3 to 2.4", listed(gains), all(1.3 < g < 2.4 for g in gains)],
        near_earlier(results, FLUSH, ALL, 0.05),
        near_earlier(results, FLUSH, PAIRS, 0.05),
        near_earlier(results, STASH, ALL, 0.1),
        near_earlier(results, STASH, PAIRS, 0.1),
        ["SDPipe is faster than pairs by step", "> 1 (95 %)", listed(over_pairs), min(over_pairs) > 1],
        ["pairs by step are faster than all-reduce", "> 1 (95 %)", listed(pairs), min(pairs) > 1],
        ["the gain grows with the pipelines", "4, 8, 16", listed(gains), gains == sorted(gains)],
        ["the gain grows with the stall", "0 to 0.6 s", listed(by_stall), by_stall == sorted(by_stall)],
        ["no gain without stalls", "1.00", f"{by_stall[0]:.3f}", abs(by_stall[0] - 1) < 0.005],
    ]
    return table(["what", "target", "ours", "met"], [[*row[:3], "yes" if row[3] else "NO"] for row in rows])


def listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def near_earlier(results: Results, schedule: str, other: str, most: float) -> list:
    """A row of targets: SDPipe's gain over another system is that of the earlier simulation."""
    earlier = [EARLIER[schedule, other][n] for n in MANY_PIPELINES]
    gains = [gain(Pipelines(SDPIPE, n, schedule), other, results).mean for n in MANY_PIPELINES]
    apart = [now / before - 1 for now, before in zip(gains, earlier, strict=True)]
    what = f"SDPipe over {other}, {SCHEDULE_NAMES[schedule]}: the earlier simulation's, within {100 * most:g} %"
    met = all(abs(share) <= most for share in apart)
    return [what, listed(earlier), ", ".join(f"{100 * share:+.1f} %" for share in apart), met]


def throughput(results: Results) -> str:
    rows = []
    for schedule in (FLUSH, STASH):
        for n in MANY_PIPELINES:
            gains = [gain(Pipelines(system, n, schedule), ALL, results) for system in SYSTEMS[1:]]
            barrier = interval(Pipelines(ALL, n, schedule).steps_per_s(results))
            size, suspended_frac = Pipelines(SDPIPE, n, schedule).groups(results)
            rows.append([SCHEDULE_NAMES[schedule], n, barrier, *gains, f"{size:.1f}", f"{suspended_frac:.2f}"])
    often = [gain(Pipelines(system, 8, draws=WORK), ALL, results) for system in SYSTEMS[1:]]
    barrier = interval(Pipelines(ALL, 8, draws=WORK).steps_per_s(results))
    size, suspended_frac = Pipelines(SDPIPE, 8, draws=WORK).groups(results)
    rows.append(["flush, a draw at every Work", 8, barrier, *often, f"{size:.1f}", f"{suspended_frac:.2f}"])
    head = ["schedule", "pipelines N", "all-reduce, steps/s", *SYSTEMS[1:], "group, P = 10", "suspended, P = 10"]
    return table(head, rows) + (
        "\nThe last columns are the mean size of a group and the share of groups that should have connected their "
        "stage and were let go, both with P = 10. A draw at every Work, as in the paper's public code, gives eight a "
        "step here; there the order of the systems is another one.\n"
    )


def longer_stalls(results: Results) -> str:
    rows = []
    for stall_s in MANY_STALLS_S:
        place = Pipelines(SDPIPE, 8, stall_s=stall_s)
        others = [gain(Pipelines(system, 8, stall_s=stall_s), ALL, results) for system in (SDPIPE_4N, NONE)]
        rows.append([stall_s, gain(place, ALL, results), gain(place, PAIRS, results), *others])
    head = ["stall, s", f"{SDPIPE} over all-reduce", f"{SDPIPE} over pairs", f"{SDPIPE_4N} over all-reduce", NONE]
    return table(head, rows)


def connectivity(results: Results) -> str:
    rows = []
    for n_groups, (earlier, earlier_frac) in EARLIER_BY_P.items():
        place = Pipelines(SDPIPE, 8, n_groups=n_groups)
        suspended_frac = place.groups(results)[1]
        name = n_groups or "not enforced"
        rows.append([name, gain(place, ALL, results), earlier, f"{suspended_frac:.2f}", f"{earlier_frac:.2f}"])
    return table(["P", "over all-reduce", "earlier simulation", "suspended", "earlier simulation"], rows)


def slow_pipeline(results: Results) -> str:
    rows = []
    for times in (2.0, 4.0):
        for schedule in (FLUSH, STASH):
            speeds = [
                interval(Pipelines(system, 4, schedule, stall_s=0.0, slow_times=times).steps_per_s(results)).mean
                for system in SYSTEMS
            ]
            rows.append([f"{times:g} x, {SCHEDULE_NAMES[schedule]}", *speeds])
    return table(["one of 4 pipelines, steps/s of all", *SYSTEMS], rows)


def figure_9(results: Results) -> str:
    rows = []
    for n_groups, paper in PAPER_FIGURE_9.items():
        ours = [
            Pipelines(system, 8, STASH, n_stages=1, n_groups=n_groups, n_steps=200).sizes(results)
            for system in (SDPIPE, TUMBLING)
        ]
        rows.append([n_groups, *(" / ".join(f"{size:g}" for size in sizes) for sizes in (paper, *ours))])
    return table(["P", "paper", "ours, sliding", "ours, tumbling"], rows)


def deadlocks(results: Results) -> str:
    rows = []
    for schedule, draws, sends_first in itertools.product((FLUSH, STASH), (WORK, STEP), (True, False)):
        stuck = [RandomSystems(schedule, draws, sends_first, has).n_stuck(results) for has in (True, False)]
        where = "each Work" if draws == WORK else "the first forward of a step"
        order = "sends the gradient first" if sends_first else "averages first"
        rows.append([SCHEDULE_NAMES[schedule], where, order, *stuck])
    head = ["schedule", "stalls before", "a replica", "stuck with the token", "stuck without"]
    return f"Of {SYSTEMS_DRAWN} random systems each:\n\n" + table(head, rows)


def draw(path: Path, results: Results) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for system in SYSTEMS[1:]:
        means = [gain(Pipelines(system, n), ALL, results).mean for n in MANY_PIPELINES]
        left.plot(MANY_PIPELINES, means, "o-", label=system, ms=4)
    left.set(
        xscale="log", xlabel="pipelines", ylabel="throughput over all-reduce", title="4 stages, flush, 0.3 s stalls"
    )
    left.set_xticks(MANY_PIPELINES, [str(n) for n in MANY_PIPELINES])
    left.minorticks_off()
    left.legend(fontsize=8)
    for system in (SDPIPE, SDPIPE_4N, NONE):
        means = [gain(Pipelines(system, 8, stall_s=s), ALL, results).mean for s in MANY_STALLS_S]
        right.plot(MANY_STALLS_S, means, "o-", label=system, ms=4)
    right.set(xlabel="stall, s", ylabel="throughput over all-reduce", title="8 pipelines, flush")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=80)


WHY = (
    "The paper's 4.3 times all-reduce and 2.8 times AD-PSGD are out of reach here: even without any averaging the gain "
    "is the last column, since a straggler holds up its own pipeline whatever the replicas do.",
    "Which AD-PSGD decides the order. Pairs by step, as in the paper's public code, are slower than SDPipe; "
    "first-come pairs are faster than it, and promise less: nothing connects the replicas.",
    "With P = 10 many groups are suspended where there are many pipelines: P groups of mean size g can connect N "
    "replicas only if P (g - 1) >= N - 1. With P = 4N hardly any are.",
    "Stalls before forwards alone get no system stuck that sends the gradient before it averages, with or without the "
    "token: such a test of the token would show nothing.",
    "P = 1 means groups of all at every stage, so it runs as all-reduce.",
)
ASSUMPTIONS = (
    "The matchers that a run uses (jaxdt.sync.matching) decide the groups. Around them is a bare event simulation "
    "(jaxdt.sim.stragglers.group_timing) of Work, waits and groups: no network, no machines of peers, no arithmetic.",
    f"4 stages; {1e3 * COMPUTE_S:g} ms of compute a step and stage, a third of it forward; {1e3 * EXCHANGE_S:g} ms for "
    "an average of two or more, none for a group of one; the scheduler answers at once.",
    f"Flush: 1F1B with {N_MICROBATCHES} microbatches a step. Stash: PipeDream's order, a microbatch a step. The "
    "gradient goes upstream before a replica averages.",
    f"Each peer stalls with probability {STALL_PROB:g} for {STALL_S:g} s before the first forward of a step, unless a "
    "table says otherwise. T = step / N at first, adapted as in the paper.",
    f"Seeds {SEEDS.start} to {SEEDS.stop - 1}; +- is half the width of a 95 % interval (Student's t), seed by seed "
    "for ratios. A run ends when the first pipeline has done its steps (80; 200 for Figure 9).",
)
NOT_YET = (
    "The same on the machines of a run in the simulator, with links and an exchange that takes its bytes' time. A test "
    "(tests/sim/test_group_timing.py) holds their gain with 4 pipelines against this one.",
    "HetPipe, whose parameter servers do not exist here yet; time to a loss; the optimizer ablation.",
)
