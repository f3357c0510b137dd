"""Addresses: how they are written, where a process listens, and what it tells others."""

import contextlib
import socket

import pytest
import transport_nodes
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.run.errors import BadInput
from jaxdt.runtime.net import address as addresses
from jaxdt.runtime.net.address import advertised, bind, check_dialable, format_address, parse_address
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.process import OwnAddress

start = transport_nodes.start  # fixture


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="the system has no IPv6")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7700", ("127.0.0.1", 7700)),
        ("gpu7.example:0", ("gpu7.example", 0)),
        ("[::1]:7700", ("::1", 7700)),
        ("[fe80::1%eth0]:7700", ("fe80::1%eth0", 7700)),
    ],
)
def test_an_address_is_read_and_written(text, address):
    assert parse_address("listen", text) == address
    assert format_address(address) == text


@pytest.mark.parametrize(
    "text", ["", ":7700", "host", "host:", "host:-1", "host:70000", "host:x", "host:²", "[host]:1", "a..b:1", "[::1]"]
)
def test_what_is_no_address_is_bad_input(text):
    with pytest.raises(BadInput, match="^listen: got .*, expected"):
        parse_address("listen", text)


def test_an_ipv6_address_needs_brackets():
    with pytest.raises(BadInput, match="expected host:port, with an IPv6 address in brackets"):
        parse_address("listen", "::1:7700")


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_bad_input(text):
    with contextlib.suppress(BadInput):
        assert parse_address("x", format_address(parse_address("x", text))) == parse_address("x", text)


# ------------------------------------------------------------------------------------------------------ what is bound


def test_a_name_that_is_loopback_here_is_not_listened_on(monkeypatch):
    """Many systems give their own name an address of the loopback interface."""
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    with pytest.raises(BadInput, match="myhost is 127.0.1.1 on this host.*--listen=0.0.0.0:7 --advertise=myhost:7$"):
        bind(("myhost", 7))


def test_a_name_that_nobody_knows_is_bad_input():
    with pytest.raises(BadInput, match=r"^listen: cannot bind nowhere.invalid:7 \("):
        bind(("nowhere.invalid", 7))


@needs_ipv6
def test_peers_meet_over_ipv6(start):
    a, b = start(0, listen=("::1", 0)), start(1, listen=("::1", 0))
    a.connect(b)
    a.transport.send(1, {"n": 1})
    assert b.next()[1] == {"n": 1}


@needs_ipv6
def test_all_interfaces_of_ipv6_are_those_of_ipv4_too(start):
    b = start(1, listen=("::", 0), allow_plaintext=True)
    a = start(0)
    a.transport.connect(1, ("127.0.0.1", b.address[1]))
    a.transport.send(1, {"n": 1})
    assert b.next()[1] == {"n": 1}


# ---------------------------------------------------------------------------------------------- what others are told


@pytest.mark.parametrize(
    ("listen", "bound", "advertise", "expected"),
    [
        (("127.0.0.1", 0), ("127.0.0.1", 41), "", ("127.0.0.1", 41)),
        (("localhost", 0), ("127.0.0.1", 41), "", ("127.0.0.1", 41)),
        (("myhost", 0), ("192.0.2.7", 41), "", ("myhost", 41)),
        (("0.0.0.0", 0), ("0.0.0.0", 41), "", ("127.0.0.1", 41)),
        (("0.0.0.0", 7), ("0.0.0.0", 7), "198.51.100.1:9", ("198.51.100.1", 9)),
        (("::", 7), ("::", 7), "[2001:db8::1]:9", ("2001:db8::1", 9)),
    ],
)
def test_the_address_that_others_dial(listen, bound, advertise, expected):
    assert advertised(listen, bound, advertise, ("127.0.0.1", 7700)) == expected


@pytest.mark.parametrize("advertise", ["0.0.0.0:7", "[::]:7", "host:0", "host"])
def test_an_address_that_nobody_can_dial_is_not_advertised(advertise):
    with pytest.raises(BadInput, match="^advertise: "):
        advertised(("0.0.0.0", 7), ("0.0.0.0", 7), advertise, None)


def test_a_coordinator_on_all_interfaces_says_where_it_is_reached():
    with pytest.raises(BadInput, match=r"^listen: 0.0.0.0:7 is all interfaces.*expected --advertise=HOST:PORT"):
        advertised(("0.0.0.0", 7), ("0.0.0.0", 7), "", None)


@pytest.mark.parametrize("text", ["0.0.0.0:7700", "[::]:7700", "224.0.0.1:7700", "box:0"])
def test_an_address_that_nobody_can_dial_is_no_coordinators(text):
    with pytest.raises(BadInput, match="^--join: "):
        check_dialable("--join", parse_address("--join", text))
    check_dialable("--join", parse_address("--join", "localhost:7700"))


def test_a_coordinator_whose_name_is_not_known_is_blamed(monkeypatch):
    def unresolvable(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(addresses.socket, "getaddrinfo", unresolvable)
    for find in (
        lambda: advertised(("0.0.0.0", 7), ("0.0.0.0", 7), "", ("host", 7700)),
        lambda: OwnAddress.of_peer(("host", 7700), None),
    ):
        with pytest.raises(
            BadInput, match=r"^the coordinator's address host:7700 is not known .*\(Name or service not"
        ):
            find()


@pytest.mark.parametrize(
    ("listen", "advertise"),
    [("127.0.0.1:7701", ""), ("localhost:0", ""), ("[::1]:0", ""), ("0.0.0.0:7701", "127.0.0.1:7701")],
)
def test_a_peer_on_loopback_of_a_run_on_other_hosts_is_refused_before_it_asks(listen, advertise):
    name = "advertise" if advertise else "listen"
    with pytest.raises(BadInput, match=f"^--{name}: .* is the loopback.*the coordinator is at 192.0.2.1:7700"):
        OwnAddress.of_peer(("192.0.2.1", 7700), listen, advertise)
    assert OwnAddress.of_peer(("127.0.0.1", 7700), listen, advertise).listen == listen


def test_a_peer_listens_by_default_on_the_interface_that_leads_to_the_coordinator(monkeypatch):
    assert OwnAddress.of_peer(("localhost", 7700), None).listen == "127.0.0.1:0"
    assert OwnAddress.of_peer(("192.0.2.1", 7700), "").listen == "", "it chose not to listen"

    class Interface:
        """A socket of a host whose interface towards the coordinator has this address."""

        host = "192.0.2.2"

        def __init__(self, *_):
            self.connect = self.__exit__ = lambda *_: None
            self.getsockname = lambda: (self.host, 41)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(addresses.socket, "socket", Interface)
    assert OwnAddress.of_peer(("192.0.2.1", 7700), None).listen == "192.0.2.2:0"
    Interface.host = "127.0.1.1"  # many systems give their own name such an address
    with pytest.raises(BadInput, match="^--listen: 192.0.2.1:7700 .* expected --listen=HOST:PORT"):
        OwnAddress.of_peer(("192.0.2.1", 7700), None)


def test_a_peer_that_does_not_listen_advertises_nothing():
    with pytest.raises(BadInput, match="^advertise: got h:1, expected none for a peer that does not listen"):
        OwnAddress("", "h:1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_nobody_dials_a_wildcard(host):
    transport = Transport(0, "run", on_message=lambda *_: None, allow_plaintext=True)
    with pytest.raises(BadInput, match="^peer 1: got .*, expected an address that can be dialled"):
        transport.connect(1, (host, 7))
