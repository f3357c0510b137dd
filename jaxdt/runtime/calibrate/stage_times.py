"""Seconds of a peer's compiled stage functions, taken before it joins: what the simulator predicts a step from.

On a CPU the process's CPU seconds are taken, not the wall's: peers that share cores time themselves at the same moment,
and the simulator models the sharing itself. On an accelerator it is the wall clock.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxdt.codec.base import decode, encode
from jaxdt.protocol.events import Boundary, Key, Round, SliceKey
from jaxdt.runtime.calibrate.message_cost import N_ENDS, MessageCostProbe
from jaxdt.runtime.storage.store import Store
from jaxdt.spec.codec import CodecSpec
from jaxdt.spec.profile import CodecTimes
from jaxdt.spec.work import BACKWARD, EVALUATE, FORWARD, GATHER, MESSAGE, UPDATE, Work

N_WARM_UP, N_TIMED = 2, 8
# A stage is timed for so long if that takes no more rounds: half a second of a machine's time says little of the next.
STAGE_S, N_STAGE_MAX = 3.0, 40
# What a Work takes in over a boundary: the kind of tensor, and the stage that its key names, counted from the Work's.
INPUTS = {FORWARD: ("act", 0), BACKWARD: ("grad", 1), EVALUATE: ("eval", 0)}


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
    groups: dict[str, int],
    evaluates: bool,
    step: int,
    microbatch: int = 0,
    echo: MessageCostProbe | None = None,
) -> dict[str, float]:
    """Mean seconds per kind of Work (medians leave out the slow ones, which a step waits for too), through the store's
    own code, decoding and encoding included, with inputs of zeros as long as `step` has them. `groups`: the run's names
    of this stage's sync groups and their sizes, whose sums are timed with the update: over all slices, a member adds up
    as many numbers as it holds; `microbatch`: one of the pipeline whose codecs to take; `echo`: a MESSAGE too, in CPU
    seconds: how much longer a backward takes during which some are passed. Parameters and optimizer state are the same
    afterwards."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    kinds = [FORWARD, BACKWARD, *([EVALUATE] if evaluates else []), GATHER, UPDATE]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    message_s = []
    began_s = time.monotonic()
    with _as_of(store, step):
        for now in range(step, step + N_WARM_UP + N_STAGE_MAX):
            if now >= step + N_WARM_UP + N_TIMED and time.monotonic() - began_s > STAGE_S:
                break
            rounds = tuple(Round(now, name, 0) for name in groups)
            for kind in kinds:
                work = Work(stage, kind, microbatch, peer, now)
                _put_inputs(store, work)
                start_s = clock()
                for one in rounds if kind == UPDATE else ():
                    store.sum(SliceKey(one, 0, groups[one.group]), (peer,))
                store.run(work, 1.0, rounds if kind in (GATHER, UPDATE) else ())
                seconds[kind].append(clock() - start_s)
            if echo and len(message_s) < N_TIMED and time.monotonic() - began_s <= STAGE_S:
                backward = Work(stage, BACKWARD, microbatch, peer, now)
                alone_s, both_s = (_cpu_s(store, backward, with_it) for with_it in (None, echo))
                message_s.append((both_s - alone_s) / N_ENDS)
            store.free(now, rounds)
    means = {kind: statistics.fmean(times[N_WARM_UP:]) for kind, times in seconds.items()}
    return means | ({MESSAGE: max(0.0, statistics.fmean(message_s))} if message_s else {})


def _cpu_s(store: Store, work: Work, echo: MessageCostProbe | None) -> float:
    _put_inputs(store, work)
    start_s = time.process_time()
    if echo:
        echo.begin()
    store.run(work, 1.0)
    if echo:
        echo.wait()
    return time.process_time() - start_s


def compile_step(store: Store, peer: int, stage: int, step: int) -> None:
    """Have all that computes a microbatch of this step compiled, for tensors as long as the step has them."""
    with _as_of(store, step):
        for kind in (FORWARD, BACKWARD):
            work = Work(stage, kind, 0, peer, step)
            _put_inputs(store, work)
            store.run(work, 1.0)
        store.free(step, ())


@contextlib.contextmanager
def _as_of(store: Store, step: int) -> Iterator[None]:
    """Meanwhile the store's parameters count as those with which a step begins."""
    version, (params, opt_state, *before) = store.versions.version, store.versions.state
    store.versions.put(step, (params, store.functions.init_optimizer(params), *before))  # an update donates it
    yield
    store.versions.put(version, (params, opt_state, *before))
    store.crossing.forget()


def _put_inputs(store: Store, work: Work) -> None:
    if work.kind in INPUTS:
        kind, offset = INPUTS[work.kind]
        at_the_end = store.functions.last if work.kind == BACKWARD else store.functions.first
        if not at_the_end:
            key = Key(kind, work.step, work.stage + offset, work.microbatch)
            dtype, shape = store.crossing.leaf(key)
            store.put(Boundary(key), 0, np.zeros(shape, dtype))
