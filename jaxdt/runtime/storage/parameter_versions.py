"""A stage's parameters and optimizer state; with delayed updates also the parameters of the version before.

With delayed updates a step may still run when the next version of the parameters exists. The step goes on with the
version that it began with, so two versions are held. A state that moves to another peer or to a disk contains both:
otherwise the run would continue with other numbers.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxdt.model.stage import StageFunctions
from jaxdt.spec.delay import Delay


class ParameterVersions:
    """The parameters of one stage. Version 0 is drawn from `seed`."""

    def __init__(self, functions: StageFunctions, delay: Delay, seed: int):
        self._functions = functions
        self._delay = delay
        self._seed = seed
        self.initialize()

    def initialize(self) -> None:
        """Set the initial parameters, version 0."""
        params = self._functions.init(self._seed)
        self._set(0, params, self._functions.init_optimizer(params), params)

    def put(self, version: int, state: tuple[Any, ...]) -> None:
        """Set a state that was read from a disk or fetched from a peer. If it lacks the parameters of the version
        before, its own parameters take their place."""
        params, opt_state, *before = (self._functions.place(tree) for tree in state)
        self._set(version, params, opt_state, before[0] if before else params)

    def _set(self, version: int, params: Any, opt_state: Any, before: Any) -> None:
        self.version = version
        self.params = params
        self.opt_state = opt_state
        self.before = before if self._delay.steps else None

    @property
    def state(self) -> tuple[Any, ...]:
        """(params, opt_state), and with delayed updates (params, opt_state, params of the version before)."""
        return (self.params, self.opt_state) + ((self.before,) if self._delay.steps else ())

    def of(self, step: int) -> Any:
        """The parameters with which a step computes."""
        version = self._delay.version_of(step)
        if version == self.version:
            return self.params
        if version != self.version - 1 or self.before is None:
            raise RuntimeError(f"step {step} computes with version {version}, held is {self.version}")
        return self.before

    def update(self, vectors: Mapping[str, Any], scale: float) -> None:
        """Make the next version from the summed gradients of the sync groups, times `scale`. Without vectors the update
        is skipped: the next version has the same parameters."""
        before = self.params
        if vectors:
            params, opt_state = self._functions.update(self.params, self.opt_state, vectors, np.float32(scale))
            self.params, self.opt_state = jax.block_until_ready((params, opt_state))
        self._set(self.version + 1, self.params, self.opt_state, before)
