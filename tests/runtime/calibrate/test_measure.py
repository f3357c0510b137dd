"""Measured parts explain the stages that they were taken from; measured links are those that were emulated."""

import json
import socket
import threading
from dataclasses import replace

import pytest

from jaxdt.run import network as networks
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Link
from jaxdt.run.profile import DeviceKind, PartTimes, Profile, stage_seconds
from jaxdt.runtime.calibrate.layer_times import STAGES, kind_of, unlike_layers
from jaxdt.runtime.calibrate.measure_links import MeasuredLink, MeasuringHost, network_of
from jaxdt.runtime.net.shaper import LinkShape

KIND = DeviceKind(PartTimes(1, 2, 0.25, 0.5), PartTimes(0.5, 0.25, 0.125, 0.25), PartTimes(3, 4, 0.5, 0.75), 0.125)


def test_parts_explain_the_stages_exactly():
    profile = Profile(GPTConfig.of("debug", n_layers=STAGES[-1][1]), 2, {"x": KIND})
    stages = [stage_seconds(profile, "x", lo, hi) for lo, hi in STAGES]
    assert kind_of(stages, {}, 0.0) == KIND


def test_noise_makes_no_part_negative():
    stages = [dict.fromkeys("FBEGU", seconds) for seconds in (1.0, 2.0, 1.5, 0.5)]
    kind = kind_of(stages, {}, 0.0)
    assert kind.layer == PartTimes() and kind.embedding == PartTimes() and kind.work_s == 2.0


def test_layers_that_are_not_like_the_others_are_timed_apart():
    """Those on either side of a compression pair, but for the first and the last layer."""
    plain = GPTConfig.of("debug", n_layers=6)
    pair = replace(plain, compression="maxout2", compression_after=(2, 5))
    shared = replace(plain, n_shared_blocks=3)
    equal = pair.with_equal_layers(4)
    layer = equal.facts.layers[1]
    assert equal == plain.with_equal_layers(4) == shared.with_equal_layers(4) == replace(plain, n_layers=4)
    assert unlike_layers(plain.facts, layer) == unlike_layers(shared.facts, layer) == []
    assert unlike_layers(pair.facts, layer) == [1, 2]  # the sender is like that of layer 4
    times = {"1": PartTimes(10, 20, 30, 40)}
    profile = Profile(pair, 2, {"x": replace(KIND, other_layers=times)})
    assert stage_seconds(profile, "x", 2, 4) == stage_seconds(Profile(plain, 2, {"x": KIND}), "x", 2, 4)
    assert stage_seconds(profile, "x", 3, 5)["F"] == KIND.work_s + 1 + 10
    assert stage_seconds(profile, "x", 3, 5)["U"] == 0.5 + 40


@pytest.fixture
def measured():
    """network.json as three hosts measured it over emulated links, unequal in the two directions."""
    latency_s = 0.02
    gbps = {(0, 1): 0.08, (1, 0): 0.04, (0, 2): 0.02, (2, 0): 0.08, (1, 2): 0.04, (2, 1): 0.02}
    addresses = free_addresses(3)
    hosts = [
        MeasuringHost(me, addresses, None, 0.1, lambda dst, me=me: LinkShape(latency_s, gbps[me, dst]))
        for me in range(3)
    ]
    lines = []
    with hosts[0], hosts[1], hosts[2]:
        followers = [threading.Thread(target=host.follow) for host in hosts[1:]]
        for thread in followers:
            thread.start()
        content = hosts[0].lead(["a", "b", "c"], lambda *line: lines.append(line))
        for thread in followers:
            thread.join(10)
            assert not thread.is_alive()
    assert [(src, dst) for src, dst, _ in lines] == sorted(gbps)
    return content, latency_s, gbps


def test_repeated_measurements_give_percentiles():
    links = {
        (0, 1): [MeasuredLink(0.3, gbps, 0.5 * gbps) for gbps in (4.0, 2.0, 3.0, 1.0, 5.0)],
        (1, 0): [MeasuredLink(latency_s, 8.0, 4.0) for latency_s in (0.2, 0.1, 0.2, 0.2, 0.2)],
    }
    content = network_of(["a", "b"], links)
    network = networks.parse(json.dumps(content), "measured")
    assert (network.link(0, 1), network.link(1, 0)) == (Link(0.3, 3.0), Link(0.1, 8.0))
    assert content["short_gbps"] == ((0.0, 1.5), (4.0, 0.0))
    found = [network.at_percentile(percentile).link(0, 1).bandwidth_gbps for percentile in (10, 50, 90)]
    assert found == pytest.approx([1.4, 3.0, 4.6])
    few = network_of(["a", "b"], {pair: found[:2] for pair, found in links.items()})
    assert "bandwidth_percentiles" not in few


def free_addresses(n):
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    addresses = [server.getsockname() for server in servers]
    for server in servers:
        server.close()
    return addresses


def test_links_are_found_as_they_are_emulated(measured):
    """A busy machine makes links look slower; they look faster only as far as its round trips were slow."""
    content, latency_s, gbps = measured
    network = networks.parse(json.dumps(content), "measured")
    for (src, dst), expected in gbps.items():
        link = network.link(src, dst)
        assert link.latency_s >= 0.99 * latency_s
        assert 0 < link.bandwidth_gbps <= 2 * expected
        assert 0 < content["short_gbps"][src][dst] <= 4 * expected
