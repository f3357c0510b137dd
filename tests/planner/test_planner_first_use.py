"""Searches whose code is not compiled yet, simple plans, starts where memory decides, a limit inside one evaluation."""

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Device, Network
from jaxdt.run.profile import from_flops
from planner.api.by_step import workload_of
from planner.cost import compiled, placement
from planner.cost.compiled import interpreted
from planner.model.generate import generate
from planner.model.problem import problem_of
from planner.report import plot
from planner.report.plan_file import costed
from planner.report.tables import step_table
from planner.step_time import search, tune
from planner.step_time.estimate import estimate
from planner.step_time.memory_rows import rows_for_memory
from planner.step_time.simulate import simulated_s
from planner.step_time.workload import StepWorkload, refuse_memory

SITES = {"home": ("RTX4090", 4), "cloud": ("A100", 2), "lab": ("T4", 6)}
GBPS = {("home", "cloud"): 0.5, ("cloud", "home"): 0.9, ("cloud", "lab"): 2.0, ("lab", "cloud"): 2.0}
RUN = planner.run_of_model("gpt3_1p3b", planner.StepOptions(global_batch=256))


def fleet():
    """Twelve mixed GPUs on three sites, of which the slow six only delay a step."""
    at = [(site, kind) for site, (kind, n) in SITES.items() for _ in range(n)]
    devices = tuple(Device(f"d{i}", site, kind) for i, (site, kind) in enumerate(at))
    latency_s = tuple(tuple(1e-4 if a == b else 0.03 for b, _ in at) for a, _ in at)
    gbps = tuple(tuple(64.0 if a == b else GBPS.get((a, b), 0.3) for b, _ in at) for a, _ in at)
    return Network(devices, latency_s, gbps, "fleet")


def workload(network, shape=(None, None)):
    return workload_of(planner.Job(RUN, *shape, planner.profile_of_kinds(RUN, network)), network)


@pytest.fixture
def uncompiled(monkeypatch):
    """No kernel is compiled, and the compiler does not end."""
    never = threading.Event()
    monkeypatch.setattr(tune, "is_compiled", lambda kernel: False)
    monkeypatch.setattr(search, "compile_kernels", lambda workload, layout: never.wait(60))
    yield
    never.set()


@pytest.mark.parametrize("shape", [(3, 2), (6, 1), (2, 3)])
def test_the_interpreted_estimate_is_the_compiled_one(shape, monkeypatch):
    work = workload(fleet())
    layout = tune.tune(work, np.arange(6).reshape(shape))
    data = tune.step_data(work, layout)
    assert interpreted(estimate)(data, layout.placement) == pytest.approx(estimate(data, layout.placement), rel=1e-12)
    monkeypatch.setattr(tune, "is_compiled", lambda kernel: False)
    assert tune.estimate_s(work, layout) == pytest.approx(layout.step_s, rel=0.02)


def test_a_first_search_leaves_slow_devices_out_without_a_compiler(uncompiled, tmp_path, monkeypatch):
    network = fleet()
    job = planner.Job(RUN, None, None, planner.profile_of_kinds(RUN, network))
    start_s = time.monotonic()
    result = planner.solve(network, job, planner.Stop(time_s=4))
    assert time.monotonic() - start_s < 8  # on a busy machine; compilation takes half a minute
    rows = [{network.devices[d].kind for d in row} for row in result.plan.placement]
    assert rows == [{"RTX4090"}, {"A100"}, {"RTX4090"}]  # the best of all orders: 13 % shorter than A100s at an end
    found = result.plan.found
    assert found["simple_step_s"] >= result.step_s and search.PLACEMENTS in found["not_tried"]
    text = step_table(result.plan, result.finalists, 3.0)
    assert "best simple plan" in text and "not tried: a search of placements" in text
    titles = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda figure, text: titles.append(text))
    plot.draw(costed(result.plan, network), str(tmp_path / "plan.png"))
    assert titles == [f"fleet: {result.step_s:.2f} s a step (simulated)"]


class Uncompiled:
    """A kernel that the compiler never ends."""

    def __init__(self, kernel):
        self.py_func = kernel.py_func

    def __call__(self, *_):
        raise AssertionError("the search waits for the compiler")


@pytest.mark.parametrize("shape", [(3, 4), (14, 2)])
def test_the_last_routes_and_matchings_wait_for_no_compiler(shape, monkeypatch):
    n = shape[0] * shape[1]
    problem = problem_of(generate("jitter", n, 0), *shape, 6.5e8, 4.7e8)
    groups = np.random.default_rng(0).permutation(n).reshape(shape)
    expected = placement.placement_of(problem, groups)
    for name in ("hop_matrix", "short_path"):
        monkeypatch.setattr(placement, name, Uncompiled(getattr(placement, name)))
    monkeypatch.setattr(compiled, "is_compiled", lambda kernel: not isinstance(kernel, Uncompiled))
    assert (placement.placement_of(problem, groups) == expected).all()


def test_a_first_search_of_one_shape_waits_for_no_compiler(uncompiled):
    network = fleet()
    job = planner.Job(RUN, 4, 3, planner.profile_of_kinds(RUN, network))
    start_s = time.monotonic()
    result = planner.solve(network, job, planner.Stop(time_s=2))
    assert time.monotonic() - start_s < 8
    assert result.plan.found["not_tried"] == (search.PLACEMENTS,)


def test_a_simulation_ends_when_time_is_up():
    """Also one with as many microbatches as a run may have."""
    work = workload(fleet())
    layout = tune.tune(work, np.arange(6).reshape(3, 2))
    assert simulated_s(work, layout, lambda: True) == layout.step_s
    assert simulated_s(work, layout, lambda: False) == simulated_s(work, layout)


def memory_workload(rooms):
    """Devices that differ in memory alone."""
    n = len(rooms)
    devices = tuple(Device(f"d{i}", memory_bytes=room) for i, room in enumerate(rooms))
    network = Network(devices, ((1e-3,) * n,) * n, ((10.0,) * n,) * n, "rooms")
    run = planner.run_of_model("small", planner.StepOptions(global_batch=8))
    return StepWorkload(network, from_flops(run.model, 1, {"": 1e12}, 1.0, dtype="bfloat16"), run)


NEED = 450_000_000  # about three layers of the model


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 2))
def test_rows_for_memory_are_found_where_any_order_of_devices_fits(seed, n_stages, n_pipelines):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(NEED // 2, 4 * NEED, size=3)
    rooms = [int(sizes[i]) for i in rng.integers(0, 3, size=n_stages * n_pipelines)]
    work = memory_workload(rooms)
    depth = (1,) * n_stages
    orders = {tuple(rooms[d] for d in order): order for order in itertools.permutations(range(len(rooms)))}
    placements = [np.array(order).reshape(n_stages, n_pipelines) for order in orders.values()]
    splits = [work.split(placement, depth) for placement in placements]
    fits = any(split is not None for split in splits)
    found = rows_for_memory(work, np.arange(len(rooms)), n_stages)
    if found is None and fits:  # then memory limits nothing
        assert all(split is not None for split in splits)
    assert found is None or fits
    if found is not None:
        assert sorted(found.ravel()) == list(range(len(rooms)))
        assert work.split(found, depth) is not None


def test_a_refusal_for_memory_says_need_and_memory_of_each_stage_by_kind():
    work = memory_workload([NEED, NEED // 2])
    with pytest.raises(BadInput) as error:
        refuse_memory(work, 2)
    text = str(error.value)
    assert "\n" not in text
    for part in ("0: ", "1: ", "of 0.45", "of 0.23", "parameters", "moments", "gradients", "on_host"):
        assert part in text, text
