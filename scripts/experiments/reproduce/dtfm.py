"""DT-FM's Figure 3: GPT3-1.3B on 64 V100 in five networks, compared with a Megatron-like baseline and random
placement, as assumed before and with equal options for all."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.page import span
from experiments.reproduce.dtfm_parts import cost as dtfm_cost
from experiments.reproduce.dtfm_parts.cost import RANDOM, SEEDS, Costs
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


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
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
    costs = {case: costs for case, (_, costs) in found.items()}
    pictures = {"dtfm.png": draw(steps)}
    return shown(costs, steps) | dict(pictures=pictures, off=off, most_gb=most_gb, seeds=seeds)


def shown(costs: dict[str, Costs], steps: Steps) -> dict[str, Any]:
    """What the page shows of costs and steps."""
    inputs = dict(SLICE_BYTES=SLICE_BYTES, SEEDS=SEEDS, FLOPS=FLOPS)
    return inputs | dict(costs=costs, steps=steps) | placement_gains(steps) | depth_section(steps) | trends(steps)


# ------------------------------------------------------------------------------------------------------------- tables

SYSTEMS = ["Megatron-like", "rows, our options", "random, 8 x 8 alone", "DT-FM's search, 8 x 8 alone", "ours"]


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


def placement_gains(steps: Steps) -> dict[str, Any]:
    """What placement gains with equal options: by case, the case where it gains most, cases where it gains little."""
    placement = {case: factors(steps, case)[-1] for case in CASES}
    n_little = sum(value < 1.05 for value in placement.values())
    return dict(placement=placement, most=max(placement, key=placement.__getitem__), n_little=n_little)


def depth_section(steps: Steps) -> dict[str, Any]:
    """Our step at each depth, and which depth is the best where."""
    rows = []
    best = {}
    for case in CASES:
        seconds = {depth: steps.best_s(key_of(case, Options(True, depth)), PLANS, 1024) for depth in DEPTHS}
        best[case] = min(seconds, key=seconds.__getitem__)
        rows.append([case, *seconds.values(), best[case], f"{seconds[4] / seconds[best[case]] - 1:.2%}"])

    count = {depth: list(best.values()).count(depth) for depth in DEPTHS}
    where = ", ".join(f"depth {depth} in {n}" for depth, n in count.items() if n)
    return dict(depth_section_rows=rows, where=where)


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

FORM = ".2f"  # of ratios
SETTINGS = [(n_layers, batch) for n_layers in LAYERS for batch in BATCHES]


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
    others = [span([ratio for case in near for ratio in over_rows(steps, case, options)], FORM) for options in both]
    rows = [
        ["case 5 over Megatron", "4.8x (elsewhere 3.8-4.8x)"] + [span(over_rows(steps, WORLD, o), FORM) for o in both],
        ["case 5 over DeepSpeed", "3.6x", "not modelled", "not modelled"],
        ["cases 1-4 over Megatron and DeepSpeed", "1.2-2.5x", *others],
    ]
    for name, base in (("file", "1 data centre"), ("text", "1, text")):
        cells = [span([gap for row in gaps(steps, base, options) for gap in row], FORM) for options in both]
        rows.append([f"case 5 slower than Megatron in case 1 ({name})", "1.7-3.5x; Sec. 4 opens with 1.7-2.3x", *cells])
    rows += [
        ["scheduler over random (random at 8 x 8 alone), any case", "up to 2.7x", "-", f"up to {gain:.2f}x"],
        ["larger batch: gap to case 1 shrinks", "yes", *(shrinks(steps, options, False) for options in both)],
        ["more layers: gap to case 1 shrinks", "yes", *(shrinks(steps, options, True) for options in both)],
    ]
    return [[*row, grade] for row, grade in zip(rows, "BBBCCBAA", strict=True)]


def trends(steps: Steps) -> dict[str, Any]:
    """The gap to case 1, by base and options."""
    words = []
    for name, base in (("file", "1 data centre"), ("text", "1, text")):
        for about, options in (("Megatron-like", THEIRS), ("equal options", OURS)):
            column = ", ".join(f"{row[0]:.2f}" for row in gaps(steps, base, options))
            words.append(f"{column} ({name}, {about})")
    layers = ", ".join(map(str, LAYERS))
    return dict(layers=layers, words=words)


def draw(steps: Steps) -> Figure:
    batches = (BATCHES[0], BATCHES[-1])
    figure = Figure(figsize=(15, 7), layout="constrained")
    panels = figure.subplots(len(batches), len(LAYERS), sharey=True)
    names = SYSTEMS
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
    return figure


# -------------------------------------------------------------------------------------------------------------- words
