"""Seconds of a peer's compiled stage functions, taken before it joins: what the simulator predicts a step from.

On a CPU the process's CPU seconds are taken, not the wall's: peers that share cores time themselves at the same moment,
and the simulator models the sharing itself. On an accelerator it is the wall clock.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxdt.codec import decode, encode
from jaxdt.core.codec import CodecSpec
from jaxdt.core.events import BACKWARD, EVALUATE, FORWARD, GATHER, UPDATE, Boundary, Key, Reduced, Round, SliceKey, Work
from jaxdt.core.profile import CodecTimes
from jaxdt.runtime.buffer import aligned_empty
from jaxdt.runtime.store import Store

N_WARM_UP, N_TIMED = 2, 8
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
    store: Store, peer: int, stage: int, groups: dict[str, int], evaluates: bool, microbatch: int = 0
) -> dict[str, float]:
    """Mean seconds per kind of Work (medians leave out the slow ones, which a step waits for too), through the store's
    own code, decoding and encoding included, with inputs of zeros. `groups`: the run's names of this stage's sync
    groups and their sizes; `microbatch`: one of the pipeline whose codecs to take. Parameters and optimizer state are
    the same afterwards."""
    params, opt_state, functions = store.params, store.opt_state, store.functions
    store.opt_state = functions.init_optimizer(params)  # an update donates it
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    kinds = [FORWARD, BACKWARD, *([EVALUATE] if evaluates else []), GATHER, UPDATE]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    rounds = tuple(Round(0, name, 0) for name in groups)
    for _ in range(N_WARM_UP + N_TIMED):
        for kind in kinds:
            work = Work(stage, kind, microbatch, peer, 0)
            _put_inputs(store, work, groups)
            start_s = clock()
            store.run(work, 1.0, rounds if kind == UPDATE else ())
            seconds[kind].append(clock() - start_s)
        store.free(0)
    store.params, store.opt_state = params, opt_state
    store.crossing.forget()
    return {kind: statistics.fmean(times[N_WARM_UP:]) for kind, times in seconds.items()}


def _put_inputs(store: Store, work: Work, groups: dict[str, int]) -> None:
    if work.kind in INPUTS:
        kind, offset = INPUTS[work.kind]
        at_the_end = store.functions.last if work.kind == BACKWARD else store.functions.first
        if not at_the_end:
            key = Key(kind, 0, work.stage + offset, work.microbatch)
            dtype, shape = store.crossing.leaf(key)
            store.put(Boundary(key), 0, np.zeros(shape, dtype))
    elif work.kind == UPDATE:
        for name, n_elements in groups.items():
            total = aligned_empty((n_elements,), np.dtype(np.float32))
            total.fill(0.0)
            store.put(Reduced(SliceKey(Round(0, name, 0), 0, n_elements), (), 0, 0, 0.0), 0, total)
