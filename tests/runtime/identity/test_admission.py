"""Admission over real connections: certificates against peer ids, tokens, the standby's admissions, revocation."""

import datetime

import pytest
import transport_nodes
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.runtime import joining
from jaxdt.runtime.identity import authority, certificate, credential
from jaxdt.runtime.identity import issuer as issuer_module
from jaxdt.runtime.identity.certificate import PEER, TOKEN, Holder, SignedCertificate, new_key, signing_request
from jaxdt.runtime.identity.issuer import Issuer
from jaxdt.runtime.joining import credential_for
from jaxdt.runtime.storage.durable import FileStore

start, run_credential = transport_nodes.start, transport_nodes.run_credential  # fixtures


def load(run_credential, name):
    return credential.load(run_credential.folder / f"{name}.pem")


@pytest.fixture
def issuer(run_credential, tmp_path):
    """Makes the issuer of a coordinator, which may be started again on its disk."""

    def make(name="coordinator", folder="disk", **options):
        signer = credential.load_signer(run_credential.folder / f"{name}.pem")
        return Issuer(signer, FileStore(tmp_path / folder), first_id=4, **options)

    return make


@pytest.fixture
def new_token(run_credential, tmp_path):
    def make(name="new", **options):
        authority.create_token(run_credential.folder, tmp_path / f"{name}.token", **options)
        return tmp_path / f"{name}.token"

    return make


# ------------------------------------------------------------------------------------------------ who speaks as whom

IMPOSTORS = {
    "a peer as another peer": (1, "peer_0", "got that of peer 0, expected that of peer 1 from peer 1"),
    "a peer as the coordinator": (ev.COORDINATOR, "peer_0", "got that of peer 0, expected that of coordinator"),
    "the operator as the coordinator": (
        ev.COORDINATOR,
        "operator",
        "got that of operator, expected that of coordinator",
    ),
    "a coordinator as a peer": (1, "coordinator", "got that of coordinator, expected that of peer 1"),
    "the operator as a peer": (1, "operator", "got that of operator, expected that of peer 1"),
    "the root as the coordinator": (ev.COORDINATOR, "root", "got that of root, expected that of coordinator"),
    "a peer as an operator": (ev.OPERATOR_IDS + 5, "peer_0", "got that of peer 0, expected that of operator"),
    "a peer as another newcomer": (
        ev.TEMPORARY_IDS + 5 * ev.PEER_IDS + 1,
        "peer_0",
        "got that of peer 0, expected that of peer 1",
    ),
}


@pytest.mark.parametrize(("claims", "name", "words"), IMPOSTORS.values(), ids=IMPOSTORS)
def test_nobody_may_speak_as_another(start, run_credential, claims, name, words):
    run_credential.of(0)
    victim, impostor = start(2, run_credential), start(claims, load(run_credential, name))
    impostor.connect(victim)
    impostor.transport.send(2, {"n": 1})
    assert words in victim.link(None, "refused")
    assert words in impostor.link(2, "refused")
    assert victim.inbox.empty()


@pytest.mark.parametrize(("claims", "name", "words"), list(IMPOSTORS.values())[:5], ids=list(IMPOSTORS)[:5])
def test_nobody_may_answer_as_another(start, run_credential, claims, name, words):
    run_credential.of(0)
    caller, impostor = start(2, run_credential), start(claims, load(run_credential, name))
    caller.connect(impostor)
    caller.transport.send(claims, {"secret": 1})
    assert words in caller.link(claims, "refused")
    assert impostor.inbox.empty()


def test_a_peer_may_ask_under_its_own_temporary_id_and_an_operator_under_any(start, run_credential):
    coordinator = start(ev.COORDINATOR, run_credential)
    run_credential.of(0)
    for claims, name in ((ev.TEMPORARY_IDS + 7 * ev.PEER_IDS, "peer_0"), (ev.OPERATOR_IDS + 9, "operator")):
        node = start(claims, load(run_credential, name), run="", listen=None)
        node.connect(coordinator)
        node.transport.send(ev.COORDINATOR, {"from": name})
        assert coordinator.next()[:2] == (claims, {"from": name})


# ------------------------------------------------------------------------------------------------------------ tokens


def come(node, token):
    """The credential that a token's holder gets at a coordinator."""
    return credential.load(credential_for(token, node.address))


def test_a_token_gets_a_certificate_with_which_its_holder_is_let_in(start, run_credential, issuer, new_token):
    coordinator = start(ev.COORDINATOR, run_credential, issue=issuer().redeem)
    assert come(coordinator, new_token("planned", peer=3)).holder == Holder(PEER, 3)
    newcomer = come(coordinator, new_token("new"))
    assert newcomer.holder == Holder(PEER, 4)
    old, new = start(0, run_credential), start(4, newcomer)
    new.connect(old)
    new.transport.send(0, {"n": 1})
    assert old.next()[:2] == (4, {"n": 1})


def test_the_second_start_finds_the_credential_and_asks_nobody(start, run_credential, issuer, new_token):
    token = new_token()
    node = start(ev.COORDINATOR, run_credential, issue=issuer().redeem)
    path = credential_for(token, node.address)
    node.transport.close(0.0)
    assert credential_for(token, node.address) == path == token.with_suffix(".pem")
    assert sorted(one.name for one in token.parent.glob("new.*")) == ["new.pem", "new.token"]


def test_the_token_of_another_peer_is_not_redeemed(start, run_credential, issuer, new_token):
    token = new_token("planned", peer=3)
    node = start(ev.COORDINATOR, run_credential, issue=issuer().redeem)
    expected = "planned.token is for peer 3, expected one for peer 2; delete it, .* make one: token --peer=2"
    with pytest.raises(BadInput, match=expected):
        credential_for(token, node.address, peer=2)
    assert not token.with_suffix(".pem").exists()
    path = credential_for(token, node.address, peer=3)
    with pytest.raises(BadInput, match="planned.pem is for peer 3, expected one for peer 2"):
        credential_for(token, node.address, peer=2)
    assert credential_for(token, node.address, peer=3) == path
    with pytest.raises(BadInput, match="new.token is for a newcomer, expected one for peer 1"):
        credential_for(new_token(), node.address, peer=1)


def test_a_token_counts_once(start, run_credential, issuer, new_token, tmp_path):
    """Also after a restart of the coordinator, on its disk."""
    token = new_token()
    first = start(ev.COORDINATOR, run_credential, issue=issuer().redeem)
    come(first, token)
    (tmp_path / "stolen").mkdir()
    stolen = token.rename(tmp_path / "stolen" / token.name)
    again = start(ev.COORDINATOR, run_credential, issue=issuer().redeem)
    for node in (first, again):
        with pytest.raises(BadInput, match="token: was redeemed already, for peer 4"):
            credential_for(stolen, node.address)
    assert come(again, new_token("other")).holder == Holder(PEER, 5)


def test_a_newcomer_that_takes_a_lost_peers_place_gets_its_id(start, run_credential, issuer, new_token):
    """Two newcomers that come at once get different ids; if there is no id to get, a newcomer's token still counts."""
    lost_ids = [3, 1]
    node = start(ev.COORDINATOR, run_credential, issue=issuer(lost_ids=lambda: lost_ids).redeem)
    holders = [come(node, new_token(name)).holder for name in ("a", "b", "c")]
    assert holders == [Holder(PEER, 3), Holder(PEER, 1), Holder(PEER, 3)]

    def nobody():
        raise BadInput("no peer is lost")

    late = new_token("late")
    with pytest.raises(BadInput, match="no peer is lost"):
        come(start(ev.COORDINATOR, run_credential, issue=issuer(lost_ids=nobody).redeem), late)
    assert come(node, late).holder == Holder(PEER, 1)


def test_who_missed_the_answer_gets_the_same_certificate(issuer, run_credential, new_token):
    token = shown(run_credential, new_token())
    request = signing_request(new_key())
    first = issuer().redeem(token, request)
    assert issuer().redeem(token, request) == first
    with pytest.raises(BadInput, match="redeemed already"):
        issuer().redeem(token, signing_request(new_key()))


def shown(run_credential, token) -> SignedCertificate:
    """A token as the coordinator sees it."""
    own = x509.load_pem_x509_certificates(token.read_bytes())[0]
    return run_credential.of(ev.COORDINATOR).read_certificate(own.public_bytes(Encoding.DER))


def test_an_expired_token_is_refused(issuer, run_credential, new_token):
    """By the coordinator's clock: the holder's own may be wrong."""
    token = new_token(hours=1e-9)
    seen = shown(run_credential, token)
    assert seen.holder.role == TOKEN
    with pytest.raises(BadInput, match="token: expired on "):
        issuer().redeem(seen, signing_request(new_key()))
    with pytest.raises(BadInput, match="expired on "):
        credential.load(token)


def test_a_refusal_of_an_expired_token_names_both_clocks_where_they_differ(
    start, run_credential, issuer, new_token, monkeypatch
):
    coordinator = start(ev.COORDINATOR, run_credential, issue=issuer().redeem)
    token = new_token(hours=1.0)
    own = certificate.now()
    for module in (certificate, issuer_module):
        monkeypatch.setattr(module, "now", lambda: own + datetime.timedelta(hours=3))
    monkeypatch.setattr(joining, "now", lambda: own)
    with pytest.raises(BadInput) as refused:
        credential_for(token, coordinator.address)
    expired, theirs = (own + datetime.timedelta(hours=hours) for hours in (1, 3))
    assert str(refused.value).endswith(
        f"token: expired on {expired:%Y-%m-%d %H:%M} UTC; "
        f"the coordinator's clock says {theirs:%Y-%m-%d %H:%M} UTC, this host's {own:%Y-%m-%d %H:%M} UTC"
    )


def test_a_host_whose_clock_is_ahead_may_redeem_a_token(start, run_credential, issuer, new_token, monkeypatch):
    """Only the coordinator's clock counts."""
    coordinator = start(ev.COORDINATOR, run_credential, issue=issuer().redeem)
    token = new_token(hours=1.0)
    ahead = certificate.now() + datetime.timedelta(hours=3)
    monkeypatch.setattr(SignedCertificate, "is_expired", False)
    monkeypatch.setattr(certificate, "now", lambda: ahead)
    assert credential_for(token, coordinator.address).exists()


def test_a_token_is_no_certificate_and_a_certificate_no_token(start, run_credential, issuer, new_token):
    coordinator = start(ev.COORDINATOR, run_credential, issue=issuer().redeem)
    token = new_token(peer=3)
    as_peer = start(3, credential.load(token))
    as_peer.connect(coordinator)
    as_peer.transport.send(ev.COORDINATOR, {"n": 1})
    assert "frame kind: got greeting, expected request" in as_peer.link(ev.COORDINATOR, "refused")
    run_credential.of(0)
    own = run_credential.folder / "peer_0.pem"
    copy = token.with_name("copy.token")
    copy.write_bytes(own.read_bytes())
    copy.chmod(0o600)
    with pytest.raises(BadInput, match="is the credential of peer 0, expected a token"):
        credential_for(copy, coordinator.address)
    with pytest.raises(BadInput, match="expected a file NAME.token"):
        credential_for(own, coordinator.address)


def test_only_a_coordinator_redeems_a_token(start, run_credential, new_token):
    peer = start(0, run_credential)
    with pytest.raises(BadInput, match="got that of peer 0, expected that of coordinator"):
        credential_for(new_token(), peer.address)


def test_what_is_no_request_is_refused(issuer, run_credential, new_token):
    token = shown(run_credential, new_token())
    request = signing_request(new_key())
    for bad in (b"", b"hello", request[:-9], request[:-1] + bytes([request[-1] ^ 1])):
        with pytest.raises(BadInput, match="^request: "):
            issuer().redeem(token, bad)


def test_the_standby_admits_with_a_certificate_of_its_own(start, run_credential, issuer, new_token):
    standby = start(
        ev.COORDINATOR, load(run_credential, "coordinator_2"), issue=issuer("coordinator_2", "other").redeem
    )
    newcomer = come(standby, new_token())
    new, old = start(4, newcomer), start(0, run_credential)
    for src, dst in ((new, old), (old, new), (new, standby), (standby, new)):
        src.connect(dst)
        src.transport.send(dst.me, {"from": src.me})
        assert dst.next()[:2] == (src.me, {"from": src.me})


# -------------------------------------------------------------------------------------------------------- revocation


def test_a_revoked_peer_is_cut_off_and_stays_out(start, run_credential, issuer, new_token):
    coordinator = start(ev.COORDINATOR, run_credential, issue=issuer().redeem)
    revoked, good = start(0, run_credential), start(1, run_credential)
    for node in (revoked, good):
        node.connect(coordinator)
        node.transport.send(ev.COORDINATOR, {"n": 1})
        coordinator.next()
    coordinator.transport.revoke({0})
    assert revoked.link(ev.COORDINATOR, "down")
    assert "certificate: peer 0 is revoked" in revoked.link(ev.COORDINATOR, "refused")
    again = start(0, run_credential)
    asks = start(ev.TEMPORARY_IDS, run_credential.of(0), run="", listen=None)
    for node in (again, asks):
        node.connect(coordinator)
        node.transport.send(ev.COORDINATOR, {"n": 2})
        assert "certificate: peer 0 is revoked" in node.link(ev.COORDINATOR, "refused")
    with pytest.raises(BadInput, match="token: peer 0 is revoked"):
        credential_for(new_token(peer=0), coordinator.address)
    coordinator.transport.connect(0, again.address)
    coordinator.transport.send(0, {"to": "the revoked"})
    assert "certificate: peer 0 is revoked" in coordinator.link(0, "refused")
    good.transport.send(ev.COORDINATOR, {"n": 3})
    assert coordinator.next()[:2] == (1, {"n": 3})
    assert coordinator.inbox.empty() and again.inbox.empty() and good.reconnects(ev.COORDINATOR) == 0


def test_what_was_issued_can_be_listed(issuer, run_credential, new_token, tmp_path):
    request = signing_request(new_key())
    pem = issuer().redeem(shown(run_credential, new_token(peer=2)), request)
    (entry,) = FileStore(tmp_path / "disk").get("issued")
    assert entry["peer"] == 2 and entry["certificate"] == pem.decode()
    assert all(entry[name] for name in ("token", "key", "issued"))
