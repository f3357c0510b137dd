"""`--stages auto`, `--pipelines auto`: how many of both, and which devices to leave out because a step is faster so.

Every shape gets a bound that no plan can beat, then layouts by the compiled estimate, best bounds first; the best few
shapes are searched as if they had been asked for.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxdt.spec.errors import BadInput
from planner.model.problem import exchange_s, mean_links
from planner.search.incumbent import Board, Limits
from planner.step_time.search import (
    BY_COST,
    Outcome,
    Start,
    anneal_all,
    layouts_of,
    search_by_cost,
    simulate_some,
    sizes_of_shape,
    tuned,
)
from planner.step_time.tune import FEW_GROWTHS, Layout
from planner.step_time.workload import Job, refuse_memory

SCREEN_END, COMM_END, ANNEAL_END = 0.25, 0.5, 0.8  # parts of the time limit when a phase must be over
N_SHAPES = 3
FEW_PIPELINES = 8  # up to so many, every number of pipelines is looked at
SMALLER = (1.0, 0.875, 0.75, 0.625, 0.5, 0.25)  # parts of the most pipelines that a number of stages allows


@dataclass(frozen=True, eq=False)
class Shape:
    """A number of stages on some devices, and no plan's step is below bound_s."""

    n_stages: int
    devices: np.ndarray
    bound_s: float

    @property
    def n_pipelines(self) -> int:
        return len(self.devices) // self.n_stages


def rankings(job: Job) -> list[np.ndarray]:
    """Devices in the order in which they are kept: fast before slow ones, and near before far ones."""
    alpha_s, beta = mean_links(job.network)
    far_s = np.median(exchange_s(alpha_s, beta, job.boundary_bytes), axis=1)
    slow_s = np.array([job.seconds(kind, 0, job.n_layers)["B"] for kind in job.kinds])[job.kind_of]
    room = np.array(job.memory_bytes)
    keys = [(far_s, slow_s), (slow_s, far_s), (far_s, -room)]
    orders = [np.lexsort(key) for key in keys]
    return [o for i, o in enumerate(orders) if not any((o == before).all() for before in orders[:i])]


def shapes(job: Job, n_stages: int | None, n_pipelines: int | None) -> list[Shape]:
    """All shapes to look at, the most promising bound first."""
    n = job.network.n_devices
    found = []
    for stages in [n_stages] if n_stages else range(1, min(n, len(job.cuts) - 1) + 1):
        most = min(n // stages, job.n_microbatches)
        counts = set(range(1, FEW_PIPELINES + 1)) | {int(most * part) for part in SMALLER}
        counts = {n_pipelines} if n_pipelines else counts
        for pipelines in sorted(count for count in counts if 0 < count <= most):
            seen = set()
            for order in rankings(job):
                devices = np.sort(order[: stages * pipelines])
                if devices.tobytes() not in seen:
                    seen.add(devices.tobytes())
                    found.append(Shape(stages, devices, bound_s(job, stages, pipelines)))
    return sorted(found, key=lambda shape: (shape.bound_s, -len(shape.devices)))


def bound_s(job: Job, n_stages: int, n_pipelines: int) -> float:
    """No step is shorter: a stage's microbatches cannot take less than an even part of the model on the fastest kind,
    and a gradient crosses a link twice."""
    model, share = job.profile.model, math.ceil(job.n_microbatches / n_pipelines)
    computing_s = share * job.scale_s() / n_stages
    if n_pipelines == 1:
        return computing_s
    links = job.s_per_byte[~np.eye(job.network.n_devices, dtype=bool)]
    return computing_s + 8.0 * model.n_params / n_stages / n_pipelines * float(links.min())


def screen(job: Job, candidates: list[Shape], board: Board) -> list[tuple[Shape, Start]]:
    """The best layout of every shape whose bound is below the best estimate, best first, while time lasts."""
    end_s = SCREEN_END * (board.limits.time_s or math.inf)
    found: list[tuple[Shape, Start]] = []
    best_s = math.inf
    for shape in candidates:
        if shape.bound_s >= best_s or (found and (board.interrupted or board.elapsed_s > end_s)):
            continue
        starts = tuned(job, layouts_of(job, shape.devices, shape.n_stages), growths=FEW_GROWTHS)
        if starts:
            found.append((shape, starts[0]))
            best_s = min(best_s, starts[0].layout.step_s)
            board.offer(starts[0].layout.placement, starts[0].layout.step_s)
    return sorted(found, key=lambda pair: pair[1].layout.step_s)


def distinct(found: list[tuple[Shape, Start]]) -> list[Shape]:
    """The best few shapes; different devices of one size are one shape, swaps get from one to the other."""
    kept: dict[tuple[int, int], Shape] = {}
    for shape, _ in found:
        kept.setdefault((shape.n_stages, shape.n_pipelines), shape)
    return list(kept.values())[:N_SHAPES]


def search_shapes(
    job: Job, n_stages: int | None, n_pipelines: int | None, board: Board, solver: str, seed: int
) -> Outcome:
    """The best plan of any shape; None stands for auto."""
    candidates = shapes(job, n_stages, n_pipelines)
    if not candidates:
        raise BadInput(
            f"--stages, --pipelines: got {n_stages or 'auto'} and {n_pipelines or 'auto'}, expected at most "
            f"{job.network.n_devices} devices in all, at most {len(job.cuts) - 1} stages and "
            f"at most {job.n_microbatches} pipelines, one for each microbatch"
        )
    found = screen(job, candidates, board)
    if not found:
        refuse_memory(job, max(shape.n_stages for shape in candidates))
    chosen = distinct(found)
    starts = [start for _, start in found[: 2 * N_SHAPES]]
    solutions = {}
    for k, shape in enumerate(chosen):
        solution, others = search_by_cost(
            job, shape.devices, shape.n_stages, board, _limits(board, len(chosen) - k), solver, seed
        )
        solutions[shape.n_stages, shape.n_pipelines] = solution, shape.devices
        placements = [(BY_COST, solution.placement), *((f"{BY_COST}, other", other) for other in others)]
        starts += tuned(job, placements + layouts_of(job, shape.devices, shape.n_stages))[:N_SHAPES]
    starts.sort(key=lambda start: start.layout.step_s)
    annealed = anneal_all(job, _best_of_each(starts), board, ANNEAL_END * (board.limits.time_s or 0.0), seed)
    finalists = simulate_some(job, _with_everybody(job, annealed, starts), board)
    shape = finalists[0].layout.shape
    solution, devices = solutions.get(shape) or next(iter(solutions.values()))
    return Outcome(finalists, solution, devices, sizes_of_shape(job, *solution.placement.shape))


def _limits(board: Board, n_left: int) -> Limits:
    """An equal part of the phase's time for each shape that is left."""
    if board.limits.time_s is None:
        return board.limits
    return Limits(max(0.05, (COMM_END * board.limits.time_s - board.elapsed_s) / n_left), board.limits.evaluations)


def _best_of_each(starts: list[Start]) -> list[Start]:
    """One start of each shape first, then the others; both best first."""
    first: dict[tuple[int, int], Start] = {}
    for start in starts:
        first.setdefault(start.layout.shape, start)
    heads = list(first.values())
    return heads + [start for start in starts if all(start is not head for head in heads)]


def _with_everybody(job: Job, annealed: list[Start], starts: list[Start]) -> list[Start]:
    """What to simulate: the best two, and if they leave devices out the best that uses all, for comparison."""
    everybody = [start for start in [*annealed, *starts] if start.layout.placement.size == job.network.n_devices]
    chosen = [annealed[0], *everybody[:1], *annealed[1:]]
    return list({id(start.layout): start for start in chosen}.values())


def reasons(job: Job, layout: Layout) -> list[str]:
    """Why each device that is left out is left out, in words."""
    used = layout.placement.ravel()
    alpha_s, beta = mean_links(job.network)
    hop_s = exchange_s(alpha_s, beta, job.boundary_bytes)
    speed_s = np.array([job.seconds(kind, 0, job.n_layers)["B"] for kind in job.kinds])[job.kind_of]
    usual_s, usual_hop_s = np.median(speed_s[used]), np.median(np.median(hop_s[np.ix_(used, used)], axis=1))
    found = []
    for d in layout.spare:
        slower, farther = speed_s[d] / usual_s, np.median(hop_s[d, used]) / max(usual_hop_s, 1e-12)
        traits = []
        if slower > 1.1:
            traits.append(f"computes {slower:.1f} times slower than the others")
        if farther > 1.1:
            traits.append(f"its links take {farther:.1f} times longer")
        if job.memory_bytes[d] < min(job.memory_bytes[u] for u in used):
            traits.append(f"has only {job.memory_bytes[d] / 1e9:.1f} GB")
        rest = (
            "does not fill another pipeline"
            if len(layout.spare) < layout.shape[0]
            else "would only add to the exchange"
        )
        why = " and ".join(traits) or rest
        found.append(f"{job.network.devices[d].name}: {why}")
    return found


def without_spares(outcome: Outcome, n_devices: int) -> float | None:
    """Simulated step of the best finalist that uses every device, if one was simulated."""
    whole = [f.step_s for f in outcome.finalists if f.layout.placement.size == n_devices]
    return min(whole, default=None)
