"""Time the codecs against a copy of the same memory. Prints JSON: a list with one object per codec and shape.

    taskset -c 0 python scripts/bench/bench_codec.py [--codecs=int8,int8-dynamic] [--shapes=1048576,4x512x4096]

  encode_gbps, decode_gbps  1e9 bytes of fp32 input per second: medians over rounds, each of which times every call once
  copy_gbps                 the same for one copy of the tensor: on a CPU into allocated memory, on an accelerator by a
                            compiled program
  copy_ratio                t_copy / (t_encode + t_decode)

On an accelerator several calls are queued before the last one is waited for, so that dispatch is not timed. Quote the
results from an otherwise idle machine only.
"""

import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jaxdt.cli import environment, script_main
from jaxdt.codec.base import decode, encode
from jaxdt.run.codec import AUTO, parse
from jaxdt.run.errors import BadInput

CODECS = flags.DEFINE_list("codecs", ["bf16", "int8", "int8:1024", "int8-dynamic"], "Names of the codecs.")
SHAPES = flags.DEFINE_list("shapes", ["1048576", "4x512x4096"], "Shapes of fp32 tensors, such as 4x512x4096.")
ROUNDS = flags.DEFINE_integer("rounds", 200, "How many times each call is timed.", 1)
QUEUED = 20  # calls in a row on an accelerator
WARM_UP = 5


def main() -> None:
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    for name in CODECS.value:
        if parse(name, "--codecs").name == AUTO:
            raise BadInput("--codecs: got auto, which is a choice between codecs, expected a codec")
    results = []
    for shape in [shape_of(text) for text in SHAPES.value]:
        x = jax.device_put(np.random.default_rng(0).standard_normal(shape, np.float32))
        seconds = timed(calls(x))
        for name in CODECS.value:
            results.append(result(name, shape, seconds, x.nbytes))
    print(json.dumps(results, indent=1))


def shape_of(text: str) -> tuple[int, ...]:
    """(4, 512) of "4x512"."""
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise BadInput(f"--shapes: got {text!r}, expected sizes >= 1 with an x between them, such as 4x512")
    return tuple(map(int, sizes))


def calls(x: jax.Array) -> dict[str, Callable]:
    """The calls that are timed, by name. A result is ready when the call returns, or jax can wait for it."""
    named: dict[str, Callable] = {"copy": copier(x)}
    for name in CODECS.value:
        spec = parse(name)
        encoded = encode(spec, x)
        named[f"encode {name}"] = lambda spec=spec: encode(spec, x)
        named[f"decode {name}"] = lambda spec=spec, encoded=encoded: decode(spec, encoded, x.shape, x.dtype)
    return named


def copier(x: jax.Array) -> Callable:
    """A call that copies x once."""
    if jax.default_backend() == "cpu":
        source, target = np.asarray(x), np.empty(x.shape, np.float32)
        return lambda: np.copyto(target, source)
    copy = jax.jit(jnp.copy)
    return lambda: copy(x)


def timed(named: dict[str, Callable]) -> dict[str, float]:
    """Median seconds of each call."""
    n_queued = 1 if jax.default_backend() == "cpu" else QUEUED
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(WARM_UP + ROUNDS.value):
        for name, call in named.items():
            start_s = time.perf_counter()
            for _ in range(n_queued):
                last = call()
            jax.block_until_ready(last)
            seconds[name].append((time.perf_counter() - start_s) / n_queued)
    return {name: statistics.median(times[WARM_UP:]) for name, times in seconds.items()}


def result(name: str, shape: tuple[int, ...], seconds: dict[str, float], n_bytes: int) -> dict:
    copy_s, encode_s, decode_s = seconds["copy"], seconds[f"encode {name}"], seconds[f"decode {name}"]
    device = jax.devices()[0]
    return {
        "codec": name,
        "device": f"{device.platform}: {device.device_kind}",
        "shape": list(shape),
        "encode_gbps": n_bytes / encode_s / 1e9,
        "decode_gbps": n_bytes / decode_s / 1e9,
        "copy_gbps": n_bytes / copy_s / 1e9,
        "copy_ratio": copy_s / (encode_s + decode_s),
    }


if __name__ == "__main__":
    environment.restart_with_malloc_settings()
    script_main.run(main)
