"""Connections of unknown senders: they cost few places and few reports, and keep no member out."""

import contextlib
import socket
import time
from dataclasses import dataclass

import pytest
import transport_nodes
from transport_nodes import WAIT_S, drained, eventually, raw_connection

from jaxdt.runtime.net import handshake, unix_socket
from jaxdt.runtime.net.connection import Connection
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.net.strangers import GreetingPlaces, NoPlace, ReportLimiter, source_of

start, run_credential = transport_nodes.start, transport_nodes.run_credential  # fixtures

LIMITS = TransportLimits(n_greeting_max=6, n_greeting_stranger_max=4, n_greeting_source_max=3, slow_handshake_s=2.0)


@dataclass(eq=False)
class FakeConnection:
    silent: bool = True
    was_cut: bool = False

    def is_silent(self):
        return self.silent

    def cut(self):
        self.was_cut = True


@pytest.fixture
def tcp(monkeypatch):
    monkeypatch.setattr(unix_socket, "dial", lambda address: None)


# ------------------------------------------------------------------------------------------------------------ places


def claimed(places, source, n, silent=True, now_s=0.0):
    connections = [FakeConnection(silent) for _ in range(n)]
    return connections, [places.claim(source, connection, now_s) for connection in connections]


def test_the_oldest_silent_connection_of_a_source_gives_its_place_away():
    places = GreetingPlaces(LIMITS)
    (first, second, third), _ = claimed(places, "attacker", 3)
    first.silent = False
    claimed(places, "attacker", 1)
    assert [first.was_cut, second.was_cut, third.was_cut] == [False, True, False]


def test_connections_that_speak_keep_their_places_until_they_are_slow():
    places = GreetingPlaces(LIMITS)
    connections, _ = claimed(places, "attacker", 3, silent=False)
    with pytest.raises(NoPlace, match="3 others have not greeted yet"):
        places.claim("attacker", FakeConnection(), 1.9)
    places.claim("attacker", FakeConnection(), 2.0)
    assert [connection.was_cut for connection in connections] == [True, False, False]


def test_a_place_that_was_given_back_is_free():
    places = GreetingPlaces(LIMITS)
    _, taken = claimed(places, "attacker", 3, silent=False)
    places.release(taken[1])
    places.release(taken[1])
    claimed(places, "attacker", 1, silent=False)
    with pytest.raises(NoPlace):
        claimed(places, "attacker", 1, silent=False)


def test_one_source_cannot_keep_another_out():
    places = GreetingPlaces(LIMITS)
    many, _ = claimed(places, "attacker", 3)
    (other,), _ = claimed(places, "stranger", 1)
    (late,), _ = claimed(places, "late", 1)  # all places of strangers are taken: who has most of them gives way
    assert [connection.was_cut for connection in many] == [True, False, False]
    assert not other.was_cut and not late.was_cut


def test_many_sources_together_leave_places_for_members():
    places = GreetingPlaces(LIMITS)
    places.learn("member")
    for i in range(4):
        claimed(places, f"attacker {i}", 1, silent=False)
    with pytest.raises(NoPlace):
        claimed(places, "attacker 4", 1, silent=False)
    claimed(places, "member", 2, silent=False)


def test_a_stranger_may_not_connect_too_often():
    """Each admitted connection costs the listener a thread; others are closed at once."""
    places = GreetingPlaces(LIMITS)
    places.learn("member")

    def admitted(source, now_s):
        n = 0
        for _ in range(1000):
            with contextlib.suppress(NoPlace):
                places.release(places.claim(source, FakeConnection(), now_s))
                n += 1
        return n

    assert admitted("attacker", 0.0) == 12
    assert admitted("attacker", 1.0) == 3
    assert admitted("stranger", 1.0) == 12
    assert admitted("member", 1.0) == 1000


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:0:1:aaaa::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:bbbb::2", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("host.example", "host.example"),
    ],
)
def test_a_host_is_one_source_with_all_its_addresses(host, source):
    assert source_of(host) == source


# ----------------------------------------------------------------------------------------------------------- reports


def test_reports_of_one_source_are_few_and_the_rest_is_summed_up():
    reports = ReportLimiter()
    admitted = sum(reports.admits("attacker", 0.001 * i) for i in range(1950))
    assert admitted == 5
    assert reports.admits("member", 2.0)
    assert reports.summary(59.0) is None and reports.due_in_s(59.0) == 1.0
    line = "1945 more connections within 60 s, from 1 addresses, 1945 of them from attacker"
    assert reports.summary(60.0) == line
    assert reports.summary(60.0) is None and reports.due_in_s(60.0) is None
    assert reports.admits("attacker", 60.0)


def test_reports_of_many_sources_are_few():
    reports = ReportLimiter()
    assert sum(reports.admits(f"attacker {i}", 0.0) for i in range(1000)) == 20
    summary = reports.summary(60.0)
    assert summary is not None and summary.startswith("980 more connections within 60 s, from 257 addresses")


# ----------------------------------------------------------------------------------------------------- over a socket


def held_open(node, n, first=b""):
    """Connections that say `first` and no more."""
    stack = contextlib.ExitStack()
    for _ in range(n):
        stack.enter_context(raw_connection(node)).sendall(first)
    return stack


def test_silent_connections_of_one_address_keep_no_member_out(start, run_credential, tcp):
    """The member comes from the very address of the attacker; 16 is all that one address may hold."""
    b = start(1, run_credential)
    with held_open(b, 64):
        a = start(0, run_credential)
        a.connect(b)
        a.transport.send(1, {"in": True})
        assert b.next()[1] == {"in": True}
        assert len(b.transport._acceptor._greeting) <= 64


def test_slow_handshakes_of_another_address_keep_no_member_out(start, run_credential, tcp, monkeypatch):
    b = start(1, run_credential)
    attack = contextlib.ExitStack()
    with attack:
        for _ in range(40):
            sock = attack.enter_context(socket.create_connection(b.address, WAIT_S, source_address=("127.0.0.2", 0)))
            with contextlib.suppress(OSError):
                sock.sendall(b"\x16\x03\x01\x02\x00")
        a = start(0, run_credential)
        a.connect(b)
        a.transport.send(1, {"in": True})
        assert b.next()[1] == {"in": True}


def test_a_connection_that_says_nothing_ends_soon(start, run_credential):
    b = start(1, run_credential, limits=TransportLimits(first_byte_s=0.05))
    with raw_connection(b) as sock:
        assert sock.recv(10) == b""
    assert "127.0.0.1: a connection ended before its greeting: nothing came within 0.05 s" in b.link(None, "refused")


@pytest.mark.parametrize("n_exchanged", [0, 1, 2])
def test_an_end_by_the_other_side_is_no_refusal(start, run_credential, n_exchanged):
    """Such as that of a process which has its answer over another connection: before TLS, within TLS, and behind it."""
    b = start(1, run_credential)
    with raw_connection(b) as sock:
        connection = Connection(sock, b.transport._limits)
        connection.deadline_s = time.monotonic() + WAIT_S
        if n_exchanged == 1:
            sock.sendall(b"\x16\x03\x01\x02\x00")
        elif n_exchanged:
            handshake.secure(connection, run_credential.of(7), is_dialer=True)
            connection.close()
    with raw_connection(b) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        drained(sock)
    eventually(lambda: not b.transport._acceptor._greeting)
    assert "HTTP" in b.link(None, "refused") and b.links.empty()


def test_alternating_garbage_is_reported_a_few_times(start, run_credential):
    b = start(1, run_credential)
    for i in range(20):
        with raw_connection(b) as sock:
            sock.sendall((b"GET / HTTP/1.1\r\n\r\n", b"jxdt" + bytes(300))[i % 2])
            drained(sock)
    b.transport.close(0.0)
    assert b.links.qsize() == 5


def test_a_process_of_another_user_is_refused_at_the_unix_socket(start, monkeypatch):
    b = start(1)
    name = unix_socket._name(b.address)
    monkeypatch.setattr(unix_socket, "is_of_this_user", lambda sock: False)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(name)
        drained(sock)
    assert b.link(None, "refused") == "this host: the process on the Unix socket is of another user"
