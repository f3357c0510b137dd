"""A resumed run keeps flags with which it was launched."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxdt.api.launch import LaunchOptions
from jaxdt.cli import resume_flags
from jaxdt.run.config import default_plan, parse
from jaxdt.run.errors import BadInput
from jaxdt.run.run_folder import LAUNCH
from jaxdt.runtime import run_dir as run_dirs

CONFIG = parse(
    {"model": {"preset": "debug", "vocab_size": 16}, "plan": {"stages": 2, "pipelines": 2, "microbatches": 2}}
)
EMULATED = LaunchOptions(emulate="/a/network.json")


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run that was launched with an emulated network."""
    run_dirs.write_job(tmp_path / "run", CONFIG, default_plan(CONFIG))
    resume_flags.write_json(tmp_path / "run" / LAUNCH, {"emulate": "/a/network.json"})
    return tmp_path / "run"


def test_a_resumed_run_has_the_config_plan_and_network_of_the_run(run_dir):
    argv = ["launch.py", "--resume", f"--run_dir={run_dir}", "--config.train.steps=9"]
    own = [f"--config={run_dir}/config.py", f"--plan={run_dir}/plan.json"]
    assert resume_flags.with_flags_of_run(argv) == [argv[0], *own, *argv[1:]]
    assert resume_flags.completed(run_dir, LaunchOptions(resume=True)) == replace(EMULATED, resume=True)


@pytest.mark.parametrize("given", [["--config=configs/quickstart.py"], ["--config", "configs/quickstart.py"]])
def test_a_config_file_is_not_read_and_that_is_said(run_dir, given, capsys):
    argv = ["launch.py", *given, "--resume", "--run_dir", str(run_dir)]
    completed = resume_flags.with_flags_of_run(argv)
    assert [word for word in completed if "quickstart" in word] == [] and "--config" not in completed
    assert completed[-3:] == ["--resume", "--run_dir", str(run_dir)]
    said = f"--resume: configs/quickstart.py is not read, the run continues with {run_dir}/config.json\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("given", "replaces"),
    [("--config.plan.stages=1", "--plan="), ("--plan=c.json", "--plan=")],
)
def test_what_is_given_anew_replaces_what_the_run_had(run_dir, given, replaces):
    argv = ["launch.py", "--resume", f"--run_dir={run_dir}", given]
    completed = resume_flags.with_flags_of_run(argv)
    assert [word for word in completed if word.startswith(replaces)] == ([given] if given.startswith(replaces) else [])


@pytest.mark.parametrize("argv", [["--run_dir={}"], ["--resume"], ["--resume=what"]])
def test_other_command_lines_stay_as_they_are(run_dir, argv):
    argv = ["launch.py", *(word.format(run_dir) for word in argv), "--config=x.py"]
    assert resume_flags.with_flags_of_run(argv) == argv


def test_a_folder_without_a_run_is_refused(run_dir):
    with pytest.raises(BadInput, match="--resume: .*none holds no run, expected the folder of one"):
        resume_flags.with_flags_of_run(["launch.py", "--resume", f"--run_dir={run_dir}/none"])


def test_every_field_that_differs_is_named(run_dir):
    config = replace(CONFIG, train=replace(CONFIG.train, steps=7), plan=replace(CONFIG.plan, pipelines=1))
    assert resume_flags.changes(run_dir, CONFIG, default_plan(CONFIG), EMULATED) == []
    assert resume_flags.changes(run_dir, config, default_plan(config), LaunchOptions(emulate="", pin=1)) == [
        "--resume: plan.pipelines is 1, it was 2",
        "--resume: train.steps is 7, it was 100",
        "--resume: the plan has 2 stages on 2 peers, it had 2 stages on 4 peers",
        "--resume: --emulate is not given, it was /a/network.json",
        "--resume: --pin is 1, it was not given",
    ]


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_config_is_refused_in_one_line(run_dir, content):
    (run_dir / "config.json").write_text(content)
    with pytest.raises(BadInput, match="config.json: cannot be read"):
        resume_flags.changes(run_dir, CONFIG, default_plan(CONFIG), EMULATED)


def test_launch_options_are_kept_where_they_are_not_the_default(tmp_path):
    options = LaunchOptions(pin=1, emulate="configs/networks/four_cities.json", overwrite=True)
    resume_flags.save(tmp_path, options)
    kept = json.loads((tmp_path / LAUNCH).read_text())["value"]
    assert kept["pin"] == "1" and kept.keys() == {"pin", "emulate"}
    assert Path(kept["emulate"]) == Path("configs/networks/four_cities.json").resolve()


def test_a_resumed_run_has_the_options_that_it_is_not_given(tmp_path):
    options = LaunchOptions(emulate="/a/network.json", emulate_forward_s=0.02, pin=1, gpus_per_peer="1/2")
    resume_flags.save(tmp_path, options)
    assert resume_flags.completed(tmp_path, LaunchOptions()) == options
    given = LaunchOptions(emulate="", emulate_forward_s=0.0, pin=2, gpus_per_peer="")
    assert resume_flags.completed(tmp_path, given) == given
