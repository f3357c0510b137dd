"""A stage's parameters and optimizer state; with delayed updates also the parameters of the version before.

A step that is still under way when its successor's version is there goes on with its own: so two versions are held, and
a state that moves to another peer or to a disk has both, or what follows would be another run.
"""

from typing import Any

import jax
import numpy as np

from jaxdt.model.stage import StageFunctions
from jaxdt.spec.delay import Delay


class ParameterVersions:
    """Of one stage, beginning with version 0 as `seed` says. `state` is (params, opt_state), and with a delay (params,
    opt_state, params of the version before)."""

    def __init__(self, functions: StageFunctions, delay: Delay, seed: int):
        self._functions, self._delay, self._seed = functions, delay, seed
        self.begin()

    def begin(self) -> None:
        """The initial parameters."""
        params = self._functions.init(self._seed)
        self._set(0, params, self._functions.init_optimizer(params), params)

    def put(self, version: int, state: tuple[Any, ...]) -> None:
        """A state from a disk or a peer. Without parameters of the version before, steps under way begin with these."""
        params, opt_state, *before = (self._functions.place(tree) for tree in state)
        self._set(version, params, opt_state, before[0] if before else params)

    def _set(self, version: int, params: Any, opt_state: Any, before: Any) -> None:
        self.version, self.params, self.opt_state = version, params, opt_state
        self.before = before if self._delay.steps else None

    @property
    def state(self) -> tuple[Any, ...]:
        return (self.params, self.opt_state) + ((self.before,) if self._delay.steps else ())

    def of(self, step: int) -> Any:
        """The parameters that a step computes with."""
        version = self._delay.version_of(step)
        if version == self.version:
            return self.params
        if version != self.version - 1 or self.before is None:
            raise RuntimeError(f"step {step} computes with version {version}, held is {self.version}")
        return self.before

    def update(self, vectors: dict[str, np.ndarray], scale: float) -> None:
        """The next version, by the summed gradients of the sync groups, times `scale`; none: an update that is skipped
        changes nothing."""
        before = self.params
        if vectors:
            params, opt_state = self._functions.update(self.params, self.opt_state, vectors, np.float32(scale))
            self.params, self.opt_state = jax.block_until_ready((params, opt_state))
        self._set(self.version + 1, self.params, self.opt_state, before)
