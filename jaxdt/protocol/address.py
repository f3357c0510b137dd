"""The host of an address, as text: what it is, and whether another host can dial it.

A name stays a name here: only the host that dials it knows what it means. The names of the loopback interface are the
exception, since they mean the same everywhere: the host itself. A name in other letters, such as those of full width,
is judged as what a resolver makes of it.
"""

import ipaddress
import re

_LABEL = re.compile(rb"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
_NAME_BYTES_MAX = 253
_NUMBER = re.compile(rb"0x[0-9a-f]*|[0-9]+", re.IGNORECASE)  # also in the old forms of an address, for inet_aton


def is_host(host: str) -> bool:
    """Whether a host is an IP address, or a name that a resolver takes: labels of letters, digits, - and _. A name
    that ends in a number, hexadecimal ones included, is none, since resolvers read it as an address in an old form."""
    if _ip(host) is not None:
        return True
    name = _resolved_name(host)
    labels = name.split(b".")
    is_name = len(name) <= _NAME_BYTES_MAX and all(_LABEL.fullmatch(label) for label in labels)
    return is_name and not _NUMBER.fullmatch(labels[-1])


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all interfaces of its own host, so that others cannot dial it."""
    ip = _ip(host)
    return ip is not None and ip.is_unspecified


def is_loopback(host: str) -> bool:
    """Whether a host is this one, whoever dials it."""
    ip = _ip(host)
    if ip is not None:
        return ip.is_loopback
    name = _resolved_name(host).decode().lower()
    return name in _LOOPBACK_NAMES or name.endswith(".localhost")


def why_unreachable(host: str) -> str:
    """The reason why no other host reaches this one, for people; '' if one may."""
    ip = _ip(host)
    if is_loopback(host):
        return "is the loopback interface, on which each host reaches only itself"
    if ip is None:
        return "" if is_host(host) else "is neither a name nor an address in its usual form"
    if ip.is_unspecified or (ip.version == 4 and ip.packed[0] == 0):
        return "stands for all interfaces of the host that listens, and cannot be dialled"
    if ip.is_multicast or (ip.version == 4 and ip.is_reserved):
        return "is not the address of one host"
    if ip.version == 6 and ip.is_link_local:
        return "is link-local, and means nothing without an interface of the host that dials it"
    return ""


def why_undialable(address: str, coordinator: str) -> str:
    """The reason why a run's peers may not be reached at this address, host:port, for people; '' if they may, or if it
    is ''. All addresses of a run are of loopback, or none: where the coordinator's is none, there may be other hosts.
    An address of the coordinator that is '' is not known."""
    host, reached = (text.rpartition(":")[0].strip("[]") for text in (address, coordinator))
    if not host or not (is_wildcard(host) or (reached and not is_loopback(reached))):
        return ""
    reason = why_unreachable(host)
    return f"its address {address} {reason}" if reason else ""


def _resolved_name(host: str) -> bytes:
    """The ASCII name that a resolver gets for a host, without the dot at its end; b"" for a text that is no name."""
    try:
        return host.encode("idna").removesuffix(b".")
    except UnicodeError:
        return b""


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip
