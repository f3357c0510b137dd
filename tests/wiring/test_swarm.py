"""Stochastic wiring in the simulator: speed decides shares, latency hides behind queues, a slow peer blocks nobody."""

from dataclasses import replace

import pytest
from report_fields import report_fields

from jaxdt.protocol.trace import Trace
from jaxdt.run import config as run_config
from jaxdt.run.network import Link
from jaxdt.sim.predict import Conditions, simulate

STAGES, PIPELINES, MICROBATCHES = 2, 2, 32
SECONDS = {"F": 1.0, "B": 2.0, "E": 1.0, "G": 0.0, "U": 0.0}


def config_of(
    wiring, routers=1, window=0, stages=STAGES, pipelines=PIPELINES, steps=6, microbatches=MICROBATCHES, delay=0
):
    parsed = run_config.parse(
        dict(
            model=dict(preset="debug", n_layers=stages),
            plan=dict(stages=stages, pipelines=pipelines, microbatches=microbatches),
            train=dict(steps=steps),
            sync=dict(delay=delay),
            net=dict(heartbeat_s=50.0, deadline_floor_s=1000.0),
        )
    )
    return replace(parsed, wiring=run_config.WiringConfig(wiring, routers, window))


def step_s_of(config, slowed=None, link=Link(), trace=None):
    """Median seconds of a step, the first two left out. The last stage's B holds its forward."""
    plan = run_config.default_plan(config)
    seconds = {}
    for peer in plan.peers:
        stage, _ = plan.seat(peer)
        own = SECONDS if stage < plan.n_stages - 1 else SECONDS | {"F": 0.0, "B": 3.0}
        seconds[peer] = {kind: s * (slowed or {}).get(peer, 1.0) for kind, s in own.items()}
    hosts = {peer: f"h{peer}" for peer in plan.peers}
    conditions = Conditions(seconds, lambda src, dst: link, hosts, dict.fromkeys(hosts.values(), 1.0))
    outcome = simulate(config, plan, conditions, trace)
    assert {stop.code for stop in outcome.stopped.values()} == {0}
    steps = sorted(fields["step_s"] for fields in report_fields(outcome, "step")[2:])
    return steps[len(steps) // 2]


def test_equal_peers_are_as_fast_as_fixed_pipelines():
    fixed = step_s_of(config_of("fixed"))
    swarm = step_s_of(config_of("swarm"))
    assert fixed / swarm >= 0.95


@pytest.mark.parametrize("routers", [2, 3, 4])
@pytest.mark.parametrize(("stages", "pipelines", "microbatches"), [(2, 2, 8), (2, 4, 4), (2, 4, 12), (3, 3, 18)])
def test_nor_do_several_routers_pile_up_what_is_left_over(routers, stages, pipelines, microbatches):
    sizes = dict(stages=stages, pipelines=pipelines, microbatches=microbatches, steps=8)
    fixed = step_s_of(config_of("fixed", **sizes))
    assert fixed / step_s_of(config_of("swarm", routers, **sizes)) >= 0.95
    near = Link(SECONDS["F"] / 100)
    assert fixed / step_s_of(config_of("swarm", routers, **sizes), link=near) >= 0.9


def test_nor_where_two_steps_are_under_way():
    sizes = dict(pipelines=4, microbatches=12, steps=10, delay=1)
    fixed = step_s_of(config_of("fixed", **sizes))
    assert fixed / step_s_of(config_of("swarm", 2, **sizes)) >= 0.95


@pytest.mark.parametrize("routers", [1, 2, 4])
def test_one_slow_peer_blocks_nobody(routers):
    """A peer three times slower: fixed pipelines wait for it, routers give it a third of a share."""
    fixed = step_s_of(config_of("fixed"), slowed={1: 3.0})
    swarm = step_s_of(config_of("swarm", routers), slowed={1: 3.0})
    assert fixed / swarm >= 1.3


def test_latency_hides_behind_queues():
    near = step_s_of(config_of("swarm", window=16))
    far = step_s_of(config_of("swarm", window=16), link=Link(1.0))
    assert near / far >= 0.8


def test_same_seed_same_trace():
    def lines():
        found = []
        step_s_of(config_of("swarm", 2), trace=Trace(found.append))
        return found

    assert lines() == lines()


def test_every_peer_may_be_a_router_and_few_microbatches_are_enough():
    config = config_of("swarm", routers=4, stages=2, pipelines=2)
    plan_config = replace(config.plan, microbatches=2)
    step_s = step_s_of(replace(config, plan=plan_config))
    assert step_s > 0
