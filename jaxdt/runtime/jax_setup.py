"""The setup of jax in a process of a run, before its first computation, and the choice of its devices."""

from pathlib import Path

import jax

from jaxdt.model.stage import computes_on
from jaxdt.run.errors import BadInput
from jaxdt.runtime.compute_environment import n_threads


def set_up_jax(cache_dir: Path) -> None:
    """Make each computation wait for its result on the thread that calls it, and keep compiled programs on disk."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_compilation_cache_dir", str(cache_dir))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def check_platform(expected: str) -> None:
    """BadInput if a run that is meant for one platform ("any": for all) would compute on another one here."""
    if expected not in ("any", jax.default_backend()):
        raise BadInput(
            f"platform: here jax computes on {computes_on()}, this run expects {expected}; JAX_PLATFORMS and the "
            "installed jax decide, scripts/doctor.py looks for what is missing"
        )


def device_text(n_devices: int) -> str:
    """On what this process computes, such as "gpu: 2 x NVIDIA H100" or "cpu: 1 x cpu, 2 threads": on a CPU the order of
    sums, and with it their rounding, follows from the number of threads."""
    if jax.default_backend() != "cpu":
        return computes_on(n_devices)
    n = n_threads()
    return f"{computes_on(n_devices)}, {n} thread{'s' * (n != 1)}"
