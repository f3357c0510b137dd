"""The steps by which a process joins a run.

The process redeems its token for a certificate. Then it asks under a temporary id: a newcomer asks for a stage, and a
process of a known peer asks whether it may be that peer."""

import contextlib
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cryptography import x509

from jaxdt.membership.claimant import Claimant
from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import FIRST_CONTACT_S
from jaxdt.protocol.reports import Report
from jaxdt.run.errors import BadInput
from jaxdt.runtime.coordinator_client import ask_coordinator
from jaxdt.runtime.identity import credential as credentials
from jaxdt.runtime.identity.certificate import COORDINATORS_CLOCK, PEER, TOKEN, new_key, now, signing_request, stamp
from jaxdt.runtime.identity.credential import Credential
from jaxdt.runtime.net import handshake
from jaxdt.runtime.net.address import Address, format_address
from jaxdt.runtime.net.authentication import Authentication
from jaxdt.runtime.net.connection import Connection, SelfPipe
from jaxdt.runtime.net.dialer import connect
from jaxdt.runtime.net.frame import FrameError
from jaxdt.runtime.net.handshake import HandshakeRefused
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.process import OwnAddress, StopRequests, run_machine
from jaxdt.runtime.reporting.console import print_line
from jaxdt.runtime.run_job import RunJob

PAUSE_S = 0.5
TOKEN_SUFFIX = ".token"
MAKES_TOKENS = "python scripts/tools/credential.py token --run_dir=DIR makes one, in the folder of the run"


def credential_for(token: Path, coordinator: Address, peer: int | None = None) -> Path:
    """The credential that a token stands for: NAME.pem beside NAME.token. The first call redeems the token at the
    coordinator, which binds the new key NAME.key to a peer id; later calls find the credential. BadInput if it is not
    for `peer`, where that is given, or if the coordinator refuses, or is not there."""
    path = token.with_suffix(".pem")
    if token.suffix != TOKEN_SUFFIX or not (token.exists() or path.exists()):
        raise BadInput(f"--token: got {token}, expected a file NAME{TOKEN_SUFFIX}; {MAKES_TOKENS}")
    if path.exists():
        _check_peer(path, credentials.load(path), peer)
        return path
    credential = credentials.load(token, checks_time=False)  # the coordinator's clock decides: this host's may be wrong
    if credential.holder.role != TOKEN:
        raise BadInput(f"--token: {token} is the credential of {credential.holder}, expected a token")
    _check_peer(token, credential, peer)
    key_path = token.with_suffix(".key")  # kept until the certificate is here: only this key may ask again
    if not key_path.exists():
        credentials.write(key_path, new_key())
    key = credentials.load_key(key_path)
    chain = _redeem(credential, coordinator, signing_request(key))
    credentials.write(path, key, tuple(x509.load_pem_x509_certificates(chain)))
    key_path.unlink()
    return path


def _check_peer(path: Path, credential: Credential, peer: int | None) -> None:
    """BadInput if the file is another peer's."""
    if peer is not None and credential.holder.peer != peer:
        got = f"{path} is for {_named(credential.holder.peer)}, expected one for peer {peer}"
        raise BadInput(f"--token: {got}; delete it, and copy that peer's token or make one: token --peer={peer}")


def _named(peer: int | None) -> str:
    return "a newcomer" if peer is None else f"peer {peer}"


def _redeem(credential: Credential, coordinator: Address, request: bytes) -> bytes:
    """The certificate chain (PEM) for a signing request, as soon as the coordinator is there."""
    where = f"coordinator {format_address(coordinator)}"
    give_up_s = time.monotonic() + FIRST_CONTACT_S
    authentication = Authentication(credential)
    said = False
    while True:
        try:
            with contextlib.closing(_dial(coordinator)) as connection:
                authentication.dial(connection, ev.COORDINATOR)
                return handshake.request_certificate(connection, request)
        except (HandshakeRefused, FrameError) as error:
            raise BadInput(f"{where}: {with_own_clock(str(error))}") from None
        except OSError as error:
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise BadInput(f"{where}: {authentication.explain(error)}") from None
            if time.monotonic() > give_up_s:
                remedy = "coordinator_address in the run's folder is where a coordinator listens"
                raise BadInput(f"{where}: no answer within {FIRST_CONTACT_S:.0f} s ({error}); {remedy}") from None
            if not said:
                left = f"for another {give_up_s - time.monotonic():.0f} s at most"
                print_line(f"waiting for the coordinator at {format_address(coordinator)}, {left}")
                said = True
        time.sleep(PAUSE_S)


def with_own_clock(refusal: str) -> str:
    """A coordinator's refusal, with this host's clock where that matters and shows another time."""
    own = stamp(now())
    return f"{refusal}, this host's {own}" if COORDINATORS_CLOCK in refusal and own not in refusal else refusal


def _dial(address: Address) -> Connection:
    limits = TransportLimits()
    with contextlib.closing(SelfPipe()) as nobody_wakes:
        connection = Connection(connect(address, time.monotonic() + limits.connect_s, nobody_wakes), limits)
    connection.deadline_s = time.monotonic() + limits.handshake_s
    return connection


def ask_to_join(
    coordinator: Address,
    credential: Path | None,
    allow_plaintext: bool = False,
    is_worker: bool = False,
    peer: int | None = None,
    gbps: Mapping[int, float] | None = None,
) -> ev.Welcome:
    """Ask the coordinator for a place in the run, as a member or as a pool's worker, under the peer id of the
    credential if there is one, else under `peer` if this process has got that id before. `gbps`: of a worker's links to
    the servers, if it has measured them. BadInput if it refuses, CoordinatorAway if it does not answer."""
    loaded = check_credential(credential)
    peer = loaded.holder.peer if loaded else peer
    question = ev.Join(peer, _where("a newcomer"), True, is_worker, None if gbps is None else tuple(gbps.items()))
    answer = ask_coordinator("--join", temporary_id(peer), question, coordinator, loaded, allow_plaintext)
    if not isinstance(answer, ev.Welcome):
        raise BadInput(f"--join: got {type(answer).__name__} for an answer, expected Welcome")
    return answer


def check_credential(path: Path | None) -> Credential | None:
    """The credential with which a process asks to join. BadInput if it is not that of a peer."""
    loaded = credentials.load(path) if path else None
    if loaded and loaded.holder.role != PEER:
        raise BadInput(f"--join: {path} is the credential of {loaded.holder}, expected that of a peer")
    return loaded


def claim_peer(
    job: RunJob,
    peer: int,
    coordinator: Address,
    own: OwnAddress,
    stop_requests: StopRequests,
    report: Callable[[Report], None],
) -> ev.Stop | None:
    """Wait until this process may be `peer`. The Stop says why it may not and has to end. `report` is called while the
    coordinator is away."""
    own_id = temporary_id(peer)
    machine = Claimant(job.run, peer, own_id, _where(own.advertise or own.listen or "no address"))
    dials = (ev.COORDINATOR, coordinator)
    answer = run_machine(job, own_id, machine, dials=dials, report=report, stop_requests=stop_requests)
    assert isinstance(answer, ev.Stop), "only a peer moves to another stage"
    return answer if answer.code or answer.reason else None


def _where(listen: str) -> str:
    """This process, for people."""
    return f"{listen} (process {os.getpid()} on {socket.gethostname()})"


def temporary_id(peer: int | None) -> int:
    """An id that no other process asks under; its last part is the peer id of this process, if it has one."""
    low = secrets.randbelow(ev.PEER_IDS) if peer is None else peer
    return ev.TEMPORARY_IDS + secrets.randbelow((ev.OPERATOR_IDS - ev.TEMPORARY_IDS) // ev.PEER_IDS) * ev.PEER_IDS + low
