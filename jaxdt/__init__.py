"""Decentralized training of GPT models: compiled stages, explicit send and recv, protocols as pure machines.

    import jaxdt

    config = jaxdt.load_config("configs/quickstart.py")
    run = jaxdt.launch(config, "runs/python", jaxdt.LaunchOptions(emulate="configs/networks/four_cities.json"))
    run.wait()
    run.metrics[-1]["loss"]

    network = jaxdt.load_network("configs/networks/four_cities.json")
    print(jaxdt.simulate(config, jaxdt.profile_of_flops(config, 1e12), network))

The names of __all__ are the interface for programs and notebooks. Each is imported when it is first used, so `import
jaxdt` needs neither jax nor ortools, and neither do launch and simulate: jax computes in the processes of a run.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdt.api.config import load_config
    from jaxdt.api.launch import LaunchOptions, Picture, Run, launch, report
    from jaxdt.api.simulate import SimulateOptions, Simulation, profile_of_flops, simulate
    from jaxdt.config_file import base_config
    from jaxdt.run.errors import BadInput
    from jaxdt.run.network import load as load_network
    from jaxdt.run.plan import load as load_plan
    from jaxdt.run.profile import load as load_profile

# Name -> (module, name there)
_PLACES = {
    "BadInput": ("jaxdt.run.errors", "BadInput"),
    "LaunchOptions": ("jaxdt.api.launch", "LaunchOptions"),
    "Picture": ("jaxdt.api.launch", "Picture"),
    "Run": ("jaxdt.api.launch", "Run"),
    "SimulateOptions": ("jaxdt.api.simulate", "SimulateOptions"),
    "Simulation": ("jaxdt.api.simulate", "Simulation"),
    "base_config": ("jaxdt.config_file", "base_config"),
    "launch": ("jaxdt.api.launch", "launch"),
    "load_config": ("jaxdt.api.config", "load_config"),
    "load_network": ("jaxdt.run.network", "load"),
    "load_plan": ("jaxdt.run.plan", "load"),
    "load_profile": ("jaxdt.run.profile", "load"),
    "profile_of_flops": ("jaxdt.api.simulate", "profile_of_flops"),
    "report": ("jaxdt.api.launch", "report"),
    "simulate": ("jaxdt.api.simulate", "simulate"),
}
__all__ = [
    "BadInput",
    "LaunchOptions",
    "Picture",
    "Run",
    "SimulateOptions",
    "Simulation",
    "base_config",
    "launch",
    "load_config",
    "load_network",
    "load_plan",
    "load_profile",
    "profile_of_flops",
    "report",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'jaxdt' has no attribute {name!r}")
    module, there = _PLACES[name]
    return getattr(importlib.import_module(module), there)


def __dir__() -> list[str]:
    return [*__all__, "__all__"]
