"""How a process of a run sets up jax before its first computation."""

from pathlib import Path

import jax


def set_up_jax(cache_dir: Path) -> None:
    """Make each computation wait for its result on the thread that calls it, and keep compiled programs on disk."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_compilation_cache_dir", str(cache_dir))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
