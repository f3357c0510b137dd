"""Settings through environment variables: of jax, and of glibc's allocator. A script calls these functions first thing
in its main.

jax reads the variables when it is imported, but uses their values only when it computes for the first time. So a call
takes effect at any moment before the first computation, whatever the order of a script's imports.
"""

import os
import sys

from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT


def compute_on_cpu() -> None:
    """Make this process and its children compute on the CPU, unless JAX_PLATFORMS says otherwise."""
    platforms = os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_platforms", platforms)


def keep_off_gpus() -> None:
    """Keep this process, which computes nothing, off the GPUs, whatever JAX_PLATFORMS says: jax would take their memory
    from the peers. Its children get the environment that its caller gave it. jax takes half a second to import, so this
    does not import it: who imports jax later calls this again."""
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_platforms", "cpu")


def restart_with_malloc_settings() -> None:
    """Start this process, which computes, again with the settings of glibc's allocator that it needs, unless it has
    them: glibc reads them when a process starts."""
    if sys.platform == "linux" and not MALLOC_ENVIRONMENT.keys() <= os.environ.keys():
        os.environ.update(MALLOC_ENVIRONMENT)
        os.execv(sys.executable, sys.orig_argv)
