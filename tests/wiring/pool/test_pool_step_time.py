"""Seconds of a step in virtual time: servers alone take as long as fixed wiring, and workers make it shorter."""

from dataclasses import replace

import pytest

from jaxdt.run import config as run_config
from jaxdt.run.config import WiringConfig, default_plan
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Link
from jaxdt.sim.predict import Conditions, predict_step_s
from jaxdt.wiring.pool.work_stealing import StepSteals

N_MICROBATCHES = 16
WORK = dict(F=1.0, B=2.0, E=1.0, G=0.0, U=0.0)
LAST = dict(F=0.0, B=3.0, E=1.0, G=0.0, U=0.0)  # whose backward contains the forward


def make_config(stages, workers=0, wiring="pool", pipelines=1, **options):
    model = dict(preset="debug", n_layers=4, d_model=8, n_heads=2, max_len=4, vocab_size=16)
    plan = dict(stages=stages, pipelines=pipelines, microbatches=N_MICROBATCHES, workers=workers)
    net = dict(heartbeat_s=1000.0, deadline_floor_s=10000.0)  # heartbeats are rare
    return run_config.parse(dict(model=model, plan=plan, net=net, wiring=dict(kind=wiring), **options))


def step_s(config, latency_s=0.05, slow=(), seconds_factor=1.0):
    """`slow`: peers that take twice as long."""
    plan = default_plan(config)
    peers = plan.peers + plan.workers
    is_last = {peer: plan.seat(peer)[0] == plan.n_stages - 1 for peer in peers}
    factor = {peer: seconds_factor * (2 if peer in slow else 1) for peer in peers}
    conditions = Conditions(
        seconds={p: {k: factor[p] * s for k, s in (LAST if is_last[p] else WORK).items()} for p in peers},
        link=lambda src, dst: Link(latency_s, 1.0),
        host_of={peer: f"h{peer}" for peer in peers},
        cores={f"h{peer}": 1 for peer in peers},
    )
    return predict_step_s(config, plan, conditions)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("latency_s", [0.0, 0.3])
def test_servers_alone_take_as_long_as_fixed_wiring(stages, latency_s):
    alone, fixed = (step_s(make_config(stages, wiring=wiring), latency_s) for wiring in ("pool", "fixed"))
    assert alone == pytest.approx(fixed, rel=0.05)


@pytest.mark.parametrize("stages", [1, 3])
def test_workers_share_the_work(stages):
    """As many as the server: a step takes no less than its share, and not much more."""
    work_s = 3.0 * N_MICROBATCHES
    for workers in (1, 3):
        assert (
            work_s / (1 + workers) <= step_s(make_config(stages, workers)) < 1.3 * work_s / (1 + workers) + 3 * stages
        )


def test_equal_machines_take_as_long_as_pipelines_of_them():
    """A server and three workers a stage against four pipelines."""
    pool, fixed = (make_config(2, **options) for options in (dict(workers=3), dict(wiring="fixed", pipelines=4)))
    assert step_s(pool, 0.001) == pytest.approx(step_s(fixed, 0.001), rel=0.02)


def test_a_slow_worker_does_not_hold_up_the_end_of_a_batch():
    """A stage of three machines, of which one takes twice as long: 16 tasks of 3 s by the power of 2.5 machines."""
    config = make_config(1, workers=2)
    assert step_s(config, 0.001, slow=default_plan(config).workers[-1:]) < 16 * 3 / 2.5 + 3


def test_a_long_link_does_not_idle_a_worker():
    """Tasks of 60 ms over links of 100 ms: a worker that had two leases would compute for half of the time."""
    config = replace(make_config(1, workers=1), plan=replace(make_config(1, workers=1).plan, microbatches=128))
    alone_s = 128 * 0.06
    assert step_s(config, 0.1, seconds_factor=0.02) < 0.6 * alone_s


@pytest.mark.parametrize("latency_s", [0.001, 0.1])
def test_servers_of_a_stage_take_tasks_of_one_another(latency_s):
    """16 tasks of 3 s. Without that a stage would wait for its slower half: 24 s where one of two servers has a worker,
    and 48 s where one of two takes twice as long."""
    assert step_s(make_config(1, workers=1, pipelines=2), latency_s) < 16 * 3 / 3 + 3
    assert step_s(make_config(1, pipelines=2), latency_s, slow=[0]) < 16 * 3 / 1.5 + 3
    two_stages = make_config(2, pipelines=2)  # 54 s
    slow_server_of_each = [row[0] for row in default_plan(two_stages).placement]
    assert step_s(two_stages, latency_s, slow=slow_server_of_each) < 16 * 3 / 1.5 + 15


def test_equal_servers_take_nothing_of_one_another():
    stolen = []
    on_offer = StepSteals.on_offer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepSteals, "on_offer", lambda *a: stolen.append(a) or on_offer(*a))
        alone, fixed = (step_s(make_config(2, pipelines=2, wiring=wiring), 0.001) for wiring in ("pool", "fixed"))
        assert not stolen and alone == pytest.approx(fixed, rel=0.05)
        step_s(make_config(1, workers=1, pipelines=2))
    assert stolen[-1][-1] > 0  # tasks


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda c: replace(c, plan=replace(c.plan, schedule="gpipe")), "plan.schedule: got gpipe, expected 1f1b"),
        (
            lambda c: replace(c, wiring=WiringConfig("pool", retain_bytes=0)),
            "wiring.retain_bytes: got 0, expected more",
        ),
        (lambda c: replace(c, wiring=WiringConfig("fixed")), "which do not know workers"),
        (lambda c: replace(c, plan=replace(c.plan, servers=1)), r"plan.roles.servers\[0\]: got \[2\], expected \[0\]"),
    ],
)
def test_what_makes_no_sense_is_refused(change, line):
    with pytest.raises(BadInput, match=line):
        step_s(change(make_config(2, workers=1)))
