"""The credentials of one run, as files of one folder, made by the person or the launcher that starts the run.

root.pem           signs coordinators and operators; stays with who starts the run
operator.pem       for scripts/fleet.py and for revoking
coordinator.pem    of the coordinator, which signs peers; coordinator_2.pem and so on for standbys
peer_3.pem         of peer 3
NAME.token         lets one process come: it gets a peer certificate for it, once
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256

from jaxdt.run.errors import BadInput
from jaxdt.runtime.identity import credential
from jaxdt.runtime.identity.certificate import (
    COORDINATOR,
    LIFETIME_HOURS,
    OPERATOR,
    PEER,
    TOKEN,
    Holder,
    new_key,
    new_root,
    sign,
)

TOKEN_HOURS = 24.0


def coordinator_file(folder: Path, number: int = 1) -> Path:
    """The credential of the coordinator, or of the standby of this number, from 2 on."""
    return folder / ("coordinator.pem" if number == 1 else f"coordinator_{number}.pem")


def peer_file(folder: Path, peer: int) -> Path:
    return folder / f"peer_{peer}.pem"


def operator_file(folder: Path) -> Path:
    return folder / "operator.pem"


def create_run(folder: Path, n_coordinators: int = 1) -> None:
    """Make the root, the operator and the coordinators of a run; BadInput if the folder has a root already."""
    folder.mkdir(parents=True, exist_ok=True)
    root = new_root()
    credential.write(folder / "root.pem", root.key, root.chain)
    holders = {coordinator_file(folder, number): COORDINATOR for number in range(1, n_coordinators + 1)}
    for path, role in (holders | {operator_file(folder): OPERATOR}).items():
        key = new_key()
        credential.write(path, key, sign(root, Holder(role), key.public_key()))


def create_peer(folder: Path, peer: int) -> None:
    """Make the credential of a peer whose key may be made here, as that of a peer of this machine."""
    _create(folder, peer_file(folder, peer), Holder(PEER, peer), LIFETIME_HOURS)


def create_missing(folder: Path, peers: Iterable[int] = ()) -> None:
    """Make the credentials of a run and of these peers, but for those that the folder has. On the coordinator's host
    the root may be missing: it stays with who starts the run, and signs nothing that a resumed run needs."""
    if not (folder / "root.pem").exists() and not coordinator_file(folder).exists():
        create_run(folder)
    for peer in peers:
        if not peer_file(folder, peer).exists():
            create_peer(folder, peer)


def create_token(folder: Path, path: Path, peer: int | None = None, hours: float = TOKEN_HOURS) -> None:
    """Make a token for this peer, or for a newcomer, which gets a new peer id."""
    if not 0 < hours <= LIFETIME_HOURS:
        raise BadInput(f"--hours: got {hours:g}, expected more than 0 and at most {LIFETIME_HOURS:g}")
    _create(folder, path, Holder(TOKEN, peer), hours)


def drop_tokens(folder: Path, redeemed: Collection[str]) -> None:
    """Delete the tokens of a folder that cannot be redeemed any more: those with a fingerprint in `redeemed`, and those
    that have expired."""
    for path in folder.glob("*.token"):
        try:
            is_spent = credential.load_signer(path).chain[0].fingerprint(SHA256()).hex() in redeemed
        except BadInput:  # the line of a process that is started with it would say so
            is_spent = True
        if is_spent:
            path.unlink()


def _create(folder: Path, path: Path, holder: Holder, hours: float) -> None:
    signer = credential.load_signer(coordinator_file(folder))
    key = new_key()
    credential.write(path, key, sign(signer, holder, key.public_key(), hours))
