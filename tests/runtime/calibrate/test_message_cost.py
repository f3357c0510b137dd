"""The cost of handling a message: measured by a probe, counted in Ready. The clock that stages are timed with."""

import functools
import os
import time

import jax
import numpy as np
import pytest
import transport_nodes

from jaxdt.model.data import open_data, write_tokens
from jaxdt.run.config import default_plan, parse
from jaxdt.run.errors import BadInput
from jaxdt.run.sizes import sync_groups
from jaxdt.run.work import MESSAGE, WorkKind
from jaxdt.runtime.calibrate import message_cost, stage_times
from jaxdt.runtime.calibrate.stage_times import time_stage
from jaxdt.runtime.compute_environment import ONE_THREAD
from jaxdt.runtime.storage.store import Store, stage_functions

OTHER_FLAG = "--xla_cpu_enable_fast_math=false"  # a real one: XLA ends a process with one that it does not know
start, cred, run_credential = transport_nodes.start, transport_nodes.cred, transport_nodes.run_credential  # fixtures


def test_a_probe_comes_back_and_leaves_nothing_behind(start, cred):
    with message_cost.MessageCostProbe(encrypted=cred is not None) as probe:
        for _ in range(3):
            probe.begin()
            probe.wait()
        loops = enumerate(probe._loops)
        n_messages = 4 * message_cost.N_EXCHANGES  # some connected
        assert [loop.transport.stats()[1 - me]["messages_in"] for me, loop in loops] == [n_messages] * 2


def test_a_probe_that_is_lost_is_said_to_be(start, monkeypatch):
    with message_cost.MessageCostProbe(encrypted=False) as probe:
        monkeypatch.setattr(message_cost, "PATIENCE_S", 0.05)
        probe._loops[1].transport.close(0.0)
        probe.begin()
        with pytest.raises(BadInput, match="127.0.0.1: a message to this process itself is lost"):
            probe.wait()


def test_a_stage_is_timed_with_the_messages_between_its_computations(tmp_path):
    model = {"preset": "debug", "n_layers": 2, "d_model": 8, "n_heads": 2, "max_len": 8, "vocab_size": 16}
    config = parse({"model": model, "plan": {"stages": 2, "microbatches": 2}})
    plan, path = default_plan(config), tmp_path / "tokens.tok"
    write_tokens(path, "x", 16, np.arange(400, dtype=np.uint16) % 16, np.zeros(100, np.uint16))
    store = Store(config, plan, 0, open_data(path), stage_functions(config, plan, 0))
    before = jax.tree.map(np.array, store.parameter_versions.state)
    kinds = {WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.GATHER, WorkKind.UPDATE}
    timed = functools.partial(time_stage, store, 0, 0, sync_groups(config, plan), evaluates=False, step=0)
    assert set(timed()) == kinds
    with message_cost.MessageCostProbe(encrypted=False) as probe:
        seconds = timed(probe=probe)
    assert set(seconds) == kinds | {MESSAGE} and all(s > 0 for s in seconds.values())
    jax.tree.map(np.testing.assert_array_equal, store.parameter_versions.state, before)


@pytest.mark.parametrize(
    ("cpus", "xla_flags", "clock"),
    [({0, 1}, "", "perf_counter"), ({1}, "", "process_time"), ({0, 1}, f"{OTHER_FLAG} {ONE_THREAD}", "process_time")],
    ids=["several threads", "one CPU", "one thread"],
)
def test_threads_that_compute_at_once_are_not_added_up(monkeypatch, cpus, xla_flags, clock):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus)
    monkeypatch.setenv("XLA_FLAGS", xla_flags)
    assert stage_times._clock() is getattr(time, clock)
