"""The doctor's findings about links, ports, disk, tokens and clock."""

import importlib.metadata
import socket

import numpy as np

from jaxdt.model.data import HEADER_BYTES, write_tokens
from jaxdt.run.network import Network, uniform
from jaxdt.runtime.calibrate import doctor
from jaxdt.runtime.identity import authority


def settings(**values):
    return lambda name: values.get(name.rpartition(".")[2])


def test_a_link_that_needs_more_than_the_system_allows_names_the_command():
    network = uniform(2, latency_s=0.05, bandwidth_gbps=1.0)  # 12.5 MB in flight, twice that is asked for
    roomy = settings(tcp_rmem="4096 131072 25000000", tcp_wmem="4096 16384 25000000", tcp_slow_start_after_idle="0")
    assert [finding.mend for finding in doctor.links(network, [0, 1], roomy)] == ["", ""]
    small = settings(tcp_rmem="4096 131072 24999999", tcp_wmem="4096 16384 25000000", tcp_slow_start_after_idle="1")
    found = list(doctor.links(network, [0, 1], small))
    assert [finding.mend for finding in found] == [
        "sysctl -w net.ipv4.tcp_rmem='4096 131072 25000000'",
        "sysctl -w net.ipv4.tcp_rmem='4096 131072 25000000'",
        "sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
    ]


def test_one_command_does_not_undo_another():
    """Two links need 5 MB and two 10, more than the system allows; what mends one covers all."""
    latency_s, gbps = ((0.01, 0.01, 0.01),) * 3, ((0, 1.0, 2.0), (1.0, 0, 0.0), (2.0, 0.0, 0))
    network = Network(uniform(3).devices, latency_s, gbps)
    small = settings(tcp_rmem="4096 131072 9000000", tcp_wmem="4096 16384 65536", tcp_slow_start_after_idle="0")
    found = list(doctor.links(network, [0, 1, 2], small))
    mends = {finding.what: finding.mend for finding in found}
    assert set(mends) == {
        "link device0 -> device1", "link device1 -> device0", "link device0 -> device2", "link device2 -> device0",
    }  # fmt: skip
    wmem = "sysctl -w net.ipv4.tcp_wmem='4096 16384 10000000'"
    assert mends["link device0 -> device1"] == wmem
    assert mends["link device0 -> device2"] == f"sysctl -w net.ipv4.tcp_rmem='4096 131072 10000000'; {wmem}"


def test_only_the_links_of_the_plan_count():
    assert list(doctor.links(uniform(3, 0.1, 10.0), [1], settings())) == []


def test_a_port_in_use_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        (finding,) = doctor.port(("127.0.0.1", number))
        assert finding.mend == f"ss -ltnp 'sport = :{number}'   # who has it"
        (finding,) = doctor.reach(("127.0.0.1", number))
        assert finding.seen.startswith(f"127.0.0.1:{number} answers in") and not finding.mend
    (finding,) = doctor.port(("127.0.0.1", number))
    assert not finding.mend
    (finding,) = doctor.reach(("127.0.0.1", number))
    assert "refused" in finding.seen and f"open port {number}" in finding.mend


def test_disk_room_for_the_checkpoints(tmp_path):
    (finding,) = doctor.disk(tmp_path / "not" / "there", 3, 1)
    assert "3 checkpoints" in finding.seen and not finding.mend
    (finding,) = doctor.disk(tmp_path, 3, 10**18)
    assert finding.mend == "choose another --run_dir"


def test_the_clock_must_lie_within_the_credential(tmp_path):
    authority.create_run(tmp_path)
    (finding,) = doctor.validity(authority.coordinator_file(tmp_path))
    assert not finding.mend


def test_a_clock_that_nothing_sets_is_found():
    assert not list(doctor.clock(None))
    assert [finding.mend for finding in doctor.clock(0.01)] == [""]
    for error_s in (5.0, float("inf")):
        assert [finding.mend for finding in doctor.clock(error_s)] == ["timedatectl set-ntp true"]
    assert doctor.clock_error_s() is None or doctor.clock_error_s() >= 0


def test_damaged_tokens_are_found(tmp_path):
    file = write_tokens(tmp_path / "x.tok", "bytes", 256, np.arange(200), np.arange(100))
    (finding,) = doctor.tokens(file)
    assert finding.seen.endswith("300 of bytes, whole") and not finding.mend
    content = bytearray(file.path.read_bytes())
    content[HEADER_BYTES] ^= 1
    file.path.write_bytes(content)
    (finding,) = doctor.tokens(file)
    assert "tokens have SHA256" in finding.seen and finding.mend


def test_a_package_that_is_missing_is_found(monkeypatch):
    assert not any(finding.mend for finding in doctor.versions())

    def gone(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", gone)
    assert {finding.mend for finding in doctor.versions()} == {"", "pip install -e ."}


def test_a_gpu_that_nothing_uses_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "none")
    assert not any(finding.mend for finding in doctor.devices())
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert any("unset JAX_PLATFORMS" in finding.mend for finding in doctor.devices())
    monkeypatch.delenv("JAX_PLATFORMS")
    assert any("cuda" in finding.mend for finding in doctor.devices())
