"""The coordinator's side of admission: it redeems each token once, for the certificate of one key.

Everything that it issues is durable before anybody hears of it: for each token the SHA-256 of its certificate, the peer
id, the SHA-256 of the certified key, and the certificate. A process that was cut off before it had the answer asks
again with the same token and key, and gets the same certificate.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxdt.run.errors import BadInput
from jaxdt.runtime.identity.certificate import (
    COORDINATORS_CLOCK,
    PEER,
    TOKEN,
    Holder,
    SignedCertificate,
    Signer,
    key_digest,
    now,
    requested_key,
    sign,
    stamp,
    to_pem,
)

ISSUED = "issued"  # the name under which it is durable


class ValueStore(Protocol):
    """A store of durable values, such as a FileStore."""

    def put(self, name: str, value: Any) -> None: ...

    def get(self, name: str) -> Any: ...


class Issuer:
    """`first_id` is the least peer id that a newcomer may get. `lost_ids`: the ids of lost peers of which a newcomer
    gets one instead, None if it does not; BadInput if there is none. Any thread may call `redeem`."""

    def __init__(
        self,
        signer: Signer,
        store: ValueStore,
        first_id: int,
        lost_ids: Callable[[], Sequence[int] | None] = lambda: None,
    ):
        self._lost_ids = lost_ids
        self._signer = signer
        self._store = store
        self._lock = threading.Lock()
        self._issued: list[dict[str, Any]] = list(store.get(ISSUED) or [])
        self._next_id = max([first_id, *(entry["peer"] + 1 for entry in self._issued)])

    def redeem(self, token: SignedCertificate, request: bytes) -> bytes:
        """The certificate chain (PEM) for the key of a signing request; BadInput says why a token does not count."""
        assert token.holder.role == TOKEN, "only a token is redeemed"
        key = requested_key(request)
        with self._lock:
            earlier = next((entry for entry in self._issued if entry["token"] == token.fingerprint), None)
            if earlier is not None:
                if earlier["key"] != key_digest(key):
                    raise BadInput(f"token: was redeemed already, for peer {earlier['peer']}")
                return earlier["certificate"].encode()
            if token.is_expired:
                raise BadInput(f"token: expired on {stamp(token.expires)}; {COORDINATORS_CLOCK} {stamp(now())}")
            peer = self._newcomer_id() if token.holder.peer is None else token.holder.peer
            pem = to_pem(sign(self._signer, Holder(PEER, peer), key))
            entry = {
                "token": token.fingerprint,
                "peer": peer,
                "key": key_digest(key),
                "certificate": pem.decode(),
                "issued": f"{now():%Y-%m-%d %H:%M:%S} UTC",
            }
            self._store.put(ISSUED, [*self._issued, entry])
            self._issued.append(entry)
            self._next_id = max(self._next_id, peer + 1)
            return pem

    def _newcomer_id(self) -> int:
        """An id for a newcomer: an unused one, or, where newcomers take the places of lost peers, the lost peer's
        id that was given least recently, since a process that got an id lately may still be on its way."""
        lost_ids = self._lost_ids()
        if lost_ids is None:
            return self._next_id
        given = {entry["peer"]: n for n, entry in enumerate(self._issued)}
        return min(lost_ids, key=lambda peer: given.get(peer, -1))
