"""Attacks on the keys and records of a connection: it ends, with one line, and no other connection does."""

import contextlib
import socket
import threading

import numpy as np
import pytest
import transport_nodes
from transport_nodes import LOOPBACK, MB, WAIT_S, Wiretap, drained, eventually, raw_connection

from jaxdt.runtime.net import aead_records, frame
from jaxdt.runtime.net.options import TransportLimits

start, run_credential = transport_nodes.start, transport_nodes.run_credential  # fixtures
FIRST = 3  # the record that is attacked: the greeting and the message's head come before


def pieces(src):
    """The bytes of the dialing side: (0, TLS record) during the handshake, then (number from 1, AEAD record)."""
    file = src.makefile("rb")
    number = 0
    with file:
        while len(head := file.read(4)) == 4:
            if head[0] in (20, 21, 22, 23):
                low = file.read(1)
                yield 0, head + low + file.read(head[3] * 256 + low[0])
            else:
                number += 1
                yield number, head + file.read(int.from_bytes(head, "big") + 16)


def at_first(change):
    """An attack that does `change(record)` for the first record of a payload and nothing to all others."""

    def attack(src, dst, back):
        for number, data in pieces(src):
            dst.sendall(change(data) if number == FIRST else data)

    return attack


def swapped(src, dst, back):
    held = b""
    for number, data in pieces(src):
        if number == FIRST:
            held = data
        else:
            dst.sendall(data + held)
            held = b""


def sent_back(src, dst, back):
    for number, data in pieces(src):
        (back if number == FIRST else dst).sendall(data)


def cut_inside(src, dst, back):
    for number, data in pieces(src):
        dst.sendall(data[:1000] if number == FIRST else data)
        if number == FIRST:
            return


def cut_between(src, dst, back):
    for number, data in pieces(src):
        if number == FIRST:
            return
        dst.sendall(data)


def stalled(src, dst, back):
    for number, data in pieces(src):
        if number <= FIRST:
            dst.sendall(data[:1000] if number == FIRST else data)


CHANGED = "a record that was changed on its way, or is not the next one"
ATTACKS = {
    "bit": (at_first(lambda data: data[:999] + bytes([data[999] ^ 1]) + data[1000:]), CHANGED),
    "repeated": (at_first(lambda data: data + data), CHANGED),
    "left out": (at_first(lambda data: b""), CHANGED),
    "another order": (swapped, CHANGED),
    "huge": (at_first(lambda data: b"\xff" * 4 + data[4:]), "a record of 4294967295 bytes"),
    "empty": (at_first(lambda data: bytes(4) + data), "a record of 0 bytes"),
    "cut inside": (cut_inside, "closed by the other side"),
    "cut between": (cut_between, "closed by the other side"),
    "stalled": (stalled, "a record stopped in its middle"),
}


@contextlib.contextmanager
def attacked(start, cred, attack):
    """Peer 0 sends 4 MB to peer 1 under an attack, while peer 2 talks to peer 1. Yields 0 and 1, then checks all. Only
    the attack that stalls is found by a deadline; a busy machine must not meet it under another attack."""
    limits = TransportLimits(idle_s=0.5 if attack is stalled else WAIT_S)
    a, b, other = start(0, cred), start(1, cred, limits=limits), start(2, cred)
    other.connect(b)
    other.transport.send(1, {"n": 0}, [np.zeros(3)])
    b.next()
    payload = np.random.default_rng(0).integers(0, 255, 4 * MB, np.uint8)
    with contextlib.closing(Wiretap(b.address, attack)) as tap:
        a.transport.connect(1, tap.address)
        a.transport.send(1, {"n": 1}, [payload])
        yield a, b
        src, head, (got,) = b.next()
        assert (src, head) == (0, {"n": 1}) and np.array_equal(got, payload)
        assert a.reconnects(1) >= 1 and b.stat(0, "messages_in") == 1
        other.transport.send(1, {"n": 2}, [np.zeros(3)])
        assert b.next()[1] == {"n": 2}
        assert other.reconnects(1) == 0
        for node in (a, b, other):
            node.transport.close(0.0)


@pytest.mark.parametrize(("attack", "words"), ATTACKS.values(), ids=ATTACKS)
def test_an_attack_on_a_record_ends_its_connection_and_loses_nothing(start, run_credential, attack, words):
    with attacked(start, run_credential, attack) as (_, b):
        reason = b.link(0, "down")
        assert words in reason and "\n" not in reason


def test_a_record_that_is_sent_back_ends_the_connection(start, run_credential):
    with attacked(start, run_credential, sent_back) as (a, b):
        assert any(CHANGED in node.link(peer, "down") for node, peer in ((a, 1), (b, 0)))


def test_when_a_key_has_served_there_is_a_new_connection(start, run_credential, monkeypatch):
    monkeypatch.setattr(aead_records, "RECORDS_MAX", 60)  # about two messages and a half
    a, b = start(0, run_credential), start(1, run_credential)
    a.connect(b)
    for i in range(10):
        a.transport.send(1, {"i": i}, [np.full(4 * MB, i, np.uint8)])
    came = [b.next() for _ in range(10)]
    assert [(head["i"], leaves[0][0], leaves[0][-1]) for _, head, leaves in came] == [(i, i, i) for i in range(10)]
    eventually(lambda: a.transport.queued_bytes() == 0)
    assert a.reconnects(1) >= 3 and b.inbox.empty()
    assert (b.stat(0, "messages_in"), b.stat(0, "duplicates")) == (10, 0)
    assert "60 records under one key" in a.link(1, "down")


# ------------------------------------------------------------------------------------------- before there are records


def share(n_bytes=32):
    return frame.pack(frame.KEYS, frame.pack_head({"share": bytes(n_bytes)}, TransportLimits()))


def of_version_1(data):
    return data[:4] + b"\x01" + data[5:]


@contextlib.contextmanager
def shaken_hands(node, cred):
    """A member that has done the TLS handshake and no more."""
    with raw_connection(node) as sock, cred.of(0).client_context.wrap_socket(sock) as secure:
        yield secure


def in_tls(secure, data):
    secure.sendall(data)


def beside_tls(secure, data):
    socket.socket.sendall(secure, data)


BEFORE_RECORDS = {
    "a record at once": (beside_tls, b"\x00\x00\x01\x00" + bytes(272), "TLS"),
    "no share": (in_tls, frame.pack(frame.GREETING, b"\x80"), "frame kind: got greeting, expected keys"),
    "a short share": (in_tls, share(31), "share of the keys: expected 32 bytes"),
    "more in TLS": (in_tls, share() + b"\x00", "more was sent in TLS"),
    "nothing": (in_tls, b"", "the handshake took too long|came in time"),
    "a greeting in TLS": (in_tls, of_version_1(frame.pack(frame.GREETING, b"\x80")), "version: got 1, expected 6"),
}


@pytest.mark.parametrize(("send", "data", "words"), BEFORE_RECORDS.values(), ids=BEFORE_RECORDS)
def test_without_a_share_of_the_keys_nobody_gets_in(start, run_credential, send, data, words):
    limits = TransportLimits(handshake_s=WAIT_S if data else 2.0, n_greeting_max=1)  # only silence is to last so long
    a, b = start(0, run_credential), start(1, run_credential, limits=limits)
    with shaken_hands(b, run_credential) as secure:
        if data:
            send(secure, data)
        reason = b.link(None, "refused")
        assert any(part in reason for part in words.split("|")) and "\n" not in reason
        drained(secure)
    a.connect(b)
    a.transport.send(1, {"in": True})
    assert b.next()[1] == {"in": True}


def test_a_record_in_place_of_the_handshake(start, run_credential):
    b = start(1, run_credential)
    with raw_connection(b) as sock:
        sock.sendall(b"\x00\x00\x01\x00" + bytes(272))
        drained(sock)
    assert "\n" not in b.link(None, "refused")


def test_peers_of_two_versions_tell_each_other(start, run_credential):
    """A peer of version 1 sends everything in TLS: its greeting, and its refusal of another version."""
    a, b = start(0, run_credential), start(1, run_credential)
    with shaken_hands(b, run_credential) as old:
        old.sendall(of_version_1(frame.pack(frame.GREETING, b"\x80")))
        assert b"protocol version: got 1, expected 6" in old.recv(1000)
    assert "protocol version: got 1, expected 6" in b.link(None, "refused")
    with socket.create_server(LOOPBACK) as server:
        a.transport.connect(1, server.getsockname())
        a.transport.send(1, {})
        sock, _ = server.accept()
        sock.settimeout(WAIT_S)
        with run_credential.of(1).server_context.wrap_socket(sock, server_side=True) as old:
            assert len(old.recv(frame.HEADER_BYTES)) == frame.HEADER_BYTES  # enough for its refusal
            old.sendall(
                of_version_1(frame.pack(frame.REFUSED, frame.pack_head({"reason": "version"}, TransportLimits())))
            )
            assert "protocol version: got 1, expected 6" in a.link(1, "refused")


def test_a_share_that_drips_in_does_not_hold_a_place(start, run_credential):
    b = start(1, run_credential, limits=TransportLimits(handshake_s=2.0, n_greeting_max=1))
    done = threading.Event()
    with shaken_hands(b, run_credential) as secure:

        def drip():
            with contextlib.suppress(OSError):
                for i in range(len(share())):
                    secure.sendall(share()[i : i + 1])
                    if done.wait(0.1):
                        break

        thread = threading.Thread(target=drip)
        thread.start()
        reason = b.link(None, "refused")
        assert "the handshake took too long" in reason or "came in time" in reason
        done.set()
        thread.join()
