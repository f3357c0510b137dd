"""The credential of a run: a P-256 key and a self-signed certificate that every peer presents and verifies.

A process that holds the file is a member of the run; the TLS handshake fails for any other. Host names are not checked.
"""

import datetime
import os
import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from jaxdt.spec.errors import BadInput

EXPECTED = "expected a credential of this run: a PEM key and its certificate"
_YEARS = 10
# X509_V_FLAG_NO_CHECK_TIME of OpenSSL. A host that holds the key stays a member when its clock jumps or begins in 1970.
# An expired credential is refused once, when it is loaded.
NO_CHECK_TIME = 0x200000
_CLOCK_SKEW = datetime.timedelta(days=1)  # clocks of far-apart hosts disagree


@dataclass(frozen=True)
class Credential:
    """TLS 1.3 contexts for accepting and for dialling; `fingerprint` is the certificate's SHA-256 in hex."""

    server_context: ssl.SSLContext
    client_context: ssl.SSLContext
    fingerprint: str


def create(path: str | Path) -> None:
    """Write a new credential, readable by its owner only; BadInput when the file exists or cannot be written."""
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + _self_signed(key).public_bytes(serialization.Encoding.PEM)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise BadInput(f"{path}: exists already; a run has one credential, which is copied to its peers") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror})") from None


def load(path: str | Path) -> Credential:
    """The credential of a file that `create` wrote; BadInput when it is missing, open to others or broken."""
    certificate = _checked_certificate(path, _read_private(path))
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
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
            context.load_verify_locations(cadata=pem)
        except ssl.SSLError as error:
            raise BadInput(f"{path}: broken ({error.reason or error}), {EXPECTED}") from None
    return Credential(server, client, certificate.fingerprint(hashes.SHA256()).hex())


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    # The name is random, so that the root of one run never passes for the issuer of another run's certificate.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"jaxdt run {secrets.token_hex(8)}")])
    now = datetime.datetime.now(datetime.UTC)
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
    )
    public = key.public_key()
    return (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=True, encipher_only=False, decipher_only=False, **usage
            ),
            critical=True,
        )
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def _read_private(path: str | Path) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    if mode & 0o077:
        raise BadInput(f"{path}: mode is {mode & 0o777:04o}, expected 0600: others can read the run's secret")
    return data


def _checked_certificate(path: str | Path, data: bytes) -> x509.Certificate:
    try:
        key = serialization.load_pem_private_key(data, password=None)
        certificate = x509.load_pem_x509_certificate(data)
        belong_together = key.public_key() == certificate.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadInput(f"{path}: broken, {EXPECTED}") from None
    if not belong_together:
        raise BadInput(f"{path}: its key and certificate do not belong together, {EXPECTED}")
    if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise BadInput(f"{path}: expired on {certificate.not_valid_after_utc:%Y-%m-%d}, {EXPECTED}")
    return certificate
