"""Models of one's own on several hosts: each needs the files of the module, and those of the run."""

import shutil
import subprocess
import sys

import pytest
from fleets import ROOT

from jaxdt.api import launch as api
from jaxdt.api.config import load_config
from jaxdt.run.errors import BadInput

CONFIG = """
from jaxdt.config_file import base_config


def get_config():
    config = base_config()
    config.model.family = "my_models.tiny:build"
    config.data.seq_len = 16
    config.plan.stages = 2
    return config
"""
TINY = """
import flax.linen as nn

from jaxdt.model.own_model import Parts
from my_models import blocks


def build(options):
    vocab_size = options["vocab_size"]
    return Parts(nn.Embed(vocab_size, 8), [blocks.block()] * 2, nn.Dense(vocab_size), vocab_size)
"""
BLOCKS = "import flax.linen as nn\n\n\ndef block():\n    return nn.Dense(8)\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a module and a config, which is the current one."""
    folder = tmp_path / "home"
    (folder / "my_models").mkdir(parents=True)
    (folder / "my_models" / "tiny.py").write_text(TINY)
    (folder / "my_models" / "blocks.py").write_text(BLOCKS)
    (folder / "config.py").write_text(CONFIG)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the current folder is put there
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_models"]:
        del sys.modules[name]


def started(script, *flags, cwd):
    command = [sys.executable, str(ROOT / "scripts" / script), *flags]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)


def test_each_host_is_told_the_files_and_refused_without_them(home):
    job = home.parent / "job"
    emitted = started("launch.py", "--config=config.py", f"--emit={job}", "--hosts=10.0.0.1,10.0.0.2", cwd=home)
    needs = [line for line in emitted.stdout.splitlines() if " needs: " in line]
    assert len(needs) == 2, emitted.stderr
    assert all("my_models/tiny.py my_models/blocks.py" in line for line in needs)

    host = home.parent / "host"
    host.mkdir()
    flags = [f"--flagfile={job / 'host_1.flags'}", "--token=", "--allow_plaintext"]
    lacks = started("train.py", *flags, cwd=host)
    assert lacks.returncode == 2 and lacks.stderr.splitlines() == [
        "model.family: my_models.tiny:build: there is no module my_models.tiny here, expected "
        f"my_models/tiny.py in the folder in which this process was started ({host}), or in one of PYTHONPATH"
    ]
    shutil.copytree(home / "my_models", host / "my_models")
    (host / "my_models" / "blocks.py").write_text(BLOCKS.replace("Dense(8)", "Dense(8, use_bias=True)"))
    (differs,) = started("train.py", *flags, cwd=host).stderr.splitlines()
    assert "model.family: my_models.tiny:build has another source here" in differs
    assert differs.endswith("copy my_models/tiny.py my_models/blocks.py from a host that has it")


def test_a_run_is_resumed_with_its_own_source_unless_a_person_says_otherwise(home):
    run = api.check(load_config(home / "config.py"), api.LaunchOptions())
    resumed = api.LaunchOptions(resume=True)
    assert api.check(run.config, resumed).config == run.config
    (home / "my_models" / "blocks.py").write_text(f"# another one\n{BLOCKS}")
    with pytest.raises(BadInput, match=r"another source here \((\w+)\) .* --config.model.source=\1$") as refused:
        api.check(run.config, resumed)
    fields = api.fields_of(run.config)
    fields["model"] = {**fields["model"], "source": str(refused.value).rpartition("=")[2]}
    changed = api.check(fields, resumed).config
    assert changed.model.facts == run.config.model.facts and changed.fingerprint != run.config.fingerprint
