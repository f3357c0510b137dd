"""The check of who may connect: TLS with the run's root, the certificate of a peer id, tokens, and revoked peers.

One object serves all connections of a transport, from any thread.
"""

import ssl
from collections.abc import Collection

from jaxdt.protocol import events as ev
from jaxdt.runtime.identity.certificate import TOKEN, SignedCertificate
from jaxdt.runtime.identity.credential import Credential
from jaxdt.runtime.net import frame, handshake
from jaxdt.runtime.net.connection import Connection
from jaxdt.runtime.net.handshake import HandshakeRefused
from jaxdt.runtime.net.options import Issue

# Reasons of OpenSSL, and their meaning for the other side.
OTHER_RUN = "is of another run: each run has credentials of its own"
NO_CREDENTIAL = "has shown no credential, expected one of this run"
NOT_TLS = "does not speak TLS, so it is no process of a run with credentials; is the port right?"
MEANINGS = {
    "CERTIFICATE_VERIFY_FAILED": OTHER_RUN,
    "TLSV1_ALERT_UNKNOWN_CA": OTHER_RUN,
    "SSLV3_ALERT_BAD_CERTIFICATE": OTHER_RUN,
    "TLSV1_ALERT_DECRYPT_ERROR": OTHER_RUN,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": NO_CREDENTIAL,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "expects a credential, and got none",
    "WRONG_VERSION_NUMBER": NOT_TLS,
    "HTTP_REQUEST": "speaks HTTP, so it is no process of a run",
    "RECORD_LAYER_FAILURE": NOT_TLS,
    "PACKET_LENGTH_TOO_LONG": NOT_TLS,
}


class Authentication:
    """Without a credential nothing is encrypted, and a peer id is believed.

    issue(token, request): at a coordinator, the certificate chain for a token's holder; raises BadInput to refuse it.
    """

    def __init__(self, credential: Credential | None, issue: Issue | None = None):
        self._credential = credential
        self._issue = issue
        self._revoked: frozenset[int] = frozenset()

    def accept(self, connection: Connection, first_byte: bytes) -> SignedCertificate | None:
        """Encrypt an accepted connection, whose first byte is still unread; returns the certificate of the other side.
        HandshakeRefused, FrameError or OSError."""
        if self._credential is None:
            return None
        if first_byte == frame.MAGIC[:1]:
            expected = "expected TLS with a credential of this run, which a newcomer gets by --token=FILE"
            raise HandshakeRefused(f"credential: got plaintext, {expected}")
        return handshake.secure(connection, self._credential, is_dialer=False)

    def dial(self, connection: Connection, peer: int) -> None:
        """Encrypt a connection to `peer`, which must answer with its certificate. HandshakeRefused, FrameError or
        OSError."""
        self.check(handshake.secure(connection, self._credential, is_dialer=True) if self._credential else None, peer)

    def explain(self, error: ssl.SSLError) -> str:
        """The meaning of a failed TLS handshake, for people."""
        file = f" (this side has {self._credential.file})" if self._credential else ""
        return f"the process there {_meaning(error)}{file}"

    def check(self, shown: SignedCertificate | None, peer: int) -> None:
        """HandshakeRefused unless the other side may speak as `peer`."""
        if shown is not None:
            handshake.check_certificate(shown, peer)
        if self.is_revoked(peer):
            raise HandshakeRefused(f"certificate: peer {peer % ev.PEER_IDS} is revoked")

    def redeem(self, connection: Connection, shown: SignedCertificate | None) -> bool:
        """Serve the holder of a token, who gets a certificate and nothing else. False for any other connection.
        HandshakeRefused, FrameError or OSError."""
        if shown is None or shown.holder.role != TOKEN:
            return False
        if self._issue is None:
            raise HandshakeRefused("token: only the coordinator redeems it")
        if shown.holder.peer is not None and self.is_revoked(shown.holder.peer):
            raise HandshakeRefused(f"token: peer {shown.holder.peer} is revoked")
        issue = self._issue
        handshake.answer_request(connection, lambda request: issue(shown, request))
        return True

    def is_revoked(self, peer: int) -> bool:
        """Whether a peer is revoked, also under the temporary id with which it asks to join."""
        return peer < ev.OPERATOR_IDS and peer % ev.PEER_IDS in self._revoked

    def revoke(self, peers: Collection[int]) -> None:
        self._revoked |= frozenset(peers)


def _meaning(error: ssl.SSLError) -> str:
    """A predicate for the other side, such as "is of another run": the library says which check failed, and not what to
    look at."""
    reason = error.reason or str(error)
    return MEANINGS.get(reason) or f"and this side found no way to speak TLS ({reason.lower().replace('_', ' ')})"
