"""Addresses of processes: "host:port" for people and messages, the pair (host, port) for sockets.

A host is a name, an IPv4 address, or an IPv6 address, which stands in brackets before a port: [2001:db8::7]:7700. A
name stays a name until somebody dials it: only the dialling host knows what the name means there. So the address at
which a process listens is not always the one at which others reach it: it may listen on all interfaces, or sit behind a
router that forwards a port.
"""

import os
import socket
from collections.abc import Sequence

from jaxdt.protocol.address import is_host, is_loopback, is_wildcard, why_unreachable
from jaxdt.run.errors import BadInput

Address = tuple[str, int]

_PORTS = 1 << 16
REACHABLE = "--listen=HOST:PORT or --advertise=HOST:PORT, at which others reach this peer"
_BACKLOG = 1024  # connections that the system keeps until they are accepted; a full queue would keep members out


def parse_address(name: str, text: str) -> Address:
    """The pair of a "host:port" or "[IPv6 address]:port"; BadInput, which names the flag or field `name`."""
    host, _, port = text.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    if in_brackets:
        host = host[1:-1]
    if not port.isascii() or not port.isdigit() or int(port) >= _PORTS or in_brackets != (":" in host):
        hint = ", with an IPv6 address in brackets" if ":" in host else ""
        raise BadInput(f"{name}: got {text!r:.80}, expected host:port{hint}")
    address = (host, int(port))
    check_address(name, address)
    return address


def format_address(address: Address) -> str:
    """The text of a pair, which `parse_address` reads."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(name: str, address: Address) -> None:
    """BadInput, which begins with `name`, unless a resolver and a socket accept the pair."""
    host, port = address
    if not is_host(host) or not 0 <= port < _PORTS:
        raise BadInput(f"{name}: got {host!r}:{port}, expected a host name or address and a port")


def check_reachable(name: str, hosts: Sequence[str]) -> None:
    """BadInput, which begins with `name`, unless these hosts may reach one another: all are loopback, or none."""
    for host in hosts:
        other = next((other for other in hosts if not is_loopback(other)), None)
        if (reason := why_unreachable(host)) and not (is_loopback(host) and other is None):
            unreached = f", so {other} cannot reach it" if other not in (None, host) else ""
            raise BadInput(f"{name}: {host} {reason}{unreached}; expected its address on the network of the hosts")


def check_dialable(name: str, address: Address) -> None:
    """BadInput, which begins with `name`, for the address of a process that no host can dial, itself included."""
    host, port = address
    if not port or ((reason := why_unreachable(host)) and not is_loopback(host)):
        found = f"{host} {reason}" if port else f"got {format_address(address)}"
        raise BadInput(f"{name}: {found}; expected the host and the port of a process that listens")


def bind(address: Address) -> socket.socket:
    """A non-blocking listener; BadInput when the address cannot be bound, or when others could not reach it there.

    All interfaces of IPv6 include those of IPv4 where the system can do so.
    """
    host, port = address
    text = format_address(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and is_wildcard(host) and socket.has_dualstack_ipv6()
        listener = socket.create_server(target[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        reason = error.strerror
        if error.errno and not isinstance(error, socket.gaierror):
            reason = os.strerror(error.errno)  # without the address, which the library adds once more
        hint = "expected a free port: --listen says which, --port with launch.py --emit"
        raise BadInput(f"listen: cannot bind {text} ({reason}), {hint}") from None
    bound = str(listener.getsockname()[0])
    if is_loopback(bound) and not is_loopback(host):
        listener.close()
        hint = f"--listen=0.0.0.0:{port} --advertise={text}"
        raise BadInput(f"listen: {host} is {bound} on this host, where no other host reaches it; expected {hint}")
    listener.setblocking(False)
    return listener


def default_listen(coordinator: Address) -> str:
    """The address at which a peer listens that was given none: a free port of the interface that leads to the
    coordinator, which is that of loopback only if the whole run is on this host. BadInput if it is not known."""
    return "127.0.0.1:0" if is_loopback(coordinator[0]) else format_address((_host_towards(coordinator), 0))


def advertised(listen: Address, bound: Address, advertise: str, towards: Address | None) -> Address:
    """The address at which others reach this process: `advertise` if it is not '', else what it listens at.

    A process that listens on all interfaces gives the address of that interface which leads to `towards`, the
    coordinator. BadInput for an address that others cannot dial: all of a run are on loopback, or none.
    """
    if advertise:
        address = parse_address("advertise", advertise)
        if is_wildcard(address[0]) or not address[1]:
            raise BadInput(f"advertise: got {advertise}, expected an address and a port that others can dial")
    elif is_loopback(listen[0]):
        address = bound
    elif not is_wildcard(listen[0]):
        address = listen[0], bound[1]
    elif towards is None:
        hint = "expected --advertise=HOST:PORT as well"
        raise BadInput(f"listen: {format_address(bound)} is all interfaces, which is no address to dial; {hint}")
    else:
        address = _host_towards(towards, socket.AF_UNSPEC if ":" in listen[0] else socket.AF_INET), bound[1]
    if towards and not is_loopback(towards[0]) and (reason := why_unreachable(address[0])):
        name = "advertise" if advertise else "listen"
        others = f"other hosts have to reach this peer, as the coordinator is at {format_address(towards)}"
        raise BadInput(f"--{name}: {address[0]} {reason}; {others}; expected no --{name}, or one that they can dial")
    return address


def _host_towards(address: Address, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """The address of this host on the interface that leads to another one; nothing is sent. BadInput if that is no
    address at which the other one reaches this host."""
    where = format_address(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(*address, family, socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        reason = f"is not known on this host ({error.strerror}), expected one that is"
        raise BadInput(f"the coordinator's address {where} {reason}") from None
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(target)
            host = str(sock.getsockname()[0])
    except OSError as error:
        raise BadInput(f"--listen: no way to {where} ({error.strerror}); expected {REACHABLE}") from None
    if why_unreachable(host) and not is_loopback(address[0]):
        raise BadInput(f"--listen: {where} is {target[0]} here, which shows no interface; expected {REACHABLE}")
    return host
