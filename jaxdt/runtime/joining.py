"""How a process comes to a run: it redeems its token for a certificate, and a newcomer then asks for a stage."""

import contextlib
import secrets
import ssl
import time
from pathlib import Path

from cryptography import x509

from jaxdt.protocol.events import COORDINATOR, TEMPORARY_IDS, Join, Welcome
from jaxdt.runtime.coordinator_client import ask_coordinator
from jaxdt.runtime.identity import credential as credentials
from jaxdt.runtime.identity.certificate import PEER, TOKEN, new_key, signing_request
from jaxdt.runtime.identity.credential import Credential
from jaxdt.runtime.net import handshake
from jaxdt.runtime.net.authentication import Authentication
from jaxdt.runtime.net.connection import Address, Connection
from jaxdt.runtime.net.dialer import connect
from jaxdt.runtime.net.frame import FrameError
from jaxdt.runtime.net.handshake import HandshakeRefused
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.net.self_pipe import SelfPipe
from jaxdt.spec.errors import BadInput

FIRST_CONTACT_S = 120.0  # the processes of a run may be started in any order
PAUSE_S = 0.5
TOKEN_SUFFIX = ".token"


def credential_for(token: Path, coordinator: Address) -> Path:
    """The credential that a token stands for: NAME.pem beside NAME.token. The first call redeems the token at the
    coordinator, which binds the new key NAME.key to a peer id; later calls find the credential. BadInput if the
    coordinator refuses, or is not there."""
    if token.suffix != TOKEN_SUFFIX:
        raise BadInput(f"--token: got {token}, expected a file NAME{TOKEN_SUFFIX}")
    path = token.with_suffix(".pem")
    if path.exists():
        return path
    credential = credentials.load(token)
    if credential.holder.role != TOKEN:
        raise BadInput(f"--token: {token} is the credential of {credential.holder}, expected a token")
    key_path = token.with_suffix(".key")  # kept until the certificate is here: only this key may ask again
    if not key_path.exists():
        credentials.write(key_path, new_key())
    key = credentials.load_key(key_path)
    chain = _redeem(credential, coordinator, signing_request(key))
    credentials.write(path, key, tuple(x509.load_pem_x509_certificates(chain)))
    key_path.unlink()
    return path


def _redeem(credential: Credential, coordinator: Address, request: bytes) -> bytes:
    """The certificate chain (PEM) for a signing request, as soon as the coordinator is there."""
    where = "--token: coordinator {}:{}".format(*coordinator)
    give_up_s = time.monotonic() + FIRST_CONTACT_S
    authentication = Authentication(credential)
    while True:
        try:
            with contextlib.closing(_dial(coordinator)) as connection:
                authentication.dial(connection, COORDINATOR)
                return handshake.request_certificate(connection, request)
        except (HandshakeRefused, FrameError) as error:
            raise BadInput(f"{where}: {error}") from None
        except OSError as error:
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise BadInput(f"{where}: {error}") from None
            if time.monotonic() > give_up_s:
                raise BadInput(f"{where}: no answer within {FIRST_CONTACT_S:.0f} s ({error})") from None
        time.sleep(PAUSE_S)


def _dial(address: Address) -> Connection:
    limits = TransportLimits()
    with contextlib.closing(SelfPipe()) as nobody_wakes:
        connection = Connection(connect(address, time.monotonic() + limits.connect_s, nobody_wakes), limits)
    connection.deadline_s = time.monotonic() + limits.handshake_s
    return connection


def ask_to_join(coordinator: Address, credential: Path | None, allow_plaintext: bool = False) -> Welcome:
    """Ask the coordinator for a place in the run, under the peer id of the credential; without one under a random
    temporary id. BadInput if it refuses or does not answer."""
    loaded = credentials.load(credential) if credential else None
    if loaded and loaded.holder.role != PEER:
        raise BadInput(f"--join: {credential} is the credential of {loaded.holder}, expected that of a peer")
    peer = loaded.holder.peer if loaded else None
    temporary_id = TEMPORARY_IDS + (secrets.randbelow(TEMPORARY_IDS) if peer is None else peer)
    answer = ask_coordinator("--join", temporary_id, Join(peer), coordinator, loaded, allow_plaintext)
    if not isinstance(answer, Welcome):
        raise BadInput(f"--join: got {type(answer).__name__} for an answer, expected Welcome")
    return answer
