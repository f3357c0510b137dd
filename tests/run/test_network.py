import json
import math

import pytest

from jaxdt.run.errors import BadInput
from jaxdt.run.network import Device, Link, Network, load, parse, to_json, uniform

DATA = {
    "name": "two",
    "devices": [{"name": "a", "region": "Paris", "memory_bytes": 8}, {"name": "b", "host": "h1", "kind": "cpu"}],
    "latency_ms": [[0, 80], [90, 0]],
    "bandwidth_gbps": [[0, 0.5], [2, 0]],
}


def changed(**fields):
    return json.dumps(DATA | fields)


def test_a_transfer_is_latency_and_bits_over_bandwidth():
    link = Link(latency_s=0.1, bandwidth_gbps=2.0)
    assert link.occupied_s(500_000_000) == 2.0
    assert link.transfer_s(500_000_000) == pytest.approx(2.1)
    assert link.transfer_s(0) == 0.1


def test_links_without_a_limit_and_without_a_line():
    assert Link().transfer_s(10**12) == 0.0
    assert Link(0.5, 0.0).transfer_s(1) == math.inf
    assert Link(0.5, 0.0).transfer_s(0) == 0.5


def test_parse_reads_directed_matrices_and_converts_milliseconds():
    network = parse(json.dumps(DATA), "n.json")
    assert network.devices == (Device("a", "Paris", memory_bytes=8), Device("b", kind="cpu", host="h1"))
    assert network.link(0, 1) == Link(0.08, 0.5)
    assert network.link(1, 0) == Link(0.09, 2.0)
    assert network.link(1, 1) == Link()
    assert (network.name, network.n_devices) == ("two", 2)


def test_json_round_trip(tmp_path):
    network = parse(json.dumps(DATA), "n.json")
    path = tmp_path / "n.json"
    path.write_text(json.dumps(to_json(network)))
    assert load(path) == network


PERCENTILES = [
    {"percentile": 10, "bandwidth_gbps": [[0, 0.1], [1.5, 0]]},
    {"percentile": 90, "bandwidth_gbps": [[0, 0.75], [2.5, 0]]},
]


def test_a_network_at_one_of_its_percentiles():
    network = parse(changed(bandwidth_percentiles=PERCENTILES), "n.json")
    slow = network.at_percentile(10)
    assert (slow.link(0, 1), slow.link(1, 0)) == (Link(0.08, 0.1), Link(0.09, 1.5))
    assert network.at_percentile(None) is network
    assert slow.at_percentile(90).link(1, 0) == Link(0.09, 2.5)
    assert parse(json.dumps(to_json(network)), "n.json") == network
    with pytest.raises(BadInput, match="--percentile: got 50, the bandwidth_percentiles of two are 10, 90"):
        network.at_percentile(50)
    with pytest.raises(BadInput, match="are none"):
        parse(json.dumps(DATA), "n.json").at_percentile(10)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (3, "bandwidth_percentiles: got int, expected a list"),
        ([3], r"bandwidth_percentiles\[0\].percentile: got None, expected an integer from 0 to 100"),
        (PERCENTILES[::-1], r"bandwidth_percentiles\[1\].percentile: got 10, expected an integer from 91 to 100"),
        ([{"percentile": 10}], r"bandwidth_percentiles\[0\]: bandwidth_gbps: got NoneType"),
        ([PERCENTILES[1] | {"percentile": 5}, PERCENTILES[0]], r"\[0\]\[1\]: got 0.1, expected at least the 0.75 of"),
    ],
)
def test_percentiles_ascend(entries, message):
    with pytest.raises(BadInput, match=message) as error:
        parse(changed(bandwidth_percentiles=entries), "n.json")
    assert "\n" not in str(error.value)


def test_a_uniform_network_shares_one_host():
    network = uniform(3, 0.01, 5.0)
    assert network.link(2, 0) == Link(0.01, 5.0)
    assert {device.host for device in network.devices} == {"local"}
    assert len({device.name for device in network.devices}) == 3
    assert isinstance(network, Network)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "n.json: not JSON"),
        ("[]", "n.json: got a list, expected an object"),
        (changed(devices=[]), "n.json: devices: got list, expected a list of at least one device"),
        (changed(devices=[{"name": "a"}, {"nam": "b"}]), r"n.json: devices\[1\]: expected an object with a name"),
        (changed(devices=[{"name": "a"}, {"name": "a"}]), "n.json: devices: the name 'a' occurs 2 times"),
        (
            changed(devices=[{"name": "a"}, {"name": "b", "memory_bytes": 0}]),
            r"devices\[1\].memory_bytes: got 0, expected a positive integer",
        ),
        (changed(latency_ms=[[0, 1]]), "n.json: latency_ms: got 1 rows, expected 2 rows for 2 devices"),
        (changed(latency_ms=None), "n.json: latency_ms: got NoneType, expected 2 rows"),
        (changed(latency_ms=[[0, 1], [2]]), r"n.json: latency_ms\[1\]: got 1 numbers, expected 2 numbers"),
        (changed(latency_ms=[[0, -1], [2, 0]]), r"n.json: latency_ms\[0\]\[1\]: got -1, expected a finite number >= 0"),
        (changed(bandwidth_gbps=[[0, 1], ["2", 0]]), r"bandwidth_gbps\[1\]\[0\]: got '2', expected a finite number"),
        (changed(bandwidth_gbps=[[0, 1], [True, 0]]), r"bandwidth_gbps\[1\]\[0\]: got True, expected a finite number"),
        (changed(bandwidth_gbps=[[0, math.nan], [1, 0]]), r"bandwidth_gbps\[0\]\[1\]: got nan, expected a finite"),
        (changed(latency_ms=[[0, 1e9], [2, 0]]), r"latency_ms\[0\]\[1\]: got 1000000000.0, expected .* to 100000$"),
        (
            changed(bandwidth_gbps=[[0, 1e-300], [1, 0]]),
            r"\[0\]\[1\]: got 1e-300, expected .* 1e-06 .* or 0, for no link",
        ),
        (changed(latencyms=[]), r'n.json: latencyms: unknown field \(did you mean "latency_ms"\?\)'),
        (
            changed(devices=[{"name": "a", "memory_gb": 24}, {"name": "b"}]),
            r'n.json: devices\[0\]: memory_gb: unknown field \(did you mean "memory_bytes"\?\)',
        ),
        (changed(hosts=[{"name": "h1", "core": 2}]), r'core: unknown field \(did you mean "cores"\?\)'),
        (changed(hosts=[{"name": "h1", "out_gbps": 1e-300}]), "hosts: h1: out_gbps: got 1e-300, expected .* >= 1e-06"),
        (
            changed(bandwidth_percentiles=[PERCENTILES[0] | {"bandwith": 1}]),
            r"bandwidth_percentiles\[0\]: bandwith: unknown field",
        ),
        (
            changed(devices=[{"name": "a\x1b[2J"}, {"name": "b"}]),
            r"devices\[0\]: name: got 'a\\x1b\[2J', expected text",
        ),
        (changed(devices=[{"name": "a", "kind": 3}, {"name": "b"}]), r"devices\[0\].kind: got 3, expected a text"),
        (changed(bandwidth_gbps=[[0, math.inf], [1, 0]]), r"bandwidth_gbps\[0\]\[1\]: got inf, expected a finite"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(text, message):
    with pytest.raises(BadInput, match=message) as caught:
        parse(text, "n.json")
    assert "\n" not in str(caught.value)


def test_the_diagonal_is_not_read():
    network = parse(changed(latency_ms=[[None, 1], [2, "x"]]), "n.json")
    assert network.latency_s == ((0.0, 0.001), (0.002, 0.0))


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(BadInput, match="none.json: cannot be read"):
        load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="binary.json: cannot be read"):
        load(tmp_path / "binary.json")
