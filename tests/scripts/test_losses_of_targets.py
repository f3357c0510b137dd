"""The trainers of scripts/reproduce.py in plain jax: their losses are those of the machines of a run, and what they do
with the log of an event simulation is what the log says."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from experiments.reproduce.training.local_steps import LocalSteps, StateFile
from experiments.reproduce.training.timed_run import TrainedAllReduce, TrainedGroups, TrainedServers
from experiments.reproduce.training.whole_model import Samples, WholeModel

from jaxdt.build import RunStart, build_coordinator, build_peers
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import StepReport
from jaxdt.run import config as run_config
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Link
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.sim_peer import Environment, SimPeer
from jaxdt.sim.stragglers.group_timing import GroupTiming, time_groups
from jaxdt.sim.stragglers.server_line import ServerTiming
from jaxdt.sim.stragglers.stalls import Stalls

pytestmark = pytest.mark.xdist_group("replicas_that_differ")

N_STEPS = 12
MODEL = dict(preset="debug", n_layers=4, d_model=16, n_heads=2, d_ff=32, max_len=8, vocab_size=64, tied_head=False)
DILOCO = dict(match="all", every_steps=5, outer="nesterov", outer_lr=0.7, outer_momentum=0.9)


class Tokens:
    """Random text in which a token follows from the one before it more often than not."""

    counts_all = True

    def train_batch(self, seed, step, microbatch, microbatch_size, seq_len, n_microbatches):
        return self._text((seed, step, microbatch), microbatch_size, seq_len)

    def eval_batch(self, index, microbatch_size, seq_len):
        return self._text((99, index), microbatch_size, seq_len)

    def n_eval_batches(self, microbatch_size, seq_len):
        return 3

    def _text(self, key, size, seq_len):
        rng = np.random.default_rng(key)
        jumps = rng.integers(0, 64, (size, seq_len + 1)) * (rng.random((size, seq_len + 1)) < 0.3)
        return ((np.cumsum(jumps + 1, axis=1)) % 64).astype(np.int32)


STREAMING = DILOCO | dict(every_steps=6, fragments=2, lag_steps=2, mix_frac=0.25)


def make_config(groups=None):
    sync = {"kind": "groups", "groups": groups} if groups else {}
    return run_config.parse(
        dict(
            model=MODEL,
            plan=dict(stages=2, pipelines=2, microbatches=4),
            train=dict(steps=N_STEPS, seed=3, microbatch_size=2),
            optim=dict(lr=3e-3, eps=1e-6, weight_decay=0.1, clip_norm=0.5, warmup_steps=5),
            sync=sync | {"slice_bytes": 1000},
            net=dict(heartbeat_s=50.0, deadline_floor_s=1000.0),
        )
    )


@functools.cache
def compiled():
    """The stage functions of the machines, and the whole model, which rules of groups do not change."""
    config = make_config()
    plan = run_config.default_plan(config)
    return [stage_functions(config, plan, stage) for stage in range(plan.n_stages)], WholeModel(config, plan)


def simulated_losses(config):
    """The losses of the steps of a run under virtual time, with its machines and stage functions."""
    plan, peers = run_config.default_plan(config), {}
    functions, _ = compiled()
    for peer, machine in build_peers(config, plan, RunStart("r")).items():
        store = Store(config, plan, peer, Tokens(), functions[plan.seat(peer)[0]])
        peers[peer] = SimPeer(machine, store, f"h{peer}", dict.fromkeys("FBEGU", 1.0))
    environment = Environment(lambda src, dst: Link(0.1, 1e-4), cores={peer.host: 1 for peer in peers.values()})
    outcome = Simulation(build_coordinator(config, plan, RunStart("r")), peers, environment).run(until_s=1e5)
    assert outcome.stopped[ev.COORDINATOR].code == 0
    return [report.loss for report in outcome.of(StepReport)]


def trainer(config, file=None, groups=None):
    plan = run_config.default_plan(config)
    return LocalSteps(config, groups, compiled()[1], Samples(config, plan, Tokens()), file)


@pytest.mark.parametrize("groups", [None, DILOCO, DILOCO | {"outer": "none", "every_steps": 2}, STREAMING], ids=str)
def test_losses_are_those_of_the_machines(groups):
    config = make_config(groups)
    progress = trainer(config, groups=config.sync.groups if groups else None).run(N_STEPS)
    np.testing.assert_allclose(progress.losses, simulated_losses(config), rtol=1e-5)


def test_a_training_that_was_stopped_goes_on(tmp_path):
    config = make_config()
    config = replace(config, train=replace(config.train, eval_every_steps=2))
    groups = run_config.GroupsConfig(every_steps=3, outer="nesterov", lag_steps=2)  # stopped with a mean under way
    file = StateFile(tmp_path / "x.npz", "x")
    whole = trainer(config, groups=groups).run(6)
    trainer(config, file, groups).run(4)
    progress = trainer(config, file, groups).run(6)
    assert progress.losses == whole.losses and progress.held_out == whole.held_out
    assert [n_steps for n_steps, _ in progress.held_out] == [2, 4, 6]
    with pytest.raises(BadInput, match="is the state of x, expected that of y"):
        trainer(config, replace(file, of="y"), groups).run(6)


def trained(kind, rule, n_pipelines=2, stall_s=0.3):
    """The snapshot of a trainer after all that an event simulation of six steps has logged."""
    config = make_config()
    config = replace(config, plan=replace(config.plan, pipelines=n_pipelines))
    plan = run_config.default_plan(config)
    timing = GroupTiming(2, n_pipelines, 6, rule, n_microbatches=2, stalls=Stalls(0.3, stall_s))
    replicas = kind(compiled()[1], Samples(config, plan, Tokens()), 3, time_groups(timing, to_the_end=True))
    for at_s in (0.3, 0.9, float("inf")):
        replicas.until(at_s)
    return replicas.snapshot, trainer(config), config


def test_a_log_of_groups_of_all_is_local_sgd_and_one_of_all_reduce_is_plain_training():
    groups = run_config.GroupsConfig(match="all")
    snapshot, _, config = trained(TrainedGroups, groups)
    np.testing.assert_allclose(snapshot, trainer(config, groups=groups).run(6).params[0], rtol=1e-5, atol=1e-6)
    snapshot, plain, _ = trained(TrainedAllReduce, groups)
    np.testing.assert_allclose(snapshot, plain.run(6).params[0], rtol=1e-5, atol=1e-6)


def test_replicas_that_never_average_are_trainings_of_their_own():
    groups = run_config.GroupsConfig(match="none", every_steps=100)
    snapshot, _, config = trained(TrainedGroups, groups)
    alone = trainer(config, groups=groups).run(6).params
    np.testing.assert_allclose(snapshot, np.mean(alone, axis=0), rtol=1e-5, atol=1e-6)


def test_one_pipeline_with_a_server_is_plain_training_and_steps_of_two_add_up():
    snapshot, plain, _ = trained(TrainedServers, ServerTiming(0.01, 1, 0), n_pipelines=1)
    np.testing.assert_allclose(snapshot, plain.run(6).params[0], rtol=1e-4, atol=1e-6)
    snapshot, _, config = trained(TrainedServers, ServerTiming(0.01, 100, 0))
    alone = trainer(config, groups=run_config.GroupsConfig(every_steps=100)).run(6).params
    begun = trainer(config).progress.params[0]
    np.testing.assert_allclose(snapshot, alone[0] + alone[1] - begun, rtol=1e-4, atol=1e-6)
