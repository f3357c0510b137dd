"""Combinations that make no sense are refused before a run is built, and the numbers that depend on a kind."""

from dataclasses import replace

import pytest

from jaxdt.build import check, check_config, follows_plan, peer_load
from jaxdt.run.config import GroupsConfig, RunConfig, SyncConfig, WiringConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.plan import Plan, PlanRoles

FIXED = RunConfig(GPTConfig.of("debug", n_layers=4))
SWARM = replace(FIXED, wiring=WiringConfig("swarm"))
PLAN = Plan(4, ((0, 2), (2, 4)), ((0, 2), (1, 3)), (7, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(wiring=WiringConfig("fix")), "wiring.kind: got 'fix', expected one of fixed"),
        (dict(wiring=WiringConfig("independent")), "wiring.kind: got independent, expected fixed, which does the same"),
        (dict(sync=SyncConfig("reduce")), "sync.kind: got 'reduce', expected one of allreduce"),
        (
            dict(sync=SyncConfig(groups=GroupsConfig(outer="nesterov"))),
            "sync.groups.outer: got nesterov, which sync.kind allreduce does not read, expected none",
        ),
        (dict(wiring=WiringConfig(rebalance_s=5.0)), "wiring.rebalance_s: got 5.0, expected 0 with wiring fixed"),
    ],
)
def test_a_kind_that_does_not_exist_or_does_not_fit_is_refused_in_one_line(changes, message):
    config = replace(FIXED, **changes)
    for refuse in (check_config, lambda config: check(config, PLAN)):
        with pytest.raises(BadInput) as caught:
            refuse(config)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


def test_where_the_wiring_picks_the_receiver_a_boundary_has_one_codec():
    plan = replace(PLAN, codec=("int8,none",))
    check(FIXED, plan)
    with pytest.raises(BadInput, match=r"plan.codec\[0\]: got 'int8,none', a name per pipeline, expected one for all"):
        check(SWARM, plan)
    assert follows_plan(FIXED) and not follows_plan(SWARM)


def test_kinds_that_know_replicas_only_refuse_a_plan_with_roles():
    plan = replace(PLAN, roles=PlanRoles(servers=((0,), (1,))))
    with pytest.raises(BadInput, match="plan.roles: got peers with roles, expected none with wiring fixed"):
        check(FIXED, plan)


def test_forwards_in_flight_and_microbatches_of_a_peer():
    """1F1B has n_stages - stage, GPipe a pipeline's whole share; routed microbatches are spread evenly."""
    places = [(stage, pipeline) for stage in (0, 1) for pipeline in (0, 1)]
    gpipe = replace(PLAN, schedule="gpipe")
    narrow = replace(SWARM, wiring=WiringConfig("swarm", window=5))
    for config, plan, in_flight, microbatches in (
        (FIXED, PLAN, [2, 2, 1, 1], [7, 5, 7, 5]),
        (FIXED, replace(PLAN, in_flight=(9, 3)), [7, 5, 3, 3], [7, 5, 7, 5]),
        (FIXED, gpipe, [7, 5, 7, 5], [7, 5, 7, 5]),
        (SWARM, PLAN, [6, 6, 6, 6], [6, 6, 6, 6]),
        (narrow, gpipe, [3, 3, 3, 3], [6, 6, 6, 6]),
    ):
        loads = [peer_load(config, plan, *place) for place in places]
        assert [load.n_in_flight for load in loads] == in_flight
        assert [load.n_microbatches for load in loads] == microbatches
