import time

import numpy as np
import pytest
import transport_nodes
from hypothesis import given
from hypothesis import strategies as st
from transport_nodes import MB, WAIT_S, eventually

from jaxdt.run.errors import BadInput
from jaxdt.run.network import Link
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.net.shaper import LinkShape, Shaper

start, cred, run_credential = transport_nodes.start, transport_nodes.cred, transport_nodes.run_credential  # fixtures


def test_a_transmission_occupies_the_link_and_arrives_a_latency_later():
    link = Link(0.1, 0.008)  # a byte takes a microsecond
    shaper = Shaper(LinkShape(link.latency_s, link.bandwidth_gbps), 0, 1)
    assert shaper.transmit(5.0, 1000) == pytest.approx(5.0 + link.transfer_s(1000)) == pytest.approx(5.101)
    assert shaper.free_s == pytest.approx(5.001)
    assert shaper.transmit(5.0, 2000) == pytest.approx(5.103)  # waits for the link, not for the arrival
    assert shaper.transmit(5.5, 1000) == pytest.approx(5.601)  # an idle link


def test_without_a_bandwidth_limit_only_the_latency_counts():
    shaper = Shaper(LinkShape(latency_s=0.2), 0, 1)
    assert [shaper.transmit(1.0, 1 << 30) for _ in range(3)] == pytest.approx([1.2] * 3)


@given(
    st.lists(st.tuples(st.floats(0, 9), st.integers(0, 10**6)), min_size=1, max_size=20),
    st.floats(0.001, 10),
    st.floats(0, 1),
)
def test_arrivals_keep_their_order_under_jitter(sends, gbps, jitter_s):
    shape = LinkShape(0.1, gbps, jitter_s, seed=3)
    shaper, twin = Shaper(shape, 0, 1), Shaper(shape, 0, 1)
    free_s = 0.0
    last_s = 0.0
    for ready_s, n_bytes in sends:
        due_s = shaper.transmit(ready_s, n_bytes)
        assert due_s == twin.transmit(ready_s, n_bytes)
        free_s = max(ready_s, free_s) + n_bytes * 8 / (gbps * 1e9)
        assert shaper.free_s == pytest.approx(free_s)
        assert due_s >= last_s and due_s >= free_s + 0.1 - 1e-9
        last_s = due_s


def test_drops_come_as_often_as_they_should_and_repeat_with_the_seed():
    def dice(seed):
        shaper = Shaper(LinkShape(drop_prob=0.25, seed=seed), 0, 1)
        return [shaper.drops() for _ in range(1000)]

    assert dice(1) == dice(1) != dice(2)
    assert 200 < sum(dice(1)) < 300
    assert not any(Shaper(LinkShape(), 0, 1).drops() for _ in range(100))


@pytest.mark.parametrize(
    "wrong", [{"latency_s": -1}, {"jitter_s": float("inf")}, {"bandwidth_gbps": 0}, {"drop_prob": 1.0}]
)
def test_an_impossible_shape_is_bad_input(wrong):
    with pytest.raises(BadInput, match=f"shape: {next(iter(wrong))}: got"):
        LinkShape(**wrong)


def test_a_shaped_message_is_held_at_least_as_long_as_the_formula_says(start, cred):
    link = Link(0.05, 0.4)
    a, b = start(0, cred, shape=lambda dst: LinkShape(link.latency_s, link.bandwidth_gbps)), start(1, cred)
    a.connect(b)
    a.transport.send(1, {"warm": "up"})
    b.next()
    payload = np.zeros(2 * MB, np.uint8)
    begun_s = time.monotonic()
    a.transport.send(1, {"n": 1}, [payload])
    assert a.transport.queued_bytes() == payload.nbytes
    b.next()
    assert time.monotonic() - begun_s >= link.transfer_s(payload.nbytes)


def test_a_control_message_takes_the_next_place_on_the_link(start):
    a, b = start(0, shape=lambda dst: LinkShape(latency_s=0.001)), start(1)
    a.connect(b)
    for leaves in ([], [np.zeros(1)]):
        a.transport.send(1, {}, leaves)
        b.next()
    a.channel(1)._writer._shaper._free_s = time.monotonic() + 2 * WAIT_S  # a chunk is on the link for long
    a.transport.send(1, {}, [np.zeros(1)])
    a.transport.send(1, {})
    eventually(lambda: a.channel(1, "control")._writer._delay_line and a.channel(1)._queue.most_urgent())
    assert not a.channel(1)._writer._delay_line


def test_on_a_slow_link_the_urgent_message_waits_for_one_chunk_at_most(start):
    limits = TransportLimits(chunk_bytes=1 << 14)
    a, b = start(0, limits=limits, shape=lambda dst: LinkShape(0.0, 0.01)), start(1)  # 13 ms a chunk
    a.connect(b)
    a.transport.send(1, {"name": "shard"}, [np.zeros(20 << 14, np.uint8)], priority=9)
    b.asked.get(timeout=WAIT_S)
    a.transport.send(1, {"name": "activation"}, [np.zeros(9)], priority=0)
    a.transport.send(1, {"name": "heartbeat"})
    names = [head["name"] for head in b.heads(3)]
    assert set(names[:2]) == {"activation", "heartbeat"} and names[2] == "shard"
