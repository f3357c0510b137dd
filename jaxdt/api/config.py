"""The config of a config file, as an object to change, and the fields of any config object as plain data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxdt.run import config as configs
from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput

Config = ConfigDict | RunConfig | Mapping[str, Any]


def load_config(path: str | Path) -> ConfigDict:
    """The config that get_config() of a configs/*.py file returns, locked: to set a name that does not exist is an
    AttributeError. BadInput if the file cannot be read or fails."""
    config = configs.returned_by(path)
    if not isinstance(config, ConfigDict):
        raise BadInput(f"{path}: get_config() returned {config!r:.40}, expected a ConfigDict")
    return config.lock()


def fields_of(config: Config) -> dict[str, Any]:
    """The fields of a config object as nested plain data."""
    if isinstance(config, RunConfig):
        return serialize.write(config)
    return config.to_dict() if isinstance(config, ConfigDict) else dict(config)
