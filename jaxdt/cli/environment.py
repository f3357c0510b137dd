"""Settings of jax through environment variables. A script calls these functions first thing in its main.

jax reads the variables when it is imported, but uses their values only when it computes for the first time. So a call
takes effect at any moment before the first computation, whatever the order of a script's imports.
"""

import os
import sys


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
