"""`--objective step_time`: plans from the search by Eq. 1-4 and from layouts, tuned, annealed on the compiled estimate,
and ranked by the simulator.
"""

from dataclasses import dataclass, replace

import numpy as np

from jaxdt.spec.memory import FLOAT_BYTES
from jaxdt.spec.network import Network
from jaxdt.spec.plan import even_shares
from planner.cost.compiled import generator
from planner.model.layers import Ranges
from planner.model.problem import problem_of
from planner.search.incumbent import Board, Limits
from planner.search.portfolio import Solution, solve
from planner.step_time.simulate import simulated_s
from planner.step_time.tune import Layout, improve, slice_moves, tune
from planner.step_time.workload import Job, even_split, refuse_memory

COMM_END, ANNEAL_END = 0.4, 0.75  # parts of the time limit when a phase must be over
N_ANNEALED, N_SIMULATED = 4, 5
HEATS = (0.02, 0.005)
SLICES_PER_LIMIT = 50_000  # evaluations behind one slice of annealing under an evaluation limit
BY_COST, BLOCK = "Eq. 1-4", "block layout"


@dataclass(frozen=True, eq=False)
class Start:
    """A layout and where it comes from."""

    name: str
    layout: Layout


@dataclass(frozen=True, eq=False)
class Finalist:
    """A layout with its step's seconds under the simulator."""

    name: str
    layout: Layout
    step_s: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """Finalists, best first; `by_cost` is the search by Eq. 1-4 over `devices` with `sizes` (c_dp, c_pp), in indices of
    the whole network."""

    finalists: list[Finalist]
    by_cost: Solution
    devices: np.ndarray
    sizes: tuple[float, float]


def part_of(network: Network, devices: np.ndarray) -> Network:
    """The network of some of the devices, in this order."""
    pick = lambda rows: tuple(tuple(rows[i][j] for j in devices) for i in devices)  # noqa: E731
    chosen = tuple(network.devices[d] for d in devices)
    return Network(chosen, pick(network.latency_s), pick(network.bandwidth_gbps), network.name)


def bytes_of(job: Job, stages: Ranges, shares: tuple[int, ...]) -> tuple[float, float]:
    """(c_dp, c_pp) of Eq. 1-4: gradients of the largest stage, what the busiest pipeline sends over a boundary."""
    c_dp = FLOAT_BYTES * max(job.profile.model.stage_params(lo, hi) for lo, hi in stages)
    return float(c_dp), float(max(shares) * job.boundary_bytes)


def sizes_of_shape(job: Job, n_stages: int, n_pipelines: int) -> tuple[float, float]:
    """(c_dp, c_pp) with even layers and shares."""
    return bytes_of(job, even_split(job, n_stages), even_shares(job.n_microbatches, n_pipelines))


def search_by_cost(
    job: Job, devices: np.ndarray, n_stages: int, board: Board, limits: Limits, solver: str, seed: int
) -> tuple[Solution, list[np.ndarray]]:
    """Solve Eq. 1-4 for some devices. Returns the solution and other good placements, all in indices of the whole
    network."""
    n_pipelines = len(devices) // n_stages
    sizes = sizes_of_shape(job, n_stages, n_pipelines)
    problem = problem_of(part_of(job.network, devices), n_stages, n_pipelines, *sizes)
    inner = Board(limits)
    board.part = inner
    with board.calling(inner.stop):
        if board.interrupted:
            inner.stop()
        solution = solve(problem, inner, solver, seed)
    board.part = None
    board.count(solution.evaluations)
    others = [devices[groups] for _, groups in inner.others]
    return replace(solution, placement=devices[solution.placement]), others


def layouts_of(job: Job, devices: np.ndarray, n_stages: int) -> list[tuple[str, np.ndarray]]:
    """Placements that need no search: runs of devices as pipelines or stages, in the network's order and by speed."""
    shape = len(devices) // n_stages, n_stages
    in_order = np.sort(devices)
    speed = {k: job.seconds(kind, 0, job.n_layers)["B"] for k, kind in enumerate(job.kinds)}
    by_speed = np.array(sorted(in_order, key=lambda d: (speed[job.kind_of[d]], d)))
    found = [(BLOCK, in_order.reshape(shape).T), ("stages in order", in_order.reshape(shape[::-1]))]
    if len(job.kinds) > 1:
        found += [("pipelines by speed", by_speed.reshape(shape).T), ("stages by speed", by_speed.reshape(shape[::-1]))]
    return found


def tuned(job: Job, placements: list[tuple[str, np.ndarray]], **how) -> list[Start]:
    """Both directions of every placement, where they fit into memory; best first."""
    starts = []
    for name, placement in placements:
        both = [tune(job, way, **how) for way in (placement, placement[::-1])]
        fitting = [layout for layout in both if layout is not None]
        if fitting:
            starts.append(Start(name, min(fitting, key=lambda layout: layout.step_s)))
    return sorted(starts, key=lambda start: start.layout.step_s)


def anneal_all(job: Job, starts: list[Start], board: Board, end_s: float, seed: int) -> list[Start]:
    """The best starts, annealed in turns, slice by slice, until end_s; the results, best first. Under an evaluation
    limit the number of slices follows from that."""
    bits = generator(seed)
    chosen = starts[:N_ANNEALED]
    limit = board.limits.evaluations
    rounds = None if limit is None else max(1, limit // SLICES_PER_LIMIT)
    done = 0
    while not board.interrupted and (done < rounds if rounds is not None else board.elapsed_s < end_s):
        for k, start in enumerate(chosen):
            if rounds is None and board.elapsed_s >= end_s:
                break
            n_moves = slice_moves(start.layout)
            layout = improve(job, start.layout, bits, HEATS[done % len(HEATS)], n_moves)
            board.count(n_moves)
            board.offer(layout.placement, layout.step_s)
            chosen[k] = Start(start.name, layout)
        done += 1
    return sorted(chosen, key=lambda start: start.layout.step_s)


def simulate_some(job: Job, starts: list[Start], board: Board) -> list[Finalist]:
    """Simulate in this order, at least one, as long as time is likely to suffice; best first."""
    finalists, longest_s = [], 0.0
    for start in starts[:N_SIMULATED]:
        left_s = board.left_s - longest_s if board.limits.evaluations is None else np.inf
        if finalists and (board.interrupted or left_s <= 0):
            break
        began_s = board.elapsed_s
        step_s = start.layout.step_s if board.interrupted else simulated_s(job, start.layout)
        longest_s = max(longest_s, board.elapsed_s - began_s)
        finalists.append(Finalist(start.name, start.layout, step_s))
    return sorted(finalists, key=lambda finalist: finalist.step_s)


def search_step(job: Job, n_stages: int, board: Board, solver: str, seed: int) -> Outcome:
    """The best plan of one shape on all devices."""
    devices = np.arange(job.network.n_devices)
    time_s = board.limits.time_s
    limits = Limits(None if time_s is None else COMM_END * time_s, board.limits.evaluations)
    solution, others = search_by_cost(job, devices, n_stages, board, limits, solver, seed)
    placements = [(BY_COST, solution.placement), *((f"{BY_COST}, other", other) for other in others)]
    starts = tuned(job, placements + layouts_of(job, devices, n_stages))
    if not starts:
        refuse_memory(job, n_stages)
    annealed = anneal_all(job, starts, board, ANNEAL_END * (time_s or 0.0), seed)
    finalists = simulate_some(job, _in_turn(starts, annealed), board)
    return Outcome(finalists, solution, devices, sizes_of_shape(job, n_stages, len(devices) // n_stages))


def _in_turn(starts: list[Start], annealed: list[Start]) -> list[Start]:
    """What to simulate, the most promising first; the plan of Eq. 1-4 and the block layout for comparison."""
    reference = [start for start in starts if start.name in (BY_COST, BLOCK)]
    turns = [annealed[0], *reference, *annealed[1:]]
    return list({id(start.layout): start for start in turns}.values())
