"""Servers and workers that crash, pause, come back and are told everything twice train what one process trains.

Many seeds, on demand: pytest tests/wiring/pool/test_pool_training.py -k come_and_go --pool_seeds=200
"""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import test_equivalence
from report_fields import report_fields
from test_equivalence import (  # noqa: F401
    assert_same_training,
    functions_of,
    make_config,
    one_process,
    relative_l2,
    train_in_pieces,
)

from jaxdt.protocol import events as ev
from jaxdt.run.config import NetConfig, WiringConfig, default_plan
from jaxdt.run.network import Link
from jaxdt.run.work import WorkKind
from jaxdt.runtime.storage.store import Store
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.faults import CRASH, CUT, DUPLICATE, JOIN, PAUSE, REORDER, RESTART, SLOW, Fault, draw
from jaxdt.wiring.pool.worker_roster import REFUSED_MAX

pytestmark = pytest.mark.xdist_group("stage_functions")

BROKEN = 2  # the second worker of a stage alone
SERVER_S, WORKER_S = 2.0, 0.5  # of a Work; each worker is a little slower than the one before it


def pool(stages, workers, steps=8, servers=1, **options):
    """So many servers and workers for each stage."""
    config = make_config(stages, servers, steps=steps, **options)
    return replace(
        config,
        plan=replace(config.plan, workers=workers),
        wiring=WiringConfig("pool"),
        net=NetConfig(heartbeat_s=1.0, deadline_floor_s=4.0),
    )


def train(config, functions_of, one_process, faults=()):  # noqa: F811
    """The outcome of a run that trains what one process does, and how many backwards each peer did."""
    workers = default_plan(config).workers
    n_backwards = Counter()
    finish_work = Simulation._finish_work

    def counting(self, sim_peer, peer, work, *rest):
        n_backwards[peer] += work.kind == WorkKind.BACKWARD
        finish_work(self, sim_peer, peer, work, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "_finish_work", counting)
        outcome = assert_same_training(
            config,
            functions_of,
            one_process,
            faults=faults,
            link=lambda src, dst: Link(0.02 + (src * 7 + dst * 3) % 5 / 50, 1.0),
            seconds_of=lambda peer: WORKER_S * (1 + peer / 10) if peer in workers else SERVER_S,
        )
    return outcome, n_backwards


def test_servers_alone(functions_of, one_process):  # noqa: F811
    config = pool(2, 0, head="tied", eval_every_steps=4, eval_microbatches=3)
    train(config, functions_of, one_process)


def test_workers_do_most_of_it(functions_of, one_process):  # noqa: F811
    config = pool(3, 2, head="untied", eval_every_steps=4, eval_microbatches=3)
    _, n_backwards = train(config, functions_of, one_process)
    plan = default_plan(config)
    assert sum(n_backwards[worker] for worker in plan.workers) > sum(n_backwards[server] for server in plan.peers) > 0


def worker_faults(seed, config, until_s):
    """Every worker is lost, held up or cut off again and again, and told things twice and late."""
    rng = random.Random(f"workers {seed}")
    faults = []
    plan = default_plan(config)
    for servers, workers in zip(plan.placement, plan.roles.workers, strict=True):
        for worker in workers:
            for kind in (DUPLICATE, REORDER):
                faults.append(Fault(0.0, kind, worker, until_s, others=servers))
                faults += [Fault(0.0, kind, server, until_s, others=(worker,)) for server in servers]
            at_s = 0.0
            while (at_s := at_s + rng.uniform(2.0, 25.0)) < until_s:
                kind, seconds = rng.choice((CRASH, PAUSE, CUT, SLOW)), rng.uniform(1.0, 20.0)
                if kind == CRASH:
                    faults += [Fault(at_s, CRASH, worker), Fault(at_s + seconds, RESTART, worker)]
                else:
                    others = servers if kind == CUT else ()
                    faults.append(Fault(at_s, kind, worker, seconds, others=others, factor=rng.uniform(3.0, 30.0)))
                at_s += seconds
    return faults


def pytest_generate_tests(metafunc):
    if "worker_seed" in metafunc.fixturenames:
        metafunc.parametrize("worker_seed", range(metafunc.config.getoption("--pool_seeds")))


@pytest.mark.parametrize("delay", [0, 1])
def test_workers_that_come_and_go_change_nothing(worker_seed, delay, functions_of, one_process):  # noqa: F811
    """20 steps, in which each worker is lost some eight times. No view comes of it, and nothing but the usual record of
    a step is written to the coordinator's disk."""
    config = pool(2, 3, steps=20, head="tied")
    if delay:
        config = delayed(config, after_steps=3 * (worker_seed % 2))
    persisted = Counter()
    persist = Simulation._persist

    def noting(self, peer, action):
        persisted[action.name] += 1
        persist(self, peer, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "_persist", noting)
        outcome, _ = train(config, functions_of, one_process, worker_faults(worker_seed, config, 270.0))
        with_workers, _ = dict(persisted), persisted.clear()
        train(replace(config, plan=replace(config.plan, workers=0)), functions_of, one_process)
    lost = report_fields(outcome, "worker_lost")
    assert len(lost) > 20 and sum(fields["n_redone"] for fields in lost) > 0
    assert len({fields["reason"] for fields in lost}) >= 3
    assert with_workers == dict(persisted)


LIES = {
    "not finite": lambda gradient: gradient * np.nan,
    "infinite norm": lambda gradient: gradient * np.float32(1e30),
}


@pytest.mark.parametrize(("lie", "delay"), [("not finite", 0), ("infinite norm", 1)])
def test_a_worker_that_lies_about_its_gradient_is_put_out(lie, delay, functions_of, one_process, monkeypatch):  # noqa: F811
    """What it has sent never counts; the server computes it again."""

    class Lying(Store):
        def tensor_to_send(self, body):
            tensor = super().tensor_to_send(body)
            return LIES[lie](tensor) if isinstance(body, ev.Shard) and body.key.src == BROKEN else tensor

    monkeypatch.setattr(test_equivalence, "Store", Lying)
    config = pool(1, 2, head="tied")
    outcome, _ = train(delayed(config) if delay else config, functions_of, one_process)
    refused = [fields for fields in report_fields(outcome, "worker_lost") if "not finite" in fields["reason"]]
    assert len(refused) == REFUSED_MAX and {fields["worker"] for fields in refused} == {BROKEN}
    assert all("\n" not in fields["reason"] for fields in refused)
    assert outcome.stopped[BROKEN].code == 3 and "not finite" in outcome.stopped[BROKEN].reason


def coded(config, codec):
    return replace(config, sync=replace(config.sync, codec=codec))


def test_gradients_in_bf16(functions_of, one_process, monkeypatch):  # noqa: F811
    """They are rounded once, and take half the bytes."""
    config = pool(2, 2, head="tied")
    n_bytes = Counter()
    sent = Simulation._post

    def counting(self, src, post):
        n_bytes[codec] += sum(n for _, body, n in post.letters if isinstance(body, ev.Shard) and body.key.src == src)
        sent(self, src, post)

    monkeypatch.setattr(Simulation, "_post", counting)
    runs = {}
    for codec in ("none", "bf16"):
        losses, _, params, _ = train_in_pieces(
            coded(config, codec), functions_of, link=lambda src, dst: Link(0.02, 1.0), seconds_of=lambda peer: 1.0
        )
        runs[codec] = np.array(losses), params
    (exact, exact_params), (rounded, rounded_params) = runs["none"], runs["bf16"]
    assert n_bytes["bf16"] < 0.6 * n_bytes["none"]
    np.testing.assert_allclose(rounded, exact, rtol=1e-3)
    assert 1e-6 < relative_l2(rounded_params, exact_params) < 2**-8


def test_a_worker_of_another_run_is_refused(functions_of, one_process, monkeypatch):  # noqa: F811
    build = test_equivalence.build_worker
    other = lambda config, plan, peer, start: build(replace(config, remat="dots"), plan, peer, start)  # noqa: E731
    monkeypatch.setattr(test_equivalence, "build_worker", other)
    outcome, n_backwards = train(pool(1, 1, head="tied"), functions_of, one_process)
    assert outcome.stopped[1].code == 2 and "worker 1: runs config " in outcome.stopped[1].reason
    assert n_backwards[1] == 0


@pytest.mark.parametrize(("seed", "delay"), [(5, 0), (1, 1)])
def test_servers_that_are_lost_change_nothing_either(seed, delay, functions_of, one_process):  # noqa: F811
    """As long as each stage keeps one: the rest of such a step is done by the servers alone; of two steps that are
    under way, each with its version."""
    config = pool(2, 2, servers=3, steps=12, head="tied", eval_every_steps=8, eval_microbatches=5)
    config = delayed(config) if delay else config
    placement = default_plan(config).placement
    faults = draw(seed, placement, 3, 60.0, 20.0, (CRASH, PAUSE)) + worker_faults(seed, config, 60.0)
    outcome, _ = train(config, functions_of, one_process, [*faults, Fault(30.0, JOIN, 0)])
    assert report_fields(outcome, "lost") and report_fields(outcome, "download")


@pytest.mark.parametrize(("stages", "delay", "steps", "heartbeat_s"), [(1, 1, 16, 1.0), (3, 0, 30, 0.5)])
def test_servers_that_take_tasks_of_others_change_nothing(stages, delay, steps, heartbeat_s, functions_of, one_process):  # noqa: F811
    """The first server of each stage has a worker, which is lost again and again; the second one has none."""
    config = pool(stages, 1, servers=2, head="tied", steps=steps, eval_every_steps=4, eval_microbatches=3)
    config = replace(delayed(config) if delay else config, net=NetConfig(heartbeat_s, 4.0))
    outcome, _ = train(config, functions_of, one_process, worker_faults(0, config, 150.0))
    stolen = report_fields(outcome, "tasks_stolen")
    assert {fields["stage"] for fields in stolen} == set(range(stages))
    assert sum(fields["n_microbatches"] for fields in stolen) > 3


def delayed(config, after_steps=0):
    return replace(config, sync=replace(config.sync, delay=1, delay_after_steps=after_steps))


@pytest.mark.parametrize(("stages", "workers", "after_steps"), [(1, 2, 7), (3, 2, 0)])
def test_delayed_updates(stages, workers, after_steps, functions_of, one_process):  # noqa: F811
    """Two steps are under way, each with its version, at servers and workers."""
    config = pool(stages, workers, head="tied", steps=10, eval_every_steps=4, eval_microbatches=3)
    _, n_backwards = train(delayed(config, after_steps), functions_of, one_process)
    assert sum(n_backwards[worker] for worker in default_plan(config).workers) > n_backwards.total() / 2
