"""The config of a config file, as an object to change, and the fields of any config object as plain data."""

import runpy
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, unreadable

Config = ConfigDict | RunConfig | Mapping[str, Any]


def load_config(path: str | Path) -> ConfigDict:
    """The config that get_config() of a configs/*.py file returns, locked: to set a name that does not exist is an
    AttributeError. BadInput if the file cannot be read or fails."""
    try:
        Path(path).open().close()  # runpy takes a folder for a package
        config = runpy.run_path(str(path))["get_config"]()
    except OSError as error:
        raise unreadable(path, error) from None
    except KeyError:
        raise BadInput(f"{path}: has no function get_config(), expected one that returns a ConfigDict") from None
    except Exception as error:  # a config file is a program, which may raise anything
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise BadInput(f"{at.filename}:{at.lineno}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(config, ConfigDict):
        raise BadInput(f"{path}: get_config() returned {config!r:.40}, expected a ConfigDict")
    return config.lock()


def fields_of(config: Config) -> dict[str, Any]:
    """The fields of a config object as nested plain data."""
    if isinstance(config, RunConfig):
        return serialize.write(config)
    return config.to_dict() if isinstance(config, ConfigDict) else dict(config)
