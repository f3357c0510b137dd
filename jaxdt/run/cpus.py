"""The CPUs that this process may use: the numbers in its mask, and the share that its control groups leave of them.

A container, a batch system or `taskset` gives a process some of its machine's CPUs, under the system's own numbers
(`2,3`); a quota leaves it fewer cores' worth of time than the mask has CPUs (`0.5`). `os.cpu_count()` knows neither.
"""

import os
from pathlib import Path

CGROUPS, MOUNTS = Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")


def allowed_cpus() -> list[int]:
    """The numbers of the CPUs that this process may use, in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> float:
    """How many cores' worth of time this process and its children may use: the CPUs of its mask, or the smallest quota
    of its control groups if that is less."""
    return min([float(len(allowed_cpus())), *_quotas()])


def cores_text() -> str:
    """The usable cores, and what limits them where that is less than the machine has: `0.5 (a quota; CPUs 2,3 of
    16)`."""
    cpus, n_machine = allowed_cpus(), os.cpu_count() or 1
    limits = ["a quota"] if usable_cores() < len(cpus) else []
    limits += [f"CPUs {cpus_text(cpus)} of {n_machine}"] if len(cpus) < n_machine else []
    return f"{usable_cores():g}" + (f" ({'; '.join(limits)})" if limits else "")


def cpus_text(cpus: list[int]) -> str:
    return ",".join(map(str, cpus))


def _quotas() -> list[float]:
    """The quotas, in cores, of the control groups that hold this process and of those around them, versions 1 and 2."""
    try:
        memberships, mounts = CGROUPS.read_text().splitlines(), MOUNTS.read_text().splitlines()
    except FileNotFoundError:  # not a Linux
        return []
    group_of: dict[str, str] = {}  # by the type of the file system that shows the group
    for line in memberships:
        number, controllers, group = line.split(":", 2)
        if number == "0":
            group_of["cgroup2"] = group
        elif "cpu" in controllers.split(","):
            group_of["cgroup"] = group
    quotas: list[float] = []
    for line in mounts:
        mount, _, system = line.partition(" - ")
        root, mounted_at = mount.split()[3:5]
        kind, _, options = system.split()[:3]
        if kind in group_of and (kind == "cgroup2" or "cpu" in options.split(",")):
            # A container sees its own group as the root of the mount, while its membership may name the whole path.
            group = group_of[kind]
            below = group.removeprefix(root) if root != "/" and (group + "/").startswith(root + "/") else group
            folder = Path(mounted_at, below.lstrip("/"))
            inner = [folder, *folder.parents][: len(folder.parts) - len(Path(mounted_at).parts) + 1]
            quotas += [quota for path in inner if (quota := _quota(path)) is not None]
    return quotas


def _quota(folder: Path) -> float | None:
    """The quota of one control group, in cores; None if it has none."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
    elif (folder / "cpu.cfs_quota_us").exists():
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    else:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
