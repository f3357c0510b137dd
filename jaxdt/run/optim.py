"""The optimizers by name, and their options, checked field by field. The update rules are in jaxdt.model.optim, in a
table of the same names."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxdt.run.errors import BadInput, require_one_of


@dataclass(frozen=True)
class OptimizerSpec:
    """The facts about an optimizer that need no arithmetic: how many moments it holds per parameter, and whether it
    reads gradient_frac and second_moment."""

    n_moments: int
    reads_gradient_frac: bool = False
    reads_second_moment: bool = False


@dataclass(frozen=True)
class LrScheduleSpec:
    """Whether a schedule of learning rates falls until decay_steps."""

    decays: bool


OPTIMIZERS = {
    "adamw": OptimizerSpec(n_moments=2, reads_gradient_frac=True, reads_second_moment=True),
    "lamb": OptimizerSpec(n_moments=2),
    "sgd": OptimizerSpec(n_moments=1),
}
SECOND_MOMENTS = {"own": 0, "corrected": 1, "legacy": 1}  # name -> moments that it takes beside the optimizer's own
LR_SCHEDULES = {
    "constant": LrScheduleSpec(decays=False),
    "cosine": LrScheduleSpec(decays=True),
    "linear": LrScheduleSpec(decays=True),
}


@dataclass(frozen=True)
class OptimConfig:
    """`lr` climbs linearly over `warmup_steps` updates, then stays or falls to `final_lr_frac * lr` at update
    `decay_steps` (counted from the first update, warm-up included; a constant schedule does not read it).
    `momentum` is for sgd, `b1`, `b2` and `eps` for the others. `gradient_frac` is for adamw: this share of an update is
    the newest gradient by itself, the rest is the running mean. With a larger `b1` it steadies delayed updates.
    `second_moment` is for adamw where replicas average parameters and keep their own moments (sync.kind groups). Its
    variance is then that of one pipeline's gradient, not of the mean over all: "corrected" divides the variance by the
    number of pipelines (SDPipe, Sec. 4), "legacy" does so without the bias correction that its public code leaves out.
    `clip_norm` bounds the norm of the whole model's gradient, 0 turns it off. No single stage can apply it, so it
    reaches `update` inside `scale`."""

    name: str = "adamw"
    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    gradient_frac: float = 0.0
    second_moment: str = "own"
    weight_decay: float = 0.0
    momentum: float = 0.9
    warmup_steps: int = 0
    decay_steps: int = 0
    lr_schedule: str = "constant"
    final_lr_frac: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        require_one_of("optim.name", self.name, tuple(OPTIMIZERS))
        require_one_of("optim.lr_schedule", self.lr_schedule, tuple(LR_SCHEDULES))
        for field in ("lr", "eps"):
            self._check_number(field, "a number > 0", lambda v: v > 0)
        for field in ("b1", "b2", "momentum", "gradient_frac"):
            self._check_number(field, "a number in [0, 1)", lambda v: 0 <= v < 1)
        if self.gradient_frac and not OPTIMIZERS[self.name].reads_gradient_frac:
            raise BadInput(f"optim.gradient_frac: got {self.gradient_frac}, expected 0 with optim.name {self.name}")
        self._check_second_moment()
        for field in ("weight_decay", "clip_norm"):
            self._check_number(field, "a number >= 0", lambda v: v >= 0)
        self._check_number("final_lr_frac", "a number in [0, 1]", lambda v: 0 <= v <= 1)
        for field in ("warmup_steps", "decay_steps"):
            value: object = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise BadInput(f"optim.{field}: got {value!r}, expected an integer >= 0")
        if LR_SCHEDULES[self.lr_schedule].decays and self.decay_steps <= self.warmup_steps:
            raise BadInput(
                f"optim.decay_steps: got {self.decay_steps}, the {self.lr_schedule} schedule needs more than "
                f"optim.warmup_steps, {self.warmup_steps}"
            )

    @property
    def n_moments(self) -> int:
        """Moments per parameter."""
        return OPTIMIZERS[self.name].n_moments + SECOND_MOMENTS[self.second_moment]

    @property
    def state_name(self) -> str:
        """A name for the contents of its state. Two optimizers with the same name can go on from each other's state."""
        return self.name + (" with a mean of b2" if SECOND_MOMENTS[self.second_moment] else "")

    def _check_second_moment(self) -> None:
        require_one_of("optim.second_moment", self.second_moment, tuple(SECOND_MOMENTS))
        if SECOND_MOMENTS[self.second_moment]:
            expected = f"optim.second_moment: got {self.second_moment}, expected own with optim."
            if not OPTIMIZERS[self.name].reads_second_moment:
                raise BadInput(f"{expected}name {self.name}")
            if self.gradient_frac:
                raise BadInput(f"{expected}gradient_frac {self.gradient_frac}")

    def _check_number(self, field: str, expected: str, holds: Callable[[float], bool]) -> None:
        value: Any = getattr(self, field)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not holds(value):
            raise BadInput(f"optim.{field}: got {value!r}, expected {expected}")
