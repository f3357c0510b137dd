"""SDPipe's throughput under stragglers (its Section 5.2) and the sizes of its groups."""

import itertools
from collections.abc import Sequence
from typing import Any

from experiments.reproduce import sdpipe_systems
from experiments.reproduce.results import Job, Results
from experiments.reproduce.sdpipe_systems import (
    ALL,
    ENDLESS,
    HETPIPE,
    MANY_PIPELINES,
    MANY_STALLS_S,
    NONE,
    PAIRS,
    SDPIPE,
    SDPIPE_4N,
    SYSTEMS,
    TUMBLING,
    Pipelines,
    RandomSystems,
    gain,
)
from matplotlib.figure import Figure

from jaxdt.runtime.reporting.interval import SEEDS, interval
from jaxdt.sim.stragglers.group_timing import FLUSH, STASH
from jaxdt.sim.stragglers.stalls import STEP, WORK

SCHEDULE_NAMES = {FLUSH: "flush", STASH: "stash"}
EARLIER = {  # gains of SDPipe with P = 10 by number of pipelines, from a simulation written apart from this one
    (FLUSH, ALL): {4: 1.46, 8: 1.65, 16: 1.76},
    (FLUSH, PAIRS): {4: 1.25, 8: 1.29, 16: 1.24},
    (STASH, ALL): {4: 1.37, 8: 1.50, 16: 1.57},
    (STASH, PAIRS): {4: 1.25, 8: 1.20, 16: 1.18},
}
EARLIER_BY_P = {5: (1.43, 0.53), 10: (1.65, 0.29), 32: (1.97, 0.07), ENDLESS: (2.16, 0.0)}
PAPER_FIGURE_9 = {1: (8, 8, 8, 8, 8), 2: (3, 6, 8, 8, 8), 5: (2, 3, 4, 6, 8)}


# -------------------------------------------------------------------------------------------------------------- page


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    results.fill(most_jobs())
    return dict(
        pictures={"sdpipe.png": draw(results)},
        sdpipe_systems=sdpipe_systems,
        **targets(results),
        **out_of_reach(results),
        SEEDS=SEEDS,
    )


def most_jobs() -> list[Job]:
    """All but the smallest tables' jobs, to be computed side by side."""
    places = itertools.product(SYSTEMS, MANY_PIPELINES, (FLUSH, STASH), SEEDS)
    systems = itertools.product((FLUSH, STASH), (WORK, STEP), (True, False), (True, False))
    jobs = [Pipelines(system, n, schedule).job(seed) for system, n, schedule, seed in places]
    return jobs + [RandomSystems(*system).job() for system in systems]


def targets(results: Results) -> dict[str, Any]:
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
    rows += targets_of_4n(results)
    return dict(targets_rows=rows)


def targets_of_4n(results: Results) -> list[list]:
    """Targets for the same orders with P = 4N, and for the orders over HetPipe."""
    gains = [gain(Pipelines(SDPIPE_4N, n), ALL, results).mean for n in MANY_PIPELINES]
    by_stall = [gain(Pipelines(SDPIPE_4N, 8, stall_s=s), ALL, results).mean for s in MANY_STALLS_S]
    over_servers = [
        [gain(Pipelines(SDPIPE, n, schedule), HETPIPE, results).mean for n in MANY_PIPELINES]
        for schedule in (FLUSH, STASH)
    ]
    return [
        ["SDPipe (P = 4N) over all-reduce, flush", "1.3 to 2.4", listed(gains), all(1.3 < g < 2.4 for g in gains)],
        ["its gain grows with the pipelines", "4, 8, 16", listed(gains), gains == sorted(gains)],
        ["its gain grows with the stall", "0 to 0.6 s", listed(by_stall), by_stall == sorted(by_stall)],
        *(
            [
                f"SDPipe (P = 10) over HetPipe grows with the pipelines, {SCHEDULE_NAMES[schedule]}",
                "4, 8, 16",
                listed(g),
                g == sorted(g),
            ]
            for schedule, g in zip((FLUSH, STASH), over_servers, strict=True)
        ),
    ]


def out_of_reach(results: Results) -> dict[str, Any]:
    """The gains without any averaging, which bound all others."""
    bounds = [
        gain(Pipelines(NONE, n, schedule), ALL, results).mean for schedule in (FLUSH, STASH) for n in MANY_PIPELINES
    ]
    over_pairs = [
        gain(Pipelines(NONE, n, schedule), PAIRS, results).mean for schedule in (FLUSH, STASH) for n in MANY_PIPELINES
    ]
    return dict(bounds=bounds, over_pairs=over_pairs)


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


def throughput(results: Results) -> list[list]:
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

    return rows


def longer_stalls(results: Results) -> list[list]:
    rows = []
    for stall_s in MANY_STALLS_S:
        place = Pipelines(SDPIPE, 8, stall_s=stall_s)
        others = [gain(Pipelines(system, 8, stall_s=stall_s), ALL, results) for system in (SDPIPE_4N, NONE)]
        rows.append([stall_s, gain(place, ALL, results), gain(place, PAIRS, results), *others])

    return rows


def connectivity(results: Results) -> list[list]:
    rows = []
    for n_groups, (earlier, earlier_frac) in EARLIER_BY_P.items():
        place = Pipelines(SDPIPE, 8, n_groups=n_groups)
        suspended_frac = place.groups(results)[1]
        name = n_groups or "not enforced"
        rows.append([name, gain(place, ALL, results), earlier, f"{suspended_frac:.2f}", f"{earlier_frac:.2f}"])
    return rows


def slow_pipeline(results: Results) -> list[list]:
    rows = []
    for times in (2.0, 4.0):
        for schedule in (FLUSH, STASH):
            speeds = [
                interval(Pipelines(system, 4, schedule, stall_s=0.0, slow_times=times).steps_per_s(results)).mean
                for system in SYSTEMS
            ]
            rows.append([f"{times:g} x, {SCHEDULE_NAMES[schedule]}", *speeds])
    return rows


def group_sizes_table(results: Results) -> list[list]:
    rows = []
    for n_groups, paper in PAPER_FIGURE_9.items():
        ours = [
            Pipelines(system, 8, STASH, n_stages=1, n_groups=n_groups, n_steps=200).sizes(results)
            for system in (SDPIPE, TUMBLING)
        ]
        rows.append([n_groups, *(" / ".join(f"{size:g}" for size in sizes) for sizes in (paper, *ours))])
    return rows


def deadlocks(results: Results) -> list[list]:
    rows = []
    for schedule, draws, sends_first in itertools.product((FLUSH, STASH), (WORK, STEP), (True, False)):
        stuck = [RandomSystems(schedule, draws, sends_first, has).n_stuck(results) for has in (True, False)]
        where = "each Work" if draws == WORK else "the first forward of a step"
        order = "sends the gradient first" if sends_first else "averages first"
        rows.append([SCHEDULE_NAMES[schedule], where, order, *stuck])

    return rows


def draw(results: Results) -> Figure:
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for system in SYSTEMS[1:]:
        means = [gain(Pipelines(system, n), ALL, results).mean for n in MANY_PIPELINES]
        left.plot(MANY_PIPELINES, means, "o-", label=system, ms=4)
    left.set(
        xscale="log", xlabel="pipelines", ylabel="throughput over all-reduce", title="4 stages, flush, 0.3 s stalls"
    )
    left.set_xticks(MANY_PIPELINES, [str(n) for n in MANY_PIPELINES])
    left.minorticks_off()
    left.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))  # it would hide lines
    for system in (SDPIPE, SDPIPE_4N, NONE):
        means = [gain(Pipelines(system, 8, stall_s=s), ALL, results).mean for s in MANY_STALLS_S]
        right.plot(MANY_STALLS_S, means, "o-", label=system, ms=4)
    right.set(xlabel="stall, s", ylabel="throughput over all-reduce", title="8 pipelines, flush")
    right.legend(fontsize=8)
    return figure
