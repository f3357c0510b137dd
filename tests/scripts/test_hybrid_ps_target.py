"""The models of the hybrid parameter-server page against batches that are worked by hand."""

import pytest
from experiments.reproduce.hybrid_ps_parts import fluid
from experiments.reproduce.hybrid_ps_parts.chains import Chain, Static, chain_s, chains_s
from experiments.reproduce.hybrid_ps_parts.fleets import ALONE, Fleet, Losses, Site
from experiments.reproduce.hybrid_ps_parts.simulated import FIXED, POOL, SWARM, System, batch_s, run_batch
from experiments.reproduce.machines import shares
from experiments.reproduce.results import Results

NO_TIME = ((0.0, 0.0),)


def two_stages(hop=NO_TIME, depth=2):
    return Chain((1.0, 0.0), (3.0, 4.0), hop, hop, depth)


ONE_STAGE = Chain((0.0,), (1.0,))
SITES = (Site("A", 0, 1), Site("B", 1, 1), Site(ALONE, 0, 2, 2.0), Site(ALONE, 1, 2, 2.0))
FLEET = Fleet(SITES, compute_s=8.0, boundary_bytes=64, n_microbatches=32)
SAME = Fleet((Site("A", 0, 4), Site("A", 1, 4)), compute_s=8.0, boundary_bytes=64, n_microbatches=160)


def test_two_microbatches_of_a_chain_by_hand():
    """Last stage: 1 to 5 and 5 to 9. First stage: backwards 5 to 8 and 9 to 12."""
    assert chain_s(two_stages(), [0.0, 0.0]) == 12.0


def test_a_hop_takes_its_bandwidth_and_its_latency():
    """Last stage: 2.5 to 6.5 and 6.5 to 10.5. First stage: backwards 8 to 11 and 12 to 15."""
    assert chain_s(two_stages(((1.0, 0.5),)), [0.0, 0.0]) == 15.0


def test_a_link_carries_one_tensor_at_a_time():
    """Activations are sent from 1 to 4 and, though the second one is ready at 2, from 4 to 7."""
    chain = Chain((1.0, 0.0), (0.0, 0.5), ahead_s=((3.0, 0.0),), back_s=NO_TIME)
    assert chain_s(chain, [0.0, 0.0]) == 7.5


def test_forwards_wait_for_their_backward_in_bounded_number():
    """With one at a time each microbatch takes 1 + 4 + 3."""
    assert chain_s(two_stages(depth=1), [0.0] * 3) == 24.0


@pytest.mark.parametrize(("at_s", "seconds"), [(2.0, 8.0), (3.5, 8.0), (4.0, 4.0)])
def test_a_chain_loses_its_share_whenever_it_is_lost_in_the_batch(at_s, seconds):
    assert chains_s([ONE_STAGE] * 2, (4, 4), (1.0, 1.0), {1: at_s}) == seconds


def test_what_two_lost_chains_leave_is_done_by_the_third():
    """The share that the second one has taken over is lost with it."""
    assert chains_s([ONE_STAGE] * 3, (4, 4, 4), (1.0,) * 3, {0: 1.0, 1: 3.0}) == 12.0
    assert chains_s([ONE_STAGE], (4,), (1.0,), {0: 1.0}) == float("inf")


def test_shares_by_largest_remainders():
    assert shares(10, (1.0, 1.0, 1.0)) == (4, 3, 3)
    assert shares(7, (2.0, 1.0, 0.5)) == (4, 2, 1)
    assert shares(420, (2, 2, 1, 1)) == (140, 140, 70, 70)
    assert shares(10, (1000, 500, 1000)) == (4, 2, 4) and sum(shares(11, (3, 3, 3))) == 11


def test_machines_that_may_fail_are_in_pipelines_of_their_own_or_in_the_same():
    failing = FLEET.may_fail(2)
    n_hit = [
        sum(bool(set(row) & set(failing)) for row in static.rows(FLEET)) for static in (Static(), Static(True, True))
    ]
    assert failing == [2, 5]
    assert n_hit == [2, 1]
    assert len(set(FLEET.may_fail(4))) == 4


def test_losses_happen_with_their_probability():
    drawn = [Losses(4, 0.75, seed).of(FLEET) for seed in range(400)]
    assert 0.7 < sum(map(len, drawn)) / 1600 < 0.8
    moments = [moment for lost in drawn for moment in lost.values()]
    assert 0.45 < sum(moments) / len(moments) < 0.55
    assert Losses(4, 0.0, 0).of(FLEET) == {}


def test_the_fluid_model_by_hand():
    """Two equal machines a stage. One is lost in the middle of the batch, after a quarter of its stage's work."""
    fleet = Fleet((Site("A", 0, 2), Site("A", 1, 2)), 1.0, 64)
    assert fluid.slowdown(fleet, {0: 0.5}, fluid.KEEP) == 1.5
    assert fluid.slowdown(fleet, {0: 0.5}, fluid.REDO) == 2.0
    assert fluid.slowdown(fleet, {0: 0.5, 2: 0.5}, fluid.EVERYWHERE) == 2.5
    assert fluid.slowdown(fleet, {}, fluid.REDO) == 1.0


@pytest.mark.parametrize("by_power", [False, True])
def test_chains_without_losses_are_the_simulators_fixed_wiring(by_power):
    chains_batch_s = Static(by_power, depth=3).batch_s(FLEET, {})
    _, simulated_s = run_batch(System(FIXED, by_power=by_power, depth=3), FLEET, {})
    assert chains_batch_s == pytest.approx(simulated_s, rel=5e-3)


@pytest.mark.parametrize(
    ("system", "reading"), [(System(POOL), fluid.REDO), (System(SWARM), fluid.EVERYWHERE)], ids=["pool", "swarm"]
)
def test_a_loss_costs_what_the_fluid_model_says(system, reading):
    begin_s, clean_s = run_batch(system, SAME, {})
    _, lossy_s = run_batch(system, SAME, {3: begin_s + 0.5 * clean_s})
    assert lossy_s / clean_s == pytest.approx(fluid.slowdown(SAME, {3: 0.5}, reading), rel=0.1)


def test_a_batch_without_losses_is_simulated_once():
    results = Results()
    system = System(POOL)
    assert batch_s(system, FLEET, Losses(2, 0.0, 0), results) == batch_s(system, FLEET, None, results)
    assert len(results.lines().splitlines()) == 2
