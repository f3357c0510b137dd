"""Machines of a stage as the planner of pools places them: the cluster of Figure 5, simulated."""

from dataclasses import dataclass
from functools import lru_cache

from experiments.reproduce.hybrid_ps_parts.instances import Cluster

from jaxdt.run.network import Link
from planner.model.pool import PoolOptions
from planner.model.pool_problem import PoolProblem
from planner.search.pool.levels import search
from planner.search.pool.stages import PoolStage

TASK = 2  # units of a task


@dataclass(frozen=True)
class Planned:
    """A cluster in `n_stages` stages by the planner, whose roles, layers and workers it has. A task is TASK units."""

    cluster: Cluster
    n_stages: int

    @property
    def n_microbatches(self) -> int:
        return self._problem.n_units // TASK

    @property
    def boundary_bytes(self) -> int:
        return round(TASK * self._problem.unit_bytes)

    def stage(self, stage: int) -> list[int]:
        """The machines of a stage: servers, then workers, each the fastest first."""
        placed = self._stages[stage]
        return [d for row in (placed.servers, placed.workers) for d in sorted(row, key=lambda d: (self.stage_s(d), d))]

    def stage_s(self, device: int) -> float:
        """Seconds of a task in its stage: forward, recomputation and backward."""
        placed = next(stage for stage in self._stages if device in (*stage.servers, *stage.workers))
        return TASK * sum(self._problem.work.unit_s(device, placed.lo, placed.hi))

    def link(self, src: int, dst: int) -> Link:
        return self._problem.network.link(src, dst)

    def may_fail(self, n: int) -> list[int]:
        """The first n unreliable machines."""
        return [d for d in range(len(self._problem.index)) if not self._problem.reliable[d]][:n]

    @property
    def _problem(self) -> PoolProblem:
        return _problem_of(self.cluster)

    @property
    def _stages(self) -> tuple[PoolStage, ...]:
        return _stages_of(self.cluster, self.n_stages)


@lru_cache
def _problem_of(cluster: Cluster) -> PoolProblem:
    return cluster.problem


@lru_cache
def _stages_of(cluster: Cluster, n_stages: int) -> tuple[PoolStage, ...]:
    staged = search(_problem_of(cluster), PoolOptions("paper"), n_stages, 0).chosen.staged
    assert staged is not None  # without a limit of memory
    return staged.stages
