"""One training step on a network's devices: what each would need for which layers, in seconds and bytes.

This is what `--objective step_time` knows beyond Eq. 1-4: speeds, memory, directed links, codec, microbatches.
"""

import math
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from jaxdt.spec import codec as codecs
from jaxdt.spec.errors import BadInput
from jaxdt.spec.memory import FLOAT_BYTES, MemoryOptions, stage_memory_bytes
from jaxdt.spec.network import Network
from jaxdt.spec.profile import Profile, codec_times, stage_seconds
from jaxdt.spec.sizes import DTYPE_BYTES
from jaxdt.spec.work import BACKWARD, FORWARD, GATHER, UPDATE
from planner.model.layers import Ranges, cut_points, parameter_load, split
from planner.model.problem import MISSING_S


@dataclass(frozen=True, eq=False)
class Job:
    """`schedule` is 1f1b or gpipe; `n_microbatches` are those of one step over all pipelines."""

    network: Network
    profile: Profile
    n_microbatches: int
    codec: str = "none"
    schedule: str = "1f1b"
    optimizer: str = "adamw"
    cuts: list[int] = field(init=False)
    kinds: list[str] = field(init=False)
    kind_of: np.ndarray = field(init=False)
    memory_bytes: list[float] = field(init=False)
    latency_s: np.ndarray = field(init=False)
    s_per_byte: np.ndarray = field(init=False)
    boundary_bytes: int = field(init=False)
    _seconds: dict = field(init=False, default_factory=dict)
    _bytes: dict = field(init=False, default_factory=dict)

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        devices, model = self.network.devices, self.profile.model
        put("cuts", cut_points(model))
        put("kinds", sorted({device.kind for device in devices}))
        put("kind_of", np.array([self.kinds.index(device.kind) for device in devices]))
        rooms = [(device.memory_bytes, self.profile.kind(device.kind).memory_bytes) for device in devices]
        put("memory_bytes", [min((r for r in room if r is not None), default=math.inf) for room in rooms])
        put("latency_s", np.array(self.network.latency_s))
        bandwidth = np.array(self.network.bandwidth_gbps) * 1e9 / 8
        put("s_per_byte", np.divide(1.0, bandwidth, out=np.full_like(bandwidth, MISSING_S), where=bandwidth > 0))
        np.fill_diagonal(self.s_per_byte, 0.0)
        numbers = model.boundary_numbers(self.profile.microbatch_size)
        put("boundary_bytes", codecs.wire_bytes(codecs.parse(self.codec, "--codec"), numbers, self._number_bytes))

    @property
    def _number_bytes(self) -> int:
        return DTYPE_BYTES[self.profile.dtype]

    @property
    def n_layers(self) -> int:
        return self.profile.model.n_layers

    def seconds(self, kind: str, lo: int, hi: int) -> dict[str, float]:
        """Per kind of Work of a stage, with encoding and decoding at its boundaries."""
        if (kind, lo, hi) not in self._seconds:
            found = stage_seconds(self.profile, kind, lo, hi)
            times = codec_times(self.profile, kind, self.codec)
            before, after = lo > 0, hi < self.n_layers
            found[FORWARD] += before * times.decode_s + after * times.encode_s
            found[BACKWARD] += after * times.decode_s + before * times.encode_s
            self._seconds[kind, lo, hi] = found
        return self._seconds[kind, lo, hi]

    def stage_bytes(self, lo: int, hi: int, in_flight: int) -> int:
        at = (lo, hi, in_flight)
        if at not in self._bytes:
            profile = self.profile
            options = MemoryOptions(profile.dtype, profile.remat, self.optimizer)
            self._bytes[at] = stage_memory_bytes(profile.model, lo, hi, profile.microbatch_size, in_flight, options)
        return self._bytes[at]

    def split(self, placement: np.ndarray, depth: tuple[int, ...]) -> Ranges | None:
        """The layer ranges whose slowest stage is fastest, each stage as fast as its slowest device and as roomy as its
        smallest; None if no ranges fit."""
        kinds = [{self.kinds[k] for k in self.kind_of[row]} for row in placement]
        rooms = [min(self.memory_bytes[d] for d in row) for row in placement]

        def load(stage: int, lo: int, hi: int) -> float:
            times = [self.seconds(kind, lo, hi) for kind in kinds[stage]]
            return max(found[FORWARD] + found[BACKWARD] for found in times)

        def fits(stage: int, lo: int, hi: int) -> bool:
            if rooms[stage] == math.inf:
                return True
            return self.stage_bytes(lo, hi, depth[stage]) <= rooms[stage]

        return split(self.cuts, len(placement), load, fits)

    def work_table(self, stages: Ranges) -> np.ndarray:
        """Seconds [K, S, 4] of forward, backward, gather and update for every kind of device."""
        order = (FORWARD, BACKWARD, GATHER, UPDATE)
        rows = [[[self.seconds(kind, lo, hi)[work] for work in order] for lo, hi in stages] for kind in self.kinds]
        return np.array(rows)

    def gradient_bytes(self, stages: Ranges) -> tuple[np.ndarray, float]:
        """([S] bytes that the replicas of each stage exchange, bytes of a tied token table that the first and the last
        stage exchange)."""
        model = self.profile.model
        sizes = np.array([FLOAT_BYTES * model.stage_params(lo, hi) for lo, hi in stages], dtype=float)
        if not model.tied_head or len(stages) == 1:
            return sizes, 0.0
        table = FLOAT_BYTES * float(model.token_table_params)
        sizes[0] -= table
        sizes[-1] -= table
        return sizes, table

    def scale_s(self) -> float:
        """Forward and backward of the whole model on the fastest kind for one microbatch."""
        whole = [self.seconds(kind, 0, self.n_layers) for kind in self.kinds]
        return min(found[FORWARD] + found[BACKWARD] for found in whole)


def even_split(job: Job, n_stages: int) -> Ranges:
    """The cut for equal devices without memory limits, which sets the sizes of Eq. 1-4 during the search."""
    found = split(job.cuts, n_stages, parameter_load(job.profile.model), lambda stage, lo, hi: True)
    if found is None:
        raise BadInput(
            f"--stages: got {n_stages} stages, expected at most {len(job.cuts) - 1}, one a layer or shared block"
        )
    return found


def refuse_too_small(job: Job, n_stages: int):
    """Before any search: not even stages of the roomiest devices could hold the model."""
    room = max(job.memory_bytes)
    fits = lambda stage, lo, hi: room == math.inf or job.stage_bytes(lo, hi, 1) <= room  # noqa: E731
    even_split(job, n_stages)
    if split(job.cuts, n_stages, parameter_load(job.profile.model), fits) is None:
        refuse_memory(job, n_stages)


def refuse_memory(job: Job, n_stages: int) -> NoReturn:
    """One line: what a stage would need at least, and what there is."""
    stages = even_split(job, n_stages)
    need = max(job.stage_bytes(lo, hi, 1) for lo, hi in stages)
    room = [m for m in job.memory_bytes if m < math.inf]
    raise BadInput(
        f"memory_bytes: found no split of {job.n_layers} layers over {n_stages} stages that fits devices with "
        f"{min(room) / 1e9:.2f} to {max(job.memory_bytes) / 1e9:.2f} GB; an even one needs {need / 1e9:.2f} GB a stage"
    )
