"""DT-FM's Figure 3: GPT3-1.3B on 64 V100 in five networks, compared with a Megatron-like baseline and random
placement, as assumed before and with equal options for all."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.reproduce.dtfm_parts import cost as dtfm_cost
from experiments.reproduce.dtfm_parts.cost import RANDOM, SEEDS, Costs, cost_table
from experiments.reproduce.dtfm_parts.systems import (
    CASES,
    EFFICIENCIES,
    EFFICIENCY,
    FLOPS,
    LONG,
    SHORT,
    SLICE_BYTES,
    Options,
    Placement,
    System,
    Times,
    job,
    memory_gb,
    model_of,
    network_of,
    times,
)
from experiments.reproduce.page import bullets, page, table
from experiments.reproduce.results import Results
from matplotlib.figure import Figure

LAYERS, BATCHES = (24, 32, 40), (1024, 2048, 4096)
THEIRS, OURS = Options(overlap=False, depth=1), Options(overlap=True, depth=4)
GRID = tuple(Options(overlap, depth) for overlap in (False, True) for depth in (1, 4))
DEPTHS = (1, 2, 4, 8)
MEGATRON = ("rows 8 x 8", "rows 4 x 16")  # ranks as listed: stage s on the s-th run of devices
PLANS = (*MEGATRON, "block 8 x 8", "block 4 x 16", "planner 8 x 8", "planner 4 x 16")
WORLD = "5 worldwide"
CHECKED = 4096  # samples of the steps that check the line


@dataclass(frozen=True)
class Key:
    """A system by its names."""

    case: str
    n_layers: int
    plan: str
    options: Options
    efficiency: float = EFFICIENCY


class Steps:
    """The times of all systems. A step is that of the best of some plans at one setting."""

    def __init__(self, found: dict[Key, Times]):
        self.found = found

    def best(self, key: Key, plans: Sequence[str], batch: int) -> tuple[float, str]:
        """(seconds, plan) of the fastest of `plans`, otherwise as in the key."""
        return min((self.step_s(key, plan, batch), plan) for plan in plans)

    def best_s(self, key: Key, plans: Sequence[str], batch: int) -> float:
        return self.best(key, plans, batch)[0]

    def step_s(self, key: Key, plan: str, batch: int) -> float:
        return self.found[Key(key.case, key.n_layers, plan, key.options, key.efficiency)].step_s(batch)

    def random_s(self, key: Key, batch: int) -> float:
        """Mean over the random placements."""
        return statistics.fmean(self.step_s(key, plan, batch) for plan in RANDOM)


def key_of(case: str, options: Options, n_layers: int = 24) -> Key:
    return Key(case, n_layers, "", options)


def all_keys() -> list[Key]:
    """The keys of all simulations: at 24 layers all plans with all options, else those that Figure 3 needs."""
    keys = []
    for case in CASES:
        for n_layers in LAYERS:
            wanted = dict.fromkeys((plan, OURS) for plan in (*PLANS, "published", *RANDOM))
            wanted |= dict.fromkeys((plan, THEIRS) for plan in MEGATRON)
            if n_layers == 24:
                options = dict.fromkeys((*GRID, *(Options(True, depth) for depth in DEPTHS)))
                wanted |= dict.fromkeys((plan, option) for option in options for plan in PLANS)
            keys += [Key(case, n_layers, plan, option) for plan, option in wanted]
    for efficiency in EFFICIENCIES:
        keys += [Key(WORLD, 24, plan, THEIRS, efficiency) for plan in MEGATRON]
        keys += [Key(WORLD, 24, plan, OURS, efficiency) for plan in PLANS]
    return list(dict.fromkeys(keys))


Plans = dict[str, dict[str, Placement]]  # by case and name


def system_of(plans: Plans, key: Key) -> System:
    return System(network_of(key.case), key.n_layers, plans[key.case][key.plan], key.options, key.efficiency)


def run(out: Path, origin: str, results: Results) -> str:
    """The text of the page. The picture is written to `out`."""
    results.fill([make(case) for case in CASES for make in (dtfm_cost.job, dtfm_cost.seeds_job)])
    seeds = dtfm_cost.seeds_sentence([results.get(dtfm_cost.seeds_job(case)) for case in CASES])
    found = {case: dtfm_cost.decoded(results.get(dtfm_cost.job(case))) for case in CASES}
    plans = {case: placements for case, (placements, _) in found.items()}
    checked = [Key(WORLD, 24, plan, option) for plan in PLANS for option in (THEIRS, OURS)]
    jobs = {(key, batch): job(key.case, system_of(plans, key), batch) for key in all_keys() for batch in (SHORT, LONG)}
    jobs |= {(key, CHECKED): job(key.case, system_of(plans, key), CHECKED) for key in checked}
    results.fill(jobs.values())
    step_s = {name: results.get(one)[0] for name, one in jobs.items()}
    steps = Steps({key: times(step_s[key, SHORT], step_s[key, LONG]) for key in all_keys()})
    off = max(abs(steps.found[key].step_s(CHECKED) / step_s[key, CHECKED] - 1) for key in checked)
    most_gb = max(memory_gb(system_of(plans, Key(WORLD, 40, plan, OURS))) for plan in PLANS)
    draw(out / "dtfm.png", steps)
    return text_of(origin, {case: costs for case, (_, costs) in found.items()}, steps, assumptions(off, most_gb, seeds))


def text_of(origin: str, costs: dict[str, Costs], steps: Steps, assumed: Sequence[str]) -> str:
    """The page. `assumed`: what `assumptions` returns."""
    split = table(SPLIT_HEAD, split_rows(steps)) + "\n" + bullets(split_sentences(steps))
    sections = [
        ("COMM-COST of Eq. 1-4, seconds (grade A: exact)", cost_table(costs)),
        ("Equal options: seconds of a step, 24 layers, batch 1024", table(GRID_HEAD, grid_rows(steps))),
        ("Where the gain comes from, 24 layers, batch 1024", split),
        ("Depth: seconds of our step with overlap, 24 layers, batch 1024", depth_section(steps)),
        ("The paper's claims and ours", table(CLAIM_HEAD, claims(steps))),
        ("PFLOPS", "![PFLOPS of five systems](dtfm.png)\n\n" + table(PFLOPS_HEAD, pflops_rows(steps))),
        ("Case 5 at other efficiencies, 24 layers, batch 1024, seconds", table(EFFICIENCY_HEAD, efficiency(steps))),
        ("Where ours differs, and why", bullets((*WHY, *trends(steps)))),
        ("Assumptions", bullets(assumed)),
        ("Not modelled", bullets(NOT_MODELLED)),
    ]
    return page("DT-FM Figure 3: GPT3-1.3B on 64 V100, five networks", origin, sections)


# ------------------------------------------------------------------------------------------------------------- tables

GRID_HEAD = ["case", "options", *MEGATRON, "ours", "ours is", "best rows over ours"]
SPLIT_HEAD = ["case", "Megatron-like, s", "depth", "overlap", "overlap first", "then depth", "placement", "ours, s"]
CLAIM_HEAD = ["figure", "paper", "Megatron-like blocks, depth 1", "equal options", "grade"]
PFLOPS_HEAD = ["case", "layers", "batch", "Megatron-like", "rows, our options", "random, 8 x 8 alone"]
PFLOPS_HEAD += ["DT-FM's search, 8 x 8 alone", "ours"]
EFFICIENCY_HEAD = ["efficiency", "Megatron-like", "rows, our options", "ours", "over Megatron-like", "equal options"]


def grid_rows(steps: Steps) -> list[list]:
    """One row for each case and options: both rank orders, and the best of all plans."""
    rows = []
    for case in CASES:
        for options in GRID:
            key = key_of(case, options)
            listed = [steps.step_s(key, plan, 1024) for plan in MEGATRON]
            ours_s, name = steps.best(key, PLANS, 1024)
            rows.append([case, str(options), *listed, ours_s, name, min(listed) / ours_s])
    return rows


def factors(steps: Steps, case: str) -> list[float]:
    """How much faster: by depth, then by overlap; by overlap, then by depth; then by placement. Ratios of steps."""

    def rows_s(overlap: bool, depth: int) -> float:
        return steps.best_s(key_of(case, Options(overlap, depth)), MEGATRON, 1024)

    base_s, both_s = rows_s(False, 1), rows_s(True, 4)
    ours_s = steps.best_s(key_of(case, OURS), PLANS, 1024)
    deep_s, overlapped_s = rows_s(False, 4), rows_s(True, 1)
    return [base_s / deep_s, deep_s / both_s, base_s / overlapped_s, overlapped_s / both_s, both_s / ours_s]


def split_rows(steps: Steps) -> list[list]:
    rows = []
    for case in CASES:
        base_s = steps.best_s(key_of(case, THEIRS), MEGATRON, 1024)
        ours_s = steps.best_s(key_of(case, OURS), PLANS, 1024)
        rows.append([case, base_s, *factors(steps, case), ours_s])
    return rows


def split_sentences(steps: Steps) -> list[str]:
    by_case = {case: factors(steps, case) for case in CASES}
    placement = {case: found[-1] for case, found in by_case.items()}
    most = max(placement, key=placement.__getitem__)
    n_little = sum(value < 1.05 for value in placement.values())
    return [
        "Columns are ratios of steps. Depth times overlap, in either order, times placement is the whole ratio of "
        "Megatron-like (blocking, depth 1) to ours (overlap, depth 4). Both are the best of their plans at 8 x 8 and "
        "4 x 16.",
        f"With equal options, placement gains most in case {most}: {placement[most]:.2f} times as fast. In {n_little} "
        f"of {len(CASES)} cases it gains less than 5 %. Ours may take either rank order, so it cannot lose.",
    ]


def depth_section(steps: Steps) -> str:
    """Our step at each depth, and which depth is the best where."""
    rows = []
    best = {}
    for case in CASES:
        seconds = {depth: steps.best_s(key_of(case, Options(True, depth)), PLANS, 1024) for depth in DEPTHS}
        best[case] = min(seconds, key=seconds.__getitem__)
        rows.append([case, *seconds.values(), best[case], f"{seconds[4] / seconds[best[case]] - 1:.2%}"])
    head = ["case", *(f"depth {depth}" for depth in DEPTHS), "best", "depth 4 over it"]
    count = {depth: list(best.values()).count(depth) for depth in DEPTHS}
    where = ", ".join(f"depth {depth} in {n}" for depth, n in count.items() if n)
    return table(head, rows) + f"\nThe best of {', '.join(map(str, DEPTHS))}: {where} of {len(CASES)} cases.\n"


def pflops(n_layers: int, batch: int, step_s: float) -> float:
    """The paper's metric: 6 FLOP per parameter and token, without recomputation."""
    model = model_of(n_layers)
    return model.facts.train_flops(batch * model.max_len) / step_s / 1e15


def systems(steps: Steps, case: str, n_layers: int, batch: int) -> list[float]:
    """Seconds of a step of the systems of the picture, in the order of their names."""
    theirs, ours = key_of(case, THEIRS, n_layers), key_of(case, OURS, n_layers)
    return [
        steps.best_s(theirs, MEGATRON, batch),
        steps.best_s(ours, MEGATRON, batch),
        steps.random_s(ours, batch),
        steps.step_s(ours, "published", batch),
        steps.best_s(ours, PLANS, batch),
    ]


def pflops_rows(steps: Steps) -> list[list]:
    rows = []
    for case in CASES:
        for n_layers in LAYERS:
            for batch in BATCHES:
                seconds = systems(steps, case, n_layers, batch)
                rows.append([case, n_layers, batch, *(pflops(n_layers, batch, s) for s in seconds)])
    return rows


def efficiency(steps: Steps) -> list[list]:
    rows = []
    for part in EFFICIENCIES:
        theirs, ours = (Key(WORLD, 24, "", options, part) for options in (THEIRS, OURS))
        base_s = steps.best_s(theirs, MEGATRON, 1024)
        equal_s, ours_s = (steps.best_s(ours, plans, 1024) for plans in (MEGATRON, PLANS))
        rows.append([part, base_s, equal_s, ours_s, base_s / ours_s, equal_s / ours_s])
    return rows


# ------------------------------------------------------------------------------------------------------------- claims

SETTINGS = [(n_layers, batch) for n_layers in LAYERS for batch in BATCHES]


def span(values: Iterable[float]) -> str:
    values = list(values)
    return f"{min(values):.2f} to {max(values):.2f}"


def over_rows(steps: Steps, case: str, options: Options) -> list[float]:
    """The step of the better rank order with these options over ours, for all layers and batches."""
    found = []
    for n_layers, batch in SETTINGS:
        rows_s = steps.best_s(key_of(case, options, n_layers), MEGATRON, batch)
        found.append(rows_s / steps.best_s(key_of(case, OURS, n_layers), PLANS, batch))
    return found


def gaps(steps: Steps, base: str, options: Options) -> list[list[float]]:
    """Ours in case 5 over the better rank order in case 1, by layers and batch."""
    return [
        [
            steps.best_s(key_of(WORLD, OURS, n_layers), PLANS, batch)
            / steps.best_s(key_of(base, options, n_layers), MEGATRON, batch)
            for batch in BATCHES
        ]
        for n_layers in LAYERS
    ]


def falls(values: Sequence[float]) -> bool:
    return list(values) == sorted(values, reverse=True)


def shrinks(steps: Steps, options: Options, by_layers: bool) -> str:
    """Whether the gap to case 1 shrinks, with the bandwidths of its file and of the text."""
    words = []
    for name, base in (("file", "1 data centre"), ("text", "1, text")):
        rows = gaps(steps, base, options)
        lines = list(zip(*rows, strict=True)) if by_layers else rows
        words.append(f"{name}: {'yes' if all(falls(line) for line in lines) else 'no'}")
    return ", ".join(words)


def claims(steps: Steps) -> list[list]:
    """Rows of the table of claims: the printed ratios and ours, over all layers and batches."""
    near = [case for case in CASES if case != WORLD]
    both = (THEIRS, OURS)
    gain = max(
        steps.random_s(key_of(case, OURS, n), batch) / steps.best_s(key_of(case, OURS, n), PLANS, batch)
        for case in CASES
        for n, batch in SETTINGS
    )
    others = [span(ratio for case in near for ratio in over_rows(steps, case, options)) for options in both]
    rows = [
        ["case 5 over Megatron", "4.8x (elsewhere 3.8-4.8x)"] + [span(over_rows(steps, WORLD, o)) for o in both],
        ["case 5 over DeepSpeed", "3.6x", "not modelled", "not modelled"],
        ["cases 1-4 over Megatron and DeepSpeed", "1.2-2.5x", *others],
    ]
    for name, base in (("file", "1 data centre"), ("text", "1, text")):
        cells = [span(gap for row in gaps(steps, base, options) for gap in row) for options in both]
        rows.append([f"case 5 slower than Megatron in case 1 ({name})", "1.7-3.5x; Sec. 4 opens with 1.7-2.3x", *cells])
    rows += [
        ["scheduler over random (random at 8 x 8 alone), any case", "up to 2.7x", "-", f"up to {gain:.2f}x"],
        ["larger batch: gap to case 1 shrinks", "yes", *(shrinks(steps, options, False) for options in both)],
        ["more layers: gap to case 1 shrinks", "yes", *(shrinks(steps, options, True) for options in both)],
    ]
    return [[*row, grade] for row, grade in zip(rows, "BBBCCBAA", strict=True)]


def trends(steps: Steps) -> list[str]:
    """Sentences about the gap to case 1."""
    words = []
    for name, base in (("file", "1 data centre"), ("text", "1, text")):
        for about, options in (("Megatron-like", THEIRS), ("equal options", OURS)):
            column = ", ".join(f"{row[0]:.2f}" for row in gaps(steps, base, options))
            words.append(f"{column} ({name}, {about})")
    layers = ", ".join(map(str, LAYERS))
    return [
        f"Ours in case 5 over the baseline in case 1 at batch 1024, for {layers} layers: {'; '.join(words)}.",
    ]


def draw(path: Path, steps: Steps) -> None:
    batches = (BATCHES[0], BATCHES[-1])
    figure = Figure(figsize=(15, 7), layout="constrained")
    panels = figure.subplots(len(batches), len(LAYERS), sharey=True)
    names = PFLOPS_HEAD[3:]
    for line, batch in zip(panels, batches, strict=True):
        for axes, n_layers in zip(line, LAYERS, strict=True):
            for x, case in enumerate(CASES):
                for i, seconds in enumerate(systems(steps, case, n_layers, batch)):
                    label = names[i] if x == 0 else None
                    height = pflops(n_layers, batch, seconds)
                    axes.bar(x + 0.16 * (i - 2), height, width=0.16, color=f"C{i}", label=label)
            ticks = [case.split()[0].rstrip(",") + (" text" if "text" in case else "") for case in CASES]
            axes.set_xticks(range(len(CASES)), ticks)
            axes.set(title=f"{n_layers} layers, batch {batch}", xlabel="case")
        line[0].set_ylabel("PFLOPS")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(names))
    figure.savefig(path, dpi=80)


# -------------------------------------------------------------------------------------------------------------- words

WHY = (
    "COMM-COST orders plans by communication alone. Simulated steps overlap hops of different microbatches, and the "
    "exchange of each pair of replicas runs on links of its own, so ratios of steps are not ratios of COMM-COST.",
    "How the paper's Megatron and DeepSpeed overlap and place is not published: the baseline's ratio is the least "
    "certain figure here. Megatron-like charges a transfer, latency included, to its sender and to nobody else; the "
    'columns "equal options" give it the overlap and the depth of ours.',
    "The paper's order is GPipe's. It is not used here: our last stage fuses its forward into its backward, and under "
    "GPipe it would idle while the others run forwards. 1F1B with more in flight does the same without that loss.",
    "In the paper's text of cases 1 and 2 links are so fast that placement hardly matters.",
    "Every pair of devices has a link of its own here, also in case 5, which favours case 5 over the printed figures.",
    "Cases 1 and 2 differ by a factor of 8 between text and files (gigabytes read as gigabits): both are shown.",
)
NOT_MODELLED = (
    "DeepSpeed; tensor parallelism and ZeRO-3 of the baselines, offloading, fp16 loss scaling.",
    "An access link shared by a machine's devices; jitter; TCP's slow start.",
)


def assumptions(off: float, most_gb: float, seeds: str) -> list[str]:
    """`off`: the largest relative error of the line; `most_gb`: the most gigabytes that a device holds; `seeds`: what
    those of the planner change."""
    return [
        f"V100: {FLOPS / 1e12:g} TFLOP/s peak, of which {EFFICIENCY:g} is reached (25 to 45 % is plausible for fp16; "
        "case 5 is shown over that range). No constant was tuned to the paper's figures.",
        "Layers only, as the published scheduler counts: next to no vocabulary, so embedding and head cost nothing.",
        "Recomputation of each layer in the backward; fp16 boundaries, fp32 gradients, microbatches of one sequence.",
        f"Megatron-like: plain 1F1B, a peer computes nothing while it sends, ranks as listed (stage s on the s-th run "
        f"of devices), the better of {' and '.join(name.removeprefix('rows ') for name in MEGATRON)} stages x "
        "pipelines. All other systems: transfers beside computation, 1F1B with "
        f"{OURS.depth} times its usual depth, so that latency is hidden as it is under the paper's GPipe order.",
        "Ours: the fastest in simulation, at each setting, of rows, block and the planner's plan (by COMM-COST at the "
        "published sizes) in both shapes. DT-FM's search: the plan of the median of its runs, at 8 x 8.",
        f"At {OURS.depth} times the depth and 40 layers a device holds at most {most_gb:.1f} GB; a V100 has 16 or 32.",
        f"Steps of {SHORT} and {LONG} samples are simulated, others lie on the line through them: at {CHECKED} samples "
        f"in case 5 the line is off by {off:.1%} at most. Slices of {SLICE_BYTES >> 20} MiB (the runtime's default is "
        "4) keep the number of messages low.",
        f"Seeds {SEEDS[0]} to {SEEDS[-1]} of the random placements, whose mean is shown, and of DT-FM's "
        f"search. {seeds} Random and DT-FM's search have one shape, 8 x 8; ours and the rows have two.",
    ]
