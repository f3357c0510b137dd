"""Constraints: honoured by every way to a plan, optimal against brute force, contradictions named."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planner_cases import NETWORKS

import planner
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from planner.__main__ import main
from planner.cost.reference import cost_of
from planner.model.generate import generate
from planner.search import seated
from planner.search.base import SOLVERS, solver_entry

quick = settings(max_examples=25, phases=[Phase.generate])
BYTES = planner.ByteSizes(65e7, 47e7)
SHAPES = [(2, 2), (2, 3), (3, 2), (1, 4), (4, 1)]


def network_of(n, seed) -> Network:
    """n devices d0, d1, ... in three regions, some links missing."""
    base = generate("jitter", n, seed)
    rng = np.random.default_rng(seed)
    devices = tuple(replace(d, name=f"d{i}", region=f"r{i % 3}") for i, d in enumerate(base.devices))
    gbps = np.array(base.bandwidth_gbps)
    cut = np.triu(rng.random((n, n)) < 0.08, 1)
    gbps[cut | cut.T] = 0.0
    return Network(devices, base.latency_s, tuple(map(tuple, gbps.tolist())), f"seed{seed}")


@st.composite
def cases(draw):
    """(network, shape, constraints)."""
    n_stages, n_pipelines = draw(st.sampled_from(SHAPES))
    n = n_stages * n_pipelines
    devices = st.sampled_from([f"d{i}" for i in range(n)])
    stages = st.none() | st.integers(0, n_stages - 1)
    pipelines = st.none() | st.integers(0, n_pipelines - 1)
    seats = st.builds(planner.SeatRule, devices, stages, pipelines)
    pins = seats.filter(lambda seat: (seat.stage, seat.pipeline) != (None, None))
    pairs = st.tuples(devices, devices).filter(lambda pair: pair[0] != pair[1])
    limits = st.builds(planner.RegionLimit, st.sampled_from(["r0", "r1", "*"]), st.integers(1, 3))
    constraints = planner.Constraints(
        pin=tuple(draw(st.lists(pins, max_size=2))),
        forbid=tuple(draw(st.lists(pins, max_size=3))),
        same_stage=tuple(draw(st.lists(pairs, max_size=1))),
        same_pipeline=tuple(draw(st.lists(pairs, max_size=1))),
        at_most=tuple(draw(st.lists(limits, max_size=1))) if n_stages > 1 else (),
    )
    return network_of(n, draw(st.integers(0, 999))), (n_stages, n_pipelines), constraints


def honours(placement, network, constraints) -> bool:
    """Whether a placement [S][P] honours the constraints; written apart from the planner."""
    names = [device.name for device in network.devices]
    seat = {names[d]: (s, p) for s, row in enumerate(placement) for p, d in enumerate(row)}

    def fits(rule):
        return rule.stage in (None, seat[rule.device][0]) and rule.pipeline in (None, seat[rule.device][1])

    regions = [Counter(network.devices[d].region for d in row) for row in placement]
    return (
        all(fits(rule) for rule in constraints.pin)
        and not any(fits(rule) for rule in constraints.forbid)
        and all(seat[a][0] == seat[b][0] for a, b in constraints.same_stage)
        and all(seat[a][1] == seat[b][1] for a, b in constraints.same_pipeline)
        and all(
            count <= limit.most
            for limit in constraints.at_most
            for row in regions
            for region, count in row.items()
            if limit.region in ("*", region)
        )
    )


def allowed_costs(network, shape, constraints):
    """The cost of every allowed placement, by the reference evaluator."""
    for order in itertools.permutations(range(network.n_devices)):
        placement = [order[s * shape[1] : (s + 1) * shape[1]] for s in range(shape[0])]
        if honours(placement, network, constraints):
            yield cost_of(network, placement, BYTES.c_dp_bytes, BYTES.c_pp_bytes).total_s


@quick
@given(case=cases())
def test_a_plan_under_constraints_is_the_best_that_honours_them(case):
    check_best(case, seated.SMALL)


@settings(quick, max_examples=10)
@given(case=cases())
def test_annealing_finds_it_too_where_not_every_placement_is_looked_at(case):
    check_best(case, 0)


def check_best(case, small):
    network, shape, constraints = case
    job = planner.Job(BYTES, *shape)
    costs_s = list(allowed_costs(network, shape, constraints))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seated, "SMALL", small)
        patch.setattr(seated, "RELAXED_FRAC", 0.05)
        try:
            result = planner.solve(network, job, planner.Stop(evaluations=300_000), constraints=constraints)
        except BadInput as error:
            line = str(error)
            assert "cannot hold" in line if not costs_s else "zero bandwidth" in line and math.isinf(min(costs_s))
            return
    assert honours(result.plan.placement, network, constraints)
    assert result.cost.total_s == pytest.approx(min(costs_s), rel=1e-6)
    assert result.bound_s <= min(costs_s) * (1 + 1e-9)
    assert result.proved or small == 0


STEP = [(2, 2), (2, 3), (3, 2)]


@settings(quick, max_examples=5)
@given(case=cases().filter(lambda case: case[1] in STEP))
def test_a_plan_by_step_time_honours_constraints(case):
    network, shape, constraints = case
    run = planner.run_of_model("small", planner.StepOptions(global_batch=12))
    job = planner.Job(run, *shape, planner.profile_of_flops(run, network, 1e12))
    try:
        result = planner.solve(network, job, planner.Stop(evaluations=500), constraints=constraints)
    except BadInput as error:
        assert "cannot hold" in str(error) or "zero bandwidth" in str(error)
        return
    assert honours(result.plan.placement, network, constraints)


def test_more_devices_and_a_spread_over_regions():
    """24 devices: no two of a region in a stage, one pinned."""
    network = generate("multi_dc", 24, 0)
    name = network.devices[3].name
    constraints = planner.Constraints(pin=(planner.SeatRule(name, 5, 1),), at_most=(planner.RegionLimit("*", 2),))
    result = planner.solve(network, planner.Job(BYTES, 6, 4), planner.Stop(evaluations=30_000), constraints=constraints)
    assert honours(result.plan.placement, network, constraints)
    free = planner.solve(network, planner.Job(BYTES, 6, 4), planner.Stop(evaluations=30_000))
    assert result.cost.total_s >= free.cost.total_s * (1 - 1e-9)  # here the constraints cost nothing
    assert free.cost.total_s >= result.bound_s


CONTRADICTIONS = {
    "two pins of a device": ({"pin": [("d0", 0), ("d0", 1)]}, "pin: d0 stage 0; pin: d0 stage 1: cannot hold together"),
    "pin and forbid": ({"pin": [("d1", 1)], "forbid": [("d1", 1), ("d2", 0)]}, "pin: d1 stage 1; forbid: d1 stage 1"),
    "more than a stage": ({"pin": [("d0", 0), ("d1", 0), ("d2", 0)]}, "pin: d2 stage 0: cannot hold together"),
    "an unused device": ({"forbid": [("d3", None)]}, "forbid: d3: cannot hold with 2 stages x 2 pipelines"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_constraints_that_contradict_each_other_are_named(name):
    fields, expected = CONTRADICTIONS[name]
    rules = {field: tuple(planner.SeatRule(*seat) for seat in seats) for field, seats in fields.items()}
    with pytest.raises(BadInput) as error:
        planner.solve(network_of(4, 1), planner.Job(BYTES, 2, 2), constraints=planner.Constraints(**rules))
    assert expected in str(error.value)
    assert "d2 stage 0" not in str(error.value) or name == "more than a stage"


@pytest.mark.parametrize("solver", [name for name in SOLVERS if not solver_entry(name).honours_constraints])
def test_a_solver_that_does_not_honour_constraints_is_refused_with_them(solver):
    constraints = planner.Constraints(pin=(planner.SeatRule("d0", 0),))
    with pytest.raises(BadInput, match=f"{solver} does not honour constraints"):
        planner.solve(network_of(4, 0), planner.Job(BYTES, 2, 2), solver=solver, constraints=constraints)


WRONG = {
    "no device": ({"pin": [{"device": "londn", "stage": 0}]}, 'did you mean "london"'),
    "no stage": ({"pin": [{"device": "london", "stage": 2}]}, "stage: got 2, expected 0 to 1"),
    "nothing pinned": ({"pin": [{"device": "london"}]}, "expected a stage, a pipeline, or both"),
    "region": ({"at_most": [{"region": "mars", "most": 1}]}, "no region 'mars'"),
    "field": ({"pins": []}, "pins: unknown field"),
    "type": ({"pin": [{"device": "london", "stage": "0"}]}, "pin[0].stage"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_of_constraints_is_one_line(name, tmp_path, capsys):
    data, expected = WRONG[name]
    path = tmp_path / "constraints.json"
    path.write_text(json.dumps(data))
    sizes = ["--c_dp_bytes", "1e6", "--c_pp_bytes", "1e6", "--stages", "2", "--pipelines", "2"]
    network = str(NETWORKS / "four_cities.json")
    assert main(["solve", "--network", network, *sizes, "--constraints", str(path)]) == 2
    error = capsys.readouterr().err.strip()
    assert expected in error
    assert error.count("\n") == 0


def test_a_file_of_constraints_is_honoured_and_said_in_the_plan(tmp_path):
    path, out = tmp_path / "constraints.json", tmp_path / "plan.json"
    path.write_text(json.dumps({"pin": [{"device": "london", "stage": 1}], "same_stage": [["london", "newyork"]]}))
    sizes = ["--c_dp_bytes", "1e6", "--c_pp_bytes", "1e6", "--stages", "2", "--pipelines", "2"]
    network = str(NETWORKS / "four_cities.json")
    assert main(["solve", "--network", network, *sizes, "--constraints", str(path), "--out", str(out)]) == 0
    plan = planner.load_plan(out)
    assert {plan.devices[d] for d in plan.placement[1]} == {"london", "newyork"}
    assert plan.found["constraints"]["pin"] == [{"device": "london", "stage": 1, "pipeline": None}]
