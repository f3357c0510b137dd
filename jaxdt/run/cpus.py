"""The CPUs that this process may use: the numbers in its mask, and the share that its control groups leave of them.

A container, a batch system or `taskset` gives a process some of its machine's CPUs, under the system's own numbers
(`2,3`); a quota leaves it fewer cores' worth of time than the mask has CPUs (`0.5`). `os.cpu_count()` knows neither.
"""

import os
import re
from collections.abc import Iterator
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
        memberships, mounts = _lines(CGROUPS), _lines(MOUNTS)
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
    for kind, root, mounted_at in _cgroup_mounts(mounts):
        if kind in group_of:
            # A container sees its own group as the root of the mount, while its membership may name the whole path.
            group = group_of[kind]
            below = group.removeprefix(root) if root != "/" and (group + "/").startswith(root + "/") else group
            folder = Path(mounted_at, below.lstrip("/"))
            inner = [folder, *folder.parents][: len(folder.parts) - len(Path(mounted_at).parts) + 1]
            quotas += [quota for path in inner if (quota := _quota(path)) is not None]
    return quotas


def _lines(path: Path) -> list[str]:
    """The lines of a file of the system. Names in it are those of files, which need not be text."""
    return path.read_bytes().decode(errors="surrogateescape").rstrip("\n").split("\n")


def _cgroup_mounts(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """(type, root, mount point) of each mounted tree of control groups that has quotas of CPUs. A blank separates the
    fields of a line, of which any may be empty; one inside a field stands there as a backslash and its octal number."""
    for line in lines:
        mount, _, system = line.partition(" - ")
        kind, _, options, *_ = [*system.split(" "), "", "", ""]
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            root, mounted_at = (_unescaped(field) for field in mount.split(" ")[3:5])
            yield kind, root, mounted_at


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda number: chr(int(number[1], 8)), field)


def _quota(folder: Path) -> float | None:
    """The quota of one control group, in cores; None if it has none, or if this user may not enter its folder."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        elif (folder / "cpu.cfs_quota_us").exists():
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        else:
            return None
    except PermissionError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
