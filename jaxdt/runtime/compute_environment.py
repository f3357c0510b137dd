"""Environment variables of processes that compute: settings of glibc's allocator and of XLA's threads."""

import os

# A jitted call returns arrays of megabytes. By default glibc returns their memory to the system when they are freed and
# faults it in again at the next call: 14,000 pages a call, a fifth of the time of a small stage. glibc reads these
# variables when a process starts.
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MALLOC_ARENA_MAX": "1",
}

# Peers that share CPUs compute on one thread each, a part of XLA_FLAGS. The simulator assumes this, and more threads
# would only compete for the CPUs.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def n_threads() -> int:
    """On how many threads XLA computes on the CPU in this process: it takes all CPUs of the process's mask."""
    if ONE_THREAD in os.environ.get("XLA_FLAGS", ""):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
