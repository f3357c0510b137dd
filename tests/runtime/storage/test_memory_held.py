"""The estimate of a peer's memory against what its store holds in a run, and against XLA's figures of the update.
Tolerances: what is held is at most 5 % above the estimate, and the update is within 15 %. Before the run no more is
held than in it: a stage is timed without a second state, and read from a checkpoint entry by entry."""

import ctypes
import gc
import os
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from test_equivalence import KINDS, Tokens

from jaxdt.build import RunStart, build_coordinator, build_peer, memory_options, replicas_may_differ
from jaxdt.protocol import events as ev
from jaxdt.run import config as run_config
from jaxdt.run.memory import residual_bytes, stage_memory, state_bytes, update_bytes
from jaxdt.run.network import Link
from jaxdt.run.sizes import sync_groups
from jaxdt.run.work import WorkKind
from jaxdt.runtime.calibrate.stage_times import compile_step, time_stage
from jaxdt.runtime.compute_environment import return_freed_memory
from jaxdt.runtime.storage import store as store_module
from jaxdt.runtime.storage.entries import copy_of, initial_params, split_entries, write_entries
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.sim_peer import Environment, SimPeer
from jaxdt.wiring import swarm

START = RunStart("r")

MICROBATCH, SHARE = 2, 6
MODEL = dict(preset="debug", n_layers=3, d_model=64, n_heads=4, d_ff=256, max_len=64, vocab_size=64)


def config_of(wiring, remat, stages, pipelines):
    return run_config.parse(
        dict(
            model=MODEL,
            plan=dict(stages=stages, pipelines=pipelines, microbatches=SHARE * pipelines),
            train=dict(steps=2, microbatch_size=MICROBATCH),
            wiring=dict(kind=wiring),
            remat=remat,
            net=dict(heartbeat_s=1e5, deadline_floor_s=1e6),
        )
    )


class Watched(Store):
    """Notes the most that it ever holds between two Works, while computing and while averaging."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.computing = self.averaging = 0

    def run(self, work, scale, rounds=()):
        values = super().run(work, scale, rounds)
        if work.kind in (WorkKind.FORWARD, WorkKind.BACKWARD):
            self.computing = max(self.computing, self.held())
        return values

    def put(self, body, src, tensor):
        super().put(body, src, tensor)
        if not isinstance(body, ev.Boundary):
            self.averaging = max(self.averaging, self.held())

    def sum(self, key, members):
        found = super().sum(key, members)
        self.averaging = max(self.averaging, self.held())
        return found

    def held(self):
        """Bytes of the different arrays in the store; a residual may be the input that is also a boundary tensor."""
        state = (self.parameter_versions.state, self._table)
        kept = (state, self._accumulators, self._residuals, list(self._boundaries.values()))
        own, feedback = [own.wire for own in self._slices._own.values()], self._slices.feedback
        vectors = [*own, *self._slices._slices.values(), *feedback._owed.values(), *feedback._lost.values()]
        arrays = [leaf for leaf in jax.tree.leaves(kept) if isinstance(leaf, jax.Array | np.ndarray)]
        return sum({id(array): array.nbytes for array in arrays}.values()) + sum(vector.nbytes for vector in vectors)


@pytest.fixture(scope="module")
def functions_of():
    """(config, plan, stage) -> its functions, compiled once for all runs that compute alike."""
    known = {}

    def functions(config, plan, stage):
        is_table_shared = config.model.tied_head and replicas_may_differ(config)
        key = (config.model.tied_head, config.remat, plan.stages[stage], is_table_shared)
        if key not in known:
            known[key] = stage_functions(config, plan, stage)
        return known[key]

    return functions


def run(config, functions_of, kind=Watched):
    """{stage: the store of its first peer} after two steps."""
    plan = run_config.default_plan(config)
    functions = [functions_of(config, plan, stage) for stage in range(plan.n_stages)]
    stores = {peer: kind(config, plan, peer, Tokens(), functions[plan.seat(peer)[0]]) for peer in plan.peers}
    peers = {
        peer: SimPeer(build_peer(config, plan, peer, START), store, f"h{peer}", dict.fromkeys(KINDS, 1.0))
        for peer, store in stores.items()
    }
    link = lambda src, dst: Link(0.1, 1.0)  # noqa: E731
    environment = Environment(link, cores={peer.host: 1 for peer in peers.values()})
    Simulation(build_coordinator(config, plan, START), peers, environment).run()
    return plan, [stores[row[0]] for row in plan.placement]


CASES = [("fixed", "recompute", (2, 2)), ("fixed", "dots", (3, 3)), ("swarm", "dots", (3, 2))]


@pytest.mark.parametrize(("wiring", "remat", "shape"), CASES)
def test_a_store_holds_what_is_estimated(wiring, remat, shape, functions_of):
    config = config_of(wiring, remat, *shape)
    model, boundary = config.model, config.model.facts.boundary_numbers(config.microbatch_shape.n_tokens) * 4
    plan, stores = run(config, functions_of)
    for stage, store in enumerate(stores):
        lo, hi = plan.stages[stage]
        n_boundaries = (lo > 0) + (hi < model.n_layers)
        in_flight, retained = plan.depth(stage), SHARE
        if wiring == "swarm":
            in_flight, retained = min(SHARE, -(-swarm.in_flight(config, len(plan.peers)) // plan.n_pipelines)), SHARE
        residual = residual_bytes(model, lo, hi, config.microbatch_shape, "float32", remat)
        state, kept = state_bytes(model, lo, hi), retained * n_boundaries * boundary
        computing = state + kept + in_flight * (residual + n_boundaries * boundary)
        assert state <= store.computing <= 1.05 * computing
        if wiring == "fixed":
            assert store.computing >= state + (in_flight - 1) * residual * (hi < model.n_layers)
        else:
            assert store.averaging >= state + kept
        assert store.averaging <= 1.05 * (state + kept + update_bytes(model, lo, hi))


def test_what_a_codec_loses_is_held_twice(functions_of):
    """In the second step, before it counts and after; the vectors themselves take a quarter."""
    config = config_of("fixed", "recompute", 2, 2)
    config = replace(config, sync=replace(config.sync, codec="int8"), wiring=replace(config.wiring, retain_bytes=0))
    plan, stores = run(config, functions_of)
    for store, (lo, hi) in zip(stores, plan.stages, strict=True):
        n_bytes = 4 * config.model.facts.stage_trained(lo, hi)
        assert store.averaging == pytest.approx(state_bytes(config.model, lo, hi) + 2.5 * n_bytes, rel=0.05)


def test_the_update_needs_what_is_estimated(functions_of):
    """Beside the state and what averaging left: the joined vector, which goes in, and new parameters, which come out
    beside the old ones; XLA's own temporaries are small."""
    config = config_of("fixed", "recompute", 2, 2)
    plan = run_config.default_plan(config)
    functions, (lo, hi) = functions_of(config, plan, 1), plan.stages[1]
    params = functions.init(0)
    vectors = functions.gradient_vectors(functions.zeros())
    compiled = functions.update.lower(params, functions.init_optimizer(params), vectors, np.float32(1)).compile()
    found = compiled.memory_analysis()
    n_bytes = 4 * config.model.facts.stage_params(lo, hi)
    added = found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes
    averaged = 2 * n_bytes  # own vector and the slices of the sum
    joined = sum(vector.nbytes for vector in vectors.values())
    assert update_bytes(config.model, lo, hi) == pytest.approx(averaged + joined + added, rel=0.15)


class Adopting(Watched):
    """Notes the most memory while a mean is adopted: what the store holds, and what numpy allocates beside it."""

    def run(self, work, scale, rounds=()):
        if work.kind != WorkKind.ADOPT:
            return super().run(work, scale, rounds)
        held = self.held() + (self._frozen[1].nbytes if self._frozen else 0)
        tracemalloc.start()
        values = super().run(work, scale, rounds)
        self.averaging = max(self.averaging, held + tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return values


@pytest.mark.parametrize("is_tied", [False, True])
def test_averaging_where_replicas_differ_takes_what_is_estimated(is_tied, functions_of):
    """The most is taken when the whole state is averaged: parameters, moments, anchor and momentum of DiLoCo."""
    config = config_of("fixed", "recompute", 2, 2)
    config = replace(config, model=replace(config.model, tied_head=is_tied))
    groups = replace(config.sync.groups, every_steps=2, lag_steps=1, outer="nesterov")
    sync = replace(config.sync, kind="groups", groups=groups)
    config = replace(config, wiring=replace(config.wiring, retain_bytes=0), sync=sync)
    plan, stores = run(config, functions_of, Adopting)
    for stage, (lo, hi) in enumerate(plan.stages):
        options = memory_options(config, plan.schedule, lo, hi)
        estimate = stage_memory(config.model, lo, hi, config.microbatch_shape, plan.depth(stage), options).total
        assert 0.75 * estimate <= stores[stage].averaging <= 1.05 * estimate


def live_bytes():
    """Bytes of the different arrays of jax in this process."""
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}.values())


def settled_bytes():
    """The same, once the simulations of other tests are gone: they hold themselves until they are collected."""
    gc.collect()
    return live_bytes()


def test_a_store_that_nobody_needs_gives_its_arrays_back_at_once(functions_of):
    config = config_of("fixed", "recompute", 2, 2)
    plan, before = run_config.default_plan(config), settled_bytes()
    gc.disable()
    try:
        store = Store(config, plan, 0, Tokens(), functions_of(config, plan, 0))
        held = store.parameter_versions.params
        assert live_bytes() > before
        del store, held
        assert live_bytes() == before
    finally:
        gc.enable()


def test_a_stage_is_compiled_and_timed_with_one_state(functions_of):
    """At each update, state, accumulator and the own vector: no copy of the state is kept until the end."""
    config = config_of("fixed", "recompute", 2, 2)
    plan = run_config.default_plan(config)
    functions, (lo, hi) = functions_of(config, plan, 0), plan.stages[0]
    before, found = settled_bytes(), []

    def update(*arguments):
        found.append(live_bytes() - before)
        return functions.update(*arguments)

    store = Store(config, plan, 0, Tokens(), replace(functions, update=update))
    assert live_bytes() == before, "a state is drawn when it is needed"
    compile_step(store, 0, 0, 0)
    time_stage(store, 0, 0, sync_groups(config, plan), evaluates=False, step=0, is_brief=True)
    held = state_bytes(config.model, lo, hi) + update_bytes(config.model, lo, hi) / 4
    assert 0.95 * held <= max(found) <= 1.05 * held
    assert live_bytes() - before <= 0.05 * held, "the state that is restored next finds room"


def test_frozen_parameters_are_read_once_and_held_in_the_dtype_of_the_computation(monkeypatch):
    """The largest entry is read first, while little else is held; a restore reads the trained ones alone."""
    config = replace(config_of("fixed", "recompute", 2, 2), dtype="bfloat16")
    config = replace(config, model=replace(config.model, adapter="lora:2", max_len=1024))
    plan, facts = run_config.default_plan(config), config.model.facts
    asked, (lo, hi) = [], plan.stages[0]

    def noted(config, names):
        asked.append(names)
        return initial_params(config, names)

    monkeypatch.setattr(store_module, "initial_params", noted)
    store = Store(config, plan, 0, Tokens(), stage_functions(config, plan, 0))
    compile_step(store, 0, 0, 0)
    begun = store.parameter_versions.params
    n_trained, n_narrow = facts.stage_trained(lo, hi), facts.stage_narrow(lo, hi)
    n_bytes = 4 * (facts.stage_params(lo, hi) - n_narrow) + 2 * n_narrow
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(begun)) == n_bytes
    assert n_bytes + 12 * n_trained <= state_bytes(config.model, lo, hi, "bfloat16") < 1.5 * n_bytes
    store.drop_state()
    store.restore(ev.Restore(0, 0))
    blocks = [entry.name for entry in facts.entries_in(lo, hi) if entry.n_trained]
    assert asked == [["pos", *blocks, "tok"], blocks]
    for before, after in zip(*map(jax.tree.leaves, (begun, store.parameter_versions.params)), strict=True):
        np.testing.assert_array_equal(after, before)


def test_a_state_is_restored_entry_by_entry(functions_of):
    """The state of before is given up first, and no entry is held beside the next one."""
    config = config_of("fixed", "recompute", 2, 2)
    plan = run_config.default_plan(config)
    functions, (lo, hi) = functions_of(config, plan, 0), plan.stages[0]
    known, found = {}, []

    def load_entries(version, parts, names):
        for name in names:
            jax.device_put(np.ones(1)).block_until_ready()  # jax gives arrays of numpy back when it is called again
            assert not any(array() is not None for array in read), name
            entry = jax.tree.map(np.copy, known[name])
            read.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(entry))
            found.append(live_bytes() - before)
            yield name, entry
            del entry

    before, read = settled_bytes(), list[weakref.ref]()
    store = Store(config, plan, 0, Tokens(), functions, load_entries)
    versions = store.parameter_versions
    known |= jax.tree.map(lambda leaf: np.array(leaf) + 1, split_entries(versions.state))
    state = 3 * 4 * config.model.facts.stage_params(lo, hi)
    store.restore(ev.Restore(2, 0))
    assert found[0] == 0 and found == sorted(found) and 0.5 * state < found[-1] < state
    assert store.parameter_versions is versions and versions.version == 2
    jax.tree.map(np.testing.assert_array_equal, split_entries(versions.state), known)
    owned = live_bytes()
    store.functions.update(versions.params, versions.opt_state, functions.gradient_vectors(functions.zeros()), 1.0)
    assert live_bytes() < owned, "an update takes the memory of the moments over"


def test_a_copy_of_a_state_is_written_without_another_one(tmp_path):
    entries = {name: {"params": np.ones(1 << 20, np.float32), "optimizer": [np.int32(1)]} for name in ("a", "b")}
    copies = copy_of(entries)
    tracemalloc.start()
    write_entries(tmp_path / "part", copies)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < entries["a"]["params"].nbytes


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_between_arrays_goes_back_to_the_system():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    arrays = [np.ones(1 << 16, np.uint8) for _ in range(512)]
    del arrays[::2]
    before = resident_bytes()
    return_freed_memory()
    assert before - resident_bytes() > 0.8 * 256 * (1 << 16)
    assert all(array.all() for array in arrays)
