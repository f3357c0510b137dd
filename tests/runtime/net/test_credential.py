import datetime
import os
import ssl
import types

import pytest

from jaxdt.runtime.net import credential
from jaxdt.spec.errors import BadInput


@pytest.fixture
def path(tmp_path):
    credential.create(tmp_path / "run.pem")
    return tmp_path / "run.pem"


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


def test_a_new_credential_is_private_and_both_sides_prove_it(path):
    assert path.stat().st_mode & 0o777 == 0o600
    own = credential.load(path)
    other = credential.load(path)
    assert own.fingerprint == other.fingerprint and len(bytes.fromhex(own.fingerprint)) == 32
    server, client = shake_hands(own, other)
    assert server.version() == client.version() == "TLSv1.3"
    assert server.getpeercert() and client.getpeercert()
    with pytest.raises(ssl.SSLWantReadError):
        client.read()
    assert not client.session.has_ticket


def test_a_wide_umask_changes_nothing(tmp_path):
    before = os.umask(0)
    try:
        credential.create(tmp_path / "run.pem")
    finally:
        os.umask(before)
    assert (tmp_path / "run.pem").stat().st_mode & 0o777 == 0o600


def test_a_clock_that_jumped_keeps_nobody_out(tmp_path, monkeypatch):
    """A host without a battery begins in 1970; it is a member as long as it holds the key."""

    class Ahead:
        @staticmethod
        def now(tz):
            return datetime.datetime(2100, 1, 1, tzinfo=tz)

    # Only this module's clock: what signs the certificate may keep the datetime class that it sees first.
    clock = types.SimpleNamespace(datetime=Ahead, timedelta=datetime.timedelta, UTC=datetime.UTC)
    with monkeypatch.context() as patch:
        patch.setattr(credential, "datetime", clock)
        credential.create(tmp_path / "run.pem")
    own = credential.load(tmp_path / "run.pem")
    server, client = shake_hands(own, own)
    assert server.version() == client.version() == "TLSv1.3"


def test_another_runs_credential_does_not_pass(path, tmp_path):
    credential.create(tmp_path / "other.pem")
    own, other = credential.load(path), credential.load(tmp_path / "other.pem")
    assert own.fingerprint != other.fingerprint
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(own, other)


def test_a_server_asks_for_the_clients_credential(path):
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    own = credential.load(path)
    with pytest.raises(ssl.SSLError, match="(?i)peer did not return a certificate"):
        shake_hands(own, credential.Credential(own.server_context, bare, ""))


def test_an_existing_file_is_not_overwritten(path):
    before = path.read_bytes()
    with pytest.raises(BadInput, match="exists already"):
        credential.create(path)
    assert path.read_bytes() == before


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(BadInput, match="cannot be written"):
        credential.create(tmp_path / "nowhere" / "run.pem")


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


def write_private(path, data):
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_broken_files_are_named(path, tmp_path):
    whole = path.read_bytes()
    cut = whole.index(b"-----BEGIN CERTIFICATE")
    for data in (b"", b"hello", whole[:cut], whole[cut:], whole[:-100], whole.replace(b"M", b"!"), b"\xff" * 99):
        with pytest.raises(BadInput, match="broken.pem: broken, expected a credential"):
            credential.load(write_private(tmp_path / "broken.pem", data))


def test_a_flipped_bit_is_bad_input_or_harmless(path, tmp_path):
    """One bit in every seventh byte."""
    whole, refused = path.read_bytes(), 0
    for at in range(0, len(whole), 7):
        bad = write_private(tmp_path / "bad.pem", whole[:at] + bytes([whole[at] ^ 1 << at % 7]) + whole[at + 1 :])
        try:
            credential.load(bad)
        except BadInput as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > len(whole) // 7 // 2


def test_key_and_certificate_of_two_runs(path, tmp_path):
    credential.create(tmp_path / "other.pem")
    own, other = path.read_bytes(), (tmp_path / "other.pem").read_bytes()
    cut = own.index(b"-----BEGIN CERTIFICATE")
    mixed = own[:cut] + other[other.index(b"-----BEGIN CERTIFICATE") :]
    with pytest.raises(BadInput, match="do not belong together"):
        credential.load(write_private(tmp_path / "mixed.pem", mixed))
