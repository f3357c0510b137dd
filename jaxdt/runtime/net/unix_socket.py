"""Unix sockets between peers of one host: the same bytes as over TCP, for about two thirds of the CPU.

A peer that listens on a loopback address also listens under that address in Linux's abstract namespace. That namespace
and the loopback interface reach equally far. A peer that dials the address looks there first, and falls back to TCP
when no process listens there (a forwarded port, another system). Any process may bind a name, so the process on the
other side must belong to the same user.
"""

import ipaddress
import os
import socket
import struct
import sys

_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def listener(address: tuple[str, int]) -> socket.socket | None:
    """A non-blocking listener beside the TCP socket that is bound to `address`; None where that is impossible."""
    name = _name(address)
    if name is None:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        return None  # the name is taken: dialers find another process there, and fall back to TCP
    sock.setblocking(False)
    return sock


def dial(address: tuple[str, int]) -> socket.socket | None:
    """A connection to the process that listens on `address`, if it is on this host and of this user; None: use TCP."""
    name = _name(address)
    if name is None:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    if not sock.connect_ex(name) and is_of_this_user(sock):
        return sock
    sock.close()
    return None


def is_of_this_user(sock: socket.socket) -> bool:
    """Whether the other side of a Unix socket is a process of this user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1] == os.geteuid()


def _name(address: tuple[str, int]) -> str | None:
    """The abstract name of a loopback address; None for any other address."""
    host, port = address
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        return None
    return f"\0jaxdt {host}:{port}" if is_loopback and sys.platform == "linux" else None
