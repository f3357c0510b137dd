"""Step time: the estimate against the simulator, layouts within memory, shapes and devices that are left out."""

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import NETWORKS

import planner
from jaxdt.run import plan as plans
from jaxdt.run import profile as profiles
from jaxdt.run.config import parse
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Device, Network
from jaxdt.run.profile import DeviceKind, PartTimes, Profile, from_flops
from jaxdt.run.work import WorkKind
from jaxdt.wiring.base import PeerLoad
from planner.__main__ import main
from planner.cost.compiled import generator
from planner.cost.reference import cost_of
from planner.model import layer_cuts
from planner.model.generate import generate
from planner.model.problem import placement_terms, problem_of
from planner.search.incumbent import Budget, Incumbent
from planner.step_time import simulate
from planner.step_time.estimate import Heat, balance
from planner.step_time.search import search_step
from planner.step_time.shapes import bound_s, plan_shapes, reasons, search_shapes, step_s_with_all
from planner.step_time.simulate import simulated_s
from planner.step_time.tune import estimate_s, improve, step_data, tune
from planner.step_time.workload import StepWorkload

MODEL = GPTConfig.of("small", tied_head=True)
FLOPS = {"": 1e11, "fast": 1e11, "slow": 5e9}
quick = settings(max_examples=8)


def step_workload(network, n_microbatches=16, model=MODEL, remat="recompute", **options):
    profile = from_flops(model, 1, FLOPS, 0.5, dtype="bfloat16", remat=remat)
    return StepWorkload(network, profile, planner.run_of_profile(profile, n_microbatches, **options))


def with_devices(network, **changes):
    """The network with fields of its devices by function of their index."""
    devices = [replace(d, **{k: f(i) for k, f in changes.items()}) for i, d in enumerate(network.devices)]
    return replace(network, devices=tuple(devices))


def near(n):
    """n equal devices with fast links."""
    network = generate("homogeneous", n, 0)
    return replace(network, latency_s=((1e-3,) * n,) * n, bandwidth_gbps=((100.0,) * n,) * n)


def shuffled(shape, seed):
    return np.random.default_rng(seed).permutation(math.prod(shape)).reshape(shape)


@quick
@given(
    st.sampled_from([(1, 4), (4, 1), (2, 3), (3, 2), (4, 2)]), st.integers(0, 99), st.sampled_from(["jitter", "gaming"])
)
def test_the_estimate_is_what_the_simulator_says(shape, seed, kind):
    """Exactly for one pipeline; with replicas up to the slices of the exchange."""
    network = with_devices(generate(kind, math.prod(shape), seed), kind=lambda i: "slow" if i == 1 else "fast")
    workload = step_workload(network)
    layout = tune(workload, shuffled(shape, seed))
    tolerance = 1e-6 if shape[1] == 1 else 0.1
    assert simulated_s(workload, layout) == pytest.approx(layout.step_s, rel=tolerance)


def local_sgd(network, every_steps, **groups):
    """The step of a run whose replicas average every few steps."""
    fields = dict(
        model=dict(preset="debug", n_layers=4, tied_head=False),
        plan=dict(stages=2, pipelines=2, microbatches=8),
        sync=dict(kind="groups", groups=dict(every_steps=every_steps) | groups),
    )
    run = parse(fields)
    return StepWorkload(network, from_flops(run.model, run.train.microbatch_size, FLOPS, 0.5), run)


def test_local_steps_pay_one_average_every_few_steps(monkeypatch):
    """By the simulator, with periods that are cut short too, by the estimate, and by Eq. 1-4."""
    network = generate("homogeneous", 4, 0)
    step_s, estimates_s, costs = {}, {}, {}
    for every_steps in (1, 50):
        workload = local_sgd(network, every_steps)
        layout = tune(workload, np.arange(4).reshape(2, 2))
        step_s[every_steps], estimates_s[every_steps] = simulated_s(workload, layout), layout.step_s
        sizes = workload.comm_bytes(layout.stages, layout.shares)
        costs[every_steps] = cost_of(network, layout.placement.tolist(), *sizes)
        problem = problem_of(network, 2, 2, *sizes)
        assert placement_terms(problem, layout.placement)[0] == pytest.approx(costs[every_steps].datap_s)
    alone_s = simulated_s(local_sgd(network, 1, match="none"), layout)
    assert step_s[50] == pytest.approx(alone_s + (step_s[1] - alone_s) / 50, rel=0.01)
    assert step_s[1] > 1.5 * alone_s and estimates_s[50] == pytest.approx(step_s[50], rel=0.1)
    assert costs[50].datap_s == pytest.approx(costs[1].datap_s / 50)
    assert costs[50].pipelinep_s == costs[1].pipelinep_s
    monkeypatch.setattr(simulate, "MAX_WORKS", 128)
    assert simulated_s(local_sgd(network, 50), layout) == pytest.approx(step_s[50], rel=0.01)


def test_fewer_simulated_microbatches_give_the_same_step(monkeypatch):
    workload = step_workload(generate("gaming", 4, 3), 120)
    layout = tune(workload, shuffled((2, 2), 0))
    whole = simulated_s(workload, layout)
    monkeypatch.setattr(simulate, "MAX_WORKS", 64)
    assert sum(simulate.fewer_microbatches(layout)) < 60
    assert simulated_s(workload, layout) == pytest.approx(whole, rel=1e-3)


@quick
@given(st.integers(2, 4), st.integers(0, 999))
def test_the_split_is_the_best_of_all(n_stages, seed):
    rng = np.random.default_rng(seed)
    n_layers = 7
    speed, room = rng.uniform(1, 4, n_stages), rng.uniform(1.5, 4, n_stages)

    def load(s, lo, hi):
        return (hi - lo + 2 * (hi == n_layers)) * speed[s]

    def fits(s, lo, hi):
        return hi - lo <= room[s]

    largest_loads = []
    for inner in itertools.combinations(range(1, n_layers), n_stages - 1):
        ranges = tuple(itertools.pairwise((0, *inner, n_layers)))
        if all(fits(s, *r) for s, r in enumerate(ranges)):
            largest_loads.append(max(load(s, *r) for s, r in enumerate(ranges)))
    cut = layer_cuts.split(list(range(n_layers + 1)), n_stages, load, fits)
    assert (cut is None) == (not largest_loads)
    if cut:
        assert max(load(s, *r) for s, r in enumerate(cut)) == min(largest_loads)


def test_shared_blocks_are_cut_between_their_runs():
    model = GPTConfig.of("small", n_shared_blocks=4)
    assert model.facts.cuts == (0, 2, 4, 6, 8)


def test_a_slow_device_gets_fewer_layers_and_its_pipeline_fewer_microbatches():
    network = with_devices(near(4), kind=lambda i: "slow" if i == 0 else "fast")
    alone = tune(step_workload(network), np.array([[1], [0], [2], [3]]))
    sizes = [hi - lo for lo, hi in alone.stages]
    assert sizes[1] == min(sizes) < max(sizes)
    placement = np.array([[0, 1], [2, 3]])
    # Compiles it: no microbatches are moved before that.
    balance(step_data(step_workload(network), tune(step_workload(network), placement)), placement)
    beside = tune(step_workload(network), placement)
    assert beside.shares[0] < beside.shares[1]
    assert sum(beside.shares) == 16


def test_slow_links_are_hidden_by_more_in_flight_and_memory_limits_that():
    network = generate("homogeneous", 4, 0)
    network = replace(network, latency_s=((0.5,) * 4,) * 4, bandwidth_gbps=((10.0,) * 4,) * 4)
    free = step_workload(network, 64, remat="dots")
    column = np.arange(4)[:, None]
    layout = tune(free, column)
    assert layout.depth[0] > 4
    assert simulated_s(free, layout) < 0.7 * simulated_s(free, replace(layout, depth=(4, 3, 2, 1)))
    room = max(free.stage_bytes(lo, hi, PeerLoad(32, 64)) for lo, hi in layout.stages)
    tight = step_workload(with_devices(network, memory_bytes=lambda i: room), 64, remat="dots")
    held = tune(tight, column)
    assert held.depth[0] < layout.depth[0]
    for (lo, hi), depth in zip(held.stages, held.depth, strict=True):
        assert tight.stage_bytes(lo, hi, PeerLoad(depth, 64)) <= room
    starved = step_workload(with_devices(network, memory_bytes=lambda i: 10_000), 64)
    assert tune(starved, column) is None


@quick
@given(st.integers(0, 99))
def test_annealing_returns_what_its_estimate_says_and_never_a_worse_layout(seed):
    network = with_devices(generate("gaming", 9, seed), kind=lambda i: "slow" if i in (2, 5) else "fast")
    workload = step_workload(network)
    start = tune(workload, shuffled((3, 3), seed)[:2])
    better = improve(workload, start, generator(seed), Heat(0.02, 300))
    assert better.step_s <= start.step_s
    assert sorted([*better.placement.ravel(), *better.spare]) == list(range(9))
    assert better.step_s == pytest.approx(estimate_s(workload, better))


def search(network, shape=(None, None), evaluations=2000, **options):
    workload = step_workload(network, **options)
    incumbent = Incumbent(Budget(None, evaluations))
    if all(shape):
        return workload, search_step(workload, shape[0], incumbent, "auto", 0)
    return workload, search_shapes(workload, *shape, incumbent, "auto", 0)


def test_a_device_that_only_slows_the_step_down_is_left_out_with_the_reason():
    network = with_devices(near(5), kind=lambda i: "slow" if i == 3 else "fast")
    workload, solution = search(network)
    best = solution.finalists[0].layout
    assert list(best.spare) == [3]
    assert "20.0 times slower" in reasons(workload, best)[0]
    whole_s = step_s_with_all(search(network, (5, 1))[1], 5)
    assert solution.finalists[0].step_s < whole_s


def test_a_far_device_is_left_out_with_the_reason():
    slow = tuple(tuple(1e-4 if 4 in (i, j) else 100.0 for j in range(5)) for i in range(5))
    workload, solution = search(replace(near(5), bandwidth_gbps=slow))
    best = solution.finalists[0].layout
    assert list(best.spare) == [4]
    assert "its links take" in reasons(workload, best)[0]


@pytest.mark.parametrize("wanted", [(2, None), (None, 2), (None, None)])
def test_shapes_keep_what_was_asked_for_and_bounds_hold(wanted):
    network = with_devices(generate("gaming", 6, 1), kind=lambda i: "fast")
    workload = step_workload(network, 8)
    for shape in plan_shapes(workload, *wanted):
        assert wanted[0] in (None, shape.n_stages)
        assert wanted[1] in (None, shape.n_pipelines)
        layout = tune(workload, shape.devices.reshape(shape.n_pipelines, shape.n_stages).T)
        assert bound_s(workload, shape.n_stages, shape.n_pipelines) <= layout.step_s


def fast_at(part, other_s):
    """A kind of device that needs 1 ms for a layer or for the head, and other_s for the other of the two."""
    layer_s, head_s = (1e-3, other_s) if part == "layers" else (other_s, 1e-3)
    return DeviceKind(PartTimes(layer_s, 2 * layer_s), head=PartTimes(head_s, 2 * head_s))


def test_the_bound_takes_the_fastest_kind_for_each_stage():
    kinds = {"body": fast_at("layers", 0.1), "tail": fast_at("head", 1e-2)}
    network = with_devices(near(2), kind=lambda i: "tail" if i else "body")
    profile = Profile(GPTConfig.of("small"), 1, kinds)
    workload = StepWorkload(network, profile, planner.run_of_profile(profile, 8))
    layout = tune(workload, np.array([[0], [1]]))
    assert layout.step_s < 0.5 * min(sum_of_all(workload, kind) for kind in kinds)
    assert 0.5 * layout.step_s < bound_s(workload, 2, 1) <= layout.step_s


def sum_of_all(workload, kind):
    """Seconds of a pipeline that has half of the model on each of two devices of one kind."""
    return (
        8
        * sum(workload.seconds(kind, 0, workload.n_layers)[work] for work in (WorkKind.FORWARD, WorkKind.BACKWARD))
        / 2
    )


def test_the_bound_counts_no_tied_table_as_a_stage_gradient():
    """A vocabulary that outweighs the layers: the tables are exchanged among the first and the last stage."""
    model = GPTConfig.of("small", tied_head=True, vocab_size=200_000)
    network = near(4)
    network = replace(network, bandwidth_gbps=tuple(tuple(1e-3 * b for b in row) for row in network.bandwidth_gbps))
    workload = step_workload(network, 4, model=model)
    assert bound_s(workload, 2, 2) <= tune(workload, np.array([[0, 1], [2, 3]])).step_s


def test_the_plan_of_the_shortest_step_may_cost_more_by_eq_1_to_4():
    """Two devices near each other, one of them slow: Eq. 1-4 want them in one pipeline, the step does not."""
    network = with_devices(generate("random", 8, 2), kind=lambda i: "slow" if i % 2 else "fast")
    _, solution = search(network, (2, 4))
    by_cost = next(f for f in solution.finalists if f.name == "Eq. 1-4")
    assert solution.finalists[0].step_s <= by_cost.step_s
    assert solution.finalists == sorted(solution.finalists, key=lambda f: f.step_s)


# ------------------------------------------------------------------------------------------------------ command line


def solve(network, *flags):
    return main(["solve", "--network", str(network), *flags])


@pytest.fixture
def four(tmp_path):
    data = json.loads((NETWORKS / "four_cities.json").read_text())
    for device, kind in zip(data["devices"], ("gpu", "gpu", "cpu", "gpu"), strict=True):
        device["kind"] = kind
    path = tmp_path / "four.json"
    path.write_text(json.dumps(data))
    return path


STEP = ["--objective", "step_time", "--evaluations", "2000"]
SPEEDS = ["--model", "small", "--global_batch", "16", "--flops", "gpu=1e12,cpu=1e11"]


def test_a_plan_by_step_time_says_both_costs_and_runs_as_simulated(four, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert solve(four, "--stages", "2", "--pipelines", "2", *STEP, *SPEEDS, "--out", str(out)) == 0
    text = capsys.readouterr().out
    assert "step (simulated)" in text
    assert "Eq. 1-4 count communication alone" in text
    data = json.loads(out.read_text())
    assert data["objective"] == "step_time"
    assert data["step_s"] > 0
    assert "found" not in data
    assert set(data["cost"]) == {"total_s", "datap_s", "pipelinep_s"}
    plan = plans.load(out)
    assert plan.n_microbatches == 16
    assert main(["explain", str(out)]) == 0


def test_equal_seed_and_evaluations_give_equal_plans_by_step_time(four, tmp_path, capsys):
    """And a table whose rows name their shapes."""
    texts = []
    for name in ("a", "b"):
        out = tmp_path / f"{name}.json"
        assert solve(four, "--stages", "auto", "--evaluations", "2000", *SPEEDS, "--out", str(out)) == 0
        texts.append({k: v for k, v in json.loads(out.read_text()).items() if k != "time_s"})
    assert texts[0] == texts[1]
    header, *rows = capsys.readouterr().out.partition("\nBoth costs")[0].splitlines()
    plan = plans.load(out)
    assert rows[0].startswith(f"plan ({plan.n_stages}x{plan.n_pipelines} ")
    assert all(re.match(r"(plan \()?[1-4]x[1-4] ", row) and len(row) == len(header) for row in rows)
    assert len({re.findall(r"\dx\d", row)[0] for row in rows}) > 1


def test_a_measured_profile_gives_model_and_speeds(four, tmp_path):
    measured = from_flops(MODEL, 2, {"gpu": 1e12, "cpu": 1e11}, 0.5)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profiles.to_json(measured)))
    shape = ["--stages", "4", "--pipelines", "1", "--global_batch", "16"]
    out = tmp_path / "plan.json"
    assert solve(four, *shape, *STEP, "--profile", str(path), "--out", str(out)) == 0
    assert plans.load(out).n_microbatches == 8


BAD = {
    "no speeds": (["--model", "small"], "--profile"),
    "no model": (["--flops", "1e12"], "--model"),
    "a kind without speed": (["--model", "small", "--flops", "gpu=1e12"], "'cpu'"),
    "no number": (["--model", "small", "--flops", "fast"], "--flops"),
    "bytes": ([*SPEEDS, "--c_dp_bytes", "1"], "--c_dp_bytes"),
    "codec": ([*SPEEDS, "--codec", "zip"], "--codec"),
    "remat": ([*SPEEDS, "--remat", "all"], "--remat"),
    "efficiency": ([*SPEEDS, "--efficiency", "2"], "efficiency"),
    "by cost": ([*SPEEDS, "--objective", "comm_cost", "--stages", "auto"], "--objective"),
    "too many stages": ([*SPEEDS, "--stages", "5", "--pipelines", "auto"], "--stages"),
    "more stages than layers": ([*SPEEDS, "--stages", "9", "--pipelines", "1"], "9 stages"),
    "does not multiply": ([*SPEEDS, "--stages", "3", "--pipelines", "1"], "3 x 1 = 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_flags_are_one_line_and_exit_code_2(name, four, capsys):
    flags, expected = BAD[name]
    assert solve(four, "--stages", "2", "--pipelines", "2", *STEP, *flags) == 2
    error = capsys.readouterr().err.strip()
    assert expected in error
    assert error.count("\n") == 0


def test_too_little_memory_is_one_line(four, capsys):
    data = json.loads(four.read_text())
    for device in data["devices"]:
        device["memory_bytes"] = 10_000
    four.write_text(json.dumps(data))
    for shape in (["--stages", "2", "--pipelines", "2"], ["--stages", "auto"]):
        assert solve(four, *shape, *STEP, *SPEEDS) == 2
        assert capsys.readouterr().err.strip().startswith("error: memory_bytes")


def test_a_missing_link_is_avoided_and_refused_only_where_no_plan_can(four, tmp_path, capsys):
    data = json.loads(four.read_text())
    data["bandwidth_gbps"] = [[0] * 4 for _ in range(4)]
    four.write_text(json.dumps(data))
    assert solve(four, "--stages", "2", "--pipelines", "2", *STEP, *SPEEDS) == 2
    assert "zero bandwidth" in capsys.readouterr().err
    out = tmp_path / "plan.json"
    assert solve(four, "--stages", "auto", *STEP, *SPEEDS, "--out", str(out)) == 0
    assert len(plans.load(out).peers) == 1


def test_one_device_is_a_plan():
    network = Network((Device("only"),), ((0.0,),), ((0.0,),), "one")
    _, solution = search(network)
    assert solution.finalists[0].layout.shape == (1, 1)
