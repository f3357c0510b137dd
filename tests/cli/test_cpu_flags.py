"""Processes stay on the CPUs that theirs may use, numbered as the system numbers them."""

import pytest

from jaxdt.api import launch
from jaxdt.run import cpus
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan
from jaxdt.runtime import compute_environment, fleet

TWO_PEERS = Plan(2, ((0, 1), (1, 2)), ((0,), (1,)), (2,))


@pytest.fixture
def mask(monkeypatch):
    for module in (cpus, fleet, compute_environment):
        monkeypatch.setattr(module, "allowed_cpus", lambda: [2, 5, 6, 9])


@pytest.mark.parametrize(
    ("cores", "pin", "flags"),
    [
        (4.0, 0, [["--cpus=2,5"], ["--cpus=6,9"]]),
        (4.0, 1, [["--cpus=2"], ["--cpus=5"]]),
        (3.5, 0, [["--cpus=2"], ["--cpus=5"]]),
        (0.5, 0, [[], []]),
    ],
)
def test_peers_get_their_cpus_out_of_the_mask_and_no_more_than_a_quota_pays(
    mask, monkeypatch, tmp_path, cores, pin, flags
):
    monkeypatch.setattr(fleet, "usable_cores", lambda: cores)
    (tmp_path / "run").write_text("r")
    local = fleet.LocalFleet(tmp_path, TWO_PEERS, tmp_path, flags=[], began_s=0.0, lock=0, n_cpus=pin)
    assert [local._cpus(peer) for peer in (0, 1)] == flags


def test_a_cpu_outside_of_the_mask_is_refused(mask):
    with pytest.raises(BadInput, match="^--cpus: got 0,5, this process may use 2,5,6,9$"):
        compute_environment.set_cpus(["0", "5"])


def test_pins_must_fit_the_cores_that_may_be_used(mask, monkeypatch):
    monkeypatch.setattr(cpus, "_quotas", lambda: [3.0])
    launch._check_pin(1, TWO_PEERS)
    with pytest.raises(BadInput, match=r"^--pin: got 2 for each of 2 peers, this machine has 3 \(a quota"):
        launch._check_pin(2, TWO_PEERS)
