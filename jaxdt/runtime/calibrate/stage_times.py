"""Times a peer's compiled stage functions before the peer joins. The simulator predicts a step from these seconds.

Where a computation uses one thread of the CPU, these are CPU seconds of the process, not wall seconds: peers that share
cores time themselves at the same moment, and the simulator models the sharing itself. A process that may use several
threads has its cores to itself, and its threads' CPU seconds add up to more than a computation lasts: it takes wall
seconds, and so does one with an accelerator.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdt.codec.base import decode, encode
from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.codec import CodecSpec
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.profile import CodecTimes
from jaxdt.run.sizes import Group
from jaxdt.run.work import MESSAGE, Work, WorkKind
from jaxdt.runtime.calibrate.message_cost import N_ENDS, MessageCostProbe
from jaxdt.runtime.compute_environment import ONE_THREAD
from jaxdt.runtime.storage.store import Store

N_WARM_UP = 2
N_TIMED = 8
N_BRIEF = 2  # times that a newcomer's stage is timed: only the deadlines of its own Work come from that
# A stage is timed for STAGE_S seconds, and at most N_STAGE_MAX times. Fewer seconds would depend too much on the moment
# at which they were measured.
STAGE_S = 3.0
N_STAGE_MAX = 40
# The tensor that a Work receives over a boundary: its kind, and the stage in its key minus the stage of the Work.
INPUTS = {WorkKind.FORWARD: ("act", 0), WorkKind.BACKWARD: ("grad", 1), WorkKind.EVALUATE: ("eval", 0)}


def time_codec(spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> CodecTimes:
    """Median seconds of encoding and of decoding one tensor on this process's device."""
    x = jax.device_put(np.random.default_rng(0).standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))
    wire = encode(spec, x)

    def seconds(call: Callable[[], jax.Array]) -> float:
        times = []
        for _ in range(N_WARM_UP + N_TIMED):
            start_s = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start_s)
        return statistics.median(times[N_WARM_UP:])

    return CodecTimes(seconds(lambda: encode(spec, x)), seconds(lambda: decode(spec, wire, shape, x.dtype)))


def time_stage(
    store: Store,
    peer: int,
    stage: int,
    groups: Sequence[Group],
    *,
    evaluates: bool,
    step: int,
    microbatch: int = 0,
    is_brief: bool = False,
    probe: MessageCostProbe | None = None,
) -> dict[str, float]:
    """Mean seconds of each kind of Work, through the store's own code, so with decoding and encoding. Means, not
    medians, because a step also waits for the slow ones. Inputs are zeros.

    groups: the sync groups of the run (jaxdt.run.sizes).
    evaluates: time evaluation too.
    step: the step whose tensors' length is used.
    microbatch: a microbatch of the pipeline whose codecs are used.
    is_brief: no step is predicted from the seconds, so a few rounds will do.

    The sums of the sync groups are timed with the update: over all slices, a member adds up as many numbers as it
    holds. With a probe, the CPU seconds of a MESSAGE are measured too: how much longer a backward takes while the probe
    exchanges messages. The updates change parameters and optimizer state, of which no copy is kept: the store has none
    afterwards, so a stage is timed before its state is restored."""
    clock = _clock()
    kinds = [
        WorkKind.FORWARD,
        WorkKind.BACKWARD,
        *([WorkKind.EVALUATE] if evaluates else []),
        WorkKind.GATHER,
        WorkKind.UPDATE,
    ]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    message_s: list[float] = []
    group_sizes = {group.stage: group.n_elements for group in groups if stage in group.stages}
    n_rounds_min, seconds_min = (N_WARM_UP + N_BRIEF, 0.0) if is_brief else (N_WARM_UP + N_TIMED, STAGE_S)
    started_s = time.monotonic()
    with _at_version(store, step):
        for n_done in range(N_WARM_UP + N_STAGE_MAX):
            if n_done >= n_rounds_min and time.monotonic() - started_s > seconds_min:
                break
            if n_done == 1:  # all is compiled
                store.return_freed_memory()
            rounds = tuple(RoundId(RoundKind.GRADIENT, of_stage, step) for of_stage in group_sizes)
            for kind in kinds:
                work = Work(stage, kind, microbatch, peer, step)
                _put_inputs(store, work)
                work_started_s = clock()
                if kind == WorkKind.UPDATE:
                    for round in rounds:
                        store.sum(ev.SliceKey(round, 0, group_sizes[round.stage]), (peer,))
                store.run(work, 1.0, rounds if kind in (WorkKind.GATHER, WorkKind.UPDATE) else ())
                seconds[kind].append(clock() - work_started_s)
            if probe and len(message_s) < N_TIMED and time.monotonic() - started_s <= STAGE_S:
                backward = Work(stage, WorkKind.BACKWARD, microbatch, peer, step)
                alone_s = _cpu_s(store, backward, None)
                with_messages_s = _cpu_s(store, backward, probe)
                message_s.append((with_messages_s - alone_s) / N_ENDS)
            store.free(step, rounds)
            step += 1
    store.drop_state()
    means = {kind: statistics.fmean(times[N_WARM_UP:]) for kind, times in seconds.items()}
    return means | ({MESSAGE: max(0.0, statistics.fmean(message_s))} if message_s else {})


def _clock() -> Callable[[], float]:
    """CPU seconds of this process if JAX computes on one thread of the CPU, else wall seconds."""
    has_one_thread = len(allowed_cpus()) == 1 or ONE_THREAD in os.environ.get("XLA_FLAGS", "").split()
    return time.process_time if jax.default_backend() == "cpu" and has_one_thread else time.perf_counter


def _cpu_s(store: Store, work: Work, probe: MessageCostProbe | None) -> float:
    """CPU seconds of a Work, while the probe exchanges messages if there is one."""
    _put_inputs(store, work)
    start_s = time.process_time()
    if probe:
        probe.begin()
    store.run(work, 1.0)
    if probe:
        probe.wait()
    return time.process_time() - start_s


def compile_step(store: Store, peer: int, stage: int, step: int) -> None:
    """Compile the functions that compute a microbatch of this step, for tensors of the step's length."""
    store.functions.compile_update()
    store.return_freed_memory()
    with _at_version(store, step):
        for kind in (WorkKind.FORWARD, WorkKind.BACKWARD):
            work = Work(stage, kind, 0, peer, step)
            _put_inputs(store, work)
            store.run(work, 1.0)
        store.free(step, ())


@contextlib.contextmanager
def _at_version(store: Store, step: int) -> Iterator[None]:
    """Inside this context the store's parameters count as the version with which a step begins."""
    versions = store.parameter_versions
    version, versions.version = versions.version, step
    yield
    versions.version = version
    store.reset_error_feedback()


def _put_inputs(store: Store, work: Work) -> None:
    """Give the store zeros for the boundary tensor that a Work needs, if it needs one."""
    if work.kind in INPUTS:
        kind, offset = INPUTS[work.kind]
        is_at_end = store.functions.last if work.kind == WorkKind.BACKWARD else store.functions.first
        if not is_at_end:
            assert work.step is not None and work.microbatch is not None, "it computes a microbatch of a step"
            key = ev.Key(kind, work.step, work.stage + offset, work.microbatch)
            dtype, shape = store.boundary_codec.wire_leaf(key)
            store.put(ev.Boundary(key), 0, np.zeros(shape, dtype))
