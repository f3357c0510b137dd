"""The claims of the planner are true: proofs and bounds on random networks, on networks where it once was wrong, and in
plan files that are shown with another network."""

import errno
import json
import math
from dataclasses import replace

import false_proofs
import numpy as np
import pytest
from planner_cases import FALSE_PROOFS, case

from jaxdt.run import errors
from jaxdt.run import network as networks
from planner.__main__ import main
from planner.cost.bounds import floor_s
from planner.model.problem import problem_of
from planner.model.proof import PROOF_GAP, BoundError, checked_bound, is_optimal
from planner.search.device_types import near_equal, types_of
from planner.search.incumbent import Budget, Incumbent
from planner.search.layouts import rows
from planner.search.solve import solve
from planner.search.types_sat import Effort, bound_by_clusters, cp_sat, prove_types

N_RANDOM, N_PARTS = 200, 8  # parts, so that the tests of one file can run beside each other


@pytest.mark.parametrize("part", range(N_PARTS))
def test_no_claim_about_a_random_network_is_false(part):
    seeds = range(part, N_RANDOM, N_PARTS)
    assert [line for seed in seeds for line in false_proofs.check(seed)] == []


@pytest.mark.parametrize("part", range(2))
def test_bounds_without_a_plan_are_below_the_optimum_of_random_networks(part):
    """The floors, and bounds of clusters by CP-SAT: against the optimum, or where there is none, against no plan."""
    for seed in range(part, 60, 2):
        instance = false_proofs.random_instance(seed)
        least_s = false_proofs.optimum_s(instance)
        problem = false_proofs.problem_of_instance(instance)
        incumbent = Incumbent(Budget(None, 1000), problem.missing_s)
        bound_by_clusters(problem, incumbent, lambda: math.inf, 0.3, 0)
        for bound_s in (floor_s(problem), incumbent.bound_s):
            assert bound_s <= least_s * (1 + 1e-9), seed


SMALL = {"tiny9": ((2, 2), (1e8, 1e8), 8.0), "rack8": ((4, 2), (1e6, 5e5), 0.000512)}
LARGER = {"miss14": ((6, 3), 40.6211), "miss4": ((3, 6), 38.7288)}  # of 18 devices; the costs that auto finds


@pytest.mark.parametrize("solver", false_proofs.BUDGETS)
@pytest.mark.parametrize("name", SMALL)
def test_small_networks_of_false_proofs(name, solver):
    shape, sizes, optimum_s = SMALL[name]
    instance = false_proofs.Instance(networks.load(FALSE_PROOFS / f"{name}.json"), *shape, *sizes)
    least_s = false_proofs.optimum_s(instance)
    assert least_s == pytest.approx(optimum_s, rel=1e-3)
    assert false_proofs.false_claims(instance, solver, least_s) == []


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("name", LARGER)
def test_larger_networks_of_false_proofs(name, linear):
    """CP-SAT's bound is below a plan that is known, and it does not say that there is none."""
    shape, known_s = LARGER[name]
    problem = problem_of(networks.load(FALSE_PROOFS / f"{name}.json"), *shape, 6.5e8, 4.7e8)
    incumbent = Incumbent(Budget(None, 1000), problem.missing_s)
    types = types_of(problem, np.arange(18), np.min)
    prove_types(problem, types, incumbent, cp_sat(math.inf, Effort(linear, 0.3), 0))
    assert incumbent.bound_s <= known_s
    assert incumbent.best_s < problem.missing_s or incumbent.bound_s < problem.missing_s


def cut_off(problem_case, n_cut):
    """The network with n_cut devices that have no links."""
    alone = np.arange(problem_case.n_devices) < n_cut
    bandwidth = np.where(alone[:, None] | alone[None, :], 0.0, np.array(problem_case.bandwidth_gbps))
    return replace(problem_case, bandwidth_gbps=tuple(map(tuple, bandwidth.tolist())))


@pytest.mark.parametrize("solver", ["types", "auto"])
def test_24_devices_one_of_which_has_no_link_have_no_plan(solver):
    problem = problem_of(cut_off(case("small_random24"), 1), 4, 6, 6.5e8, 4.7e8)
    solution = solve(problem, Incumbent(Budget(None, 4_000)), solver, 0)
    assert math.isinf(solution.cost_s)
    assert math.isinf(solution.bound_s)
    assert not solution.proved


def test_clusters_too_bound_networks_of_a_large_scale():
    """Costs of 1e-6 and 1e6 s: units follow the limit, so a bound is as tight on every scale."""
    bounds = []
    for scale in (1e-6, 1.0, 1e6):
        network = case("small_random24")
        latency_s = tuple(tuple(scale * s for s in row) for row in network.latency_s)
        problem = problem_of(replace(network, latency_s=latency_s), 4, 6, 6.5e8 * scale, 4.7e8 * scale)
        incumbent = Incumbent(Budget(None, 1000), problem.missing_s)
        incumbent.offer(rows(problem), 60.0 * scale)
        types = types_of(problem, near_equal(problem, 3)[-1], np.min)
        assert prove_types(problem, types, incumbent, cp_sat(math.inf, Effort(True, 30.0), 0))
        bounds.append(incumbent.bound_s / scale)
    assert bounds == pytest.approx([bounds[0]] * 3, rel=PROOF_GAP)


# ------------------------------------------------------------------------------------------ what cannot be true raises


def test_a_bound_above_a_cost_raises_with_both_numbers():
    assert checked_bound(2.0, 3.0) == 2.0
    assert checked_bound(3.0 * (1 + 1e-12), 3.0) == 3.0
    with pytest.raises(BoundError, match=r"3\.1 s.*3\.0 s"):
        checked_bound(3.1, 3.0)


def test_a_solver_that_proves_too_much_is_refused():
    problem = problem_of(case("dtfm_debug_8"), 4, 2, 6.5e8, 4.7e8)
    incumbent = Incumbent(Budget(None, 10))
    incumbent.raise_bound(1e3)
    with pytest.raises(BoundError, match="1000"):
        solve(problem, incumbent, "random", 0)


def test_the_gap_of_a_proof_is_relative():
    assert is_optimal(0.000512, 0.000512 * (1 - 1e-7))
    assert not is_optimal(0.001058, 0.000512)
    assert is_optimal(0.0, 0.0)
    assert not is_optimal(math.inf, 0.0)


# ------------------------------------------------------------------------------------------------- claims in plan files

SIZES = ["--c_dp_bytes", "1e6", "--c_pp_bytes", "5e5"]


@pytest.fixture
def proved_plan(tmp_path):
    out = tmp_path / "plan.json"
    shape = ["--stages", "4", "--pipelines", "2"]
    network = str(FALSE_PROOFS / "rack8.json")
    assert main(["solve", "--network", network, *shape, *SIZES, "--solver", "exact", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["proved"]
    return out


def faster(tmp_path):
    """rack8 with other bandwidths, but the same devices."""
    data = json.loads((FALSE_PROOFS / "rack8.json").read_text())
    data["bandwidth_gbps"] = [[2 * gbps for gbps in row] for row in data["bandwidth_gbps"]]
    path = tmp_path / "faster.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_a_proof_is_not_kept_for_another_network(proved_plan, tmp_path, capsys):
    assert main(["explain", str(proved_plan)]) == 0
    assert "(proved)" in capsys.readouterr().out
    assert main(["explain", str(proved_plan), "--network", faster(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "proved" not in text
    assert "another network" in text


def test_a_proof_is_not_kept_for_other_sizes(proved_plan, capsys):
    data = json.loads(proved_plan.read_text())
    proved_plan.write_text(json.dumps(data | {"c_dp_bytes": 2e6}))
    assert main(["explain", str(proved_plan)]) == 0
    assert "proved" not in capsys.readouterr().out


def test_there_is_no_plan_is_said_apart_from_none_found(tmp_path, capsys):
    """Two pairs of devices without a link between the pairs: floors do not see that 2 x 2 needs one."""
    data = json.loads((FALSE_PROOFS / "tiny9.json").read_text())
    data["bandwidth_gbps"] = [[0.4 * (a // 2 == b // 2) for b in range(4)] for a in range(4)]
    path = tmp_path / "network.json"
    path.write_text(json.dumps(data))
    flags = ["--stages", "2", "--pipelines", "2", *SIZES, "--evaluations", "50"]
    for solver, said in (("exact", "there is no plan (proved)"), ("random", "found no plan")):
        assert main(["solve", "--network", str(path), *flags, "--solver", solver]) == 2
        error = capsys.readouterr().err.strip()
        assert said in error
        assert error.count("\n") == 0


def edited(plan, **changes):
    plan.write_text(json.dumps(json.loads(plan.read_text()) | changes))
    return str(plan)


def test_a_true_plan_is_verified_by_enumeration(proved_plan, capsys):
    assert main(["verify", str(proved_plan)]) == 0
    text = capsys.readouterr().out
    assert "FALSE" not in text
    assert "the optimum by enumeration" in text


FALSE_CLAIMS = {
    "cost": {"cost": {"total_s": 0.0005, "datap_s": 0.0, "pipelinep_s": 0.0005}},
    "bound": {"bound_s": 0.0006},
    "gap": {"gap": 0.5},
    "proof": {"bound_s": 0.0004},
    "sizes": {"c_dp_bytes": 5e5},
}


@pytest.mark.parametrize("name", FALSE_CLAIMS)
def test_a_false_claim_of_a_plan_is_found(name, proved_plan, capsys):
    assert main(["verify", edited(proved_plan, **FALSE_CLAIMS[name])]) == 1
    assert "FALSE" in capsys.readouterr().out


NO_CLAIMS = {
    "bound_s: got nan, expected a number >= 0": {"bound_s": math.nan},
    "bound_s: got -1.0, expected a number >= 0": {"bound_s": -1.0},
    "c_dp_bytes: got -1.0, expected a finite number >= 0": {"c_dp_bytes": -1.0},
    "gap: got inf, expected a finite number": {"gap": math.inf},
    "cost.total_s: got nan, expected a number": {"cost": {"total_s": math.nan, "datap_s": 0.0, "pipelinep_s": 0.0}},
    "exchanges_per_step: got 'x', expected a finite number": {"found": {"exchanges_per_step": "x"}},
    "has 8 devices, the plan uses device 8": {"placement": [[8, 1], [2, 3], [4, 5], [6, 7]]},
}


@pytest.mark.parametrize("line", NO_CLAIMS)
def test_a_plan_that_claims_no_number_or_uses_no_device_is_refused(line, proved_plan, capsys):
    plan = edited(proved_plan, **NO_CLAIMS[line])
    capsys.readouterr()
    for command in (["explain", plan], ["verify", plan], ["plot", plan], ["compare", plan, plan]):
        assert main(command) == 2, command
        error = capsys.readouterr().err
        assert line in error and error.count("\n") == 1, (command, error)


def test_a_plan_is_compared_with_one_of_the_networks_devices_only(proved_plan, tmp_path, capsys):
    wrong = tmp_path / "wrong.json"
    wrong.write_text(proved_plan.read_text())
    edited(wrong, **NO_CLAIMS["has 8 devices, the plan uses device 8"])
    assert main(["compare", str(wrong), str(proved_plan)]) == 2
    assert f"{wrong}: network " in capsys.readouterr().err
    assert main(["replan", "--from", str(wrong), "--evaluations", "1"]) == 2
    assert "plan: network " in capsys.readouterr().err


def test_a_file_that_cannot_be_written_says_why_before_the_search(tmp_path, monkeypatch, capsys):
    def refuses(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(errors.tempfile, "TemporaryFile", refuses)
    assert main(["solve", "--network", str(FALSE_PROOFS / "rack8.json"), "--out", str(tmp_path / "plan.json")]) == 2
    assert "plan.json cannot be written (Read-only file system)" in capsys.readouterr().err


def test_a_bound_between_floor_and_cost_is_refuted_by_enumeration(tmp_path, capsys):
    """A plan that is not optimal, with a bound just below its own cost."""
    out = tmp_path / "plan.json"
    flags = ["--stages", "4", "--pipelines", "2", *SIZES, "--solver", "random", "--evaluations", "1"]
    assert main(["solve", "--network", str(FALSE_PROOFS / "rack8.json"), *flags, "--out", str(out)]) == 0
    cost_s = json.loads(out.read_text())["cost"]["total_s"]
    assert cost_s > 0.00052
    bound_s = cost_s * (1 - 1e-8)
    assert main(["verify", edited(out, bound_s=bound_s, gap=(cost_s - bound_s) / bound_s, proved=True)]) == 1
    assert capsys.readouterr().out.count("FALSE") == 1


def test_a_plan_is_not_verified_on_another_network(proved_plan, tmp_path, capsys):
    assert main(["verify", str(proved_plan), "--network", faster(tmp_path)]) == 1
    assert "another network" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "none.json")]) == 2
