"""CPUs by mask and quota, from files as the system shows them on hosts and in containers."""

import os

import pytest

from jaxdt.run import cpus

V2 = "31 23 0:28 {root} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 {root} {at} rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Two files under /proc, and a mask of the CPUs 4 to 7."""
    monkeypatch.setattr(cpus, "allowed_cpus", lambda: [4, 5, 6, 7])
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(cpus, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cpus, "MOUNTS", tmp_path / "mountinfo")

    def show(memberships, mount, root, quotas, others=b"", at="groups"):
        """`quotas`: the files of quotas, below the mount, with their content. `others`: lines of other mounts."""
        at = tmp_path / at
        (tmp_path / "cgroup").write_text("\n".join([*memberships, "3:pids:/elsewhere", ""]))
        line = mount.format(root=root, at=str(at).replace(" ", r"\040"))
        (tmp_path / "mountinfo").write_bytes(b"22 1 8:1 / / rw - ext4 /dev/a rw\n" + others + line.encode() + b"\n")
        for name, content in quotas.items():
            (at / name).parent.mkdir(parents=True, exist_ok=True)
            (at / name).write_text(content)

    return show


@pytest.mark.parametrize(
    ("memberships", "mount", "root", "quotas", "cores"),
    [
        (["0::/"], V2, "/", {}, 4.0),
        (["0::/"], V2, "/", {"cpu.max": "50000 100000\n"}, 0.5),
        (["0::/a/b"], V2, "/", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        (["0::/a/b"], V2, "/", {"a/b/cpu.max": "900000 100000\n", "x/cpu.max": "10000 100000\n"}, 4.0),
        (
            ["5:cpu,cpuacct:/docker/1f"],
            V1,
            "/docker/1f",  # a container of version 1 sees its own group as the root of the mount
            {"cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"},
            2.0,
        ),
        (
            ["5:cpu,cpuacct:/jobs/7"],
            V1,
            "/",
            {"jobs/7/cpu.cfs_quota_us": "-1\n", "jobs/7/cpu.cfs_period_us": "100000\n"},
            4.0,
        ),
    ],
)
def test_the_smallest_quota_counts_and_the_mask_bounds_it(system, memberships, mount, root, quotas, cores):
    system(memberships, mount, root, quotas)
    assert cpus.usable_cores() == cores


def test_the_text_names_what_limits_the_cores(system):
    system(["0::/"], V2, "/", {"cpu.max": "50000 100000\n"})
    assert cpus.cores_text() == "0.5 (a quota; CPUs 4,5,6,7 of 16)"


def test_a_system_without_control_groups_has_its_mask(system, tmp_path):
    assert not (tmp_path / "cgroup").exists() and cpus.usable_cores() == 4.0


@pytest.mark.parametrize(
    "other",
    [
        b"40 22 0:9 / /mnt rw,relatime - tmpfs  rw\n",  # its source is empty
        b"40 22 0:9 / /mnt/m\xff rw,relatime - tmpfs none rw\n",
        "40 22 0:9 / /mnt/\u2028\x85\x0c rw,relatime - tmpfs none rw\n".encode(),
        b"40 22 0:9 / /mnt rw,relatime - fuse.x a\n",
    ],
)
def test_other_mounts_may_have_any_name(system, other):
    system(["0::/"], V2, "/", {"cpu.max": "50000 100000\n"}, other)
    assert cpus.usable_cores() == 0.5


def test_control_groups_below_a_name_with_blanks_count(system):
    system(["0::/"], V2, "/", {"cpu.max": "50000 100000\n"}, at="my groups")
    assert cpus.usable_cores() == 0.5


def test_control_groups_that_this_user_may_not_enter_do_not(system, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    system(["0::/"], V2, "/", {"cpu.max": "50000 100000\n"})
    monkeypatch.setattr(cpus.Path, "exists", refuse)
    assert cpus.usable_cores() == 4.0
