"""The compression ablation: its grid, its arithmetic against the engine's, its results file, its tables."""

import json
import math
import multiprocessing
import queue
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiments.ablation import results, workers
from experiments.ablation.grid import AblationConfig, Case, bytes_per_step, cases, codec_of, kinds, model_of, run_of
from experiments.ablation.progress import GridProgress
from experiments.ablation.report import cost, cut_cases, quality, rows, step_seconds, steps_to, value_at
from experiments.ablation.train import chain_of
from experiments.page import append
from forks import run_scripts
from report_fields import report_fields

from jaxdt.build import RunStart, build_coordinator, build_peer
from jaxdt.model.batches import Batch
from jaxdt.run import config as configs
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Link
from jaxdt.runtime.storage.store import Store
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.sim_peer import Environment, SimPeer

START = RunStart("r")

ROOT = Path(__file__).resolve().parents[2]
MODEL = dict(preset="debug", n_layers=4, d_model=32, n_heads=2, d_ff=64, max_len=16, vocab_size=64)
N_MICROBATCHES, N_STEPS = 3, 4


def make_config(**model):
    return configs.parse(
        {
            "model": MODEL | model,
            "plan": {"microbatches": N_MICROBATCHES},
            "train": {"steps": N_STEPS, "microbatch_size": 2},
            "optim": {"lr": 3e-3, "eps": 1e-6, "clip_norm": 0.5},
            "net": {"heartbeat_s": 50.0, "deadline_floor_s": 1000.0},
            "remat": "dots",
        }
    )


# --------------------------------------------------------------------------------------------------------------- grid


def test_the_grid_of_the_paper():
    grid = cases(AblationConfig())
    assert len(grid) == len(set(grid)) == 3 * (1 + 2 + 2 + 4 + 4)
    assert [case.seed for case in grid] == sorted(case.seed for case in grid)
    assert {(case.stages, case.ratio) for case in grid if case.method == "maxout"} == {(2, 2), (4, 2), (2, 4), (4, 4)}
    assert {case.ratio for case in grid if case.method.startswith("int8")} == {2}


def test_layers_stand_at_the_cuts_and_codecs_are_no_part_of_the_model():
    config = make_config()
    assert model_of(config, Case("maxout", 4, 2)).compression_after == (1, 2, 3)
    assert model_of(config, Case("bottleneck", 2, 4)).compression == "bottleneck4"
    assert model_of(config, Case("int8", 4, 2)) == config.model
    assert [codec_of(Case(method, 2, 2)).name for method in ("none", "maxout", "int8-dynamic")] == [
        "none",
        "none",
        "int8-dynamic",
    ]


@pytest.mark.parametrize(
    ("case", "per_tensor"),
    [
        (Case("none", 2, 1), 4 * 1024),
        (Case("bottleneck", 2, 2), 2 * 1024),
        (Case("maxout", 2, 4), 1024),
        (Case("int8", 2, 2), 1024 + 4 * 4),
        (Case("int8-dynamic", 2, 2), 1024 + 4),
    ],
)
def test_bytes_of_a_step(case, per_tensor):
    """A boundary tensor has 2 x 16 x 32 numbers; each microbatch sends one there and one back over each boundary."""
    assert bytes_per_step(make_config(), case) == 2 * N_MICROBATCHES * per_tensor
    assert bytes_per_step(make_config(), replace(case, stages=4)) == 3 * 2 * N_MICROBATCHES * per_tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("int8",)}, "ablation.methods: expected 'none' among them"),
        ({"methods": ("none", "fp4")}, "ablation.methods: got 'fp4'"),
        ({"seeds": 0}, "ablation.seeds: got 0"),
        ({"stages": ()}, "ablation.stages: got none"),
        ({"stages": (1,)}, "numbers of stages >= 2"),
        ({"target_frac": 0.0}, "ablation.target_frac: got 0.0"),
    ],
)
def test_a_wrong_grid_is_refused(change, message):
    with pytest.raises(BadInput, match=message):
        AblationConfig(**change)


# --------------------------------------------------------------------------------------------------------- arithmetic


class Tokens:
    """Random text in which a token often follows from the one before it."""

    counts_all = True

    def train_batch(self, seed, step, microbatch, microbatch_size, seq_len, n_microbatches):
        rng = np.random.default_rng((seed, step, microbatch))
        shape = (microbatch_size, seq_len + 1)
        return np.cumsum(1 + rng.integers(0, 64, shape) * (rng.random(shape) < 0.3), axis=1).astype(np.int32) % 64


def engine_losses(config, plan, stages):
    """The losses of the machines and the store in the simulator."""
    peers = {}
    for peer in plan.peers:
        store = Store(config, plan, peer, Tokens(), stages[plan.seat(peer)[0]])
        peers[peer] = SimPeer(build_peer(config, plan, peer, START), store, f"h{peer}", dict.fromkeys("FBEGU", 1.0))
    link = lambda src, dst: Link(0.1, 1e-4)  # noqa: E731
    environment = Environment(link, cores={peer.host: 1 for peer in peers.values()})
    simulation = Simulation(build_coordinator(config, plan, START), peers, environment)
    return [fields["loss"] for fields in report_fields(simulation.run(), "step")]


def test_a_chain_does_the_arithmetic_of_a_real_run():
    """The codec both ways, the order of the microbatches, the tied table, clipping and the update."""
    config, case = make_config(tied_head=True), Case("int8", 2, 2, 5)
    chain, data, losses = chain_of(config, case), Tokens(), []
    for step in range(N_STEPS):
        batch = [data.train_batch(case.seed, step, m, 2, 16, N_MICROBATCHES) for m in range(N_MICROBATCHES)]
        losses.append(chain.step([Batch(tokens_BT) for tokens_BT in batch]))
    np.testing.assert_allclose(losses, engine_losses(*run_of(config, case), chain.stages), rtol=1e-6)
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------------------------------------------- results file


def test_results_go_on_after_a_torn_line(tmp_path):
    path = tmp_path / "results.jsonl"
    records = [{"case": vars(Case("int8", 2, 2, seed)), "config": "a", "eval": [[0, 5.0]]} for seed in range(3)]
    for record in records[:2]:
        append(path, record)
    with path.open("a") as file:
        file.write('{"case": {"method"')
    assert list(results.load(path, "a").values()) == records[:2]
    append(path, records[2])
    assert list(results.load(path, "a").values()) == records
    assert list(results.load(path, "a")) == [Case("int8", 2, 2, seed) for seed in range(3)]
    assert results.load(tmp_path / "none.jsonl", "a") == {}


def test_results_of_another_config_are_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    append(path, {"case": vars(Case("int8", 2, 2)), "config": "a"})
    with pytest.raises(BadInput, match="results.jsonl:1: made with config a, this one is b"):
        results.load(path, "b")
    path.write_text('{"case": 1}\n')
    with pytest.raises(BadInput, match="results.jsonl:1: got no result"):
        results.load(path, "a")


def test_the_fingerprint_is_of_what_decides_a_run():
    config = make_config()
    same = replace(config, remat="recompute", train=replace(config.train, seed=9))
    others = [replace(config, train=replace(config.train, steps=9)), make_config(d_ff=128)]
    marks = [results.fingerprint(other, "sum") for other in (config, same, *others)]
    assert marks[0] == marks[1] and len(set(marks)) == 3
    assert results.fingerprint(config, "other") != marks[0]


# ------------------------------------------------------------------------------------------------------------- tables


CURVE = [[0, 5.0], [10, 3.0], [20, 2.0]]


def test_where_a_curve_stands():
    assert [value_at(CURVE, step) for step in (0, 5, 20, 99)] == [5.0, 4.0, 2.0, 2.0]
    assert [steps_to(CURVE, target) for target in (9.0, 4.0, 2.0, 1.9)] == [0.0, 5.0, 20.0, None]


@pytest.fixture
def found():
    """Two seeds, the second 0.2 worse; int8 as good as none, maxout 0.5 worse."""
    config, ablation = make_config(), AblationConfig(("none", "int8", "maxout"), (2,), (2,), 2, 2, 0.5, (0.1, math.inf))
    config = replace(config, train=replace(config.train, steps=20))
    worse, finished = {"none": 0.0, "int8": 0.0, "maxout": 0.5}, {}
    for case in cases(ablation):
        late = worse[case.method] + 0.2 * case.seed
        finished[case] = {"eval": [[step, loss + (late if step else 0)] for step, loss in CURVE]}
    parts = {}
    for n in range(2):
        for case in kinds(ablation):
            parts[replace(case, seed=n)] = {"encode_s": 0.001, "decode_s": 0.002, "step_s": [0.5 + n, 0.25]}
        parts[Case("none", 2, 1, n)] = {"encode_s": 0.0, "decode_s": 0.0, "step_s": [2.0, 0.25]}
    return config, ablation, rows(config, ablation, finished, parts)


def test_rows_compare_a_seed_with_the_same_seed(found):
    _, _, (none, int8, maxout) = found
    assert (none.case, int8.case, maxout.case) == (Case("none", 2, 1), Case("int8", 2, 2), Case("maxout", 2, 2))
    assert int8.loss_differences == (0.0, 0.0)
    assert maxout.loss_differences == pytest.approx((0.5, 0.5))
    assert maxout.perplexities == pytest.approx((math.exp(2.5), math.exp(2.7)))
    # The targets are the baselines' losses at half of the steps, 3.0 and 3.2; from there on they fall by 0.1 a step.
    assert none.steps_to_target == pytest.approx((10, 10))
    assert maxout.steps_to_target == pytest.approx((15, 15))
    assert maxout.target_steps == pytest.approx(15)


def test_tables_of_markdown(found):
    config, ablation, table = found
    lines = quality(ablation, table).splitlines()
    assert lines[0] == "| held-out perplexity | 2 stages 2x |"
    assert lines[2] == "| none | 8.21 +- 1.16 |"
    assert lines[4].startswith("| maxout | 13.53 +- ")
    lines = cost(config, ablation, table).splitlines()
    assert "| step s, 100 Mb/s | step s, unlimited | target s, 100 Mb/s | target s, unlimited |" in lines[0]
    assert lines[2] == "| none | 1x | 2 | - | 10 +- 0 | 0.02 | 0.00 | 0.00 | 2.000 +- 0.000 | 0.250 +- 0.000 | 20 | 2 |"
    assert lines[3].startswith(
        "| int8 | 2x (16-bit) | 2 | +0.000 +- 0.000 | 10 +- 0 | 0.01 | 1.00 | 2.00 | 1.000 +- 0.707 |"
    )


def test_a_seed_that_never_gets_there_is_counted(found):
    config, ablation, table = found
    lost = replace(table[2], steps_to_target=(12.0, None))
    line = cost(config, ablation, [*table[:2], lost]).splitlines()[4]
    assert "| 1 of 2 seeds |" in line and line.endswith("| - | - |")


def test_step_seconds_count_codec_and_wire():
    """At 1 Mb/s the wire is what takes the time: int8 sends about a quarter. Unlimited, its seconds come on top."""
    config = make_config()
    stage = {"F": 0.001, "B": 0.002, "E": 0.001, "G": 0.0, "U": 0.0}
    none = {"seconds": [stage, stage | {"F": 0.0}], "encode_s": 0.0, "decode_s": 0.0}
    int8 = none | {"encode_s": 0.0005, "decode_s": 0.0005}
    cut = (Case("none", 2, 1), Case("int8", 2, 2))
    slow, fast = ([step_seconds(config, case, p, gbps) for case, p in zip(cut, (none, int8), strict=True)]
                  for gbps in (0.001, math.inf))  # fmt: skip
    assert 0.2 < slow[1] / slow[0] < 0.4
    assert fast[0] < fast[1] < fast[0] + 3 * 4 * 0.0005 + 1e-6
    assert fast[0] == pytest.approx(0.001 + 3 * 0.002 + 0.002, rel=0.3)


# ------------------------------------------------------------------------------------------------------------- script


def test_a_worker_says_that_a_model_compiles_and_an_interruption_what_is_lost(monkeypatch):
    """One worker in this process, with a `train` that only counts its steps."""

    def train(config, case, data, on_step):
        del config, data
        for step in range(2):
            on_step(step)
        return {"case": vars(case)}

    monkeypatch.setattr("experiments.ablation.train.train", train)
    monkeypatch.setattr(workers, "open_data", lambda path: None)
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    monkeypatch.setattr(workers.multiprocessing, "parent_process", multiprocessing.current_process)
    first, second = Case("none", 2, 1), Case("int8", 2, 2)
    tasks, messages = queue.Queue(), queue.Queue()
    for case in (first, second, None):
        tasks.put(case)
    workers._work(make_config(), Path("x"), [], tasks, messages)
    progress, said = GridProgress(39, 0, 2), []
    for message in list(messages.queue)[:-1]:
        progress.heard(0.0, *message)
        said += [progress.description(case) for case in progress.under_way]
    assert said == [f"{first}: compiles", str(first), str(first), f"{second}: compiles", str(second), str(second)]
    finished = "1 of 39 models finished, the same command continues with the others"
    assert progress.text == f"{finished}; what is under way, at 2 of 2 steps, starts again"
    assert progress.state == "1 of 39 models finished, under way, at 2 of 2 steps"
    progress.heard(0.0, "done", second, {})
    assert progress.state == "2 of 39 models finished"
    assert progress.text == f"2{finished[1:]}"


def test_the_time_left_is_said_once_a_model_has_done_two_steps():
    """Two at a time, which take 10 s to start and 10 s a step; ten are left of twelve, two are of an earlier start."""
    first, second, third = Case("none", 2, 1), Case("int8", 2, 2), Case("bf16", 2, 3)
    progress = GridProgress(n_models=12, n_finished=2, n_steps=4)
    for step in range(3):
        assert progress.left_s(15.0) is None
        for case in (first, second):
            progress.heard(5.0 + (step and 10.0 * (step + 1)), "steps", case, step)
    assert progress.left_s(35.0) == (20.0 + 3 * 10.0) * (10 - 1) / 2
    progress.heard(60.0, "done", first, {})
    progress.heard(60.0, "done", second, {})
    assert progress.left_s(60.0) == 60.0 * 8 / 2
    progress.heard(75.0, "steps", third, 2)
    assert progress.left_s(75.0) == 75.0 * 7.5 / 2.5


def ablate(*flags):
    command = [str(ROOT / "scripts/ablate.py"), f"--config={ROOT / 'configs/ablation.py'}", *flags]
    ((code, _, err),) = run_scripts([command], ROOT)
    assert code == 0, err


@pytest.mark.slow
def test_the_script_trains_measures_and_draws(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"torn')
    flags = ["model.n_layers=2", "model.d_model=16", "data.seq_len=16", "model.n_heads=2"]
    command = [f"--config.{flag}" for flag in flags]
    command += [f"--run_dir={tmp_path}", "--config.train.steps=4", "--config.optim.warmup_steps=1"]
    command += ["--config.ablation.methods=('none',)", "--config.ablation.stages=(2,)"]
    command += ["--config.ablation.seeds=1", "--config.ablation.workers=1", "--config.train.eval_microbatches=1"]
    ablate(*command, "--config.ablation.measurements=2", "--page=Somewhere, at commit x.")
    (record,) = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert record["case"] == vars(Case("none", 1, 1))
    assert [step for step, _ in record["eval"]] == [0, 4]
    parts, _ = [json.loads(line) for line in (tmp_path / "timings.jsonl").read_text().splitlines()]
    assert len(parts["seconds"]) == 2 and all(own["B"] > 0 for own in parts["seconds"])
    assert (tmp_path / "table.md").read_text().count("| none |") == 2
    assert "for all). Somewhere, at commit x.\n" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_committed_page_is_what_its_raw_data_give(tmp_path):
    committed = ROOT / "configs/ablation"
    page = (committed / "README.md").read_text()
    about = page.partition("for all). ")[2].partition("\n\n")[0]
    for name in ("results.jsonl", "timings.jsonl"):
        shutil.copy(committed / name, tmp_path)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == len(cases(AblationConfig()))
    n_timings = AblationConfig().measurements * len(cut_cases(AblationConfig()))
    assert len((tmp_path / "timings.jsonl").read_text().splitlines()) == n_timings
    ablate(f"--run_dir={tmp_path}", f"--page={about}")
    assert (tmp_path / "README.md").read_text() == page
