"""The GPUs that each peer of a host gets, as flags of train.py, and the effect of those flags on jax. Needs no jax.

By default a process of jax computes on the first GPU that it finds and takes 75 % of its memory. So the peers of one
host must be told apart: each gets GPUs of its own, or peers that share one get equal parts of that memory. Flags say
so, since a flag file can hold them for another host; train.py turns them into the environment variables that the
driver (CUDA_VISIBLE_DEVICES, which ROCm reads too) and jax (XLA_CLIENT_MEM_FRACTION) read.
"""

import importlib.metadata
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction

from jaxdt.run.errors import BadInput

MEMORY_FRAC = 0.75  # of a GPU, what one process of jax takes by default; processes that share a GPU share that
# Both names are read; to set both is an error in jax.
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
COUNT = "import jax; print(sum(device.platform == 'gpu' for device in jax.local_devices()))"
COUNT_S_MAX = 120.0


def parse_gpus_per_peer(text: str) -> Fraction | None:
    """The value of --gpus_per_peer: "2", or "1/4" for four peers on one GPU; None for ''."""
    if not text:
        return None
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if number <= 0 or 1 not in (number.numerator, number.denominator):
        raise BadInput(f"--gpus_per_peer: got {text!r}, expected an integer >= 1, or 1/N for N peers on one GPU")
    return number


def flags_of_peers(peers: Sequence[int], gpus: Sequence[str], per_peer: Fraction) -> dict[int, list[str]]:
    """The flags of train.py for each of the `peers` of one host whose GPUs have these names."""
    if len(peers) * per_peer > len(gpus):
        raise BadInput(
            f"--gpus_per_peer: got {per_peer} for each of {len(peers)} peers, this machine has {len(gpus)} GPUs, "
            f"expected at most {_most(len(peers), len(gpus))}"
        )
    n_gpus = per_peer.numerator
    n_sharing = per_peer.denominator
    flags: dict[int, list[str]] = {}
    for place, peer in enumerate(peers):
        first = place * n_gpus // n_sharing
        flags[peer] = [f"--gpus={','.join(gpus[first : first + n_gpus])}"]
        if n_sharing > 1 and not any(name in os.environ for name in MEMORY_VARIABLES):
            flags[peer].append(f"--gpu_memory_frac={MEMORY_FRAC / n_sharing:.4f}")
    return flags


def _most(n_peers: int, n_gpus: int) -> Fraction:
    """The most GPUs for each of n_peers on a host with n_gpus."""
    return Fraction(n_gpus // n_peers) if n_gpus >= n_peers else Fraction(1, math.ceil(n_peers / n_gpus))


def flags_of_local_peers(peers: Sequence[int], platform: str, per_peer: Fraction | None) -> dict[int, list[str]]:
    """The flags for peers that all run on this machine. Without --gpus_per_peer they divide its GPUs, at most one for
    each; no flags where there are none. BadInput where a run for `platform` gets no GPU that it needs."""
    if per_peer is None and (platform not in ("any", "gpu") or (platform == "any" and not may_have_gpus())):
        return {}
    gpus = gpus_here()
    if not gpus and (per_peer or platform == "gpu"):
        asked = f"--gpus_per_peer: got {per_peer}" if per_peer else "platform: got gpu"
        raise BadInput(f"{asked}, but jax finds no GPU on this machine; scripts/doctor.py looks for what is missing")
    if not gpus:
        return {}
    return flags_of_peers(peers, gpus, per_peer or min(Fraction(1), _most(len(peers), len(gpus))))


def flags_of_hosts(host_of: Mapping[int, str], per_peer: Fraction) -> dict[int, list[str]]:
    """The flags for peers on other hosts, each with as many GPUs as its peers need, which are numbered from 0."""
    flags: dict[int, list[str]] = {}
    for host in dict.fromkeys(host_of.values()):
        peers = [peer for peer in sorted(host_of) if host_of[peer] == host]
        n_gpus = math.ceil(len(peers) * per_peer)
        flags |= flags_of_peers(peers, [str(n) for n in range(n_gpus)], per_peer)
    return flags


def may_have_gpus() -> bool:
    """Whether jax has a plugin for GPUs here and may use it. This starts no process, so it costs a CPU host nothing."""
    allowed = os.environ.get("JAX_PLATFORMS", "")
    return allowed != "cpu" and bool(importlib.metadata.entry_points(group="jax_plugins"))


def gpus_here() -> list[str]:
    """The names of the GPUs that jax would use here, as CUDA_VISIBLE_DEVICES lists them. A process of its own looks, so
    that this one takes no memory of them."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    answer = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, timeout=COUNT_S_MAX
    )
    if answer.returncode:
        raise BadInput(f"jax cannot look for GPUs here: {(answer.stderr.strip().splitlines() or ['no reason'])[-1]}")
    n_gpus = int(answer.stdout)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:n_gpus] if visible else [str(n) for n in range(n_gpus)]


def set_gpus(gpus: Sequence[str], memory_frac: float | None) -> None:
    """Confine this process to some GPUs, and to a part of their memory; before jax computes for the first time."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if memory_frac is not None:
        for name in MEMORY_VARIABLES:
            os.environ.pop(name, None)
        os.environ[MEMORY_VARIABLES[0]] = str(memory_frac)
