"""Weight stashing (PipeDream, Narayanan et al. 2019, Sec. 3.3): a backward computes with its forward's parameters.

Forwards run ahead of backwards, so the parameters change between the two of a step. Each step in flight keeps those
with which its forward computed. They are not copied: an update makes new parameters, and leaves the old ones as they
are.
"""

from typing import Any

from jaxdt.run.work import Work, WorkKind
from jaxdt.runtime.storage.parameter_versions import ParameterVersions


class WeightStash:
    """The parameters of each step between its forward and its backward, at a stage where the forwards of `n_ahead`
    further steps run before a step's backward."""

    def __init__(self, n_ahead: int):
        self.n_ahead = n_ahead
        self._by_step: dict[int, Any] = {}

    def of(self, work: Work, versions: ParameterVersions) -> Any:
        """The parameters with which a Work computes: a forward with the newest ones, whose version is the step's less
        `n_ahead` (at the start of a run the one with which it begins). RuntimeError for a Work out of order."""
        step = work.step
        assert step is not None, "all Work that runs belongs to a step"
        if work.kind == WorkKind.BACKWARD and step in self._by_step and step == versions.version:
            return self._by_step.pop(step)
        if work.kind == WorkKind.FORWARD and versions.version <= step <= versions.version + self.n_ahead:
            self._by_step[step] = versions.params
            return versions.params
        raise RuntimeError(f"{work} is out of order: held is version {versions.version}, stashed {list(self._by_step)}")

    def clear(self) -> None:
        """Drop all stashed versions: nothing is in flight any more."""
        self._by_step.clear()
