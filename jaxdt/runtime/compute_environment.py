"""The environment of processes that compute: settings of glibc's allocator and of XLA's threads, and their CPUs."""

import ctypes
import os

from jaxdt.run.cpus import allowed_cpus, cpus_text
from jaxdt.run.errors import BadInput

# A jitted call returns arrays of megabytes. By default glibc returns their memory to the system when they are freed and
# faults it in again at the next call: 14,000 pages a call, a fifth of the time of a small stage. glibc reads these
# variables when a process starts.
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MALLOC_ARENA_MAX": "1",
}


def return_freed_memory() -> None:
    """Give the pages of freed memory back to the system, also those between arrays that are in use. With the settings
    above glibc never does so by itself. Other C libraries cannot be told."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


# Peers that share CPUs compute on one thread each, a part of XLA_FLAGS. The simulator assumes this, and more threads
# would only compete for the CPUs.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def n_threads() -> int:
    """On how many threads XLA computes on the CPU in this process: it takes all CPUs of the process's mask."""
    if ONE_THREAD in os.environ.get("XLA_FLAGS", ""):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_cpus(cpus: list[str]) -> None:
    """Confine this process to some CPUs, where the system can; before jax is imported, which counts them."""
    if not cpus:
        return
    if not all(cpu.isdigit() for cpu in cpus):
        raise BadInput(f"--cpus: got {','.join(cpus)}, expected numbers separated by commas")
    if not {int(cpu) for cpu in cpus} <= set(allowed_cpus()):
        raise BadInput(f"--cpus: got {','.join(cpus)}, this process may use {cpus_text(allowed_cpus())}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus})
    if len(cpus) == 1:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()
