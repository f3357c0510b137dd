"""One training step on a network's devices: what each device would need for which layers, in seconds and bytes.

These are the data of `--objective step_time` beyond Eq. 1-4: speeds, memory, directed links, codec, microbatches.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from jaxdt.build import exchanges_per_step, peer_load, replicas_may_differ, stage_memory
from jaxdt.run import codec as codecs
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.memory import FLOAT_BYTES, StageMemory
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan, even_shares
from jaxdt.run.profile import Profile, codec_times, stage_seconds
from jaxdt.run.sizes import DTYPE_BYTES
from jaxdt.run.work import WorkKind
from jaxdt.wiring.base import PeerLoad
from planner.model.comm_workload import CommBytes
from planner.model.devices import catalogue_kind, spec_of
from planner.model.hosts import capped_gbps, host_bytes, lines, own_bytes, room_bytes, slowdown
from planner.model.layer_cuts import Ranges, parameter_load, split, split_trained
from planner.model.prices import HOUR_S, PriceRules, egress_per_byte

LEAST_LOAD = PeerLoad(1, 1)  # of a peer in any plan
MISSING_S = 1e6  # seconds a byte of a missing link, and so less than a step over one


@dataclass(frozen=True, eq=False)
class StepWorkload:
    """A model, the devices that may train it, and how. `run` says the microbatches of a step over all pipelines,
    schedule and codec, and what decides about memory: optimizer, delay, wiring and what a peer retains. `price_rules`
    say what prices decide.

    Derived: `cuts` are the layers before which the model may be cut; `kinds` the kinds of devices, those of one kind
    apart that wait for cores of their hosts for different times, kind_of [N] indices into them; memory_bytes [N] of the
    devices, at most an equal part of the host's. If all compute `on_accelerators`, those have memory of their own, and
    host_bytes [N] is the equal part of the host's for what they hold there; latency_s and s_per_byte [N, N] of directed
    links, as far as the lines of both hosts let through; boundary_bytes of one encoded tensor; line_host_of [N],
    line_out_s and line_in_s [H] the lines that devices of a host share (planner.model.hosts.lines); price_per_s [N] of
    devices and egress_per_byte [N, N] of what they send."""

    network: Network
    profile: Profile
    run: RunConfig
    price_rules: PriceRules = PriceRules()
    cuts: list[int] = field(init=False)
    kinds: list[str] = field(init=False)
    kind_of: np.ndarray = field(init=False)
    on_accelerators: bool = field(init=False)
    memory_bytes: list[float] = field(init=False)
    host_bytes: list[float] = field(init=False)
    latency_s: np.ndarray = field(init=False)
    s_per_byte: np.ndarray = field(init=False)
    boundary_bytes: int = field(init=False)
    line_host_of: np.ndarray = field(init=False)
    line_out_s: np.ndarray = field(init=False)
    line_in_s: np.ndarray = field(init=False)
    price_per_s: np.ndarray = field(init=False)
    egress_per_byte: np.ndarray = field(init=False)
    _slowed: dict[str, tuple[str, float]] = field(init=False, default_factory=dict)
    _seconds: dict = field(init=False, default_factory=dict)
    _least_seconds: list[float] = field(init=False, default_factory=list)
    _least_ratios: list[float] = field(init=False, default_factory=list)
    _memory: dict = field(init=False, default_factory=dict)
    _loads: dict = field(init=False, default_factory=dict)

    def __post_init__(self):
        devices = self.network.devices
        slow = list(zip((device.kind for device in devices), slowdown(self.network).tolist(), strict=True))
        names = [kind if factor == 1 else f"{kind} at 1/{factor:g}" for kind, factor in slow]
        kinds = sorted(set(names))
        self._slowed.update(zip(names, slow, strict=True))
        self._derive("cuts", list(self.profile.model.facts.cuts))
        self._derive("kinds", kinds)
        self._derive("kind_of", np.array([kinds.index(name) for name in names]))
        profiled = [self.profile.kind(device.kind) for device in devices]
        self._derive("on_accelerators", on_accelerators(self.network, self.profile, self.run))
        limits = [kind.memory_bytes for kind in profiled]
        rooms = own_bytes(self.network, limits) if self.on_accelerators else room_bytes(self.network, limits)
        self._derive("memory_bytes", rooms)
        self._derive("host_bytes", host_bytes(self.network))
        self._derive("latency_s", np.array(self.network.latency_s))
        bandwidth = capped_gbps(self.network) * 1e9 / 8
        s_per_byte = np.divide(1.0, bandwidth, out=np.full_like(bandwidth, MISSING_S), where=bandwidth > 0)
        np.fill_diagonal(s_per_byte, 0.0)
        self._derive("s_per_byte", s_per_byte)
        for name, value in zip(("host_of", "out_s", "in_s"), lines(self.network), strict=True):
            self._derive(f"line_{name}", value)
        self._derive("price_per_s", np.array([device.price_per_hour / HOUR_S for device in devices]))
        self._derive("egress_per_byte", np.array(egress_per_byte(self.network)))
        n_numbers = self.profile.model.facts.boundary_numbers(self.profile.microbatch_shape.n_tokens)
        spec = codecs.parse(self.codec, "--codec")
        self._derive("boundary_bytes", codecs.wire_bytes(spec, n_numbers, DTYPE_BYTES[self.profile.dtype]))

    @property
    def n_microbatches(self) -> int:
        """Of one step, over all pipelines."""
        return self.run.plan.microbatches

    @property
    def codec(self) -> str:
        return self.run.codec

    @property
    def schedule(self) -> str:
        """1f1b or gpipe."""
        return self.run.plan.schedule

    @property
    def exchanges_per_step(self) -> float:
        """How often the replicas of a stage exchange their vector a step, in the mean."""
        return exchanges_per_step(self.run)

    def _derive(self, name: str, value):
        object.__setattr__(self, name, value)

    @property
    def n_layers(self) -> int:
        return self.profile.model.facts.n_layers

    def seconds(self, kind: str, lo: int, hi: int) -> dict[str, float]:
        """Seconds of each kind of Work of layers lo..hi-1 on a kind of device (of `kinds` or of the profile), with
        encoding and decoding at their boundaries."""
        if (kind, lo, hi) not in self._seconds:
            name, factor = self._slowed.get(kind, (kind, 1.0))
            seconds = stage_seconds(self.profile, name, lo, hi)
            times = codec_times(self.profile, name, self.codec)
            not_first = lo > 0
            not_last = hi < self.n_layers
            seconds[WorkKind.FORWARD] += not_first * times.decode_s + not_last * times.encode_s
            seconds[WorkKind.BACKWARD] += not_last * times.decode_s + not_first * times.encode_s
            self._seconds[kind, lo, hi] = {work: factor * seconds_s for work, seconds_s in seconds.items()}
        return self._seconds[kind, lo, hi]

    def backward_s(self) -> np.ndarray:
        """Seconds [N] of the whole model's backward for one microbatch on each device, a measure of its slowness."""
        return np.array([self.seconds(kind, 0, self.n_layers)[WorkKind.BACKWARD] for kind in self.kinds])[self.kind_of]

    def loads(self, depth: tuple[int, ...], shares: tuple[int, ...]) -> list[PeerLoad]:
        """The load of the busiest peer of each stage in a step, as the run's wiring says."""
        key = (depth, shares)
        if key not in self._loads:
            n_stages, n_pipelines = len(depth), len(shares)
            plan = Plan(
                n_layers=n_stages,
                stages=tuple((s, s + 1) for s in range(n_stages)),
                placement=tuple(tuple(range(s * n_pipelines, (s + 1) * n_pipelines)) for s in range(n_stages)),
                shares=shares,
                schedule=self.schedule,
                in_flight=depth if self.schedule == "1f1b" else None,
            )
            busiest = shares.index(max(shares))
            self._loads[key] = [peer_load(self.run, plan, s, busiest) for s in range(n_stages)]
        return self._loads[key]

    def stage_memory(self, lo: int, hi: int, load: PeerLoad) -> StageMemory:
        """Memory of a peer with layers lo..hi-1 and this load, by the run's own rule: with optimizer and delay, and
        with the tensors that it retains until the commit."""
        key = (lo, hi, load)
        if key not in self._memory:
            on_accelerator = self.on_accelerators
            memory = stage_memory(self.run, self.schedule, (lo, hi), load, on_accelerator=on_accelerator)
            self._memory[key] = memory
        return self._memory[key]

    def stage_bytes(self, lo: int, hi: int, load: PeerLoad) -> int:
        """The part of stage_memory that counts against the memory of a device."""
        memory = self.stage_memory(lo, hi, load)
        return memory.on_device if self.on_accelerators else memory.total

    def may_hold(self, row: np.ndarray, lo: int, hi: int, load: PeerLoad) -> bool:
        """Whether each device of a row can hold layers lo..hi-1, and its host what it holds there."""
        if self.stage_bytes(lo, hi, load) > min(self.memory_bytes[d] for d in row):
            return False
        room = min(self.host_bytes[d] for d in row) if self.on_accelerators else math.inf
        return room == math.inf or self.stage_memory(lo, hi, load).on_host <= room

    def fits(self, placement: np.ndarray, stages: Ranges, depth: tuple[int, ...], shares: tuple[int, ...]) -> bool:
        """Whether every device of a placement [S, P] can hold its stage."""
        loads = self.loads(depth, shares)
        return all(
            self.may_hold(row, lo, hi, load) for row, (lo, hi), load in zip(placement, stages, loads, strict=True)
        )

    def split(self, placement: np.ndarray, depth: tuple[int, ...]) -> Ranges | None:
        """The layer ranges whose slowest stage is fastest, where a stage is as fast as its slowest device and has as
        much memory as its smallest; None if no ranges fit. Microbatches are shared evenly."""
        facts = self.profile.model.facts
        loads = self.loads(depth, even_shares(self.n_microbatches, placement.shape[1]))
        kinds = [{self.kinds[k] for k in self.kind_of[row]} for row in placement]
        limited = [min(min(self.memory_bytes[d], self.host_bytes[d]) for d in row) < math.inf for row in placement]

        def load(stage: int, lo: int, hi: int) -> float:
            times = [self.seconds(kind, lo, hi) for kind in kinds[stage]]
            return max(seconds[WorkKind.FORWARD] + seconds[WorkKind.BACKWARD] for seconds in times)

        def fits(stage: int, lo: int, hi: int) -> bool:
            if not facts.may_be_stage(lo, hi):
                return False
            return not limited[stage] or self.may_hold(placement[stage], lo, hi, loads[stage])

        return split(self.cuts, len(placement), load, fits)

    def work_table(self, stages: Ranges) -> np.ndarray:
        """Seconds [K, S, 4] of forward, backward, gather and update for every kind of device."""
        order = (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.GATHER, WorkKind.UPDATE)
        rows = [[[self.seconds(kind, lo, hi)[work] for work in order] for lo, hi in stages] for kind in self.kinds]
        return np.array(rows)

    def gradient_bytes(self, stages: Ranges) -> tuple[np.ndarray, float]:
        """(bytes [S] that the replicas of each stage exchange, bytes of a tied token table that those of the first and
        the last stage exchange). Where replicas may differ the table is the first stage's, and moves within pipelines,
        which the simulator times."""
        facts = self.profile.model.facts
        if replicas_may_differ(self.run):
            return np.array([FLOAT_BYTES * facts.owned_trained(lo, hi) for lo, hi in stages], dtype=float), 0.0
        sizes = np.array([FLOAT_BYTES * facts.stage_trained(lo, hi) for lo, hi in stages], dtype=float)
        shared = [FLOAT_BYTES * facts.shared_trained(lo, hi) for lo, hi in stages]
        return sizes - shared, float(max(shared))

    def least_seconds(self, n_stages: int) -> float:
        """Forward and backward of one microbatch, summed over the stages: the least for any cut into n_stages, with
        every stage on the kind that is fastest for its layers. Infinite for more stages than the cuts allow."""
        if not self._least_seconds:
            self._least_seconds.extend(self._sums_of_stages())
        return self._least_seconds[n_stages - 1] if n_stages <= len(self._least_seconds) else math.inf

    def least_ratios(self) -> np.ndarray:
        """For each kind of device [K] the least ratio, over ranges of layers, of its seconds to those of the fastest
        kind; 1 for a kind that is the fastest on some range."""
        if not self._least_ratios:
            ranges = itertools.combinations(self.cuts, 2)
            seconds = [[self.seconds(kind, lo, hi) for kind in self.kinds] for lo, hi in ranges]
            times = np.array([[one[WorkKind.FORWARD] + one[WorkKind.BACKWARD] for one in row] for row in seconds])
            self._least_ratios.extend((times / times.min(axis=1, keepdims=True)).min(axis=0))
        return np.array(self._least_ratios)

    def _sums_of_stages(self) -> list[float]:
        """least_seconds of 1, 2, ... stages. sums[hi] covers the layers before the cut `hi`; another stage extends it
        from every earlier cut."""
        n = len(self.cuts)
        stage_s = np.full((n, n), np.inf)
        for i, lo in enumerate(self.cuts):
            for j, hi in enumerate(self.cuts[i + 1 :], start=i + 1):
                times = [self.seconds(kind, lo, hi) for kind in self.kinds]
                stage_s[i, j] = min(seconds[WorkKind.FORWARD] + seconds[WorkKind.BACKWARD] for seconds in times)
        sums = np.full(n, np.inf)
        sums[0] = 0.0
        least = []
        for _ in range(n - 1):
            sums = (sums[:, None] + stage_s).min(axis=0)
            least.append(float(sums[-1]))
        return least

    def least_gradient_bytes(self, n_stages: int) -> float:
        """Bytes of gradient that the replicas of all stages exchange, for any cut."""
        facts = self.profile.model.facts
        separate = facts.n_split_trained if n_stages > 1 else 0  # exchanged on their own
        return FLOAT_BYTES * float(facts.n_trained - separate)

    def comm_bytes(self, stages: Ranges, shares: tuple[int, ...]) -> CommBytes:
        """The sizes of Eq. 1-4 with these layers and microbatches."""
        c_dp_bytes = FLOAT_BYTES * max(self.profile.model.facts.stage_trained(lo, hi) for lo, hi in stages)
        return CommBytes(float(c_dp_bytes), float(max(shares) * self.boundary_bytes), self.exchanges_per_step)

    def even_comm_bytes(self, n_stages: int, n_pipelines: int) -> CommBytes:
        """The sizes of Eq. 1-4 with even layers and shares."""
        return self.comm_bytes(even_split(self, n_stages), even_shares(self.n_microbatches, n_pipelines))


def on_accelerators(network: Network, profile: Profile | None, run: RunConfig | None) -> bool:
    """Whether all devices compute on accelerators, by the run's platform or by what the profile says of their kinds;
    without a profile, by the catalogue."""
    if run is not None and run.platform in ("gpu", "tpu"):
        return True
    if profile is not None:
        return all(profile.kind(device.kind).accelerator for device in network.devices)
    kinds = [catalogue_kind(device.kind) for device in network.devices]
    return all(kind is not None and spec_of(kind).accelerator for kind in kinds)


def even_split(workload: StepWorkload, n_stages: int) -> Ranges:
    """The cut for equal devices without memory limits, which sets the sizes of Eq. 1-4 during the search."""
    stages = split(workload.cuts, n_stages, parameter_load(workload.profile.model.facts), lambda stage, lo, hi: True)
    if stages is None:
        raise BadInput(
            f"--stages: got {n_stages} stages, expected at most {len(workload.cuts) - 1}, one a layer or shared block"
        )
    return stages


def refuse_too_small(workload: StepWorkload, n_stages: int):
    """Raise BadInput before any search if not even stages of the largest devices could hold the model."""
    room = max(workload.memory_bytes)
    even_split(workload, n_stages)
    facts = workload.profile.model.facts

    def fits(stage: int, lo: int, hi: int) -> bool:
        return facts.may_be_stage(lo, hi) and (room == math.inf or workload.stage_bytes(lo, hi, LEAST_LOAD) <= room)

    if split(workload.cuts, n_stages, parameter_load(facts), fits) is None:
        split_trained(facts, n_stages)  # that may be the reason
        refuse_memory(workload, n_stages)


def refuse_memory(workload: StepWorkload, n_stages: int) -> NoReturn:
    """Raise BadInput with what each stage of an even cut would need at least, and the memory that there is for it if
    the largest devices take the largest stages."""
    stages = even_split(workload, n_stages)
    needs = [workload.stage_bytes(lo, hi, LEAST_LOAD) for lo, hi in stages]
    order = sorted(range(n_stages), key=lambda stage: -needs[stage])
    rooms = sorted(workload.memory_bytes, reverse=True)
    room_of = dict(zip(order, rooms, strict=False))
    rows = ", ".join(f"{stage}: {need / 1e9:.2f} of {room_of[stage] / 1e9:.2f}" for stage, need in enumerate(needs))
    memory = workload.stage_memory(*stages[order[0]], LEAST_LOAD)
    kinds = ", ".join(f"{name} {n_bytes / 1e9:.2f}" for name, n_bytes in vars(memory).items() if n_bytes)
    raise BadInput(
        f"memory_bytes: found no split of {workload.n_layers} layers over {n_stages} stages that fits; with even "
        f"layers the stages need, of what the largest devices have, in GB, {rows}; in stage {order[0]} {kinds}"
        f"{', which is not on the device' if workload.on_accelerators else ''}"
    )
