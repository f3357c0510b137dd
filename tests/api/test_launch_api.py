"""`from jaxdt import launch`: a config object in, a handle with metrics, wait and stop; lazy imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fleets import write_config
from fork_server import FORKS

import jaxdt
from jaxdt.api import launch as api
from jaxdt.api.config import fields_of
from jaxdt.model.data import write_tokens
from jaxdt.protocol import events as ev
from jaxdt.run.config import RunConfig, parse
from jaxdt.run.errors import BadInput
from jaxdt.run.exit_codes import ExitCode
from jaxdt.runtime import fleet
from jaxdt.runtime.storage.checkpoint import mark_complete

ROOT = Path(__file__).resolve().parents[2]

LAZY = """
import sys
import jaxdt
assert not {"numpy", "jax", "ortools", "ml_collections", "absl", "matplotlib"} & set(sys.modules)
assert set(jaxdt.__all__) == set(jaxdt._PLACES) and set(jaxdt.__all__) <= set(dir(jaxdt))
for name in jaxdt.__all__:
    assert getattr(jaxdt, name).__doc__, name
assert not {"jax", "ortools", "matplotlib", "jaxdt.cli.process_job"} & set(sys.modules)
try:
    jaxdt.lunch
except AttributeError as error:
    assert "no attribute 'lunch'" in str(error)
from jaxdt import build  # a module beside the names
"""


def test_importing_jaxdt_needs_neither_jax_nor_ortools():
    done = subprocess.run([sys.executable, "-c", LAZY], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def config(tmp_path):
    """A config object of the tests' little model, cut into one stage."""
    config = jaxdt.load_config(write_config(tmp_path))
    config.plan.stages = config.plan.pipelines = 1
    return config


def test_a_run_is_stopped_with_a_checkpoint_from_which_it_goes_on_in_the_same_process(config, tmp_path, monkeypatch):
    """Its processes are forks; tests/api/test_first_run.py executes them."""
    monkeypatch.setattr(fleet, "subprocess", FORKS)
    config.train.steps = 100_000
    run = jaxdt.launch(config, tmp_path / "run", jaxdt.LaunchOptions(emulate_forward_s=0.02))
    while len(run.metrics) < 2:
        assert run.wait(0.05) is None, run.output
    assert run.summary == {} and "coordinator at " in run.output
    run.stop()
    assert run.wait(60) == 130, run.output
    n_steps = len(run.metrics)
    assert run.summary["loss_last"] == run.metrics[-1]["loss"] and run.metrics[0]["step"] == 0

    config = jaxdt.load_config(run.run_dir / "config.py")
    config.train.steps = n_steps + 2
    plan = jaxdt.load_plan(run.run_dir / "plan.json")
    with pytest.raises(jaxdt.BadInput, match=r", or LaunchOptions\.resume, or LaunchOptions\.overwrite$"):
        jaxdt.launch(config, run.run_dir)
    launched_with = (run.run_dir / "launch.json").read_bytes()
    again = jaxdt.launch(config, run.run_dir, jaxdt.LaunchOptions(resume=True, plan=plan))
    assert again.wait(60) == 0, again.output
    assert (run.run_dir / "launch.json").read_bytes() == launched_with
    changes = f"--resume: train.steps is {n_steps + 2}, it was 100000\n"
    goes_on = f"--resume: the run continues from step {n_steps}, checkpoint {run.run_dir}/checkpoints/{n_steps:08}\n"
    assert again.output.startswith(changes + goes_on), "nothing of the first launch"
    assert again.metrics[-1]["step"] == n_steps + 1


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ({"train.steps": 0}, {}, "train.steps: got 0"),
        ({}, {"pin": 5000}, "LaunchOptions.pin: got 5000"),
        ({}, {"emulate": "none.json"}, "none.json: cannot be read"),
        ({}, {"gpus_per_peer": "two"}, "LaunchOptions.gpus_per_peer: got 'two'"),
        ({}, {"resume": True}, "holds no complete checkpoint; with LaunchOptions.overwrite the run starts again"),
        (
            {},
            {"resume": True, "overwrite": True},
            "LaunchOptions.overwrite: deletes what LaunchOptions.resume continues from",
        ),
        ({"codec": "auto", "plan.stages": 2}, {}, "codec: auto needs to know the links"),
    ],
)
def test_what_does_not_fit_is_one_line_and_starts_nothing(config, tmp_path, fields, options, expected):
    config.update_from_flattened_dict(fields)
    with pytest.raises(jaxdt.BadInput) as error:
        jaxdt.launch(config, tmp_path / "run", jaxdt.LaunchOptions(**options))
    assert expected in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run" / "logs").exists()


def test_an_installation_without_the_scripts_says_so(config, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "SCRIPTS", tmp_path)
    with pytest.raises(jaxdt.BadInput, match=r"has no train.py, expected .* pip install -e \."):
        jaxdt.launch(config, tmp_path / "run")


def test_every_config_object_gives_the_same_fields(config):
    run_config = parse(config.to_dict(), 256)
    assert isinstance(run_config, RunConfig)
    assert parse(fields_of(run_config)) == run_config == parse(fields_of(config), 256)
    assert fields_of(config.to_dict()) == fields_of(config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def get_config():\n    return 1 / 0\n", r"config.py:2: ZeroDivisionError"),
        ("def get_config():\n    return 3\n", "get_config\\(\\) returned 3"),
        ("", "has no function get_config"),
        (None, "cannot be read"),
    ],
)
def test_a_config_file_that_cannot_be_loaded_is_one_line(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "config.py").write_text(text)
    with pytest.raises(jaxdt.BadInput, match=expected):
        jaxdt.load_config(tmp_path / "config.py")


def test_a_mixture_is_read_whole_before_a_run_begins(config, tmp_path):
    numbers = np.arange(4000) % 64
    for name in ("a", "b"):
        write_tokens(tmp_path / f"{name}.tok", "x", 64, numbers, numbers)
    sources = [{"path": "a.tok", "share": 1}, {"path": "b.tok", "share": 2}]
    (tmp_path / "mix.json").write_text(json.dumps({"sources": sources}))
    config.data.path = str(tmp_path / "mix.json")
    assert api.check(config, api.LaunchOptions()).data.n_train_tokens == 8000
    damaged = bytearray((tmp_path / "b.tok").read_bytes())
    damaged[1000] ^= 1
    (tmp_path / "b.tok").write_bytes(damaged)
    with pytest.raises(BadInput, match=r"b\.tok: tokens have SHA256"):
        api.check(config, api.LaunchOptions())


@pytest.mark.parametrize(
    ("code", "reason", "has_steps", "says"),
    [
        (ExitCode.BAD_INPUT, "peer 0: No space left on device", True, True),
        (ExitCode.DIVERGED, "the gradient is not finite", True, True),
        (ExitCode.LOST, "peer 1 (stage 1): lost", True, True),
        (ExitCode.DONE, "stopped by an operator after 4 steps", True, True),
        (ExitCode.INTERRUPTED, "interrupted", False, True),
        (ExitCode.BAD_INPUT, "train.steps: got 0", False, False),  # nothing was begun
        (ExitCode.DONE, "done: 9 steps", True, False),
    ],
)
def test_every_end_before_the_last_step_says_the_way_on(tmp_path, code, reason, has_steps, says):
    class Fleet:
        def run(self):
            (tmp_path / "summary.json").write_text(json.dumps({"reason": reason}))
            return code

    mark_complete(tmp_path, ev.Checkpoint(4), {})
    (tmp_path / "run").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n' if has_steps else "")
    run = api.Run(tmp_path, Fleet(), os.open(tmp_path, os.O_RDONLY), 0)
    assert run.wait(60.0) == code
    command = f"to go on from step 4: python scripts/launch.py --resume --run_dir={tmp_path}"
    assert run.way_on == (command if says else "")
