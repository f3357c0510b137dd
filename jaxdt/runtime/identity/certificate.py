"""The certificates of a run: who signs what, what a certificate says of its holder, and how long it holds.

    root -> coordinator -> peer, token
    root -> operator

The name of a certificate binds a role and, for peers and some tokens, a peer id. A coordinator may sign for peers and
tokens only: the certificate of a coordinator or an operator counts only with the root's own signature.
"""

import datetime
import secrets
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from jaxdt.run.errors import BadInput

ROOT, COORDINATOR, OPERATOR, PEER, TOKEN = "root", "coordinator", "operator", "peer", "token"
SIGNED_BY_ROOT = (ROOT, COORDINATOR, OPERATOR)
COORDINATORS_CLOCK = "the coordinator's clock says"  # in its refusal of an expired token
LIFETIME_HOURS = 10 * 365 * 24.0
_CLOCK_SKEW = datetime.timedelta(days=1)  # clocks of far-apart hosts disagree
_NAMES_A_PEER = {ROOT: (False,), COORDINATOR: (False,), OPERATOR: (False,), PEER: (True,), TOKEN: (False, True)}
# How many certificates that sign may follow one of this role in a chain; a role without a number signs none.
_PATH_LENGTH = {ROOT: 1, COORDINATOR: 0}


@dataclass(frozen=True)
class Holder:
    """The holder that a certificate names. `peer` is the id of a peer, or the id that a token gives; None for other
    roles, and for a token whose holder gets a new id."""

    role: str
    peer: int | None = None

    def __str__(self) -> str:
        if self.peer is None:
            return self.role
        return f"{self.role} {self.peer}"


@dataclass(frozen=True)
class SignedCertificate:
    """A certificate as the other side of a connection shows it; the TLS handshake has verified its chain.
    `fingerprint` is its SHA-256 in hex."""

    holder: Holder
    fingerprint: str
    expires: datetime.datetime

    @property
    def is_expired(self) -> bool:
        return now() > self.expires


@dataclass(frozen=True)
class Signer:
    """A key that signs, and the chain of its own certificate, which ends with the root's."""

    key: ec.EllipticCurvePrivateKey
    chain: tuple[x509.Certificate, ...]

    @property
    def role(self) -> str:
        return holder_of(self.chain[0]).role


def stamp(moment: datetime.datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def now() -> datetime.datetime:
    """The wall clock of this host, which dates certificates and ends tokens, and decides nothing else of a run."""
    return datetime.datetime.now(datetime.UTC)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def new_root() -> Signer:
    """The root of a new run. The run's part of its name is random, so that no root passes for that of another run."""
    key = new_key()
    name = _x509_name(secrets.token_hex(8), Holder(ROOT))
    certificate = _builder(Holder(ROOT), name, name, key.public_key(), key.public_key()).sign(key, hashes.SHA256())
    return Signer(key, (certificate,))


def sign(
    signer: Signer, holder: Holder, public_key: ec.EllipticCurvePublicKey, hours: float = LIFETIME_HOURS
) -> tuple[x509.Certificate, ...]:
    """A certificate for a holder, with the chain up to the root. BadInput if the signer's role may not sign it."""
    if signer.role != (ROOT if holder.role in SIGNED_BY_ROOT else COORDINATOR):
        raise BadInput(f"the certificate of a {holder.role} cannot be signed by a {signer.role}")
    own = signer.chain[0]
    run = own.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value
    subject = _x509_name(str(run), holder)
    builder = _builder(holder, own.subject, subject, public_key, signer.key.public_key(), hours)
    return (builder.sign(signer.key, hashes.SHA256()), *signer.chain)


def read_der(der: bytes, root: x509.Certificate) -> SignedCertificate:
    """A certificate that the TLS handshake has verified; BadInput for one that this run does not make."""
    certificate = x509.load_der_x509_certificate(der)
    holder = holder_of(certificate)
    if holder.role in SIGNED_BY_ROOT and certificate.issuer != root.subject:
        raise BadInput(f"certificate: that of a {holder.role} is not signed by the run's root")
    return SignedCertificate(holder, certificate.fingerprint(hashes.SHA256()).hex(), certificate.not_valid_after_utc)


def holder_of(certificate: x509.Certificate) -> Holder:
    """The holder that a certificate names; BadInput for one that this program does not make."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    text = str(names[0].value) if len(names) == 1 else ""
    role, _, number = text.partition(" ")
    holder = Holder(role, int(number) if number.isascii() and number.isdigit() else None)
    if str(holder) != text or (holder.peer is not None) not in _NAMES_A_PEER.get(role, ()):
        raise BadInput(f"certificate: names {text!r:.60}, expected a role in a run")
    return holder


def signing_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request (PKCS 10, DER) to certify this key. Its name stays empty: the coordinator decides it."""
    builder = x509.CertificateSigningRequestBuilder(subject_name=x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """The key of a signing request, whose holder has proved that it has it; BadInput for anything else."""
    try:
        parsed = x509.load_der_x509_csr(request)
        key = parsed.public_key()
    except ValueError:
        raise BadInput("request: got no signing request, expected one in DER") from None
    is_p256 = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
    if not (is_p256 and parsed.is_signature_valid):
        raise BadInput("request: expected a P-256 key with its own signature")
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def to_pem(chain: tuple[x509.Certificate, ...]) -> bytes:
    """A chain as PEM, the holder's certificate first."""
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in chain)


def key_digest(key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of a public key, in hex."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))
    return digest.finalize().hex()


def _x509_name(run: str, holder: Holder) -> x509.Name:
    organization = x509.NameAttribute(NameOID.ORGANIZATION_NAME, run)
    return x509.Name([organization, x509.NameAttribute(NameOID.COMMON_NAME, str(holder))])


def _builder(
    holder: Holder,
    issuer: x509.Name,
    subject: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    hours: float = LIFETIME_HOURS,
) -> x509.CertificateBuilder:
    signs = holder.role in _PATH_LENGTH
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
    )
    usage |= dict.fromkeys(("encipher_only", "decipher_only"), False)
    builder = (
        x509.CertificateBuilder(issuer_name=issuer, subject_name=subject, public_key=public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - _CLOCK_SKEW)
        .not_valid_after(now() + datetime.timedelta(hours=hours))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=_PATH_LENGTH.get(holder.role)), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, key_cert_sign=signs, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )
    if holder.role == ROOT:
        return builder
    both_sides = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    return builder.add_extension(both_sides, critical=False)
