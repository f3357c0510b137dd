"""The limit of file descriptors of a process. Each connection takes one, and the thread that sends on it another."""

import contextlib
import math
import resource
import sys

OTHER_DESCRIPTORS = 128  # files, libraries, the process's own pipes, and connections that are being replaced
COORDINATOR_DESCRIPTORS = 3  # for each peer: a connection in each direction, and the sender's eventfd
NEIGHBOUR_DESCRIPTORS = 6  # the same, for two channels
MACOS_LIMIT = 10240  # OPEN_MAX: the kernel refuses more, whatever the hard limit says


def descriptor_limit() -> float:
    """The most descriptors that a process may have: the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if hard == resource.RLIM_INFINITY else hard


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as the system permits. The usual soft limit of 1024 is there for
    programs that use select(), which none here does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MACOS_LIMIT if sys.platform == "darwin" else hard
    with contextlib.suppress(ValueError, OSError):  # refused; scripts/doctor.py says what is missing
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def descriptors_needed(n_peers: int) -> int:
    """The most descriptors that a process of a run of so many peers needs: those of a peer that talks to all others."""
    return OTHER_DESCRIPTORS + COORDINATOR_DESCRIPTORS + NEIGHBOUR_DESCRIPTORS * (n_peers - 1)
