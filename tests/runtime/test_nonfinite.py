"""A gradient that is not finite: the run stops, skips the update, or goes back to the last complete checkpoint."""

import jax
import numpy as np
import pytest
from report_fields import report_fields

from jaxdt.build import RunStart, build_coordinator, build_peer
from jaxdt.model.data import write_tokens
from jaxdt.run import config as configs
from jaxdt.run.network import Link
from jaxdt.runtime.storage.entries import split_entries
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.sim_peer import Environment, SimPeer

START = RunStart("r")

SECONDS = {"F": 1.0, "B": 2.0, "E": 1.0, "G": 0.1, "U": 0.1}
POISONED_STEP = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    tokens = np.random.default_rng(0).integers(0, 64, 5000)
    return write_tokens(tmp_path_factory.mktemp("data") / "x.tok", "bytes", 64, tokens, tokens[:1000])


class Poisoned(Store):
    """Its gradient of one step is NaN, until the run has been rolled back; checkpoints stay in memory."""

    saved: dict

    def run(self, work, scale, rounds=()):
        values = super().run(work, scale, rounds)
        if work.kind == "B" and work.step == POISONED_STEP and self.n_reseeds == 0:
            accumulator = self._accumulators[work.step]
            self._accumulators[work.step] = {**accumulator, "block_000": _nan_like(accumulator["block_000"])}
        return values

    def write_checkpoint(self, version):
        self.saved[version] = jax.tree.map(np.array, split_entries(self.parameter_versions.state))


def _nan_like(tree):
    return jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), tree)


def run(data, policy: str, checkpoint_every_steps: int):
    fields = {
        "model": {"preset": "debug", "n_layers": 2, "d_model": 16, "n_heads": 2, "max_len": 8, "vocab_size": 64},
        "plan": {"pipelines": 2, "microbatches": 2},
        "train": {"steps": 6, "on_nonfinite": policy, "checkpoint_every_steps": checkpoint_every_steps},
    }
    config = configs.parse(fields)
    plan = configs.default_plan(config)
    functions = stage_functions(config, plan, 0)
    peers, checkpoints = {}, {}
    for peer in plan.peers:
        load_entries = lambda version, parts, names: checkpoints[version].items()  # noqa: E731
        store = Poisoned(config, plan, peer, data, functions, load_entries)
        store.saved = checkpoints
        peers[peer] = SimPeer(build_peer(config, plan, peer, START), store, "host", SECONDS)
    environment = Environment(lambda src, dst: Link(0.1), cores={"host": 2})
    return Simulation(build_coordinator(config, plan, START), peers, environment).run(), peers


def steps(outcome):
    return [(fields["step"], fields["verdict"]) for fields in report_fields(outcome, "step")]


def test_stop_ends_the_run_everywhere_before_the_step_is_applied(data):
    outcome, seats = run(data, "stop", 0)
    assert {stop.code for stop in outcome.stopped.values()} == {4}
    assert steps(outcome) == [(k, "apply") for k in range(POISONED_STEP)]
    assert all(np.isfinite(seat.tensors.parameter_versions.params["tok"]).all() for seat in seats.values())


def test_skip_advances_without_an_update(data):
    outcome, seats = run(data, "skip", 0)
    assert [stop.code for stop in outcome.stopped.values()] == [0, 0, 0]
    assert steps(outcome) == [(k, "skip" if k == POISONED_STEP else "apply") for k in range(6)]
    assert all(np.isfinite(seat.tensors.parameter_versions.params["tok"]).all() for seat in seats.values())


@pytest.mark.parametrize(("every", "back_to"), [(0, 0), (2, 2)])
def test_rollback_repeats_from_the_checkpoint_with_other_samples(data, every, back_to):
    outcome, seats = run(data, "rollback", every)
    assert [stop.code for stop in outcome.stopped.values()] == [0, 0, 0]
    again = [(k, "apply") for k in range(back_to, 6)]
    assert steps(outcome) == [(k, "apply") for k in range(POISONED_STEP)] + again
    assert report_fields(outcome, "rollback") == [
        {"step": POISONED_STEP, "to": back_to, "generation": 1, "again": [*range(back_to, POISONED_STEP)]}
    ]
    losses = [fields["loss"] for fields in report_fields(outcome, "step")]
    assert losses[back_to] != losses[POISONED_STEP]
    first, second = (seat.tensors.parameter_versions.params["tok"] for seat in seats.values())
    np.testing.assert_array_equal(first, second)
