"""Prices: against the bytes of a simulated run and all plans of tiny networks; budgets; fronts."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

import planner
from jaxdt.run import plan as plans
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import parse, to_json
from jaxdt.run.profile import from_flops
from jaxdt.sim.predict import Conditions, simulate
from jaxdt.sim.scenario import RARE, Scenario
from jaxdt.sim.time_breakdown import Totals
from planner.__main__ import main
from planner.api.pareto import front
from planner.cost.compiled import generator
from planner.model.generate import generate
from planner.model.prices import PriceRules, StepPrice
from planner.report.result import Result
from planner.step_time.estimate import Heat
from planner.step_time.shapes import first_affordable, plan_shapes
from planner.step_time.simulate import plan_of_layout, simulated_s
from planner.step_time.tune import improve, price_of, score, tune
from planner.step_time.workload import StepWorkload

MODEL = GPTConfig.of("small", tied_head=True)
CHEAPEST = PriceRules(is_minimised=True)


def priced(prices, seed=1, egress_per_gb=1.0):
    """Devices with these prices an hour, in regions in turn, of which the dearer ones are faster."""
    n = len(prices)
    network = generate("gaming", n, seed)
    devices = tuple(
        replace(device, kind="fast" if price > 1 else "slow", region=f"region{d % 2}", price_per_hour=price)
        for d, (device, price) in enumerate(zip(network.devices, prices, strict=True))
    )
    egress = {"region0": egress_per_gb, "region1": 3 * egress_per_gb}
    gbps = tuple(tuple(10 * x for x in row) for row in network.bandwidth_gbps)
    return replace(network, devices=devices, egress_per_gb=egress, bandwidth_gbps=gbps)


def workload_of(network, rules=CHEAPEST, n_microbatches=8, model=MODEL, codec="none"):
    profile = from_flops(model, 1, {"": 1e12, "fast": 4e12, "slow": 1e12}, 0.5, dtype="bfloat16")
    return StepWorkload(network, profile, planner.run_of_profile(profile, n_microbatches, codec), rules)


def simulated_egress(workload, layout):
    """The price of the bytes that the machines of a simulated run send between regions in one step."""
    plan, network = plan_of_layout(workload, layout), workload.network
    scenario = Scenario(workload.run, plan, workload.profile, network)
    config = replace(workload.run, net=RARE, train=replace(workload.run.train, steps=2, eval_every_steps=0))
    totals = Totals()
    conditions: Conditions = scenario.conditions()
    simulate(config, plan, conditions, totals)
    total = 0.0
    for (src, dst), n_bytes in totals.n_bytes.items():
        if network.devices[src].region != network.devices[dst].region:
            total += network.egress_per_gb[network.devices[src].region] * n_bytes / 1e9
    return total


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("shape", [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_the_price_is_that_of_the_hours_and_of_the_bytes_of_a_simulated_step(shape, codec):
    network = priced([2.0, 0.5, 3.0, 0.25, 2.0, 1.0])
    workload = workload_of(network, codec=codec)
    layout = tune(workload, np.random.default_rng(0).permutation(6).reshape(shape))
    price = price_of(workload, layout, 100.0)
    assert price.per_hour == pytest.approx(8.75)
    assert price.egress_per_step == pytest.approx(simulated_egress(workload, layout), rel=1e-3)
    assert price.per_step == pytest.approx(8.75 * 100 / 3600 + price.egress_per_step)
    inside = replace(network, devices=tuple(replace(device, region="region0") for device in network.devices))
    assert price_of(workload_of(inside), layout, 100.0).egress_per_step == 0


def all_plans(workload):
    """(simulated seconds, price) of every placement of every shape on any of the devices."""
    n = workload.network.n_devices
    for stages in range(1, n + 1):
        for pipelines in range(1, n // stages + 1):
            for order in itertools.permutations(range(n), stages * pipelines):
                columns = [order[p * stages : (p + 1) * stages] for p in range(pipelines)]
                if columns == sorted(columns):  # pipelines have no order
                    layout = tune(workload, np.array(columns).T)
                    step_s = simulated_s(workload, layout)
                    yield step_s, price_of(workload, layout, step_s)


def job_of(network, rules):
    run = planner.run_of_model(MODEL, planner.StepOptions(global_batch=8))
    profile = from_flops(MODEL, 1, {"fast": 4e12, "slow": 1e12}, 0.5, dtype="bfloat16")
    return planner.Job(run, None, None, profile, rules)


@pytest.mark.parametrize(("prices", "egress"), [([2.0, 0.1, 2.0, 0.2], 1e-4), ([1.5, 1.2, 0.9], 0.5)])
def test_the_cheapest_step_and_the_shortest_within_a_budget_are_those_of_all_plans(prices, egress):
    network = priced(prices, egress_per_gb=egress)
    every = list(all_plans(workload_of(network)))
    found = planner.solve(network, job_of(network, CHEAPEST), planner.Stop(evaluations=5_000))
    assert found.objective == "cost_per_step"
    assert found.price.per_step <= 1.02 * min(price.per_step for _, price in every)
    budget = 0.6 * sum(prices)
    within = [step_s for step_s, price in every if price.per_hour <= budget]
    rules = PriceRules(budget_per_hour=budget)
    limited = planner.solve(network, job_of(network, rules), planner.Stop(evaluations=5_000))
    assert limited.price.per_hour <= budget
    assert limited.step_s <= 1.02 * min(within)
    assert limited.plan.found["left_out"]


@pytest.mark.parametrize("seed", range(4))
def test_annealing_stays_within_the_budget_and_never_raises_the_price(seed):
    prices = np.random.default_rng(seed).uniform(0.1, 4.0, 9).round(2).tolist()
    network = priced(prices, seed)
    start = tune(workload_of(network), np.argsort(prices)[:6].reshape(2, 3))
    budget = 1.2 * sum(sorted(prices)[:6])
    for rules in (PriceRules(True, budget), PriceRules(False, budget)):
        workload = workload_of(network, rules)
        better = improve(workload, start, generator(seed), Heat(0.05, 400))
        assert score(workload, better) <= score(workload, start)
        assert price_of(workload, better, 1.0).per_hour <= budget * (1 + 1e-9)


def test_devices_are_taken_in_order_as_far_as_the_budget_allows():
    network = priced([5.0, 1.0, 4.0, 1.0, 1.0])
    order = np.arange(5)
    taken = [
        first_affordable(workload_of(network, PriceRules(False, budget)), order, 3) for budget in (2.9, 3, 6, 7, 99)
    ]
    assert taken[0] is None
    assert [chosen.tolist() for chosen in taken[1:]] == [[1, 3, 4], [1, 2, 3], [0, 1, 3], [0, 1, 2]]


def price_s(workload, device):
    """The amount that a second of a lone device adds to the minimised value."""
    return workload.network.devices[device].price_per_hour / 3600 if workload.price_rules.is_minimised else 1.0


@pytest.mark.parametrize("rules", [CHEAPEST, PriceRules(budget_per_hour=6.0)])
def test_bounds_of_shapes_hold_and_know_slow_devices(rules):
    workload = workload_of(priced([2.0, 0.5, 3.0, 0.25, 2.0]), rules)
    bounds = {}
    for shape in plan_shapes(workload, None, None):
        layout = tune(workload, shape.devices.reshape(shape.n_pipelines, shape.n_stages).T)
        assert shape.bound <= score(workload, layout)
        if len(shape.devices) == 1:
            (device,) = shape.devices
            bounds[workload.network.devices[device].kind] = shape.bound / price_s(workload, device)
    assert bounds["slow"] == pytest.approx(4 * bounds["fast"], rel=1e-3)


def test_a_front_has_no_plan_that_another_one_beats():
    def result(step_s, per_step):
        found = object.__new__(Result)
        object.__setattr__(found, "step_s", step_s)
        object.__setattr__(found, "price", StepPrice(1.0, 0.0, per_step))
        return found

    points = [result(*pair) for pair in [(3, 1), (1, 5), (2, 5), (2, 3), (4, 2), (1, 6), (3, 1)]]
    assert [(point.step_s, point.price.per_step) for point in front(points)] == [(1, 5), (2, 3), (3, 1)]


@pytest.fixture
def priced_file(tmp_path):
    path = tmp_path / "network.json"
    path.write_text(json.dumps(to_json(priced([2.0, 0.1, 2.0, 0.2], egress_per_gb=1e-4))))
    return path


FLAGS = ["--stages", "auto", "--model", "small", "--global_batch", "8", "--flops", "fast=4e12,slow=1e12"]
FEW = ["--evaluations", "1000"]


def test_the_commands_write_plans_table_and_picture(priced_file, tmp_path, capsys):
    out = tmp_path / "plan.json"
    solve = ["solve", "--network", str(priced_file), *FLAGS, *FEW, "--out", str(out)]
    assert main([*solve, "--objective", "cost_per_step"]) == 0
    assert "a step costs" in capsys.readouterr().out
    found = plans.load(out).found
    assert found["price"]["per_step"] > 0
    assert found["objective"] == "cost_per_step"
    assert main([*solve, "--budget_per_hour", "2.2"]) == 0
    assert plans.load(out).found["price"]["per_hour"] <= 2.2
    assert main(["explain", str(out)]) == 0
    folder = tmp_path / "front"
    flags = ["--network", str(priced_file), *FLAGS, "--evaluations", "1000", "--points", "3", "--out", str(folder)]
    assert main(["pareto", *flags]) == 0
    rows = (folder / "front.md").read_text().splitlines()[2:]
    pairs = [tuple(float(cell.split()[0]) for cell in row.split("|")[1:3]) for row in rows]
    assert len(pairs) >= 2
    assert pairs == sorted(pairs)
    assert [price for _, price in pairs] == sorted((price for _, price in pairs), reverse=True)
    assert (folder / "front.png").stat().st_size > 10_000
    assert plans.load(folder / "plan_0.json").found["price"]


BUDGET = ["--budget_per_hour"]
BAD = {
    "no prices": (["--objective", "cost_per_step"], "no price_per_hour", True),
    "by cost": (["--objective", "comm_cost", *("--stages", "2", "--pipelines", "2", *BUDGET, "1")], BUDGET[0], False),
    "too little": ([*BUDGET, "0.05"], "expected at least 0.1, for 1 x 1 devices", False),
    "negative": ([*BUDGET, "-1"], "--budget_per_hour: got -1", False),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_flags_are_one_line_and_exit_code_2(name, priced_file, capsys):
    flags, expected, is_free = BAD[name]
    if is_free:
        network = parse(priced_file.read_text(), "n")
        free = tuple(replace(device, price_per_hour=0.0) for device in network.devices)
        priced_file.write_text(json.dumps(to_json(replace(network, devices=free, egress_per_gb={}))))
    shape = [] if "--stages" in flags else ["--stages", "auto"]
    speeds = [] if "comm_cost" in flags else FLAGS[-2:]
    assert main(["solve", "--network", str(priced_file), *shape, *FLAGS[2:6], *speeds, *FEW, *flags]) == 2
    *warnings, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert expected in error
    assert all(line.startswith("warning: ") for line in warnings)


def test_prices_are_read_and_written():
    network = priced([2.0, 0.0])
    data = to_json(network)
    assert "price_per_hour" not in data["devices"][1]
    again = parse(json.dumps(data), "n")
    assert (again.devices, again.egress_per_gb) == (network.devices, network.egress_per_gb)
    for field, value in (("egress_per_gb", {"region7": 1.0}), ("egress_per_gb", {"region0": -1.0})):
        with pytest.raises(planner.BadInput, match=r"^n: egress_per_gb: "):
            parse(json.dumps(data | {field: value}), "n")
    with pytest.raises(planner.BadInput, match=r"^n: devices\[0\].price_per_hour: got 'x'"):
        parse(json.dumps(data | {"devices": [{"name": "a", "price_per_hour": "x"}, {"name": "b"}]}), "n")
