"""The meaning of a failed TLS handshake, in words: the library says which check failed, and not what to look at."""

import ssl

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


def meaning(error: ssl.SSLError) -> str:
    """A predicate for the other side, such as "is of another run"."""
    reason = error.reason or str(error)
    return MEANINGS.get(reason) or f"and this side found no way to speak TLS ({reason.lower().replace('_', ' ')})"
