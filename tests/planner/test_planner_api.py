"""The planner as a library: one result for both objectives, threads, interrupts, callbacks, lazy imports."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from planner_cases import C_DP, C_PP, NETWORKS, case

import planner
from jaxdt.run.config import PlanConfig, RunConfig, SyncConfig, TrainConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.optim import OptimConfig
from jaxdt.run.plan import Plan
from jaxdt.run.profile import from_flops
from jaxdt.sim.scenario import Scenario, memory_bytes
from planner.cost.reference import cost_of
from planner.model.generate import generate
from planner.step_time.workload import StepWorkload

ROOT = Path(__file__).resolve().parents[2]
BYTES = planner.ByteSizes(C_DP, C_PP)
JOB = planner.Job(BYTES, n_stages=4, n_pipelines=4)


def step_job(network, n_stages=2, n_pipelines=2):
    run = planner.run_of_model("small", planner.StepOptions(global_batch=16))
    return planner.Job(run, n_stages, n_pipelines, planner.profile_of_flops(run, network, 1e12))


def test_a_result_says_what_was_found_and_how(capfd):
    network = case("small_gaming16")
    result = planner.solve(network, JOB, planner.Stop(evaluations=20_000))
    assert capfd.readouterr() == ("", "")
    cost = cost_of(network, result.plan.placement, C_DP, C_PP)
    assert result.cost == cost
    assert result.score_s == cost.total_s
    assert result.objective == "comm_cost"
    assert result.proved
    assert result.gap <= 1e-6
    assert result.step_s is None
    assert result.statistics.evaluations >= 20_000
    assert not result.statistics.interrupted
    assert {"layouts", "exact"} <= set(result.by_solver)  # annealing may find the optimum after them
    for history in (result.history, *result.by_solver.values()):
        scores = [score_s for _, score_s in history]
        assert scores == sorted(scores, reverse=True)
    assert min(history[-1][1] for history in result.by_solver.values()) == pytest.approx(result.score_s)


def test_the_same_result_by_step_time(capfd):
    network = case("four_cities")
    result = planner.solve(network, step_job(network), planner.Stop(evaluations=2000))
    assert capfd.readouterr() == ("", "")
    assert result.objective == "step_time"
    assert result.score_s == result.step_s == result.finalists[0].step_s
    assert result.cost == result.finalists[0].cost
    assert result.plan.found["step_s"] == result.step_s


def test_searches_in_threads_beside_each_other_give_what_they_give_alone():
    network = case("small_gaming16")

    def placement(seed):
        return planner.solve(network, JOB, planner.Stop(evaluations=5000), seed, "evolve").plan.placement

    alone = [placement(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(placement, range(3))) == alone


@pytest.mark.parametrize("objective", ["comm_cost", "step_time"])
def test_an_interrupt_from_another_thread_ends_the_search_with_its_best_plan(objective):
    network = generate("jitter", 24, 0)
    job = planner.Job(BYTES, 4, 6) if objective == "comm_cost" else step_job(network, 4, 6)
    stop = planner.Stop(time_s=3600)
    seen = []

    def on_progress(progress):
        seen.append(progress)
        found = progress.starts or progress
        if found.best_s is not None and found.evaluations > 0:
            stop.interrupt()

    result = planner.solve(network, job, stop, solver="random", on_progress=on_progress)
    assert sorted(result.plan.peers) == list(range(24))
    assert result.statistics.interrupted
    assert {progress.objective for progress in seen} == {objective}
    assert any(p.best_s is not None and p.evaluations > 0 for p in (one.starts or one for one in seen))


def test_an_interrupt_before_the_search_gives_some_plan():
    stop = planner.Stop(time_s=3600)
    stop.interrupt()
    result = planner.solve(generate("jitter", 24, 0), planner.Job(BYTES, 4, 6), stop)
    assert sorted(result.plan.peers) == list(range(24))


def test_an_error_of_the_callback_ends_the_search_and_is_raised():
    def on_progress(progress):
        raise ZeroDivisionError("mine")

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="mine"):
        planner.solve(case("small_random24"), planner.Job(BYTES, 4, 6), planner.Stop(3600), on_progress=on_progress)
    assert threading.active_count() == before


WRONG = {
    "auto by cost": (lambda: planner.Job(BYTES, None, 4), "Eq. 1-4 do not compare shapes"),
    "no stage": (lambda: planner.Job(BYTES, 0, 4), "--stages: got 0"),
    "time": (lambda: planner.Stop(time_s=-1), "--time_limit_s: got -1"),
    "solver": (lambda: planner.solve(case("four_cities"), JOB, solver="typos"), "--solver: got 'typos'"),
    "shape": (lambda: planner.solve(case("four_cities"), JOB), "4 x 4 = 16"),
    "batch": (lambda: planner.run_of_model("small", planner.StepOptions(10, 3)), "--microbatch_size: got 3"),
    "name": (lambda: planner.Job("small", 2, 2, from_flops(GPTConfig.of("small"), 1, {"": 1e12}, 1.0)), "step_time"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_job_that_makes_no_sense_is_one_line(name):
    call, expected = WRONG[name]
    with pytest.raises(BadInput) as error:
        call()
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_saved_plan_is_explained_and_verified(tmp_path):
    network = case("small_gaming16")
    planner.save_plan(planner.solve(network, JOB, planner.Stop(evaluations=500)).plan, tmp_path / "plan.json")
    plan = planner.load_plan(tmp_path / "plan.json")
    explanation = planner.explain(plan, network)
    assert str(explanation).startswith("4 stages x 4 pipelines")
    assert explanation.suggestions[0].saved_s >= explanation.suggestions[-1].saved_s
    assert {verdict.state for verdict in planner.verify(plan, network)} == {"true"}
    with pytest.raises(BadInput, match="devices"):
        planner.explain(plan, case("four_cities"))
    with pytest.raises(BadInput, match="cost: missing"):
        planner.explain(Plan(1, ((0, 1),), ((0,),), (1,), found={"c_dp_bytes": 1.0, "c_pp_bytes": 1.0}), network)


LAZY = """
import sys
import planner
assert not {"numpy", "numba", "ortools", "ml_collections"} & set(sys.modules)
assert set(planner.__all__) <= set(dir(planner))
network = planner.load_network(sys.argv[1])
planner.Job(planner.ByteSizes(1.0, 1.0), 2, 2), planner.Stop(1.0)
planner.solve  # its module; the search comes with the first call
assert not {"numpy", "numba", "ortools"} & set(sys.modules)
for name in planner.__all__:
    assert getattr(planner, name).__doc__, name
"""


def test_importing_the_planner_is_cheap():
    command = [sys.executable, "-c", LAZY, str(NETWORKS / "four_cities.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_stage_needs_what_the_run_says(delay, optimizer):
    """The planner's memory of each stage is that of `simulate.py`, which is the run's own."""
    config = RunConfig(
        model=GPTConfig.of("small"),
        plan=PlanConfig(4, 2, microbatches=12),
        train=TrainConfig(microbatch_size=2),
        optim=OptimConfig(name=optimizer),
        sync=SyncConfig(delay=delay),
        dtype="bfloat16",
    )
    network = generate("homogeneous", 8, 0)
    profile = from_flops(config.model, 2, {"": 1e12}, 0.5, dtype="bfloat16")
    workload = StepWorkload(network, profile, config)
    plan = Plan(
        n_layers=8,
        stages=((0, 3), (3, 5), (5, 6), (6, 8)),
        placement=((0, 1), (2, 3), (4, 5), (6, 7)),
        shares=(5, 7),
        in_flight=(6, 3, 2, 1),
        codec=("none",) * 3,
    )
    needs = memory_bytes(Scenario(config, plan, profile, network))
    loads = workload.loads((6, 3, 2, 1), (5, 7))
    for (lo, hi), load, row in zip(plan.stages, loads, plan.placement, strict=True):
        assert workload.stage_bytes(lo, hi, load) == max(needs[peer] for peer in row)
