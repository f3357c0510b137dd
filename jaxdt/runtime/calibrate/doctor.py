"""Checks a host before it joins a run. Each finding says what was seen and, if it is bad, the command that mends it."""

import ctypes
import datetime
import importlib.metadata
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from jaxdt.model.data import TokenFile, verify_checksum
from jaxdt.run.cpus import cores_text
from jaxdt.run.errors import BadInput
from jaxdt.run.network import UNLIMITED_GBPS, Network
from jaxdt.runtime.net.address import Address, bind, format_address
from jaxdt.runtime.net.descriptor_limit import descriptors_needed

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ortools", "numpy", "msgpack", "cryptography")
BUFFER_PRODUCTS = 2  # buffer size in products of bandwidth and round trip; one suffices only if nothing ever waits
PROC = Path("/proc/sys/net")
NVIDIA = Path("/proc/driver/nvidia/version")
DIAL_S = 5.0
UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
SKEW_S_MAX = 1.0


@dataclass(frozen=True)
class Finding:
    """The result of one check. `mend` is empty if all is well, otherwise a command or advice."""

    what: str
    seen: str
    mend: str = ""


def versions() -> Iterable[Finding]:
    """The versions of Python and of the packages that determine whether two hosts compute the same."""
    yield Finding("python", platform.python_version())
    for name in PACKAGES:
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", "pip install -e .")


def devices() -> Iterable[Finding]:
    """The devices on which jax computes."""
    import jax

    from jaxdt.model.stage import computes_on

    mend = ""
    if jax.default_backend() == "cpu" and NVIDIA.exists():
        on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
        mend = "unset JAX_PLATFORMS" if on_cpu else 'pip install "jax[cuda13]"'
        mend += "   # an NVIDIA driver is here"
    yield Finding("devices", computes_on(), mend)
    yield Finding("cores", cores_text())


def port(address: Address) -> Iterable[Finding]:
    """Whether the address can be listened on."""
    try:
        bind(address).close()
        yield Finding("listen", f"{format_address(address)} is free")
    except BadInput as error:
        yield Finding("listen", str(error), f"ss -ltnp 'sport = :{address[1]}'   # who has it")


def reach(address: Address) -> Iterable[Finding]:
    """Whether this host can connect to the coordinator, and how long that takes."""
    text = format_address(address)
    start_s = time.monotonic()
    try:
        with socket.create_connection(address, timeout=DIAL_S):
            yield Finding("coordinator", f"{text} answers in {1e3 * (time.monotonic() - start_s):.1f} ms")
    except OSError as error:
        mend = f"start it, or open port {address[1]} in {address[0]}'s firewall; behind NAT: docs/hosts.md"
        yield Finding("coordinator", f"{text}: {error.strerror or error}", mend)


def clock_error_s() -> float | None:
    """The error of the clock that the system assumes: inf if nothing synchronizes it, None if the system does not
    say."""
    adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    if adjtimex is None:
        return None
    answer = (ctypes.c_long * 64)()  # struct timex: modes, offset, freq, maxerror, esterror, status, and more
    adjtimex(answer)
    unset = answer[5] & UNSYNCHRONISED
    return float("inf") if unset else answer[3] / 1e6


def clock(error_s: float | None) -> Iterable[Finding]:
    """Whether the wall clock is right. A run decides nothing by it, but logs and the credential bear its dates."""
    if error_s is None:
        return
    seen = "nothing sets this host's clock" if error_s == float("inf") else f"right within {error_s:.3f} s"
    yield Finding("clock", seen, "" if error_s <= SKEW_S_MAX else "timedatectl set-ntp true")


def validity(credential: Path) -> Iterable[Finding]:
    """The dates of the credential against this host's clock."""
    certificate = x509.load_pem_x509_certificate(certificate_block(credential.read_bytes()))
    now = datetime.datetime.now(datetime.UTC)
    first = certificate.not_valid_before_utc
    last = certificate.not_valid_after_utc
    seen = f"{now:%Y-%m-%d %H:%M:%S} UTC, credential valid {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d}"
    yield Finding("credential", seen, "" if first <= now <= last else "timedatectl set-ntp true")


def certificate_block(pem: bytes) -> bytes:
    """The part of a credential file that is the certificate; the file also holds a key."""
    return pem[pem.index(b"-----BEGIN CERTIFICATE-----") :]


def tokens(file: TokenFile) -> Iterable[Finding]:
    """Whether the token file is undamaged; this reads all of it."""
    try:
        verify_checksum(file)
    except BadInput as error:
        yield Finding("tokens", str(error), "copy it again, or make it with scripts/prepare_data.py")
    else:
        yield Finding("tokens", f"{file.path}: {file.n_train_tokens + file.n_eval_tokens} of {file.tokenizer}, whole")


def descriptors(limit: float, n_peers: int) -> Iterable[Finding]:
    """Whether a process may have a connection to every peer. `limit`: the hard limit, which each process takes."""
    need = descriptors_needed(n_peers)
    seen = f"a process may have {limit}, one of {n_peers} peers needs at most {need}"
    mend = f"ulimit -Hn {need}   # as root; or LimitNOFILE={need} in the service that starts it"
    yield Finding("descriptors", seen, "" if limit >= need else mend)


def disk(run_dir: Path, n_checkpoints: int, checkpoint_bytes: int) -> Iterable[Finding]:
    """Whether there is room for the checkpoints that a run keeps."""
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(folder).free
    need_bytes = n_checkpoints * checkpoint_bytes
    seen = f"{free_bytes / 1e9:.1f} GB free, {n_checkpoints} checkpoints take {need_bytes / 1e9:.1f} GB"
    yield Finding("disk", seen, "" if free_bytes >= need_bytes else "choose another --run_dir")


def links(network: Network, peers: Iterable[int], sysctl: Callable[[str], str | None]) -> Iterable[Finding]:
    """Whether TCP's buffers may be as large as each link's bandwidth-delay product. `sysctl` reads the value of a
    setting. Every mending command sets what the most demanding link needs, so that no command undoes another."""
    peers = sorted(peers)
    needs_bytes = {(a, b): buffer_bytes(network, a, b) for a in peers for b in peers}
    worst_bytes = max(needs_bytes.values(), default=0)
    limits = {name: (sysctl(name) or "").split() for name in ("ipv4.tcp_rmem", "ipv4.tcp_wmem")}
    for (src, dst), need_bytes in needs_bytes.items():
        if need_bytes == 0:
            continue
        link = network.link(src, dst)
        rtt_s = round_trip_s(network, src, dst)
        seen = f"{link.bandwidth_gbps:g} Gb/s, round trip {rtt_s * 1e3:.0f} ms, needs {need_bytes / 1e6:.1f} MB"
        small = {name: value for name, value in limits.items() if value and int(value[-1]) < need_bytes}
        mends = [f"sysctl -w net.{name}='{' '.join(value[:-1])} {worst_bytes}'" for name, value in small.items()]
        names = f"{network.devices[src].name} -> {network.devices[dst].name}"
        yield Finding(f"link {names}", seen, "; ".join(mends))
    if worst_bytes and sysctl("ipv4.tcp_slow_start_after_idle") == "1":
        mend = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
        yield Finding("slow start", "a link that was idle begins slowly again", mend)


def round_trip_s(network: Network, src: int, dst: int) -> float:
    return network.link(src, dst).latency_s + network.link(dst, src).latency_s


def buffer_bytes(network: Network, src: int, dst: int) -> int:
    """The bytes that TCP must be allowed to have in flight on a link; 0 for no link, or for one without a limit."""
    bandwidth_gbps = network.link(src, dst).bandwidth_gbps
    if src == dst or not 0 < bandwidth_gbps < UNLIMITED_GBPS:
        return 0
    return int(BUFFER_PRODUCTS * bandwidth_gbps * 1e9 / 8 * round_trip_s(network, src, dst))


def read_sysctl(name: str) -> str | None:
    """The value of a setting below net, such as ipv4.tcp_rmem; None if the system has no setting of that name."""
    path = PROC / name.replace(".", "/")
    return path.read_text().strip() if path.exists() else None
