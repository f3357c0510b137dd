"""What the doctor says about links, ports, disk and clock."""

import socket

from jaxdt.core.network import uniform
from jaxdt.runtime import credential, doctor


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


def test_only_the_links_of_the_plan_count():
    assert list(doctor.links(uniform(3, 0.1, 10.0), [1], settings())) == []


def test_a_port_in_use_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        (finding,) = doctor.port(listen)
        assert finding.mend
    (finding,) = doctor.port(listen)
    assert not finding.mend


def test_disk_room_for_three_checkpoints(tmp_path):
    assert not next(iter(doctor.disk(tmp_path / "not" / "there", 1))).mend
    assert next(iter(doctor.disk(tmp_path, 10**18))).mend


def test_the_clock_must_lie_within_the_credential(tmp_path):
    credential.create(tmp_path / "credential.pem")
    (finding,) = doctor.clock(tmp_path / "credential.pem")
    assert not finding.mend
