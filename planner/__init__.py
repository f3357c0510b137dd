"""The planner decides which device of a network holds which stage of a model.

    import planner

    network = planner.load_network("network.json")
    job = planner.Job(planner.ByteSizes(c_dp_bytes=65e7, c_pp_bytes=47e7), n_stages=8, n_pipelines=8)
    result = planner.solve(network, job, planner.Stop(time_s=10))
    print(planner.explain(result.plan, network))
    planner.save_plan(result.plan, "plan.json")

The names of __all__ are its interface. Each is imported when it is first used, so that `import planner` and reading a
plan need no solver. `python -m planner` is the command line over it.

Folders, from the bottom up: model (data), cost (Eq. 1-4), search (plans by cost), step_time (plans by simulated step),
report (what is shown of a plan), api (the functions of this interface), commands (the command line). A folder may
import those before it, and all may import jaxdt.run; step_time also imports jaxdt.sim. Nothing here imports jax or the
runtime.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdt.run.errors import BadInput
    from jaxdt.run.network import load as load_network
    from jaxdt.run.plan import load as load_plan
    from jaxdt.run.profile import load as load_profile
    from planner.api.job import (
        ByteSizes,
        Job,
        Start,
        StepOptions,
        profile_of_flops,
        profile_of_kinds,
        run_of_model,
        run_of_profile,
    )
    from planner.api.pareto import pareto
    from planner.api.replan import Replan, replan
    from planner.api.solve import solve
    from planner.api.unchanged import unchanged_s
    from planner.model.change import Change
    from planner.model.constraints import Constraints, RegionLimit, SeatRule, load_constraints
    from planner.model.pool import PoolOptions
    from planner.model.prices import PriceRules, StepPrice
    from planner.model.stop import Stop
    from planner.report.explain import explain
    from planner.report.plan_file import save_plan
    from planner.report.result import Progress, Result, Statistics
    from planner.report.suggest import BoundaryCodec, FasterLinks, Shape, Suggestion, Swap
    from planner.report.verify import verify

# Name -> (module, name there)
_PLACES = {
    "BadInput": ("jaxdt.run.errors", "BadInput"),
    "BoundaryCodec": ("planner.report.suggest", "BoundaryCodec"),
    "ByteSizes": ("planner.api.job", "ByteSizes"),
    "Change": ("planner.model.change", "Change"),
    "Constraints": ("planner.model.constraints", "Constraints"),
    "FasterLinks": ("planner.report.suggest", "FasterLinks"),
    "Job": ("planner.api.job", "Job"),
    "PoolOptions": ("planner.model.pool", "PoolOptions"),
    "PriceRules": ("planner.model.prices", "PriceRules"),
    "Progress": ("planner.report.result", "Progress"),
    "RegionLimit": ("planner.model.constraints", "RegionLimit"),
    "Replan": ("planner.api.replan", "Replan"),
    "Result": ("planner.report.result", "Result"),
    "SeatRule": ("planner.model.constraints", "SeatRule"),
    "Shape": ("planner.report.suggest", "Shape"),
    "Start": ("planner.api.job", "Start"),
    "Statistics": ("planner.report.result", "Statistics"),
    "StepOptions": ("planner.api.job", "StepOptions"),
    "StepPrice": ("planner.model.prices", "StepPrice"),
    "Stop": ("planner.model.stop", "Stop"),
    "Suggestion": ("planner.report.suggest", "Suggestion"),
    "Swap": ("planner.report.suggest", "Swap"),
    "explain": ("planner.report.explain", "explain"),
    "load_constraints": ("planner.model.constraints", "load_constraints"),
    "load_network": ("jaxdt.run.network", "load"),
    "load_plan": ("jaxdt.run.plan", "load"),
    "load_profile": ("jaxdt.run.profile", "load"),
    "pareto": ("planner.api.pareto", "pareto"),
    "profile_of_flops": ("planner.api.job", "profile_of_flops"),
    "profile_of_kinds": ("planner.api.job", "profile_of_kinds"),
    "replan": ("planner.api.replan", "replan"),
    "run_of_model": ("planner.api.job", "run_of_model"),
    "run_of_profile": ("planner.api.job", "run_of_profile"),
    "save_plan": ("planner.report.plan_file", "save_plan"),
    "solve": ("planner.api.solve", "solve"),
    "unchanged_s": ("planner.api.unchanged", "unchanged_s"),
    "verify": ("planner.report.verify", "verify"),
}
__all__ = [
    "BadInput",
    "BoundaryCodec",
    "ByteSizes",
    "Change",
    "Constraints",
    "FasterLinks",
    "Job",
    "PoolOptions",
    "PriceRules",
    "Progress",
    "RegionLimit",
    "Replan",
    "Result",
    "SeatRule",
    "Shape",
    "Start",
    "Statistics",
    "StepOptions",
    "StepPrice",
    "Stop",
    "Suggestion",
    "Swap",
    "explain",
    "load_constraints",
    "load_network",
    "load_plan",
    "load_profile",
    "pareto",
    "profile_of_flops",
    "profile_of_kinds",
    "replan",
    "run_of_model",
    "run_of_profile",
    "save_plan",
    "solve",
    "unchanged_s",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    module, there = _PLACES[name]
    return getattr(importlib.import_module(module), there)


def __dir__() -> list[str]:
    return [*__all__, "__all__"]
