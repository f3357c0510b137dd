"""The table of solvers, and what an entry says about its solver.

A solver looks for plans of one Problem, reports them to the Incumbent, and returns when the incumbent is done. To add
one, write a file in this folder that defines a Solver and enter it below; `--solver` and `bench` then know it. The
table imports a solver when its name is used, so that the command line can list solvers without their libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.model.problem import Problem
    from planner.search.incumbent import Incumbent

# name -> module:attribute
SOLVERS = {
    "auto": "planner.search.portfolio:AUTO",
    "evolve": "planner.search.evolve:EVOLVE",
    "types": "planner.search.types_sat:TYPES",
    "exact": "planner.search.exact:EXACT",
    "kl": "planner.search.evolve:KERNIGHAN_LIN",
    "random": "planner.search.random_search:RANDOM",
}


@dataclass(frozen=True)
class Solver:
    """run(problem, incumbent, seed) searches until the incumbent is done. A solver with `max_devices` is for networks
    of at most so many devices. A solver `starts_from_layouts` if regular layouts (planner.search.layouts) are to be
    offered to the incumbent before it runs."""

    run: Callable[[Problem, Incumbent, int], None]
    max_devices: int | None = None
    starts_from_layouts: bool = False


def solver_of(name: str) -> Solver:
    """The entry of a solver, imported now."""
    module, attribute = SOLVERS[name].split(":")
    return getattr(importlib.import_module(module), attribute)
