"""Plans that change: what moves, what it costs, and that the new plan is as good as one from nothing."""

import json
import math

import numpy as np
import pytest
from planner_cases import NETWORKS, case

import planner
from jaxdt.run import network as networks
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from planner.__main__ import main
from planner.cost.reference import cost_of
from planner.model.change import changed, part_of
from planner.model.generate import generate
from planner.model.moves import CHECKPOINT, Holders
from planner.search import annealing_chains
from planner.step_time import search

BYTES = planner.ByteSizes(65e7, 47e7)
STOP = {"evaluations": 60_000}


def planned(network, n_stages, n_pipelines):
    return planner.solve(network, planner.Job(BYTES, n_stages, n_pipelines), planner.Stop(evaluations=20_000)).plan


def stage_of(plan):
    return {plan.devices[d]: s for s, row in enumerate(plan.placement) for d in row}


# -------------------------------------------------------------------------------------------------------- the network


def test_a_changed_network_has_who_stays_and_who_came():
    network = case("four_cities")
    added = planner.load_network(NETWORKS / "four_cities.json")
    tokyo = Network(
        (*added.devices[1:2], networks.Device("tokyo")), ((0.0, 0.1), (0.2, 0.0)), ((0.0, 0.5), (0.6, 0.0)), "new"
    )
    after = changed(network, planner.Change(("london",), tokyo))
    names = [device.name for device in after.devices]
    assert names == ["frankfurt", "newyork", "sanfrancisco", "tokyo"]
    assert after.link(0, 3).latency_s == 0.1
    assert after.link(3, 0).bandwidth_gbps == 0.6
    assert after.link(1, 3).bandwidth_gbps == 0.0  # nobody has measured it
    assert after.link(1, 2) == network.link(2, 3)
    with pytest.raises(BadInput, match='did you mean "london"'):
        changed(network, planner.Change(("londn",)))


# ---------------------------------------------------------------------------------------------------------- the moves


def line_network():
    """Four devices; a sends to d slowly, b sends to d fast."""
    gbps = np.full((4, 4), 8.0)
    gbps[0, 3] = 0.8
    np.fill_diagonal(gbps, 0.0)
    latency_s = tuple(tuple(0.0 if i == j else 0.5 for j in range(4)) for i in range(4))
    return Network(tuple(networks.Device(name) for name in "abcd"), latency_s, tuple(map(tuple, gbps.tolist())), "line")


def test_a_device_fetches_what_it_lacks_from_the_fastest_holder():
    holders = Holders(line_network(), ((0, 2), (2, 4)), ((0, 1), (2,)), lambda lo, hi: 1e9 * (hi - lo))
    move = holders.move(3, 0, ((0, 2), (2, 4)))
    assert (move.from_stage, move.to_stage, move.layers, move.n_bytes, move.sources) == (
        None,
        0,
        ((0, 2),),
        2e9,
        ("b",),
    )
    assert move.time_s == pytest.approx(0.5 + 2.0)
    assert not holders.move(0, 0, ((0, 2), (2, 4))).layers
    # other cuts: a device that holds layers 0 and 1 and gets 1 to 3 fetches 2 and 3 alone
    move = holders.move(0, 1, ((0, 1), (1, 4)))
    assert (move.layers, move.sources, move.n_bytes) == (((2, 4),), ("c",), 2e9)


def test_state_that_nobody_holds_comes_from_the_checkpoint():
    holders = Holders(line_network(), ((0, 2), (2, 4)), ((0, 1), ()), lambda lo, hi: 1e9)
    move = holders.move(3, 1, ((0, 2), (2, 4)))
    assert move.sources == (CHECKPOINT,)
    assert move.time_s > 0


# --------------------------------------------------------------------------------------------------------- the replan


def test_without_a_change_nothing_moves():
    network = case("small_gaming16")
    plan = planned(network, 4, 4)
    found = planner.replan(plan, network, planner.Change(), stop=planner.Stop(**STOP))
    assert found.moves == ()
    assert found.moved_bytes == found.move_s == 0
    assert found.score_s == pytest.approx(plan.found["cost"]["total_s"])
    assert stage_of(found.result.plan) == stage_of(plan)


def test_devices_leave_and_others_take_their_seats():
    whole = generate("jitter", 18, 3)
    network = part_of(whole, np.arange(16))
    plan = planned(network, 4, 4)
    gone = (network.devices[2].name, network.devices[9].name)
    found = planner.replan(plan, network, planner.Change(gone, whole), stop=planner.Stop(**STOP))
    new = found.result.plan
    after = found.result.network
    assert (new.n_stages, new.n_pipelines) == (4, 4)
    assert not set(gone) & set(stage_of(new))
    assert found.result.cost == cost_of(after, new.placement, BYTES.c_dp_bytes, BYTES.c_pp_bytes)
    assert found.result.bound_s <= found.result.cost.total_s <= found.mended.score_s
    anew = planned(after, 4, 4).found["cost"]["total_s"]
    assert found.result.score_s <= 1.02 * anew
    moved = {move.device for move in found.moves}
    assert moved == {name for name, stage in stage_of(new).items() if stage_of(plan).get(name) != stage}
    assert found.moved_bytes == pytest.approx(len(moved) * 3 * BYTES.c_dp_bytes)
    assert found.move_s == max(move.time_s for move in found.moves)
    assert planner.verify(new, after)[0].state == "true"


def test_too_few_devices_for_a_pipeline_are_left_out():
    network = case("small_gaming16")
    plan = planned(network, 4, 4)
    found = planner.replan(plan, network, planner.Change((network.devices[0].name,)), stop=planner.Stop(**STOP))
    assert (found.result.plan.n_stages, found.result.plan.n_pipelines) == (4, 3)
    assert len(found.result.plan.found["left_out"]) == 3
    assert found.result.plan.n_microbatches == plan.n_microbatches
    assert found.result.bound_s == 0  # a bound would be about one choice of devices


def test_a_short_horizon_moves_less():
    whole = generate("jitter", 18, 5)
    network = part_of(whole, np.arange(16))
    plan = planned(network, 4, 4)
    change = planner.Change(tuple(d.name for d in network.devices[:2]), whole)

    def replanned(horizon_steps):
        return planner.replan(plan, network, change, stop=planner.Stop(**STOP), horizon_steps=horizon_steps)

    short, long = replanned(0.01), replanned(1e6)
    assert short.move_s <= long.move_s
    assert short.score_s <= short.mended.score_s
    assert long.result.score_s <= short.result.score_s


def test_constraints_hold_after_a_change_and_those_about_who_left_are_dropped():
    network = case("small_gaming16")
    plan = planned(network, 4, 4)
    names = [device.name for device in network.devices]
    rules = (planner.SeatRule(names[5], 2, 1), planner.SeatRule(names[0], 1))
    found = planner.replan(
        plan,
        network,
        planner.Change((names[0],)),
        stop=planner.Stop(**STOP),
        constraints=planner.Constraints(pin=rules),
    )
    new = found.result.plan
    assert new.devices[new.placement[2][1]] == names[5]


def test_a_plan_by_step_time_is_replanned_by_step_time():
    network = generate("jitter", 9, 1)
    run = planner.run_of_model("small", planner.StepOptions(global_batch=12))
    job = planner.Job(run, 2, 4, planner.profile_of_flops(run, network, 1e12))
    before = part_of(network, np.arange(8))
    plan = planner.solve(before, job, planner.Stop(evaluations=2000)).plan
    change = planner.Change((before.devices[1].name,), network)
    found = planner.replan(plan, before, change, job, planner.Stop(evaluations=50_000))
    new = found.result.plan
    assert found.result.step_s == found.result.score_s > 0
    assert found.score_s == pytest.approx(found.result.step_s + found.move_s / found.horizon_steps)
    assert before.devices[1].name not in stage_of(new)
    assert sum(new.shares) == 12
    assert math.isfinite(found.mended.score_s)
    with pytest.raises(BadInput, match="expected the job too"):
        planner.replan(plan, before, change)


def test_under_an_evaluation_limit_a_replan_does_not_depend_on_the_cores(monkeypatch):
    network = generate("gaming", 9, 2)
    run = planner.run_of_model("small", planner.StepOptions(global_batch=12))
    job = planner.Job(run, 2, 4, planner.profile_of_flops(run, network, 1e12))
    plan = planner.solve(part_of(network, range(8)), job, planner.Stop(evaluations=500)).plan
    change = planner.Change((network.devices[1].name,), network)
    results = []
    for n_cores in (1, 4):
        for module in (search, annealing_chains):
            monkeypatch.setattr(module, "n_cores", lambda n_cores=n_cores: n_cores)
        found = planner.replan(plan, part_of(network, range(8)), change, job, planner.Stop(evaluations=5_000)).result
        results.append((found.plan.placement, [one.step_s for one in found.finalists], found.statistics.evaluations))
    assert results[0] == results[1]


def test_the_command_says_what_moves_and_writes_plan_and_network(tmp_path, capsys):
    out, new, after = (tmp_path / name for name in ("plan.json", "new.json", "after.json"))
    network = NETWORKS / "small_gaming16.json"
    sizes = ["--c_dp_bytes", "65e7", "--c_pp_bytes", "47e7", "--stages", "4", "--pipelines", "4"]
    limit = ["--evaluations", "20000"]
    assert main(["solve", "--network", str(network), *sizes, *limit, "--out", str(out)]) == 0
    gone = json.loads(out.read_text())["devices"][0]
    capsys.readouterr()
    flags = ["replan", "--from", str(out), "--without", gone, *limit]
    assert main([*flags, "--out", str(new), "--out_network", str(after)]) == 0
    text = capsys.readouterr().out
    assert "old plan, mended" in text
    assert "devices fetch state" in text
    assert main(["explain", str(new)]) == 0
    assert main(["verify", str(new)]) == 0
    assert json.loads(new.read_text())["replan"]["moved_bytes"] >= 0
    for wrong, expected in (
        ([*flags, "--out", str(new)], "--out_network: missing"),
        ([*flags[:-4], "--without", "nobody"], "--without: no device 'nobody'"),
        ([*flags, "--horizon_steps", "0"], "--horizon_steps"),
    ):
        assert main(wrong) == 2
        assert expected in capsys.readouterr().err
