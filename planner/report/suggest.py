"""Suggested changes of a plan or its network, each change by itself, with the seconds of Eq. 1-4 that it saves.

Candidates are compared by sums over a table of pairs. The seconds of those that are returned are differences of two
costs of the reference evaluator. Eq. 1-4 count communication alone: another shape also changes the pipeline's fill and
drain and the memory of a device, and a codec takes time to compute. Needs neither numba nor OR-Tools, unless shapes
are searched.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from jaxdt.run import codec as codecs
from jaxdt.run.network import Network
from jaxdt.run.plan import even_shares
from jaxdt.run.sizes import DTYPE_BYTES
from planner.cost.reference import cost_of, pair_s
from planner.model.comm_workload import CommBytes
from planner.report.plan_file import CostedPlan

FACTORS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)  # by which a link is made faster
MOST_OF_IT = 0.9  # a smaller factor will do if it saves so much of what the largest saves
N_HOPS, N_LINKS = 3, 3  # slowest hops whose links are looked at; links that are suggested
PAIRS_MAX = 300_000  # pairs that are added up without `search`, some tenths of a second
ABSMAX_FRAC = 0.1  # codecs of which one differs from another by absmax numbers alone differ by less in size
MANY_NUMBERS = 1 << 20  # of a tensor, whose bytes in each codec are compared
BOUNDARY_DTYPE = "bfloat16"  # of boundaries, where a plan does not say it
STATES_PER_GRADIENT = 4  # parameters, gradients and two moments, in fp32
SHAPE_SEARCH_S = 2.0
LEAST_S = 1e-9
Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Swap:
    """Two devices change places; `b` may be one that the plan leaves out."""

    a: str
    b: str


@dataclass(frozen=True)
class Shape:
    """Another number of stages and pipelines on the same devices: placement[stage][pipeline], in indices of the
    network, and the sizes of its stages, which follow from layers and microbatches in proportion. The placement is the
    best that was looked at, not the best there is."""

    n_stages: int
    n_pipelines: int
    placement: tuple[tuple[int, ...], ...]
    c_dp_bytes: float
    c_pp_bytes: float


@dataclass(frozen=True)
class BoundaryCodec:
    """Tensors between stages `boundary` and boundary + 1 travel in `codec`, as `bytes_frac` of the bytes now."""

    boundary: int
    codec: str
    bytes_frac: float


@dataclass(frozen=True)
class FasterLinks:
    """Links between these pairs of devices get `factor` times the bandwidth, both ways."""

    pairs: tuple[tuple[str, str], ...]
    factor: float


@dataclass(frozen=True)
class Suggestion:
    """A change, the seconds of Eq. 1-4 that it saves, and the same in words."""

    change: Swap | Shape | BoundaryCodec | FasterLinks
    saved_s: float
    text: str


def suggestions(costed: CostedPlan, search: bool = False) -> list[Suggestion]:
    """Changes that lower the cost, the best first: the best swap, the best shape, codecs, and the best links. Without
    `search` swaps are tried until PAIRS_MAX pairs are added up, those of the slowest devices first, and other shapes
    with regular layouts. With it all swaps are tried, and each shape is searched for SHAPE_SEARCH_S seconds."""
    if not math.isfinite(costed.cost.total_s):
        return []
    found = [*_codecs(costed), *_links(costed)]
    if costed.plan.is_even:
        found += [*_swap(costed, math.inf if search else PAIRS_MAX), *_shape(costed, search)]
    return sorted((one for one in found if one.saved_s > LEAST_S), key=lambda one: -one.saved_s)


def device_name(network: Network, index: int) -> str:
    device = network.devices[index]
    return f"{device.name} ({device.region})" if device.region else device.name


# -------------------------------------------------------------------------------------------------------------- swaps


class PairTable:
    """Seconds of pairs of devices, each asked of the reference evaluator once."""

    def __init__(self, network: Network, n_pipelines: int, sizes: CommBytes):
        self._exchange_s: dict[tuple[int, int], float] = {}
        self._boundary_s: dict[tuple[int, int], float] = {}
        self._network = network
        self._shard_bytes = sizes.c_dp_bytes / n_pipelines
        self._sizes = sizes

    def stage_s(self, row: Sequence[int]) -> float:
        """DATAP(C_j) of Eq. 2 for the devices of a stage."""
        return max(sum(self._exchange(d, e) for e in row if e != d) for d in row)

    def hop_s(self, left: Sequence[int], right: Sequence[int]) -> float:
        """Seconds of a hop between two stages, pipeline by pipeline."""
        return max(self._boundary(a, b) for a, b in zip(left, right, strict=True))

    def total_s(self, rows: Rows) -> float:
        """COMM-COST of a placement."""
        hops_s = sum(self.hop_s(*pair) for pair in itertools.pairwise(rows))
        return max(self.stage_s(row) for row in rows) + hops_s

    def _exchange(self, a: int, b: int) -> float:
        if (a, b) not in self._exchange_s:
            share = self._sizes.exchanges_per_step
            both_s = share and share * pair_s(self._network, a, b, self._shard_bytes)
            self._exchange_s[a, b] = self._exchange_s[b, a] = both_s
        return self._exchange_s[a, b]

    def _boundary(self, a: int, b: int) -> float:
        if (a, b) not in self._boundary_s:
            self._boundary_s[a, b] = self._boundary_s[b, a] = pair_s(self._network, a, b, self._sizes.c_pp_bytes)
        return self._boundary_s[a, b]


def _swap(costed: CostedPlan, pairs_max: float) -> Iterable[Suggestion]:
    """The swap of two devices that saves most, if one saves anything."""
    network, plan = costed.network, costed.plan
    n_stages, n_pipelines = plan.n_stages, plan.n_pipelines
    table = PairTable(network, n_pipelines, costed.sizes)
    stages_s = [table.stage_s(row) for row in plan.placement]
    hops_s = [table.hop_s(*pair) for pair in itertools.pairwise(plan.placement)]

    def swapped_s(a: int, b: int) -> float:
        """The cost with a and b swapped: only their stages and the hops beside those change."""
        rows = swapped(plan.placement, a, b)
        changed = [s for s in range(n_stages) if rows[s] != plan.placement[s]]
        new_stages_s = list(stages_s)
        new_hops_s = list(hops_s)
        for s in changed:
            new_stages_s[s] = table.stage_s(rows[s])
        for hop in {hop for s in changed for hop in (s - 1, s) if 0 <= hop < n_stages - 1}:
            new_hops_s[hop] = table.hop_s(rows[hop], rows[hop + 1])
        return max(new_stages_s) + sum(new_hops_s)

    n_tries = pairs_max / (2 * n_pipelines * (n_pipelines + 1))
    tries = _swaps(costed)
    tried = tries if math.isinf(n_tries) else itertools.islice(tries, int(n_tries))
    best = min(tried, key=lambda pair: swapped_s(*pair), default=None)
    if best is None:
        return
    a, b = best
    saved_s = _saved_s(costed, rows=swapped(plan.placement, a, b))
    spare = "" if b in plan.peers else ", which the plan leaves out"
    text = f"swap {device_name(network, a)} and {device_name(network, b)}{spare}"
    yield Suggestion(Swap(network.devices[a].name, network.devices[b].name), saved_s, text)


def _swaps(costed: CostedPlan) -> Iterable[tuple[int, int]]:
    """Pairs of devices whose swap may lower the cost. Such a swap lowers some maximum of Eq. 2 or Eq. 3, so that one of
    the two is in the slowest stage or in the slowest pair of a hop. The slowest device comes first."""
    cost, plan = costed.cost, costed.plan
    by_hop = sorted(zip(cost.hop_s, cost.slowest_pair, strict=True), reverse=True)
    slowest = [cost.slowest_device, *(d for _, pair in by_hop for d in pair), *plan.placement[cost.slowest_stage]]
    seen = set()
    for a in dict.fromkeys(slowest):
        for b in range(costed.network.n_devices):
            if b != a and frozenset((a, b)) not in seen:
                seen.add(frozenset((a, b)))
                yield a, b


def swapped(placement: Rows, a: int, b: int) -> tuple[tuple[int, ...], ...]:
    """The placement with two devices swapped."""
    other = {a: b, b: a}
    return tuple(tuple(other.get(d, d) for d in row) for row in placement)


def _saved_s(costed: CostedPlan, rows: Rows | None = None, network: Network | None = None) -> float:
    """Seconds that the plan saves with another placement or network, by the reference evaluator."""
    rows = costed.plan.placement if rows is None else rows
    changed = cost_of(network or costed.network, rows, *costed.sizes)
    return costed.cost.total_s - changed.total_s


# -------------------------------------------------------------------------------------------------------------- shapes


def _shape(costed: CostedPlan, search: bool) -> Iterable[Suggestion]:
    """The other shape on the same devices that saves most, if one saves anything."""
    find = _searched if search else _regular
    found = [(shape, _shape_s(costed, shape)) for shape in _shapes(costed, find)]
    if not found:
        return
    shape, total_s = min(found, key=lambda pair: pair[1])
    how = "found in a short search" if search else "in a layout without search"
    text = (
        f"{shape.n_stages} stages x {shape.n_pipelines} pipelines, {how} (communication alone: look at memory and at "
        f"the step time before you take it)"
    )
    yield Suggestion(shape, costed.cost.total_s - total_s, text)


def _shape_s(costed: CostedPlan, shape: Shape) -> float:
    return cost_of(costed.network, shape.placement, *_sizes(costed, shape)).total_s


def _sizes(costed: CostedPlan, shape: Shape) -> CommBytes:
    return CommBytes(shape.c_dp_bytes, shape.c_pp_bytes, costed.sizes.exchanges_per_step)


def _shapes(costed: CostedPlan, find: Callable[[CostedPlan, Shape], Rows]) -> Iterable[Shape]:
    """Every other shape of the plan's devices that its layers, microbatches and memory allow, with the placement that
    `find` has for it."""
    plan = costed.plan
    n_devices = len(plan.peers)
    layers = max(hi - lo for lo, hi in plan.stages)
    rooms = [costed.network.devices[d].memory_bytes for d in plan.peers]
    room = min((one for one in rooms if one is not None), default=math.inf)
    for n_stages in range(1, min(n_devices, plan.n_layers) + 1):
        n_pipelines = n_devices // n_stages
        fills = n_stages * n_pipelines == n_devices and n_pipelines <= plan.n_microbatches
        if not fills or n_stages == plan.n_stages:
            continue
        c_dp_bytes = costed.sizes.c_dp_bytes * max(even_shares(plan.n_layers, n_stages)) / layers
        if STATES_PER_GRADIENT * c_dp_bytes > room:
            continue
        share = max(even_shares(plan.n_microbatches, n_pipelines))
        c_pp_bytes = costed.sizes.c_pp_bytes * share / max(plan.shares)
        shape = Shape(n_stages, n_pipelines, (), c_dp_bytes, c_pp_bytes)
        if rows := find(costed, shape):
            yield replace(shape, placement=tuple(tuple(int(d) for d in row) for row in rows))


def _regular(costed: CostedPlan, shape: Shape) -> Rows:
    """The cheapest of four layouts: devices in the network's order, or stage by stage as the plan has them, fill stages
    or pipelines one after another. None for a shape of more than PAIRS_MAX pairs."""
    by_stage = costed.plan.peers
    by_pipeline = [d for column in zip(*costed.plan.placement, strict=True) for d in column]
    n_stages, n_pipelines = shape.n_stages, shape.n_pipelines
    if len(by_stage) * n_pipelines > PAIRS_MAX:
        return ()
    layouts = []
    for order in (sorted(by_stage), by_stage, by_pipeline):
        layouts.append([order[s * n_pipelines : (s + 1) * n_pipelines] for s in range(n_stages)])
        layouts.append([order[s::n_stages] for s in range(n_stages)])
    table = PairTable(costed.network, n_pipelines, _sizes(costed, shape))
    return min(layouts, key=table.total_s)


def _searched(costed: CostedPlan, shape: Shape) -> Rows:
    """The best placement of a short search, on all devices of the network; none where the plan leaves some out."""
    from planner.model.problem import problem_of
    from planner.search.incumbent import Budget, Incumbent
    from planner.search.solve import solve

    if len(costed.plan.peers) < costed.network.n_devices:
        return _regular(costed, shape)
    problem = problem_of(costed.network, shape.n_stages, shape.n_pipelines, *_sizes(costed, shape))
    return solve(problem, Incumbent(Budget(SHAPE_SEARCH_S)), "auto", 0).placement.tolist()


# -------------------------------------------------------------------------------------------------- codecs and links


def _codecs(costed: CostedPlan) -> Iterable[Suggestion]:
    """For each size that codecs have, the change at the boundary where that size saves most."""
    plan, cost = costed.plan, costed.cost
    dtype_bytes = DTYPE_BYTES[plan.found.get("dtype") or BOUNDARY_DTYPE]
    entries = plan.codec or (codecs.NONE,) * (plan.n_stages - 1)
    for name, n_bytes in _sizes_of_codecs(dtype_bytes).items():
        best: Suggestion | None = None
        for boundary, entry in enumerate(entries):
            if "," in entry or "/" in entry or entry == codecs.AUTO:
                continue
            frac = n_bytes / codecs.wire_bytes(codecs.parse(entry), MANY_NUMBERS, dtype_bytes)
            if frac >= 1:
                continue
            changed = cost_of(costed.network, plan.placement, costed.sizes.c_dp_bytes, costed.sizes.c_pp_bytes * frac)
            saved_s = cost.hop_s[boundary] - changed.hop_s[boundary]
            text = f"{name} between stages {boundary} and {boundary + 1}, {frac:.0%} of the bytes"
            if best is None or saved_s > best.saved_s:
                best = Suggestion(BoundaryCodec(boundary, name, frac), saved_s, text)
        if best is not None:
            yield best


def _sizes_of_codecs(dtype_bytes: int) -> dict[str, int]:
    """Bytes of MANY_NUMBERS in each codec that makes them fewer; one codec of each family that differs by absmax
    numbers alone."""
    sizes: dict[str, int] = {}
    for name in codecs.FAMILIES:
        n_bytes = codecs.wire_bytes(codecs.parse(name), MANY_NUMBERS, dtype_bytes)
        is_new = all(abs(n_bytes - other) > ABSMAX_FRAC * other for other in sizes.values())
        if n_bytes < MANY_NUMBERS * dtype_bytes and is_new:
            sizes[name] = n_bytes
    return sizes


def _links(costed: CostedPlan) -> Iterable[Suggestion]:
    """The links that save most when they are faster: the slowest pair of each slow hop, and the links of the slowest
    device inside its stage."""
    network, cost = costed.network, costed.cost
    hops = sorted(range(len(cost.hop_s)), key=lambda s: -cost.hop_s[s])[:N_HOPS]
    tried = [(_link_text(network, *cost.slowest_pair[s]), [cost.slowest_pair[s]]) for s in hops]
    device = cost.slowest_device
    partners = [d for d in costed.plan.placement[cost.slowest_stage] if d != device]
    if partners:
        text = f"all links of {device_name(network, device)} inside stage {cost.slowest_stage}"
        tried.append((text, [(device, d) for d in partners]))
    found = []
    for text, pairs in tried:
        saved_s = {factor: _saved_s(costed, network=with_faster_links(network, pairs, factor)) for factor in FACTORS}
        enough = next(factor for factor in FACTORS if saved_s[factor] >= MOST_OF_IT * saved_s[FACTORS[-1]])
        names = tuple((network.devices[a].name, network.devices[b].name) for a, b in pairs)
        change = FasterLinks(names, enough)
        found.append(Suggestion(change, saved_s[enough], f"{enough:g} times the bandwidth of {text}"))
    return sorted(found, key=lambda one: -one.saved_s)[:N_LINKS]


def _link_text(network: Network, a: int, b: int) -> str:
    forth, back = network.link(a, b).bandwidth_gbps, network.link(b, a).bandwidth_gbps
    gbps = f"{forth:g}" if forth == back else f"{forth:g} and {back:g}"
    return f"the link {device_name(network, a)} - {device_name(network, b)} ({gbps} Gb/s)"


def with_faster_links(network: Network, pairs: Iterable[tuple[int, int]], factor: float) -> Network:
    """The network with `factor` times the bandwidth on the given pairs, both ways."""
    bandwidth = list(network.bandwidth_gbps)
    for a, b in {(a, b) for pair in pairs for a, b in (pair, pair[::-1])}:
        row = bandwidth[a]
        bandwidth[a] = (*row[:b], row[b] * factor, *row[b + 1 :])
    return replace(network, bandwidth_gbps=tuple(bandwidth))
