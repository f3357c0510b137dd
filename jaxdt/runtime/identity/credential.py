"""Credential files: a private key, its certificate, and the chain up to the run's root, which every side verifies.

Each process of a run has a file of its own. A token is such a file too, of the role "token": the process that comes
with it gets a certificate of its own. Host names are not checked.
"""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from jaxdt.run.errors import BadInput
from jaxdt.runtime.identity import certificate
from jaxdt.runtime.identity.certificate import Holder, SignedCertificate, Signer

EXPECTED = "expected a credential: a PEM key and its certificates"
# X509_V_FLAG_NO_CHECK_TIME of OpenSSL. A host that holds the key stays a member when its clock jumps or begins in 1970.
# An expired credential is refused once, when it is loaded; an expired token, when it is redeemed.
NO_CHECK_TIME = 0x200000


@dataclass(frozen=True)
class Credential:
    """TLS 1.3 contexts for accepting and for dialling, the holder of the certificate, the run's root, and the file."""

    server_context: ssl.SSLContext
    client_context: ssl.SSLContext
    holder: Holder
    root: x509.Certificate
    file: Path

    def read_certificate(self, der: bytes) -> SignedCertificate:
        """The certificate of the other side, read and checked; BadInput if it is wrong."""
        return certificate.read_der(der, self.root)


def write(path: Path, key: ec.EllipticCurvePrivateKey, chain: tuple[x509.Certificate, ...] = ()) -> None:
    """Write a new file, readable by its owner only; BadInput when the file exists or cannot be written."""
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.to_pem(chain)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise BadInput(f"{path}: exists already, expected a new file") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror})") from None


def load(path: Path, checks_time: bool = True) -> Credential:
    """The credential in a file; BadInput when it is missing, open to others, broken or expired. Without `checks_time`
    the other side decides whether it has expired."""
    signer = load_signer(path, checks_time)
    root = signer.chain[-1]
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.num_tickets = 0  # no connection is resumed, and a ticket would be left unread when a connection leaves TLS
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= NO_CHECK_TIME
        try:
            context.load_cert_chain(path)
            context.load_verify_locations(cadata=certificate.to_pem((root,)).decode())
        except ssl.SSLError as error:
            raise BadInput(f"{path}: broken ({error.reason or error}), {EXPECTED}") from None
    return Credential(server, client, certificate.holder_of(signer.chain[0]), root, path)


def load_signer(path: Path, checks_time: bool = True) -> Signer:
    """The key and the chain in a file; BadInput as in `load`."""
    data = _read_private(path)
    key = _key(path, data)
    try:
        chain = tuple(x509.load_pem_x509_certificates(data))
        belong_together = key.public_key() == chain[0].public_key()
        expires = chain[0].not_valid_after_utc
        certificate.holder_of(chain[0])
        for one, issuer in zip(chain, (*chain[1:], chain[-1]), strict=True):
            one.verify_directly_issued_by(issuer)
    except (BadInput, ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion):
        raise BadInput(f"{path}: broken, {EXPECTED}, up to that of the run's root") from None
    if not belong_together:
        raise BadInput(f"{path}: its key and certificate do not belong together, {EXPECTED}")
    if checks_time and expires < certificate.now():
        now = certificate.stamp(certificate.now())
        raise BadInput(f"{path}: expired on {certificate.stamp(expires)}; this host's clock says {now}")
    return Signer(key, chain)


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key in a file that has no certificate yet; BadInput as in `load`."""
    return _key(path, _read_private(path))


def _key(path: Path, data: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadInput(f"{path}: broken, {EXPECTED}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadInput(f"{path}: holds another kind of key, {EXPECTED}")
    return key


def _read_private(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    if mode & 0o077:
        raise BadInput(f"{path}: mode is {mode & 0o777:04o}, expected 0600: others can read the key")
    return data
