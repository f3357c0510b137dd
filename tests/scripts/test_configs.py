"""The files in configs/: each parses, and the reference for comparisons of loss cannot change by itself."""

import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from jaxdt import config_file
from jaxdt.run import config as configs
from jaxdt.run.model import options_class

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# The groups of fields that decide the losses of a run, and further fields that do.
GROUPS = ("model", "data", "init", "plan", "train", "optim")
FIELDS = ("codec", "error_feedback", "dtype", "remat")


def module_of(name: str):
    spec = importlib.util.spec_from_file_location(f"configs_{name}", CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_config(name: str) -> configs.RunConfig:
    data = module_of(name).get_config().to_dict()
    data.pop("ablation", None)
    return configs.parse(data, 256)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_every_config_parses_and_says_how_to_use_it(path):
    config = run_config(path.stem)
    configs.check_plan(config, configs.default_plan(config))
    head = module_of(path.stem).__doc__
    assert f"configs/{path.name}" in head and "Hardware:" in head and "    python scripts/" in head


def test_adpsgd_by_who_comes_first_is_preduce_with_groups_of_two():
    assert module_of("adpsgd").get_config("first_come").to_dict() == module_of("preduce").get_config().to_dict()


def test_the_reference_has_the_model_of_the_baseline_and_a_longer_schedule():
    reference, baseline = run_config("reference_2000"), run_config("baseline")
    assert reference.model == baseline.model
    assert (reference.train.steps, reference.optim.decay_steps) == (2000, 2000)
    assert reference.plan == baseline.plan and reference.data == baseline.data
    assert reference.train.microbatch_size == baseline.train.microbatch_size


def test_the_reference_inherits_nothing_that_decides_the_losses(monkeypatch):
    """With a base config whose fields are all unset, none of these is unset afterwards."""
    module = module_of("reference_2000")

    def unset_config(preset: str) -> ConfigDict:
        base = config_file.base_config(preset).to_dict()
        unset = {name: dict.fromkeys(value) if isinstance(value, dict) else None for name, value in base.items()}
        return ConfigDict(unset, type_safe=False)

    monkeypatch.setattr(module, "base_config", unset_config)
    config = module.get_config()
    missing = [f"{group}.{name}" for group in GROUPS for name, value in config[group].items() if value is None]
    missing += [name for name in FIELDS if config[name] is None]
    own = {f"model.{field.name}" for field in fields(options_class("gpt"))}
    assert {name for name in missing if name in own or not name.startswith("model.")} == set()
    assert set(configs.RunConfig.__dataclass_fields__) - {*GROUPS, *FIELDS} == {"wiring", "sync", "net", "platform"}
    assert {field.name for field in fields(configs.TrainConfig)} == set(config.train)
