"""The number of tokens that a sample of a training step has: a pure function of the step.

SWARM's large run lets the length grow linearly, from 256 to 2048 over 12,000 steps (Sec. 4.3). A jitted function
compiles again for every shape, so here the line is rounded to the nearest of few lengths: start, 2 start, 4 start, ...
and the full length, at most ceil(log2(full / start)) + 1 of them. Between two neighbours the line is as long nearer to
one as to the other, so the growth reads as many tokens as it would on the line.

Samples of a short step are short, not padded. There is no mask, a sample's loss is the mean over its tokens as always,
and boundary tensors shrink with the samples. Held-out samples always have the full length.
"""

import bisect
from dataclasses import dataclass


@dataclass(frozen=True)
class SeqLengths:
    """Tokens per sample: `full` from step `growth_steps` on; before that from `start` on the rounded line. Without
    growth `start` and `growth_steps` are 0."""

    full: int
    start: int = 0
    growth_steps: int = 0

    @property
    def rounded(self) -> list[int]:
        """The lengths that occur, rising."""
        doublings = [self.start << i for i in range(self.full.bit_length())] if self.start else []
        return [length for length in doublings if length < self.full] + [self.full]

    def at(self, step: int) -> int:
        """Tokens per sample of a training step; step < 0 counts as the first."""
        if step >= self.growth_steps:
            return self.full
        n, line = self.growth_steps, self.start * self.growth_steps + (self.full - self.start) * max(0, step)
        return min(self.rounded, key=lambda length: (abs(length * n - line), -length))

    def first_steps(self, start: int, end: int) -> list[int]:
        """For each length of the steps start..end-1 the first of these steps that has it."""
        first = [bisect.bisect_left(range(self.growth_steps), length, key=self.at) for length in self.rounded]
        return sorted(step for step in {max(start, step) for step in first} if step < end)
