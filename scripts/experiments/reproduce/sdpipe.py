"""SDPipe's throughput under stragglers (its Section 5.2) and the sizes of its groups."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from experiments.reproduce.page import bullets, page, table
from experiments.reproduce.results import Job, Results
from experiments.reproduce.sdpipe_parts.systems import (
    ALL,
    COMPUTE_S,
    ENDLESS,
    EXCHANGE_S,
    HETPIPE,
    HETPIPE_SERVERS,
    MANY_PIPELINES,
    MANY_STALLS_S,
    N_MICROBATCHES,
    NONE,
    PAIRS,
    SDPIPE,
    SDPIPE_4N,
    STALL_PROB,
    STALL_S,
    SYSTEMS,
    SYSTEMS_DRAWN,
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


def run(out: Path, origin: str, results: Results) -> str:
    """The text of the page. The picture is written to `out`."""
    results.fill(most_jobs())
    draw(out / "sdpipe.png", results)
    return page(
        "SDPipe Section 5.2: stragglers, and the sizes of groups",
        origin,
        [
            ("Targets", targets(results)),
            ("Throughput over that of all-reduce", "![gains](sdpipe.png)\n\n" + throughput(results)),
            ("Longer stalls", longer_stalls(results)),
            ("P, the groups that connect a stage", connectivity(results)),
            ("A pipeline that is always slow", slow_pipeline(results)),
            ("Sizes of groups: least, quartiles, largest", group_sizes_table(results)),
            ("Deadlocks", deadlocks(results)),
            ("Where ours differs, and why", bullets([out_of_reach(results), *WHY])),
            ("Assumptions", bullets(ASSUMPTIONS)),
            ("Not here", bullets(NOT_YET)),
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
    rows += targets_of_4n(results)
    return table(["what", "target", "ours", "met"], [[*row[:3], "yes" if row[3] else "NO"] for row in rows])


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


def out_of_reach(results: Results) -> str:
    """Sentences that say why the paper's largest gains do not come out."""
    bounds = [
        gain(Pipelines(NONE, n, schedule), ALL, results).mean for schedule in (FLUSH, STASH) for n in MANY_PIPELINES
    ]
    over_pairs = [
        gain(Pipelines(NONE, n, schedule), PAIRS, results).mean for schedule in (FLUSH, STASH) for n in MANY_PIPELINES
    ]
    return (
        "The paper's 4.3 times all-reduce and 2.8 times AD-PSGD are out of reach here: without any averaging the gains "
        f"are {min(bounds):.2f} to {max(bounds):.2f} and {min(over_pairs):.2f} to {max(over_pairs):.2f}, since a "
        "straggler holds up its own pipeline whatever the replicas do."
    )


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


def group_sizes_table(results: Results) -> str:
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
    figure.savefig(path, dpi=80)


WHY = (
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
    f"HetPipe: a server for each stage, all behind one line of 10 Gb/s; a push or a pull of a stage takes "
    f"{1e3 * HETPIPE_SERVERS.transfer_s:g} ms of it, a wave is {HETPIPE_SERVERS.wave} steps, the staleness "
    f"{HETPIPE_SERVERS.staleness}. The earlier simulation had SDPipe at 0.92, 1.57 and 2.98 times HetPipe with stash. "
    "P-Reduce: groups of at most half of the pipelines, nothing enforced.",
    f"Seeds {SEEDS.start} to {SEEDS.stop - 1}; +- is half the width of a 95 % interval (Student's t), seed by seed "
    "for ratios. A run ends when the first pipeline has done its steps (80; 200 for the sizes of groups).",
)
NOT_YET = (
    "The same on the machines of a run in the simulator, with links and an exchange that takes its bytes' time. A test "
    "(tests/sim/test_group_timing.py) holds their gain with 4 pipelines against this one.",
    "Losses: `python scripts/reproduce.py sdpipe_loss` trains a small GPT over the simulated seconds of these systems.",
    "The same stalls with real processes and 4 pipelines: [measured](../sdpipe_measured/README.md).",
)
