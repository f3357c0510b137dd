"""Plans of pools: clusters, their order, roles, Eq. 1-2 by hand, the mixed cluster, errors, the command line."""

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from experiments.reproduce.hybrid_ps_parts.instances import Cluster, toy
from planner_cases import brute_path

import planner
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Device, Network, parse, to_json
from jaxdt.run.plan import PlanRoles
from planner.__main__ import main
from planner.api.by_pool import problem_of_job
from planner.model.pool import PoolOptions
from planner.report.pool_plan import POOL
from planner.search.pool.clustering import clusterings
from planner.search.pool.levels import hops, search
from planner.search.pool.path import annealed_order, exact_order, length_s
from planner.search.pool.stages import largest_remainder, owners_of

RUN = planner.run_of_model("small", planner.StepOptions(global_batch=64))


def mixed(seed, n_reliable=7, n_workers=5, n_sites=3):
    """Devices at sites far from each other, all links different."""
    dice = random.Random(seed)
    names = [f"r{i}" for i in range(n_reliable)] + [f"w{i}" for i in range(n_workers)]
    devices = tuple(
        Device(name, f"site{i % n_sites}", dice.choice(["A100", "T4"]), disconnect_prob=0.5 if name[0] == "w" else None)
        for i, name in enumerate(names)
    )
    n = len(devices)
    latency_s, gbps = [[0.0] * n for _ in names], [[0.0] * n for _ in names]
    for a, b in itertools.permutations(range(n), 2):
        far = devices[a].region != devices[b].region
        latency_s[a][b], gbps[a][b] = dice.uniform(0.02, 0.05) * far, dice.uniform(0.2, 0.4) * (1 if far else 20)
    return Network(devices, tuple(map(tuple, latency_s)), tuple(map(tuple, gbps)), "mixed")


def shuffled(network, seed):
    """The same devices and links under other numbers."""
    order = random.Random(seed).sample(range(network.n_devices), network.n_devices)

    def permuted(matrix):
        return tuple(tuple(matrix[a][b] for b in order) for a in order)

    devices = tuple(network.devices[d] for d in order)
    links = permuted(network.latency_s), permuted(network.bandwidth_gbps)
    return replace(network, devices=devices, latency_s=links[0], bandwidth_gbps=links[1])


def planned(network, n_stages=None, options=None, seed=0):
    profile = planner.profile_of_flops(RUN, network, {"A100": 1e13, "T4": 2e12})
    job = planner.Job(RUN, n_stages, None, profile, pool=options or PoolOptions())
    return planner.solve(network, job, seed=seed)


def test_the_search_of_a_pool_is_given_nothing_that_it_does_not_know():
    network = mixed(0)
    job = planner.Job(RUN, 2, None, planner.profile_of_flops(RUN, network, 1e13), pool=PoolOptions())
    result = planner.solve(network, job, seed=3)
    assert (result.score_s, result.objective) == (result.cost.total_s, "step_time")
    assert (result.plan.found["solver"], result.statistics.seed) == ("cluster", 3)
    given = dict(stop=planner.Stop(1.0), on_progress=print, constraints=planner.Constraints())
    for name, value in {**given, "start": planner.Start(result.plan)}.items():
        with pytest.raises(BadInput, match=f"^{name}: got one for the job of a pool"):
            planner.solve(network, job, **{name: value})
    with pytest.raises(BadInput, match="^--solver: got 'evolve', expected one of auto, cluster"):
        planner.solve(network, job, solver="evolve")
    with pytest.raises(BadInput, match="^--solver: got a job with a number of pipelines"):
        planner.solve(network, replace(job, n_pipelines=2))
    with pytest.raises(BadInput, match="^--objective: got the job of a pool, which `replan` does not know"):
        planner.replan(replace(result.plan, roles=PlanRoles()), network, planner.Change(), job)


def named(plan):
    """The stages, roles, units and seconds of a plan, with names in place of the numbers of devices."""
    roles = {role: [{plan.devices[d] for d in row} for row in getattr(plan.roles, role)] for role in plan.roles.used}
    return plan.stages, roles, plan.found[POOL]["units"], plan.found[POOL]["step_s"]


# ---------------------------------------------------------------------------------------------------------- the search


def test_cliques_that_are_far_apart_are_never_mixed():
    for seed in range(40):
        dice = random.Random(seed)
        clique = np.array([d % dice.randint(2, 4) for d in range(dice.randint(4, 14))])
        dice.shuffle(clique)
        n, n_cliques = len(clique), len(set(clique.tolist()))
        near_s = np.array([[dice.uniform(0.5, 1.5) for _ in range(n)] for _ in range(n)])
        far_s = np.array([[dice.uniform(2, 60) for _ in range(n)] for _ in range(n)])
        delay_s = np.where(clique[:, None] == clique[None, :], near_s, far_s)
        delay_s = np.triu(delay_s, 1) + np.triu(delay_s, 1).T
        for parts in clusterings(delay_s):
            assert sorted(d for part in parts for d in part) == list(range(n))
            for part in parts if len(parts) >= n_cliques else ():
                assert len({clique[d] for d in part}) == 1
            for whole in {clique[d] for d in range(n)} if len(parts) <= n_cliques else ():
                members = set(np.flatnonzero(clique == whole).tolist())
                assert any(members <= set(part) for part in parts)


def test_annealing_finds_the_exact_path_of_up_to_8_clusters():
    for n, seed in itertools.product(range(1, 9), range(2)):
        upper = np.triu(np.random.default_rng(seed).uniform(1, 9, (n, n)), 1)
        distance = upper + upper.T
        table = distance.tolist()
        least = length_s(table, exact_order(distance))
        assert length_s(table, annealed_order(distance, seed)) == pytest.approx(least, rel=1e-12)
        if n <= 6:
            assert least == pytest.approx(brute_path(distance), rel=1e-12)


def test_a_plan_does_not_depend_on_numbers_or_seeds_and_all_that_it_claims_is_true():
    for seed in range(4):
        network = mixed(seed)
        plans = [planned(other, 3, seed=k).plan for k, other in enumerate([network, shuffled(network, seed)])]
        assert named(plans[0]) == named(plans[1])
        verdicts = planner.verify(plans[0], network)
        assert [one.text for one in verdicts if one.state == "FALSE"] == []
        assert len([one for one in verdicts if one.state == "true"]) == 7
        roles = plans[0].roles
        for front, back, servers in zip(roles.front, roles.back, roles.servers, strict=True):
            assert set(front) | set(back) == set(servers)
            assert set(front) & set(back) == (set(servers) if len(servers) == 1 else set())
        sites = [{network.devices[d].region for d in row} for row in roles.servers]
        assert sorted(map(sorted, sites)) == [["site0"], ["site1"], ["site2"]]
        for row, site in zip(roles.workers, sites, strict=True):
            assert {network.devices[d].region for d in row} <= site


def test_the_search_and_eq_2_in_full_agree_about_hops():
    """They share no code."""
    for seed, n_stages in itertools.product(range(3), (2, 3, 4)):
        network = mixed(seed)
        profile = planner.profile_of_flops(RUN, network, {"A100": 1e13, "T4": 2e12})
        problem, _ = problem_of_job(network, planner.Job(RUN, None, None, profile), PoolOptions())
        level = search(problem, PoolOptions(), n_stages, 0).chosen
        hops_s = [cost.hop_s for cost in level.cost.stages]
        assert hops(problem, owners_of(problem, level.clusters)) == pytest.approx(hops_s[:-1])
        assert hops_s[-1] == 0
        stage_s = 16 / sum(problem.power[problem.reliable]) / n_stages  # 64 units in 4 mini-batches, for 12 devices
        assert level.search_s == pytest.approx(4 * (max(hops_s) + stage_s))


def test_verification_finds_roles_that_devices_may_not_have():
    network = mixed(0)
    plan = planned(network, 3).plan

    def false(plan, network):
        return [one.text for one in planner.verify(plan, network) if one.state == "FALSE"]

    assert false(plan, network) == []
    names = {plan.devices[row[0]]: k for k, row in enumerate(plan.roles.servers)}
    gone = tuple(replace(one, disconnect_prob=0.5) if one.name in names else one for one in network.devices)
    assert any("servers are reliable" in text and "r0" in text for text in false(plan, replace(network, devices=gone)))
    roles = plan.roles
    k = next(k for k, row in enumerate(roles.servers) if len(row) > 1)
    both = tuple(roles.servers[k] if j == k else row for j, row in enumerate(roles.front))
    assert f"roles: a server is in front or at the back, a lone one both, but for {k}" in false(
        replace(plan, roles=replace(roles, front=both)), network
    )
    units = dict(plan.found[POOL]["units"])
    a, b, *_ = (plan.devices[d] for d in (*roles.servers[k], *roles.workers[k]))
    units[a], units[b] = units[a] + units[b], 0
    shared = replace(plan, found=plan.found | {POOL: plan.found[POOL] | {"units": units}})
    assert any(text.startswith(f"units: {a}") for text in false(shared, network))


def test_parts_by_largest_remainder():
    assert largest_remainder(8, [2.75, 2, 2], least=1) == [3, 3, 2]
    assert largest_remainder(8, [1 / 8, 1 / 16, 1 / 8]) == [3, 2, 3]
    assert largest_remainder(4, [100, 1, 1], least=1) == [2, 1, 1]
    assert largest_remainder(2, [1, 1, 1]) == [1, 1, 0]


# ------------------------------------------------------------------------------------------------------- worked by hand


def test_a_toy_has_the_stages_and_the_seconds_that_come_out_by_hand():
    """Between neighbouring sites a unit takes 1 and 2 s one way, inside a site 0.1 s, to a worker beside it 1 s; a
    machine holds three layers, so that 8 need three stages."""
    problem = toy()
    found = search(problem, PoolOptions("consistent"), None, 0)
    assert found.chosen.n_stages == 3
    names = [device.name for device in problem.network.devices]
    a, b, c = found.chosen.staged.stages
    told = [
        (one.lo, one.hi, *([names[d] for d in row] for row in (one.front, one.back, one.workers))) for one in (a, b, c)
    ]
    # Power 2 + 0.75, 2, 1.5 + 0.5 of 6.75: of 8 layers 3.26, 2.37, 2.37. A lone server owns both sides.
    assert told == [
        (0, 3, ["a1"], ["a2"], ["w1"]),
        (3, 6, ["b1"], ["b1"], []),
        (6, 8, ["c1"], ["c2"], ["w2"]),
    ]
    units = {names[d]: n for one in (a, b, c) for d, n in one.units.items()}
    assert units == {"a1": 3, "a2": 3, "w1": 2, "b1": 8, "c1": 3, "c2": 2, "w2": 3}
    seconds = [(one.forward.total_s, one.backward.total_s, one.hop_s) for one in found.chosen.cost.stages]
    assert seconds == [
        # w1 has 2 units from a1 and on to a2; a1 and a2 have 3, of 9 s each; 8 units go to b1 and back
        pytest.approx((2 + 2 + 6, 0.3 + 27, 16)),
        pytest.approx((12, 36, 32)),
        pytest.approx((3 + 3 + 6, 0.2 + 24, 0)),  # w2, then c2 of half the power
    ]
    assert found.chosen.cost.total_s == pytest.approx(2 * (12 + 36 + 32))
    assert found.chosen.path_s == pytest.approx(2 + 4)
    ideal_s = 8 * 32 / 5.5  # of a mini-batch, by the power of the reliable machines
    assert found.chosen.search_s == pytest.approx(2 * (32 + ideal_s))
    assert problem.available.tolist() == [1, 1, 1, 1, 1, 0.75, 0.5]  # one that goes does so at any moment alike
    # b1 also keeps 16 activations and 16 gradients of 0.125 GB. With 33 GB it cannot hold three layers, of 10 GB each.
    cramped = replace(problem, room_bytes=(33e9,) * len(names))
    stages = search(cramped, PoolOptions(), 3, 0).chosen.staged.stages
    assert [(one.lo, one.hi) for one in stages] == [(0, 3), (3, 5), (5, 8)]
    # As printed, each further split seems to save time, though its stages take as long.
    printed = search(problem, PoolOptions("paper"), None, 0)
    assert [level.search_s for level in printed.levels[2:]] == pytest.approx(
        [2 * (32 + ideal_s / p) for p in (3, 4, 5)]
    )
    assert printed.chosen.n_stages == 5


def test_the_mixed_cluster_is_planned_in_its_three_sites():
    problem = Cluster(precision="bf16", host_gb=192).problem
    for n_stages, options in ((None, PoolOptions("consistent")), (3, PoolOptions("paper"))):
        level = search(problem, options, n_stages, 0).chosen
        sites = [{problem.network.devices[d].region for d in row} for row in level.clusters]
        assert sorted(map(sorted, sites)) == [["campus"], ["cloud"], ["standalone"]]
        standalone = level.staged.stages[sites.index({"standalone"})]
        assert [len(one.workers) for one in level.staged.stages if one != standalone] == [0, 0]
        assert len(standalone.workers) == 4
    # By Eq. 1-2 in full, without a limit of memory, three stages are no worse than two or four.
    seconds = {n: search(Cluster("bf16").problem, PoolOptions(), n, 0).chosen.cost.total_s for n in (2, 3, 4)}
    assert seconds[3] < 0.9 * seconds[2]
    assert seconds[3] <= seconds[4] * (1 + 1e-9)


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_decides_how_many_stages_and_who_can_be_a_worker():
    network = mixed(0)
    assert planned(network, options=PoolOptions("consistent")).plan.n_stages == 1
    small = tuple(replace(device, memory_bytes=150_000_000) for device in network.devices)
    limited = replace(network, devices=small)
    found = planned(limited, options=PoolOptions("consistent"))
    assert found.plan.n_stages > 1
    assert found.levels[0].step_s is None
    tiny = tuple(replace(one, memory_bytes=1_000_000) if one.name == "w2" else one for one in network.devices)
    plan = planned(replace(network, devices=tiny), 2).plan
    assert plan.found["left_out"] == ["w2"]
    assert "w2 has 0.00 GB" in plan.found["left_out_why"][0]
    assert not [one for one in planner.verify(plan, replace(network, devices=tiny)) if one.state == "FALSE"]


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "n_stages", "problem"),
    [
        (
            {"disconnect_prob": 0.5},
            None,
            "mixed: devices: all 12 have a disconnect_prob, expected at least one",
        ),
        ({"memory_bytes": 10_000_000}, None, r"memory_bytes: found no split of 8 layers over 1 to 7 stages that fits"),
        ({"memory_bytes": 10_000_000}, 2, r"memory_bytes: found no split of 8 layers over 2 stages that fits reliable"),
        ({}, 8, "--stages: got 8, expected at most 7, the devices without a disconnect_prob"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(change, n_stages, problem):
    network = mixed(0)
    changed = replace(network, devices=tuple(replace(device, **change) for device in network.devices))
    with pytest.raises(BadInput, match=problem) as refused:
        planned(changed, n_stages)
    assert "\n" not in str(refused.value)


def test_devices_without_the_links_that_they_need():
    network = mixed(0, n_reliable=4, n_workers=1, n_sites=2)
    apart = tuple(
        tuple(gbps if network.devices[a].region == network.devices[b].region else 0.0 for b, gbps in enumerate(row))
        for a, row in enumerate(network.bandwidth_gbps)
    )
    with pytest.raises(BadInput, match="mixed: bandwidth_gbps: found no plan .2 stages. that avoids"):
        planned(replace(network, bandwidth_gbps=apart), 2)


@pytest.mark.parametrize("prob", [1.5, -0.1, True, "often"])
def test_a_probability_of_disconnection_is_read_written_and_checked(prob):
    data = to_json(mixed(0))
    assert parse(json.dumps(data), "n").devices == mixed(0).devices
    assert "disconnect_prob" not in data["devices"][0]
    data["devices"][0]["disconnect_prob"] = prob
    with pytest.raises(BadInput, match=r"^n: devices\[0\].disconnect_prob: got .*, expected a number from 0 to 1"):
        parse(json.dumps(data), "n")


# --------------------------------------------------------------------------------------------------------- command line


def test_a_plan_on_the_command_line_from_start_to_verification(tmp_path, capsys):
    network, out = tmp_path / "network.json", tmp_path / "plan.json"
    network.write_text(json.dumps(to_json(mixed(1))))
    flags = ["solve", "--network", str(network), "--model", "small", "--global_batch", "64", "--out", str(out)]
    cluster = [*flags, "--solver", "cluster"]
    assert main([*cluster, "--stages", "3", "--eq3", "consistent"]) == 0
    assert main(["explain", str(out)]) == 0
    text = capsys.readouterr().out
    assert "3 stages on mixed: " in text and "stage 2: layers" in text and "Eq. 1-2 in full, s" in text
    assert main(["verify", str(out)]) == 0
    data = json.loads(out.read_text())
    for name, wrong in (("step_s", 1.0), ("path_s", 1.0), ("digest", "0" * 16)):
        false = data | {"found": {POOL: data["found"][POOL] | {name: wrong}}}
        out.write_text(json.dumps(false))
        capsys.readouterr()
        assert main(["verify", str(out)]) == 1
        assert f"FALSE     {name}" in capsys.readouterr().out
    out.write_text(json.dumps(data))
    refused = {
        "--time_limit_s: got 1.0 with --solver cluster": [*cluster, "--time_limit_s", "1"],
        "--eq3: got paper with --solver auto": [*flags, "--stages", "1", "--pipelines", "2", "--eq3", "paper"],
        "--minibatches: got 5, expected a divisor of the 64": [*cluster, "--minibatches", "5"],
        "got the plan of a pool, which only": ["plot", str(out)],
        "plan.roles: got servers, front, back, workers": ["replan", "--from", str(out), "--without", "r0"],
    }
    for line, command in refused.items():
        assert main(command) == 2
        assert line in capsys.readouterr().err
