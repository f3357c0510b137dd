"""Peers of one host talk over a Unix socket: the same bytes, TLS handshake and records included, for about two
thirds of the CPU of TCP.

Who listens on a loopback address listens under that address in Linux's abstract namespace as well, which is as wide as
the loopback interface; who dials the address looks there first. Where nobody is there it is TCP: a forwarded port,
another system. A name is anybody's to take, so the other side must belong to the user that we do.
"""

import ipaddress
import os
import socket
import struct
import sys

_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def listener(address: tuple[str, int]) -> socket.socket | None:
    """Listens beside the TCP socket that is bound to `address`, not blocking; None where that cannot be."""
    name = _name(address)
    if name is None:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        return None  # taken: diallers find a stranger there, and come over TCP
    sock.setblocking(False)
    return sock


def dial(address: tuple[str, int]) -> socket.socket | None:
    """A connection to who listens on `address`, if that is on this host and ours; None: try TCP."""
    name = _name(address)
    if name is None:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    if not sock.connect_ex(name) and is_ours(sock):
        return sock
    sock.close()
    return None


def is_ours(sock: socket.socket) -> bool:
    """Whether the other side of a Unix socket is a process of this user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1] == os.geteuid()


def _name(address: tuple[str, int]) -> str | None:
    host, port = address
    try:
        here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        return None
    return f"\0jaxdt {host}:{port}" if here and sys.platform == "linux" else None
