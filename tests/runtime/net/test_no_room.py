"""A system without descriptors or threads to spare costs connections, never the threads that make them."""

import errno
import os
import resource
import socket
import threading

import pytest
from transport_nodes import Node, cred, eventually, n_fds, run_credential, start

from jaxdt.protocol import events as ev
from jaxdt.protocol.trace import Trace
from jaxdt.run.errors import ThreadDied
from jaxdt.runtime.calibrate.doctor import descriptors
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.acceptor import Acceptor
from jaxdt.runtime.net.descriptor_limit import COORDINATOR_DESCRIPTORS, descriptors_needed, raise_descriptor_limit
from jaxdt.runtime.net.outbound_channel import OutboundChannel

__all__ = ["cred", "run_credential", "start"]  # fixtures
FULL = OSError(errno.EMFILE, "Too many open files")


def exchange(a, b):
    """Both send a message, and both arrive."""
    for src, dst in ((a, b), (b, a)):
        src.transport.send(dst.me, {"n": 1})
        assert dst.next()[:2] == (src.me, {"n": 1})


def connected(start):
    a, b = start(1), start(2)
    a.connect(b)
    b.connect(a)
    return a, b


def test_a_neighbour_costs_three_descriptors_a_channel(start):
    a, b = connected(start)
    before = n_fds()
    exchange(a, b)
    eventually(lambda: n_fds() - before <= 2 * COORDINATOR_DESCRIPTORS)  # at both ends, which are in this process


@pytest.mark.parametrize("call", ["accept", "socket", "eventfd"])
def test_too_many_open_files_are_waited_for(start, monkeypatch, call):
    """At accept, at a dial and at a send; messages arrive as soon as there are descriptors again."""
    a, b = connected(start)
    n_failures = 3
    original = {"accept": socket.socket.accept, "socket": socket.socket.__init__, "eventfd": os.eventfd}[call]
    failed = []

    def failing(*arguments, **options):
        made_by = threading.current_thread().name
        if made_by.startswith("jaxdt-") and len(failed) < n_failures:
            failed.append(made_by)
            raise FULL
        return original(*arguments, **options)

    owner, name = {
        "accept": (socket.socket, "accept"),
        "socket": (socket.socket, "__init__"),
        "eventfd": (os, "eventfd"),
    }[call]
    monkeypatch.setattr(owner, name, failing)
    exchange(a, b)
    assert len(failed) == n_failures


def test_a_send_needs_no_descriptor(start, monkeypatch):
    """The loop sends: an error there would end the process."""
    a, b = connected(start)
    main = threading.current_thread()
    original = os.eventfd

    def failing(*arguments):
        if threading.current_thread() is main:
            raise FULL
        return original(*arguments)

    monkeypatch.setattr(os, "eventfd", failing)
    exchange(a, b)


def test_no_room_for_connections_is_reported_now_and_then(start, monkeypatch):
    a, b = connected(start)
    n_failures = 5
    accept = Acceptor._accept_one
    original = socket.socket.accept
    failed = []

    def failing(sock):
        if len(failed) < n_failures:
            failed.append(sock)
            raise FULL
        return original(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)
    exchange(a, b)
    assert accept is Acceptor._accept_one and len(failed) == n_failures
    links = list(a.links.queue) + list(b.links.queue)
    refused = [link for link in links if link[1] == "refused"]
    assert 1 <= len(refused) <= 2 and set(refused) == {(None, "refused", "cannot accept: Too many open files")}


@pytest.mark.parametrize("name", ["accepted-", "send-"])
def test_no_room_for_a_thread_closes_that_connection_only(start, monkeypatch, name):
    a, b = connected(start)
    original = threading.Thread.start
    failed = []

    def failing(thread):
        if name in thread.name and len(failed) < 2:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    for _ in range(3):  # each send tries again
        a.transport.send(2, {"n": 1})
        b.transport.send(1, {"n": 1})
    for node in (a, b):
        assert node.heads(3) == [{"n": 1}] * 3
    assert len(failed) == 2


# ------------------------------------------------------------------------------------------------ threads that die


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("owner", "method"), [(Acceptor, "_accept_one"), (OutboundChannel, "_find_connection")])
def test_a_thread_that_the_transport_needs_says_that_it_has_died(start, monkeypatch, owner, method):
    def bug(*arguments):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(owner, method, bug)
    node, other = connected(start)
    node.transport.send(other.me, {})
    with socket.create_connection(node.address):
        eventually(lambda: node.deaths)
    thread, error = node.deaths[0]
    eventually(lambda: thread not in {one.name for one in threading.enumerate()})  # it prints its traceback
    assert ("accept" if owner is Acceptor else "send-control-2") in thread and isinstance(error, ZeroDivisionError)


class Told:
    """A machine that tells its coordinator when it is interrupted."""

    def handle(self, now_s, event):
        match event:
            case ev.Started():
                return []
            case ev.Interrupted(_, reason):
                return [ev.Send(-1, reason), ev.Stop(2, reason)]
        return []


@pytest.mark.parametrize("is_coordinator", [False, True])
def test_the_death_of_such_a_thread_ends_the_process_with_one_line(is_coordinator, monkeypatch):
    """A peer says so, and is put out. Peers wait for a coordinator, which may be started again."""

    class Transport:
        def close(self, flush_s):
            pass

    sent = []
    loop = Loop(0, Told(), Trace(lambda line: None), lambda report: None, durable=object() if is_coordinator else None)
    loop.transport = Transport()
    monkeypatch.setattr(loop, "_perform", sent.append)
    loop.on_death("jaxdt-0-accept", ZeroDivisionError("a bug"))
    line = "thread jaxdt-0-accept has died: ZeroDivisionError('a bug')"
    with pytest.raises(ThreadDied) as raised:
        loop.run("")
    assert str(raised.value) == line and sent == ([] if is_coordinator else [ev.Send(-1, line)])


# --------------------------------------------------------------------------------------------------------- the limit


def test_the_soft_limit_becomes_the_hard_one():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 256), before[1]))
    try:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_doctor_says_which_limit_is_too_low():
    (good,), (bad,) = descriptors(1 << 20, 256), descriptors(1024, 256)
    assert not good.mend and f"ulimit -Hn {descriptors_needed(256)} " in bad.mend
    assert descriptors_needed(256) < 2048


assert Node  # which the fixtures make
