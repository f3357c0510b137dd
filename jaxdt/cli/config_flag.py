"""The flag --config=FILE, with --config.FIELD=VALUE for the fields of the config. Needs no jax."""

from collections.abc import Mapping
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxdt.cli import run_inputs, script_main
from jaxdt.cli.run_inputs import RunOptions
from jaxdt.run.errors import BadInput
from jaxdt.runtime.run_job import RunInputs

try:  # this already reads the command line, and the flag files that it names
    CONFIG = config_flags.DEFINE_config_file(
        "config", None, "A configs/*.py file; --config.FIELD=VALUE changes a field."
    )
except flags.CantOpenFlagFileError as error:
    script_main.refuse_flag_file(error)


def is_given() -> bool:
    """Whether the command line names a config file."""
    return not flags.FLAGS["config"].using_default_value


def overrides() -> Mapping[str, Any]:
    """The fields that flags change, by their names."""
    config: Any = flags.FLAGS["config"]  # that of ml_collections
    return config.override_values


def config_dict() -> ConfigDict:
    """The config that the file returns, with the fields that flags have changed."""
    try:
        config = CONFIG.value
        getattr(config, "to_dict", None)  # the placeholder for a missing file raises when an attribute is read
    except OSError as error:
        raise BadInput(script_main.config_file_refusal(error)) from None
    if not isinstance(config, ConfigDict):
        got = "missing" if not is_given() else f"get_config() returned {config!r:.40}"
        expected = "a file whose get_config() returns a ConfigDict, such as --config=configs/quickstart.py"
        raise BadInput(f"--config: {got}, expected {expected}")
    return config


def inputs(options: RunOptions) -> RunInputs:
    """The inputs of a run with this config and these options, checked."""
    return run_inputs.check(config_dict().to_dict(), options)
