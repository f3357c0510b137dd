"""Shared by the tests of the transport: nodes whose callbacks fill queues, raw senders, and the check for leaks."""

import contextlib
import gc
import os
import queue
import socket
import threading
import time

import pytest

from jaxdt.protocol import events as ev
from jaxdt.runtime.identity import authority, credential
from jaxdt.runtime.net import frame, handshake, unix_socket
from jaxdt.runtime.net.connection import Connection
from jaxdt.runtime.net.frame import Payload
from jaxdt.runtime.net.handshake import HandshakeHello
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.net.outbound_channel import ChunkWriter
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.storage.words import aligned_empty

WAIT_S = 20.0
LOOPBACK = ("127.0.0.1", 0)
QUICK = TransportLimits(backoff_s_min=0.01, backoff_s_max=0.05)
MB = 1 << 20


class Node:
    """A Transport whose callbacks fill queues; `gate` holds up its receiver inside expect or on_message. `settings` are
    options of Transport."""

    def __init__(self, me, cred=None, run="run", listen=LOOPBACK, on_message=None, expect=None, **settings):
        self.inbox = queue.Queue()
        self.links = queue.Queue()
        self.asked = queue.Queue()
        self.gate = threading.Event()
        self.gate.set()
        self._on_message = on_message
        self._expect = expect
        self.deaths = []
        own = cred.of(me) if isinstance(cred, RunCredentials) else cred
        self.transport = Transport(
            me,
            run,
            on_message=self._message,
            on_link=lambda *link: self.links.put(link),
            expect=self._asked,
            on_death=lambda *death: self.deaths.append(death),
            listen=listen,
            credential=own,
            **{"limits": QUICK} | settings,
        )
        self.me = me
        self.address = self.transport.start()

    def _message(self, src, head, leaves):
        if self._on_message:
            self._on_message(src, head, leaves)
        self.inbox.put((src, head, leaves))

    def _asked(self, src, head, table):
        self.asked.put((src, head, table))
        assert self.gate.wait(WAIT_S)
        if self._expect:
            return self._expect(src, head, table)
        return [aligned_empty(shape, dtype) for dtype, shape in table]

    def connect(self, other):
        self.transport.connect(other.me, other.address)

    def next(self):
        return self.inbox.get(timeout=WAIT_S)

    def heads(self, n):
        return [self.next()[1] for _ in range(n)]

    def link(self, peer, state):
        """The reason of the next such report; others are skipped."""
        while True:
            got = self.links.get(timeout=WAIT_S)
            if got[:2] == (peer, state):
                return got[2]

    def channel(self, peer, name="data"):
        return self.transport._peers[peer].channels[name]

    def cut(self, peer, name="data"):
        """Break the connection under the channel."""
        self.channel(peer, name)._connection.cut()

    def stat(self, peer, name):
        return self.transport.stats()[peer][name]

    def reconnects(self, peer):
        """The number of connections that the outbound channels have used after their first ones."""
        channels = self.transport._peers[peer].channels.values()
        return sum(max(0, _n_served(channel._writer) - 1) for channel in channels)


def _n_served(writer):
    return getattr(writer, "n_served", 0)


def eventually(holds):
    deadline_s = time.monotonic() + WAIT_S
    tick = threading.Event()
    while not holds():
        assert time.monotonic() < deadline_s, "did not come true"
        tick.wait(0.002)


def threads_of_transports():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("jaxdt-")]


def n_fds():
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


@pytest.fixture
def start(monkeypatch):
    """Makes Nodes; closes them at the end and looks for what they left behind."""
    serve = ChunkWriter.serve

    def serve_and_count(writer, connection, received):
        writer.n_served = _n_served(writer) + 1
        serve(writer, connection, received)

    monkeypatch.setattr(ChunkWriter, "serve", serve_and_count)
    fds = n_fds()
    nodes = []

    def make(*args, **options):
        nodes.append(Node(*args, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.gate.set()
        node.transport.close(0.0)
    assert threads_of_transports() == []
    if n_fds() != fds:
        gc.collect()  # what a test before left in a cycle may go only now
    assert n_fds() <= fds


class RunCredentials:
    """The credentials of one run, made when they are asked for."""

    def __init__(self, folder):
        self.folder = folder
        authority.create_run(folder, n_coordinators=2)

    def of(self, peer):
        if peer == ev.COORDINATOR:
            return credential.load(authority.coordinator_file(self.folder))
        authority.create_missing(self.folder, [peer])
        return credential.load(authority.peer_file(self.folder, peer))


@pytest.fixture(scope="module")
def run_credential(tmp_path_factory):
    return RunCredentials(tmp_path_factory.mktemp("credentials"))


@pytest.fixture(params=["plain", "tls", "unix"])
def cred(request, run_credential, monkeypatch):
    """The kind of a connection: TCP without and with TLS and its records, and these over a Unix socket."""
    if request.param != "unix":
        monkeypatch.setattr(unix_socket, "dial", lambda address: None)
    return None if request.param == "plain" else run_credential


@contextlib.contextmanager
def raw_connection(node):
    with socket.create_connection(node.address, timeout=WAIT_S) as sock:
        yield sock


def greeted(node, sock, me=7, session=5, oldest=1, **changes):
    """A raw sender that has been welcomed; returns its Connection and what the node has received of the session."""
    connection = Connection(sock, QUICK)
    connection.deadline_s = time.monotonic() + WAIT_S
    fields = {"run": "run", "src": me, "dst": node.me, "channel": "data", "sends": True, "session": session}
    answer = handshake.greet(connection, HandshakeHello(**{**fields, **changes}, oldest=oldest))
    return connection, answer.received


def message_frame(head=b"", table=b"", *, sequence=0, offset=0, payload_bytes=0, total_bytes=0):
    """A MESSAGE frame up to its payload, of any numbers."""
    sizes = {"offset": offset, "payload_bytes": payload_bytes, "total_bytes": total_bytes}
    return frame.pack_message(head, table, view=0, sequence=sequence, **sizes)


def message_bytes(sequence, head, leaves):
    limits = TransportLimits()
    payload = Payload(leaves)
    table = frame.table_of(leaves, limits)
    total = sum(leaf.n_bytes for leaf in table)
    sizes = {"sequence": sequence, "payload_bytes": total, "total_bytes": total}
    header = message_frame(frame.pack_head(head, limits), frame.pack_table(table), **sizes)
    return header + b"".join(payload.part(0, total))


def drained(sock) -> None:
    """Read until the other side has closed."""
    with contextlib.suppress(OSError):
        while sock.recv(1000):
            continue


class Wiretap:
    """Forwards connections to `address`. On the first of them, the bytes of the dialing side go through
    `attack(src, dst, back)`, which ends that connection when it returns. `back` leads to the dialing side."""

    def __init__(self, address, attack):
        self._address = address
        self._attack = attack
        self._server = socket.create_server(LOOPBACK)
        self.address = self._server.getsockname()
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        attack = self._attack
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                self._socks.append(near)
                far = socket.create_connection(self._address)
                self._socks.append(far)
                for forward, src, dst in ((attack, near, far), (forwarded, far, near)):
                    self._threads.append(threading.Thread(target=self._run, args=(forward, src, dst)))
                    self._threads[-1].start()
                attack = forwarded

    def _run(self, forward, src, dst):
        with contextlib.suppress(OSError):
            forward(src, dst, src)
        for sock in (src, dst):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._server.shutdown(socket.SHUT_RDWR)
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._server, *self._socks):
            sock.close()


def forwarded(src, dst, back):
    while data := src.recv(1 << 16):
        dst.sendall(data)
