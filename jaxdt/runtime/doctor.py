"""Checks of a host before it joins a run: what was seen and, if it is bad, the command that mends it."""

import datetime
import importlib.metadata
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from jaxdt.core.network import UNLIMITED_GBPS, Network

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ortools", "numpy", "msgpack", "cryptography")
BUFFER_PRODUCTS = 2  # of bandwidth and round trip; one would do if nothing ever waited
FREE_CHECKPOINTS = 3
PROC = Path("/proc/sys/net")


@dataclass(frozen=True)
class Finding:
    """`mend` is empty when all is well, else a command or an advice."""

    what: str
    seen: str
    mend: str = ""


def versions() -> Iterable[Finding]:
    """Python and the packages that decide whether two hosts compute the same."""
    yield Finding("python", platform.python_version())
    for name in PACKAGES:
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", "pip install -e .")


def devices() -> Iterable[Finding]:
    """What jax computes on."""
    import jax

    kinds = sorted({device.device_kind for device in jax.local_devices()})
    yield Finding("devices", f"{jax.local_device_count()} x {', '.join(kinds)} ({jax.default_backend()})")
    yield Finding("cores", str(os.cpu_count()))


def port(listen: str) -> Iterable[Finding]:
    """Whether the address can be listened on."""
    host, _, number = listen.rpartition(":")
    try:
        with socket.create_server((host, int(number))):
            yield Finding("listen", f"{listen} is free")
    except OSError as error:
        yield Finding("listen", f"{listen}: {error.strerror}", f"ss -ltnp 'sport = :{number}'   # who has it")


def clock(credential: Path) -> Iterable[Finding]:
    """The hosts' clocks need not agree, except that the credential must be valid on each of them."""
    certificate = x509.load_pem_x509_certificate(certificate_block(credential.read_bytes()))
    now = datetime.datetime.now(datetime.UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    seen = f"{now:%Y-%m-%d %H:%M:%S} UTC, credential valid {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d}"
    yield Finding("clock", seen, "" if first <= now <= last else "timedatectl set-ntp true")


def certificate_block(pem: bytes) -> bytes:
    """The certificate alone, of a file that holds a key too."""
    return pem[pem.index(b"-----BEGIN CERTIFICATE-----") :]


def disk(run_dir: Path, checkpoint_bytes: int) -> Iterable[Finding]:
    """Room for a few checkpoints."""
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    free_bytes, need_bytes = shutil.disk_usage(folder).free, FREE_CHECKPOINTS * checkpoint_bytes
    seen = f"{free_bytes / 1e9:.1f} GB free, {FREE_CHECKPOINTS} checkpoints take {need_bytes / 1e9:.1f} GB"
    yield Finding("disk", seen, "" if free_bytes >= need_bytes else "choose another --run_dir")


def links(network: Network, peers: Iterable[int], sysctl: Callable[[str], str | None]) -> Iterable[Finding]:
    """Each link's bandwidth-delay product against the limits of TCP's buffers; `sysctl` reads a setting's value."""
    limits = {name: sysctl(name) for name in ("ipv4.tcp_rmem", "ipv4.tcp_wmem")}
    peers = sorted(peers)
    worst_bytes = 0
    for src in peers:
        for dst in peers:
            there, back = network.link(src, dst), network.link(dst, src)
            if src == dst or not 0 < there.bandwidth_gbps < UNLIMITED_GBPS:
                continue
            rtt_s = there.latency_s + back.latency_s
            need_bytes = int(BUFFER_PRODUCTS * there.bandwidth_gbps * 1e9 / 8 * rtt_s)
            worst_bytes = max(worst_bytes, need_bytes)
            seen = f"{there.bandwidth_gbps:g} Gb/s, round trip {rtt_s * 1e3:.0f} ms, needs {need_bytes / 1e6:.1f} MB"
            small = [name for name, value in limits.items() if value and int(value.split()[-1]) < need_bytes]
            mend = "; ".join(f"sysctl -w net.{name}='4096 131072 {need_bytes}'" for name in small)
            names = f"{network.devices[src].name} -> {network.devices[dst].name}"
            yield Finding(f"link {names}", seen, mend)
    idle = sysctl("ipv4.tcp_slow_start_after_idle")
    if worst_bytes and idle == "1":
        mend = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
        yield Finding("slow start", "a link that was idle begins slowly again", mend)


def read_sysctl(name: str) -> str | None:
    """A setting below net, such as ipv4.tcp_rmem; None where the system has none of that name."""
    path = PROC / name.replace(".", "/")
    return path.read_text().strip() if path.exists() else None
