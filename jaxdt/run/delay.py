"""Delayed parameter updates: which version of the parameters a step computes with (SWARM App. E).

Without delay step k computes with version k, which contains the updates 0..k-1. With a delay of one step it computes
with version k-1, so that averaging and update of step k-1 run meanwhile: theta_{k+2} = theta_{k+1} + U(g_{k+1}), where
g_{k+1} was computed at theta_k. The first steps may compute without delay.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Delay:
    """`steps` of delay, 0 or 1, from step `after_steps` on."""

    steps: int = 0
    after_steps: int = 0

    def version_of(self, step: int) -> int:
        """The version that a step computes with."""
        return max(0, step - self.steps) if step >= self.after_steps else step

    def computed_with(self, version: int) -> int:
        """The first step that computes with a version."""
        return version if version < self.after_steps else version + self.steps

    def open(self, version: int) -> tuple[int, ...]:
        """The steps that may be under way at a peer with so many updates seen."""
        return tuple(step for step in range(version, version + 1 + self.steps) if self.version_of(step) <= version)


NO_DELAY = Delay()
