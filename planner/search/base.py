"""The table of solvers, and what an entry says about its solver.

A solver looks for plans of one Problem, reports them to the Incumbent, and returns when the incumbent is done. A new
solver is one file in this folder and one entry of SOLVERS; `--solver` then knows it. The table imports a solver when
its name is used, so that the command line can list solvers without their libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxdt.run.errors import require_one_of

if TYPE_CHECKING:
    from planner.model.problem import Problem
    from planner.search.incumbent import Incumbent

# Name of a solver -> the module that holds its `ENTRY`, or MODULE:NAME, imported when the solver is used.
SOLVERS: dict[str, str] = {
    "auto": "planner.search.portfolio",
    "evolve": "planner.search.evolve",
    "types": "planner.search.types_sat",
    "exact": "planner.search.exact",
    "kl": "planner.search.evolve:KERNIGHAN_LIN_ENTRY",
    "dtfm": "planner.search.baselines.dtfm",
    "dtfm_kl": "planner.search.baselines.dtfm:KERNIGHAN_LIN_ENTRY",
    "metis_like": "planner.search.baselines.metis_like",
    "amp_like": "planner.search.baselines.amp_like",
    "random": "planner.search.baselines.partitions",
    "block": "planner.search.layouts",
}
# Solvers of pools: their plans have servers and workers, and they choose the number of stages (planner.api.by_pool).
POOL_SOLVERS: dict[str, str] = {"cluster": "planner.search.pool.levels"}


@dataclass(frozen=True)
class SolverEntry:
    """The answers of a solver to the rest of the planner.

    run                  run(problem, incumbent, seed) searches until the incumbent is done
    max_devices          the largest network that the solver is for; None means any
    starts_from_layouts  whether regular layouts (planner.search.layouts) are to be offered before it runs
    honours_constraints  whether it may be asked for where there are constraints (planner.search.seated); its run
                         then gives bounds and starts without them
    keeps_placement      whether its plan is emitted with its own order of stages and matchings instead of the best
    """

    run: Callable[[Problem, Incumbent, int], None]
    max_devices: int | None = None
    starts_from_layouts: bool = False
    honours_constraints: bool = False
    keeps_placement: bool = False


def check_solver(flag: str, name: str) -> None:
    """BadInput for a solver that does not exist, named by the flag that asked for it."""
    require_one_of(f"--{flag}", name, list(SOLVERS))


def solver_entry(name: str) -> SolverEntry:
    """The entry of a solver; BadInput for one that does not exist."""
    check_solver("solver", name)
    module, _, entry = SOLVERS[name].partition(":")
    return getattr(importlib.import_module(module), entry or "ENTRY")
