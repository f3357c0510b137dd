"""Peers of one host find one another's Unix socket, and TCP where there is none that they may use."""

import socket
import sys

import numpy as np
import pytest
import transport_nodes

from jaxdt.runtime.net import unix_socket

start = transport_nodes.start
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names of sockets that are no files are Linux's")


def families(node, peer):
    return {channel._connection._sock.family for channel in node.transport._peers[peer].channels.values()}


def exchange(a, b):
    """Send a message with a tensor; returns the kinds of sockets that carried it."""
    a.connect(b)
    tensor = np.arange(1 << 20, dtype=np.float32)
    assert a.transport.send(b.me, {"kind": "x"}, [tensor])
    _, head, (came,) = b.next()
    assert head == {"kind": "x"} and np.array_equal(came, tensor)
    return families(a, b.me)


def test_peers_of_one_host_use_a_unix_socket(start):
    assert exchange(start(0), start(1)) == {socket.AF_UNIX}


def test_where_the_name_is_taken_they_use_tcp(start, monkeypatch):
    monkeypatch.setattr(unix_socket, "listener", lambda address: None)
    assert exchange(start(0), start(1)) == {socket.AF_INET}


def test_a_socket_of_another_user_is_not_used(start, monkeypatch):
    monkeypatch.setattr(unix_socket, "is_of_this_user", lambda sock: False)
    assert exchange(start(0), start(1)) == {socket.AF_INET}


def test_only_loopback_addresses_have_a_name():
    assert unix_socket.listener(("192.0.2.1", 7)) is None and unix_socket.dial(("192.0.2.1", 7)) is None
    assert unix_socket.dial(("example.org", 7)) is None
