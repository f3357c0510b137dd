"""A pool's worker measures its links to servers that echo its probes, over a real transport."""

from types import SimpleNamespace

import pytest
import transport_nodes

from jaxdt.membership.link_echo import PADDING_BYTES_MAX, LinkEcho
from jaxdt.protocol import events as ev
from jaxdt.protocol.message import from_plain, to_plain
from jaxdt.runtime import server_links
from jaxdt.runtime.net.address import format_address
from jaxdt.runtime.net.shaper import LinkShape

start = transport_nodes.start  # a fixture
OWN_ID = ev.TEMPORARY_IDS + 5


def echoing(start, server, gbps=None):
    """A server whose answers come over a link of this bandwidth."""
    echo = LinkEcho()

    def on_message(src, head, leaves):
        for send in echo.handle(0.0, from_plain(head)):
            node.transport.send(send.dst, to_plain(ev.Header("r", 0, 0, server), send.body))

    shape = lambda dst: None if gbps is None else LinkShape(0.0, gbps)  # noqa: E731
    node = start(server, on_message=on_message, shape=shape)
    return node


def measured(servers):
    job = SimpleNamespace(run="r", connection_name="run", allow_plaintext=False, load_credential=lambda: None)
    return server_links.measured_gbps(job, OWN_ID, servers)


def test_a_slower_link_is_found_to_be_slower_and_one_without_an_answer_is_none(start, monkeypatch, capsys):
    monkeypatch.setattr(server_links, "ANSWER_S", 2.0)
    fast, slow, silent = echoing(start, 0), echoing(start, 1, gbps=0.02), start(2)
    found = measured({server.me: format_address(server.address) for server in (fast, slow, silent)} | {3: ""})
    assert found[0] > found[1] > found[2] == found[3] == 0.0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("measured its links to the servers: 0: ") and line.endswith(", 2: no answer, 3: no answer")


@pytest.mark.parametrize(("seconds", "gbps"), [(-1e-3, 10.0), (0.0, 10.0), (1e-9, 10.0), (4e-4, 10.0), (4.2e-3, 1.0)])
def test_a_time_near_zero_makes_no_link_faster_than_the_probes_can_tell(seconds, gbps):
    assert server_links.gbps_of(seconds) == pytest.approx(gbps, rel=2e-3)


def test_an_answer_has_at_most_so_much_padding():
    def answer(n_bytes):
        [send] = LinkEcho().handle(0.0, ev.Received(ev.Header("r", 0, 0, OWN_ID), ev.ProbeLink(3, n_bytes)))
        assert send.dst == OWN_ID and isinstance(send.body, ev.LinkProbed) and send.body.number == 3
        return len(send.body.padding)

    assert [answer(n_bytes) for n_bytes in (-1, 0, 7, 1 << 40)] == [0, 0, 7, PADDING_BYTES_MAX]
