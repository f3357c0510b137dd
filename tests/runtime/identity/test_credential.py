"""Certificates and credential files: who may sign what, what is verified, and which files are refused."""

import datetime
import os
import ssl
import types

import pytest

from jaxdt.run.errors import BadInput
from jaxdt.runtime.identity import authority, certificate, credential
from jaxdt.runtime.identity.certificate import COORDINATOR, OPERATOR, PEER, ROOT, TOKEN, Holder, new_key, sign


@pytest.fixture
def run(tmp_path):
    """The folder of a run with a standby and the peers 0 and 1."""
    authority.create_run(tmp_path / "run", n_coordinators=2)
    authority.create_missing(tmp_path / "run", [0, 1])
    return tmp_path / "run"


@pytest.fixture
def path(run):
    return run / "peer_0.pem"


def shake_hands(server_side, client_side):
    """A TLS handshake in memory; returns the two ends."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_side.server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_side.client_context.wrap_bio(to_client, to_server)
    waiting = [client, server, client, server]
    for end in waiting:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return server, client


def shown(end, own):
    """The certificate that the other end of a TLS handshake has shown."""
    return own.read_certificate(end.getpeercert(binary_form=True))


def test_all_files_of_a_run_are_private(run):
    names = {path.name for path in run.iterdir()}
    assert names == {"root.pem", "operator.pem", "coordinator.pem", "coordinator_2.pem", "peer_0.pem", "peer_1.pem"}
    assert {path.stat().st_mode & 0o777 for path in run.iterdir()} == {0o600}


def test_both_sides_prove_who_they_are(run):
    """Also a peer that the standby has admitted, to one that the coordinator has."""
    own = credential.load(run / "peer_0.pem")
    standby = credential.load_signer(run / "coordinator_2.pem")
    key = new_key()
    credential.write(run / "peer_7.pem", key, sign(standby, Holder(PEER, 7), key.public_key()))
    others = {
        "peer_1": Holder(PEER, 1),
        "peer_7": Holder(PEER, 7),
        "coordinator": Holder(COORDINATOR),
        "coordinator_2": Holder(COORDINATOR),
        "operator": Holder(OPERATOR),
    }
    for name, holder in others.items():
        other = credential.load(run / f"{name}.pem")
        assert other.holder == holder
        for server_side, client_side in ((own, other), (other, own)):
            server, client = shake_hands(server_side, client_side)
            assert server.version() == client.version() == "TLSv1.3"
            assert shown(client, client_side).holder == server_side.holder
            assert shown(server, server_side).holder == client_side.holder
            with pytest.raises(ssl.SSLWantReadError):
                client.read()
            assert not client.session.has_ticket


SIGNERS = {"root": (COORDINATOR, OPERATOR), "coordinator": (PEER, TOKEN), "peer_0": (), "operator": ()}


@pytest.mark.parametrize("role", [ROOT, COORDINATOR, OPERATOR, PEER, TOKEN])
@pytest.mark.parametrize("signer", SIGNERS)
def test_who_signs_for_whom(run, signer, role):
    holder = Holder(role, 3 if role == PEER else None)
    loaded = credential.load_signer(run / f"{signer}.pem")
    if role in SIGNERS[signer]:
        assert certificate.holder_of(sign(loaded, holder, new_key().public_key())[0]) == holder
    elif (signer, role) != ("root", ROOT):
        with pytest.raises(BadInput, match=f"certificate of a {role} cannot be signed by a "):
            sign(loaded, holder, new_key().public_key())


FORGERIES = {
    # signer, forged holder, what refuses it
    "a coordinator signs a coordinator": ("coordinator", Holder(COORDINATOR), BadInput),
    "a coordinator signs an operator": ("coordinator", Holder(OPERATOR), BadInput),
    "a peer signs a peer": ("peer_0", Holder(PEER, 1), ssl.SSLError),
    "an operator signs a peer": ("operator", Holder(PEER, 1), ssl.SSLError),
}


@pytest.mark.parametrize(("signer", "holder", "refusal"), FORGERIES.values(), ids=FORGERIES)
def test_a_forged_certificate_is_refused(run, monkeypatch, signer, holder, refusal):
    """Signed by a key of the run whose holder may not: with the checks of an honest program taken away."""
    key, own = new_key(), credential.load(run / "peer_0.pem")
    with monkeypatch.context() as patch:
        patch.setattr(certificate.Signer, "role", property(lambda _: ROOT if holder.role != PEER else COORDINATOR))
        forged = sign(credential.load_signer(run / f"{signer}.pem"), holder, key.public_key())
    credential.write(run / "forged.pem", key, forged)
    forger = credential.load(run / "forged.pem")
    with pytest.raises(refusal):
        server, _ = shake_hands(own, forger)
        shown(server, own)


def test_a_wide_umask_changes_nothing(tmp_path):
    before = os.umask(0)
    try:
        authority.create_run(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "root.pem").stat().st_mode & 0o777 == 0o600


def test_a_clock_that_jumped_keeps_nobody_out(tmp_path, monkeypatch):
    """A host without a battery begins in 1970; it is a member as long as it holds the key."""

    class Ahead:
        @staticmethod
        def now(tz):
            return datetime.datetime(2100, 1, 1, tzinfo=tz)

    # Only this module's clock: what signs the certificate may keep the datetime class that it sees first.
    clock = types.SimpleNamespace(datetime=Ahead, timedelta=datetime.timedelta, UTC=datetime.UTC)
    with monkeypatch.context() as patch:
        patch.setattr(certificate, "datetime", clock)
        authority.create_run(tmp_path)
    own = credential.load(tmp_path / "coordinator.pem")
    server, client = shake_hands(own, own)
    assert server.version() == client.version() == "TLSv1.3"


def test_the_credential_of_another_run_does_not_pass(path, tmp_path):
    authority.create_run(tmp_path / "other")
    own, other = credential.load(path), credential.load(tmp_path / "other" / "coordinator.pem")
    for server_side, client_side in ((own, other), (other, own)):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(server_side, client_side)


def test_a_server_asks_for_the_clients_certificate(path):
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    own = credential.load(path)
    with pytest.raises(ssl.SSLError, match="(?i)peer did not return a certificate"):
        shake_hands(own, types.SimpleNamespace(client_context=bare))


def test_an_existing_run_is_not_overwritten(run):
    before = {path: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(BadInput, match="root.pem: exists already"):
        authority.create_run(run)
    authority.create_missing(run, [0, 1])
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(BadInput, match="cannot be written"):
        credential.write(tmp_path / "nowhere" / "run.pem", new_key())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622])
def test_a_file_open_to_others_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(BadInput, match=f"mode is {mode:04o}, expected 0600"):
        credential.load(path)


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        credential.load(tmp_path / "missing.pem")
    with pytest.raises(BadInput, match="cannot be read"):
        credential.load(tmp_path)


def test_an_expired_credential_is_refused(run, tmp_path):
    signer, key = credential.load_signer(run / "coordinator.pem"), new_key()
    credential.write(tmp_path / "late.pem", key, sign(signer, Holder(PEER, 2), key.public_key(), hours=-1))
    with pytest.raises(BadInput, match="late.pem: expired on "):
        credential.load(tmp_path / "late.pem")


def write_private(path, data):
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_broken_files_are_named(path, tmp_path):
    whole = path.read_bytes()
    cut = whole.index(b"-----BEGIN CERTIFICATE")
    last = whole.rindex(b"-----BEGIN CERTIFICATE")
    cases = (
        b"",
        b"hello",
        whole[:cut],
        whole[cut:],
        whole[:-100],
        whole[:last],
        whole.replace(b"M", b"!"),
        b"\xff" * 99,
    )
    for data in cases:
        with pytest.raises(BadInput, match="broken.pem: broken, "):
            credential.load(write_private(tmp_path / "broken.pem", data))


def test_a_flipped_bit_is_bad_input_or_harmless(path, tmp_path):
    """One bit in every 29th byte."""
    whole, refused = path.read_bytes(), 0
    for at in range(0, len(whole), 29):
        bad = write_private(tmp_path / "bad.pem", whole[:at] + bytes([whole[at] ^ 1 << at % 7]) + whole[at + 1 :])
        try:
            credential.load(bad)
        except BadInput as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > len(whole) // 29 // 2


def test_the_key_and_the_certificate_of_two_peers(run, tmp_path):
    own, other = (run / "peer_0.pem").read_bytes(), (run / "peer_1.pem").read_bytes()
    cut = own.index(b"-----BEGIN CERTIFICATE")
    mixed = own[:cut] + other[other.index(b"-----BEGIN CERTIFICATE") :]
    with pytest.raises(BadInput, match="do not belong together"):
        credential.load(write_private(tmp_path / "mixed.pem", mixed))
