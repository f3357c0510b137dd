"""A plan: which peer holds which layers, the shares of microbatches, the schedule. All peers of a run read one plan.

placement[stage][pipeline] is a device index of the network, and that index is the peer_id. The microbatches of a step
are numbered over all pipelines; pipeline p takes a contiguous range of shares[p] of them. Where stages have unequal
numbers of replicas there are no pipelines: placement[stage] are the replicas in any order, any of them may get any
microbatch (so the wiring must choose routes), and shares has one entry, the microbatches of a step. codec[boundary]
says how tensors travel between the stages `boundary` and boundary + 1: one name, or one per pipeline
(jaxdt.run.codec). roles says which peers hold parameters for others; most plans have none.
"""

import bisect
import functools
import hashlib
import itertools
import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxdt.run import codec, serialize
from jaxdt.run.errors import BadInput, nearest, read_text, require_one_of
from jaxdt.run.options import FINITE, NOT_NEGATIVE, NOT_NEGATIVE_OR_ENDLESS, about, option

FORMAT = "jaxdt-plan-1"
SCHEMA = "urn:jaxdt:schema:plan:1"
STASH = "stash"  # PipeDream: the next steps' forwards run before a step's backward
SCHEDULES = ("1f1b", "gpipe", STASH)
# A solver's results stand in plan.json beside the plan's own fields if they have one of these names, else under FOUND.
FOUND = "found"


@dataclass(frozen=True)
class CostTerms:
    """Seconds by DT-FM's Eq. 1-4: COMM-COST and its two terms. Infinite where a link does not exist."""

    total_s: float = field(metadata=about("both terms", NOT_NEGATIVE_OR_ENDLESS))
    datap_s: float = field(metadata=about("data-parallel", NOT_NEGATIVE_OR_ENDLESS))
    pipelinep_s: float = field(metadata=about("pipeline", NOT_NEGATIVE_OR_ENDLESS))


@dataclass(frozen=True)
class PriceTerms:
    """Prices of a step by the network's: of the devices used for an hour, of the bytes that leave their region in a
    step, and of a step in all."""

    per_hour: float = field(metadata=about("of the devices", NOT_NEGATIVE))
    egress_per_step: float = field(metadata=about("of bytes", NOT_NEGATIVE))
    per_step: float = field(metadata=about("in all", NOT_NEGATIVE))


@dataclass(frozen=True)
class SolverResult:
    """What a solver says of its plan; every field may be missing.

    `network`, `network_file`: for which network it was made, `percentile`: with which of its bandwidths; `left_out`,
    `left_out_why`: devices that it does not use; `c_dp_bytes`, `c_pp_bytes`: gradients of one stage, and what one
    pipeline sends over a boundary in a step; `dtype`: of the latter before a codec, "" where only bytes were given;
    `problem_digest`: of the network and sizes; `cost`, `bound_s`, `gap`, `proved`: by Eq. 1-4, the gap relative to
    the bound; `objective`: comm_cost, step_time or cost_per_step; `step_s`, `step_s_with_all`: simulated seconds of a
    step, and of the best one that uses every device; `simple_step_s`: of the best plan that was judged before the
    search; `not_tried`: parts of the search for which there was no time; `price`: of that step; `budget_per_hour`: what
    the devices may cost; `profile`: where the seconds of devices come from; `solver`, `seed`, `evaluations`, `time_s`:
    how it was found; `constraints`: which ones it honours; `replan`: what its moves from an earlier plan take
    (planner.api.replan); `stage_memory_bytes`: where the model is known, what the busiest peer of
    each stage holds at its worst moment, by kind of number (jaxdt.run.memory.StageMemory)."""

    network: str = ""
    network_file: str = ""
    percentile: int | None = None
    left_out: tuple[str, ...] = ()
    left_out_why: tuple[str, ...] = ()
    stage_memory_bytes: tuple[dict[str, int], ...] = ()
    c_dp_bytes: float = option(0.0, "gradients of one stage", NOT_NEGATIVE)
    c_pp_bytes: float = option(0.0, "of one pipeline over a boundary", NOT_NEGATIVE)
    dtype: str = ""
    problem_digest: str = ""
    cost: CostTerms | None = None
    bound_s: float = option(0.0, "no plan costs less", NOT_NEGATIVE_OR_ENDLESS)
    gap: float | None = option(None, "cost over bound, less 1", FINITE)
    proved: bool = False
    objective: str = ""
    solver: str = ""
    seed: int = 0
    profile: str = ""
    step_s: float | None = option(None, "simulated", NOT_NEGATIVE)
    step_s_with_all: float | None = option(None, "with every device", NOT_NEGATIVE)
    simple_step_s: float | None = option(None, "before the search", NOT_NEGATIVE)
    not_tried: tuple[str, ...] = ()
    price: PriceTerms | None = None
    budget_per_hour: float | None = option(None, "of the devices", NOT_NEGATIVE)
    constraints: dict[str, Any] = field(default_factory=dict[str, Any])
    replan: dict[str, Any] = field(default_factory=dict[str, Any])
    evaluations: int = 0
    time_s: float = option(0.0, "of the search", NOT_NEGATIVE)


SOLVER_FIELDS = frozenset(SolverResult.__dataclass_fields__)


@dataclass(frozen=True)
class PlanRoles:
    """Peers with a role beside that of a replica (hybrid parameter servers; HetPipe's servers). Each
    field has a row of peers for each stage, or is empty.

    `servers`: hold the stage's parameters for others; they may stand in the placement too, and then compute as well.
    `front`, `back`: those servers that own the activations that enter the stage, and the gradients that enter it.
    `workers`: reliable or not, compute for the stage's servers and hold nothing that only they have."""

    servers: tuple[tuple[int, ...], ...] = ()
    front: tuple[tuple[int, ...], ...] = ()
    back: tuple[tuple[int, ...], ...] = ()
    workers: tuple[tuple[int, ...], ...] = ()

    def __bool__(self) -> bool:
        return self != PlanRoles()

    @property
    def used(self) -> list[str]:
        """The names of the roles that some peers have."""
        return [name for name in self.__dataclass_fields__ if any(getattr(self, name))]

    def check(self, n_stages: int, placed: Collection[int]) -> None:
        """BadInput for rows that do not fit a plan whose placement has the peers `placed`."""
        for name in self.__dataclass_fields__:
            rows: tuple[tuple[int, ...], ...] = getattr(self, name)
            if len(rows) not in (0, n_stages):
                raise BadInput(f"plan.roles.{name}: got {len(rows)} rows, expected {n_stages}, one per stage")
            peers = [peer for row in rows for peer in row]
            if len(set(peers)) != len(peers) or any(peer < 0 for peer in peers):
                raise BadInput(f"plan.roles.{name}: expected every device index once and none negative")
        for name in ("front", "back"):
            for stage, row in enumerate(getattr(self, name)):
                if others := set(row) - set(self.servers[stage] if self.servers else ()):
                    raise BadInput(f"plan.roles.{name}[{stage}]: got {min(others)}, expected servers of the stage")
        servers = {peer for row in self.servers for peer in row}
        if others := {peer for row in self.workers for peer in row} & (servers | set(placed)):
            raise BadInput(f"plan.roles.workers: got {min(others)}, which is a server or a replica too")


@dataclass(frozen=True)
class Plan:
    """See the module text; `in_flight[stage]` bounds forwards without backward under 1F1B (None: n_stages - stage).

    `found` keeps a solver's results for the plan (cost, bound_s, solver, seed, ...); nothing here reads it."""

    n_layers: int
    stages: tuple[tuple[int, int], ...]
    placement: tuple[tuple[int, ...], ...]
    shares: tuple[int, ...]
    schedule: str = "1f1b"
    in_flight: tuple[int, ...] | None = None
    codec: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    roles: PlanRoles = PlanRoles()
    found: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)

    def __post_init__(self) -> None:
        check_stages(self.stages, self.n_layers)
        if len(self.placement) != self.n_stages or not all(self.placement):
            raise BadInput(f"plan.placement: expected {self.n_stages} rows of at least one device, one per stage")
        n_pipelines = len(self.placement[0]) if self.is_even else 1
        peers = [peer for row in self.placement for peer in row]
        if not peers or len(set(peers)) != len(peers) or min(peers) < 0:
            raise BadInput("plan.placement: expected every device index once and none negative")
        if len(self.shares) != n_pipelines or any(share < 1 for share in self.shares):
            why = "" if self.is_even else ": without pipelines, that is the microbatches of a step"
            expected = f"{n_pipelines} integers" if n_pipelines > 1 else "one integer"
            raise BadInput(f"plan.shares: got {list(self.shares)}, expected {expected} >= 1{why}")
        require_one_of("plan.schedule", self.schedule, SCHEDULES)
        self.roles.check(self.n_stages, peers)
        self._check_in_flight()
        if self.codec and len(self.codec) != self.n_stages - 1:
            raise BadInput(f"plan.codec: got {len(self.codec)} names, expected {self.n_stages - 1}, one per boundary")
        for boundary, entry in enumerate(self.codec):
            if entry.count(",") not in (0, n_pipelines - 1):
                raise BadInput(
                    f"plan.codec[{boundary}]: got {entry.count(',') + 1} names in {entry!r}, expected 1, or one for "
                    f"each of {n_pipelines} pipelines"
                )

    def _check_in_flight(self) -> None:
        if self.in_flight is None:
            return
        if len(self.in_flight) != self.n_stages or any(n < 1 for n in self.in_flight):
            raise BadInput(
                f"plan.in_flight: got {list(self.in_flight)}, expected {self.n_stages} integers >= 1, one per stage"
            )
        for stage in range(self.n_stages - 1):
            if self.in_flight[stage] < self.in_flight[stage + 1]:
                raise BadInput(
                    f"plan.in_flight: stage {stage} has {self.in_flight[stage]}, expected at least the "
                    f"{self.in_flight[stage + 1]} of stage {stage + 1}, which it feeds"
                )

    @property
    def n_stages(self) -> int:
        return len(self.stages)

    @property
    def n_pipelines(self) -> int:
        """1 where stages have unequal numbers of replicas."""
        return len(self.shares)

    @property
    def n_replicas(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(len(row) for row in self.placement)

    @property
    def is_even(self) -> bool:
        """Whether all stages have equally many replicas, which then form pipelines."""
        return len(set(self.n_replicas)) == 1

    @property
    def shape(self) -> str:
        """The shape in words."""
        if self.is_even:
            return f"{self.n_stages} stages x {self.n_pipelines} pipelines"
        return f"{self.n_stages} stages of {', '.join(map(str, self.n_replicas))} replicas"

    @property
    def n_microbatches(self) -> int:
        return sum(self.shares)

    @property
    def peers(self) -> list[int]:
        """All members of the run: the replicas, and the servers that compute nothing."""
        placed = [peer for row in self.placement for peer in row]
        return placed + [peer for row in self.roles.servers for peer in row if peer not in placed]

    @property
    def workers(self) -> list[int]:
        """The peers that compute for servers and are no members."""
        return [peer for row in self.roles.workers for peer in row]

    def is_worker(self, peer: int) -> bool:
        return peer in self.workers

    def seat(self, peer: int) -> tuple[int, int]:
        """(stage, pipeline) of a peer; pipeline 0 where there are none, and of a server or worker that is in none."""
        for stage, row in enumerate(self.placement):
            if peer in row:
                return stage, row.index(peer) if self.is_even else 0
        for rows in (self.roles.servers, self.roles.workers):
            for stage, row in enumerate(rows):
                if peer in row:
                    return stage, 0
        raise BadInput(f"peer: got {peer}, expected one of the plan's peers {sorted(self.peers)}")

    def microbatches(self, pipeline: int) -> range:
        """The microbatches of one step that a pipeline takes."""
        first = sum(self.shares[:pipeline])
        return range(first, first + self.shares[pipeline])

    def pipeline_of(self, microbatch: int, held_out: bool = False) -> int:
        """The pipeline that takes a microbatch. Held-out microbatches go to the pipelines in turn."""
        return microbatch % self.n_pipelines if held_out else bisect.bisect_right(self._share_ends, microbatch)

    @functools.cached_property
    def _share_ends(self) -> list[int]:
        return list(itertools.accumulate(self.shares))

    def codec_of(self, boundary: int, pipeline: int, forward: bool) -> str:
        """The codec of a pipeline's activations (forward) or gradients over a boundary."""
        return codec.of_link(self.codec[boundary], pipeline, forward) if self.codec else codec.NONE

    def hop(self, boundary: int) -> list[tuple[int, int, int]]:
        """(peer before, peer after, pipeline) of each pair between which the plan sends over a boundary: neighbours in
        a pipeline, or any two where there are no pipelines."""
        before, after = self.placement[boundary], self.placement[boundary + 1]
        if self.is_even:
            return [(src, dst, pipeline) for pipeline, (src, dst) in enumerate(zip(before, after, strict=True))]
        return [(src, dst, 0) for src in before for dst in after]

    @property
    def codec_of_links(self) -> dict[tuple[int, int], str]:
        """The codec of every (src, dst) over which boundary tensors go."""
        codecs: dict[tuple[int, int], str] = {}
        for boundary in range(self.n_stages - 1):
            for src, dst, pipeline in self.hop(boundary):
                codecs[src, dst] = self.codec_of(boundary, pipeline, forward=True)
                codecs[dst, src] = self.codec_of(boundary, pipeline, forward=False)
        return codecs

    @property
    def fingerprint(self) -> str:
        """16 hex digits that agree iff two plans run the same way; a solver's results do not count."""
        fields = _own_fields(self)
        del fields[FOUND]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def with_newcomer(self, peer: int, stage: int) -> "Plan":
        """The plan as a newcomer sees it. One that is of the plan has its own place there. Any other has the place of
        the first peer of its stage, which gets the newcomer's former place if there was one."""
        if peer in self.placement[stage]:
            return self
        first = self.placement[stage][0]
        swapped = {first: peer, peer: first}
        placement = tuple(tuple(swapped.get(planned, planned) for planned in row) for row in self.placement)
        return replace(self, placement=placement)

    def with_worker(self, worker: int, stage: int) -> "Plan":
        """The plan as a worker sees it that computes for a server of the stage."""
        if worker in self.workers:
            return self
        rows = self.roles.workers or ((),) * self.n_stages
        workers = tuple((*row, worker) if here == stage else row for here, row in enumerate(rows))
        return replace(self, roles=replace(self.roles, workers=workers))

    def depth(self, stage: int) -> int:
        """Forwards that a stage may have in flight under 1F1B."""
        return self.in_flight[stage] if self.in_flight else self.n_stages - stage

    def n_ahead(self, stage: int) -> int:
        """Steps whose forwards a stage does before the backward of a step: under "stash" one for each later stage."""
        return self.n_stages - 1 - stage if self.schedule == STASH else 0


def check_stages(stages: tuple[tuple[int, int], ...], n_layers: int) -> None:
    """Refuse ranges that do not cover the layers 0..n_layers-1 exactly once, in order."""
    expected = 0
    for stage, (lo, hi) in enumerate(stages):
        if lo != expected or hi <= lo:
            raise BadInput(
                f"plan.stages[{stage}]: got layers {lo}..{hi - 1}, expected a non-empty range from {expected}"
            )
        expected = hi
    if expected != n_layers:
        raise BadInput(f"plan.stages: cover {expected} layers, expected {n_layers}, each exactly once")


def even_shares(total: int, parts: int) -> tuple[int, ...]:
    """`total` cut into `parts` that differ by at most one, larger ones first."""
    return tuple(total // parts + (part < total % parts) for part in range(parts))


def ranges(sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Contiguous [lo, hi) ranges of the given sizes."""
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return tuple(zip(bounds[:-1], bounds[1:], strict=True))


def _own_fields(plan: Plan) -> dict[str, Any]:
    """The fields as plain data, without the roles where there are none."""
    fields: dict[str, Any] = serialize.write(plan)
    if not plan.roles:
        del fields["roles"]
    return fields


def to_json(plan: Plan) -> dict[str, Any]:
    """The content of plan.json; SOLVER_FIELDS names the results of a solver that stand beside the plan's own fields."""
    fields = _own_fields(plan)
    found: dict[str, Any] = fields.pop(FOUND)
    solver = {name: found.pop(name) for name in list(found) if name in SOLVER_FIELDS}
    data = {serialize.SCHEMA_KEY: SCHEMA, **solver, "format": FORMAT, **fields, "microbatches": plan.n_microbatches}
    return data | ({FOUND: found} if found else {})


def parse(text: str, source: str) -> Plan:
    """A plan from the text of a plan.json; `source` names it in errors."""
    data = serialize.json_object(text, source, FORMAT)
    total = data.pop("microbatches", None)
    solver = {name: data.pop(name) for name in sorted(SOLVER_FIELDS & set(data))}
    known = [*Plan.__dataclass_fields__, "microbatches", *sorted(SOLVER_FIELDS)]
    for name in data:
        if name not in known:
            raise BadInput(f"{source}: {name}: unknown field{nearest(name, known)}; a solver's own go under {FOUND!r}")
    try:
        found = serialize.read(dict[str, Any], data.pop(FOUND, {}), FOUND)
        serialize.read(SolverResult, solver, "")
        fields = data | {"codec": data.get("codec") or (), FOUND: found | solver}
        plan = serialize.read(Plan, fields, "plan")
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None
    if total not in (None, plan.n_microbatches):
        raise BadInput(f"{source}: microbatches: got {total}, expected the sum of shares {plan.n_microbatches}")
    return plan


def load(path: str | Path) -> Plan:
    """Read a plan.json."""
    return parse(read_text(path), str(path))
