"""Devices of one host share its line, cores and memory: in Eq. 1-4, the estimate of a step, and the simulator."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import brute_partition, partitions

import planner
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Host, parse, to_json
from jaxdt.run.profile import from_flops
from jaxdt.run.work import WorkKind
from jaxdt.sim.predict import shared_hosts
from planner.cost.reference import cost_of, pair_s
from planner.model.change import Change, changed, part_of
from planner.model.generate import generate
from planner.model.hosts import fair_gbps, room_bytes
from planner.model.problem import problem_of
from planner.search.incumbent import Budget, Incumbent
from planner.step_time.search import search_step
from planner.step_time.simulate import simulated_s
from planner.step_time.tune import tune
from planner.step_time.workload import StepWorkload

MODEL = GPTConfig.of("small", tied_head=True)


def hosted(n, n_on, **shared):
    """n devices, n_on on a host, with 100 Gb/s inside a host and 10 Gb/s between hosts."""
    base = generate("homogeneous", n, 0)
    devices = tuple(replace(device, host=f"host{d // n_on}") for d, device in enumerate(base.devices))
    latency_s = tuple(tuple(1e-3 * (i != j) for j in range(n)) for i in range(n))
    links = [[(0.0 if i == j else 100.0 if i // n_on == j // n_on else 10.0) for j in range(n)] for i in range(n)]
    gbps = tuple(map(tuple, links))
    hosts = tuple(Host(f"host{h}", **shared) for h in range(n // n_on)) if shared else ()
    return replace(base, devices=devices, latency_s=latency_s, bandwidth_gbps=gbps, hosts=hosts)


def workload_of(network, flops=1e12):
    profile = from_flops(MODEL, 1, {"": flops}, 0.5, dtype="bfloat16")
    return StepWorkload(network, profile, planner.run_of_profile(profile, 16))


def test_a_device_gets_an_equal_part_of_its_hosts_line():
    network = hosted(6, 3, out_gbps=6.0, in_gbps=1.5)
    gbps = fair_gbps(network)
    assert gbps[0, 1] == 100.0  # inside a host
    assert gbps[0, 3] == 0.5  # the line in, shared by three
    only_out = replace(network, hosts=(Host("host0", out_gbps=6.0),))
    assert fair_gbps(only_out)[0, 3] == 2.0
    assert fair_gbps(only_out)[3, 0] == 10.0
    assert (fair_gbps(replace(network, hosts=())) == np.array(network.bandwidth_gbps)).all()
    assert pair_s(only_out, 0, 3, 750_000_000) == pytest.approx(2e-3 + 3.0 + 0.6)  # 2 Gb/s there, 10 back


@pytest.mark.parametrize("gbps", [0.5, 4.0])
def test_by_cost_the_plan_is_the_best_of_all_with_shared_lines(gbps):
    network = hosted(6, 3, out_gbps=gbps, in_gbps=2 * gbps)
    job = planner.Job(planner.ByteSizes(65e7, 47e7), 3, 2)
    result = planner.solve(network, job, planner.Stop(evaluations=20_000))
    problem = problem_of(network, 3, 2, 65e7, 47e7)
    optimum_s = min(brute_partition(problem, groups) for groups in partitions(tuple(range(6)), 2))
    assert result.cost.total_s == pytest.approx(optimum_s)
    assert result.proved
    assert all(verdict.state != "FALSE" for verdict in planner.verify(result.plan, network))
    wider = replace(network, hosts=())
    assert cost_of(wider, result.plan.placement, 65e7, 47e7).total_s < result.cost.total_s
    assert any(verdict.state == "FALSE" for verdict in planner.verify(result.plan, wider))


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8, 1), (1, 8)])
@pytest.mark.parametrize("gbps", [1.0, 0.05])
def test_the_estimate_follows_the_simulator_where_lines_are_shared(shape, gbps):
    """Within a quarter."""
    workload = workload_of(hosted(8, 4, out_gbps=gbps, in_gbps=gbps))
    for seed in range(2):
        layout = tune(workload, np.random.default_rng(seed).permutation(8).reshape(shape))
        assert simulated_s(workload, layout) == pytest.approx(layout.step_s, rel=0.25)


def test_by_step_time_the_plan_is_the_best_of_all_with_shared_lines():
    workload = workload_of(hosted(4, 2, out_gbps=0.05, in_gbps=0.05), 1e14)
    found = search_step(workload, 2, Incumbent(Budget(None, 20_000)), "auto", 0).finalists[0]
    layouts = [tune(workload, np.array(order).reshape(2, 2)) for order in itertools.permutations(range(4))]
    assert found.step_s <= 1.01 * min(simulated_s(workload, layout) for layout in layouts)
    worst_s = max(simulated_s(workload, layout) for layout in layouts)
    assert found.step_s < 0.8 * worst_s


def test_cores_of_a_host_are_shared_and_a_wider_line_changes_nothing_then():
    column = np.arange(4).reshape(1, 4)  # four replicas that all compute at once
    alone, crowded = (workload_of(hosted(4, 4, cores=cores), 1e9) for cores in (4, 1))
    steps_s = [simulated_s(workload, tune(workload, column)) for workload in (alone, crowded)]
    assert steps_s[1] == pytest.approx(4 * steps_s[0], rel=0.05)
    assert tune(crowded, column).step_s == pytest.approx(steps_s[1], rel=0.05)
    assert crowded.seconds(crowded.kinds[0], 0, 4)[WorkKind.FORWARD] == 4 * alone.seconds("", 0, 4)[WorkKind.FORWARD]
    half = replace(hosted(4, 2, cores=1), hosts=(Host("host0", cores=1),))
    assert len(workload_of(half).kinds) == 2  # only two of the four wait for a core


def test_memory_of_a_host_is_shared():
    network = hosted(4, 2, memory_bytes=8_000_000_000)
    one = replace(network.devices[0], memory_bytes=1_000_000_000)
    network = replace(network, devices=(one, *network.devices[1:]), hosts=network.hosts[:1])
    assert room_bytes(network) == [1e9, 4e9, np.inf, np.inf]
    assert workload_of(network).memory_bytes == [1e9, 4e9, np.inf, np.inf]
    with pytest.raises(planner.BadInput, match="has 4 GB, its stage needs 8 GB"):
        job = planner.Job(planner.ByteSizes(2e9, 47e7), 2, 2)
        planner.solve(hosted(4, 2, memory_bytes=8_000_000_000), job, planner.Stop(evaluations=100))


def test_the_simulator_gets_hosts_as_the_network_says():
    network = hosted(4, 2, cores=1.5, out_gbps=3.0)
    network = replace(network, devices=(*network.devices[:3], replace(network.devices[3], host="")))
    network = replace(network, hosts=network.hosts[:1])
    shared = shared_hosts(network, range(4))
    assert shared.host_of == {0: "host0", 1: "host0", 2: "host1", 3: "device3"}
    assert shared.cores == {"host0": 1.5, "host1": 1.0, "device3": 1.0}
    assert shared.access_gbps == {"host0": (3.0, np.inf)}


def test_hosts_survive_files_parts_and_changes():
    network = hosted(4, 2, out_gbps=1.0, in_gbps=2.0)
    assert parse(json.dumps(to_json(network)), "n") == network
    assert part_of(network, np.array([0, 3])).hosts == network.hosts
    after = changed(network, Change(without=("site-0", "site-1"), added=hosted(2, 2, out_gbps=5.0)))
    assert after.hosts == (Host("host1", out_gbps=1.0, in_gbps=2.0),)


BAD = {
    "unknown": ([{"name": "host7"}], "no device is on 'host7' (did you mean"),
    "twice": ([{"name": "host0"}, {"name": "host0"}], "'host0' occurs twice"),
    "zero": ([{"name": "host0", "out_gbps": 0}], "host0: out_gbps: got 0.0, expected a number > 0"),
    "field": ([{"name": "host0", "line_gbps": 1}], "unknown field"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_host_is_refused_in_one_line(name):
    hosts, expected = BAD[name]
    data = to_json(hosted(4, 2)) | {"hosts": hosts}
    with pytest.raises(planner.BadInput) as error:
        parse(json.dumps(data), "network.json")
    assert expected in str(error.value)
    assert str(error.value).startswith("network.json: hosts")
