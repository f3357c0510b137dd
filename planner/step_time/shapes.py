"""`--stages auto`, `--pipelines auto`: how many of both, and which devices to leave out because a step is faster so.

Every shape gets a bound that no plan can beat. Simple plans come first: regular layouts of every shape, on all devices
and on some, in the order of a rough guess of their step, so that few stages, one site and devices left out are among
the first. The simulator judges the best. Then the best few shapes are searched as if they had been asked for.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jaxdt.run.errors import BadInput
from planner.model.prices import HOUR_S
from planner.model.problem import exchange_s, mean_links, regions_of
from planner.model.proof import ROUNDING
from planner.search.incumbent import Budget, Incumbent
from planner.step_time.search import (
    PLACEMENTS,
    STARTS,
    Candidate,
    CostSearch,
    Finalist,
    StepSolution,
    anneal_all,
    compiling,
    judge,
    regular_placements,
    search_by_cost,
    simulate_some,
    tune_all,
)
from planner.step_time.tune import FEW_DEPTH_GROWTHS, Layout, prices_of, score, tune
from planner.step_time.workload import StepWorkload, refuse_memory

SCREEN_END, COMM_END, ANNEAL_END = 0.25, 0.5, 0.8  # parts of the time limit when a phase must be over
FIRST_FRAC, FIRST_S = 0.25, 1.0  # of the time limit, and seconds at most, until the first simple plans are judged
N_SHAPES = 3
MAX_ORDERED = 4  # stages, of which every order is a simple plan
MAX_SITES = 8  # up to so many regions, plans near each one are looked at
FEW_PIPELINES = 8  # up to so many, every number of pipelines is looked at
SMALLER = (1.0, 0.875, 0.75, 0.625, 0.5, 0.25)  # parts of the most pipelines that a number of stages allows


@dataclass(frozen=True, eq=False)
class PlanShape:
    """A number of stages on some devices, a bound of the seconds of a step for every plan on these devices, and one of
    what is minimised: of the same seconds, or of a step's price."""

    n_stages: int
    devices: np.ndarray
    seconds: float
    bound: float

    @property
    def n_pipelines(self) -> int:
        return len(self.devices) // self.n_stages


def device_rankings(workload: StepWorkload) -> list[np.ndarray]:
    """Orders in which devices are chosen: the fastest first, the nearest first, and those with most memory first; near
    each region the nearest first; where prices count, also the cheapest for their speed, the cheapest, and the
    nearest."""
    alpha_s, beta = mean_links(workload.network)
    hop_s = exchange_s(alpha_s, beta, workload.boundary_bytes)
    far_s = np.median(hop_s, axis=1)
    slow_s = workload.backward_s()
    room = np.array(workload.memory_bytes)
    keys = [(far_s, slow_s), (slow_s, far_s), (far_s, -room)]
    regions = regions_of(workload.network)
    if 1 < regions.max() + 1 <= MAX_SITES:
        for region in range(regions.max() + 1):
            inside = regions == region
            keys.append((slow_s, np.where(inside, 0.0, np.median(hop_s[:, inside], axis=1))))
    if not workload.price_rules.empty:
        price = workload.price_per_s
        keys += [(far_s, slow_s * price), (slow_s, price), (slow_s * price, far_s)]
    orders = [np.lexsort(key) for key in keys]
    return [o for i, o in enumerate(orders) if not any((o == before).all() for before in orders[:i])]


def plan_shapes(workload: StepWorkload, n_stages: int | None, n_pipelines: int | None) -> list[PlanShape]:
    """All shapes to look at, the most promising bound first; None stands for auto."""
    n = workload.network.n_devices
    shapes = []
    for stages in [n_stages] if n_stages else range(1, min(n, len(workload.cuts) - 1) + 1):
        most = min(n // stages, workload.n_microbatches)
        counts = set(range(1, FEW_PIPELINES + 1)) | {int(most * part) for part in SMALLER}
        counts = {n_pipelines} if n_pipelines else counts
        for pipelines in sorted(count for count in counts if 0 < count <= most):
            seen = set()
            for order in device_rankings(workload):
                devices = first_affordable(workload, order, stages * pipelines)
                if devices is not None and devices.tobytes() not in seen:
                    seen.add(devices.tobytes())
                    seconds = max(bound_s(workload, stages, pipelines), speed_bound_s(workload, stages, devices))
                    shapes.append(PlanShape(stages, devices, seconds, priced(workload, devices, seconds)))
    return sorted(shapes, key=lambda shape: (shape.bound, -len(shape.devices)))


def first_affordable(workload: StepWorkload, order: np.ndarray, n: int) -> np.ndarray | None:
    """The first n devices of an order that the budget allows, sorted; None if it allows no n devices. A device is
    passed over where it would leave too little for the cheapest others."""
    prices = prices_of(workload)
    per_s = prices.per_s[order]
    left = prices.most_per_s * (1 + ROUNDING)
    if per_s[:n].sum() <= left:
        return np.sort(order[:n])
    if np.sort(per_s)[:n].sum() > left:
        return None
    chosen: list[int] = []
    for k, d in enumerate(order):
        n_more = n - len(chosen) - 1
        rest = np.sort(per_s[k + 1 :])[:n_more]
        if len(rest) == n_more and per_s[k] + rest.sum() <= left:
            chosen.append(int(d))
            left -= per_s[k]
        if len(chosen) == n:
            break
    return np.sort(np.array(chosen))


def priced(workload: StepWorkload, devices: np.ndarray, seconds: float) -> float:
    """A bound of what is minimised for plans on these devices, from one of their seconds."""
    return seconds * float(workload.price_per_s[devices].sum()) if workload.price_rules.is_minimised else seconds


def bound_s(workload: StepWorkload, n_stages: int, n_pipelines: int) -> float:
    """No step is shorter. Some pipeline has at least an even share of the microbatches, each of its stages computes its
    layers for them, and then the stage's gradient crosses links, twice each. The step is at least the mean of that over
    the stages, with every stage's layers on the kind that is fastest for them."""
    share = math.ceil(workload.n_microbatches / n_pipelines)
    computing_s = share * workload.least_seconds(n_stages) / n_stages
    if n_pipelines == 1 or workload.exchanges_per_step < 1:  # an average may be hidden behind local steps
        return computing_s
    links = workload.s_per_byte[~np.eye(workload.network.n_devices, dtype=bool)]
    gradient_bytes = workload.least_gradient_bytes(n_stages) / n_stages / n_pipelines
    return computing_s + 2 * gradient_bytes * float(links.min())


def speed_bound_s(workload: StepWorkload, n_stages: int, devices: np.ndarray) -> float:
    """No step on these devices is shorter. A microbatch is work of least_seconds for the kinds that are fastest on each
    range of layers; a device that needs at least r times as long as the fastest one on any range does 1 / r of that
    work a second."""
    rate = float((1.0 / workload.least_ratios()[workload.kind_of[devices]]).sum())
    return workload.n_microbatches * workload.least_seconds(n_stages) / rate


@dataclass(frozen=True, eq=False)
class SimplePlan:
    """A regular placement of a shape, in one direction; what it is guessed to take, by which plans are ordered."""

    shape: PlanShape
    name: str
    placement: np.ndarray
    guess: float


class Screen:
    """The simple plans of all shapes, the most promising guess first, of which each is tuned unless its shape's bound
    is above the best estimate."""

    def __init__(self, workload: StepWorkload, shapes: list[PlanShape], incumbent: Incumbent):
        self.workload = workload
        self.incumbent = incumbent
        self.found: list[tuple[PlanShape, Candidate]] = []
        self.best = math.inf
        plans = [plan for shape in shapes for plan in simple_plans(workload, shape)]
        different = {(plan.placement.shape, plan.placement.tobytes()): plan for plan in reversed(plans)}
        self.left = sorted(different.values(), key=lambda plan: (plan.guess, plan.placement.size, plan.shape.n_stages))

    def go_on(self, is_over: Callable[[], bool]):
        """Tune plans until time is up, at least until one is found or none is left."""
        while self.left and not (self.found and (self.incumbent.interrupted or is_over())):
            plan = self.left.pop(0)
            layout = None
            if plan.shape.bound < self.best:
                layout = tune(self.workload, plan.placement, FEW_DEPTH_GROWTHS)
            if layout is not None:
                value = score(self.workload, layout)
                self.best = min(self.best, value)
                self.incumbent.offer(layout.placement, value, by="layouts")
                self.found.append((plan.shape, Candidate(plan.name, layout)))

    @property
    def best_first(self) -> list[tuple[PlanShape, Candidate]]:
        return sorted(self.found, key=lambda pair: score(self.workload, pair[1].layout))

    @property
    def n_left(self) -> int:
        """Plans that are left and could still be better."""
        return sum(plan.shape.bound < self.best for plan in self.left)


def simple_plans(workload: StepWorkload, shape: PlanShape) -> list[SimplePlan]:
    """The regular placements of a shape in both directions, and where few stages are alike, their rows in every order,
    with a guess of what is minimised."""
    plans = []
    for name, placement in regular_placements(workload, shape.devices, shape.n_stages):
        guess = priced(workload, shape.devices, max(shape.seconds, guess_s(workload, placement)))
        orders = [placement, placement[::-1], *row_orders(workload, placement)]
        plans += [SimplePlan(shape, name, order, guess) for order in orders]
    return plans


def row_orders(workload: StepWorkload, placement: np.ndarray) -> list[np.ndarray]:
    """Every order of a placement's rows that differs in the regions and kinds of its stages; none for many stages."""
    n_stages = len(placement)
    if not 2 < n_stages <= MAX_ORDERED:
        return []
    devices = workload.network.devices
    kinds = [tuple(sorted((devices[d].region, devices[d].kind) for d in row)) for row in placement]
    orders = {tuple(kinds[s] for s in order): order for order in itertools.permutations(range(n_stages))}
    return [placement[list(order)] for order in orders.values()]


def guess_s(workload: StepWorkload, placement: np.ndarray) -> float:
    """A rough guess of a step: the larger of what computing takes with layers cut by the speed of each stage, at least
    one a stage, and of what the busiest link between stages takes, both with the pipeline's fill and drain; then the
    slowest exchange of gradients cut evenly."""
    n_stages, n_pipelines = placement.shape
    share = workload.n_microbatches / n_pipelines
    model_s = workload.least_seconds(1) * workload.least_ratios()[workload.kind_of[placement]]
    stage_s = max(1.0 / (1.0 / model_s.max(axis=1)).sum(), model_s.max() / (len(workload.cuts) - 1))
    s_per_byte = workload.s_per_byte
    sending_s = 0.0
    if n_stages > 1:
        there, back = s_per_byte[placement[:-1], placement[1:]], s_per_byte[placement[1:], placement[:-1]]
        sending_s = workload.boundary_bytes * float(np.maximum(there, back).max())
    shard_bytes = workload.least_gradient_bytes(n_stages) / n_stages / n_pipelines
    exchange_s = 2 * shard_bytes * float(s_per_byte[placement[:, :, None], placement[:, None, :]].max())
    return (share + n_stages - 1) * max(stage_s, sending_s) + exchange_s


def distinct(screened: list[tuple[PlanShape, Candidate]]) -> list[PlanShape]:
    """The best few shapes. Shapes of one size on different devices count as one: swaps get from one to the other."""
    by_size: dict[tuple[int, int], PlanShape] = {}
    for shape, _ in screened:
        by_size.setdefault((shape.n_stages, shape.n_pipelines), shape)
    return list(by_size.values())[:N_SHAPES]


def search_shapes(
    workload: StepWorkload,
    n_stages: int | None,
    n_pipelines: int | None,
    incumbent: Incumbent,
    solver: str,
    seed: int,
) -> StepSolution:
    """The best plan of any shape; None stands for auto."""
    shapes = plan_shapes(workload, n_stages, n_pipelines)
    if not shapes and workload.price_rules.budget_per_hour is not None:
        refuse_budget(workload, n_stages or 1, n_pipelines or 1)
    if not shapes:
        raise BadInput(
            f"--stages, --pipelines: got {n_stages or 'auto'} and {n_pipelines or 'auto'}, expected at most "
            f"{workload.network.n_devices} devices in all, at most {len(workload.cuts) - 1} stages and "
            f"at most {workload.n_microbatches} pipelines, one for each microbatch"
        )
    screen = Screen(workload, shapes, incumbent)
    limit_s = incumbent.time_limit_s
    first_end_s = incumbent.elapsed_s + min(FIRST_S, FIRST_FRAC * limit_s)
    screen.go_on(lambda: incumbent.elapsed_s > first_end_s)
    if not screen.found:
        refuse_memory(workload, max(shape.n_stages for shape in shapes))
    judged = judge(workload, [candidate for _, candidate in screen.best_first], incumbent)
    kernels = compiling(workload, judged[0].layout, incumbent)
    if incumbent.budget.time_s is None:
        kernels.result(math.inf)
    screen.go_on(lambda: incumbent.elapsed_s > (SCREEN_END if kernels.is_over else ANNEAL_END) * limit_s)
    screened = screen.best_first
    candidates = [candidate for _, candidate in screened[: 2 * N_SHAPES]]
    not_tried = [f"{screen.n_left} of the simple plans"] if screen.n_left else []
    searches = {}
    if kernels.result(ANNEAL_END * limit_s) is None:
        not_tried.append(PLACEMENTS)
    else:
        candidates, searches = _search_best_shapes(workload, candidates, distinct(screened), incumbent, solver, seed)
        not_tried += [] if searches else [STARTS]
    simulated = simulate_some(workload, candidates, incumbent, judged)
    simple, *finalists = [replace(one, name=_name_with_shape(one)) for one in (judged[0], *simulated)]
    return StepSolution(finalists, searches.get(finalists[0].layout.shape), simple, tuple(not_tried))


def _search_best_shapes(
    workload: StepWorkload,
    candidates: list[Candidate],
    chosen: list[PlanShape],
    incumbent: Incumbent,
    solver: str,
    seed: int,
) -> tuple[list[Candidate], dict[tuple[int, int], CostSearch]]:
    """The candidates to simulate, the most promising first, once a few shapes are searched; and the searches by
    Eq. 1-4 that had time."""
    candidates = list(candidates)
    searches: dict[tuple[int, int], CostSearch] = {}
    for k, shape in enumerate(chosen):
        budget = _shape_budget(incumbent, len(chosen) - k)
        by_cost = search_by_cost(workload, shape.devices, shape.n_stages, incumbent, budget, solver, seed)
        placements = regular_placements(workload, shape.devices, shape.n_stages)
        if by_cost is not None:
            searches[shape.n_stages, shape.n_pipelines] = by_cost
            placements = by_cost.placements + placements
        candidates += tune_all(workload, placements)[:N_SHAPES]
    candidates.sort(key=lambda candidate: score(workload, candidate.layout))
    end_s = ANNEAL_END * incumbent.time_limit_s
    annealed = anneal_all(workload, _best_of_each_shape(candidates), incumbent, end_s, seed)
    return _simulation_order(workload, annealed, candidates), searches


def _name_with_shape(finalist: Finalist) -> str:
    """Such as "8x4 Eq. 1-4": the finalists need not have the same shape."""
    n_stages, n_pipelines = finalist.layout.shape
    return f"{n_stages}x{n_pipelines} {finalist.name}"


def refuse_budget(workload: StepWorkload, n_stages: int, n_pipelines: int):
    """Raise BadInput if a budget does not even pay for the cheapest devices of a shape."""
    budget = workload.price_rules.budget_per_hour
    least = HOUR_S * float(np.sort(workload.price_per_s)[: n_stages * n_pipelines].sum())
    if budget is not None and least > budget:
        raise BadInput(
            f"--budget_per_hour: got {budget:g}, expected at least {least:g}, for {n_stages} x {n_pipelines} devices"
        )


def _shape_budget(incumbent: Incumbent, n_left: int) -> Budget:
    """An equal part of the phase's time for each shape that is left."""
    budget = incumbent.budget
    if budget.time_s is None:
        return budget
    return Budget(max(0.05, (COMM_END * budget.time_s - incumbent.elapsed_s) / n_left), budget.evaluations)


def _best_of_each_shape(candidates: list[Candidate]) -> list[Candidate]:
    """One candidate of each shape first, then the others; both best first."""
    first: dict[tuple[int, int], Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.layout.shape, candidate)
    heads = list(first.values())
    return heads + [candidate for candidate in candidates if all(candidate is not head for head in heads)]


def _simulation_order(
    workload: StepWorkload, annealed: list[Candidate], candidates: list[Candidate]
) -> list[Candidate]:
    """Candidates to simulate: the best first, then, if it leaves devices out, the best that uses all, for
    comparison."""
    n_devices = workload.network.n_devices
    using_all = [c for c in [*annealed, *candidates] if c.layout.placement.size == n_devices]
    order = [annealed[0], *using_all[:1], *annealed[1:]]
    return list({id(candidate.layout): candidate for candidate in order}.values())


def reasons(workload: StepWorkload, layout: Layout) -> list[str]:
    """One line for each device that is left out: its name and why."""
    used = layout.placement.ravel()
    alpha_s, beta = mean_links(workload.network)
    hop_s = exchange_s(alpha_s, beta, workload.boundary_bytes)
    speed_s = workload.backward_s()
    usual_s = np.median(speed_s[used])
    usual_hop_s = np.median(np.median(hop_s[np.ix_(used, used)], axis=1))
    lines = []
    for d in layout.spare:
        slower = speed_s[d] / usual_s
        farther = np.median(hop_s[d, used]) / max(usual_hop_s, 1e-12)
        traits = []
        if slower > 1.1:
            traits.append(f"computes {slower:.1f} times slower than the others")
        if farther > 1.1:
            traits.append(f"its links take {farther:.1f} times longer")
        if workload.memory_bytes[d] < min(workload.memory_bytes[u] for u in used):
            traits.append(f"has only {workload.memory_bytes[d] / 1e9:.1f} GB")
        price = workload.network.devices[d].price_per_hour
        if not workload.price_rules.empty and price > 0:
            traits.append(f"costs {price:g} an hour")
        if not traits and len(layout.spare) < layout.shape[0]:
            traits = ["does not fill another pipeline"]
        why = " and ".join(traits) or "would only add to the exchange"
        lines.append(f"{workload.network.devices[d].name}: {why}")
    return lines


def step_s_with_all(solution: StepSolution, n_devices: int) -> float | None:
    """Simulated step of the best finalist that uses every device, if one was simulated."""
    steps_s = [f.step_s for f in solution.finalists if f.layout.placement.size == n_devices]
    return min(steps_s, default=None)
