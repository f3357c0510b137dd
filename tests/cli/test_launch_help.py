"""`launch.py --help` and `--print_config`: all that a user needs, and where each value comes from."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forks import run_scripts

from jaxdt.cli import config_fields, config_sources
from jaxdt.cli.config_sources import DEFAULT, FLAG, RESUME, sourced
from jaxdt.config_file import base_config
from jaxdt.run.config import default_plan, parse
from jaxdt.run.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
import launch
from absl import flags
from jaxdt.cli import config_fields
own = [one.name for module in ("launch", "config_flag")
       for name, of_module in flags.FLAGS.flags_by_module_dict().items() if name.endswith(module) for one in of_module]
own += [one.name for one in flags.FLAGS.get_flags_for_module(launch)]
print(json.dumps([sorted(set(own)), launch.SUBJECTS, config_fields.help_text(launch.__doc__, launch.SUBJECTS)]))
"""


def all_fields(*, family: str = "") -> set[str]:
    """The fields of a config, with the model's of all families or of one."""
    sections = config_fields.sections().items()
    of_others = {name for name, _ in sections if family and name.startswith("model") and family not in name}
    return {one.name for name, kind in sections for one in config_fields.fields_of(kind, name) if name not in of_others}


def test_every_field_has_a_meaning():
    for name, kind in config_fields.sections().items():
        assert [field.name for field in config_fields.fields_of(kind, name) if not field.meaning] == []


def test_the_help_of_launch_shows_every_flag_by_subject_and_every_field():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, check=True)
    own, subjects, text = json.loads(done.stdout)
    assert set(own) == {name for names in subjects.values() for name in names}
    for name in own:
        assert re.search(rf"^  --{name}\b", text, re.MULTILINE), name
    for field in all_fields():
        assert f"  --config.{field}=" in text, field
    assert "--config.train.steps=100" in text and "an integer >= 1" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_help_of_scripts_ends_with_0():
    typed = ["launch --help", "train --help", "coordinate --help", "fleet --help", "fleet --helpfull"]
    scripts = [words.split() for words in typed]
    results = run_scripts([(f"scripts/{script}.py", flag) for script, flag in scripts], ROOT)
    for (script, _), (code, out, error) in zip(scripts, results, strict=True):
        assert (code, error) == (0, "") and f"python scripts/{script}.py" in out
    assert results[0][1].startswith("Start a whole fleet on this machine")
    assert "--config.wiring.kind=fixed" in results[0][1]


# ---------------------------------------------------------------------------------------------- where values come from


def sources(fields, by_flag=(), file_source="config file", plan=None) -> dict[str, tuple[object, str]]:
    config, of_plan = parse(fields.to_dict(), 300), "plan" if plan else None
    given = dict(by_flag=by_flag, file_source=file_source, plan_source=of_plan)
    found = sourced(config, plan or default_plan(config), fields.to_dict(), **given)
    return {one.name: (one.value, one.source) for one in found}


def test_file_flag_preset_and_default_are_told_apart():
    fields = base_config("debug")
    fields.train.steps = 7
    fields.optim.lr = 0.5
    fields.model.d_model = 128
    found = sources(fields, {"optim.lr"})
    assert found["train.steps"] == (7, "config file") and found["optim.lr"] == (0.5, FLAG)
    assert found["train.seed"] == (0, DEFAULT)
    assert found["model.d_model"] == (128, "config file") and found["model.d_ff"] == (512, "4 model.d_model")
    assert found["model.n_heads"] == (4, "preset debug") and found["model.vocab_size"] == (300, "token file")
    assert set(found) == all_fields(family="gpt")


def test_compression_that_the_codec_names_is_said_to_come_from_there():
    fields = base_config("debug")
    fields.plan.stages = 2
    fields.codec = "maxout2+int8"
    found = sources(fields, {"codec"})
    assert found["codec"] == ("int8", FLAG)
    assert found["model.compression"] == ("maxout2", "codec") and found["model.compression_after"] == ([1], "codec")


def test_a_plan_file_decides_its_fields():
    plan = Plan(2, ((0, 1), (1, 2)), ((0,), (1,)), (6,), schedule="gpipe")
    found = sources(base_config("debug"), plan=plan)
    assert found["plan.stages"] == (2, "plan") and found["plan.layers"] == ("1,1", "plan")
    assert found["plan.microbatches"] == (6, "plan") and found["plan.schedule"] == ("gpipe", "plan")
    assert found["train.steps"] == (100, DEFAULT)


def test_a_resumed_run_has_its_values_from_there():
    fields = base_config("debug")
    fields.train.steps = 9
    found = sources(fields, {"train.steps"}, RESUME)
    assert found.pop("train.steps") == (9, FLAG)
    assert {source for _, source in found.values()} == {RESUME}


@pytest.mark.parametrize("value", ["abc", 3, [1, 2]])
def test_the_table_has_a_line_for_each_value(value):
    rows = [config_sources.SourcedValue("a", value, FLAG), config_sources.SourcedValue("long.name", None, DEFAULT)]
    first, second = config_sources.table(rows).splitlines()
    assert first.split("  ")[0] == "a" and first.endswith(f"  {FLAG}") and json.dumps(value) in first
    assert first.index(FLAG) == second.index(DEFAULT)
